"""The file operations that logs, catalogs and their readers make: one small interface, so that tests can put a failing or a forgetting disk behind it.

Whatever stands behind it passes `tests/workers/test_file_interface.py`. Errors are OSError, unwrapped; short writes are finished here.

Owner: whoever opens a file; there is no state but the descriptors.
Invariants: what is written is no link and readable by its owner alone, whatever the umask; a shortage of space, descriptors or memory (`is_shortage`) says
    nothing of the disk: what failed is tried again, and is never written down as a fault.
Crash: `replace_file` leaves the old file or the new one, whole; a temporary that a kill left is removed by the next one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Protocol

from tailrace.formats.checksum import Readable

IOV_MAX = 1024
WRITE_MAX_BYTES = 512 << 10
"""Of one call. For larger ones ext4 takes blocks of many MiB of page cache at once, and these cost 0.7 to 2.6 ms per MiB where small ones cost 0.3."""
TEMPORARY_SUFFIX = ".tmp"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_PLAIN_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""What opening a pipe, a directory, a link or a socket raises."""
SHORTAGES = (*NO_SPACE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_shortage(error: OSError) -> bool:
    """Whether the host is short of something now: try again later. Everything else is the disk's or the file's fault."""
    return error.errno in SHORTAGES


class ReadFiles(Protocol):
    """What a reader of logs needs of a file system."""

    def open_for_read(self, path: str) -> int: ...
    def close(self, fd: int) -> None: ...
    def read_at(self, fd: int, length: int, position: int) -> bytes: ...
    def size(self, fd: int) -> int: ...
    def list(self, path: str) -> list[str]: ...


class Files(ReadFiles, Protocol):
    """What the log needs of a file system."""

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int: ...
    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None: ...
    def truncate(self, fd: int, length: int) -> None: ...
    def sync_data(self, fd: int) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def make_directory(self, path: str) -> None: ...
    def rename(self, source: str, target: str) -> None: ...
    def unlink(self, path: str) -> None: ...
    def remove_directory(self, path: str) -> None: ...
    def exists(self, path: str) -> bool: ...
    def free_bytes(self, path: str) -> int: ...
    def total_bytes(self, path: str) -> int: ...
    def allocate(self, path: str, size: int) -> None: ...


def _plain(fd: int, path: str) -> int:
    """`fd` of a plain file. Raises OSError, with the path, for anything else: its first read or write would fail, and not say where."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", path)
    return fd


class DiskReadFiles:
    """The real ones, for reading."""

    def open_for_read(self, path: str) -> int:
        return _plain(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)  # a pipe would wait for a writer

    def close(self, fd: int) -> None:
        os.close(fd)

    def read_at(self, fd: int, length: int, position: int) -> bytes:
        return os.pread(fd, length, position)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))


def _first_of(pieces: list[Readable]) -> list[Readable]:
    """The first pieces, the last of them cut, up to WRITE_MAX_BYTES."""
    some: list[Readable] = []
    left = WRITE_MAX_BYTES
    for piece in pieces[:IOV_MAX]:
        if len(piece) >= left:
            some.append(piece if len(piece) == left else memoryview(piece)[:left])
            break
        some.append(piece)
        left -= len(piece)
    return some


class DiskFiles(DiskReadFiles):
    """The real thing."""

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int:
        """For reading too; made if it is missing. `exclusive`: it must be missing."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0), 0o600)
        if exclusive:
            os.fchmod(fd, 0o600)
        return _plain(fd, path)

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        """Write all pieces, one after the other, from `position` on."""
        remaining = [piece for piece in pieces if len(piece)]
        while remaining:
            some = _first_of(remaining)
            written = os.pwrite(fd, some[0], position) if len(some) == 1 else os.pwritev(fd, some, position)
            if not written:
                raise OSError(errno.EIO, "the disk takes nothing")
            position += written
            index = 0
            while index < len(remaining) and written >= len(remaining[index]):
                written -= len(remaining[index])
                index += 1
            del remaining[:index]
            if written:
                remaining[0] = memoryview(remaining[0])[written:]

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def make_directory(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def remove_directory(self, path: str) -> None:
        os.rmdir(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def free_bytes(self, path: str) -> int:
        """What an unprivileged writer may still use."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def allocate(self, path: str, size: int) -> None:
        """Make a file that holds `size` bytes of the disk."""
        fd = self.open_for_write(path)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)

    def total_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize


def replace_file(files: Files, path: str, data: Readable, *, sync: bool = True, before_rename: Callable[[], None] = lambda: None) -> None:
    """Put a small file with these bytes at `path`: the old one or the new one is there, whole, whatever happens. Without `sync` that holds for a kill; a loss
    of power may leave neither. Raises OSError; then what was there is there still.
    """
    temporary = path + TEMPORARY_SUFFIX
    try:
        fd = files.open_for_write(temporary, exclusive=True)
    except FileExistsError:  # a kill left it, or somebody put a link there
        files.unlink(temporary)
        fd = files.open_for_write(temporary, exclusive=True)
    try:
        files.write_at(fd, [data], 0)
        if sync:
            files.sync_data(fd)
    except OSError:
        try:
            files.unlink(temporary)  # on a full disk its room is wanted
        except OSError:
            pass  # the next one removes it
        raise
    finally:
        files.close(fd)
    before_rename()
    files.rename(temporary, path)
    if sync:
        files.sync_directory(os.path.dirname(path))
