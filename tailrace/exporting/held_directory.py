"""The directory that an export goes to, held by one process at a time.

Owner: the process that holds the lock on LOCK_FILE; the kernel gives it back when that ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os

from tailrace.errors import InvalidRequestError

LOCK_FILE = ".tailrace-export.lock"
MARK = b"tailrace export\n"
_ALWAYS_THERE = ("lost+found",)


class HeldDirectory:
    """See the module's docstring."""

    def __init__(self, path: str) -> None:
        """`path`: is made, with its parents, when it is missing."""
        self.path = os.path.abspath(path)
        self._fd = -1

    def hold(self) -> None:
        """Raises InvalidRequestError when another process has it, OSError when it cannot be made or written."""
        os.makedirs(self.path, exist_ok=True)
        path = f"{self.path}/{LOCK_FILE}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise InvalidRequestError(
                    f"another export to {self.path} is running: end it first, or export to another directory"
                ) from None
            raise OSError(error.errno, error.strerror, path) from None
        self._fd = fd

    def is_empty(self, but: str = "") -> bool:
        """But for what is hidden, and this name."""
        return all(name.startswith(".") or name in (*_ALWAYS_THERE, but) for name in os.listdir(self.path))

    def mark(self) -> None:
        """Say, durably, that what comes here is of an export: files of a first commit that a kill ended are in no table, and look like others'."""
        os.pwrite(self._fd, MARK, 0)
        os.fsync(self._fd)

    def is_marked(self) -> bool:
        """Whether `mark` was called, by this process or an earlier one."""
        return os.pread(self._fd, len(MARK), 0) == MARK

    def release(self) -> None:
        """A second time nothing is done."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
