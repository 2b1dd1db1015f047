"""Columns of a scan: those of the topic, and properties of each record in the log.

A topic with the default schema has the columns of Spark's Kafka source: key, value, topic,
partition, offset, timestamp, timestampType, headers. A typed topic has its own. Every topic also
has `_topic`, `_partition`, `_offset` and `_timestamp`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa

from tailrace.core.errors import InvalidSettingError
from tailrace.format.schema import HEADER_TYPE

TIMESTAMP = pa.timestamp("us", "UTC")


class Origin(Enum):
    """The source of a column's values."""

    BODY = 1
    """A column of the batch."""
    TIME = 2
    """The record's time, from its column or from the batch's header (LogAppendTime)."""
    TOPIC = 3
    PARTITION = 4
    OFFSET = 5
    TIMESTAMP_TYPE = 6


class Column(NamedTuple):
    """One column of a scan."""

    name: str
    kind: pa.DataType
    origin: Origin


LOG_COLUMNS = (
    Column("_topic", pa.utf8(), Origin.TOPIC),
    Column("_partition", pa.int32(), Origin.PARTITION),
    Column("_offset", pa.int64(), Origin.OFFSET),
    Column("_timestamp", TIMESTAMP, Origin.TIME),
)
KAFKA_COLUMNS = (
    Column("key", pa.binary(), Origin.BODY),
    Column("value", pa.binary(), Origin.BODY),
    Column("topic", pa.utf8(), Origin.TOPIC),
    Column("partition", pa.int32(), Origin.PARTITION),
    Column("offset", pa.int64(), Origin.OFFSET),
    Column("timestamp", TIMESTAMP, Origin.TIME),
    Column("timestampType", pa.int32(), Origin.TIMESTAMP_TYPE),
    Column("headers", HEADER_TYPE, Origin.BODY),
)


def own_columns(schema: pa.Schema, *, typed: bool) -> tuple[Column, ...]:
    """The default columns of a scan."""
    return (
        tuple(Column(field.name, field.type, Origin.BODY) for field in schema)
        if typed
        else KAFKA_COLUMNS
    )


def chosen_columns(
    topic: str, schema: pa.Schema, requested: Any, *, typed: bool
) -> tuple[Column, ...]:
    """The columns of these names in this order; with None the topic's own.

    Raises InvalidSettingError.
    """
    own = own_columns(schema, typed=typed)
    if requested is None:
        return own
    names: list[Any] = (
        [requested]
        if isinstance(requested, str)
        else list(requested)
        if isinstance(requested, Iterable)
        else []
    )
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidSettingError(
            f'columns is {requested!r:.100}; give a list of names, such as ["key", "value"]'
        )
    known = {column.name: column for column in (*LOG_COLUMNS, *own)}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"its columns are {', '.join(column.name for column in own)[:500]}"
            )
            raise InvalidSettingError(f"topic {topic!r} has no column {name!r:.100}; {hint}")
        if names.count(name) > 1:
            raise InvalidSettingError(f"columns names {name!r} twice; name it once")
    return tuple(known[name] for name in names)


def with_origin(columns: tuple[Column, ...], origin: Origin) -> tuple[tuple[Column, ...], int]:
    """The columns with one of this origin, and its index; a missing one is appended.

    The search is by origin, because a topic's own column may have the same name.
    """
    for number, column in enumerate(columns):
        if column.origin is origin:
            return columns, number
    return (*columns, next(column for column in LOG_COLUMNS if column.origin is origin)), len(
        columns
    )


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """The Arrow schema of a scan with these columns."""
    return pa.schema([pa.field(column.name, column.kind) for column in columns])
