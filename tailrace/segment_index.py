"""A segment's index: one entry per batch, for lookup by offset and by time. The log is the truth, the index disposable (Kafka's
OffsetIndex).

Owner: the flusher (`workers.partition_log`) writes it behind the segment, never synced; whoever reads a log searches it.
Invariants: entries ascend in base offset and file position; `max_timestamp_us` is the largest so far, so it ascends too and can be
searched.
Layout: header (16 B) magic u32 | version u32 | segment base u64, then entries (24 B) base_offset i64 | file_position i64 |
max_timestamp_us i64.
Crash: missing, short or wrong ones are rebuilt by recovery.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

INDEX_MAGIC = 0x58444954  # "TIDX"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<IIQ")
INDEX_ENTRY = struct.Struct("<qqq")


class IndexEntry(NamedTuple):
    base_offset: int
    file_position: int
    max_timestamp_us: int


def encode_header(segment_base: int) -> bytes:
    return INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, segment_base)


def encode_entries(entries: list[IndexEntry]) -> bytes:
    return b"".join(INDEX_ENTRY.pack(*entry) for entry in entries)


def decode(data: bytes, segment_base: int) -> list[IndexEntry] | None:
    """All entries, or None when these bytes are not this segment's index."""
    if len(data) < INDEX_HEADER.size or INDEX_HEADER.unpack_from(data, 0) != (INDEX_MAGIC, INDEX_VERSION, segment_base):
        return None
    whole = (len(data) - INDEX_HEADER.size) // INDEX_ENTRY.size * INDEX_ENTRY.size
    return [IndexEntry._make(fields) for fields in INDEX_ENTRY.iter_unpack(data[INDEX_HEADER.size : INDEX_HEADER.size + whole])]


class IndexReader:
    """Searches an index file through `read_at(length, position)`, a few entries a lookup, nothing kept."""

    def __init__(self, read_at: Callable[[int, int], bytes], size: int, segment_base: int) -> None:
        self._read_at = read_at
        head = read_at(INDEX_HEADER.size, 0)
        valid = len(head) == INDEX_HEADER.size and INDEX_HEADER.unpack(head) == (INDEX_MAGIC, INDEX_VERSION, segment_base)
        self.count = max(0, size - INDEX_HEADER.size) // INDEX_ENTRY.size if valid else 0

    def entry(self, number: int) -> IndexEntry:
        return IndexEntry._make(INDEX_ENTRY.unpack(self._read_at(INDEX_ENTRY.size, INDEX_HEADER.size + number * INDEX_ENTRY.size)))

    def find_offset(self, offset: int) -> IndexEntry | None:
        """The last entry at or below `offset`."""
        number = bisect_right(range(self.count), offset, key=lambda n: self.entry(n).base_offset)
        return self.entry(number - 1) if number else None

    def find_time(self, timestamp_us: int) -> IndexEntry | None:
        """The first batch that has a record at or after `timestamp_us`: where the largest timestamp so far first reaches it."""
        number = bisect_right(range(self.count), timestamp_us - 1, key=lambda n: self.entry(n).max_timestamp_us)
        return self.entry(number) if number < self.count else None
