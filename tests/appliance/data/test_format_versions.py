"""Formats of a data directory: the table agrees with the owners of the formats, and a directory of
a later version is refused.
"""

from __future__ import annotations

import logging
import pathlib

import pytest

from appliance.catalog import database
from appliance.data import format_versions
from appliance.data.directory_errors import DataDirectoryError
from appliance.data.format_versions import FORMATS, FORMATS_FILE, changes, record
from appliance.groups.store import schema
from tailrace.format.directory import delay_files, partition_metadata
from tailrace.format.record_batch import batch_header
from tailrace.format.segments import segment_index
from tailrace.format.segments import transaction_index as transactions


def test_the_table_has_the_numbers_of_the_owners() -> None:
    assert {
        "partition.json": max(partition_metadata.READ_VERSIONS),
        "batch header": batch_header.NEWEST_BATCH_VERSION,
        "index": segment_index.INDEX_VERSION,
        "transaction index": transactions.TRANSACTION_INDEX_VERSION,
        "delayed records": max(delay_files.READ_VERSIONS),
        "coordinator.db": database.SCHEMA_VERSION,
        "groups.db": schema.SCHEMA_VERSION,
    } == FORMATS


def test_a_later_format_is_named_before_it_is_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path)
    assert changes(path) == []
    record(path)
    assert changes(path) == []
    monkeypatch.setattr(format_versions, "FORMATS", {**FORMATS, "index": 9, "new.db": 1})
    monkeypatch.setattr(format_versions, "__version__", "9.9")
    assert [change._asdict() for change in changes(path)] == [
        {"name": "index", "old": FORMATS["index"], "new": 9}
    ]
    with caplog.at_level(logging.INFO):
        record(path)
    assert f"name='index' from={FORMATS['index']} to=9" in caplog.text
    monkeypatch.undo()
    with pytest.raises(
        DataDirectoryError, match=r"by Tailrace 9\.9.* index 9 \(known here: 2\), new.db 1"
    ):
        record(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 100])
def test_a_damaged_record_is_made_again(tmp_path: pathlib.Path, content: bytes) -> None:
    (tmp_path / FORMATS_FILE).write_bytes(content)
    record(str(tmp_path))
    assert (tmp_path / FORMATS_FILE).stat().st_size > 100
    assert changes(str(tmp_path)) == []
