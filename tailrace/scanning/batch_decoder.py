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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from tailrace.batch.arrow_codec import (
    check_unpacked,
    numbers_in,
    timestamp_type_of,
    timestamps_of,
)
from tailrace.core.errors import (
    CorruptBatchError,
    RecordTooLargeError,
    UnsupportedBatchError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.read_errors import UnknownSchemaError, too_large_error
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_LOG_APPEND_TIME,
    BatchHeader,
)
from tailrace.format.record_batch.batch_validation import ROWS_FREE
from tailrace.format.record_batch.sparse_batch import sparse_schema, split_offsets
from tailrace.scanning.batch import StoredBatch, damage_error
from tailrace.scanning.columns import TIMESTAMP, Column, Origin, arrow_schema

if TYPE_CHECKING:
    from tailrace.format.evolution.schema_history import SchemaHistory
    from tailrace.format.evolution.schema_rules import Source

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
    offsets: Any
    """The offset of each row (int64) of a sparse batch; None: they are consecutive."""
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
    batch, offsets = _decode(header, data, schema, names, max_unpacked_bytes, trust=False)
    if not batch.num_rows:
        return None
    times = timestamps_of(batch, header, is_typed=typed)
    numbers = (
        range(header.base_offset, header.next_offset)
        if offsets is None
        else numbers_in(offsets).tolist()
    )
    if times is None:
        stamp = (
            header.append_time_us
            if header.attributes & ATTRIBUTE_LOG_APPEND_TIME
            else header.max_timestamp_us
        )
        return int(numbers[0]) if stamp >= when_us else None
    return next(
        (
            offset
            for offset, time_us in zip(numbers, times.to_pylist(), strict=True)
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
        history: SchemaHistory | None = None,
        unite_bytes: int = BATCH_BYTES,
    ) -> None:
        """`history`: the versions of a typed topic's schema, and the one to return."""
        self._key = key
        self._columns = columns
        self._history = history
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

        Raises CorruptBatchError with the range, RecordTooLargeError, UnsupportedBatchError for a
        value that does not fit, UnknownSchemaError for a version that the history does not have.
        """
        header = frame.header
        if header.is_control:
            return
        first, last = max(start, header.base_offset), min(end, header.next_offset)
        if last <= first or not header.record_count:
            return
        count, offsets = last - first, None
        columns: dict[str, Any] = {}
        if self._requested or header.is_sparse:
            columns, offsets = self._decoded(frame, first, last)
        if offsets is not None:
            count = len(offsets)
            if not count:
                return
            first = offsets[0].as_py()
        is_large = self._requested and header.batch_length >= max(
            UNCOPIED_BYTES, UNCOPIED_ROW_BYTES * header.record_count
        )
        if is_large:
            yield from self.rest()
        self._pieces.append(_Piece(first, count, offsets, timestamp_type_of(header), columns))
        self._row_count += count
        self._byte_count += header.batch_length if frame.data is not None else 0
        if is_large or self._row_count >= self._unite_rows or self._byte_count >= BATCH_BYTES:
            yield self._take()

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yield the remaining rows."""
        if self._pieces:
            yield self._take()

    def _decoded(self, frame: StoredBatch, first: int, last: int) -> tuple[dict[str, Any], Any]:
        """The columns of the rows with offsets `first` to `last - 1`, and the offset of each row
        of a sparse batch.
        """
        header, schema = frame.header, frame.schema
        sources: dict[str, Source] = {}
        if self._history is not None and header.schema_id != self._history.target_id:
            schema, sources = self._version(header.schema_id)
            names = [schema.names[each.column] for each in sources.values() if each.column >= 0]
        else:
            names = [name for name in self._body_names if name in schema.names]
        if (
            self._with_times
            and TIME_COLUMN in schema.names
            and TIME_COLUMN not in names
            and not header.has_one_time(is_typed=self._typed)
        ):
            names.append(TIME_COLUMN)
        try:
            batch, offsets = _decode(
                header, frame.data, schema, names, self._max_unpacked_bytes, trust=self._trust
            )
        except RecordTooLargeError as error:
            raise too_large_error(
                self._key, header.base_offset, header.next_offset, error.detail
            ) from None
        except CorruptBatchError as error:
            raise damage_error(self._key, first, header.next_offset, error.detail) from None
        if offsets is None:
            count = last - first
            if count != header.record_count:
                batch = batch.slice(first - header.base_offset, count)
        else:
            begin, until = (int(n) for n in numbers_in(offsets).searchsorted([first, last]))
            count = until - begin
            batch, offsets = batch.slice(begin, count), offsets.slice(begin, count)
        if sources:
            columns = self._in_target(batch, header, schema, sources, count)
        else:
            columns = {
                name: batch.column(batch.schema.get_field_index(name))
                if name in schema.names
                else pa.nulls(count, self._schema.field(name).type)
                for name in self._body_names
            }
        if self._with_times:
            columns[""] = self._times(batch, header, count)
        return columns, offsets

    def _version(self, schema_id: int) -> tuple[pa.Schema, dict[str, Source]]:
        """A version of the schema, and the source of each requested column in it. Raises
        UnknownSchemaError.
        """
        history = self._history
        assert history is not None
        if schema_id not in history:
            raise UnknownSchemaError(
                f"{self._key.topic}-{self._key.partition} has a batch of schema {schema_id}, and "
                f"the topic's known versions are {', '.join(map(str, history.ids))}"
            )
        by_name = dict(zip(history.target.names, history.sources(schema_id), strict=True))
        return history.schema(schema_id), {name: by_name[name] for name in self._body_names}

    def _in_target(
        self,
        batch: pa.RecordBatch,
        header: BatchHeader,
        schema: pa.Schema,
        sources: dict[str, Source],
        count: int,
    ) -> dict[str, Any]:
        """The requested columns of a batch of another version. Raises UnsupportedBatchError."""
        from tailrace.format.evolution.schema_history import column_of

        try:
            return {
                name: column_of(
                    batch.column(batch.schema.get_field_index(schema.names[source.column]))
                    if source.column >= 0
                    else None,
                    source,
                    self._schema.field(name),
                    count,
                )
                for name, source in sources.items()
            }
        except UnsupportedBatchError as error:
            raise UnsupportedBatchError(
                f"{self._key.topic}-{self._key.partition}: offsets {header.base_offset} to "
                f"{header.next_offset - 1} do not fit the schema: {error.detail}; leave the column "
                "out of columns="
            ) from None

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
            return _joined([_offsets(*run) for run in _runs(pieces)])
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


def _runs(pieces: list[_Piece]) -> list[tuple[int, int, Any]]:
    """(first offset, count, None) of consecutive rows, or those of a sparse batch with their
    offsets.
    """
    runs: list[tuple[int, int, Any]] = []
    for piece in pieces:
        if (
            runs
            and piece.offsets is None
            and runs[-1][2] is None
            and sum(runs[-1][:2]) == piece.first_offset
        ):
            runs[-1] = runs[-1][0], runs[-1][1] + piece.rows, None
        else:
            runs.append((piece.first_offset, piece.rows, piece.offsets))
    return runs


def _offsets(start: int, count: int, offsets: Any) -> Any:
    if offsets is not None:
        return offsets
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
) -> tuple[pa.RecordBatch, Any]:
    """Decode the columns of these names, in the schema's order; others are not decompressed. With
    them the offset of each row of a sparse batch, None for other batches.

    Raises CorruptBatchError, RecordTooLargeError.
    """
    if header.attributes & ATTRIBUTE_COMPRESSED or header.record_count > ROWS_FREE:
        check_unpacked(memoryview(data), header, max_unpacked_bytes)
    numbers = sorted(schema.get_field_index(name) for name in names)
    if header.is_sparse:
        numbers.append(len(schema))
        schema = sparse_schema(schema)
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
        return split_offsets(header, batch) if header.is_sparse else (batch, None)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptBatchError(
            f"the batch at offset {header.base_offset} is inconsistent: {error}"
        ) from None


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
