"""Bucket files: delayed rows on disk by due time, as the far buckets of the timing wheel.

A bucket of level L covers 64**L ticks of a millisecond (from level 2 on: 4 s, 4 min, 4.7 h, 12
days, 2 years, 139 years). A row goes to the lowest level whose 64 buckets reach its tick, so there
are at most some hundred files for any number of rows. When a bucket's time approaches, its rows
move to lower buckets, and those of the lowest level into memory.

Owner: the scheduler. The manifest says which bytes of a file are valid.
`tailrace.format.directory.delay_files` has the layout.

Invariants:
- A chunk never changes.
- Rows of a chunk ascend in offset.
- A saved cancellation cancels an offset in the chunks before it, an unsaved one in all of the file.
  An offset is in one chunk at most where it is not cancelled.
- The entry says how its rows were at the manifest's cursor. Cancellations and deliveries behind the
  cursor are in memory only until the cursor moves: the log is read again from there, and the
  replacement of a row must find it.

Crash: bytes after the manifest's end of a file are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.core.schedule.delays import NONE_DELIVERED
from tailrace.format.directory.delay_files import (
    HEAD_BYTES,
    KIND_CANCELLED,
    KIND_ROWS,
    BucketEntry,
    Chunk,
    PendingDamagedError,
    proven,
    walk_chunks,
)
from workers.delays.store.array_wheel import levels_of
from workers.segment.files import Files

Ints = np.ndarray[Any, np.dtype[np.int64]]
LOWEST_LEVEL = 2
LEVELS_USED = 7
"""64 ** 7 ticks are 139 years, longer than any delay."""
KEYS_KEPT = 500_000
"""Largest number of rows in the key cache."""
_keys: dict[tuple[str, int, int], tuple[Ints, Ints]] = {}
"""Cache of chunk keys by (path, position, checksum), least recently used first."""
_BITS = 6


def buckets_of(ticks: Ints, current: int) -> tuple[Ints, Ints]:
    """Return (level, first tick) of each tick's bucket. The lowest level is LOWEST_LEVEL."""
    levels = np.maximum(levels_of(np.maximum(ticks, current), current), LOWEST_LEVEL)
    return levels, ticks >> (_BITS * levels) << (_BITS * levels)


def is_above(
    ticks: Ints, offsets: Ints, key: tuple[int, int]
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return one boolean per row: True if it comes after (tick, offset)."""
    above: np.ndarray[Any, np.dtype[np.bool_]] = (ticks > key[0]) | (
        (ticks == key[0]) & (offsets > key[1])
    )
    return above


def width_of(level: int) -> int:
    """Return the number of ticks that a bucket covers."""
    return 1 << (_BITS * level)


class BucketFile:
    """One bucket file. It is open only within a call."""

    def __init__(
        self, files: Files, directory: str, entry: BucketEntry, schema_id: int = 0
    ) -> None:
        self.entry = entry
        self.schema_id = schema_id
        """The version of the delay log's schema that all its rows have."""
        self._files = files
        self.name = entry.file_name
        self.path = f"{directory}/{self.name}"
        self.unsaved_cancels: set[int] = set()
        """Offsets of rows here whose cancellation is in the delay log only."""
        self.unsaved_delivered = NONE_DELIVERED
        """(tick, offset) of the last row delivered before the clock was set back, by a mark behind
        the manifest's cursor.
        """
        self.is_loaded = False
        """True if its rows are in memory. Nothing more is appended."""
        self.is_making = False
        """True while it is being written with rows that are in memory.

        It must not be loaded yet.
        """
        self.is_damaged = False
        """True if part of it could not be read."""
        self._chunks: list[Chunk] | None = None
        self._cancelled: tuple[Ints, Ints] | None = None
        """Sorted offsets of cancelled rows, and the position of the last chunk that cancels each:
        16 bytes a row, at most as many as rows.
        """

    @property
    def is_to_load(self) -> bool:
        return not self.is_loaded and not self.is_making

    def accepts_rows_of(self, unsaved_delivered: tuple[int, int], schema_id: int) -> bool:
        """True if rows of this version may be appended, of which those up to `unsaved_delivered`
        are delivered.
        """
        return (
            not self.is_loaded
            and self.schema_id == schema_id
            and self.saved_delivered == NONE_DELIVERED
            and self.unsaved_delivered == unsaved_delivered
        )

    @property
    def saved_delivered(self) -> tuple[int, int]:
        """(tick, offset) of the last row delivered before the clock was set back, at the manifest's
        cursor.
        """
        return self.entry.delivered_tick, self.entry.delivered_offset

    @property
    def delivered(self) -> tuple[int, int]:
        """(tick, offset) of the last row delivered before the clock was set back."""
        return max(self.saved_delivered, self.unsaved_delivered)

    def set_back(self, delivered: tuple[int, int]) -> None:
        """Note that the clock was set back, with rows up to `delivered` delivered."""
        self.unsaved_delivered = max(self.unsaved_delivered, delivered)

    def note_cursor_moved(self) -> None:
        """Note that the cursor is behind each mark that was read."""
        self.entry.delivered_tick, self.entry.delivered_offset = self.delivered
        self.unsaved_delivered = NONE_DELIVERED

    @property
    def last_tick(self) -> int:
        return self.entry.start + width_of(self.entry.level) - 1

    def append(self, kind: int, ticks: Ints, offsets: Ints, body: Any) -> None:
        """Append a chunk. It is valid when the manifest includes it. Raises OSError."""
        keys = (
            [offsets.tobytes()] if kind == KIND_CANCELLED else [ticks.tobytes(), offsets.tobytes()]
        )
        span = (int(ticks.min()), int(ticks.max())) if len(ticks) else (0, 0)
        chunk = Chunk(
            self.entry.end,
            kind,
            len(offsets),
            0,
            len(body),
            int(offsets[0]),
            int(offsets[-1]),
            *span,
        )
        chunk = chunk.sealed([*keys, body])
        chunks = self.chunks()
        fd = self._files.open_for_write(self.path)
        try:
            self._files.write_at(fd, [chunk.head(), *keys, body], self.entry.end)
        finally:
            self._files.close(fd)
        chunks.append(chunk)
        if not self.entry.end:
            self.entry.first_crc = chunk.crc
        self.entry.end = chunk.end
        if kind == KIND_ROWS:
            self.entry.rows += len(offsets)
        else:
            self.entry.cancelled += len(offsets)
            if self._cancelled is not None:
                self._cancelled = _latest([self._cancelled, (offsets, _at(chunk))])

    def sync(self) -> None:
        """Sync the appended bytes. The file's name is synced with its directory. Raises OSError."""
        fd = self._files.open_for_write(self.path)
        try:
            self._files.sync_data(fd)
        finally:
            self._files.close(fd)

    def chunks(self) -> list[Chunk]:
        """Return the chunks between the entry's begin and end.

        Raises OSError, PendingDamagedError.
        """
        if self._chunks is None:
            self._chunks = []
            if self.entry.end > self.entry.begin:
                fd = self._open()
                try:
                    self._chunks = list(
                        walk_chunks(
                            lambda n, at: self._files.read_at(fd, n, at),
                            self.entry.begin,
                            self.entry.end,
                            self.entry.first_crc,
                        )
                    )
                except PendingDamagedError as error:
                    raise PendingDamagedError(f"{self.path}: {error}") from None
                finally:
                    self._files.close(fd)
        return self._chunks

    def _open(self) -> int:
        try:
            return self._files.open_for_read(self.path)
        except FileNotFoundError:
            raise PendingDamagedError(f"{self.path} is missing") from None

    def prove(self, chunk: Chunk) -> memoryview:
        """Return a chunk's content after its head, verified by its checksum.

        Raises OSError, PendingDamagedError.
        """
        fd = self._open()
        try:
            return proven(lambda n, at: self._files.read_at(fd, n, at), chunk)
        except PendingDamagedError as error:
            raise PendingDamagedError(f"{self.path}: {error}") from None
        finally:
            self._files.close(fd)

    def keys_of(self, chunk: Chunk) -> tuple[Ints, Ints]:
        """Return (ticks, offsets) of a chunk of rows. Only the extremes in its head are checked.

        Recent ones are cached, for all files together. Raises OSError, PendingDamagedError.
        """
        place = (self.path, chunk.position, chunk.crc)
        keys = _keys.pop(place, None)
        if keys is None:
            keys = self._read_keys(chunk)
        _keys[place] = keys
        while len(_keys) > 1 and sum(len(ticks) for ticks, _ in _keys.values()) > KEYS_KEPT:
            del _keys[next(iter(_keys))]
        return keys

    def _read_keys(self, chunk: Chunk) -> tuple[Ints, Ints]:
        fd = self._open()
        try:
            data = self._files.read_at(fd, chunk.keys, chunk.position + HEAD_BYTES)
        finally:
            self._files.close(fd)
        if len(data) < chunk.keys:
            raise PendingDamagedError(f"{self.path} ends inside the chunk at {chunk.position}")
        keys = np.frombuffer(data, np.int64)
        ticks, offsets = keys[: chunk.rows], keys[chunk.rows :]
        found = (
            (int(offsets[0]), int(offsets[-1]), int(ticks.min()), int(ticks.max()))
            if chunk.rows
            else chunk[5:]
        )
        if found != chunk[5:]:  # otherwise a list would silently omit a row with another tick
            raise PendingDamagedError(
                f"{self.path} has other rows at {chunk.position} than its head says"
            )
        return ticks, offsets

    def read_rows(self, chunk: Chunk, schema: pa.Schema) -> tuple[Ints, Ints, pa.RecordBatch]:
        """Return (ticks, offsets, rows) of a chunk, verified.

        Raises OSError, PendingDamagedError.
        """
        data = self.prove(chunk)
        keys = np.frombuffer(data[: chunk.keys], np.int64)
        try:
            rows = pa.ipc.read_record_batch(
                pa.ipc.read_message(pa.py_buffer(data[chunk.keys :])), schema
            )
        except (pa.ArrowException, OSError, ValueError, LookupError) as error:
            raise PendingDamagedError(
                f"{self.path} has rows at {chunk.position} that cannot be read: {error}"
            ) from None
        return keys[: chunk.rows], keys[chunk.rows :], rows

    def _are_cancelled(self, chunk: Chunk, offsets: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return one boolean per row of a chunk: True if a saved cancellation follows it.

        Raises OSError, PendingDamagedError.
        """
        if self._cancelled is None:
            self._cancelled = _latest(
                [
                    (np.frombuffer(self.prove(chunk), np.int64), _at(chunk))
                    for chunk in self.chunks()
                    if chunk.kind == KIND_CANCELLED
                ]
            )
        cancelled, positions = self._cancelled
        if not len(cancelled):
            return np.zeros(len(offsets), bool)
        places = np.minimum(np.searchsorted(cancelled, offsets), len(cancelled) - 1)
        found: np.ndarray[Any, np.dtype[np.bool_]] = (cancelled[places] == offsets) & (
            positions[places] > chunk.position
        )
        return found

    def row_chunks(self) -> Iterator[Chunk]:
        return (chunk for chunk in self.chunks() if chunk.kind == KIND_ROWS)

    def left(
        self, chunk: Chunk, ticks: Ints, offsets: Ints, *, as_saved: bool = False
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return one boolean per row of a chunk: True if it is neither cancelled nor delivered
        before the clock was set back.

        `as_saved` ignores cancellations and deliveries after the manifest's cursor.
        """
        left = is_above(ticks, offsets, self.saved_delivered if as_saved else self.delivered)
        left &= ~self._are_cancelled(chunk, offsets)
        if self.unsaved_cancels and not as_saved:
            gone = np.fromiter(self.unsaved_cancels, np.int64, len(self.unsaved_cancels))
            left &= ~np.isin(offsets, gone)
        return left

    def find(self, offset: int, released: int) -> tuple[Chunk, int] | None:
        """Return (chunk, row) of a row that is here, not cancelled, and due after the tick
        `released`. Raises OSError, PendingDamagedError.
        """
        if offset in self.unsaved_cancels:
            return None
        for chunk in self.row_chunks():
            if chunk.first_offset <= offset <= chunk.last_offset:
                ticks, offsets = self.keys_of(chunk)
                row = int(np.searchsorted(offsets, offset))
                if (
                    offsets[row] == offset
                    and not self._are_cancelled(chunk, offsets[row : row + 1])[0]
                ):
                    is_done = (int(ticks[row]), offset) <= self.delivered
                    return None if is_done or ticks[row] <= released else (chunk, row)
        return None

    def forget_chunk(self, chunk: Chunk) -> None:
        """Remove a chunk whose rows, and those before it, were moved elsewhere. Raises OSError."""
        try:
            offsets = self.keys_of(chunk)[1]
            self.entry.cancelled -= int(self._are_cancelled(chunk, offsets).sum())
            gone = self.unsaved_cancels.intersection(offsets.tolist())
            for other in self.row_chunks():
                if gone and other.position > chunk.position:  # a row that was returned
                    gone.difference_update(self.keys_of(other)[1].tolist())
            self.unsaved_cancels -= gone
        except PendingDamagedError:
            # unknown: an undercount never makes an unfinished file count as finished
            self.entry.cancelled = 0
        self.entry.rows -= chunk.rows
        self.entry.begin = chunk.end
        if self._chunks is not None:
            self._chunks = [other for other in self._chunks if other.position >= chunk.end]


def _at(chunk: Chunk) -> Ints:
    """Return the position of a chunk of cancellations, for each of its offsets."""
    return np.full(chunk.rows, chunk.position, np.int64)


def _latest(cancellations: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    """Return (offsets, positions) in the order of offsets, of each the last in the list."""
    nothing = np.empty(0, np.int64)
    offsets = np.concatenate([nothing, *(offsets for offsets, _ in cancellations)])[::-1]
    positions = np.concatenate([nothing, *(positions for _, positions in cancellations)])[::-1]
    found, first = np.unique(offsets, return_index=True)
    return found, positions[first]
