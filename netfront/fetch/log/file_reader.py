"""File reads of a front, behind an interface that tests replace with another disk.

Owner: one front. Errors are OSError, unwrapped. No file is mapped: an unreadable or truncated page
under a mapping would kill the process.
"""

from __future__ import annotations

import errno
import os
from typing import Protocol

from tailrace.format.directory.files import SHORTAGES, DiskReadFiles, ReadFiles

__all__ = ["SHORTAGES", "DiskFileReader", "FileReader"]


class FileReader(ReadFiles, Protocol):
    """File operations that `LogReader` needs."""

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int: ...


class DiskFileReader(DiskReadFiles):
    """File operations on the host's file system."""

    def __init__(self) -> None:
        self._nowait = os.RWF_NOWAIT

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int:
        """Fill `target` and return the number of bytes read.

        Raises BlockingIOError if the read would wait for the disk and `blocking` is False.
        """
        try:
            return os.preadv(fd, [target], position, 0 if blocking else self._nowait)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._nowait = 0  # not supported by this file system: block
            return os.preadv(fd, [target], position)
