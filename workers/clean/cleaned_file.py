"""Cleaned file: a cleaned or merged segment and its index, written beside the segments that it is
to replace.

Owner: one run of the cleaner.

Invariants: `finish` returns when both files are complete and synced.

Crash: files without a swap are removed at the next start of the flusher, and truncated by the next
job that writes the same ones.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from shm.crash_points import crash_point
from tailrace.format.record_batch.batch_header import END_OF_STREAM
from tailrace.format.segments import segment_index
from tailrace.format.segments.segment import file_name
from tailrace.format.segments.segment_index import IndexEntry
from workers.segment.cleaning_job import JobSegment
from workers.segment.files import Files
from workers.segment.segment_swap import CLEANED_INDEX_SUFFIX, CLEANED_SUFFIX, CleanedRun

WRITE_BYTES = 1 << 20


class CleanedFile:
    """A cleaned segment that is being written."""

    def __init__(
        self,
        files: Files,
        directory: str,
        run: list[JobSegment],
        schema_message: bytes,
        keep_free_bytes: int,
    ) -> None:
        """Raises OSError."""
        self._keep_free_bytes = keep_free_bytes
        self._files = files
        self._directory = directory
        self._run = list(run)
        self._path = f"{directory}/{file_name(run[0].base, CLEANED_SUFFIX)}"
        self._index_path = f"{directory}/{file_name(run[0].base, CLEANED_INDEX_SUFFIX)}"
        self._fd = files.open_for_write(self._path)
        self._pending: list[bytes | bytearray] = [schema_message]
        self._pending_bytes = len(schema_message)
        self._written = 0
        self._entries: list[IndexEntry] = []
        self._max_us = 0
        files.truncate(self._fd, 0)

    def take_over(self, run: list[JobSegment]) -> None:
        """Replace the segments of the next run, too."""
        self._run += run

    def has_room_for(self, byte_count: int) -> bool:
        """True if the disk has room for so many bytes more. Raises OSError."""
        needed_bytes = self._pending_bytes + byte_count + self._keep_free_bytes
        return self._files.free_bytes(self._directory) >= needed_bytes

    @property
    def schema_id(self) -> int:
        """The schema of the segments."""
        return self._run[0].schema_id

    @property
    def size(self) -> int:
        """Bytes of the segment so far."""
        return self._written + self._pending_bytes

    def add(self, batch: bytearray, base_offset: int, max_us: int) -> None:
        """Append a batch. Raises OSError."""
        self._max_us = max(self._max_us, max_us)
        self._entries.append(IndexEntry(base_offset, self.size, self._max_us, len(batch)))
        self._pending.append(batch)
        self._pending_bytes += len(batch)
        if self._pending_bytes >= WRITE_BYTES:
            self._flush()

    def finish(self, last_append_us: int, *, has_transactions: bool = False) -> CleanedRun:
        """Complete and sync both files. Raises OSError."""
        self._pending.append(END_OF_STREAM)
        self._pending_bytes += len(END_OF_STREAM)
        self._flush()
        self._files.sync_data(self._fd)
        base = self._run[0].base
        fd = self._files.open_for_write(self._index_path)
        try:
            self._files.truncate(fd, 0)
            data = segment_index.encode_header(base) + segment_index.encode_entries(self._entries)
            self._files.write_at(fd, [data], 0)
            self._files.sync_data(fd)
        finally:
            self._files.close(fd)
        self.close()
        return CleanedRun(
            base, self._run[-1].end, [[each.base, each.size] for each in self._run], self._written,
            len(self._entries), self._max_us, last_append_us, int(has_transactions),
        )  # fmt: skip

    def _flush(self) -> None:
        keeps = self._keep_free_bytes
        free_bytes = self._files.free_bytes(self._directory) if keeps else 0
        if keeps and free_bytes - self._pending_bytes < keeps:
            raise OSError(
                errno.ENOSPC, f"{free_bytes} bytes are free, and {keeps} stay for "
                "records",
            )  # fmt: skip
        pieces, self._pending = self._pending, []
        self._files.write_at(self._fd, pieces, self._written)
        self._written += self._pending_bytes
        self._pending_bytes = 0
        crash_point("cleaner.in_segment")

    def close(self) -> None:
        """Close the segment's file, if it is open."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._files.close(fd)

    def abandon(self) -> None:
        """Close and remove the files, as far as they exist. Raises OSError."""
        self.close()
        remove_files(self._files, self._directory, self._run[0].base)


def remove_unreported(
    files: Files, directory: str, unfinished: CleanedFile | None, runs: Sequence[CleanedRun]
) -> None:
    """Remove a job's unfinished file, and those of finished runs of which the flusher does not
    know. Raises OSError.
    """
    if unfinished is not None:
        unfinished.abandon()
    for run in runs:
        remove_files(files, directory, run.base)


def remove_files(files: Files, directory: str, base: int) -> None:
    """Remove the cleaned segment of this base and its index, as far as they exist. Raises
    OSError.
    """
    for suffix in (CLEANED_SUFFIX, CLEANED_INDEX_SUFFIX):
        path = f"{directory}/{file_name(base, suffix)}"
        if files.exists(path):
            files.unlink(path)
