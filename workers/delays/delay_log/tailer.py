"""Log tailer: reads a delay log batch by batch, up to its high watermark.

Owner: the scheduler; reads only.

Invariants:
- Batches come in order, each verified, each once.
- Nothing at or above the high watermark is read.

Crash: nothing is kept. The caller gives the offset to start from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from shm.tables.partition_table import PartitionState
from tailrace.format.directory.partition_metadata import PARTITION_FILE, PartitionMetadata
from tailrace.format.record_batch.batch_header import BatchFormatError, BatchHeader, verify_batch
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    file_name,
    schema_message_length,
    segment_bases,
)
from tailrace.format.segments.segment_index import IndexDamagedError, IndexReader
from workers.segment.files import Files, read_whole

logger = logging.getLogger(__name__)

READ_BYTES = 4 << 20
BATCH_MAX_BYTES = 65 << 20
"""Largest max.message.bytes, with a margin."""


class LogTailer:
    """Read position in one log."""

    def __init__(
        self,
        files: Files,
        directory: str,
        seed: int,
        next_offset: int,
        read_bytes: int = READ_BYTES,
    ) -> None:
        """`read_bytes` is the size of a read; a larger batch is read alone."""
        self._files = files
        self._directory = directory
        self._seed = seed
        self.next_offset = next_offset
        self._fd = -1
        self._base = -1
        self._position = 0
        self._read_bytes = read_bytes
        self._stuck_at = -1

    def seek(self, offset: int) -> None:
        """Continue at the batch with this base offset."""
        if offset != self.next_offset:
            self.close()
            self.next_offset = offset

    def close(self) -> None:
        if self._fd >= 0:
            self._files.close(self._fd)
            self._fd = -1

    def read(self, state: PartitionState) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield the next batches, some megabytes of them. Raises OSError."""
        before = self.next_offset
        yield from self._read(state)
        if before == self.next_offset < state.high_watermark:
            # Bytes below the watermark exist: in the next segment, or in a file that has replaced
            # the open one after a failed sync.
            self.close()
            yield from self._read(state)

    def _read(self, state: PartitionState) -> Iterator[tuple[BatchHeader, memoryview]]:
        self.next_offset = max(self.next_offset, state.log_start_offset)
        if self.next_offset >= state.high_watermark or (self._fd < 0 and not self._find()):
            return
        data = memoryview(self._files.read_at(self._fd, self._read_bytes, self._position))
        at = 0
        while self.next_offset < state.high_watermark:
            try:
                framed = frame_at(data, at, len(data))
                if framed is not None and framed[0] > BATCH_MAX_BYTES:
                    raise BatchFormatError(
                        f"a batch claims {framed[0]} bytes; the limit is {BATCH_MAX_BYTES}"
                    )
                if framed is not None and framed[0] and at + framed[0] > len(data):
                    if at:
                        return  # the next read begins with it
                    data = memoryview(self._files.read_at(self._fd, framed[0], self._position))
                    if len(data) < framed[0]:
                        raise BatchFormatError("the file ends inside a batch")
                if framed is None or not framed[0]:
                    if at and framed is None:
                        return
                    self._next_segment()
                    return
                batch = data[at : at + framed[0]]
                header = verify_batch(batch, self._seed)
                if header.base_offset != self.next_offset:
                    raise BatchFormatError(
                        f"a batch has offset {header.base_offset}; expected {self.next_offset}"
                    )
            except BatchFormatError as error:
                if not self._next_segment():
                    self._skip_damage(str(error))
                return
            at += framed[0]
            self._position += framed[0]
            self.next_offset = header.next_offset
            yield header, batch

    def _find(self) -> bool:
        """Open the segment with `next_offset` and move to its batch.

        Return False if there is none.
        """
        bases = [
            base
            for base in segment_bases(self._files.list(self._directory))
            if base <= self.next_offset
        ]
        if not bases:
            return False
        self._base = bases[-1]
        self._fd = self._files.open_for_read(f"{self._directory}/{file_name(self._base)}")
        self._position = schema_message_length(
            lambda length, position: self._files.read_at(self._fd, length, position)
        )
        if not self._position:
            self.close()
            return False
        if self._base != self.next_offset:
            self._position = self._by_index() or self._position
            self._walk_to_offset()
        return True

    def _by_index(self) -> int:
        path = f"{self._directory}/{file_name(self._base, INDEX_SUFFIX)}"
        if not self._files.exists(path):
            return 0
        fd = self._files.open_for_read(path)
        try:
            reader = IndexReader(
                lambda length, position: self._files.read_at(fd, length, position),
                self._files.size(fd),
                self._base,
            )
            entry = reader.find_offset(self.next_offset)
            if entry is None:
                return 0
            head = memoryview(self._files.read_at(self._fd, 1 << 20, entry.file_position))
            framed = frame_at(head, 0, len(head))
            return (
                entry.file_position
                if framed is not None and framed[0] and framed[1] == entry.base_offset
                else 0
            )
        except (IndexDamagedError, BatchFormatError):
            return 0
        finally:
            self._files.close(fd)

    def _walk_to_offset(self) -> None:
        while True:
            head = memoryview(self._files.read_at(self._fd, 1 << 20, self._position))
            try:
                framed = frame_at(head, 0, len(head))
            except BatchFormatError:
                return
            if framed is None or not framed[0] or framed[1] >= self.next_offset:
                return
            self._position += framed[0]

    def _next_segment(self) -> bool:
        """Continue with the segment that begins at `next_offset`.

        Return False if it does not exist yet.
        """
        if self.next_offset == self._base or self.next_offset not in segment_bases(
            self._files.list(self._directory)
        ):
            return False
        self.close()
        return self._find()

    def _skip_damage(self, reason: str) -> None:
        """Continue after a damaged range that recovery has recorded. Other damage is logged once
        and read again later.
        """
        known = PartitionMetadata.decode(
            read_whole(self._files, f"{self._directory}/{PARTITION_FILE}")
        )
        for damage in known.damage if known is not None else []:
            if damage.start <= self.next_offset < damage.end:
                logger.error(
                    "delays_lost directory=%s from=%d to=%d advice=%r",
                    self._directory,
                    self.next_offset,
                    damage.end,
                    "see quarantine/",
                )
                self.next_offset = damage.end
                self.close()
                return
        if self._stuck_at != self.next_offset:
            self._stuck_at = self.next_offset
            logger.error(
                "delay_log_unreadable directory=%s offset=%d reason=%r",
                self._directory,
                self.next_offset,
                reason,
            )
        self.close()  # reopened at the next read
