"""A directory as the target of backups.

Owner: the backup that holds the lock; restores and checks read.

Invariants:
- A file gets its name when it is whole and synced. `sync` makes the names durable.
- A directory that vanishes, or is unmounted, is not made again.
- One backup at a time: an flock on `lock`. Objects are removed only while they have no reader: an
  flock on `reading`.

Crash: files named `*.tmp` are left, and the next backup removes them.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from appliance.backup.errors import TargetLockedError

TEMPORARY = ".tmp"
LOCK_FILE = "lock"
READING_FILE = "reading"
FICLONE = 0x40049409
"""ioctl that makes a file share another's blocks (btrfs, XFS, bcachefs)."""


class LocalTarget:
    """Files below one directory. Names are relative, with at most two directories."""

    is_local = True

    def __init__(self, path: str) -> None:
        self.path = os.path.abspath(path)
        self._unsynced: set[str] = set()
        self._lock_fd = -1

    def __str__(self) -> str:
        return self.path

    @property
    def local_path(self) -> str | None:
        """The directory of this host that the target is."""
        return self.path

    def exists(self, name: str) -> bool:
        return os.path.exists(f"{self.path}/{name}")

    def is_empty(self) -> bool:
        """True if the directory is missing, or has only what a first backup that was killed
        leaves.
        """
        own = (LOCK_FILE, READING_FILE)
        try:
            names = os.listdir(self.path)
            return all(name in own or name.endswith(TEMPORARY) for name in names)
        except FileNotFoundError:
            return True

    def prepare(self, directories: Iterable[str]) -> None:
        """Make the directory, with these in it. Raises OSError."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        for name in directories:
            os.makedirs(f"{self.path}/{name}", mode=0o700, exist_ok=True)

    # ---- locks -----------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the target for one backup. Raises BackupError if another one has it."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        fd = os.open(f"{self.path}/{LOCK_FILE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise TargetLockedError(
                f"another backup is writing to {self.path}. Wait until it has ended, or choose "
                "another directory."
            ) from None
        self._lock_fd = fd

    def keep_lock(self) -> None:
        """Nothing to do: the lock ends with the process."""

    def unlock(self) -> None:
        """Give the target back."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep objects from being removed during the block."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(f"{self.path}/{READING_FILE}", flags, 0o600)
        except OSError:  # read only: nobody removes anything
            yield
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def removing(self) -> Iterator[bool]:
        """True in the block if there is no reader: objects may be removed."""
        fd = os.open(f"{self.path}/{READING_FILE}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            yield False
            return
        try:
            yield True
        finally:
            os.close(fd)

    # ---- files -----------------------------------------------------------------------------------

    def names(self, directory: str) -> list[str]:
        """Names of the files in a directory and those below it, relative to the target."""
        found = []
        for path, _, files in os.walk(f"{self.path}/{directory}"):
            below = os.path.relpath(path, self.path)
            found += [f"{below}/{name}" for name in files if not name.endswith(TEMPORARY)]
        return sorted(found)

    def sizes(self, directory: str) -> dict[str, int]:
        """Names as `names` returns them -> bytes."""
        found = {name: self.size(name) for name in self.names(directory)}
        return {name: size for name, size in found.items() if size is not None}

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""
        try:
            return os.stat(f"{self.path}/{name}").st_size
        except FileNotFoundError:
            return None

    def read(self, name: str, start: int, length: int) -> bytes:
        """Read a part of a file; less at its end. Raises OSError."""
        fd = os.open(f"{self.path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces = []
            while length > 0 and (piece := os.pread(fd, length, start)):
                pieces.append(piece)
                start, length = start + len(piece), length - len(piece)
            return b"".join(pieces)
        finally:
            os.close(fd)

    def put(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file. Raises OSError, and then nothing is left."""
        path = self._path_to_be(name)
        temporary = path + TEMPORARY
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            try:
                for piece in pieces:
                    rest = memoryview(piece)
                    while rest:
                        rest = rest[os.write(fd, rest) :]
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except BaseException as error:
            self._discard(temporary)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = self.path
            raise
        self._unsynced.add(os.path.dirname(path))

    def share(self, name: str, source_fd: int, source_path: str) -> bool:
        """Give a file of the same file system this name: its blocks are shared, by a reflink, or
        the file itself by a hard link. Return False where neither is possible.
        """
        path = self._path_to_be(name)
        temporary = path + TEMPORARY
        self._discard(temporary)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.ioctl(fd, FICLONE, source_fd)
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError:
            self._discard(temporary)
            try:
                os.fsync(source_fd)  # the appliance may have synced the journal in its place
                os.link(source_path, temporary, follow_symlinks=False)
                found, linked = os.fstat(source_fd), os.stat(temporary)
                if (found.st_dev, found.st_ino) != (linked.st_dev, linked.st_ino):
                    raise FileNotFoundError(source_path)
            except OSError:
                self._discard(temporary)
                return False
        os.rename(temporary, path)
        self._discard(temporary)  # a rename between two links of one file does nothing
        self._unsynced.add(os.path.dirname(path))
        return True

    def sync(self) -> None:
        """Make the names of all files written so far durable. Raises OSError."""
        above = {os.path.dirname(path) for path in self._unsynced}
        for path in sorted(self._unsynced | above):
            if not path.startswith(self.path):
                continue
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        self._unsynced.clear()

    def remove(self, name: str) -> None:
        """Remove a file, if it is there. Raises OSError."""
        self._discard(f"{self.path}/{name}")

    def remove_temporaries(self) -> None:
        """Remove what a killed backup has left. Raises OSError."""
        for path, _, files in os.walk(self.path):
            for name in files:
                if name.endswith(TEMPORARY):
                    self._discard(f"{path}/{name}")

    def _path_to_be(self, name: str) -> str:
        """Path of a file, whose directory is made in the target if needed."""
        path = f"{self.path}/{name}"
        directory = os.path.dirname(path)
        if not os.path.isdir(directory):
            os.mkdir(directory, 0o700)  # never the target itself: it may be an unmounted disk
        return path

    @staticmethod
    def _discard(path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
