"""SchemaHistory: the schema versions of a typed topic, and rows of each as rows of one of them.

Owner: pure. A TopicInfo, a scan's plan and the tools make one each.

Invariants:
- `convert(rows, id).schema == schema_of_rows`, with the same number of rows in the same order.
- Rows of the version that is asked for are returned as they are.
- Columns that keep their type are not copied.
- A value is the same before and after, or UnsupportedBatchError is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tailrace.core.errors import UnsupportedBatchError
from tailrace.format.evolution import schema_rules
from tailrace.format.evolution.schema_rules import Source
from tailrace.format.schema import from_message

FILLING_ROWS = 1 << 14
"""Most rows of a column of one value that is kept."""
FILLING_TEXT_MAX = 64
"""Most characters of its value."""


class SchemaHistory:
    """The versions of one topic, the oldest first. Rows are converted to the newest one, or to the
    version `target`.
    """

    def __init__(self, versions: Sequence[tuple[int, bytes]], target: int | None = None) -> None:
        """`versions`: schema id and Arrow schema message of each. `target`: a schema id; None: the
        newest. Raises UnsupportedBatchError if it is none of the versions.
        """
        self.ids = tuple(number for number, _ in versions)
        self.messages = tuple(message for _, message in versions)
        self._schemas: dict[int, pa.Schema] = {}
        self._sources: dict[int, tuple[Source, ...]] = {}
        self._fillings: dict[tuple[pa.DataType, Any], Any] = {}
        """Type and value -> a column of it, which batches share."""
        self._target = len(self.ids) - 1 if target is None else self._number(target)

    @property
    def target_id(self) -> int:
        """The schema id of converted rows."""
        return self.ids[self._target]

    @property
    def target(self) -> pa.Schema:
        """The schema of converted rows."""
        return self.schema(self.target_id)

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
        """The origin of each column of converted rows in rows of this version. Raises
        UnsupportedBatchError.
        """
        found = self._sources.get(schema_id)
        if found is None:
            number, until = self._number(schema_id), self._target + 1
            if number < until:
                found = schema_rules.sources(self.messages[:until], number)
            else:
                found = self._inverted(number)
            self._sources[schema_id] = found
        return found

    def _inverted(self, number: int) -> tuple[Source, ...]:
        """The origins where the rows are of a version after the target."""
        later = schema_rules.sources(self.messages[: number + 1], self._target)
        places = {source.column: place for place, source in enumerate(later) if source.column >= 0}
        return tuple(
            Source(places[column], later[places[column]].is_widened)
            if column in places
            else Source(-1)
            for column in range(len(schema_rules.fields_of(self.messages[self._target])))
        )

    def convert(self, rows: pa.RecordBatch, schema_id: int) -> pa.RecordBatch:
        """Rows of a version as rows of the target. Raises UnsupportedBatchError for an unknown
        version, or a value that the target's type cannot hold.
        """
        if schema_id == self.target_id:
            return rows
        target, given, count = self.target, rows.columns, rows.num_rows
        columns = [
            self._filling(source.default, field.type, count)
            if source.column < 0
            else column_of(given[source.column], source, field, count)
            for source, field in zip(self.sources(schema_id), target, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=target)

    def _filling(self, value: Any, kind: pa.DataType, count: int) -> Any:
        """A column of one value, a part of one that is kept if it is not large."""
        if count > FILLING_ROWS or (isinstance(value, str) and len(value) > FILLING_TEXT_MAX):
            return filled(value, kind, count)
        key = kind, value if value or value is None else str(value)  # -0.0 equals 0.0
        kept = self._fillings.get(key)
        if kept is None or len(kept) < count:
            kept = self._fillings[key] = filled(value, kind, count)
        return kept if len(kept) == count else kept.slice(0, count)

    def row_of(self, row: dict[str, Any]) -> dict[str, Any] | None:
        """A row of an earlier version as one of the target: of the newest one that has all its
        columns. None if there is none.
        """
        for number in range(self._target - 1, -1, -1):
            shapes = {
                field.name: field.shape for field in schema_rules.fields_of(self.messages[number])
            }
            names = list(shapes)
            if row.keys() <= shapes.keys():
                fields = schema_rules.fields_of(self.messages[self._target])
                made = dict[str, Any]()
                for source, field in zip(self.sources(self.ids[number]), fields, strict=True):
                    if source.column < 0:
                        has_other_type = shapes.get(field.name, field.shape) != field.shape
                        made[field.name] = row.get(field.name) if has_other_type else source.default
                    elif names[source.column] in row:
                        made[field.name] = row[names[source.column]]
                return made
        return None

    def check_kept(self, rows: pa.RecordBatch, schema_id: int) -> None:
        """Check that a conversion keeps the values of each column that has the same name there.
        Raises UnsupportedBatchError where its type became another one (schema.compatibility=none).
        """
        for source, field in zip(self.sources(schema_id), self.target, strict=True):
            place = rows.schema.get_field_index(field.name) if source.column < 0 else -1
            if place < 0 or rows.schema.field(place).type == field.type:
                continue
            if rows.column(place).null_count < rows.num_rows:
                raise UnsupportedBatchError(
                    f"column {field.name!r} is {rows.schema.field(place).type}, and the topic has "
                    f"{field.type} now; send the rows again with that type"
                )

    def widened(self, schema_id: int) -> dict[int, pa.DataType]:
        """Place of a column of a version -> its type in the target, of those that have a wider one
        there.
        """
        return {
            source.column: field.type
            for source, field in zip(self.sources(schema_id), self.target, strict=True)
            if source.is_widened
        }

    def version_with(self, names: Sequence[str]) -> int | None:
        """The schema id of the newest version before the target with exactly these columns."""
        for number in range(self._target - 1, -1, -1):
            fields = schema_rules.fields_of(self.messages[number])
            if len(fields) == len(names) and {field.name for field in fields} == set(names):
                return self.ids[number]
        return None

    def renamed(self, name: str, schema_id: int) -> str | None:
        """The name in the target of a column of another version. None: it is dropped."""
        fields = schema_rules.fields_of(self.messages[self._number(schema_id)])
        target = schema_rules.fields_of(self.messages[self._target])
        for source, field in zip(self.sources(schema_id), target, strict=True):
            if source.column >= 0 and fields[source.column].name == name:
                return field.name
        return None

    def _number(self, schema_id: int) -> int:
        try:
            return self.ids.index(schema_id)
        except ValueError:
            raise UnsupportedBatchError(
                f"the batch has schema {schema_id}, which is none of the topic's versions "
                f"({', '.join(map(str, self.ids))})"
            ) from None


def column_of(column: Any, source: Source, field: pa.Field, count: int) -> Any:
    """A column of another version as one of this field. `column`: its values, None if there are
    none: then `count` times the source's default. Raises UnsupportedBatchError.
    """
    if column is None:
        return filled(source.default, field.type, count)
    return column if column.type == field.type else _in_type(column, field)


def _in_type(column: Any, field: pa.Field) -> Any:
    """A column in a wider or narrower type. Raises UnsupportedBatchError for a value that it does
    not have.
    """
    kind = field.type
    try:
        if pa.types.is_timestamp(kind) and pa.types.is_date(column.type):
            column = column.cast(pa.timestamp(kind.unit))
        made = column.cast(kind)
        if pa.types.is_floating(kind) and kind.bit_width < column.type.bit_width:
            _check_same(column, made)
        return made
    except pa.ArrowInvalid as error:
        raise UnsupportedBatchError(
            f"column {field.name!r} has a value of type {column.type} that does not fit "
            f"{kind}: {error}"
        ) from None


def _check_same(column: Any, made: Any) -> None:
    """Arrow rounds floats without an error. Raises pyarrow.ArrowInvalid."""
    import pyarrow.compute as pc

    is_same = pc.or_(pc.equal(made.cast(column.type), column), pc.is_nan(column))
    if not pc.all(is_same.fill_null(True), min_count=0).as_py():
        raise pa.ArrowInvalid("a float would be rounded")


def filled(value: Any, kind: pa.DataType, count: int) -> Any:
    """A column of one value."""
    if value is None:
        return pa.nulls(count, kind)
    return pa.repeat(pa.scalar(value, kind), count)
