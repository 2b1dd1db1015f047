"""Copy of a partition's files into another data directory, beside its running flusher.

The copy lies in `moving/<topic id>-<partition>` of the target; `workers.log.files.departure`
completes it when the partition is closed.

Owner: `tailrace partition move`, one process a partition (a lock on the copy).

Invariants:
- `copied.json` names what is copied and synced. A file without a row there counts as not copied.
- Of a bucket file of delayed records what `pending.json` names is copied: it does not change.
- Of the newest segment, which grows, whole intact batches are copied. Some may not be synced: after
  a power loss, or when the log was cut, others can be at their positions. A copy goes on only in
  the boot that it was made in, and only if its last batch is still in the segment.

Crash: the next copy goes on from `copied.json`.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress

from shm.runtime.elapsed_time import this_boot
from tailrace.format.directory import checked_json
from tailrace.format.directory.data_dir import (
    COPIED_FILE,
    MOVING_DIRECTORY,
    PARTITION_FILE,
    bin_name,
)
from tailrace.format.directory.delay_files import PENDING_FILE, Manifest, PendingDamagedError
from tailrace.format.directory.partition_metadata import PartitionMetadata
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    SEGMENT_SUFFIX,
    Walk,
    file_name,
    schema_message_length,
    segment_bases,
    walk_batches,
)

CHUNK_BYTES = 1 << 20
GROWS = 0
"""The time of a file that grows, in `copied.json`."""

Entry = list[int]
"""Inode, size and time of what was copied; of a file that grows also the boot, and the position of
the last batch, or of the last bytes.
"""
LAST_BYTES = 4096


class CopyInUseError(RuntimeError):
    """Another process copies the partition to the same directory."""


class Pace:
    """Keeps a rate by sleeping."""

    def __init__(
        self,
        bytes_per_second: int,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`bytes_per_second`: 0 is without a limit."""
        self._rate = bytes_per_second
        self._now_s = now_s
        self._sleep = sleep
        self._due_s = now_s()

    def spend(self, count: int) -> None:
        """Wait so long that `count` bytes more keep the rate."""
        if self._rate:
            self._due_s = max(self._due_s, self._now_s() - 1.0) + count / self._rate
            self._sleep(max(0.0, self._due_s - self._now_s()))


class PartitionCopy:
    """The copy of one partition. Use `opened`."""

    def __init__(self, directory: str, place: str, pace: Pace) -> None:
        self._directory = directory
        self._place = place
        self._pace = pace
        self._copied: dict[str, Entry] = self._read()

    def _read(self) -> dict[str, Entry]:
        try:
            found = checked_json.decode(checked_json.read(f"{self._place}/{COPIED_FILE}"))
        except OSError:
            return {}
        return found if isinstance(found, dict) else {}

    def catch_up(self, advance: Callable[[int], None]) -> int:
        """Copy and sync what the copy lacks now. `advance` is called with the bytes of each piece.
        Returns the bytes copied. Raises OSError.
        """
        names = os.listdir(self._directory)
        bases = segment_bases(names)
        copied = 0
        for base in bases:
            is_newest = base == bases[-1]
            for suffix in (SEGMENT_SUFFIX,) if is_newest else (SEGMENT_SUFFIX, INDEX_SUFFIX):
                try:
                    copied += self._copy(file_name(base, suffix), advance, grows=is_newest)
                except FileNotFoundError:  # removed by retention, or replaced by a cleaned segment
                    continue
        for name, end in self._bucket_ends().items():
            with suppress(FileNotFoundError):  # its rows are in others, which the next pass copies
                copied += self._copy(name, advance, grows=True, end=end)
        names = os.listdir(self._directory)
        self._copied = {name: row for name, row in self._copied.items() if name in names}
        checked_json.replace(f"{self._place}/{COPIED_FILE}", checked_json.encode(self._copied))
        return copied

    def _bucket_ends(self) -> dict[str, int]:
        """The bucket files of a delay log with the ends of what is valid in them. A damaged
        `pending.json` fails the move when the partition is closed.
        """
        try:
            with open(f"{self._directory}/{PENDING_FILE}", "rb") as file:
                manifest = Manifest.decode(file.read())
        except (FileNotFoundError, PendingDamagedError):
            return {}
        return {each.file_name: each.end for each in manifest.files}

    def discard(self) -> None:
        """Remove what was copied. Raises OSError."""
        for name in os.listdir(self._place):
            os.unlink(f"{self._place}/{name}")
        self._copied = {}

    def _copy(
        self, name: str, advance: Callable[[int], None], *, grows: bool, end: int | None = None
    ) -> int:
        """`end`: of what is valid in a bucket file."""
        source = os.open(f"{self._directory}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(source)
            known = self._copied.get(name)
            start = 0
            if known is not None and known[0] == found.st_ino:
                if known[1:] == [found.st_size, found.st_mtime_ns]:
                    return 0
                if known[2] == GROWS and self._is_beginning(source, name, known):
                    start = known[1]
            last = 0
            if end is not None:
                last = max(0, end - LAST_BYTES)
            elif not grows:
                end = found.st_size
            else:
                end, last = self._intact_end(source, found.st_size, name)
            if end < start:
                start = 0
            self._write(source, name, start, end, advance)
            self._copied[name] = (
                [found.st_ino, end, GROWS, this_boot(), last]
                if grows
                else [found.st_ino, end, found.st_mtime_ns]
            )
            return end - start
        finally:
            os.close(source)

    def _is_beginning(self, source: int, name: str, known: Entry) -> bool:
        """True if what is copied of a file that grows is the file's beginning still."""
        if len(known) != 5 or not known[3] or known[3] != this_boot():
            return False
        _, end, _, _, last = known
        try:
            copy = os.open(f"{self._place}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return os.pread(copy, end - last, last) == os.pread(source, end - last, last)
        finally:
            os.close(copy)

    def _intact_end(self, source: int, size: int, name: str) -> tuple[int, int]:
        """The end of the intact batches of the newest segment, and the position of the last one."""

        def read_at(length: int, position: int) -> bytes:
            return os.pread(source, length, position)

        with open(f"{self._directory}/{PARTITION_FILE}", "rb") as file:
            metadata = PartitionMetadata.decode(file.read())
        length = schema_message_length(read_at)
        if metadata is None or not length:
            return 0, 0
        walk = Walk(length, int(name.partition(".")[0]))
        last = 0
        for position, _ in walk_batches(read_at, size, walk, metadata.seed):
            last = position
        return walk.position, last

    def _write(
        self, source: int, name: str, start: int, end: int, advance: Callable[[int], None]
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(f"{self._place}/{name}", flags, 0o600)
        try:
            if os.fstat(target).st_size < start:
                start = 0
            os.ftruncate(target, start)
            position = start
            while position < end:
                data = os.pread(source, min(CHUNK_BYTES, end - position), position)
                if not data:
                    raise FileNotFoundError(name)  # it was replaced
                rest = memoryview(data)
                while rest:
                    written = os.pwrite(target, rest, position)
                    rest, position = rest[written:], position + written
                advance(len(data))
                self._pace.spend(len(data))
            os.fsync(target)
        finally:
            os.close(target)


@contextmanager
def opened(
    directory: str, target: str, topic_id: bytes, partition: int, pace: Pace
) -> Iterator[PartitionCopy]:
    """The copy of the partition in `directory` to the data directory `target`. Raises
    CopyInUseError, OSError.
    """
    place = f"{target}/{MOVING_DIRECTORY}/{bin_name(topic_id, partition)}"
    os.makedirs(place, mode=0o700, exist_ok=True)
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CopyInUseError(
                f"another process copies this partition to {target}: wait until it has ended."
            ) from None
        if not _is_named(fd, place):
            raise CopyInUseError(
                f"the copy of this partition in {target} was completed meanwhile: look where the "
                "partition is (tailrace partition list), and try again."
            )
        yield PartitionCopy(directory, place, pace)
    finally:
        os.close(fd)


def remove_left(data_dir: str, usable: Container[str]) -> None:
    """Remove the copies in a data directory but the `usable` ones and those that are locked. One
    that cannot be removed stays.
    """
    moving = f"{data_dir}/{MOVING_DIRECTORY}"
    try:
        names = os.listdir(moving)
    except OSError:
        return
    for name in names:
        if name in usable:
            continue
        with suppress(OSError):
            fd = os.open(f"{moving}/{name}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for file in os.listdir(fd):
                    os.unlink(file, dir_fd=fd)
                os.rmdir(f"{moving}/{name}")
            finally:
                os.close(fd)


def _is_named(fd: int, path: str) -> bool:
    """True if the open directory has this name still."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
