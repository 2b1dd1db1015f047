"""The columns that a scan gives, by name: those of the topic, and what the log knows of each record.

A topic with the default schema has the columns of Spark's Kafka source: key, value, topic, partition, offset, timestamp, timestampType, headers. A typed topic
has its own. `_topic`, `_partition`, `_offset` and `_timestamp` can be asked for in every topic.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import pyarrow as pa

from tailrace.errors import InvalidSettingError, SchemaMismatchError
from tailrace.schema import HEADER_TYPE

TIMESTAMP = pa.timestamp("us", "UTC")


class Origin(Enum):
    """Where a column's values come from."""

    BODY = 1
    """A column of the batch."""
    TIME = 2
    """The record's time: of its column, or of the batch's header (LogAppendTime)."""
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
    """What a scan of the topic gives unless it is told which."""
    return tuple(Column(field.name, field.type, Origin.BODY) for field in schema) if typed else KAFKA_COLUMNS


def chosen_columns(topic: str, schema: pa.Schema, wanted: Any, *, typed: bool) -> tuple[Column, ...]:
    """The columns of these names, in this order; None: the topic's own. Raises InvalidSettingError."""
    own = own_columns(schema, typed=typed)
    if wanted is None:
        return own
    names: list[Any] = [wanted] if isinstance(wanted, str) else list(wanted) if isinstance(wanted, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidSettingError(f'columns is {wanted!r:.100}; it takes a list of names, such as ["key", "value"]')
    known = {column.name: column for column in (*LOG_COLUMNS, *own)}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(column.name for column in own)[:500]}"
            raise InvalidSettingError(f"topic {topic!r} has no column {name!r:.100}; {hint}")
        if names.count(name) > 1:
            raise InvalidSettingError(f"columns names {name!r} twice")
    return tuple(known[name] for name in names)


def with_origin(columns: tuple[Column, ...], origin: Origin) -> tuple[tuple[Column, ...], int]:
    """The columns with one that says this of the log, and which that is: the last, where it is added. A topic's own column may have the name of the log's,
    and hold anything: what must be known is found by its origin.
    """
    for number, column in enumerate(columns):
        if column.origin is origin:
            return columns, number
    return (*columns, next(column for column in LOG_COLUMNS if column.origin is origin)), len(columns)


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """Of the batches that a scan gives."""
    return pa.schema([pa.field(column.name, column.kind) for column in columns])


def united(topic: str, current: pa.Schema, others: Iterable[pa.Schema], wanted: Any) -> pa.Schema:
    """The columns of all schemas that a topic has had, by name: the current ones first. Raises SchemaMismatchError, which names the column, where one that is
    `wanted` (None: all are) has been of two types.
    """
    fields = {field.name: field for field in current}
    for schema in others:
        for field in schema:
            known = fields.setdefault(field.name, field)
            if known.type != field.type and (wanted is None or field.name in wanted):
                raise SchemaMismatchError(
                    f"column {field.name!r} of topic {topic!r} is {known.type}, and was {field.type} in older segments: scan with columns= that leave it out, "
                    "or with start= behind those"
                )
    return current if len(fields) == len(current) else pa.schema(list(fields.values()))
