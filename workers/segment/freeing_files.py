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

from tailrace.format.crc32c import Readable
from tailrace.format.directory.files import NO_SPACE, DiskFiles

LARGE_BYTES = 4 << 20
"""A smaller file is freed in the time of a write."""
PENDING_MAX = 256


class FreeingFiles(DiskFiles):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._removed: Queue[int] = Queue(PENDING_MAX)
        self._thread: threading.Thread | None = None

    def unlink(self, path: str) -> None:
        fd = _large_file(path)
        try:
            super().unlink(path)
        finally:
            self._leave(fd)

    def rename(self, source: str, target: str) -> None:
        fd = _large_file(target)
        try:
            super().rename(source, target)
        finally:
            self._leave(fd)

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

    def _leave(self, fd: int) -> None:
        """Have the thread close a file, if there is one."""
        if fd < 0:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._close_all, name="freeing", daemon=True)
            self._thread.start()
        try:
            self._removed.put_nowait(fd)
        except Full:
            self.close(fd)

    def _close_all(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            fd = self._removed.get()
            try:
                self.close(fd)
            except OSError:
                pass  # the descriptor is closed, and the file has no name: nothing is lost
            finally:
                self._removed.task_done()


def _large_file(path: str) -> int:
    """A descriptor of the file at a path, -1 if it is small, missing, or cannot be opened."""
    try:
        found = os.lstat(path)
        if found.st_size < LARGE_BYTES or not stat.S_ISREG(found.st_mode):
            return -1
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return -1
