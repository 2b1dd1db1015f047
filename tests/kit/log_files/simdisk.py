"""A disk in memory that can lose power: it forgets what was not synced, tears writes at any byte,
keeps unsynced writes in any selection, fails on demand.

Stricter than real ones: a file's bytes and its name are durable apart from each other; the name
only when its directory was synced; of unsynced changes to a directory a prefix survives, of
unsynced writes to a file any subset, each whole or torn. A rename within a directory is one change,
as with a journal. A sync that failed leaves pages that look clean and of which some are lost.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Sequence

from tailrace.format.crc32c import Readable

Hook = Callable[[str, str], None]
"""Called with (operation, path) before each operation that changes something or reads; may
raise.
"""


class Inode:
    """One file: what processes see, what the platter has, and the writes in between."""

    __slots__ = ("allocated", "data", "durable", "unsynced")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = bytearray(data)
        self.unsynced: list[tuple[int, bytes | None]] = []
        """(position, bytes), or (length, None) for a truncation."""
        self.allocated = 0
        """So long the file is at least: `allocate` makes no bytes."""


Change = tuple[str, Inode | None, bool]
"""A name of a directory, what has it, and whether it has it from then on."""


def _are_of_a_rename(source: Change, target: Change) -> bool:
    """True for two changes of one directory that are made at once, or not at all."""
    return source[1] is target[1] is not None and not source[2] and target[2]


def _apply(data: bytearray, position: int, piece: bytes | None) -> None:
    if piece is None:
        del data[position:]
        data.extend(bytes(position - len(data)))
        return
    if len(data) < position:
        data.extend(bytes(position - len(data)))
    data[position : position + len(piece)] = piece


class SimDisk:
    """The hardware: it outlives every process."""

    def __init__(self, directories: Sequence[str] = ("/data",)) -> None:
        self.names: dict[str, Inode | None] = dict.fromkeys(directories)
        """Path -> file, None for a directory."""
        self.durable_names = dict(self.names)
        self.unsynced_names: dict[str, list[Change]] = {}
        """Directory -> (path, what, there) in order."""
        self.hook: Hook | None = None
        self.free = 1 << 40
        self.total = 1 << 41
        self.operations = 0

    def add_directory(self, path: str) -> None:
        """Mount another one."""
        self.names[path] = self.durable_names[path] = None

    def touch(self, operation: str, path: str) -> None:
        self.operations += 1
        if self.hook is not None:
            self.hook(operation, path)

    def set_name(self, path: str, what: Inode | None, there: bool) -> None:
        if there:
            self.names[path] = what
        else:
            del self.names[path]
        self.unsynced_names.setdefault(os.path.dirname(path), []).append((path, what, there))

    def commit_directory(self, directory: str) -> None:
        for path, what, there in self.unsynced_names.pop(directory, []):
            _set(self.durable_names, path, what, there)

    def lose_power(self, rng: random.Random) -> SimDisk:
        """The disk that is found afterwards."""
        names = dict(self.durable_names)
        for changes in self.unsynced_names.values():
            count = rng.randint(0, len(changes))
            if 0 < count < len(changes) and _are_of_a_rename(*changes[count - 1 : count + 1]):
                count += 1
            for path, what, there in changes[:count]:
                _set(names, path, what, there)
        after = SimDisk(())
        survivors: dict[int, Inode] = {}
        for path in sorted(names):
            parent = os.path.dirname(path)
            if parent != "/" and parent not in after.names:
                continue
            what = names[path]
            if what is not None and id(what) not in survivors:
                survivors[id(what)] = Inode(self._surviving(what, rng))
            after.names[path] = None if what is None else survivors[id(what)]
        after.durable_names = dict(after.names)
        after.free, after.total = self.free, self.total
        return after

    @staticmethod
    def _surviving(inode: Inode, rng: random.Random) -> bytes:
        data = bytearray(inode.durable)
        mood = rng.random()
        for number, (position, piece) in enumerate(inode.unsynced):
            last = number == len(inode.unsynced) - 1
            if mood < 0.25 or (mood < 0.6 and rng.random() < 0.5):
                continue
            if piece is not None and (last or rng.random() < 0.2) and rng.random() < 0.5:
                piece = piece[: rng.randint(0, len(piece))]
            _apply(data, position, piece)
        return bytes(data)


def _set(names: dict[str, Inode | None], path: str, what: Inode | None, there: bool) -> None:
    if there:
        names[path] = what
    else:
        names.pop(path, None)
        if what is None:
            for below in [name for name in names if name.startswith(path + "/")]:
                del names[below]


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


class SimFiles:
    """`tailrace.format.directory.files.Files` over a SimDisk;
    tests/workers/segment/test_file_interface.py holds it beside the real one.
    """

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self._open: dict[int, tuple[Inode, str]] = {}
        self._next_fd = 3

    def _fd(self, inode: Inode, path: str) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = inode, path
        return self._next_fd

    def _opened(self, fd: int) -> tuple[Inode, str]:
        if fd not in self._open:
            raise _error(errno.EBADF, f"descriptor {fd}")
        return self._open[fd]

    def _file(self, path: str) -> Inode:
        if path not in self.disk.names:
            raise _error(errno.ENOENT, path)
        found = self.disk.names[path]
        if found is None:
            raise _error(errno.EISDIR, path)
        return found

    def _directory(self, path: str) -> None:
        """Raises OSError when it is none."""
        if path not in self.disk.names:
            raise _error(errno.ENOENT, path)
        if self.disk.names[path] is not None:
            raise _error(errno.ENOTDIR, path)

    def open_for_write(self, path: str, *, exclusive: bool = False) -> int:
        if path not in self.disk.names:
            self._directory(os.path.dirname(path))
            self.disk.touch("create", path)
            self.disk.set_name(path, Inode(), True)
        elif exclusive:
            raise _error(errno.EEXIST, path)
        return self._fd(self._file(path), path)

    def open_for_read(self, path: str) -> int:
        return self._fd(self._file(path), path)

    def close(self, fd: int) -> None:
        self._opened(fd)
        del self._open[fd]

    def write_at(self, fd: int, pieces: Sequence[Readable], position: int) -> None:
        inode, path = self._opened(fd)
        whole = b"".join(bytes(piece) for piece in pieces)
        if not whole:
            return  # nor does the real one ask the disk for anything
        try:
            self.disk.touch("write", path)
        except BaseException:
            # Interrupted halfway: part of the bytes is there.
            half = whole[: len(whole) // 2]
            _apply(inode.data, position, half)
            inode.unsynced.append((position, half))
            raise
        _apply(inode.data, position, whole)
        inode.unsynced.append((position, whole))

    def read_at(self, fd: int, length: int, position: int) -> bytes:
        inode, path = self._opened(fd)
        self.disk.touch("read", path)
        return bytes(inode.data[position : position + length])

    def read_into(self, fd: int, target: memoryview, position: int, *, blocking: bool) -> int:
        del blocking
        data = self.read_at(fd, len(target), position)
        target[: len(data)] = data
        return len(data)

    def size(self, fd: int) -> int:
        inode = self._opened(fd)[0]
        return max(len(inode.data), inode.allocated)

    def is_removed(self, fd: int) -> bool:
        inode = self._opened(fd)[0]
        return all(known is not inode for known in self.disk.names.values())

    def truncate(self, fd: int, length: int) -> None:
        inode, path = self._opened(fd)
        self.disk.touch("truncate", path)
        inode.allocated = 0
        _apply(inode.data, length, None)
        inode.unsynced.append((length, None))

    def sync_data(self, fd: int) -> None:
        inode, path = self._opened(fd)
        try:
            self.disk.touch("sync", path)
        except OSError:
            # As Linux does it: some of the pages may have been written, all look clean, and no
            # later sync writes the rest.
            rng = random.Random(self.disk.operations)
            for position, piece in inode.unsynced:
                if rng.random() < 0.5:
                    _apply(inode.durable, position, piece)
            inode.unsynced = []
            raise
        for position, piece in inode.unsynced:
            _apply(inode.durable, position, piece)
        inode.unsynced = []

    def sync_directory(self, path: str) -> None:
        self._directory(path)
        self.disk.touch("sync_directory", path)
        self.disk.commit_directory(path)

    def list(self, path: str) -> list[str]:
        self._directory(path)
        prefix = path + "/"
        return sorted(
            name[len(prefix) :]
            for name in self.disk.names
            if name.startswith(prefix) and "/" not in name[len(prefix) :]
        )

    def make_directory(self, path: str) -> None:
        self._directory(os.path.dirname(path))
        if path in self.disk.names:
            raise _error(errno.EEXIST, path)
        self.disk.touch("make_directory", path)
        self.disk.set_name(path, None, True)

    def rename(self, source: str, target: str) -> None:
        if source not in self.disk.names:
            raise _error(errno.ENOENT, source)
        self._directory(os.path.dirname(target))
        what = self.disk.names[source]
        if target in self.disk.names:
            if (what is None) != (self.disk.names[target] is None):
                raise _error(errno.ENOTDIR if what is None else errno.EISDIR, target)
            if what is None and self.list(target):
                raise _error(errno.ENOTEMPTY, target)
        self.disk.touch("rename", source)
        below = [name for name in self.disk.names if name.startswith(source + "/")]
        self.disk.set_name(source, what, False)
        self.disk.set_name(target, what, True)
        for name in below:  # a directory takes its files along
            moved = self.disk.names.pop(name)
            self.disk.names[target + name[len(source) :]] = moved

    def unlink(self, path: str) -> None:
        file = self._file(path)
        self.disk.touch("unlink", path)
        self.disk.set_name(path, file, False)

    def remove_directory(self, path: str) -> None:
        if self.list(path):
            raise _error(errno.ENOTEMPTY, path)
        self.disk.touch("remove_directory", path)
        self.disk.set_name(path, None, False)

    def exists(self, path: str) -> bool:
        return path in self.disk.names

    def free_bytes(self, path: str) -> int:
        del path
        return self.disk.free

    def total_bytes(self, path: str) -> int:
        del path
        return self.disk.total

    def allocated(self, fd: int) -> int:
        return self.size(fd)

    def allocate(self, path: str, size: int) -> None:
        fd = self.open_for_write(path)
        inode = self._opened(fd)[0]
        inode.allocated = max(inode.allocated, size)
        self.close(fd)


def fail_at(number: int, error: int) -> Hook:
    """A hook under which the `number`-th write, sync, rename or other change from now on is refused
    with `error`, and only that one.
    """
    left = number

    def hook(operation: str, path: str) -> None:
        nonlocal left
        if operation == "read":
            return
        left -= 1
        if left == -1:
            raise OSError(error, os.strerror(error), path)

    return hook
