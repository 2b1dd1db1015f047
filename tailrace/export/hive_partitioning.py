"""Rows by date, hour or the text of a column: a column that is made for it, and directories as Hive names them.

The column is made beside the topic's own, which stay as they are: `date`, `hour`, or `by_NAME` with the text of column NAME. So nothing is lost in a
directory's name (bytes, an empty text, the difference between 7 and "7"), and Parquet, Delta and Iceberg are partitioned the same way.

Invariants: pure; every row is given once, rows of one value in the order in which they came.
"""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import InvalidSettingError

BY_TIME = {"date": "%Y-%m-%d", "hour": "%Y-%m-%d-%H"}
VALUES_MAX = 1_000
"""Of one commit: each is a file."""
TEXT_CHARACTERS = 60
NAME_BYTES = 150
"""Of a value in a directory's name, which has 255 at most."""
COLUMN_NAME_BYTES = 100
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
TIMES_US = -62_135_596_800_000_000, 253_402_300_800_000_000
"""Years 1 to 9999. Others, which are mistaken units mostly, have no date that all readers take (Arrow writes year 294246 as 32102)."""


def column_name(by: str) -> str:
    """Of the column that is made."""
    return by if by in BY_TIME else f"by_{by}"


def check(schema: pa.Schema, topic: str, by: str, wanted: list[str]) -> None:
    """That rows of these columns can be told apart by this. Raises InvalidSettingError. `schema`: of the columns that are read."""
    if column_name(by) in wanted:
        raise InvalidSettingError(
            f"topic {topic!r} has a column {column_name(by)!r} of its own, which partition_by={by} would make: leave it out of columns"
        )
    if by in BY_TIME:
        return
    if not by.isprintable() or any(sign in by for sign in "/=%") or len(by.encode()) > COLUMN_NAME_BYTES:
        raise InvalidSettingError(
            f"partition_by={by[:100]!r}: the column's name would be in those of directories; it takes one of at most {COLUMN_NAME_BYTES} bytes "
            "without /, =, % and control characters"
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
            f"partition_by={by}: column {by!r} of topic {topic!r} is {kind}; it takes text, bytes, whole numbers or dates"
        )


def made_column(column: pa.ChunkedArray, by: str) -> pa.ChunkedArray:
    """What the rows are told apart by, as text; null where there is none. `column`: what it is made from, of BY_TIME the rows' times."""
    if by in BY_TIME:
        first, behind = (pa.scalar(us, column.type) for us in TIMES_US)
        can_be_said = pc.and_(pc.greater_equal(column, first), pc.less(column, behind))
        column = pc.if_else(can_be_said, column, pa.scalar(None, column.type))
        column = pc.floor_temporal(column, unit={"date": "day", "hour": "hour"}[by])
    known = pc.dictionary_encode(column).combine_chunks()
    return pa.chunked_array([_texts(known.dictionary, by).take(known.indices)])


def _texts(values: pa.Array, by: str) -> pa.Array:
    """Of the different values."""
    if by in BY_TIME:
        return pc.strftime(values, format=BY_TIME[by])
    if pa.types.is_binary(values.type) or pa.types.is_large_binary(values.type):
        values = pa.array([None if item is None else item.decode("utf-8", "backslashreplace") for item in values.to_pylist()], pa.utf8())
    texts = pc.utf8_slice_codeunits(values.cast(pa.utf8()), 0, TEXT_CHARACTERS)
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.utf8()), texts)


def directory(by: str, value: str | None) -> str:
    """As Hive, Spark, duckdb and pyarrow read it."""
    text = NO_VALUE if value is None else quote(value, safe=" ")
    while len(text) > NAME_BYTES and value:
        value = value[:-1]  # the whole text is in the column
        text = quote(value, safe=" ")
    return f"{column_name(by)}={text}"


def divided(table: pa.Table, by: str) -> list[tuple[str, pa.Table]]:
    """(directory, its rows without the column that was made). Raises InvalidSettingError when there are too many."""
    if not by:
        return [("", table)]
    encoded = pc.dictionary_encode(table.column(column_name(by)), null_encoding="encode").combine_chunks()
    table = table.drop_columns([column_name(by)])
    names = encoded.dictionary.to_pylist()
    check_count(by, len(names))
    if len(names) == 1:
        return [(directory(by, names[0]), table)]
    numbers = encoded.indices.to_numpy()
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=len(names)))
    starts = [0, *ends[:-1]]
    return [(directory(by, name), table.take(pa.array(order[s:e]))) for name, s, e in zip(names, starts, ends, strict=True)]


def check_count(by: str, count: int) -> None:
    """Raises InvalidSettingError for more than VALUES_MAX."""
    if count > VALUES_MAX:
        raise InvalidSettingError(
            f"partition_by={by}: {count:,} different values in one commit, each of which would be a file: {VALUES_MAX:,} are allowed. "
            "Partition by date, or by a column of fewer values"
        )
