"""Disk space reserve of a data directory: a full disk refuses producers before it harms the
appliance.

Owner: the flusher. With less free space than the reserve, the directory counts as full. Workers
then refuse batches with DISK_FULL. Batches already accepted are still written, and the controller,
checkpoints and recovery have space. A file of an eighth of the reserve is kept there too. If other
users fill the disk, it is given up in pieces (`shm.runtime.reserve_file`), and made again when
there is space.

Invariants: full and not full differ by a margin, so that the state does not flap.

Crash: nothing depends on the reserve file.
"""

from __future__ import annotations

import logging

from tailrace.format.directory.data_dir import RESERVE_FILE
from workers.segment.files import Files

logger = logging.getLogger(__name__)

CHECK_BYTES = 16 << 20
CHECK_NS = 1_000_000_000
IDLE_CHECK_NS = 5_000_000_000
"""Interval of checks without writes, when something else wakes the flusher."""
FULL_CHECK_NS = 250_000_000


class DiskSpace:
    """State of the disk under `data_dir`: full or not."""

    def __init__(self, files: Files, data_dir: str, reserve_bytes: int) -> None:
        self._files = files
        self._data_dir = data_dir
        self._path = f"{data_dir}/{RESERVE_FILE}"
        self.reserve_bytes = self._file_bytes = 0
        self.set_reserve(reserve_bytes)
        self._written = 0
        self._next_check_ns = 0
        self._idle_check_ns = 0
        self.is_full = False
        self._has_filled_holes = False
        """True when it was tried: some file systems count no blocks for zeros."""

    def set_reserve(self, reserve_bytes: int) -> None:
        """Change the reserve; the next check uses it. The reserve file is not made smaller."""
        # A small disk (of a test or container) would be full from the beginning.
        self.reserve_bytes = min(reserve_bytes, self._files.total_bytes(self._data_dir) // 8)
        self._file_bytes = self.reserve_bytes // 8
        self._next_check_ns = 0

    def written(self, byte_count: int) -> None:
        self._written += byte_count

    def is_due(self, now_ns: int) -> bool:
        return now_ns >= self._next_check_ns or self._written >= min(
            CHECK_BYTES, self.reserve_bytes // 4
        )  # a small disk's reserve is soon written

    def is_overdue(self, now_ns: int) -> bool:
        """True if the last check is so old that even an idle directory is checked."""
        return now_ns >= self._idle_check_ns

    def check(self, now_ns: int) -> bool:
        """Check the disk. Return True if the state changed."""
        self._written = 0
        self._idle_check_ns = now_ns + IDLE_CHECK_NS
        self._next_check_ns = now_ns + (FULL_CHECK_NS if self.is_full else CHECK_NS)
        try:
            free = self._files.free_bytes(self._data_dir)
        except OSError:
            return False  # writes to a failed disk report it
        was_full = self.is_full
        self.is_full = free < self.reserve_bytes + (self.reserve_bytes // 8 if was_full else 0)
        if self.is_full != was_full:
            self._next_check_ns = now_ns + FULL_CHECK_NS
            facts = self._data_dir, free, self.reserve_bytes
            if self.is_full:
                logger.warning("disk_full path=%s free_bytes=%d reserve_bytes=%d", *facts)
            else:
                logger.info("disk_has_room path=%s free_bytes=%d reserve_bytes=%d", *facts)
        if free > self.reserve_bytes + 2 * self._file_bytes:
            self._keep_file()
        return self.is_full != was_full

    def note_full(self, now_ns: int) -> bool:
        """Note a write that failed for lack of space. Return True if the state changed."""
        changed = not self.is_full
        self.is_full = True
        self._next_check_ns = now_ns + FULL_CHECK_NS
        return changed

    @property
    def next_check_ns(self) -> int | None:
        """Time of the next check without writes. None unless full."""
        return self._next_check_ns if self.is_full else None

    def _keep_file(self) -> None:
        if not self._file_bytes:
            return
        try:
            size, allocated = self._size()
            if size >= self._file_bytes and (
                allocated >= self._file_bytes or self._has_filled_holes
            ):
                return
            self._has_filled_holes = size >= self._file_bytes
            self._files.allocate(self._path, self._file_bytes)
        except OSError as error:
            logger.info("reserve_not_made path=%s error=%r", self._path, str(error))
            return
        if size:
            logger.info("reserve_made_again path=%s bytes=%d", self._data_dir, self._file_bytes)

    def _size(self) -> tuple[int, int]:
        """Length of the reserve file, 0 if there is none, and the bytes of the disk that it
        occupies: a copy that leaves out zeros has made it a file of holes. Raises OSError.
        """
        if not self._files.exists(self._path):
            return 0, 0
        fd = self._files.open_for_read(self._path)
        try:
            return self._files.size(fd), self._files.allocated(fd)
        finally:
            self._files.close(fd)
