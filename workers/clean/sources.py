"""Sources: the batches of a segment that is cleaned, verified, with rows and offsets.

Owner: pure reading.

Invariants:
- Every batch is verified by both checksums, its range touches the one before, and its values are
  valid Arrow, before a row of it is used.
- Control batches and batches of aborted transactions have no rows here.
- A segment with transactional batches has an index of transactions. Without one it is not known
  which of them were aborted, so the segment counts as unreadable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tailrace.format.record_batch.batch_header import (
    BatchFormatError,
    BatchHeader,
    read_header,
    verify_batch,
)
from tailrace.format.record_batch.header_peek import frame_at, header_is_intact
from tailrace.format.record_batch.sparse_batch import decode_sparse_batch
from tailrace.format.segments.segment import file_name, schema_message_length
from tailrace.format.segments.transaction_index import (
    TRANSACTION_INDEX_SUFFIX,
    AbortedBatches,
    TransactionIndexDamagedError,
    decode_transaction_index,
)
from workers.segment.cleaning_job import JobSegment
from workers.segment.files import Files, read_whole

CHUNK_BYTES = 1 << 20
"""Read at once: what a core's cache holds until it is verified."""
PROBE_BYTES = 8 << 10
"""Read behind a batch that was passed over: the next one's header."""
NO_BYTES = memoryview(b"")
Offsets = np.ndarray[Any, np.dtype[np.int64]]
NO_OFFSETS: Offsets = np.empty(0, np.int64)
Take = Callable[[memoryview, int, int], tuple[int, int]]
"""(bytes, position in them of a batch, its offset) -> the same of the first batch that was not
taken.
"""
IsNeedless = Callable[[int, int], bool]
"""(first offset of a batch, offset behind it) -> True if no row of it is needed."""


class UnreadableError(ValueError):
    """A segment has something that cannot be read; the sentence names the place."""

    def __init__(self, sentence: str, base: int = -1) -> None:
        """`base`: of the segment."""
        super().__init__(sentence)
        self.base = base


class Source(NamedTuple):
    """A batch of a segment."""

    header: BatchHeader
    rows: pa.RecordBatch
    """In the schema that the batch was written with."""
    offsets: Offsets
    byte_count: int
    bytes_read: int
    """Less than `byte_count` of a batch whose header alone was read."""
    record_count: int
    """Rows that the batch has, without those of an aborted transaction."""


class SourceReader:
    """Reads the segments of one log."""

    def __init__(
        self, files: Files, directory: str, schemas: dict[int, pa.Schema], seed: int
    ) -> None:
        """`schemas`: the versions of the topic's schema, by their ids."""
        self._files = files
        self._directory = directory
        self.schemas = schemas
        self.seed = seed
        self._batch_bytes = 0
        """Bytes of the batch that was read last."""
        self._empty = pa.RecordBatch.from_pylist([], next(iter(schemas.values())))

    def read(self, segment: JobSegment, is_needless: IsNeedless | None = None) -> Iterator[Source]:
        """Yield the batches up to the segment's end. Those that `is_needless` names have no rows
        here, and their headers alone are verified. Raises UnreadableError, OSError.
        """
        try:
            aborted = self.aborted(segment)
            for header, data in self.read_bytes(segment, is_needless):
                yield self._source(header, data, aborted)
        except UnreadableError as error:
            error.base = segment.base
            raise

    def read_keys(self, segment: JobSegment, take: Take) -> Iterator[Source | int]:
        """Yield the batches up to the segment's end that `take` leaves, and the bytes of those that
        it has taken. It is called where a batch begins, takes batches that it has verified as
        `read_bytes` does, and none of a transaction. Raises UnreadableError, OSError.
        """
        try:
            aborted = self.aborted(segment)
            for found in self._walk(segment, take, None):
                yield found if isinstance(found, int) else self._source(*found, aborted)
        except UnreadableError as error:
            error.base = segment.base
            raise

    def read_bytes(
        self, segment: JobSegment, is_needless: IsNeedless | None = None
    ) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield header and bytes of the batches up to the segment's end, verified by both
        checksums. Those that `is_needless` names have no bytes here, and their headers alone are
        verified. Raises UnreadableError, OSError.
        """
        for found in self._walk(segment, None, is_needless):
            assert not isinstance(found, int)
            yield found

    def _walk(
        self, segment: JobSegment, take: Take | None, is_needless: IsNeedless | None
    ) -> Iterator[tuple[BatchHeader, memoryview] | int]:
        path = f"{self._directory}/{file_name(segment.base)}"
        fd = self._files.open_for_read(path)
        try:
            size, following = self._files.size(fd), segment.base
            position = schema_message_length(lambda n, at: self._files.read_at(fd, n, at))
            probes, length = False, self._batch_bytes
            while position < size and following < segment.end:
                size_read = PROBE_BYTES if probes else _whole_batches(length)
                chunk, at = self._chunk(fd, path, position, size_read), 0
                while following < segment.end:
                    if take is not None:
                        begun = at
                        at, following = take(chunk, at, following)
                        if at > begun:
                            yield at - begun
                    frame = self._frame(chunk, at, path, position)
                    if frame is None:
                        break
                    length, base_offset, next_offset = frame
                    self._batch_bytes = length or self._batch_bytes
                    if not length or base_offset >= segment.end:
                        position = size
                        break
                    probes = is_needless is not None and is_needless(base_offset, next_offset)
                    if not probes and at + length > len(chunk):
                        break
                    try:
                        data = NO_BYTES if probes else chunk[at : at + length]
                        header = self._verified(chunk[at : at + length], data, segment, following)
                    except BatchFormatError as error:
                        raise UnreadableError(
                            f"{path} at byte {position + at}, offset {following}: {error}"
                        ) from None
                    following = header.next_offset
                    if following > segment.end:
                        raise UnreadableError(
                            f"{path} at byte {position + at}: a batch ends at offset {following}, "
                            f"the segment at {segment.end}"
                        )
                    yield header, data
                    at += length
                position += at
            if following < segment.end:
                raise UnreadableError(f"{path} ends at offset {following}, not {segment.end}")
        finally:
            self._files.close(fd)

    def _verified(
        self, stored: memoryview, data: memoryview, segment: JobSegment, following: int
    ) -> BatchHeader:
        """The header of a batch, verified, of which at least the metadata is `stored`; with all of
        it, if `data` is. Raises BatchFormatError.
        """
        if data:
            header = verify_batch(data, self.seed)
        elif header_is_intact(stored, self.seed):
            header = read_header(stored)
        else:
            raise BatchFormatError("header checksum does not match")
        if header.base_offset != following:
            raise BatchFormatError(f"the batch has offset {header.base_offset}")
        if header.is_transactional and not segment.has_transactions:
            raise BatchFormatError(
                "the batch is of a transaction, and the segment has no index of them"
            )
        return header

    def _chunk(self, fd: int, path: str, position: int, length: int) -> memoryview:
        """Bytes from `position` on, with at least one whole batch, the metadata of one that is
        passed over, or the end mark. Raises UnreadableError.
        """
        while True:
            chunk = memoryview(self._files.read_at(fd, length, position))
            frame = self._frame(chunk, 0, path, position)
            if frame is not None and (frame[0] <= len(chunk) or length == PROBE_BYTES):
                return chunk
            if len(chunk) < length:
                raise UnreadableError(f"{path} ends inside a batch at byte {position}")
            length = CHUNK_BYTES if frame is None and length < CHUNK_BYTES else 2 * length
            if frame is not None:
                length = frame[0]

    @staticmethod
    def _frame(chunk: memoryview, at: int, path: str, position: int) -> tuple[int, int, int] | None:
        try:
            return frame_at(chunk, at, len(chunk))
        except BatchFormatError as error:
            raise UnreadableError(f"{path} at byte {position + at}: {error}") from None

    def _source(self, header: BatchHeader, data: memoryview, aborted: AbortedBatches) -> Source:
        """A batch with its rows, without bytes it has none. Raises UnreadableError."""
        rows, offsets = self._empty, NO_OFFSETS
        try:
            if data:
                rows, offsets = self._decode(data, header, aborted)
        except (BatchFormatError, pa.ArrowException) as error:
            raise UnreadableError(
                f"{self._directory}: offset {header.base_offset}: {error}"
            ) from None
        size = header.batch_length
        if not data:
            return Source(header, rows, offsets, size, min(size, PROBE_BYTES), header.record_count)
        return Source(header, rows, offsets, size, size, len(offsets))

    def _decode(
        self, data: memoryview, header: BatchHeader, aborted: AbortedBatches
    ) -> tuple[pa.RecordBatch, Offsets]:
        schema = self.schemas.get(header.schema_id)
        if schema is None and len(self.schemas) == 1:
            schema = next(iter(self.schemas.values()))
        if schema is None:
            raise BatchFormatError(f"its schema {header.schema_id} is not one of the topic's")
        if header.is_sparse:
            rows, offsets = decode_sparse_batch(data, header, schema)
            return rows, np.asarray(offsets)
        if header.is_control or (
            header.is_transactional
            and aborted.has(header.producer_id, header.producer_epoch, header.base_offset)
        ):
            return self._empty, NO_OFFSETS
        message = pa.ipc.read_message(pa.py_buffer(data))
        rows = pa.ipc.read_record_batch(message, schema)
        rows.validate(full=True)
        return rows, np.arange(header.base_offset, header.next_offset, dtype=np.int64)

    def aborted(self, segment: JobSegment) -> AbortedBatches:
        """The aborted batches of a segment. Raises UnreadableError, OSError."""
        path = f"{self._directory}/{file_name(segment.base, TRANSACTION_INDEX_SUFFIX)}"
        if not segment.has_transactions:
            return AbortedBatches([])
        try:
            return AbortedBatches(
                decode_transaction_index(read_whole(self._files, path), segment.base)
            )
        except (TransactionIndexDamagedError, FileNotFoundError) as error:
            raise UnreadableError(f"{path}: {error}") from None


def _whole_batches(length: int) -> int:
    """Bytes to read of batches of about this length, so that the last one is seldom cut."""
    return max(1, CHUNK_BYTES // max(1, length)) * length + PROBE_BYTES if length else CHUNK_BYTES
