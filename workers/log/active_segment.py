"""The segment that is being written: its two files, how far they are written and synced; how it begins, and how it is written anew.

Owner: the flusher.
Invariants: synced_end <= end, synced_next <= the log's next offset; the index file has `batch_count` entries, `new_entries` come behind them.
Crash: a segment killed while it begins has no schema, and is removed by recovery; one that is written anew has no segment's name before it is durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shm.crash_points import crash_point
from tailrace.formats import segment_index as index_format
from tailrace.formats.batch_header import BatchFormatError, verify_batch
from tailrace.formats.checksum import Readable
from tailrace.formats.segment import INDEX_SUFFIX, file_name
from tailrace.formats.segment_index import INDEX_ENTRY, INDEX_HEADER, IndexEntry
from workers.files import Files
from workers.index_files import open_index
from workers.recovery import RecoveredLog

UNFINISHED_SUFFIX = ".new"
"""Of a segment that is being written anew and has no name yet; what a kill leaves of it is removed at the next start."""


class PendingBatch(NamedTuple):
    """A batch that is placed, and whose group is not settled: its bytes are still in the ring."""

    base_offset: int
    next_offset: int
    max_timestamp_us: int
    append_time_us: int
    data: Readable


class LiveSegment:
    """The segment that is being written. `place` of the log moves `end` and adds entries; the rest is written here."""

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
        "synced_end",
        "synced_next",
    )

    def __init__(self, files: Files, base: int, fd: int, index_fd: int, end: int, next_offset: int, batch_count: int) -> None:
        self._files = files
        self.base = base
        self.fd = fd
        self.index_fd = index_fd
        self.end = end
        """File position behind the last batch placed."""
        self.synced_end = end
        self.synced_next = next_offset
        """Up to here, in bytes and in offsets, the file was synced."""
        self.batch_count = batch_count
        """Entries that the index file has."""
        self.max_timestamp_us = 0
        self.first_append_us = 0
        """When its first batch was appended, 0 while it is empty."""
        self.new_entries: list[IndexEntry] = []

    def close(self) -> None:
        """Close both files."""
        self._files.close(self.fd)
        self._files.close(self.index_fd)

    def write_index_entries(self) -> None:
        """Of the batches that were placed since the last time. Raises OSError."""
        entries = index_format.encode_entries(self.new_entries)
        self._files.write_at(self.index_fd, [entries], INDEX_HEADER.size + self.batch_count * INDEX_ENTRY.size)
        self.batch_count += len(self.new_entries)
        self.new_entries = []

    def write_index_anew(self) -> None:
        """Make the index file say what `new_entries` do, durably. Raises OSError."""
        self._files.truncate(self.index_fd, 0)
        self._files.write_at(self.index_fd, [index_format.encode_header(self.base)], 0)
        self.write_index_entries()
        self._files.sync_data(self.index_fd)


def reopen(files: Files, directory: str, recovered: RecoveredLog) -> LiveSegment:
    """The segment that recovery found to be live. Raises OSError."""
    base = recovered.live_base
    fd = files.open_for_write(f"{directory}/{file_name(base)}")
    try:
        index_fd = open_index(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}")
    except OSError:
        files.close(fd)
        raise
    live = LiveSegment(files, base, fd, index_fd, recovered.valid_end, recovered.next_offset, recovered.batch_count)
    live.max_timestamp_us = recovered.max_timestamp_us
    live.first_append_us = recovered.first_append_us
    return live


def begin(files: Files, directory: str, base: int, schema: bytes) -> LiveSegment:
    """An empty segment at offset `base`: its schema message and its index's header are durable; its name is when the directory is synced. Raises OSError."""
    fd = files.open_for_write(f"{directory}/{file_name(base)}")
    index_fd = -1
    try:
        crash_point("flusher.in_roll")
        index_fd = open_index(files, f"{directory}/{file_name(base, INDEX_SUFFIX)}")
        files.truncate(fd, 0)
        files.truncate(index_fd, 0)
        files.write_at(fd, [schema], 0)
        files.write_at(index_fd, [index_format.encode_header(base)], 0)
        files.sync_data(fd)
        files.sync_data(index_fd)  # an older one of this name may have had entries
    except BaseException:
        files.close(fd)
        if index_fd >= 0:
            files.close(index_fd)
        raise
    return LiveSegment(files, base, fd, index_fd, len(schema), base, 0)


def write_anew(files: Files, directory: str, start: int, schema: bytes, batches: Sequence[PendingBatch]) -> LiveSegment:
    """A segment with these batches, durable before it has its name; to its log it is empty, until they are placed there. Raises OSError."""
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
            pass  # it has no segment's name, so it is not taken for one; the next start removes it
        raise
    return LiveSegment(files, start, opened[0], opened[1], len(schema), start, 0)


def pending_from_bytes(data: Readable, seed: int) -> PendingBatch | None:
    """A batch as the journal held it, or None when it is not intact."""
    view = memoryview(data)
    try:
        header = verify_batch(view, seed)
    except BatchFormatError:
        return None
    return PendingBatch(header.base_offset, header.next_offset, header.max_timestamp_us, header.append_time_us, view)
