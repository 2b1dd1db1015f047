"""DirectoryLock: gives one process at a time the target directory of an export.

Owner: the process that holds the lock on LOCK_FILE. The kernel releases it when the process ends.
"""

from __future__ import annotations

import errno
import fcntl
import os

from tailrace.core.errors import InvalidRequestError, InvalidSettingError

LOCK_FILE = ".tailrace-export.lock"
MARK = b"tailrace export\n"
_ALWAYS_THERE = ("lost+found",)


class DirectoryLock:
    """The lock on one target directory."""

    def __init__(self, path: str) -> None:
        """`path` and missing parents are created by `acquire`. Raises InvalidSettingError."""
        self.path = os.path.abspath(_checked(path))
        self._fd = -1

    def acquire(self) -> None:
        """Create the directory and lock it.

        Raises InvalidRequestError if another process has the lock, OSError.
        """
        os.makedirs(self.path, exist_ok=True)
        path = f"{self.path}/{LOCK_FILE}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise InvalidRequestError(
                    f"another export to {self.path} is running; stop it first, or export to "
                    "another directory"
                ) from None
            raise OSError(error.errno, error.strerror, path) from None
        self._fd = fd

    def is_locked(self) -> bool:
        """True if the locked directory is still at its path. Raises OSError."""
        locked = os.fstat(self._fd)
        try:
            here = os.stat(f"{self.path}/{LOCK_FILE}", follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (here.st_dev, here.st_ino) == (locked.st_dev, locked.st_ino)

    def check_locked(self) -> None:
        """Check that the locked directory is still at its path, before a commit goes there by name.

        Raises InvalidRequestError, OSError.
        """
        if not self.is_locked():
            raise InvalidRequestError(
                f"{self.path} or its {LOCK_FILE} was moved, removed or replaced during the "
                "export, so nothing more is written; export again to the directory with the "
                "earlier commits"
            )

    def is_empty(self, but: str = "") -> bool:
        """True if the directory has only hidden files and the name `but`."""
        return all(
            name.startswith(".") or name in (*_ALWAYS_THERE, but) for name in os.listdir(self.path)
        )

    def mark(self) -> None:
        """Mark the directory durably as an export's.

        Files of a first commit that a kill ended are in no table and look like foreign ones.
        """
        os.pwrite(self._fd, MARK, 0)
        os.fsync(self._fd)

    def is_marked(self) -> bool:
        """True if `mark` was called, by this process or an earlier one."""
        return os.pread(self._fd, len(MARK), 0) == MARK

    def release(self) -> None:
        """Release the lock. Does nothing a second time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _checked(path: object) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    try:
        if isinstance(text, str) and text and "\0" not in text and text.encode():
            return text
    except UnicodeEncodeError:
        pass  # Arrow cannot open such a path
    raise InvalidSettingError(
        f"the directory to export to is {path!r:.300}; give a path that is valid UTF-8"
    )
