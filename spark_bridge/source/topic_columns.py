"""Which topics a read is of, and which columns it has.

Invariants: nothing here loads pyarrow until a topic's own schema is asked for. Spark asks for a DataFrame's columns in a process that does nothing else,
and the whole query waits for it: pyarrow and NumPy are half of what that process would load.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from tailrace.errors import InvalidSettingError, SchemaMismatchError, UnknownTopicError

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_bridge.read_options import ReadOptions
    from tailrace.admin import Admin
    from tailrace.topics import TopicInfo

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
_KAFKA_TYPES = {
    "key": BinaryType(), "value": BinaryType(), "topic": StringType(), "partition": IntegerType(), "offset": LongType(), "timestamp": TimestampType(),
    "timestampType": IntegerType(), "headers": ArrayType(_HEADER),
}  # fmt: skip
"""What `spark_schema(kafka_schema(True))` is."""


def spark_columns(options: ReadOptions, infos: Mapping[str, TopicInfo]) -> StructType:
    """The columns of the read as Spark's. Raises InvalidSettingError, SchemaMismatchError."""
    first = next(iter(infos.values()), None)
    if (first is not None and first.typed) or options.columns is not None or options.include_metadata:
        from spark_bridge.spark_types import spark_schema

        return spark_schema(columns_of(options, infos))
    return StructType([StructField(name, kind) for name, kind in _KAFKA_TYPES.items() if options.include_headers or name != "headers"])


def kafka_schema(include_headers: bool) -> pa.Schema:
    """Columns of a default-schema topic, as Spark's Kafka source names them."""
    from tailrace.scanning.columns import KAFKA_COLUMNS, arrow_schema

    return arrow_schema([column for column in KAFKA_COLUMNS if include_headers or column.name != "headers"])


def columns_of(options: ReadOptions, infos: Mapping[str, TopicInfo]) -> pa.Schema:
    """What the read gives unless `.schema` says it. Raises InvalidSettingError for a name in `columns` that is none."""
    import pyarrow as pa

    from tailrace.scanning.columns import LOG_COLUMNS, arrow_schema

    first = next(iter(infos.values()), None)
    own = first.schema if first is not None and first.typed else kafka_schema(options.include_headers)
    log = [field for field in arrow_schema(LOG_COLUMNS) if field.name not in own.names]
    if options.columns is None:
        return pa.schema([*own, *log]) if options.include_metadata else own
    every = {field.name: field for field in (*(own if first is not None and first.typed else kafka_schema(True)), *log)}
    for name in options.columns:
        if name not in every:
            near = difflib.get_close_matches(name, every, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(every)}"
            raise InvalidSettingError(f"option columns names {name!r}, which is no column; {hint}")
    return pa.schema([every[name] for name in options.columns])


def load_topics(admin: Admin, options: ReadOptions) -> dict[str, TopicInfo]:
    """The topics to read; none when no name matches subscribePattern. Raises UnknownTopicError, with the name that is near; SchemaMismatchError when their
    columns differ, so that one DataFrame cannot hold them.
    """
    names = list(options.wanted)
    if options.pattern:
        names = [name for name in admin.list_topics() if re.fullmatch(options.pattern, name)]
    try:
        infos = admin.topic_info(names) if names else {}
    except UnknownTopicError as error:
        there = admin.list_topics()
        missing = next((name for name in names if name not in there), names[0])
        near = difflib.get_close_matches(missing, there, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(there[:10])}" if there else "there is none yet"
        raise UnknownTopicError(f"there is no topic {missing!r}; {hint}") from error
    first = next(iter(infos.values()), None)
    for info in infos.values():
        assert first is not None
        if info.typed != first.typed or (info.typed and info.schema != first.schema):
            raise SchemaMismatchError(
                f"topics {first.name!r} and {info.name!r} have different columns{_difference(first, info)}; read each in a DataFrame of its own"
            )
    return infos


def _difference(first: TopicInfo, other: TopicInfo) -> str:
    """Which column is the first that differs."""
    for info, against in ((first, other), (other, first)):
        for field in info.schema:
            number = against.schema.get_field_index(field.name)
            if number < 0 or against.schema.field(number).type != field.type:
                there = "does not have" if number < 0 else f"has as {against.schema.field(number).type}"
                return f" ({info.name!r} has {field.name!r} as {field.type}, which {against.name!r} {there})"
    return ""
