"""Superseded records: finds, with bounded memory, the records whose key has a later one.

    pass over the dirty segments     key -> last offset, in a table of fixed size (`KeyOffsets`)
    the table is full                half the range of hashes, from the beginning of the pass
    one range has all keys           rows are looked up in the table while segments are written
    several ranges                   after each, one bit is set for each superseded record; later
                                     ranges take the same table

Owner: one pass of the cleaner.

Invariants:
- Records of aborted transactions supersede nothing, and records without a key are never superseded.
- The memory is the table's, and with several ranges one bit for each offset of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.kernel import KeyOffsets
from tailrace.kernel.reference_keys import TAGS_END
from tailrace.kernel.reference_offsets import SLOT_BYTES
from workers.clean.sources import Offsets, Source
from workers.segment.cleaning_job import JobSegment

SLOTS_MIN = 1024
Read = Callable[[JobSegment], Iterator[Source]]
Kept = np.ndarray[Any, np.dtype[np.uint8]]


class Superseded:
    """The superseded records of a part of a log."""

    def __init__(self, key_column: str, segments: list[JobSegment], dedupe_bytes: int) -> None:
        """`key_column`: the column with the keys."""
        self._key_column = key_column
        self._segments = segments
        self._dedupe_bytes = dedupe_bytes
        self._table: KeyOffsets | None = None
        """The keys of all hashes, if they have room."""
        self._bits: Kept | None = None
        self.range_count = 0
        """Number of ranges of hashes that were needed."""

    def find(self, read: Read) -> Iterator[int]:
        """Read the keys. Yields the bytes read, after each batch."""
        rows = sum(
            segment.end - segment.base for segment in self._segments if not segment.is_cleaned
        )
        slots = min(max(SLOTS_MIN, rows * 4 // 3), max(2, self._dedupe_bytes // SLOT_BYTES))
        table = KeyOffsets(slots)
        low, width = 0, TAGS_END
        while low < TAGS_END:
            high = min(low + width, TAGS_END)
            is_full = False
            for segment in self._segments:
                if segment.is_cleaned:
                    continue
                for source in read(segment):
                    is_full = not self._put(table, source, low, high) and high - low > 1
                    yield source.byte_count
                    if is_full:
                        break
                if is_full:
                    break
            if is_full:
                width //= 2
                table.clear()
                continue
            self.range_count += 1
            if width == TAGS_END:
                self._table = table
                return
            for segment in self._segments:
                for source in read(segment):
                    self._note(table, source, low, high)
                    yield source.byte_count
            table.clear()
            low = high

    def _put(self, table: KeyOffsets, source: Source, low: int, high: int) -> bool:
        """Put the keys of a batch; False if there is no room."""
        count = len(source.offsets)
        if not count:
            return True
        return table.put(*_cells(self._column(source)), source.offsets, low, high) == count

    def _note(self, table: KeyOffsets, source: Source, low: int, high: int) -> None:
        kept = np.ones(len(source.offsets), np.uint8)
        table.mark_latest(*_cells(self._column(source)), source.offsets, kept, low, high)
        start, end = self._segments[0].base, self._segments[-1].end
        if self._bits is None:
            self._bits = np.zeros((end - start + 7) // 8, np.uint8)
        places = source.offsets[kept == 0] - start
        np.bitwise_or.at(self._bits, places >> 3, np.left_shift(1, places & 7).astype(np.uint8))

    def kept(self, source: Source) -> Kept:
        """1 for each row of a batch that is not superseded, else 0."""
        kept = np.ones(len(source.offsets), np.uint8)
        if not len(kept):
            return kept
        if self._table is not None:
            table = self._table
            table.mark_latest(*_cells(self._column(source)), source.offsets, kept)
        elif self._bits is not None:
            places = source.offsets - self._segments[0].base
            kept = (~(self._bits[places >> 3] >> (places & 7)) & 1).astype(np.uint8)
        return kept

    def _column(self, source: Source) -> pa.Array:
        return source.rows.column(self._key_column)


def offsets_of(column: pa.Array) -> Offsets:
    """A column of 64-bit integers without nulls as an array."""
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


def _cells(column: pa.Array) -> tuple[Any, Any, Any, int, int, int]:
    """A column as `KeyOffsets.put` takes it."""
    kind = column.type
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
        kind = column.type
    buffers = column.buffers()
    validity = buffers[0] if column.null_count else None
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return validity, buffers[1], buffers[2], column.offset, len(column), 0
    return validity, None, buffers[1], column.offset, len(column), kind.bit_width // 8
