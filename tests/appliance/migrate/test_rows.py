"""Rows on their way: which record is too large, and the frame that they become."""

from __future__ import annotations

import pytest

from appliance.migrate.clusters.tailrace_target import frame_of
from appliance.migrate.rows import HEADER_BYTES, Rows, size_of
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.schema import DEFAULT_SCHEMA, HEADER_TYPE

Headers = list[list[tuple[str, bytes | None]] | None]
KEYS, VALUES = [b"kk", None, b"k", b""], [b"v" * 5, b"v" * 9, None, b"v"]
HEADERS: Headers = [None, [], [("a", None), ("", b"xy")], [("ü", b"")]]


def rows_with(headers: Headers | None) -> Rows:
    return Rows(
        TopicPartition("t", 0), range(4), [5, 6, 7, 8], KEYS, VALUES, headers,
        size_of(KEYS, VALUES),
    )  # fmt: skip


@pytest.mark.parametrize("headers", [None, HEADERS])
def test_the_first_record_over_a_limit_is_found_whatever_the_limit(headers: Headers | None) -> None:
    sizes = [7, 9, 1, 1]
    if headers is not None:
        sizes = [7, 9, 1 + (1 + HEADER_BYTES) + (2 + HEADER_BYTES), 1 + (1 + HEADER_BYTES)]
    for limit in range(100):
        over = [(row, size, limit) for row, size in enumerate(sizes) if size > limit]
        assert rows_with(headers).first_over(limit) == (over[0] if over else None)


def test_rows_become_a_frame_of_the_same_records() -> None:
    frame = frame_of(rows_with(HEADERS))
    frame.validate(full=True)
    assert frame.schema == DEFAULT_SCHEMA
    found = frame.to_pydict()
    assert (found["key"], found["value"]) == (KEYS, VALUES)
    assert [stamp.microsecond for stamp in found["timestamp"]] == [5_000, 6_000, 7_000, 8_000]
    assert found["headers"] == [
        None, None, [{"key": "a", "value": None}, {"key": "", "value": b"xy"}],
        [{"key": "ü", "value": b""}],
    ]  # fmt: skip
    assert frame.schema.field("headers").type == HEADER_TYPE
