"""Active segment: the segment being written, with its two files and their written and synced ends.

Owner: the flusher.

Invariants:
- synced_end <= end, and synced_next <= the log's next offset.
- The index file has `batch_count` entries. `new_entries` follow them.

Crash: a segment killed at its beginning has no schema, and recovery removes it. A rewritten one
gets its name after it is durable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from shm.crash_points import crash_point
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import BatchFormatError, verify_batch
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.segments import segment_index
from tailrace.format.segments.segment import INDEX_SUFFIX, file_name
from tailrace.format.segments.segment_index import (
    INDEX_ENTRY,
    INDEX_HEADER,
    IndexDamagedError,
    IndexEntry,
    IndexReader,
)
from workers.log.recovery.log_recovery import RecoveredLog
from workers.segment.files import Files
from workers.segment.segment_index_files import open_index

UNFINISHED_SUFFIX = ".new"
"""Suffix of a rewritten segment without its final name. The next start removes leftovers."""


class LogGapError(RuntimeError):
    """A batch does not begin where the log ends: writing it would leave a hole or overwrite."""


class PendingBatch(NamedTuple):
    """A placed batch whose group is not settled. Its bytes are still in the ring."""

    base_offset: int
    next_offset: int
    max_timestamp_us: int
    append_time_us: int
    data: Readable


class ActiveSegment:
    """Segment being written.

    The log's `place` moves `end` and adds entries. Everything else is written here.
    """

    __slots__ = (
        "_files",
        "base",
        "batch_count",
        "end",
        "fd",
        "first_append_us",
        "index_fd",
        "max_timestamp_us",
        "new_entries",
        "schema_id",
        "synced_end",
        "synced_next",
    )

    def __init__(
        self,
        files: Files,
        base: int,
        fd: int,
        index_fd: int,
        end: int,
        next_offset: int,
        batch_count: int,
        schema_id: int,
    ) -> None:
        self._files = files
        self.base = base
        self.schema_id = schema_id
        """The schema of all its batches."""
        self.fd = fd
        self.index_fd = index_fd
        self.end = end
        """File position after the last placed batch."""
        self.synced_end = end
        self.synced_next = next_offset
        """Synced end of the file, in bytes and in offsets."""
        self.batch_count = batch_count
        """Number of entries in the index file."""
        self.max_timestamp_us = 0
        self.first_append_us = 0
        """Append time of its first batch, 0 while empty."""
        self.new_entries: list[IndexEntry] = []

    def close(self) -> None:
        """Close both files."""
        self._files.close(self.fd)
        self._files.close(self.index_fd)

    def write_index_entries(self) -> None:
        """Write the index entries of batches placed since the last call. Raises OSError."""
        entries = segment_index.encode_entries(self.new_entries)
        self._files.write_at(
            self.index_fd, [entries], INDEX_HEADER.size + self.batch_count * INDEX_ENTRY.size
        )
        self.batch_count += len(self.new_entries)
        self.new_entries = []

    def rewrite_batch(self, base_offset: int, position: int, data: Readable) -> None:
        """Rewrite a batch that recovery found in the file. It may not be synced, and a failed sync
        leaves pages that look clean.

        Raises OSError, and LogGapError if other bytes are there.
        """
        if self._files.read_at(self.fd, len(data), position) != data:
            raise LogGapError(
                f"segment {self.base} has another batch at {position} than the ring has for "
                f"offset {base_offset}"
            )
        self._files.write_at(self.fd, [data], position)
        self.synced_end = min(self.synced_end, position)
        self.synced_next = min(self.synced_next, base_offset)

    def rewrite_index(self) -> None:
        """Replace the index file by `new_entries`, durably. Raises OSError."""
        self._files.truncate(self.index_fd, 0)
        self._files.write_at(self.index_fd, [segment_index.encode_header(self.base)], 0)
        self.write_index_entries()
        self._files.sync_data(self.index_fd)


def reopen(files: Files, directory: str, recovered: RecoveredLog) -> ActiveSegment:
    """Open the segment that recovery found to be active. Raises OSError."""
    base = recovered.live_base
    fd = files.open_for_write(f"{directory}/{file_name(base)}")
    try:
        index_fd = open_index(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}")
    except OSError:
        files.close(fd)
        raise
    live = ActiveSegment(
        files, base, fd, index_fd, recovered.valid_end, recovered.next_offset,
        recovered.batch_count, recovered.live_schema_id,
    )  # fmt: skip
    live.max_timestamp_us = recovered.max_timestamp_us
    live.first_append_us = recovered.first_append_us
    return live


def begin(files: Files, directory: str, base: int, schema: bytes, schema_id: int) -> ActiveSegment:
    """Create an empty segment at offset `base` with a durable schema message. Raises OSError.

    Its name is durable when the directory is synced. A new index need not be: a start makes a lost
    one again.
    """
    index = f"{directory}/{file_name(base, INDEX_SUFFIX)}"
    has_index = files.exists(index)
    fd = files.open_for_write(f"{directory}/{file_name(base)}")
    index_fd = -1
    try:
        crash_point("flusher.in_roll")
        index_fd = open_index(files, index)
        files.truncate(fd, 0)
        files.truncate(index_fd, 0)
        files.write_at(fd, [schema], 0)
        files.write_at(index_fd, [segment_index.encode_header(base)], 0)
        files.sync_data(fd)
        if has_index:  # the entries that it had must not come back, nor those of a failed beginning
            files.sync_data(index_fd)
    except BaseException:
        files.close(fd)
        if index_fd >= 0:
            files.close(index_fd)
        raise
    return ActiveSegment(files, base, fd, index_fd, len(schema), base, 0, schema_id)


def write_segment(
    files: Files,
    directory: str,
    start: int,
    schema: bytes,
    schema_id: int,
    batches: Sequence[PendingBatch],
) -> ActiveSegment:
    """Write a segment with these batches, durable before it gets its name. Raises OSError.

    It is returned as empty. The log places the batches afterwards.
    """
    path = f"{directory}/{file_name(start)}"
    temporary = f"{path}{UNFINISHED_SUFFIX}"
    opened = [files.open_for_write(temporary)]
    try:
        files.truncate(opened[0], 0)
        files.write_at(opened[0], [schema, *(batch.data for batch in batches)], 0)
        files.sync_data(opened[0])
        crash_point("flusher.in_rewrite")
        opened.append(open_index(files, f"{directory}/{file_name(start, INDEX_SUFFIX)}"))
        files.rename(temporary, path)
        files.sync_directory(directory)
    except OSError:
        for fd in opened:
            files.close(fd)
        try:
            files.unlink(temporary)
        except OSError:
            pass  # its name is not a segment's; the next start removes it
        raise
    return ActiveSegment(files, start, opened[0], opened[1], len(schema), start, 0, schema_id)


def pending_from_bytes(data: Readable, seed: int) -> PendingBatch | None:
    """Return a journaled batch as a pending one, or None if it is not intact."""
    view = memoryview(data)
    try:
        header = verify_batch(view, seed)
    except BatchFormatError:
        return None
    return PendingBatch(
        header.base_offset, header.next_offset, header.max_timestamp_us, header.append_time_us, view
    )


def read_batches(
    files: Files, live: ActiveSegment, first: IndexEntry, seed: int
) -> list[PendingBatch] | None:
    """The batches of a segment from `first` on. None if they are not intact and consecutive.
    Raises OSError.
    """
    data = memoryview(files.read_at(live.fd, live.end - first.file_position, first.file_position))
    batches, at, offset = list[PendingBatch](), 0, first.base_offset
    while at < len(data):
        try:
            frame = frame_at(data, at, len(data))
        except BatchFormatError:
            return None
        found = (
            None
            if frame is None or not frame[0]
            else pending_from_bytes(data[at : at + frame[0]], seed)
        )
        if found is None or found.base_offset != offset:
            return None
        batches.append(found)
        at, offset = at + len(found.data), found.next_offset
    return batches


def first_to_keep(
    files: Files, live: ActiveSegment, log_start_offset: int, retention_bytes: int
) -> IndexEntry | None:
    """The first batch of a segment whose index is written that is to stay: the one that holds the
    log start offset, or the last one behind which there are still `retention_bytes` (-1: any
    number), whichever comes later. None: the index does not tell. Raises OSError.
    """
    try:
        index = IndexReader(
            lambda length, at: files.read_at(live.index_fd, length, at),
            files.size(live.index_fd),
            live.base,
        )
        first = index.find_offset(log_start_offset) if log_start_offset > live.base else None
        if retention_bytes >= 0:
            number = bisect_right(
                range(index.count),
                live.end - retention_bytes,
                key=lambda n: index.entry(n).file_position,
            )
            by_bytes = index.entry(number - 1) if number else None
            if by_bytes is not None and (
                first is None or by_bytes.file_position > first.file_position
            ):
                first = by_bytes
    except IndexDamagedError:
        return None
    return first
