"""The file operations that serving reads makes: one small interface, so that tests can put another disk behind it.

Owner: one front. Errors are OSError, unwrapped. Nothing is mapped: a truncated or unreadable page under a mapping kills the process.
"""

from __future__ import annotations

import errno
import os
from typing import Protocol

SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors that say nothing about the disk: descriptors or memory are short."""


class LogFiles(Protocol):
    """What a reader of logs needs of a file system."""

    def open_for_read(self, path: str) -> int: ...
    def close(self, fd: int) -> None: ...
    def read_at(self, fd: int, length: int, position: int) -> bytes: ...
    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int: ...
    def size(self, fd: int) -> int: ...
    def list(self, path: str) -> list[str]: ...


class DiskLogFiles:
    """The real thing."""

    def __init__(self) -> None:
        self._nowait = os.RWF_NOWAIT

    def open_for_read(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe in its place is an error, not a wait

    def close(self, fd: int) -> None:
        os.close(fd)

    def read_at(self, fd: int, length: int, position: int) -> bytes:
        """Up to `length` bytes, fewer at the end of the file; waits for the disk."""
        return os.pread(fd, length, position)

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int:
        """Fill `target`; returns how many bytes came. Raises BlockingIOError where that would wait for the disk and `blocking` is false."""
        try:
            return os.preadv(fd, [target], position, 0 if blocking else self._nowait)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._nowait = 0  # this file system cannot tell; wait for it
            return os.preadv(fd, [target], position)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def list(self, path: str) -> list[str]:
        """Names in a directory."""
        return os.listdir(path)
