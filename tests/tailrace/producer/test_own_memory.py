"""Records that a producer has accepted lie in its own memory.

Run with the compiled kernel and with TAILRACE_PURE=1.
"""

from __future__ import annotations

from array import array
from collections import deque
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tailrace.producer.record_validation import own_cell
from tests.kit.peers.lone_producers import producer


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("key_column", [None, "key"])
def test_no_change_of_a_frame_reaches_its_batches(compression: str, key_column: str | None) -> None:
    content = bytearray(b"onetwo")
    offsets = np.array([0, 3, 6], np.int32)
    values = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(offsets), pa.py_buffer(content)]
    )
    table = pa.table({"key": pa.array([b"a", b"a"]), "value": values})
    with producer(compression_type=compression) as made:
        for _ in range(20):
            made.send_arrow("t", table, key_column=key_column)
        content[:] = b"XXXXXX"
        offsets[1] = 0
        rows = [
            row["value"]
            for batch in made._sender_thread.accumulator.incomplete()
            for row in batch.rebuilt_frame().to_pylist()
        ]
    assert rows == [b"one", b"two"] * 20


def test_no_change_of_a_cell_reaches_the_rows_that_have_it() -> None:
    class Grade(IntEnum):
        GOOD = 1

    cells: list[Any] = [
        [1, [2], bytearray(b"a")],
        ([3], {"a": [4]}),
        {"b": [5], "c": np.array([6, 7])},
        bytearray(b"x"),
        memoryview(bytearray(b"y")),
        memoryview(array("i", [8, 9])),
        deque([10]),
    ]
    owned = [own_cell(cell) for cell in cells]
    cells[0][1][0] = cells[0][2][0] = cells[1][0][0] = cells[1][1]["a"][0] = 0
    cells[2]["b"][0] = cells[2]["c"][0] = cells[3][0] = cells[4][0] = cells[5][0] = cells[6][0] = 0
    assert owned[:2] == [[1, [2], b"a"], ([3], {"a": [4]})]
    assert (owned[2]["b"], owned[2]["c"].tolist()) == ([5], [6, 7])
    assert owned[3:] == [b"x", b"y", [8, 9], deque([10])]
    for unchanging in (Grade.GOOD, (1, "a"), "text", np.float64(1.5)):
        assert own_cell(unchanging) is unchanging


def test_a_cell_that_cannot_be_copied_is_left_to_the_encoder() -> None:
    cell = (number for number in range(3))
    assert own_cell(cell) is cell
