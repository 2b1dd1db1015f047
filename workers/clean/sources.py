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

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tailrace.format.record_batch.batch_header import BatchFormatError, BatchHeader, verify_batch
from tailrace.format.record_batch.header_peek import frame_at
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

CHUNK_BYTES = 4 << 20
Offsets = np.ndarray[Any, np.dtype[np.int64]]


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


class SourceReader:
    """Reads the segments of one log."""

    def __init__(
        self, files: Files, directory: str, schemas: dict[int, pa.Schema], seed: int
    ) -> None:
        """`schemas`: the versions of the topic's schema, by their ids."""
        self._files = files
        self._directory = directory
        self._schemas = schemas
        self._seed = seed
        self._empty = pa.RecordBatch.from_pylist([], next(iter(schemas.values())))

    def read(self, segment: JobSegment) -> Iterator[Source]:
        """Yield the batches up to the segment's end. Raises UnreadableError, OSError."""
        try:
            aborted = self.aborted(segment)
            for header, data in self.read_bytes(segment):
                try:
                    rows, offsets = self._decode(data, header, aborted)
                except (BatchFormatError, pa.ArrowException) as error:
                    raise UnreadableError(
                        f"{self._directory}: offset {header.base_offset}: {error}"
                    ) from None
                yield Source(header, rows, offsets, len(data))
        except UnreadableError as error:
            error.base = segment.base
            raise

    def read_bytes(self, segment: JobSegment) -> Iterator[tuple[BatchHeader, bytes]]:
        """Yield header and bytes of the batches up to the segment's end, verified by both
        checksums. Raises UnreadableError, OSError.
        """
        path = f"{self._directory}/{file_name(segment.base)}"
        fd = self._files.open_for_read(path)
        try:
            following = segment.base
            for position, data in self._batches(fd, path, segment.end):
                try:
                    header = verify_batch(memoryview(data), self._seed)
                    if header.base_offset != following:
                        raise BatchFormatError(f"the batch has offset {header.base_offset}")
                    if header.is_transactional and not segment.has_transactions:
                        raise BatchFormatError(
                            "the batch is of a transaction, and the segment has no index of them"
                        )
                except BatchFormatError as error:
                    raise UnreadableError(
                        f"{path} at byte {position}, offset {following}: {error}"
                    ) from None
                following = header.next_offset
                if following > segment.end:
                    raise UnreadableError(
                        f"{path} at byte {position}: a batch ends at offset {following}, the "
                        f"segment at {segment.end}"
                    )
                yield header, data
            if following < segment.end:
                raise UnreadableError(f"{path} ends at offset {following}, not {segment.end}")
        finally:
            self._files.close(fd)

    def _batches(self, fd: int, path: str, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield (file position, bytes) of what is framed as a batch below offset `end`."""
        size = self._files.size(fd)
        position = schema_message_length(lambda n, at: self._files.read_at(fd, n, at))
        while position < size:
            chunk, at = self._chunk(fd, path, position), 0
            while (frame := self._frame(chunk, at, path, position)) is not None:
                length, base_offset, _ = frame
                if not length or base_offset >= end:
                    return
                if at + length > len(chunk):
                    break
                yield position + at, bytes(chunk[at : at + length])
                at += length
            position += at

    def _chunk(self, fd: int, path: str, position: int) -> memoryview:
        """Bytes from `position` on, with at least one whole batch or the end mark. Raises
        UnreadableError.
        """
        length = CHUNK_BYTES
        while True:
            chunk = memoryview(self._files.read_at(fd, length, position))
            frame = self._frame(chunk, 0, path, position)
            if frame is not None and frame[0] <= len(chunk):
                return chunk
            if frame is None or len(chunk) < length:
                raise UnreadableError(f"{path} ends inside a batch at byte {position}")
            length = frame[0]

    @staticmethod
    def _frame(chunk: memoryview, at: int, path: str, position: int) -> tuple[int, int, int] | None:
        try:
            return frame_at(chunk, at, len(chunk))
        except BatchFormatError as error:
            raise UnreadableError(f"{path} at byte {position + at}: {error}") from None

    def _decode(
        self, data: bytes, header: BatchHeader, aborted: AbortedBatches
    ) -> tuple[pa.RecordBatch, Offsets]:
        schema = self._schemas.get(header.schema_id)
        if schema is None and len(self._schemas) == 1:
            schema = next(iter(self._schemas.values()))
        if schema is None:
            raise BatchFormatError(f"its schema {header.schema_id} is not one of the topic's")
        if header.is_sparse:
            rows, offsets = decode_sparse_batch(data, header, schema)
            return rows, np.asarray(offsets)
        if header.is_control or (
            header.is_transactional
            and aborted.has(header.producer_id, header.producer_epoch, header.base_offset)
        ):
            return self._empty, np.empty(0, np.int64)
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
