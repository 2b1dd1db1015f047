"""Merged batches: rows of several batches become sparse batches, whose ranges touch.

Small batches grow together up to TARGET_BYTES. A batch is ended early where rows cannot share a
header: the topic is typed (a row's time may be its header's), the attributes differ, or tombstones
are clean since different times.

A batch with tombstones says since when they are in a cleaned segment: `due_us` of its header. The
time is rounded up to a sixteenth of delete.retention.ms, so that tombstones of neighbouring passes
share a batch.

Owner: one run of the cleaner.

Invariants:
- The ranges of the batches touch, from the run's base to its end.
- No batch is larger than max.message.bytes, beside a single row that was almost as large itself.
- `since_us` of a batch is never before the first pass that met its tombstones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_DELAYED,
    ATTRIBUTE_LOG_APPEND_TIME,
    BatchHeader,
)
from tailrace.format.record_batch.sparse_batch import RANGE_MAX, encode_sparse_batch
from workers.clean.sources import Offsets

TARGET_BYTES = 256 << 10
NONE_US = -1
"""`since_us` of rows without tombstones."""


@dataclass(slots=True)
class _Open:
    """A batch that is being put together."""

    attributes: int = 0
    since_us: int = NONE_US
    min_tick: int = -1
    is_compressed: bool = False
    pieces: list[tuple[pa.RecordBatch, Offsets]] = field(default_factory=list)
    byte_count: int = 0
    first_us: int = 0
    max_us: int = 0


class MergedBatches:
    """Puts rows together and encodes them."""

    def __init__(
        self,
        write: Callable[[bytearray, int, int], None],
        *,
        base: int,
        schema: pa.Schema,
        typed: bool,
        seed: int,
        schema_id: int,
        compression: str,
        max_message_bytes: int,
    ) -> None:
        """`write` is called with the bytes, base offset and largest time of each batch."""
        self._write = write
        self._start = self._until = base
        self._schema = schema
        self._typed = typed
        self._seed = seed
        self._schema_id = schema_id
        self._compression = compression
        self._max_message_bytes = max_message_bytes
        self._target_bytes = min(TARGET_BYTES, max(1, max_message_bytes // 2))
        self._open = _Open()
        self._leader_epoch = -1
        self._append_time_us = -1

    @property
    def pending_bytes(self) -> int:
        """Bytes of the rows that are not encoded yet."""
        return self._open.byte_count

    def add(
        self, header: BatchHeader, rows: pa.RecordBatch, offsets: Offsets, since_us: int
    ) -> None:
        """Add the rows that are left of a batch, and the batch's range. `since_us`: of its
        tombstones that are left.
        """
        if header.next_offset - self._start > RANGE_MAX:
            self.flush()
        if rows.num_rows:
            attributes = header.attributes & ATTRIBUTE_LOG_APPEND_TIME
            if self._typed:
                attributes |= header.attributes & ATTRIBUTE_DELAYED
            else:
                rows = _with_times(rows, header)
            made = self._open
            if made.pieces and (
                self._typed
                or made.attributes != attributes
                or (since_us != NONE_US and made.since_us not in (NONE_US, since_us))
            ):
                self.flush()
                made = self._open
            made.attributes = attributes
            made.since_us = max(made.since_us, since_us)
            made.is_compressed |= bool(header.attributes & ATTRIBUTE_COMPRESSED)
            first_us, max_us = header.first_timestamp_us, header.max_timestamp_us
            if self._typed:
                made.min_tick = header.min_tick if attributes & ATTRIBUTE_DELAYED else -1
            else:
                times = _integers(rows.column(0))
                first_us, max_us = int(times[0]), int(times.max())
            if not made.pieces:
                made.first_us, made.max_us = first_us, max_us
            made.max_us = max(made.max_us, max_us)
            made.pieces.append((rows, offsets))
            made.byte_count += rows.nbytes + 8 * rows.num_rows
        self._until = header.next_offset
        self._leader_epoch = header.leader_epoch
        self._append_time_us = max(self._append_time_us, header.append_time_us)
        if self._open.byte_count >= self._target_bytes:
            self.flush()

    def flush(self) -> None:
        """Encode what was added."""
        made, self._open = self._open, _Open()
        if not made.pieces:
            if self._start < self._until:
                self._encode(made, _no_rows(self._schema), np.empty(0, np.int64), self._until)
            return
        batches = [rows for rows, _ in made.pieces]
        rows = batches[0]
        if len(batches) > 1:
            (rows,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
        self._emit(made, rows, np.concatenate([each for _, each in made.pieces]), self._until)

    def _emit(self, made: _Open, rows: pa.RecordBatch, offsets: Offsets, until: int) -> None:
        """Encode rows for the range up to `until`, as several batches if they are too large."""
        half = rows.num_rows // 2
        is_large = rows.nbytes + 8 * rows.num_rows > 2 * self._target_bytes
        if not half or not is_large:
            try:
                self._encode(made, rows, offsets, until, limited=bool(half))
            except ValueError:
                if not half:
                    raise
            else:
                return
        self._emit(made, rows.slice(0, half), offsets[:half], int(offsets[half]))
        self._emit(made, rows.slice(half), offsets[half:], until)

    def _encode(
        self,
        made: _Open,
        rows: pa.RecordBatch,
        offsets: Offsets,
        until: int,
        *,
        limited: bool = False,
    ) -> None:
        base = self._start
        compression = self._compression
        if compression == "producer":
            compression = "lz4" if made.is_compressed else "none"
        encoded = encode_sparse_batch(
            rows, offsets, base_offset=base, next_offset=until, seed=self._seed,
            schema_id=self._schema_id, compression=compression if rows.num_rows else "none",
            max_timestamp_us=made.max_us, append_time_us=self._append_time_us,
            leader_epoch=max(0, self._leader_epoch), first_timestamp_us=made.first_us,
            attributes=made.attributes, min_tick=made.min_tick, due_us=made.since_us,
            max_bytes=self._max_message_bytes if limited else None,
        )  # fmt: skip
        self._start = until
        self._write(encoded, base, made.max_us)


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], each.type) for each in schema], schema=schema)


def _integers(column: pa.Array) -> Offsets:
    return np.frombuffer(column.buffers()[1], np.int64, len(column), 8 * column.offset)


def _with_times(rows: pa.RecordBatch, header: BatchHeader) -> pa.RecordBatch:
    """Rows of the default schema with the time of each in the column `timestamp`, as readers show
    it.
    """
    times = rows.column(0)
    if header.has_one_time(is_typed=False):
        filled = np.full(rows.num_rows, header.max_timestamp_us, np.int64)
        times = pa.array(filled).view(times.type)
    elif times.null_count:
        times = times.fill_null(pa.scalar(header.max_timestamp_us, pa.int64()).cast(times.type))
    else:
        return rows
    return pa.RecordBatch.from_arrays([times, *rows.columns[1:]], schema=rows.schema)
