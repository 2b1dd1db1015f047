"""Hive partitioning: rows by date, hour or the text of a column, in directories named as in Hive.

The partition column is added beside the topic's own, which stay unchanged: `date`, `hour`, or
`by_NAME` with the text of column NAME. So a directory's name loses nothing (bytes, an empty text,
the difference between 7 and "7"), and Parquet, Delta and Iceberg are partitioned alike.

Invariants:
- All functions are pure.
- Every row is returned once, and rows with one value keep their order.
"""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.errors import InvalidSettingError

BY_TIME = {"date": "%Y-%m-%d", "hour": "%Y-%m-%d-%H"}
VALUES_MAX = 1_000
"""Most values in one commit, since each is a file."""
TEXT_CHARACTERS = 60
NAME_BYTES = 150
"""Most bytes of a value in a directory's name, which may have 255."""
COLUMN_NAME_BYTES = 100
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
TIMES_US = -62_135_596_800_000_000, 253_402_300_800_000_000
"""Years 1 to 9999. Other times are mostly mistaken units, and have no date that all readers accept
(Arrow writes year 294246 as 32102).
"""


def column_name(by: str) -> str:
    """The name of the partition column."""
    return by if by in BY_TIME else f"by_{by}"


def check(schema: pa.Schema, topic: str, by: str, requested: list[str]) -> None:
    """Check that rows can be partitioned by `by`. `schema` has the columns that are read.

    Raises InvalidSettingError.
    """
    if column_name(by) in requested:
        raise InvalidSettingError(
            f"topic {topic!r} has a column {column_name(by)!r}, which partition_by={by} would "
            "add; leave it out of columns"
        )
    if by in BY_TIME:
        return
    if (
        not by.isprintable()
        or any(sign in by for sign in "/=%")
        or len(by.encode()) > COLUMN_NAME_BYTES
    ):
        raise InvalidSettingError(
            f"partition_by={by[:100]!r} becomes part of directory names; give a column whose name "
            f"has at most {COLUMN_NAME_BYTES} bytes without /, =, % and control characters"
        )
    kind = schema.field(by).type
    can = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_binary,
        pa.types.is_large_binary,
        pa.types.is_integer,
        pa.types.is_boolean,
    )
    if not any(test(kind) for test in (*can, pa.types.is_date, pa.types.is_decimal)):
        raise InvalidSettingError(
            f"partition_by={by}: column {by!r} of topic {topic!r} has type {kind}; give a column "
            "of text, bytes, whole numbers or dates"
        )


def made_column(column: pa.ChunkedArray, by: str) -> pa.ChunkedArray:
    """The partition column as text, null for rows without a value.

    `column` is its source, for BY_TIME the rows' times.
    """
    if by in BY_TIME:
        first, behind = (pa.scalar(us, column.type) for us in TIMES_US)
        is_printable = pc.and_(pc.greater_equal(column, first), pc.less(column, behind))
        column = pc.if_else(is_printable, column, pa.scalar(None, column.type))
        column = pc.floor_temporal(column, unit={"date": "day", "hour": "hour"}[by])
    known = pc.dictionary_encode(column).combine_chunks()
    return pa.chunked_array([_texts(known.dictionary, by).take(known.indices)])


def _texts(values: pa.Array, by: str) -> pa.Array:
    """The text of each distinct value."""
    if by in BY_TIME:
        return pc.strftime(values, format=BY_TIME[by])
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        values = pa.array(
            [
                None if item is None else item.decode("utf-8", "backslashreplace")
                for item in values.to_pylist()
            ],
            pa.utf8(),
        )
    texts = pc.utf8_slice_codeunits(values.cast(pa.utf8()), 0, TEXT_CHARACTERS)
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.utf8()), texts)


def directory(by: str, value: str | None) -> str:
    """The directory's name in the form that Hive, Spark, duckdb and pyarrow read."""
    text = NO_VALUE if value is None else quote(value, safe=" ")
    while len(text) > NAME_BYTES and value:
        value = value[:-1]  # the column has the whole text
        text = quote(value, safe=" ")
    return f"{column_name(by)}={text}"


def divided(table: pa.Table, by: str) -> list[tuple[str, pa.Table]]:
    """Split a table: (directory, its rows without the partition column).

    Raises InvalidSettingError for too many values.
    """
    if not by:
        return [("", table)]
    encoded = pc.dictionary_encode(
        table.column(column_name(by)), null_encoding="encode"
    ).combine_chunks()
    table = table.drop_columns([column_name(by)])
    names = encoded.dictionary.to_pylist()
    check_count(by, len(names))
    if len(names) == 1:
        return [(directory(by, names[0]), table)]
    numbers = encoded.indices.to_numpy()
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=len(names)))
    starts = [0, *ends[:-1]]
    return [
        (directory(by, name), table.take(pa.array(order[s:e])))
        for name, s, e in zip(names, starts, ends, strict=True)
    ]


def check_count(by: str, count: int) -> None:
    """Check the number of partition values. Raises InvalidSettingError above VALUES_MAX."""
    if count > VALUES_MAX:
        raise InvalidSettingError(
            f"partition_by={by} has {count:,} values in one commit, each of which would be a file; "
            f"the limit is {VALUES_MAX:,}: partition by date, or by a column with fewer values"
        )
