"""Freeing files: file operations of a process that may not wait for the blocks of a file that it
removes.

The name goes at once. The file is kept open until then, and a thread closes it: that frees pages
and blocks, about 25 ms for 64 MiB, outside of the interpreter's lock.

Owner: one process. The thread has the descriptors of files without a name, and nothing else.

Invariants:
- Descriptors of other processes go on with a removed file: nothing is truncated.
- A directory that is gone has left its room: the controller looks for that before it gives up more
  of the bin.
- A write that finds no room is tried again when all that was removed is free.
- What waits to be freed counts as free, so that a disk is not called full for the time that it
  takes. Bytes that the kernel has just freed may count twice for that time.
- At most PENDING_MAX files wait. Further ones are freed by the caller.
- No signal is handled in the thread.

Crash: the kernel closes the descriptors, and frees the files.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Sequence
from queue import Full, Queue
from typing import NamedTuple

from tailrace.format.crc32c import Readable
from tailrace.format.directory.files import NO_SPACE, DiskFiles

LARGE_BYTES = 4 << 20
"""A smaller file is freed in the time of a write."""
PENDING_MAX = 256
BLOCK_BYTES = 512
"""Unit of `st_blocks`."""


class FreeingFiles(DiskFiles):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._removed: Queue[_Removed] = Queue(PENDING_MAX)
        self._thread: threading.Thread | None = None
        self._pending_bytes: dict[int, int] = {}
        """device -> bytes of its removed files that wait to be freed."""
        self._pending_lock = threading.Lock()

    def unlink(self, path: str) -> None:
        file = _large_file(path)
        try:
            super().unlink(path)
        finally:
            self._leave(file)

    def rename(self, source: str, target: str) -> None:
        file = _large_file(target)
        try:
            super().rename(source, target)
        finally:
            self._leave(file)

    def free_bytes(self, path: str) -> int:
        device = os.stat(path).st_dev
        pending = self._pending_bytes.get(device, 0)  # before: what is freed then is counted
        return super().free_bytes(path) + pending

    def remove_directory(self, path: str) -> None:
        self.wait_until_free()
        super().remove_directory(path)

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        try:
            super().write_at(fd, pieces, position)
        except OSError as error:
            if error.errno not in NO_SPACE or not self._removed.unfinished_tasks:
                raise
            self.wait_until_free()
            super().write_at(fd, pieces, position)

    def wait_until_free(self) -> None:
        """Wait until all that was removed is free."""
        self._removed.join()

    def _leave(self, file: _Removed | None) -> None:
        """Have the thread close a file, if there is one."""
        if file is None:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._close_all, name="freeing", daemon=True)
            self._thread.start()
        self._note(file.device, file.byte_count)
        try:
            self._removed.put_nowait(file)
        except Full:
            self._close(file)

    def _close_all(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            file = self._removed.get()
            try:
                self._close(file)
            except OSError:
                pass  # the descriptor is closed, and the file has no name: nothing is lost
            finally:
                self._removed.task_done()

    def _close(self, file: _Removed) -> None:
        try:
            self.close(file.fd)
        finally:
            self._note(file.device, -file.byte_count)

    def _note(self, device: int, byte_count: int) -> None:
        with self._pending_lock:
            self._pending_bytes[device] = self._pending_bytes.get(device, 0) + byte_count


class _Removed(NamedTuple):
    """A file that has lost its name, or did not."""

    fd: int
    device: int
    byte_count: int
    """Bytes that its end frees, if no other process has it open."""


def _large_file(path: str) -> _Removed | None:
    """The file at a path, opened; None if it is small, missing, or cannot be opened."""
    try:
        found = os.lstat(path)
        if found.st_size < LARGE_BYTES or not stat.S_ISREG(found.st_mode):
            return None
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    is_last = found.st_nlink == 1
    return _Removed(fd, found.st_dev, found.st_blocks * BLOCK_BYTES if is_last else 0)
