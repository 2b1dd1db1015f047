"""Segment reader: reads a segment file batch by batch, past its known damage.

Owner: pure reading. Every batch returned is verified
(`tailrace.format.segments.segment.walk_batches`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.format.directory.partition_metadata import DamagedRange
from tailrace.format.record_batch.batch_header import PREFIX_BYTES, BatchHeader, metadata_size_of
from tailrace.format.record_batch.header_peek import schema_id_at
from tailrace.format.segments.segment import (
    Ending,
    Walk,
    file_name,
    schema_message_length,
    walk_batches,
)
from workers.segment.files import Files


class SegmentReader:
    """`read_at` of one open file, which counts the bytes read."""

    def __init__(self, files: Files, fd: int) -> None:
        self._files = files
        self.fd = fd
        self.size = files.size(fd)
        self.read_bytes = 0

    def read_at(self, length: int, position: int) -> bytes:
        data = self._files.read_at(self.fd, length, position)
        self.read_bytes += len(data)
        return data

    def schema_id_at(self, position: int) -> int:
        """The schema id of the batch at `position`, of which the form was checked."""
        length = PREFIX_BYTES + metadata_size_of(self.read_at(PREFIX_BYTES, position))
        return schema_id_at(self.read_at(length, position), 0)

    def write_at(self, data: bytes, position: int) -> None:
        """Repair bytes of a file that was opened for writing. Raises OSError."""
        self._files.write_at(self.fd, [data], position)


def walk_past_damage(
    reader: SegmentReader, walk: Walk, seed: int, base: int, damage: list[DamagedRange]
) -> Iterator[tuple[int, BatchHeader]]:
    """Yield every intact batch. Skip known damage."""
    while True:
        yield from walk_batches(reader.read_at, reader.size, walk, seed)
        known = next(
            (
                d
                for d in damage
                if d.segment_base == base and d.position == walk.position and d.end_position
            ),
            None,
        )
        if walk.ending is not Ending.TORN or known is None:
            return
        walk.position, walk.next_offset, walk.ending = known.end_position, known.end, Ending.CLEAN


def first_batch_is_of(files: Files, directory: str, base: int, seed: int) -> bool | None:
    """True if the first batch of a segment belongs to this partition, None if there is no batch.

    Raises OSError.
    """
    fd = files.open_for_read(f"{directory}/{file_name(base)}")
    try:
        reader = SegmentReader(files, fd)
        start = schema_message_length(reader.read_at)
        if not start or start >= reader.size:
            return None
        return (
            next(walk_batches(reader.read_at, reader.size, Walk(start, base), seed), None)
            is not None
        )
    finally:
        files.close(fd)
