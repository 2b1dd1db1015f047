"""A topic's columns in Spark's types. Spark refuses every other Arrow type with an error that names
no column.

Invariants:
- A batch whose columns have Spark's types already is passed on unchanged.
- Unsigned numbers become the next larger signed ones, so no value changes.
- A column without a Spark type is refused by its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema
from pyspark.sql.types import StructField, StructType

from tailrace.core.errors import CorruptBatchError, SchemaMismatchError

_INSTEAD = {
    pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0), pa.float16(): pa.float32(),
    pa.date64(): pa.date32(), pa.time32("s"): pa.time64("us"), pa.time32("ms"): pa.time64("us"),
}  # fmt: skip


def _plain(kind: pa.DataType) -> pa.DataType:
    """The Arrow type that stands for `kind` in Spark, also within lists and structs."""
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type))
    return _INSTEAD.get(kind, kind)


def spark_schema(schema: pa.Schema) -> StructType:
    """The columns as Spark's. Raises SchemaMismatchError, which names the column."""
    fields = []
    for field in schema:
        try:
            fields.append(
                StructField(
                    field.name,
                    from_arrow_type(_plain(field.type), prefer_timestamp_ntz=False),
                    True,
                )
            )
        except PySparkTypeError:
            others = ",".join(name for name in schema.names if name != field.name)
            raise SchemaMismatchError(
                f"column {field.name!r} is of type {field.type}, which Spark does not have; "
                f".option('columns', {others!r}) reads the others"
            ) from None
    return StructType(fields)


def check_asked(asked: StructType, offered: pa.Schema, topic: str) -> None:
    """Check that `.schema(...)` names existing columns with their types.

    Raises: SchemaMismatchError.
    """
    for field in asked.fields:
        number = offered.get_field_index(field.name)
        if number < 0:
            continue  # the plan says which name is near
        kind = spark_schema(pa.schema([offered.field(number)])).fields[0].dataType
        if field.dataType.simpleString() != kind.simpleString():
            raise SchemaMismatchError(
                f".schema() asks for column {field.name!r} as {field.dataType.simpleString()}; "
                f"in topic {topic!r} it is {kind.simpleString()}: read it as that, and cast it "
                "in the query"
            )


def arrow_target(schema: StructType) -> pa.Schema:
    """Arrow schema in which Spark takes batches of these columns."""
    return to_arrow_schema(schema, timezone="UTC")


def conformed(batches: Iterable[pa.RecordBatch], target: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches with Spark's types. Raises CorruptBatchError for a value that has no place
    there.
    """
    same: pa.Schema | None = None
    for batch in batches:
        if batch.schema is same or batch.schema.equals(target):
            same = batch.schema
            yield batch
            continue
        try:
            columns = [
                column.cast(field.type, safe=False)
                for column, field in zip(batch.columns, target, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=target)
        except pa.ArrowException as error:
            raise CorruptBatchError(
                f"a batch cannot be converted to Spark's types {target}: {error}"
            ) from None
