"""Schemas of topics: the default one, and the canonical form that every typed topic's has.

A topic's schema is fixed at creation as the bytes of an Arrow schema message; batches, segment files, consumers and Spark use it as it is.
Canonical means what all of them can take: dictionary columns become their values, large and view types become plain, timestamps become
microseconds in UTC, every column is nullable, metadata is dropped.

Invariants: `canonical(canonical(s)) == canonical(s)`; `conform(batch, schema).schema == schema`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace.delays import DELAY_COLUMNS, DUE_COLUMN, ORIGIN_COLUMN, REPEAT_COLUMN
from tailrace.errors import InvalidSchemaError, SchemaMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER_TYPE = pa.list_(pa.struct([pa.field("key", pa.utf8()), pa.field("value", pa.binary())]))
DEFAULT_SCHEMA = pa.schema(
    [
        pa.field("timestamp", pa.timestamp("us", "UTC")),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", HEADER_TYPE),
    ]
)


DELAY_FIELDS = (pa.field(DUE_COLUMN, pa.int64()), pa.field(ORIGIN_COLUMN, pa.int64()), pa.field(REPEAT_COLUMN, pa.utf8()))
"""What a delay log has beside its topic's columns: when the row is due (null: it cancels), which row it replaces or cancels, and how it recurs (JSON)."""


def delay_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of a topic's delay log. Raises InvalidSchemaError when the topic has a column of such a name."""
    taken = [name for name in DELAY_COLUMNS if name in schema.names]
    if taken:
        raise InvalidSchemaError(f"a topic with delays cannot have a column {taken[0]!r}")
    return pa.schema([*schema, *DELAY_FIELDS])


def to_message(schema: pa.Schema) -> bytes:
    """The schema as an encapsulated Arrow IPC message: what a segment file starts with."""
    return bytes(schema.serialize())


def from_message(message: bytes) -> pa.Schema:
    """The schema in an encapsulated Arrow IPC message. Raises pyarrow.ArrowInvalid."""
    return pa.ipc.read_schema(pa.BufferReader(message))


def canonical_type(kind: pa.DataType) -> pa.DataType:
    """The plain type that stands for `kind` in a topic. Raises InvalidSchemaError where there is none."""
    types = pa.types
    if types.is_dictionary(kind):
        return canonical_type(kind.value_type)
    if types.is_run_end_encoded(kind):
        return canonical_type(kind.value_type)
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC")
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.utf8()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_map(kind):
        return pa.map_(canonical_type(kind.key_type), canonical_type(kind.item_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(canonical_type(kind.value_type), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        return pa.list_(canonical_type(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(kind.field(i).name, canonical_type(kind.field(i).type)) for i in range(kind.num_fields)])
    if types.is_union(kind):
        raise InvalidSchemaError("union columns cannot be stored; split them into one column per type")
    if types.is_null(kind):
        raise InvalidSchemaError("a column of only nulls has no type; cast it to the type it should have")
    return kind


def canonical(schema: pa.Schema) -> pa.Schema:
    """`schema` in the form topics have. Raises InvalidSchemaError, naming the column."""
    if not len(schema):
        raise InvalidSchemaError("a topic's schema needs at least one column")
    names = schema.names
    for name in names:
        if not name or names.count(name) > 1:
            raise InvalidSchemaError(f"column name {name!r} is empty or used twice")
    fields = []
    for field in schema:
        try:
            fields.append(pa.field(field.name, canonical_type(field.type)))
        except InvalidSchemaError as error:
            raise InvalidSchemaError(f"column {field.name!r}: {error.detail}") from None
    return pa.schema(fields)


def schema_of(source: Any) -> pa.Schema:
    """The canonical schema of an Arrow or polars schema, an Arrow table or batch, or a pandas or polars frame. Raises InvalidSchemaError,
    SchemaMismatchError.
    """
    if isinstance(source, pa.Schema):
        return canonical(source)
    if hasattr(source, "__arrow_c_schema__") and not hasattr(source, "__arrow_c_array__") and not hasattr(source, "__arrow_c_stream__"):
        try:
            return canonical(pa.schema(source))  # polars' Schema
        except pa.ArrowInvalid:
            raise InvalidSchemaError(
                f"{type(source).__qualname__} {source} has no columns; pass a schema, or a frame that has the columns"
            ) from None
    return canonical(to_batches(source)[0].schema if isinstance(source, pa.RecordBatch) else to_table(source).schema)


def to_table(frame: Any) -> pa.Table:
    """Any frame with columns as an Arrow table, copying only what its library makes us copy. Raises SchemaMismatchError for other
    things.
    """
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    kind = type(frame)
    if kind.__module__.startswith("pandas"):
        return pa.Table.from_pandas(frame, preserve_index=False)
    if kind.__module__.startswith("polars") and hasattr(frame, "collect"):
        frame = frame.collect()  # a LazyFrame
    for method in ("to_arrow", "to_arrow_table"):  # polars; a duckdb relation
        if hasattr(frame, method):
            table = getattr(frame, method)()
            if not isinstance(table, pa.Schema | pa.Array | pa.ChunkedArray):  # polars' Schema or Series
                return table
            break
    if hasattr(frame, "__arrow_c_stream__") and not hasattr(frame, "to_frame"):  # a Series is one column, not a frame of it
        return pa.table(frame)
    if hasattr(frame, "__arrow_c_array__"):
        return pa.Table.from_batches([pa.record_batch(frame)])
    raise SchemaMismatchError(
        f"{kind.__module__}.{kind.__qualname__} has no columns; pass a pyarrow table or batch, a pandas or polars frame, or a duckdb relation"
    )


def to_batches(frame: Any) -> Sequence[pa.RecordBatch]:
    """Any frame as record batches. Raises SchemaMismatchError."""
    return [frame] if isinstance(frame, pa.RecordBatch) else to_table(frame).to_batches()


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """`table` with exactly the columns of `schema`, cast safely. Raises SchemaMismatchError naming what is missing, extra or does not
    fit.
    """
    missing = [name for name in schema.names if name not in table.column_names]
    extra = [name for name in table.column_names if name not in schema.names]
    if missing or extra:
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"not in the topic: {', '.join(extra)}"] * bool(extra)
        raise SchemaMismatchError(f"the columns do not match the topic's schema ({'; '.join(parts)})")
    columns = []
    for field in schema:
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = _cast(column, field.type)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise SchemaMismatchError(f"column {field.name!r} is {column.type}, the topic has {field.type}: {error}") from None
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(column.type) and column.type.tz is None:
        # A timestamp without a zone is taken as UTC, as pandas and Spark users write it.
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    return column.cast(kind)
