"""Schemas of topics: the default schema and the canonical form of typed topics' schemas.

A topic's schema is fixed at creation as the bytes of an Arrow schema message. Batches, segments,
consumers and Spark use it unchanged. Canonical types are those that all of them support: dictionary
columns become their values, large and view types plain ones, timestamps microseconds in UTC,
decimals of a negative scale whole numbers. Every column is nullable. Metadata is dropped, except a
column's alias and default (`tailrace.format.evolution.schema_rules`).

Invariants:
- `canonical(canonical(s)) == canonical(s)`
- `conform(batch, schema).schema == schema`
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace.core.errors import InvalidSchemaError, SchemaMismatchError
from tailrace.core.schedule.delays import DELAY_COLUMNS, DUE_COLUMN, ORIGIN_COLUMN, REPEAT_COLUMN
from tailrace.format import exact_values

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMESTAMP_TYPE = pa.timestamp("us", "UTC")
HEADER_TYPE = pa.list_(pa.struct([pa.field("key", pa.utf8()), pa.field("value", pa.binary())]))
DEFAULT_SCHEMA = pa.schema(
    [
        pa.field("timestamp", TIMESTAMP_TYPE),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADER_TYPE),
    ]
)


_KEPT_METADATA = (b"tailrace.alias", b"tailrace.default")

DELAY_FIELDS = (
    pa.field(DUE_COLUMN, pa.int64()),
    pa.field(ORIGIN_COLUMN, pa.int64()),
    pa.field(REPEAT_COLUMN, pa.utf8()),
)
"""Columns of a delay log beside its topic's: due time (null: a cancellation), the row that this one
replaces or cancels, and its recurrence (JSON).
"""


def delay_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of a topic's delay log. Raises InvalidSchemaError if a column's name is taken."""
    taken = [name for name in DELAY_COLUMNS if name in schema.names]
    if taken:
        raise InvalidSchemaError(
            f"the schema has a column {taken[0]!r}, a name that delay.enabled reserves; rename the "
            "column"
        )
    return pa.schema([*schema, *DELAY_FIELDS])


def to_message(schema: pa.Schema) -> bytes:
    """The schema as an encapsulated Arrow IPC message, the start of every segment."""
    return bytes(schema.serialize())


def from_message(message: bytes) -> pa.Schema:
    """The schema in an encapsulated Arrow IPC message. Raises pyarrow.ArrowInvalid."""
    return pa.ipc.read_schema(pa.BufferReader(message))


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """The canonical type for `kind`. Raises InvalidSchemaError if there is none."""
    types = pa.types
    if types.is_dictionary(kind):
        return canonical_type(kind.value_type)
    if types.is_run_end_encoded(kind):
        return canonical_type(kind.value_type)
    if types.is_timestamp(kind):
        return TIMESTAMP_TYPE
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.utf8()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_map(kind):
        return pa.map_(canonical_type(kind.key_type), canonical_type(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(canonical_type(kind.value_type), kind.list_size)
    if (
        types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_list_view(kind)
        or types.is_large_list_view(kind)
    ):
        return pa.list_(canonical_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct(
            [
                pa.field(kind.field(i).name, canonical_type(kind.field(i).type))
                for i in range(kind.num_fields)
            ]
        )
    if types.is_decimal(kind) and kind.scale < 0:  # no engine but Arrow has such a scale
        digits = kind.precision - kind.scale
        if digits > 76:
            raise InvalidSchemaError(f"{kind} has numbers of {digits} digits; the most are 76")
        return pa.decimal128(digits, 0) if digits <= 38 else pa.decimal256(digits, 0)
    if types.is_union(kind):
        raise InvalidSchemaError(
            "union columns cannot be stored; split them into one column per type"
        )
    if types.is_null(kind):
        raise InvalidSchemaError("a column of only nulls has no type; cast it to a type")
    return kind


def canonical(schema: pa.Schema) -> pa.Schema:
    """The canonical form of `schema`. Raises InvalidSchemaError that names the column."""
    if not len(schema):
        raise InvalidSchemaError("the schema has no columns; a topic's schema needs at least one")
    names = schema.names
    for name in names:
        if not name or names.count(name) > 1:
            raise InvalidSchemaError(
                f"column name {name!r} is empty or used twice; give each column its own name"
            )
    fields = []
    for field in schema:
        try:
            kind = canonical_type(field.type)
            fields.append(pa.field(field.name, kind, metadata=_evolution_metadata(field)))
        except InvalidSchemaError as error:
            raise InvalidSchemaError(f"column {field.name!r}: {error.detail}") from None
    return pa.schema(fields)


def _evolution_metadata(field: pa.Field) -> dict[bytes, bytes] | None:
    kept = {key: value for key, value in (field.metadata or {}).items() if key in _KEPT_METADATA}
    return kept or None


def schema_of(source: Any) -> pa.Schema:
    """The canonical schema of an Arrow or polars schema, an Arrow table or batch, or a data frame.

    Raises InvalidSchemaError, SchemaMismatchError.
    """
    if isinstance(source, pa.Schema):
        return canonical(source)
    if (
        hasattr(source, "__arrow_c_schema__")
        and not hasattr(source, "__arrow_c_array__")
        and not hasattr(source, "__arrow_c_stream__")
    ):
        try:
            return canonical(pa.schema(source))  # polars' Schema
        except pa.ArrowInvalid:
            raise InvalidSchemaError(
                f"{type(source).__qualname__} {source} has no columns; pass a schema, or a frame "
                "that has the columns"
            ) from None
    return canonical(
        to_batches(source)[0].schema
        if isinstance(source, pa.RecordBatch)
        else to_table(source).schema
    )


def to_table(frame: Any) -> pa.Table:
    """Convert a frame with columns to an Arrow table, with as few copies as its library allows.

    Raises SchemaMismatchError for other objects, and for what Arrow cannot store.
    """
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    try:
        return _converted(frame)
    except (pa.ArrowException, ValueError, TypeError) as error:
        kind = type(frame)
        raise SchemaMismatchError(
            f"the {kind.__module__}.{kind.__qualname__} cannot be converted to an Arrow table: "
            f"{error!s:.300}; give each column one type, and a name of its own"
        ) from error


def _converted(frame: Any) -> pa.Table:
    """See `to_table`. Raises the errors of the frame's library, too."""
    kind = type(frame)
    if kind.__module__.startswith("pandas") and hasattr(frame, "columns"):
        return _of_pandas(frame)
    if kind.__module__.startswith("polars") and hasattr(frame, "collect"):
        frame = frame.collect()  # a LazyFrame
    for method in ("to_arrow", "to_arrow_table"):  # polars; a duckdb relation
        if hasattr(frame, method):
            table = getattr(frame, method)()
            if not isinstance(
                table, pa.Schema | pa.Array | pa.ChunkedArray
            ):  # polars' Schema or Series
                return table
            break
    if hasattr(frame, "__arrow_c_stream__") and not hasattr(
        frame, "to_frame"
    ):  # a Series is one column, not a frame of it
        return pa.table(frame)
    if hasattr(frame, "__arrow_c_array__") and not isinstance(frame, pa.Array):
        return pa.Table.from_batches([pa.record_batch(frame)])
    raise SchemaMismatchError(
        f"{kind.__module__}.{kind.__qualname__} has no columns; pass a pyarrow table or batch, a "
        "pandas or polars frame, or a duckdb relation"
    )


def _of_pandas(frame: Any) -> pa.Table:
    """A pandas frame as a table. Levels of its index that have a name are columns, too."""
    index = getattr(frame, "index", None)
    if all(name is None for name in getattr(index, "names", ())):
        return pa.Table.from_pandas(frame, preserve_index=False)
    table = pa.Table.from_pandas(frame, preserve_index=True)
    return table.drop_columns([name for name in table.column_names if _is_unnamed(name)])


def _is_unnamed(column: str) -> bool:
    """True for a level of an index without a name of its own, as pyarrow calls it."""
    return re.fullmatch(r"__index_level_\d+__", column) is not None


def to_batches(frame: Any) -> Sequence[pa.RecordBatch]:
    """Convert a frame to record batches. Raises SchemaMismatchError."""
    return [frame] if isinstance(frame, pa.RecordBatch) else to_table(frame).to_batches()


def narrow_floats(schema: pa.Schema) -> tuple[int, ...]:
    """The places of float columns that can be widened."""
    return tuple(
        place
        for place, kind in enumerate(schema.types)
        if pa.types.is_floating(kind) and kind.bit_width < 64
    )


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast `table` safely to exactly the columns of `schema`.

    Raises SchemaMismatchError that names missing, extra and unsuitable columns.
    """
    missing = [name for name in schema.names if name not in table.column_names]
    extra = [name for name in table.column_names if name not in schema.names]
    if missing or extra:
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [
            f"not in the topic: {', '.join(extra)}"
        ] * bool(extra)
        raise SchemaMismatchError(
            f"the columns do not match the topic's schema ({'; '.join(parts)})"
        )
    columns = []
    for field in schema:
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = _cast(column, field.type)
                column.validate()
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise SchemaMismatchError(
                    f"column {field.name!r} is {column.type}, the topic has {field.type}: {error}"
                ) from None
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if (
        pa.types.is_timestamp(kind)
        and pa.types.is_timestamp(column.type)
        and column.type.tz is None
    ):
        # A timestamp without a zone counts as UTC, as in pandas and Spark.
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        # Arrow's own cast writes one offset too few, and of a slice negative ones.
        made, is_sure = pa.chunked_array([pa.array(column.to_pylist(), kind)]), False
    else:
        made, is_sure = column.cast(kind), not exact_values.may_lose(column.type, kind)
    if not is_sure and not _is_kept(column, made):
        raise pa.ArrowInvalid(f"casting from {column.type} to {kind} would lose data")
    return made


def _is_kept(given: pa.ChunkedArray, made: pa.ChunkedArray) -> bool:
    """True if a column that was cast has the values that were given."""
    if not pa.types.is_timestamp(given.type):
        return exact_values.found_in(given.to_pylist(), made.type) is None
    if pa.types.is_time(made.type):
        return False
    back: pa.ChunkedArray = made.cast(given.type)
    return bool(back.equals(given))
