"""Reads batches from segment files: positions by offset and by time, whole batches only, never beyond the high watermark.

Owner: one front; reads only. Nothing is mapped: a truncated or unreadable page under a mapping kills the process.
Invariants: what is handed out begins with the batch that holds the wanted offset and ends with a whole batch below the watermark;
    a read that would wait for the disk is not made here (`ColdRead`) unless asked for.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

from shm.assignments import Assignment
from shm.layout import SlotState
from shm.partition_table import PartitionState, PartitionTable
from tailrace.batch_header import METADATA_MAX_BYTES, BatchFormatError, frame_at
from tailrace.protocol.errors import ErrorCode
from tailrace.segment import INDEX_SUFFIX, SEGMENT_SUFFIX, file_name, segment_bases
from tailrace.segment_index import IndexReader

OPEN_FILES_MAX = 512
PEEK_BYTES = 64 << 10


class ColdRead(Exception):
    """The bytes are not in the page cache: read this range first."""

    def __init__(self, fd: int, position: int, length: int) -> None:
        super().__init__(position, length)
        self.fd = fd
        self.position = position
        self.length = length


class LogReadError(Exception):
    """The log cannot give what was asked for; `code` says why."""

    def __init__(self, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Place(NamedTuple):
    """Where a reader goes on: the batch that begins with `offset` lies there."""

    offset: int
    segment_base: int
    file_position: int


class Span(NamedTuple):
    """What a read found: bytes `start` to `end` of the buffer, and where to go on."""

    start: int
    end: int
    following: Place


class LogReader:
    """Open files and segment lists of the partitions that are read."""

    def __init__(self, data_dirs: list[str], tables: list[PartitionTable]) -> None:
        self._data_dirs = data_dirs
        self._tables = tables
        self._segments: dict[bytes, dict[int, tuple[int, list[int]]]] = {}
        self._files: OrderedDict[str, int] = OrderedDict()
        self._nowait = os.RWF_NOWAIT

    def state(self, route: Assignment) -> PartitionState:
        """The partition's slot; raises LogReadError when it is not (or no longer) this topic's."""
        state = self._tables[route.data_dir].read(route.slot)
        if state.topic_id != route.topic_id or state.state in (SlotState.FREE, SlotState.DELETED):
            raise LogReadError(ErrorCode.NOT_READY, "the partition is being opened or deleted")
        return state

    # ---- files -----------------------------------------------------------------------------------------------------------------------

    def _directory(self, route: Assignment) -> str:
        return f"{self._data_dirs[route.data_dir]}/{route.directory_name}"

    def _bases(self, route: Assignment, state: PartitionState) -> list[int]:
        """Base offsets of the partition's segments, read again when another one is live."""
        known = self._segments.setdefault(route.topic_id, {}).get(route.partition)
        if known is not None and known[0] == state.live_segment_base and known[1]:
            return known[1]
        names = os.listdir(self._directory(route))
        bases = segment_bases(names)
        self._segments[route.topic_id][route.partition] = (state.live_segment_base, bases)
        return bases

    def _open(self, path: str) -> int:
        fd = self._files.get(path)
        if fd is not None:
            self._files.move_to_end(path)
            return fd
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._files[path] = fd
        while len(self._files) > OPEN_FILES_MAX:
            os.close(self._files.popitem(last=False)[1])
        return fd

    def forget(self, route: Assignment) -> None:
        """The partition was dropped: close its files."""
        prefix = self._directory(route) + "/"
        for path in [path for path in self._files if path.startswith(prefix)]:
            os.close(self._files.pop(path))
        self._segments.pop(route.topic_id, None)

    def _path(self, route: Assignment, base: int, suffix: str = SEGMENT_SUFFIX) -> str:
        return f"{self._directory(route)}/{file_name(base, suffix)}"

    # ---- finding ---------------------------------------------------------------------------------------------------------------------

    def locate(self, route: Assignment, state: PartitionState, offset: int) -> Place:
        """Where the batch that holds `offset` begins, or a place at most a little before it."""
        bases = self._bases(route, state)
        number = bisect_right(bases, offset)
        if not number:
            raise LogReadError(ErrorCode.OFFSET_OUT_OF_RANGE, f"offset {offset} lies before the first segment")
        base = bases[number - 1]
        found = self._index(route, base).find_offset(offset)
        return Place(found.base_offset, base, found.file_position) if found else Place(base, base, self._schema_end(route, base))

    def find_time(self, route: Assignment, timestamp_us: int) -> int | None:
        """The base offset of the first batch with a record at or after `timestamp_us`, below the watermark; None: there is none."""
        state = self.state(route)
        for base in self._bases(route, state):
            found = self._index(route, base).find_time(timestamp_us)
            if found is not None:
                return found.base_offset if found.base_offset < state.high_watermark else None
        return None

    def _index(self, route: Assignment, base: int) -> IndexReader:
        fd = self._open(self._path(route, base, INDEX_SUFFIX))
        return IndexReader(lambda length, position: os.pread(fd, length, position), os.fstat(fd).st_size, base)

    def _schema_end(self, route: Assignment, base: int) -> int:
        head = os.pread(self._open(self._path(route, base)), 8, 0)
        return 8 + int.from_bytes(head[4:8], "little")

    # ---- reading ---------------------------------------------------------------------------------------------------------------------

    def read(
        self, route: Assignment, state: PartitionState, offset: int, hint: Place | None, target: memoryview, blocking: bool
    ) -> Span | int:
        """Fill `target` with whole batches from the one that holds `offset` on.

        Answers a Span (perhaps empty), or the number of bytes that the first batch needs when `target` is too small for it.
        Raises ColdRead (unless `blocking`), LogReadError, OSError.
        """
        place = hint if hint is not None and hint.offset == offset else self.locate(route, state, offset)
        while True:
            fd = self._open(self._path(route, place.segment_base))
            length = self._read_into(fd, target, place.file_position, blocking)
            result = self._walk(target, length, place, offset, state.high_watermark)
            if isinstance(result, Span):
                if result.end > result.start or result.following == place:
                    return result
                place = result.following
                continue
            if result == 0:  # the end of a segment: on with the next
                bases = self._bases(route, state)
                number = bisect_right(bases, place.segment_base)
                if number == len(bases):
                    self._segments.pop(route.topic_id, None)
                    return Span(0, 0, Place(offset, place.segment_base, place.file_position))
                place = Place(bases[number], bases[number], self._schema_end(route, bases[number]))
                continue
            needed, position = result, place.file_position
            if needed > len(target):
                return needed
            if blocking:
                raise LogReadError(ErrorCode.CORRUPT_BATCH, f"{self._path(route, place.segment_base)} ends inside a batch at {position}")
            raise ColdRead(fd, position, max(needed, PEEK_BYTES))

    def _read_into(self, fd: int, target: memoryview, position: int, blocking: bool) -> int:
        try:
            return os.preadv(fd, [target], position, 0 if blocking else self._nowait)
        except BlockingIOError:
            raise ColdRead(fd, position, len(target)) from None
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            self._nowait = 0  # this file system cannot tell; wait for it
            return os.preadv(fd, [target], position)

    @staticmethod
    def _walk(target: memoryview, length: int, place: Place, offset: int, high_watermark: int) -> Span | int:
        """Which of the `length` bytes to hand out. 0: the segment ends at `place`. A positive number: the first batch needs that many
        bytes.
        """
        at = 0
        start = -1
        following = place.offset
        while True:
            if following >= high_watermark:
                break
            try:
                frame = frame_at(target, at, length)
            except BatchFormatError as error:
                raise LogReadError(ErrorCode.CORRUPT_BATCH, f"at {place.file_position + at}: {error.reason}") from None
            if frame is None:
                if at == 0 and start < 0:
                    return min(METADATA_MAX_BYTES, max(PEEK_BYTES, 2 * length))
                break
            batch_length, base_offset, next_offset = frame
            if batch_length == 0:
                if at == 0:
                    return 0
                break
            if base_offset != following:
                raise LogReadError(
                    ErrorCode.CORRUPT_BATCH, f"offset {base_offset} where {following} belongs, at {place.file_position + at}"
                )
            if at + batch_length > length:
                if at == 0:
                    return batch_length
                break
            if next_offset > offset and start < 0:
                start = at
            at += batch_length
            following = next_offset
        begin = at if start < 0 else start
        return Span(begin, at, Place(following, place.segment_base, place.file_position + at))
