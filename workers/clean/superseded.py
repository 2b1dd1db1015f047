"""Superseded records: finds, with bounded memory, the records whose key has a later one.

    pass over the dirty segments     key -> last offset, in a table of fixed size (`KeyOffsets`);
                                     a bit for each offset that a later one of its key exceeds
    the table is full                half the range of hashes, from the beginning of the pass
    one range has all keys           rows of cleaned segments are looked up in the table
    several ranges                   after each, the bits of cleaned segments are set, too; later
                                     ranges take the same table

Owner: one pass of the cleaner.

Invariants:
- Records of aborted transactions supersede nothing, and records without a key are never superseded.
- Table and bits take what is configured. Bits that would take over a fourth of it are left out, and
  every row is looked up. Several ranges need one bit for each offset of the pass, beside the table.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.kernel import KeyOffsets
from tailrace.kernel.batch_shape import shape_of
from tailrace.kernel.reference_keys import TAGS_END
from tailrace.kernel.reference_offsets import SLOT_BYTES
from workers.clean.offset_bits import Flags, OffsetBits
from workers.clean.sources import Offsets, Source, SourceReader
from workers.segment.cleaning_job import JobSegment

SLOTS_MIN = 1024
BITS_PART = 4


class Superseded:
    """The superseded records of a part of a log."""

    def __init__(
        self,
        reader: SourceReader,
        key_column: str,
        segments: list[JobSegment],
        dedupe_bytes: int,
    ) -> None:
        """`key_column`: the column with the keys."""
        self._reader = reader
        self._key_column = key_column
        self._segments = segments
        dirty = [each for each in segments if not each.is_cleaned]
        start = dirty[0].base if dirty else segments[-1].end
        bit_bytes = (segments[-1].end - start) // 8
        self._bits: OffsetBits | None = None
        """For those of the dirty segments, or after several ranges of all."""
        if bit_bytes <= dedupe_bytes // BITS_PART:
            self._bits = OffsetBits(segments[0].base, start, segments[-1].end)
            dedupe_bytes -= bit_bytes
        self._puts_bits = self._bits is not None
        rows = sum(each.end - each.base for each in dirty)
        self._slots = min(max(SLOTS_MIN, rows * 4 // 3), max(2, dedupe_bytes // SLOT_BYTES))
        self._table: KeyOffsets | None = None
        """The keys of all hashes, if they have room."""
        self._shapes = {
            number: (shape_of(layout), node)
            for number, layout in (
                (number, read_schema(bytes(schema.serialize())))
                for number, schema in reader.schemas.items()
            )
            for node, of in enumerate(layout.nodes)
            if of.top_level and of.name == key_column
        }
        self._only_shape = (
            next(iter(self._shapes.values()))
            if len(reader.schemas) == len(self._shapes) == 1
            else None
        )
        self.range_count = 0
        """Number of ranges of hashes that were needed."""

    # ---- finding ---------------------------------------------------------------------------------

    def find(self) -> Iterator[int]:
        """Read the keys. Yields the bytes read, after some batches. Raises UnreadableError,
        OSError.
        """
        table = KeyOffsets(self._slots)
        low, width = 0, TAGS_END
        while low < TAGS_END:
            high = min(low + width, TAGS_END)
            if not (yield from self._put_all(table, low, high)):
                width //= 2
                table.clear()
                continue
            self.range_count += 1
            if width == TAGS_END:
                self._table = table
                return
            yield from self._note_all(table, low, high)
            table.clear()
            low = high

    def _put_all(self, table: KeyOffsets, low: int, high: int) -> Generator[int, None, bool]:
        """Put the keys of the dirty segments. Returns False if there is no room."""
        for segment in self._segments:
            if segment.is_cleaned:
                continue
            put_stored = partial(self._put_stored, table, segment, low, high)
            for found in self._reader.read_keys(segment, put_stored):
                if isinstance(found, int):
                    yield found
                    continue
                is_full = not self._put(table, found, low, high) and high - low > 1
                yield found.byte_count
                if is_full:
                    return False
        return True

    def _put_stored(
        self,
        table: KeyOffsets,
        segment: JobSegment,
        low: int,
        high: int,
        data: memoryview,
        at: int,
        following: int,
    ) -> tuple[int, int]:
        """Put the keys of the plain batches at a place, as far as they have room. Returns where
        the others begin, and their offset.
        """
        shape = self._shapes.get(segment.schema_id) or self._only_shape
        if shape is None:
            return at, following
        of, key_node = shape
        schema_id = segment.schema_id if len(self._shapes) > 1 else -1
        return table.put_stored(
            data, at, self._reader.seed, following, segment.end, of, key_node, schema_id,
            *self._bit_memory(), low, high,
        )  # fmt: skip

    def _put(self, table: KeyOffsets, source: Source, low: int, high: int) -> bool:
        """Put the keys of a batch; False if there is no room."""
        count = len(source.offsets)
        if not count:
            return True
        cells = _cells(self._column(source))
        return table.put(*cells, source.offsets, low, high, *self._bit_memory()) == count

    def _bit_memory(self) -> tuple[bytearray | None, int]:
        """Memory of the bits and the offset of the first one, as `put` takes them."""
        bits = self._bits
        return (bits.data, bits.base) if bits is not None else (None, 0)

    def _note_all(self, table: KeyOffsets, low: int, high: int) -> Iterator[int]:
        """Set the bits of what a range of hashes supersedes, where `put` has not done so."""
        first = self._segments[0].base
        if self._bits is None:
            self._bits = OffsetBits(first, first, self._segments[-1].end)
        elif self._bits.start > first:
            self._bits.reach_down(first)
        for segment in self._segments:
            if self._puts_bits and not segment.is_cleaned:
                continue
            for source in self._reader.read(segment):
                kept = np.ones(len(source.offsets), np.uint8)
                cells = _cells(self._column(source))
                table.mark_latest(*cells, source.offsets, kept, low, high)
                self._bits.set(source.offsets[kept == 0])
                yield source.byte_count

    # ---- what was found --------------------------------------------------------------------------

    def kept(self, source: Source) -> Flags:
        """1 for each row of a batch that is not superseded, else 0."""
        offsets = source.offsets
        if not len(offsets):
            return np.ones(0, np.uint8)
        table, bits = self._table, self._bits
        if bits is not None and (
            table is None or (not source.header.is_sparse and offsets[0] >= bits.start)
        ):
            return bits.unset(offsets)
        kept = np.ones(len(offsets), np.uint8)
        if table is not None:
            table.mark_latest(*_cells(self._column(source)), offsets, kept)
        return kept

    def is_superseded(self, start: int, end: int) -> bool:
        """True if all offsets of a range are known to be those of superseded records."""
        return self._bits is not None and self._bits.are_set(start, end)

    def kept_bytes(self, segment: JobSegment) -> int:
        """About the bytes of a segment's records that are not known to be superseded."""
        if self._bits is None:
            return segment.size
        count = segment.end - segment.base
        known = self._bits.set_count(segment.base, segment.end)
        return segment.size * (count - known) // max(1, count)

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
