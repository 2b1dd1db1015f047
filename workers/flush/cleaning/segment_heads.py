"""Segment heads: what the first batches of a log's sealed segments say, and which segments cannot
be merged. It is kept as long as the log is open, so that no segment is read twice for it.

Owner: `workers.flush.compaction`, one per log.

Invariants:
- An entry is of one base and one size: a segment that was swapped has another one.
"""

from __future__ import annotations

from typing import NamedTuple

from tailrace.format.record_batch.batch_header import (
    PREFIX_BYTES,
    BatchFormatError,
    BatchHeader,
    metadata_size_of,
    read_header,
)
from tailrace.format.segments.segment import file_name, schema_message_length
from workers.log.partition_log import PartitionLog
from workers.segment.checkpoint import SealedSegment
from workers.segment.segment_swap import CleanedRun

Key = tuple[int, int]
"""(base, size)"""


class Head(NamedTuple):
    """The first batch of a segment, as far as it speaks for the segment."""

    is_cleaned: bool = False
    is_merged: bool = False
    first_append_us: int = 0
    schema_id: int = -1

    @classmethod
    def of(cls, header: BatchHeader) -> Head:
        return cls(
            header.is_sparse, header.merged_count > 0, header.append_time_us, header.schema_id
        )


class SegmentHeads:
    """See the module's docstring."""

    def __init__(self, log: PartitionLog) -> None:
        self.log = log
        self._known: dict[Key, Head] = {}
        self._unmergeable: set[Key] = set()

    def of(self, segment: SealedSegment) -> Head:
        """The head of a segment, read if it is not known."""
        head = self._known.get((segment.base, segment.size))
        if head is None:
            try:
                head = self._read(segment.base)
            except BatchFormatError:
                head = Head()  # the cleaner reports what is wrong
            except OSError:
                return Head()  # it is read again: the next time it may be readable
            self._known[segment.base, segment.size] = head
        return head

    def is_unmergeable(self, segment: SealedSegment) -> bool:
        """True if the segment could not be read to merge it."""
        return (segment.base, segment.size) in self._unmergeable

    def note_unmergeable(self, base: int) -> None:
        """Record that a segment cannot be read to merge it."""
        segment = self.log.sealed.get(base)
        if segment is not None:
            self._unmergeable.add((segment.base, segment.size))

    def note_swapped(self, run: CleanedRun, *, is_cleaned: bool) -> None:
        """Record the head of the segment that stands for a run now. `is_cleaned`: False: it was
        merged.
        """
        before = self._known.get((run.base, run.replaced[0][1]), Head())
        self._known[run.base, run.size] = before._replace(
            is_cleaned=is_cleaned, is_merged=not is_cleaned
        )

    def drop_removed(self) -> None:
        """Forget segments that are not there any more."""
        sealed = self.log.sealed
        kept = {(segment.base, segment.size) for segment in sealed.values()}
        self._unmergeable &= kept
        if not self._known.keys() <= kept:
            self._known = {key: head for key, head in self._known.items() if key in kept}

    def _read(self, base: int) -> Head:
        """Read the metadata of a segment's first batch. Raises OSError, BatchFormatError."""
        files = self.log.files
        fd = files.open_for_read(f"{self.log.directory}/{file_name(base)}")
        try:
            start = schema_message_length(lambda n, at: files.read_at(fd, n, at))
            size = metadata_size_of(files.read_at(fd, PREFIX_BYTES, start))
            return Head.of(read_header(files.read_at(fd, PREFIX_BYTES + size, start)))
        finally:
            files.close(fd)
