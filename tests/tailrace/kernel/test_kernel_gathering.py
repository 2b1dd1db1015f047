"""Cells picked out of Arrow columns, and their hashes: the compiled functions against their
reference, and against each cell by itself.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace import kernel
from tailrace.client.records.partitioners import murmur2
from tailrace.kernel import reference_gather as reference_gathering

CELLS = st.lists(st.none() | st.binary(max_size=20), min_size=1, max_size=30)
NATIVE = kernel.load_compiled()
KERNELS: list[Any] = [reference_gathering, *([NATIVE] if NATIVE is not None else [])]
compiled_only = pytest.mark.skipif(
    NATIVE is None, reason="no kernel is compiled here (make kernel)"
)


@st.composite
def picks(draw: st.DrawFn) -> list[tuple[pa.Array, list[int]]]:
    """Columns, whole or from the middle of longer ones, and rows of each in any order."""
    found = []
    for cells in draw(st.lists(CELLS, min_size=1, max_size=4)):
        column = pa.array(cells, pa.binary()).slice(draw(st.integers(0, len(cells) - 1)))
        found.append((column, draw(st.lists(st.integers(0, len(column) - 1), max_size=40))))
    return found


def named(rows: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(rows, np.int64)


@compiled_only
@given(picks())
def test_cells_are_gathered_as_the_reference_does(
    given_picks: list[tuple[pa.Array, list[int]]],
) -> None:
    columns, rows = (
        [column for column, _ in given_picks],
        [named(chosen) for _, chosen in given_picks],
    )
    assert NATIVE is not None
    assert NATIVE.gathered(columns, rows) == reference_gathering.gathered(columns, rows)


@pytest.mark.parametrize("functions", KERNELS)
@given(picks())
def test_a_gathered_column_has_the_cells_that_were_named(
    functions: ModuleType, given_picks: list[tuple[pa.Array, list[int]]]
) -> None:
    offsets, data, valid, nulls = functions.gathered(
        [column for column, _ in given_picks], [named(chosen) for _, chosen in given_picks]
    )
    buffers = [
        None if valid is None else pa.py_buffer(valid),
        pa.py_buffer(offsets),
        pa.py_buffer(data),
    ]
    made = pa.Array.from_buffers(pa.binary(), len(offsets) // 4 - 1, buffers, nulls)
    made.validate(full=True)
    assert made.to_pylist() == [
        column[row].as_py() for column, chosen in given_picks for row in chosen
    ]


@pytest.mark.parametrize("functions", KERNELS)
@given(CELLS, st.integers(0, 5))
def test_each_cell_has_its_hash_also_in_a_slice(
    functions: ModuleType, cells: list[bytes | None], start: int
) -> None:
    column = pa.array(cells, pa.binary()).slice(min(start, len(cells) - 1))
    requested = [0 if cell is None else murmur2(cell) for cell in column.to_pylist()]
    assert np.frombuffer(functions.murmur2_cells(column), np.uint32).tolist() == requested


@pytest.mark.parametrize("functions", KERNELS)
@pytest.mark.parametrize("row", [-1, 3, 2**40])
def test_a_row_that_is_not_there_is_refused(functions: ModuleType, row: int) -> None:
    with pytest.raises(ValueError, match="there are rows 0 to 2"):
        functions.gathered([pa.array([b"a", b"b", b"c"])], [named([0, row])])


@compiled_only
def test_offsets_that_leave_the_data_are_refused() -> None:
    assert NATIVE is not None
    bent = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(np.array([0, 2_000, 2], np.int32)), pa.py_buffer(b"ab")]
    )
    with pytest.raises(ValueError, match="offsets exceed"):
        NATIVE.gathered([bent], [named([1])])
    with pytest.raises(ValueError, match="offsets exceed"):
        NATIVE.murmur2_cells(bent)


def test_a_copy_in_kept_memory_is_the_bytes_and_nobody_elses() -> None:
    source = bytes(range(256)) * 1024
    first = kernel.copied(source)
    kernel.keep_message(first)
    second = kernel.copied(memoryview(source)[:-8])
    second[0] = 99
    assert first == source, "memory that somebody still sees is not used again"
    assert second[1:] == source[1:-8]
