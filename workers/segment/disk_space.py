"""The room that is kept free on a data directory's disk, so that a full disk refuses producers before it hurts the appliance.

Owner: the flusher. When less than the reserve is free, the directory counts as full: workers refuse batches with DISK_FULL, what they have taken already
is still written, and the coordinator, checkpoints and recovery have room. A file of an eighth of the reserve lies there too: should others have used up
everything, the supervisor removes it at start, so that a start has room; it is made again when there is.

Invariants: full and not full differ by a margin, so that the state does not flap.
Crash: nothing depends on the file being there.
"""

from __future__ import annotations

import logging

from tailrace.formats.data_directory import RESERVE_FILE
from workers.files import Files

logger = logging.getLogger(__name__)

CHECK_BYTES = 16 << 20
CHECK_NS = 1_000_000_000
FULL_CHECK_NS = 250_000_000


class DiskSpace:
    """Whether the disk under `data_dir` counts as full."""

    def __init__(self, files: Files, data_dir: str, reserve_bytes: int) -> None:
        self._files = files
        self._data_dir = data_dir
        self._path = f"{data_dir}/{RESERVE_FILE}"
        # A small disk (a test's, a container's) would be full from the beginning.
        self.reserve_bytes = min(reserve_bytes, files.total_bytes(data_dir) // 8)
        self._file_bytes = self.reserve_bytes // 8
        self._written = 0
        self._next_check_ns = 0
        self.is_full = False

    def written(self, byte_count: int) -> None:
        self._written += byte_count

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._next_check_ns or self._written >= CHECK_BYTES

    def check(self, now_ns: int) -> bool:
        """Look at the disk; returns whether the state changed."""
        self._written = 0
        self._next_check_ns = now_ns + (FULL_CHECK_NS if self.is_full else CHECK_NS)
        try:
            free = self._files.free_bytes(self._data_dir)
        except OSError:
            return False  # writes to a dead disk report it
        was_full = self.is_full
        self.is_full = free < self.reserve_bytes + (self.reserve_bytes // 8 if was_full else 0)
        if self.is_full != was_full:
            self._next_check_ns = now_ns + FULL_CHECK_NS
            logger.warning(
                "disk_%s path=%s free_bytes=%d reserve_bytes=%d",
                "full" if self.is_full else "has_room",
                self._data_dir,
                free,
                self.reserve_bytes,
            )
        if not self.is_full and free > self.reserve_bytes + 2 * self._file_bytes:
            self._keep_file()
        return self.is_full != was_full

    def note_full(self, now_ns: int) -> bool:
        """A write was refused for want of room; returns whether the state changed."""
        changed = not self.is_full
        self.is_full = True
        self._next_check_ns = now_ns + FULL_CHECK_NS
        return changed

    @property
    def next_check_ns(self) -> int | None:
        """When to look again though nothing is written: only while full."""
        return self._next_check_ns if self.is_full else None

    def _keep_file(self) -> None:
        if not self._file_bytes or self._files.exists(self._path):
            return
        try:
            self._files.allocate(self._path, self._file_bytes)
        except OSError as error:
            logger.info("reserve_not_made path=%s error=%r", self._path, str(error))
