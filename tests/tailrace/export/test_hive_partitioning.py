"""Rows told apart: by UTC dates of their time, by the text of a column, every row once and in
order.
"""

from __future__ import annotations

import datetime as dt
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.core.errors import InvalidSettingError
from tailrace.export.hive_partitioning import NO_VALUE, check, column_name, divided, made_column


def with_made(table: pa.Table, by: str) -> pa.Table:
    return table.append_column(column_name(by), made_column(table.column(0), by))


@given(st.lists(st.one_of(st.none(), st.binary(max_size=4)), min_size=1, max_size=40))
def test_every_row_is_given_once_and_rows_of_one_value_stay_in_order(
    keys: list[bytes | None],
) -> None:
    table = pa.table({"key": pa.array(keys, pa.binary()), "n": range(len(keys))})
    pieces = divided(with_made(table, "key"), "key")
    assert sorted(n for _, piece in pieces for n in piece.column("n").to_pylist()) == list(
        range(len(keys))
    )
    for name, piece in pieces:
        assert piece.schema.names == ["key", "n"]
        assert piece.column("n").to_pylist() == sorted(piece.column("n").to_pylist())
        assert name.startswith("by_key=")
        assert "/" not in name
        text = None if name == f"by_key={NO_VALUE}" else unquote(name.removeprefix("by_key="))
        for key in piece.column("key").to_pylist():
            assert (
                key.decode("utf-8", "backslashreplace") or None if key is not None else None
            ) == text


@pytest.mark.parametrize(
    ("by", "moment", "name"),
    [("date", dt.datetime(2026, 12, 31, 23, 59, 59, 999_999), "date=2026-12-31"),
    ("date", dt.datetime(1969, 12, 31, 23), "date=1969-12-31"),
     ("hour", dt.datetime(2027, 1, 1, 0, 0), "hour=2027-01-01-00"),
     ("date", None, f"date={NO_VALUE}"),
     ("date", dt.datetime.min, "date=0001-01-01"), ("hour", dt.datetime.max, "hour=9999-12-31-23")],
)  # fmt: skip
def test_dates_and_hours_are_those_of_utc(by: str, moment: dt.datetime | None, name: str) -> None:
    table = pa.table({"_timestamp": pa.array([moment], pa.timestamp("us", "UTC"))})
    assert [directory for directory, _ in divided(with_made(table, by), by)] == [name]


@pytest.mark.parametrize("by", ["date", "hour"])
def test_a_time_of_no_year_from_1_to_9999_is_no_wrong_date(by: str) -> None:
    moments = pa.array(
        [2**63 - 1, -(2**63), 253_402_300_800_000_000, -62_135_596_800_000_001],
        pa.timestamp("us", "UTC"),
    )
    assert [
        directory for directory, _ in divided(with_made(pa.table({"_timestamp": moments}), by), by)
    ] == [f"{by}={NO_VALUE}"]


@pytest.mark.parametrize("name", ["../../x", "a=b", "a%2Fb", "a\0b", "a\nb", "é" * 51])
def test_a_column_whose_name_is_no_directorys_is_refused(name: str) -> None:
    with pytest.raises(InvalidSettingError, match="becomes part of directory names"):
        check(pa.schema([(name, pa.utf8())]), "t", name, [])


@pytest.mark.parametrize(
    ("values", "names"),
    [(pa.array([1, None, -7]), ["1", NO_VALUE, "-7"]), (pa.array([True]), ["true"]),
    (pa.array([dt.date(2026, 1, 2)]), ["2026-01-02"]),
     (pa.array(["x" * 500]), ["x" * 60]), (pa.array(["ü=/%."]), ["%C3%BC%3D%2F%25."]),
     (pa.array(["😀" * 60]), ["%F0%9F%98%80" * 12])],
)  # fmt: skip
def test_the_text_of_a_column_is_its_directory(values: Any, names: list[str]) -> None:
    table = pa.table({"c": values})
    assert [directory for directory, _ in divided(with_made(table, "c"), "c")] == [
        f"by_c={name}" for name in names
    ]


def test_nothing_to_tell_apart_is_one_piece_and_what_cannot_be_is_refused() -> None:
    table = pa.table(
        {"c": [1.5], "date": ["x"], "_timestamp": pa.array([0], pa.timestamp("us", "UTC"))}
    )
    assert divided(table, "") == [("", table)]
    with pytest.raises(InvalidSettingError, match="column 'c' of topic 't' has type double"):
        check(table.schema, "t", "c", ["c"])
    with pytest.raises(InvalidSettingError, match="has a column 'date', which partition_by=date"):
        check(table.schema, "t", "date", ["c", "date"])
    check(table.schema, "t", "date", ["c"])
