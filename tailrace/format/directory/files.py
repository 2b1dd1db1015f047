"""File operations of logs, catalogs and their readers, as an interface for tests with faulty disks.

Every implementation passes `tests/workers/segment/test_file_interface.py`. Errors are plain
OSError. Short writes are completed here.

Owner: the opener of a file. There is no state but the descriptors.

Invariants:
- Files for writing are not links, and only their owner can read them, regardless of the umask.
- A shortage of space, descriptors or memory (`is_shortage`) is retried and never recorded as a
  fault of the disk.

Crash: `replace_file` leaves the old or the new file, whole. The next call removes a left temporary.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from typing import Protocol

from tailrace.format.crc32c import Readable

IOV_MAX = 1024
WRITE_MAX_BYTES = 512 << 10
"""Most bytes of one write call. For larger ones ext4 allocates many MiB of page cache at once,
which is several times slower.
"""
TEMPORARY_SUFFIX = ".tmp"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_PLAIN_FILE = (errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENXIO)
"""Errors of opening a pipe, a directory, a link or a socket."""
SHORTAGES = (*NO_SPACE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def is_shortage(error: OSError) -> bool:
    """True if the host is short of a resource, so a retry may succeed. Other errors are the disk's
    or the file's.
    """
    return error.errno in SHORTAGES


class ReadFiles(Protocol):
    """File operations for a reader of logs."""

    def open_for_read(self, path: str) -> int: ...
    def close(self, fd: int) -> None: ...
    def read_at(self, fd: int, length: int, position: int) -> bytes: ...
    def size(self, fd: int) -> int: ...
    def is_removed(self, fd: int) -> bool: ...
    def list(self, path: str) -> list[str]: ...


class Files(ReadFiles, Protocol):
    """File operations for logs."""

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
    def allocated(self, fd: int) -> int: ...


def _plain(fd: int, path: str) -> int:
    """Return `fd` if it is a plain file, else raise OSError with the path.

    Without this check the first read or write would fail, without the path.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a plain file", path)
    return fd


class DiskReadFiles:
    """The file operations of the operating system, for reading."""

    def open_for_read(self, path: str) -> int:
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        return _plain(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), path)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read_at(self, fd: int, length: int, position: int) -> bytes:
        return os.pread(fd, length, position)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def is_removed(self, fd: int) -> bool:
        """True if the file has no name any more. Its room on the disk is free when the last
        descriptor is closed.
        """
        return os.fstat(fd).st_nlink == 0

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))


def _first_of(pieces: list[Readable]) -> list[Readable]:
    """The first pieces up to WRITE_MAX_BYTES, the last one cut."""
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
    """The file operations of the operating system."""

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int:
        """Open for reading and writing; create a missing file. `exclusive`: it must be missing."""
        fd = os.open(
            path,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_EXCL if exclusive else 0),
            0o600,
        )
        if exclusive:
            os.fchmod(fd, 0o600)
        return _plain(fd, path)

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        """Write all pieces, one after the other, from `position` on."""
        remaining = [piece for piece in pieces if len(piece)]
        while remaining:
            some = _first_of(remaining)
            written = (
                os.pwrite(fd, some[0], position)
                if len(some) == 1
                else os.pwritev(fd, some, position)
            )
            if not written:
                raise OSError(errno.EIO, "the disk accepted no bytes")
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
        """Bytes that an unprivileged writer can still use."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def allocate(self, path: str, size: int) -> None:
        """Create a file that occupies `size` bytes of the disk."""
        fd = self.open_for_write(path)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)

    def allocated(self, fd: int) -> int:
        """Bytes of the disk that a file occupies: few of a file that a copy has made sparse."""
        return os.fstat(fd).st_blocks * 512

    def total_bytes(self, path: str) -> int:
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize


def replace_file(
    files: Files,
    path: str,
    data: Readable,
    *,
    sync: bool = True,
    before_rename: Callable[[], None] = lambda: None,
) -> None:
    """Replace a small file at `path` atomically: the old or the new one is there, whole.

    Without `sync` this holds for a kill; a loss of power may leave neither. Raises OSError; the old
    file is then still there.
    """
    temporary = path + TEMPORARY_SUFFIX
    try:
        fd = files.open_for_write(temporary, exclusive=True)
    except FileExistsError:  # left by a kill, or a planted link
        files.unlink(temporary)
        fd = files.open_for_write(temporary, exclusive=True)
    try:
        files.write_at(fd, [data], 0)
        if sync:
            files.sync_data(fd)
    except OSError:
        try:
            files.unlink(temporary)  # free its space on a full disk
        except OSError:
            pass  # the next call removes it
        raise
    finally:
        files.close(fd)
    before_rename()
    files.rename(temporary, path)
    if sync:
        files.sync_directory(os.path.dirname(path))
