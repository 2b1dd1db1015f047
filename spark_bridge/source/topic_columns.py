"""Topics and columns of a read.

Invariants: pyarrow is imported only for a topic's own schema. Spark asks for a DataFrame's columns
in a separate process, which the whole query waits for, and pyarrow and NumPy are half of its
imports.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from tailrace.core.errors import InvalidSettingError, SchemaMismatchError, UnknownTopicError

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_bridge.source.read_options import ReadOptions
    from tailrace.admin.admin import Admin
    from tailrace.client.topics.topic_metadata import TopicInfo

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_KAFKA_TYPES = {
    "key": BinaryType(), "value": BinaryType(), "topic": StringType(), "partition": IntegerType(),
    "offset": LongType(), "timestamp": TimestampType(),
    "timestampType": IntegerType(), "headers": ArrayType(_HEADER),
}  # fmt: skip
"""The value of `spark_schema(kafka_schema(True))`."""


def spark_columns(options: ReadOptions, infos: Mapping[str, TopicInfo]) -> StructType:
    """The columns of the read as Spark's. Raises InvalidSettingError, SchemaMismatchError."""
    first = next(iter(infos.values()), None)
    if (
        (first is not None and first.typed)
        or options.columns is not None
        or options.include_metadata
    ):
        from spark_bridge.source.spark_types import spark_schema

        return spark_schema(columns_of(options, infos))
    return StructType(
        [
            StructField(name, kind)
            for name, kind in _KAFKA_TYPES.items()
            if options.include_headers or name != "headers"
        ]
    )


def kafka_schema(include_headers: bool) -> pa.Schema:
    """Columns of a default-schema topic, as Spark's Kafka source names them."""
    from tailrace.scanning.columns import KAFKA_COLUMNS, arrow_schema

    return arrow_schema(
        [column for column in KAFKA_COLUMNS if include_headers or column.name != "headers"]
    )


def columns_of(options: ReadOptions, infos: Mapping[str, TopicInfo]) -> pa.Schema:
    """Columns of the read unless `.schema` chooses them.

    Raises: InvalidSettingError for an unknown name in `columns`.
    """
    import pyarrow as pa

    from tailrace.scanning.columns import LOG_COLUMNS, arrow_schema

    first = next(iter(infos.values()), None)
    own = (
        first.schema if first is not None and first.typed else kafka_schema(options.include_headers)
    )
    log = [field for field in arrow_schema(LOG_COLUMNS) if field.name not in own.names]
    if options.columns is None:
        return pa.schema([*own, *log]) if options.include_metadata else own
    every = {
        field.name: field
        for field in (*(own if first is not None and first.typed else kafka_schema(True)), *log)
    }
    for name in options.columns:
        if name not in every:
            near = difflib.get_close_matches(name, every, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(every)}"
            raise InvalidSettingError(
                f"option columns names {name!r}, which is not a column; {hint}"
            )
    return pa.schema([every[name] for name in options.columns])


def load_topics(admin: Admin, options: ReadOptions) -> dict[str, TopicInfo]:
    """The topics to read; none when no name matches subscribePattern. Raises UnknownTopicError,
    with the name that is near; SchemaMismatchError when their columns differ, so that one DataFrame
    cannot hold them.
    """
    names = list(options.requested)
    if options.pattern:
        names = [name for name in admin.list_topics() if re.fullmatch(options.pattern, name)]
    try:
        infos = admin.topic_info(names) if names else {}
    except UnknownTopicError as error:
        there = admin.list_topics()
        missing = next((name for name in names if name not in there), names[0])
        near = difflib.get_close_matches(missing, there, 1, 0.5)
        hint = (
            f"did you mean {near[0]!r}?"
            if near
            else f"there are {', '.join(there[:10])}"
            if there
            else "there are no topics yet"
        )
        raise UnknownTopicError(f"there is no topic {missing!r}; {hint}") from error
    first = next(iter(infos.values()), None)
    for info in infos.values():
        assert first is not None
        if info.typed != first.typed or (info.typed and info.schema != first.schema):
            raise SchemaMismatchError(
                f"topics {first.name!r} and {info.name!r} have different "
                f"columns{_difference(first, info)}; read each in a DataFrame of its own"
            )
    return infos


def _difference(first: TopicInfo, other: TopicInfo) -> str:
    """The first column that differs, as text."""
    for info, against in ((first, other), (other, first)):
        for field in info.schema:
            number = against.schema.get_field_index(field.name)
            if number < 0 or against.schema.field(number).type != field.type:
                there = (
                    "does not have" if number < 0 else f"has as {against.schema.field(number).type}"
                )
                return (
                    f" ({info.name!r} has {field.name!r} as {field.type}, which "
                    f"{against.name!r} {there})"
                )
    return ""
