"""Reads a segment file batch by batch, on this side of its known damage and behind it.

Owner: pure reading. Every batch that comes out is proven (`tailrace.formats.segment.walk_batches`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.formats.batch_header import BatchHeader
from tailrace.formats.partition_file import Damage
from tailrace.formats.segment import Ending, Walk, file_name, schema_message_length, walk_batches
from workers.files import Files


class SegmentReader:
    """`read_at` of one open file, counting."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self.fd = fd
        self.size = files.size(fd)
        self.read_bytes = 0

    def read_at(self, length: int, position: int) -> bytes:
        data = self._files.read_at(self.fd, length, position)
        self.read_bytes += len(data)
        return data


def walk_past_damage(reader: SegmentReader, walk: Walk, seed: int, base: int, damage: list[Damage]) -> Iterator[tuple[int, BatchHeader]]:
    """Every intact batch, known damage jumped over."""
    while True:
        yield from walk_batches(reader.read_at, reader.size, walk, seed)
        known = next((d for d in damage if d.segment_base == base and d.position == walk.position and d.end_position), None)
        if walk.ending is not Ending.TORN or known is None:
            return
        walk.position, walk.next_offset, walk.ending = known.end_position, known.end, Ending.CLEAN


def first_batch_is_of(files: Files, directory: str, base: int, seed: int) -> bool | None:
    """Whether the first batch of a segment is this partition's; None: there is none. Raises OSError."""
    fd = files.open_for_read(f"{directory}/{file_name(base)}")
    try:
        reader = SegmentReader(files, fd)
        start = schema_message_length(reader.read_at)
        if not start or start >= reader.size:
            return None
        return next(walk_batches(reader.read_at, reader.size, Walk(start, base), seed), None) is not None
    finally:
        files.close(fd)
