"""Frames of other libraries as Arrow tables."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from tailrace.core.errors import SchemaMismatchError
from tailrace.format.schema import conform, to_table

ROWS = pd.DataFrame({"n": [1, 2], "m": [3, 4]})


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (ROWS, ["n", "m"]),
        (ROWS[ROWS["n"] > 1], ["n", "m"]),
        (ROWS.set_index("n"), ["m", "n"]),
        (ROWS.set_index("n", drop=False), ["n", "m"]),
        (ROWS.rename_axis("id"), ["n", "m", "id"]),
        (ROWS.set_index(["n", "m"]).assign(k=5), ["k", "n", "m"]),
        (ROWS.set_index([["a", "b"], "n"]), ["m", "n"]),
    ],
)
def test_levels_of_a_pandas_index_that_have_names_are_columns(
    frame: Any, expected: list[str]
) -> None:
    assert to_table(frame).column_names == expected


@pytest.mark.parametrize(
    ("frame", "match"),
    [
        (pd.Series([1, 2]), "no columns"),
        (pa.array([1]), "no columns"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), "Duplicate column names"),
        (pd.DataFrame({"a": [1, "x"]}), "column a with type object"),
        (pd.DataFrame({"a": [1 + 2j]}), "complex128"),
    ],
)
def test_what_is_no_table_is_refused_with_an_error_of_the_package(frame: Any, match: str) -> None:
    with pytest.raises(SchemaMismatchError, match=match):
        to_table(frame)


@pytest.mark.parametrize("view", [pa.list_view, pa.large_list_view])
def test_lists_by_views_become_lists(view: Any) -> None:
    rows = [[1], None, [2, 3], []]
    column = pa.array(rows, view(pa.int64()))
    schema = pa.schema([("a", pa.list_(pa.int64()))])
    for start in range(3):
        table = conform(pa.table({"a": column.slice(start)}), schema)
        assert table.column("a").to_pylist() == rows[start:]
