"""Stored columns: buffers of one batch in a segment file, read and decompressed in pieces.

Owner: one search (`netfront.fetch.lookup.timestamp_lookup`); reads only.

Invariants: between two yields at most PIECE_BYTES of the file and one decompressed piece are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import NamedTuple

from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.lookup.decompression import MAGIC_BYTES, PIECE_BYTES, unpacker_for
from shm.messages.lane_messages import Assignment
from tailrace.format.record_batch.arrow_metadata import RecordBatchMetadata, read_record_batch
from tailrace.format.record_batch.batch_header import PREFIX_BYTES, BatchHeader, metadata_size_of

UNITS_OF_A_PIECE = 64
VALUE_BYTES = 8
STORED_AS_IT_IS = -1
"""Decompressed size of a buffer that is stored uncompressed in a compressed batch."""


class UnreadableColumnError(Exception):
    """The front cannot read a batch's times or offsets: it is damaged, or its codec is missing on
    this host.
    """


class StoredBatch(NamedTuple):
    """A batch in a segment file, of which the bytes up to the body are read."""

    reader: LogReader
    route: Assignment
    base: int
    """The segment's base offset."""
    position: int
    head: bytes
    header: BatchHeader

    def row_from(self, offset: int) -> Generator[int, None, int]:
        """Return the number of the first row with at least this offset, the number of rows if there
        is none.
        """
        header = self.header
        if not header.is_sparse or offset <= header.base_offset:
            return max(0, offset - header.base_offset)
        rows = header.record_count
        for at, piece in self._offsets().pieces(VALUE_BYTES * rows, 0):
            yield UNITS_OF_A_PIECE
            with memoryview(piece).cast("q") as values:
                if len(values) and values[-1] >= offset:
                    return at // VALUE_BYTES + bisect_left(values, offset)
        return rows

    def offset_of(self, row: int) -> Generator[int, None, int]:
        """Return the offset of a row."""
        header = self.header
        if not header.is_sparse:
            return header.base_offset + row
        offset = yield from number_at(self._offsets(), row)
        if not header.base_offset <= offset < header.next_offset:
            raise UnreadableColumnError
        return offset

    def _offsets(self) -> StoredBuffer:
        """Return the last buffer of a sparse batch, the offsets of its rows."""
        metadata = read_record_batch(self.head, PREFIX_BYTES)
        return self.buffer(metadata, len(metadata.buffers) // 2 - 1)

    def buffer(self, metadata: RecordBatchMetadata, number: int) -> StoredBuffer:
        """Return a buffer. Raises UnreadableColumnError if it is not in the batch."""
        head, header = self.head, self.header
        body_start = PREFIX_BYTES + metadata_size_of(head)
        place = metadata.buffers[2 * number : 2 * number + 2]
        if (
            len(place) != 2
            or place[0] < 0
            or place[1] < 0
            or place[0] + place[1] > header.batch_length - body_start
        ):
            raise UnreadableColumnError
        return StoredBuffer(
            self.reader,
            self.route,
            self.base,
            self.position + body_start + place[0],
            place[1],
            metadata.compressed,
        )


class StoredBuffer(NamedTuple):
    """One buffer of a batch in a segment file."""

    reader: LogReader
    route: Assignment
    base: int
    position: int
    length: int
    is_compressed: bool

    def pieces(self, length: int, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield (position, piece) of its first `length` decompressed bytes, from byte `start` or
        before it.

        Pieces are multiples of 8 bytes except the last, and may be empty. Raises
        UnreadableColumnError if the buffer is shorter.
        """
        if start >= length:
            return
        if not self.is_compressed:
            yield from self._stored(0, length, start)
            return
        head = self._read(8 + MAGIC_BYTES, 0)
        size = int.from_bytes(head[:8], "little", signed=True)
        if size == STORED_AS_IT_IS:
            yield from self._stored(8, length, start)
        elif size < length:
            raise UnreadableColumnError
        else:
            yield from self._unpacked(head[8:], length)

    def _read(self, length: int, at: int) -> bytes:
        data = self.reader.files.read_at(
            self.route, self.base, min(length, self.length - at), self.position + at
        )
        if not data:
            raise UnreadableColumnError
        return data

    def _stored(self, at: int, length: int, start: int) -> Iterator[tuple[int, bytes]]:
        if self.length - at < length:
            raise UnreadableColumnError
        start -= start % VALUE_BYTES
        while start < length:
            piece = self._read(min(PIECE_BYTES, length - start), at + start)
            if len(piece) % VALUE_BYTES and start + len(piece) < length:
                raise UnreadableColumnError
            yield start, piece
            start += len(piece)

    def _unpacked(self, magic: bytes, length: int) -> Iterator[tuple[int, bytes]]:
        unpacker = unpacker_for(magic)
        if unpacker is None:
            raise UnreadableColumnError
        with closing(unpacker):
            carried, at, read = b"", 0, 8
            while read < self.length:
                packed = self._read(PIECE_BYTES, read)
                read += len(packed)
                yield at, b""  # a codec may consume much before its first output
                for piece in unpacker.feed(packed):
                    carried = (carried + piece)[: length - at]
                    whole = (
                        len(carried)
                        if at + len(carried) == length
                        else len(carried) // VALUE_BYTES * VALUE_BYTES
                    )
                    yield at, carried[:whole]
                    at += whole
                    carried = carried[whole:]
                    if at == length:
                        return
        raise UnreadableColumnError


def number_at(buffer: StoredBuffer, row: int) -> Generator[int, None, int]:
    """Return the 64-bit number of a row."""
    for at, piece in buffer.pieces(VALUE_BYTES * (row + 1), VALUE_BYTES * row):
        yield UNITS_OF_A_PIECE
        start = VALUE_BYTES * row - at
        if 0 <= start < len(piece):
            return int.from_bytes(piece[start : start + VALUE_BYTES], "little", signed=True)
    raise UnreadableColumnError


def first_null(
    pieces: Iterator[tuple[int, bytes]], first: int, rows: int
) -> Generator[int, None, int]:
    """Return the first row from `first` on that the bitmap in `pieces` marks as null, or `rows`."""
    for at, piece in pieces:
        yield UNITS_OF_A_PIECE
        if at + len(piece) <= first // 8:
            continue
        bits = bytearray(piece)
        if at <= first // 8:
            bits[: first // 8 - at] = b"\xff" * (first // 8 - at)
            bits[first // 8 - at] |= (1 << first % 8) - 1
        skipped = len(bits) - len(bits.lstrip(b"\xff"))
        if skipped < len(bits):
            nulls = ~bits[skipped] & 0xFF
            return min(rows, 8 * (at + skipped) + (nulls & -nulls).bit_length() - 1)
    return rows
