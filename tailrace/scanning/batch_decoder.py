"""BatchDecoder: decodes the requested columns of stored batches, and combines small batches.

Owner: one reader of one partition.

Invariants:
- Every offset of the range with a record is returned once, in order.
- Returned rows were verified by checksums (see `StoredBatch`), checked against the limits of
  unpacked size and, unless trusted, validated by Arrow.
- A returned batch has at least BATCH_ROWS rows or BATCH_BYTES bytes, unless it is a partition's
  last or has large rows that are returned without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tailrace.batch.arrow_codec import check_unpacked, timestamp_type_of, timestamps_of
from tailrace.core.errors import CorruptBatchError, RecordTooLargeError, UnsupportedBatchError
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetcher import too_large_error
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_SPARSE,
    BatchHeader,
)
from tailrace.format.record_batch.batch_validation import ROWS_FREE
from tailrace.scanning.batch import StoredBatch, damage_error
from tailrace.scanning.columns import TIMESTAMP, Column, Origin, arrow_schema

BATCH_ROWS = 10_240
BATCH_BYTES = 1 << 20
UNCOPIED_BYTES, UNCOPIED_ROW_BYTES = 192 << 10, 256
"""A batch of this size, with rows of this size, is returned without a copy."""
HEADER_ROWS = 1 << 16
"""Rows of a batch that is made from headers only."""
TIME_COLUMN = "timestamp"


class _Piece(NamedTuple):
    """Rows of one batch of the log."""

    first_offset: int
    rows: int
    timestamp_type: int
    columns: dict[str, Any]
    """Columns of the body, and "" for the rows' times."""


def needs_bodies(columns: tuple[Column, ...]) -> bool:
    """True if any column is not in the batches' headers."""
    return any(column.origin in (Origin.BODY, Origin.TIME) for column in columns)


def time_in(
    header: BatchHeader,
    data: Any,
    schema: pa.Schema,
    when_us: int,
    max_unpacked_bytes: int,
    *,
    typed: bool,
) -> int | None:
    """The offset of a batch's first record at or after `when_us`, None if there is none.

    Raises as `BatchDecoder.add`.
    """
    names = [TIME_COLUMN] if TIME_COLUMN in schema.names else schema.names[:1]
    batch = _decode(header, data, schema, names, max_unpacked_bytes, trust=False)
    times = timestamps_of(batch, header, is_typed=typed)
    if times is None:
        stamp = (
            header.append_time_us
            if header.attributes & ATTRIBUTE_LOG_APPEND_TIME
            else header.max_timestamp_us
        )
        return header.base_offset if stamp >= when_us else None
    return next(
        (
            header.base_offset + row
            for row, time_us in enumerate(times.to_pylist())
            if time_us >= when_us
        ),
        None,
    )


class BatchDecoder:
    """Collects rows of one partition into batches."""

    def __init__(
        self,
        key: TopicPartition,
        columns: tuple[Column, ...],
        *,
        typed: bool,
        trust: bool,
        max_unpacked_bytes: int,
        unite_bytes: int = BATCH_BYTES,
    ) -> None:
        self._key = key
        self._columns = columns
        self._schema = arrow_schema(columns)
        self._typed, self._trust, self._max_unpacked_bytes = typed, trust, max_unpacked_bytes
        self._with_times = any(column.origin is Origin.TIME for column in columns)
        self._body_names = [column.name for column in columns if column.origin is Origin.BODY]
        self._requested = needs_bodies(columns)
        self._unite_rows = BATCH_ROWS if self._requested else HEADER_ROWS
        self._pieces: list[_Piece] = []
        self._row_count = self._byte_count = 0
        self._constants: dict[tuple[Any, pa.DataType], Any] = {}

    def add(self, frame: StoredBatch, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Add the rows of a batch between two offsets; yield batches that are large enough.

        Raises CorruptBatchError with the range, RecordTooLargeError, UnsupportedBatchError.
        """
        header = frame.header
        if header.is_control:
            return
        if header.attributes & ATTRIBUTE_SPARSE:
            raise UnsupportedBatchError(
                f"{self._key.topic}-{self._key.partition}: the batch at offset "
                f"{header.base_offset} is sparse, which this version does not support"
            )
        first, last = max(start, header.base_offset), min(end, header.next_offset)
        if last <= first:
            return
        columns = self._decoded(frame, first, last) if self._requested else {}
        is_large = self._requested and header.batch_length >= max(
            UNCOPIED_BYTES, UNCOPIED_ROW_BYTES * header.record_count
        )
        if is_large:
            yield from self.rest()
        self._pieces.append(_Piece(first, last - first, timestamp_type_of(header), columns))
        self._row_count += last - first
        self._byte_count += header.batch_length if frame.data is not None else 0
        if is_large or self._row_count >= self._unite_rows or self._byte_count >= BATCH_BYTES:
            yield self._take()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows."""
        if self._pieces:
            yield self._take()

    def _decoded(self, frame: StoredBatch, first: int, last: int) -> dict[str, Any]:
        header, schema = frame.header, frame.schema
        names = [name for name in self._body_names if name in schema.names]
        if (
            self._with_times
            and TIME_COLUMN in schema.names
            and TIME_COLUMN not in names
            and not header.has_one_time(is_typed=self._typed)
        ):
            names.append(TIME_COLUMN)
        try:
            batch = _decode(
                header, frame.data, schema, names, self._max_unpacked_bytes, trust=self._trust
            )
        except RecordTooLargeError as error:
            raise too_large_error(
                self._key, header.base_offset, header.next_offset, error.detail
            ) from None
        except CorruptBatchError as error:
            raise damage_error(self._key, first, header.next_offset, error.detail) from None
        count = last - first
        cut = count != header.record_count
        if cut:
            batch = batch.slice(first - header.base_offset, count)
        columns = {
            name: batch.column(batch.schema.get_field_index(name))
            if name in schema.names
            else pa.nulls(count, self._schema.field(name).type)
            for name in self._body_names
        }
        if self._with_times:
            columns[""] = self._times(batch, header, count)
        return columns

    def _times(self, batch: pa.RecordBatch, header: BatchHeader, count: int) -> Any:
        if not header.has_one_time(is_typed=self._typed) and TIME_COLUMN in batch.schema.names:
            column = batch.column(batch.schema.get_field_index(TIME_COLUMN))
            if column.type == TIMESTAMP and not column.null_count:
                return column
        times = timestamps_of(batch, header, is_typed=self._typed)
        if times is not None:
            return times.view(TIMESTAMP)
        stamp = (
            header.append_time_us
            if header.attributes & ATTRIBUTE_LOG_APPEND_TIME
            else header.max_timestamp_us
        )
        return _constant(stamp, pa.int64(), count).view(TIMESTAMP)

    def _take(self) -> pa.RecordBatch:
        pieces, count = self._pieces, self._row_count
        self._pieces, self._row_count, self._byte_count = [], 0, 0
        return pa.RecordBatch.from_arrays(
            [self._column(column, pieces, count) for column in self._columns], schema=self._schema
        )

    def _column(self, column: Column, pieces: list[_Piece], count: int) -> Any:
        if column.origin is Origin.TOPIC:
            return self._repeated(self._key.topic, column.kind, count)
        if column.origin is Origin.PARTITION:
            return self._repeated(self._key.partition, column.kind, count)
        if column.origin is Origin.OFFSET:
            return _joined([_offsets(start, number) for start, number in _runs(pieces)])
        if column.origin is Origin.TIMESTAMP_TYPE:
            kinds = {piece.timestamp_type for piece in pieces}
            if len(kinds) == 1:
                return self._repeated(kinds.pop(), column.kind, count)
            return _joined(
                [self._repeated(piece.timestamp_type, column.kind, piece.rows) for piece in pieces]
            )
        return _joined(
            [piece.columns["" if column.origin is Origin.TIME else column.name] for piece in pieces]
        )

    def _repeated(self, value: Any, kind: pa.DataType, count: int) -> Any:
        """`value` repeated `count` times, as a slice of an array that all batches share."""
        known = self._constants.get((value, kind))
        if known is None or len(known) < count:
            known = self._constants[value, kind] = _constant(value, kind, max(count, BATCH_ROWS))
        return known.slice(0, count)


def _joined(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _runs(pieces: list[_Piece]) -> list[tuple[int, int]]:
    """(first offset, count) of consecutive rows."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        if runs and sum(runs[-1]) == piece.first_offset:
            runs[-1] = runs[-1][0], runs[-1][1] + piece.rows
        else:
            runs.append((piece.first_offset, piece.rows))
    return runs


def _offsets(start: int, count: int) -> Any:
    return _of_numbers(np.arange(start, start + count, dtype=np.int64), pa.int64())


def _constant(value: Any, kind: pa.DataType, count: int) -> Any:
    """A text or an integer, repeated `count` times."""
    if kind != pa.utf8():
        return _of_numbers(np.full(count, value, dtype=kind.to_pandas_dtype()), kind)
    data = value.encode()
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(
        kind, count, [None, pa.py_buffer(offsets), pa.py_buffer(data * count)]
    )


def _of_numbers(numbers: Any, kind: pa.DataType) -> Any:
    """An array on the numbers' own buffer.

    pa.array and pa.scalar would import pandas the first time, a third of a second in each of
    Spark's Python processes.
    """
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(numbers)])


def _decode(
    header: BatchHeader,
    data: Any,
    schema: pa.Schema,
    names: list[str],
    max_unpacked_bytes: int,
    *,
    trust: bool,
) -> pa.RecordBatch:
    """Decode the columns of these names, in the schema's order; others are not decompressed.

    Raises CorruptBatchError, RecordTooLargeError.
    """
    if header.attributes & ATTRIBUTE_COMPRESSED or header.record_count > ROWS_FREE:
        check_unpacked(memoryview(data), header, max_unpacked_bytes)
    numbers = sorted(schema.get_field_index(name) for name in names)
    buffer = data if isinstance(data, pa.Buffer) else pa.py_buffer(data)
    try:
        if header.attributes & ATTRIBUTE_COMPRESSED and len(numbers) < len(schema):
            batch = _partly_unpacked(buffer, schema, numbers)
        else:
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(buffer), schema)
            if len(numbers) < len(schema):
                batch = batch.select(numbers)
        if batch.num_rows != header.record_count:
            raise ValueError(f"it has {batch.num_rows} rows; the header says {header.record_count}")
        if not trust:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptBatchError(
            f"the batch at offset {header.base_offset} is inconsistent: {error}"
        ) from None
    return batch


def _partly_unpacked(buffer: pa.Buffer, schema: pa.Schema, numbers: list[int]) -> pa.RecordBatch:
    """Decode some columns through a stream, the only way in which Arrow skips columns.

    The copy is of compressed bytes.
    """
    stream = pa.BufferOutputStream()
    stream.write(schema.serialize())
    stream.write(buffer)
    options = pa.ipc.IpcReadOptions(included_fields=numbers or [0])
    batch = pa.ipc.open_stream(stream.getvalue(), options=options).read_next_batch()
    return batch if numbers else batch.select([])
