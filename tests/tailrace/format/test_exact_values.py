"""Values that pyarrow would store as other values: refused in rows and in frames."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from tailrace.batch.arrow_codec import rows_from_dicts
from tailrace.core.errors import InvalidRecordError, InvalidSchemaError, SchemaMismatchError
from tailrace.format.schema import canonical, conform

MORNING = dt.datetime(2021, 1, 1, 4)
MIDNIGHT = dt.datetime(2021, 1, 1)
NEW_YORK = dt.timezone(dt.timedelta(hours=-5))
UTC_US = pa.timestamp("us", "UTC")
MS = dt.timedelta(milliseconds=1)
DATES_BY_NAME = pa.map_(pa.string(), pa.date32())
X_DATE = pa.struct([("x", pa.date32())])


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.int64(), Decimal("1.5")),
        (pa.int64(), Fraction(3, 2)),
        (pa.int8(), np.float64(1.5)),
        (pa.list_(pa.int64()), np.array([1.0, 1.5])),
        (pa.list_(pa.int64()), [1, Decimal("1.5")]),
        (pa.date32(), MORNING),
        (pa.date32(), MIDNIGHT.replace(tzinfo=NEW_YORK)),
        (pa.date32(), pd.NaT),
        (pa.date32(), 1.5),
        (pa.date64(), MORNING),
        (UTC_US, pd.Timestamp(1, unit="ns", tz="UTC")),
        (UTC_US, Decimal("1.5")),
        (pa.time32("s"), dt.time(1, 2, 3, 4)),
        (pa.time32("ms"), dt.time(1, 2, 3, 4)),
        (pa.time64("us"), dt.time(1, 2, tzinfo=dt.UTC)),
        (pa.duration("s"), dt.timedelta(milliseconds=5)),
        (pa.duration("ms"), dt.timedelta(microseconds=5)),
        (pa.duration("us"), pd.Timedelta(5, "ns")),
        (pa.struct([("x", pa.int64())]), {"x": 1, "y": 2}),
        (X_DATE, {"x": MORNING}),
        (pa.list_(X_DATE), [{"x": MORNING}]),
        (DATES_BY_NAME, {"a": MORNING}),
        (pa.map_(pa.date32(), pa.string()), [(MORNING, "a")]),
        (pa.duration("us"), np.timedelta64(5, "ns")),
    ],
)
def test_a_row_whose_value_would_be_another_one_is_refused(kind: pa.DataType, value: Any) -> None:
    schema = pa.schema([("n", pa.int64()), ("c", kind)])
    with pytest.raises(InvalidRecordError, match="column 'c' takes"):
        rows_from_dicts([{"n": 1}, {"n": 2, "c": value}], schema)


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (pa.int64(), Decimal("2"), 2),
        (pa.int64(), np.int16(2), 2),
        (pa.int64(), pa.scalar(2), 2),
        (pa.int64(), 2.0, 2),
        (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
        (pa.list_(pa.int64()), pa.array([1, 2]), [1, 2]),
        (pa.date32(), MIDNIGHT, MIDNIGHT.date()),
        (pa.date32(), pd.Timestamp("2021-01-01", tz="UTC"), MIDNIGHT.date()),
        (pa.date32(), 1, dt.date(1970, 1, 2)),
        (UTC_US, pd.Timestamp("2021-01-01 04:00"), MORNING.replace(tzinfo=dt.UTC)),
        (pa.time32("ms"), dt.time(1, 2, 3, 4000), dt.time(1, 2, 3, 4000)),
        (pa.duration("s"), dt.timedelta(seconds=5), dt.timedelta(seconds=5)),
        (pa.duration("us"), pd.Timedelta(5, "us"), dt.timedelta(microseconds=5)),
        (pa.struct([("x", pa.int64()), ("y", pa.int64())]), {"y": 1}, {"x": None, "y": 1}),
        (pa.map_(pa.string(), pa.int64()), {"a": 1}, [("a", 1)]),
        (pa.float32(), 0.1, float(np.float32(0.1))),
    ],
)
def test_a_row_whose_value_is_kept_is_taken(kind: pa.DataType, value: Any, stored: Any) -> None:
    rows = rows_from_dicts([{"c": value}, {}], pa.schema([("c", kind)]))
    assert rows.column("c").to_pylist() == [stored, None]


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (pa.date32(), pa.array([MIDNIGHT, MORNING])),
        (pa.date32(), pa.array([MORNING]).dictionary_encode()),
        (pa.date64(), pa.array([MORNING])),
        (pa.date32(), pa.array([MORNING], pa.timestamp("us", "America/New_York"))),
        (pa.time64("us"), pa.array([MORNING])),
        (X_DATE, pa.array([{"x": MORNING}])),
        (pa.list_(pa.date32()), pa.array([[MORNING]])),
        (DATES_BY_NAME, pa.array([[("a", MORNING)]], pa.map_(pa.string(), pa.timestamp("us")))),
        (pa.struct([("x", pa.int64())]), pa.array([{"x": 1, "y": 2}])),
        (pa.list_(pa.duration("s")), pa.array([[MS]], pa.list_view(pa.duration("us")))),
    ],
)
def test_a_frame_whose_values_would_be_others_is_refused(kind: pa.DataType, given: Any) -> None:
    with pytest.raises(SchemaMismatchError, match=r"column 'c' is .* would lose data"):
        conform(pa.table({"c": given}), pa.schema([("c", kind)]))


def test_a_frame_of_midnights_is_a_column_of_dates() -> None:
    given = pd.DataFrame({"c": pd.to_datetime(["2021-01-01", None, "1960-02-03"])})
    made = conform(pa.Table.from_pandas(given), pa.schema([("c", pa.date32())]))
    assert made["c"].to_pylist() == [dt.date(2021, 1, 1), None, dt.date(1960, 2, 3)]
    nested = pa.table({"c": pa.array([[{"x": MIDNIGHT}], None, [None]])})
    made = conform(nested, pa.schema([("c", pa.list_(X_DATE))]))
    assert made["c"].to_pylist() == [[{"x": MIDNIGHT.date()}], None, [None]]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (pa.decimal128(5, -2), pa.decimal128(7, 0)),
        (pa.decimal128(38, -2), pa.decimal256(40, 0)),
        (pa.list_(pa.decimal256(5, -1)), pa.list_(pa.decimal128(6, 0))),
        (pa.decimal128(5, 2), pa.decimal128(5, 2)),
    ],
)
def test_a_decimal_of_a_negative_scale_becomes_a_whole_number(
    given: pa.DataType, kind: pa.DataType
) -> None:
    schema = canonical(pa.schema([("c", given)]))
    assert schema.types == [kind]
    value = [Decimal("1200")] if pa.types.is_list(given) else Decimal("120")
    table = pa.table({"c": pa.array([value, None], kind)})
    assert conform(table, schema)["c"].to_pylist() == [value, None]


def test_values_of_a_negative_scale_are_kept() -> None:
    schema = canonical(pa.schema([("c", pa.decimal128(5, -2))]))
    given = pa.array([Decimal("1.2E+3"), None], pa.decimal128(5, -2))
    assert conform(pa.table({"c": given}), schema)["c"].to_pylist() == [Decimal(1200), None]
    with pytest.raises(InvalidSchemaError, match=r"column 'c': .* 77 digits"):
        canonical(pa.schema([("c", pa.decimal256(76, -1))]))
