"""The file operations that serving reads makes: one small interface, so that tests can put another disk behind it.

Owner: one front. Errors are OSError, unwrapped. Nothing is mapped: a truncated or unreadable page under a mapping kills the process.
"""

from __future__ import annotations

import errno
import os
from typing import Protocol

from tailrace.formats.files import SHORTAGES, DiskReadFiles, ReadFiles

__all__ = ["SHORTAGES", "DiskLogFiles", "LogFiles"]


class LogFiles(ReadFiles, Protocol):
    """What a reader of logs needs of a file system."""

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int: ...


class DiskLogFiles(DiskReadFiles):
    """The real thing."""

    def __init__(self) -> None:
        self._nowait = os.RWF_NOWAIT

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int:
        """Fill `target`; returns how many bytes came. Raises BlockingIOError where that would wait for the disk and `blocking` is false."""
        try:
            return os.preadv(fd, [target], position, 0 if blocking else self._nowait)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._nowait = 0  # this file system cannot tell; wait for it
            return os.preadv(fd, [target], position)
