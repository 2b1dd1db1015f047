"""Queries of the page that ask for more than the console gives: ended, and told why."""

from __future__ import annotations

import subprocess

import pytest

from appliance.observe.console import sql_queries
from appliance.observe.console.sql_queries import OUTPUT_MAX_BYTES, SqlQueries
from tailrace.core.errors import InvalidRequestError, RequestTimeoutError
from tailrace.embedded_appliance import EmbeddedAppliance


def test_a_result_is_read_no_further_than_its_bound(
    appliance: EmbeddedAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand rows of a megabyte each would fill the console's memory."""
    lengths, read = [], sql_queries._read

    def noted(process: subprocess.Popen[bytes], end_s: float) -> tuple[bytes, bytes]:
        output, errors = read(process, end_s)
        lengths.append(len(output))
        return output, errors

    monkeypatch.setattr(sql_queries, "_read", noted)
    with pytest.raises(InvalidRequestError, match="more than 8 MiB"):
        SqlQueries().run(appliance.address, "select repeat('x', 1000000) from range(1000)")
    assert OUTPUT_MAX_BYTES < lengths[0] <= OUTPUT_MAX_BYTES + (1 << 20)


def test_rows_that_do_not_fit_into_memory_end_their_query_alone(
    appliance: EmbeddedAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_queries, "DATA_MAX_BYTES", 1 << 30)
    query = "select repeat('x', 100000000) || number from range(100) as t(number)"
    with pytest.raises((InvalidRequestError, RequestTimeoutError)):
        SqlQueries().run(appliance.address, query)


def test_a_query_beyond_its_time_is_ended(
    appliance: EmbeddedAppliance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql_queries, "TIMEOUT_S", 0.01)
    with pytest.raises(RequestTimeoutError, match="took more than"):
        SqlQueries().run(appliance.address, "select 1")
