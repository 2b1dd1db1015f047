"""Batches of a delay log, decoded and validated before their rows are kept or acted on.

Any client can write to a delay log. Only fields that the worker sets are trusted: offsets,
`min_tick`, and those it refuses from clients. Structure, decompressed size, rows and buffer
contents are validated here.

Owner: pure. The scheduler has one for each partition.

Invariants:
- Rows have the version of the delay log's schema that their header names, as many as the header
  says, one for each offset.
- Each row has a due time that fits a tick.
- Only rows written by the appliance have an origin: no client cancels or replaces a row by writing.
- Decompressed bytes <= UNPACKED_MAX_BYTES, and rows <= decompressed bytes / 8, since each has a due
  time of 8 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.schedule.delays import DUE_TICK_MAX, TICK_US
from tailrace.format.record_batch.arrow_metadata import (
    ArrowMetadataError,
    SchemaLayout,
    read_schema,
)
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.format.record_batch.batch_validation import unpacked_bytes, validate_batch
from tailrace.format.schema import DELAY_FIELDS
from workers.delays.store.log_versions import DUE, ORIGIN, REPEAT, LogVersions

Ints = np.ndarray[Any, np.dtype[np.int64]]
UNPACKED_FACTOR = 16
UNPACKED_MIN_BYTES = 16 << 20
UNPACKED_MAX_BYTES = 64 << 20
"""Limits of a batch's decompressed size, as a multiple of max.message.bytes and absolute. Batches
acknowledged under a larger setting are still accepted.
"""
DUE_MAX_US = DUE_TICK_MAX * TICK_US


class RefusedBatchError(ValueError):
    """The scheduler refuses a batch of a delay log. The message says why."""


@dataclass(slots=True)
class LogBatch:
    """Validated rows of a delay log."""

    header: BatchHeader
    data: memoryview
    rows: pa.RecordBatch
    is_change: bool
    """True if the appliance wrote it, to cancel or replace rows."""
    is_plain: bool
    """True if all its rows are new and due once."""


def unpacked_limit(max_message_bytes: int) -> int:
    return min(max(UNPACKED_FACTOR * max_message_bytes, UNPACKED_MIN_BYTES), UNPACKED_MAX_BYTES)


class LogBatches:
    """Decodes the batches of one delay log."""

    def __init__(self, versions: LogVersions) -> None:
        self.versions = versions
        self._layouts: dict[int, SchemaLayout] = {}
        """By schema id."""

    def decode(self, header: BatchHeader, data: memoryview, max_message_bytes: int) -> LogBatch:
        """Return the rows of one batch. Raises RefusedBatchError, MemoryError."""
        if header.is_sparse or header.record_count != header.last_offset_delta + 1:
            raise RefusedBatchError(
                f"the batch has {header.record_count} rows for {header.last_offset_delta + 1} "
                f"offsets{' and is sparse' * header.is_sparse}"
            )
        if header.schema_id not in self.versions:
            raise RefusedBatchError(f"the delay log has no schema {header.schema_id}")
        limit = unpacked_limit(max_message_bytes)
        try:
            validate_batch(data, header, self._layout(header.schema_id), is_ours=True)
            size = unpacked_bytes(data, header)
        except (ValueError, ArrowMetadataError) as error:
            raise RefusedBatchError(str(error)) from None
        if size > limit or header.record_count > limit // 8:
            raise RefusedBatchError(
                f"{header.record_count} rows decompress to {size} bytes; the limit is {limit}"
            )
        try:
            schema = self.versions.schema(header.schema_id)
            rows = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), schema)
            rows.validate(full=True)
        except MemoryError:
            raise
        except Exception as error:
            # client data: pyarrow raises other errors than its own
            raise RefusedBatchError(f"{type(error).__name__}: {error}") from None
        if rows.num_rows != header.record_count:
            raise RefusedBatchError(
                f"the batch has {rows.num_rows} rows; its header says {header.record_count}"
            )
        # Delay fields of a client's batch are -1 or 0: the worker refuses others.
        is_change = header.due_us > 0
        due, origin, repeat = (rows.column(place) for place in (DUE, ORIGIN, REPEAT))
        is_plain = not due.null_count and repeat.null_count == len(repeat)
        if not is_change and (header.delay_position > 0 or origin.null_count < len(origin)):
            rows = self.owned(rows, owner_in(header))
        return LogBatch(header, data, rows, is_change, is_plain and not is_change)

    def owned(self, rows: pa.RecordBatch, owner: int) -> pa.RecordBatch:
        """Return new rows with their owner, as pending ones have it: minus its number in @origin,
        where rows of the log have the offset that they replace. Null if it is 0.
        """
        value = pa.scalar(-owner if owner else None, pa.int64())
        return rows.set_column(
            rows.num_columns + ORIGIN, DELAY_FIELDS[ORIGIN], pa.repeat(value, rows.num_rows)
        )

    def owner_of(self, row: pa.RecordBatch) -> int:
        """Return the owner of a pending row, 0 if it has none."""
        origin = row.column(ORIGIN)[0].as_py()
        return -origin if origin is not None and origin < 0 else 0

    def select(
        self, batch: LogBatch, requested: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> tuple[Ints, pa.RecordBatch]:
        """Return (offsets, rows) of the selected rows of a batch."""
        offsets = np.arange(batch.header.base_offset, batch.header.next_offset)
        return offsets[requested], batch.rows.filter(pa.array(requested))

    def has_due(self, batch: LogBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return one boolean per row: True if it has a due time."""
        found: np.ndarray[Any, np.dtype[np.bool_]] = pc.is_valid(batch.rows.column(DUE)).to_numpy(
            zero_copy_only=False
        )
        return found

    def recurs(self, batch: LogBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return one boolean per row: True if it recurs."""
        found: np.ndarray[Any, np.dtype[np.bool_]] = pc.is_valid(
            batch.rows.column(REPEAT)
        ).to_numpy(zero_copy_only=False)
        return found

    def replacement(self, row: pa.RecordBatch, due_us: int, origin: int) -> pa.RecordBatch:
        """Return a delay log row of the newest version that moves `row`, at offset `origin`, to
        another due time. Raises UnsupportedBatchError.
        """
        columns = self.versions.to_newest(row).columns
        columns[DUE] = pa.array([due_us], pa.int64())
        columns[ORIGIN] = pa.array([origin], pa.int64())
        return pa.RecordBatch.from_arrays(columns, schema=self.versions.newest)

    def cancellation(self, origin: int) -> pa.RecordBatch:
        """Return a delay log row that cancels the row at offset `origin`."""
        columns = [pa.nulls(1, field.type) for field in self.versions.newest]
        columns[ORIGIN] = pa.array([origin], pa.int64())
        return pa.RecordBatch.from_arrays(columns, schema=self.versions.newest)

    def barrier(self) -> pa.RecordBatch:
        """Return a delay log row that changes nothing."""
        columns = [pa.nulls(1, field.type) for field in self.versions.newest]
        return pa.RecordBatch.from_arrays(columns, schema=self.versions.newest)

    def _layout(self, schema_id: int) -> SchemaLayout:
        found = self._layouts.get(schema_id)
        if found is None:
            found = self._layouts[schema_id] = read_schema(self.versions.message(schema_id))
        return found


def owner_in(header: BatchHeader) -> int:
    """Return the owner of a batch's rows, or of the rows that they change. 0: they have none."""
    return max(0, header.delay_position)


def ticks_of(dues: pa.Array, min_ordinal_tick: int) -> Ints:
    """Return the due tick of each row, not before the tick that was closed when it was appended."""
    due_us = np.clip(dues.fill_null(0).to_numpy(zero_copy_only=False), 0, DUE_MAX_US)
    ticks: Ints = np.clip(-(-due_us // TICK_US), min_ordinal_tick, DUE_TICK_MAX)
    return ticks


def shown_due_us(due_us: int | None) -> int:
    """Return a due time within the range that clients can show as a date."""
    return min(max(due_us or 0, 0), DUE_MAX_US)
