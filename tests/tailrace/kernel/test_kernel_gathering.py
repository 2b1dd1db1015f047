"""Cells picked out of Arrow columns, and rows sorted by the partition of their key: the compiled
functions against their reference, and against each cell by itself.
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
from tailrace.client.records.partitioners import partition_for_key
from tailrace.kernel import reference_frames, reference_gather, small_batch

CELLS = st.lists(st.none() | st.binary(max_size=20), min_size=1, max_size=30)
NATIVE = kernel.load_compiled()
KERNELS: list[Any] = [reference_gather, *([NATIVE] if NATIVE is not None else [])]
compiled_only = pytest.mark.skipif(
    NATIVE is None, reason="no kernel is compiled here (make kernel)"
)
Pick = tuple[pa.Array, list[int] | None]


@st.composite
def picks(draw: st.DrawFn) -> list[Pick]:
    """Columns, whole or from the middle of longer ones, and rows of each in any order, or all."""
    found: list[Pick] = []
    for cells in draw(st.lists(CELLS, min_size=1, max_size=4)):
        column = pa.array(cells, pa.binary()).slice(draw(st.integers(0, len(cells) - 1)))
        rows = st.lists(st.integers(0, len(column) - 1), max_size=40)
        found.append((column, draw(st.none() | rows)))
    return found


def named(rows: list[int] | None) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    return None if rows is None else np.array(rows, np.int64)


def gathered(functions: Any, given_picks: list[Pick]) -> Any:
    return functions.GatheredCells(
        [column for column, _ in given_picks], [named(chosen) for _, chosen in given_picks]
    )


@compiled_only
@given(picks())
def test_cells_are_gathered_as_the_reference_does(given_picks: list[Pick]) -> None:
    compiled, reference = (gathered(one, given_picks) for one in (NATIVE, reference_gather))
    for name in ("offsets", "valid", "null_count"):
        assert getattr(compiled, name) == getattr(reference, name)
    assert len(compiled) == len(reference)
    assert compiled.data() == reference.data()


@pytest.mark.parametrize("functions", KERNELS)
@given(picks())
def test_a_gathered_column_has_the_cells_that_were_named(
    functions: ModuleType, given_picks: list[Pick]
) -> None:
    cells = gathered(functions, given_picks)
    buffers = [
        None if cells.valid is None else pa.py_buffer(cells.valid),
        pa.py_buffer(cells.offsets),
        pa.py_buffer(cells.data()),
    ]
    count = len(cells.offsets) // 4 - 1
    made = pa.Array.from_buffers(pa.binary(), count, buffers, cells.null_count)
    made.validate(full=True)
    assert made.to_pylist() == [
        column[row].as_py()
        for column, chosen in given_picks
        for row in (range(len(column)) if chosen is None else chosen)
    ]


@compiled_only
@given(picks(), st.sampled_from([0, 136]))
def test_cells_are_laid_into_a_message_as_their_bytes_are(
    given_picks: list[Pick], gap: int
) -> None:
    """The message of the default schema, with the gathered cells as its keys and as its values."""
    assert NATIVE is not None
    messages = []
    for functions, lay in (
        (NATIVE, NATIVE.lay_message),
        (reference_gather, reference_frames.lay_message),
    ):
        for is_copied in (False, True):
            cells = gathered(functions, given_picks)
            count = len(cells.offsets) // 4 - 1
            if not count:
                return
            content = cells.data() if is_copied else cells
            column = [0 if cells.valid is None else cells.valid, cells.offsets, content]
            nodes = [count, 0, *([count, cells.null_count] * 2), count, count, *([0] * 6)]
            tail = [(count + 7) // 8, 4 * (count + 1), 0, 0, 4, 0, 0, 4, 0]
            pieces = [0, bytes(8 * count), *column, *column, *tail]
            messages.append(lay(small_batch.template(), count, nodes, pieces, gap))
    assert all(message == messages[0] for message in messages)


@pytest.mark.parametrize("functions", KERNELS)
@given(CELLS, st.integers(0, 5), st.integers(1, 40))
def test_rows_are_sorted_by_the_partition_of_their_key_also_in_a_slice(
    functions: ModuleType, cells: list[bytes | None], start: int, partitions: int
) -> None:
    column = pa.array(cells, pa.binary()).slice(min(start, len(cells) - 1))
    keys = column.to_pylist()
    requested = [partitions if key is None else partition_for_key(key, partitions) for key in keys]
    rows, counts = functions.rows_by_partition(column, partitions)
    assert np.frombuffer(rows, np.int64).tolist() == sorted(
        range(len(keys)), key=requested.__getitem__
    )
    assert counts == [requested.count(number) for number in range(partitions + 1)]


@pytest.mark.parametrize("functions", KERNELS)
@pytest.mark.parametrize("row", [-1, 3, 2**40])
def test_a_row_that_is_not_there_is_refused(functions: ModuleType, row: int) -> None:
    with pytest.raises(ValueError, match="there are rows 0 to 2"):
        functions.GatheredCells([pa.array([b"a", b"b", b"c"])], [named([0, row])])


@pytest.mark.parametrize("functions", KERNELS)
def test_what_is_no_number_of_partitions_or_columns_is_refused(functions: ModuleType) -> None:
    for count in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match="partitions"):
            functions.rows_by_partition(pa.array([b"a"]), count)
    with pytest.raises(ValueError, match="rows"):
        functions.GatheredCells([pa.array([b"a"])], [])


@compiled_only
def test_offsets_that_leave_the_data_are_refused() -> None:
    assert NATIVE is not None
    bent = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(np.array([0, 2_000, 2], np.int32)), pa.py_buffer(b"ab")]
    )
    for rows in (None, named([1])):
        with pytest.raises(ValueError, match="offsets exceed"):
            NATIVE.GatheredCells([bent], [rows])
    with pytest.raises(ValueError, match="offsets exceed"):
        NATIVE.rows_by_partition(bent, 3)


@pytest.mark.parametrize("functions", KERNELS)
def test_gathered_cells_keep_their_columns_alive(functions: ModuleType) -> None:
    cells = functions.GatheredCells(
        [pa.array([b"x" * 100_000, b"y"])], [np.array([1, 0, 1], np.int64)]
    )
    pa.array([b"z" * 100_000, b"z"])
    assert cells.data() == b"y" + b"x" * 100_000 + b"y"
