"""SchemaHistory: the schema versions of a typed topic, and rows of each as rows of the newest.

Owner: pure. A TopicInfo, a scan's plan and the tools make one each.

Invariants:
- `convert(rows, id).schema == newest`, with the same number of rows in the same order.
- Rows of the newest version are returned as they are.
- Columns that keep their type are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tailrace.core.errors import UnsupportedBatchError
from tailrace.format.evolution import schema_rules
from tailrace.format.evolution.schema_rules import Source
from tailrace.format.schema import from_message


class SchemaHistory:
    """The versions of one topic, the oldest first."""

    def __init__(self, versions: Sequence[tuple[int, bytes]]) -> None:
        """`versions`: schema id and Arrow schema message of each."""
        self.ids = tuple(number for number, _ in versions)
        self.messages = tuple(message for _, message in versions)
        self._schemas: dict[int, pa.Schema] = {}

    @property
    def newest(self) -> pa.Schema:
        """The schema of the newest version."""
        return self.schema(self.ids[-1])

    def __contains__(self, schema_id: int) -> bool:
        return schema_id in self.ids

    def schema(self, schema_id: int) -> pa.Schema:
        """The schema of a version. Raises UnsupportedBatchError for an unknown id."""
        found = self._schemas.get(schema_id)
        if found is None:
            message = self.messages[self._number(schema_id)]
            found = self._schemas[schema_id] = from_message(message)
        return found

    def sources(self, schema_id: int) -> tuple[Source, ...]:
        """The origin of each column of the newest version in rows of this one. Raises
        UnsupportedBatchError.
        """
        return schema_rules.sources(self.messages, self._number(schema_id))

    def convert(self, rows: pa.RecordBatch, schema_id: int) -> pa.RecordBatch:
        """Rows of a version as rows of the newest. Raises UnsupportedBatchError for an unknown
        version, or a value that the newer type cannot hold.
        """
        if schema_id == self.ids[-1]:
            return rows
        newest = self.newest
        columns = [
            column_of(rows, source, field)
            for source, field in zip(self.sources(schema_id), newest, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=newest)

    def _number(self, schema_id: int) -> int:
        try:
            return self.ids.index(schema_id)
        except ValueError:
            raise UnsupportedBatchError(
                f"the batch has schema {schema_id}, which is none of the topic's versions "
                f"({', '.join(map(str, self.ids))})"
            ) from None


def column_of(rows: pa.RecordBatch, source: Source, field: pa.Field) -> Any:
    """One column of the newest version, from rows of an older one. Raises UnsupportedBatchError."""
    if source.column < 0:
        return filled(source.default, field.type, rows.num_rows)
    column = rows.column(source.column)
    return column if column.type == field.type else widened(column, field)


def widened(column: Any, field: pa.Field) -> Any:
    """A column in a wider type. Raises UnsupportedBatchError for a date that no timestamp has."""
    kind = field.type
    try:
        if pa.types.is_timestamp(kind) and pa.types.is_date(column.type):
            column = column.cast(pa.timestamp(kind.unit))
        return column.cast(kind)
    except pa.ArrowInvalid as error:
        raise UnsupportedBatchError(
            f"column {field.name!r} has a value of type {column.type} that does not fit "
            f"{kind}: {error}"
        ) from None


def filled(value: Any, kind: pa.DataType, count: int) -> Any:
    """A column of one value."""
    if value is None:
        return pa.nulls(count, kind)
    return pa.repeat(pa.scalar(value, kind), count)
