"""A delay log's batches as rows: proven before anything of them is unpacked, kept or acted on.

Any client can write to a delay log. So a batch is taken for what it says only where the worker vouches for it (offsets, `min_tick`, and the fields that it
refuses from outside, `CHANGE` below); its structure, its size when unpacked, its rows and its buffers' contents are proven here.

Owner: pure; the scheduler, one for each partition.
Invariants: rows that come out have the delay log's schema, as many as the header says, one for each offset, each with a due time that fits a tick, and no
    origin unless the appliance wrote it: no client cancels or replaces a row by writing.
    unpacked bytes <= UNPACKED_MAX_BYTES, rows <= unpacked bytes / 8 (each has a due time of 8 bytes)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.delays import DELAY_COLUMNS, DUE_TICK_MAX, TICK_US
from tailrace.formats.arrow_metadata import ArrowMetadataError, read_schema
from tailrace.formats.batch_header import BatchHeader
from tailrace.formats.structure import check_structure, unpacked_bytes
from tailrace.schema import DELAY_FIELDS, from_message

Ints = np.ndarray[Any, np.dtype[np.int64]]
UNPACKED_FACTOR = 16
UNPACKED_MIN_BYTES = 16 << 20
UNPACKED_MAX_BYTES = 64 << 20
"""A batch may unpack to so many times max.message.bytes; what was acknowledged under a larger setting is taken still."""
DUE_MAX_US = DUE_TICK_MAX * TICK_US


class RefusedBatchError(ValueError):
    """The scheduler does not take this batch of a delay log; the sentence says why."""


class UnusableSchemaError(ValueError):
    """Delayed records of such a topic cannot be delivered; the sentence says why."""


@dataclass(slots=True)
class LogBatch:
    """Rows of a delay log, proven."""

    header: BatchHeader
    data: memoryview
    rows: pa.RecordBatch
    is_change: bool
    """Whether the appliance wrote it, to cancel or replace rows."""
    is_plain: bool
    """Whether all its rows are new ones that are due once."""


def unpacked_limit(max_message_bytes: int) -> int:
    return min(max(UNPACKED_FACTOR * max_message_bytes, UNPACKED_MIN_BYTES), UNPACKED_MAX_BYTES)


class LogBatches:
    """Decodes the batches of one delay log."""

    def __init__(self, log_schema: bytes, topic_schema: bytes) -> None:
        """Both as Arrow messages. Raises UnusableSchemaError."""
        try:
            self.schema = from_message(log_schema)
            topic = from_message(topic_schema)
            self._layout = read_schema(log_schema)
        except Exception as error:  # pyarrow raises KeyError, ArrowInvalid, and more for what it does not know
            raise UnusableSchemaError(f"its schema cannot be read: {type(error).__name__}: {error}") from None
        wanted = [field.type for field in (*topic, *DELAY_FIELDS)]
        if [field.type for field in self.schema] != wanted or tuple(self.schema.names[-len(DELAY_COLUMNS) :]) != DELAY_COLUMNS:
            raise UnusableSchemaError("the delay log's schema is not the topic's with the columns @due_us, @origin and @repeat behind")
        self.columns = list(range(len(topic)))
        """Places of the topic's own columns: names need not be different."""
        self.due, self.origin, self.repeat = range(len(topic), len(topic) + len(DELAY_COLUMNS))

    def decode(self, header: BatchHeader, data: memoryview, max_message_bytes: int) -> LogBatch:
        """The rows of one batch. Raises RefusedBatchError, MemoryError."""
        if header.record_count != header.last_offset_delta + 1:
            raise RefusedBatchError(f"{header.record_count} rows for {header.last_offset_delta + 1} offsets")
        limit = unpacked_limit(max_message_bytes)
        try:
            check_structure(data, header, self._layout, is_ours=True)
            size = unpacked_bytes(data, header)
        except (ValueError, ArrowMetadataError) as error:
            raise RefusedBatchError(str(error)) from None
        if size > limit or header.record_count > limit // 8:
            raise RefusedBatchError(f"{header.record_count} rows that unpack to {size} bytes; {limit} are allowed")
        try:
            rows = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), self.schema)
            rows.validate(full=True)
        except MemoryError:
            raise
        except Exception as error:  # what lies inside is a client's: pyarrow raises more than its own errors for it
            raise RefusedBatchError(f"{type(error).__name__}: {error}") from None
        if rows.num_rows != header.record_count:
            raise RefusedBatchError(f"{rows.num_rows} rows where the header says {header.record_count}")
        # Delay fields of a batch from outside are -1 or 0: the worker refuses others.
        is_change = header.due_us > 0
        due, origin, repeat = (rows.column(place) for place in (self.due, self.origin, self.repeat))
        is_plain = not due.null_count and repeat.null_count == len(repeat)
        if not is_change and origin.null_count < len(origin):
            rows = rows.set_column(self.origin, self.schema.field(self.origin), pa.nulls(len(origin), pa.int64()))
        return LogBatch(header, data, rows, is_change, is_plain and not is_change)

    def select(self, batch: LogBatch, wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> tuple[Ints, pa.RecordBatch]:
        """(offsets, rows) of some rows of a batch."""
        offsets = np.arange(batch.header.base_offset, batch.header.next_offset)
        return offsets[wanted], batch.rows.filter(pa.array(wanted))

    def has_due(self, batch: LogBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows have a due time; one boolean a row."""
        found: np.ndarray[Any, np.dtype[np.bool_]] = pc.is_valid(batch.rows.column(self.due)).to_numpy(zero_copy_only=False)
        return found

    def recurs(self, batch: LogBatch) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which rows recur; one boolean a row."""
        found: np.ndarray[Any, np.dtype[np.bool_]] = pc.is_valid(batch.rows.column(self.repeat)).to_numpy(zero_copy_only=False)
        return found

    def replacement(self, row: pa.RecordBatch, due_us: int, origin: int) -> pa.RecordBatch:
        """A row of the delay log that has `origin`, which `row` is, delivered at another time."""
        values = {self.due: due_us, self.origin: origin}
        columns = [
            pa.array([values[index]], field.type) if index in values else row.column(index) for index, field in enumerate(self.schema)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def cancellation(self, origin: int) -> pa.RecordBatch:
        """A row of the delay log that has `origin` not delivered."""
        columns = [
            pa.array([origin], field.type) if index == self.origin else pa.nulls(1, field.type) for index, field in enumerate(self.schema)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def ticks_of(dues: pa.Array, min_ordinal_tick: int) -> Ints:
    """The tick at which each row counts as due: not before what was closed when it was appended."""
    due_us = np.clip(dues.fill_null(0).to_numpy(zero_copy_only=False), 0, DUE_MAX_US)
    ticks: Ints = np.clip(-(-due_us // TICK_US), min_ordinal_tick, DUE_TICK_MAX)
    return ticks


def shown_due_us(due_us: int | None) -> int:
    """A due time that every client can show as a date, whatever was asked for."""
    return min(max(due_us or 0, 0), DUE_MAX_US)
