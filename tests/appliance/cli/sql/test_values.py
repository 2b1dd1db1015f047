"""Times of an answer that Python has none for: the same as Python's where it has them, text
elsewhere.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import click
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.sql.values import _time_text, python_values

US = pa.timestamp("us", "UTC")


@given(st.datetimes())
def test_a_times_text_is_that_of_python_where_python_has_one(moment: dt.datetime) -> None:
    aware = moment.replace(tzinfo=dt.UTC)
    count = (aware - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    assert _time_text(count, US) == str(aware)
    assert _time_text((moment.date() - dt.date(1970, 1, 1)).days, pa.date32()) == str(moment.date())


@pytest.mark.parametrize(
    ("count", "kind", "text"),
    [(253_402_300_800_000_000, US, "10000-01-01 00:00:00+00:00"),
    (-62_135_596_800_000_001, US, "0000-12-31 23:59:59.999999+00:00"),
     (-62_167_219_200_000_001, US, "-0001-12-31 23:59:59.999999+00:00"),
     (2**63 - 2, pa.timestamp("us"), "294247-01-10 04:00:54.775806"),
     (2**63 - 1, pa.timestamp("us"), "infinity"), (1 - 2**63, pa.timestamp("us"), "-infinity"),
     (253_402_300_800, pa.timestamp("s"), "10000-01-01 00:00:00"),
     (2_932_897, pa.date32(), "10000-01-01"), (2**31 - 1, pa.date32(), "infinity")],
)  # fmt: skip
def test_other_years_are_written_out(count: int, kind: Any, text: str) -> None:
    physical = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    assert python_values("t", pa.array([0, count, None], physical).view(kind))[1:] == [text, None]


def test_inside_a_list_it_is_named_with_what_to_do() -> None:
    column = pa.array([[2**62]], pa.list_(pa.int64())).cast(pa.list_(pa.timestamp("us")))
    with pytest.raises(
        click.ClickException,
        match=r"column 'ts' has a value that Python cannot represent .*: select ts::varchar",
    ):
        python_values("ts", column)
