"""Chunk: values of a table, packed as Arrow columns.

Invariants:
- A chunk's rows never change. Rows that are no key's latest any more are dropped with the chunk, or
  when its live rows are copied to another one (`tailrace.consumer.table.latest_store`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

VALUE, HEADERS = "value", "headers"


class Chunk:
    """Rows with a value, of one topic."""

    __slots__ = ("_data", "_ends", "_headers", "batch", "byte_count", "live_count")

    def __init__(self, batch: pa.RecordBatch, *, typed: bool) -> None:
        """`batch` has the columns of a row, a typed topic's or `value` and perhaps `headers`. It
        begins at the first row of its buffers.
        """
        self.batch = batch
        self.live_count = batch.num_rows
        """The number of rows that are the latest of their keys."""
        self.byte_count = int(batch.get_total_buffer_size()) + 1_000
        self._ends: memoryview | None = None
        self._data = memoryview(b"")
        self._headers: pa.Array | None = None
        if not typed:
            column = batch.column(0)
            _, ends, data = column.buffers()
            self._ends = memoryview(ends).cast("i")
            self._data = memoryview(b"" if data is None else data)
            self._headers = batch.column(1) if batch.num_columns > 1 else None

    def value(self, row: int) -> Any:
        """The value of a row: bytes, or a dict of a typed topic's columns."""
        if self._ends is None:
            return self.batch.slice(row, 1).to_pylist()[0]
        return bytes(self._data[self._ends[row] : self._ends[row + 1]])

    def headers(self, row: int) -> list[tuple[str, bytes]]:
        """The headers of a row's record."""
        found = None if self._headers is None else self._headers[row].as_py()
        return [(header["key"], header["value"]) for header in found or ()]


def taken(batch: pa.RecordBatch, rows: np.ndarray[Any, Any]) -> pa.RecordBatch:
    """A copy of these rows."""
    numbers = np.ascontiguousarray(rows, dtype=np.int64)
    return batch.take(
        pa.Array.from_buffers(pa.int64(), len(numbers), [None, pa.py_buffer(numbers)])
    )
