"""Segment index: one entry per batch, to find an offset or a time without reading the segment.

Layout, little endian:

    header  magic u32 | version u32 | segment base u64
    entry   base_offset i64 | file_position i64 | max_timestamp_us i64 | batch_length u32 |
            crc32c u32                                                             (32 bytes)

The timestamp is the largest in the segment so far, so entries are sorted by it.

Owner: the flusher writes it beside the segment.

Invariants:
- The index is disposable. It is synced only after entries were removed, which must not reappear.
- A reader verifies each entry. On a damaged one it walks the segment, until the flusher has rebuilt
  the index.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from tailrace.format.crc32c import crc32c

INDEX_MAGIC = 0x58444954  # "TIDX"
INDEX_VERSION = 2
INDEX_HEADER = struct.Struct("<IIQ")
INDEX_ENTRY = struct.Struct("<qqqII")
_FIELDS = struct.Struct("<qqqI")
_CRC = struct.Struct("<I")


class IndexDamagedError(Exception):
    """An entry does not match its checksum, or the header is another segment's."""


class IndexEntry(NamedTuple):
    """First offset, position in the segment file and length in bytes of a batch."""

    base_offset: int
    file_position: int
    max_timestamp_us: int
    """The largest timestamp in the segment so far."""
    batch_length: int


def encode_header(segment_base: int) -> bytes:
    """The header of an index."""
    return INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, segment_base)


def encode_entries(entries: list[IndexEntry]) -> bytes:
    """Encode entries, each with its checksum."""
    encoded: list[bytes] = []
    for entry in entries:
        fields = _FIELDS.pack(*entry)
        encoded += fields, _CRC.pack(crc32c(fields))
    return b"".join(encoded)


def _decode_entry(data: bytes) -> IndexEntry:
    if (
        len(data) != INDEX_ENTRY.size
        or crc32c(data[: _FIELDS.size]) != _CRC.unpack_from(data, _FIELDS.size)[0]
    ):
        raise IndexDamagedError("an index entry does not match its checksum")
    return IndexEntry._make(_FIELDS.unpack_from(data, 0))


def decode(data: bytes, segment_base: int) -> list[IndexEntry] | None:
    """All entries. None unless the bytes are this segment's whole, intact index."""
    if (
        data[: INDEX_HEADER.size] != encode_header(segment_base)
        or (len(data) - INDEX_HEADER.size) % INDEX_ENTRY.size
    ):
        return None
    try:
        return [
            _decode_entry(data[at : at + INDEX_ENTRY.size])
            for at in range(INDEX_HEADER.size, len(data), INDEX_ENTRY.size)
        ]
    except IndexDamagedError:
        return None


class IndexReader:
    """Search in an index file through `read_at(length, position)`.

    A lookup reads a few entries, and nothing is cached. Raises IndexDamagedError.
    """

    def __init__(self, read_at: Callable[[int, int], bytes], size: int, segment_base: int) -> None:
        self._read_at = read_at
        if read_at(INDEX_HEADER.size, 0) != encode_header(segment_base):
            raise IndexDamagedError(
                f"the header is not that of the index of segment {segment_base}"
            )
        self.count = (size - INDEX_HEADER.size) // INDEX_ENTRY.size

    def entry(self, number: int) -> IndexEntry:
        """Entry `number`, from 0. Raises IndexDamagedError."""
        return _decode_entry(
            self._read_at(INDEX_ENTRY.size, INDEX_HEADER.size + number * INDEX_ENTRY.size)
        )

    def find_offset(self, offset: int) -> IndexEntry | None:
        """The last entry at or below `offset`."""
        number = bisect_right(range(self.count), offset, key=lambda n: self.entry(n).base_offset)
        return self.entry(number - 1) if number else None

    def find_behind(self, offset: int) -> IndexEntry | None:
        """The first entry above `offset`."""
        number = bisect_right(range(self.count), offset, key=lambda n: self.entry(n).base_offset)
        return self.entry(number) if number < self.count else None

    def find_time(self, timestamp_us: int) -> IndexEntry | None:
        """The entry of the first batch with a record at or after `timestamp_us`."""
        number = bisect_right(
            range(self.count), timestamp_us - 1, key=lambda n: self.entry(n).max_timestamp_us
        )
        return self.entry(number) if number < self.count else None
