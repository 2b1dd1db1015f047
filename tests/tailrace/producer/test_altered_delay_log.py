"""Rows for a topic whose delay log a front shows as altered already, and the topic not yet: the
partitions of the topic may be on a disk that takes its time.
"""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
import pytest

from tailrace.batch import frames
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import SchemaMismatchError
from tailrace.format.schema import delay_schema, to_message
from tailrace.producer.record_validation import checked_row

FIRST = pa.schema([("id", pa.int32())])
SECOND = pa.schema([("id", pa.int32()), ("name", pa.utf8()), ("old", pa.utf8())])
THIRD = pa.schema(
    [
        ("id", pa.int64()),
        pa.field("title", pa.utf8(), metadata={"tailrace.alias": "name"}),
        pa.field("price", pa.float64(), metadata={"tailrace.default": "1.5"}),
    ]
)


def encoded(schema: pa.Schema) -> str:
    return base64.b64encode(to_message(schema)).decode()


@pytest.fixture
def info() -> TopicInfo:
    """The topic has two versions. Its delay log, which has delays since the second, a third."""
    described: dict[str, Any] = {
        "name": "t", "topic_id": "00" * 16, "version": 1, "typed": True, "settings": {},
        "partitions": [{}], "schema_id": 2, "schema": encoded(SECOND), "schema_ids": [1, 2],
        "older_schemas": {"1": encoded(FIRST)},
        "delay_log": {
            "topic_id": "01" * 16, "schema_id": 5, "schema": encoded(delay_schema(THIRD)),
            "schema_ids": [3, 5], "older_schemas": {"3": encoded(delay_schema(SECOND))},
        },
    }  # fmt: skip
    return TopicInfo(described)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": 1, "name": "a", "old": "x"}, {"id": 1, "title": "a", "price": 1.5}),
        ({"id": 1, "title": "a", "price": 2.0}, {"id": 1, "title": "a", "price": 2.0}),
        ({"id": 1}, {"id": 1}),
    ],
)
def test_rows_of_each_version_become_rows_of_the_delay_log(
    info: TopicInfo, row: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert info.delay_log is not None
    assert checked_row(row, info.delay_log)[0] == expected


def test_a_row_that_no_version_has_is_refused(info: TopicInfo) -> None:
    assert info.delay_log is not None
    with pytest.raises(SchemaMismatchError, match=r"'other'.*topic 't'"):
        checked_row({"id": 1, "other": 2}, info.delay_log)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (pa.table({"id": [1]}), {"id": 1, "title": None, "price": 1.5}),
        (pa.table({"id": [1], "name": ["a"], "old": ["x"]}), {"id": 1, "title": "a", "price": 1.5}),
        (pa.table({"id": [1], "title": ["a"], "price": [2.0]}), None),
    ],
)
def test_frames_of_each_version_become_frames_of_the_delay_log(
    info: TopicInfo, table: pa.Table, expected: dict[str, Any] | None
) -> None:
    assert info.delay_log is not None
    expected = expected or table.to_pylist()[0]
    frame, key_column = frames.fitting(table, info, "id") or (table, "id")
    due = frames.with_due_times(frame, None, 7, "")
    frame, key_column = frames.fitting(due, info.delay_log, key_column) or (due, key_column)
    assert key_column == "id"
    rows = pa.table(frame).to_pylist()
    assert rows == [{**expected, "@due_us": 7, "@origin": None, "@repeat": None}]
