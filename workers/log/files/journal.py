"""Journal of a data directory: one file with one fdatasync for a group that touches many segment
files.

A group of hundreds of partitions would cost an fdatasync for each file. Instead its batches are
appended to the journal with one fdatasync. Their segments are written too, and synced before that
part of the journal is reused.

Owner: the flusher of the data directory.

Invariants:
- A frame is overwritten only when every segment with its batches is synced.
- Frames of one half have consecutive numbers. Numbers grow over both halves and over restarts
  (`reset` after recovery continues at the first frame, under higher numbers).

Layout: two halves. Frames begin at multiples of 4,096 bytes, so that writing one never touches the
sectors of another. A frame is:
- `magic u32 | entry count u32 | number u64 | frame bytes u64 | crc32c u32 | 0 u32`.
- Per entry `topic id 16s | partition u32 | length u32 | base_offset i64 | next_offset i64`.
- The batches. The checksum covers all but these, which carry their own.

Crash: a frame that was not synced was not acknowledged. A torn one does not match its checksums and
is ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from shm.memory.layout import align
from tailrace.format.crc32c import Readable, crc32c
from tailrace.format.directory.data_dir import JOURNAL_FILE
from workers.segment.files import Files

FRAME_ALIGNMENT_BYTES = 4096
_MAGIC = 0x4E524A54  # "TJRN"
_FRAME = struct.Struct("<IIQQII")
_ENTRY = struct.Struct("<16sIIqq")
_CRC_POSITION = 24
ZERO_PIECE_BYTES = 1 << 20


class JournalBatch(NamedTuple):
    """A batch in the journal."""

    topic_id: bytes
    partition: int
    base_offset: int
    next_offset: int
    data: Readable


class Journal:
    """Journal file. Call `find` at start, `reset` when the found batches are in the segments,
    `prepare` when idle, then `append` for each group.
    """

    def __init__(self, files: Files, data_dir: str, size: int) -> None:
        self._files = files
        self._data_dir = data_dir
        self._path = f"{data_dir}/{JOURNAL_FILE}"
        self.half_bytes = size // 2 // FRAME_ALIGNMENT_BYTES * FRAME_ALIGNMENT_BYTES
        self._fd = -1
        self._prepared = 0
        self._number = 0
        self._half = 0
        self._end = 0
        self._entries: list[dict[tuple[bytes, int], list[tuple[int, int, int, int]]]] = [{}, {}]
        """(base offset, next offset, position, length) by (topic id, partition), for each half.
        Used to read back what a segment could not keep.
        """

    # ---- start -----------------------------------------------------------------------------------

    def find(self) -> dict[tuple[bytes, int], list[JournalBatch]]:
        """Return every batch of every intact frame, by partition in order of offset.

        Raises OSError.
        """
        if not self._files.exists(self._path):
            return {}
        self._fd = self._files.open_for_write(self._path)
        size = self._files.size(self._fd)
        frames: list[tuple[int, list[JournalBatch]]] = []
        for start in (0, size // 2 // FRAME_ALIGNMENT_BYTES * FRAME_ALIGNMENT_BYTES):
            position, expected = start, None
            while (frame := self._read_frame(position)) is not None and expected in (
                None,
                frame[0],
            ):
                number, length, batches = frame
                frames.append((number, batches))
                position += align(length, FRAME_ALIGNMENT_BYTES)
                expected = number + 1
        frames.sort(key=lambda frame: frame[0])
        self._number = frames[-1][0] + 1 if frames else 0
        found: dict[tuple[bytes, int], list[JournalBatch]] = {}
        for _, batches in frames:
            for batch in batches:
                found.setdefault((batch.topic_id, batch.partition), []).append(batch)
        return found

    def _read_frame(self, position: int) -> tuple[int, int, list[JournalBatch]] | None:
        head = self._files.read_at(self._fd, _FRAME.size, position)
        if len(head) < _FRAME.size:
            return None
        magic, count, number, length, crc, _ = _FRAME.unpack(head)
        table_bytes = count * _ENTRY.size
        if magic != _MAGIC or length < _FRAME.size + table_bytes or length > 1 << 32:
            return None
        data = memoryview(self._files.read_at(self._fd, length, position))
        if (
            len(data) < length
            or crc32c(data[_FRAME.size : _FRAME.size + table_bytes], crc32c(head[:_CRC_POSITION]))
            != crc
        ):
            return None
        batches = []
        at = _FRAME.size + table_bytes
        for topic_id, partition, size, base, following in _ENTRY.iter_unpack(
            data[_FRAME.size : at]
        ):
            batches.append(JournalBatch(topic_id, partition, base, following, data[at : at + size]))
            at += size
        return number, length, batches

    def reset(self) -> None:
        """Discard the found batches, which are durable in the segments. Raises OSError."""
        if self._fd < 0:
            return
        for start in (
            0,
            self._files.size(self._fd) // 2 // FRAME_ALIGNMENT_BYTES * FRAME_ALIGNMENT_BYTES,
        ):
            self._files.write_at(self._fd, [bytes(_FRAME.size)], start)
        self._files.sync_data(self._fd)
        if self._files.size(self._fd) != 2 * self.half_bytes:  # the configured size has changed
            self._files.truncate(self._fd, 0)
        else:
            self._prepared = 2 * self.half_bytes
        self._half = self._end = 0
        self._entries = [{}, {}]

    # ---- writing ---------------------------------------------------------------------------------

    @property
    def is_prepared(self) -> bool:
        return self._prepared == 2 * self.half_bytes

    def prepare(self) -> None:
        """Write some of the zeroes of a new journal. Raises OSError.

        A sync of allocated bytes takes 107 us, of a growing file 182.
        """
        if self._fd < 0:
            self._fd = self._files.open_for_write(self._path)
            self._files.truncate(self._fd, 0)
        piece = min(ZERO_PIECE_BYTES, 2 * self.half_bytes - self._prepared)
        self._files.write_at(self._fd, [bytes(piece)], self._prepared)
        self._prepared += piece
        if self.is_prepared:
            self._files.sync_data(self._fd)
            self._files.sync_directory(self._data_dir)  # its name, too

    @staticmethod
    def frame_bytes(batches: Sequence[JournalBatch]) -> int:
        return _FRAME.size + sum(_ENTRY.size + len(batch.data) for batch in batches)

    def fits(self, length: int) -> bool:
        """True if a frame of `length` bytes fits the half in use."""
        return self._end + length <= self.half_bytes

    @property
    def half(self) -> int:
        """Half in use, 0 or 1."""
        return self._half

    def switch(self) -> None:
        """Continue in the other half. All segments with batches in it must be synced."""
        self._half ^= 1
        self._end = 0
        self._entries[self._half] = {}

    def append(self, batches: Sequence[JournalBatch]) -> None:
        """Write one frame and make it durable. It must fit. Raises OSError. The journal must not be
        used after that.
        """
        table = b"".join(
            _ENTRY.pack(b.topic_id, b.partition, len(b.data), b.base_offset, b.next_offset)
            for b in batches
        )
        length = self.frame_bytes(batches)
        head = _FRAME.pack(_MAGIC, len(batches), self._number, length, 0, 0)
        crc = crc32c(table, crc32c(head[:_CRC_POSITION]))
        head = _FRAME.pack(_MAGIC, len(batches), self._number, length, crc, 0)
        start = self._half * self.half_bytes + self._end
        self._files.write_at(self._fd, [head + table, *(batch.data for batch in batches)], start)
        self._files.sync_data(self._fd)
        position = start + len(head) + len(table)
        known = self._entries[self._half]
        for batch in batches:
            entry = (batch.base_offset, batch.next_offset, position, len(batch.data))
            known.setdefault((batch.topic_id, batch.partition), []).append(entry)
            position += len(batch.data)
        self._number += 1
        self._end = align(self._end + length, FRAME_ALIGNMENT_BYTES)

    def read_back(self, topic_id: bytes, partition: int, from_offset: int) -> list[JournalBatch]:
        """Return a partition's batches from `from_offset` on that the journal still holds, in
        order. Raises OSError.
        """
        entries = [
            e
            for half in (self._half ^ 1, self._half)
            for e in self._entries[half].get((topic_id, partition), ())
        ]
        return [
            JournalBatch(
                topic_id,
                partition,
                base,
                following,
                self._files.read_at(self._fd, length, position),
            )
            for base, following, position, length in sorted(entries)
            if base >= from_offset
        ]

    def close(self) -> None:
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1
