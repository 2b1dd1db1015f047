"""The directory that an export goes to, held by one process at a time.

Owner: the process that holds the lock on LOCK_FILE; the kernel gives it back when that ends, however it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os

from tailrace.errors import InvalidRequestError, InvalidSettingError

LOCK_FILE = ".tailrace-export.lock"
MARK = b"tailrace export\n"
_ALWAYS_THERE = ("lost+found",)


class HeldDirectory:
    """See the module's docstring."""

    def __init__(self, path: str) -> None:
        """`path`: is made, with its parents, when it is missing. Raises InvalidSettingError."""
        self.path = os.path.abspath(_checked(path))
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

    def is_held(self) -> bool:
        """Whether what is held lies under its path still. Raises OSError."""
        held = os.fstat(self._fd)
        try:
            here = os.stat(f"{self.path}/{LOCK_FILE}", follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (held.st_dev, held.st_ino)

    def check_held(self) -> None:
        """The same, for commits: they go there by name, and would go into another export that was begun there. Raises InvalidRequestError, OSError."""
        if not self.is_held():
            raise InvalidRequestError(
                f"{self.path} was moved, removed or made anew while it was exported to, or {LOCK_FILE} in it was: nothing more is written. "
                "Export again, to where the earlier commits are"
            )

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


def _checked(path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    try:
        if isinstance(text, str) and text and "\0" not in text and text.encode():
            return text
    except UnicodeEncodeError:
        pass  # said below: Arrow opens no such files
    raise InvalidSettingError(f"the directory to export to is {path!r:.300}; it takes a path, whose text is UTF-8")
