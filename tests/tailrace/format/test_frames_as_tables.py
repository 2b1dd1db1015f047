"""Frames of other libraries as Arrow tables."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from tailrace.format.schema import to_table

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
