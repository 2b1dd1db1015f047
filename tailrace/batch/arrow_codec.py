"""Records to batches and back: the only place where the SDK makes or reads Arrow data.

A batch is encoded once, by the producer, and decoded once, by its reader; nothing between looks inside.
Invariants: `decode(encode(rows)) == rows`; a decoded batch has passed form, both checksums and, unless told to trust, Arrow's full
validation. What a batch may unpack to is looked at before anything of it is unpacked, also when told to trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count as count_from
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from tailrace import kernel
from tailrace.errors import CorruptBatchError, InvalidRecordError, RecordTooLargeError, UnsupportedBatchError
from tailrace.formats.arrow_metadata import read_schema
from tailrace.formats.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_LOG_APPEND_TIME,
    BatchChecksumError,
    BatchFormatError,
    BatchHeader,
    insert_header,
    verify_batch,
)
from tailrace.formats.structure import ROWS_FREE, UNPACKED_MAX_BYTES, UnsafeBatchError, shape_of, unpacked_bytes
from tailrace.records import CREATE_TIME, LOG_APPEND_TIME, Record
from tailrace.schema import DEFAULT_SCHEMA, HEADER_TYPE, to_message

Headers = Sequence[tuple[str, bytes]] | None
_TIMESTAMP = pa.timestamp("us", "UTC")


class Rows(Protocol):
    """Rows of a batch that become Records when they are taken (see `tailrace.kernel`)."""

    def __len__(self) -> int:
        """How many are left."""

    @property
    def next_offset(self) -> int:
        """Of the first that is left."""

    def take(self, into: list[Record], count: int) -> None:
        """Append the next `count`, or all that are left."""


def null_headers(count: int) -> pa.Array:
    """`count` records without headers, 4 bytes and a bit each (`pa.nulls` makes children of the same length, which are sent along)."""
    validity, offsets = pa.py_buffer(bytes((count + 7) // 8)), pa.py_buffer(bytes(4 * (count + 1)))
    return pa.Array.from_buffers(HEADER_TYPE, count, [validity, offsets], null_count=count, children=[pa.array([], HEADER_TYPE.value_type)])


def cut_out(batch: pa.RecordBatch, start: int, count: int) -> pa.RecordBatch:
    """Rows of a batch, nested columns copied: a slice of those would be sent with more of their children than it shows."""
    piece = batch.slice(start, count)
    if not any(pa.types.is_nested(field.type) for field in piece.schema):
        return piece
    columns = [pa.concat_arrays([column]) if pa.types.is_nested(column.type) else column for column in piece.columns]
    return pa.RecordBatch.from_arrays(columns, schema=piece.schema)


def default_rows(
    timestamps_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]],
    keys: list[bytes | None],
    values: list[bytes | None],
    headers: list[Headers] | None,
) -> pa.RecordBatch:
    """Lists of equal length as a batch of the default schema. Raises InvalidRecordError for parts of a wrong type."""
    try:
        if headers is None:
            header_column = null_headers(len(values))
        else:
            header_column = pa.array([[{"key": k, "value": v} for k, v in row] if row else None for row in headers], HEADER_TYPE)
        columns = [
            pa.array(timestamps_us, pa.int64()).view(_TIMESTAMP),
            pa.array(keys, pa.binary()),
            pa.array(values, pa.binary()),
            header_column,
        ]
        return pa.RecordBatch.from_arrays(columns, schema=DEFAULT_SCHEMA)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError) as error:
        raise InvalidRecordError(f"a record cannot be stored: {error}") from None


def with_delays(
    rows: pa.RecordBatch, schema: pa.Schema, dues_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]], repeats: list[str | None] | None
) -> pa.RecordBatch:
    """Rows of a topic as rows of its delay log, whose schema is given."""
    count = rows.num_rows
    repeat = pa.nulls(count, pa.utf8()) if repeats is None else pa.array(repeats, pa.utf8())
    return pa.RecordBatch.from_arrays(
        [*rows.columns[: len(schema) - 3], pa.array(dues_us, pa.int64()), pa.nulls(count, pa.int64()), repeat], schema=schema
    )


def encode(
    batch: pa.RecordBatch, *, schema_id: int, seed: int, compression: str, first_timestamp_us: int, max_timestamp_us: int
) -> bytearray:
    """`batch` as bytes for the wire and the log; offsets, producer and append time are filled in later, in place."""
    header = BatchHeader(
        record_count=batch.num_rows, last_offset_delta=batch.num_rows - 1, first_timestamp_us=first_timestamp_us, max_timestamp_us=max_timestamp_us,
        schema_id=schema_id,
    )  # fmt: skip
    return encode_as(batch, header, seed, compression)


def encode_as(batch: pa.RecordBatch, header: BatchHeader, seed: int, compression: str) -> bytearray:
    """`batch` as bytes under this header."""
    if compression == "none":
        return insert_header(batch.serialize(), header, seed)
    header.attributes |= ATTRIBUTE_COMPRESSED
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
        end = sink.tell()
    # The stream begins with the schema message (it has no body); the batch follows.
    stream = memoryview(sink.getvalue())
    start = 8 + int.from_bytes(stream[4:8], "little")
    return insert_header(stream[start:end], header, seed)


def decode(
    data: memoryview, schema: pa.Schema, seed: int, *, trust: bool = False, unpacked_max_bytes: int = UNPACKED_MAX_BYTES
) -> tuple[BatchHeader, pa.RecordBatch]:
    """One whole batch, proven. The arrays refer to `data`, which must stay as it is. Raises CorruptBatchError, UnsupportedBatchError, RecordTooLargeError."""
    try:
        header = verify_batch(data, seed)
    except BatchChecksumError as error:
        raise CorruptBatchError(error.reason) from None
    except BatchFormatError as error:
        raise UnsupportedBatchError(error.reason) from None
    # What is not compressed (the appliance has held that bit against the bytes) is as large as it is, if its rows have bytes: no time for most batches.
    if header.attributes & ATTRIBUTE_COMPRESSED or header.record_count > ROWS_FREE:
        check_unpacked(data, header, unpacked_max_bytes)
    try:
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), schema)
        if not trust:
            batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptBatchError(f"batch at offset {header.base_offset} contradicts itself: {error}") from None
    return header, batch


def check_unpacked(data: memoryview, header: BatchHeader, max_bytes: int) -> None:
    """Look at what a batch (form and checksums proven) would take once it is unpacked. Raises RecordTooLargeError, CorruptBatchError."""
    try:
        size = unpacked_bytes(data, header)
    except UnsafeBatchError as error:
        raise CorruptBatchError(f"batch at offset {header.base_offset} contradicts itself: {error}") from None
    rows_max = min(ROWS_FREE + 8 * size, max(ROWS_FREE, max_bytes // 8))
    if size > max_bytes or header.record_count > rows_max:
        raise RecordTooLargeError(
            f"{len(data)} bytes unpack to {size} bytes and {header.record_count} rows; at most {max_bytes} bytes, and a row for 8 of them, are taken"
        )


def timestamp_type_of(header: BatchHeader) -> int:
    """LOG_APPEND_TIME or CREATE_TIME: whose clock the batch's timestamps are of."""
    return LOG_APPEND_TIME if header.attributes & ATTRIBUTE_LOG_APPEND_TIME else CREATE_TIME


def timestamp_range(batch: pa.RecordBatch, fallback_us: int) -> tuple[int, int]:
    """(first, largest) timestamp of a batch: of its `timestamp` column where it has one of the default kind, else `fallback_us`."""
    index = batch.schema.get_field_index("timestamp")
    if index < 0 or batch.schema.field(index).type != _TIMESTAMP or not batch.num_rows:
        return fallback_us, fallback_us
    column = batch.column(index).cast(pa.int64())
    import pyarrow.compute as pc

    largest = pc.max(column).as_py()
    first = column[0].as_py()
    return (fallback_us if first is None else first), (fallback_us if largest is None else largest)


def timestamps_of(batch: pa.RecordBatch, header: BatchHeader, *, is_typed: bool) -> pa.Array | None:
    """The time of each row in microseconds, int64, by the rule that LIST_OFFSETS finds records by; None: each has the batch's largest."""
    index = batch.schema.get_field_index("timestamp")
    if index < 0 or batch.schema.field(index).type != _TIMESTAMP or header.has_one_time(is_typed=is_typed):
        return None
    return batch.column(index).cast(pa.int64()).fill_null(header.max_timestamp_us)


def to_records(topic: str, partition: int, first_offset: int, batch: pa.RecordBatch, header: BatchHeader, typed: bool) -> list[Record]:
    """The rows of a decoded batch, the first of which has `first_offset`, as Records. Raises CorruptBatchError of a batch that was trusted."""
    made: list[Record] = []
    try:
        to_rows(topic, partition, first_offset, batch, header, typed).take(made, batch.num_rows)
    except ValueError as error:
        raise CorruptBatchError(f"batch at offset {header.base_offset} contradicts itself: {error}") from None
    return made


def to_rows(topic: str, partition: int, first_offset: int, batch: pa.RecordBatch, header: BatchHeader, typed: bool) -> Rows:
    """The rows of a decoded batch, the first of which has `first_offset`, which become Records when they are taken. Raises ValueError, and so does taking, of
    a batch that was trusted.
    """
    count = batch.num_rows
    timestamp_type = timestamp_type_of(header)
    if typed:
        return _typed_rows(topic, partition, first_offset, batch, header)
    if timestamp_type == LOG_APPEND_TIME:
        stamps = np.full(count, header.append_time_us)
    else:
        column = batch.column(0).view(pa.int64())
        if column.null_count:
            column = column.fill_null(header.max_timestamp_us)
        # Not `to_numpy()`: its first call imports pandas, and a member of a group would hold its partitions meanwhile without reading them.
        stamps = np.frombuffer(column.buffers()[1], np.int64, count, column.offset * 8) if count else np.empty(0, np.int64)
    return kernel.RecordRows(
        Record, topic, partition, first_offset, timestamp_type, stamps, batch.column(1), batch.column(2), batch.column(3)
    )


def plain_rows(batch: memoryview, seed: int, topic: str, partition: int, position: int | None) -> tuple[Rows, int, int] | None:
    """(rows from `position` on, the offset behind them, their leader epoch) of a batch of an untyped topic, proven as by `decode`, without Arrow. None: it is
    of a rarer form, or not good; `decode` it.
    """
    return kernel.fetched_rows(batch, seed, _default_shape(), Record, topic, partition, -1 if position is None else position)


@cache
def _default_shape() -> kernel.BatchShape:
    return shape_of(read_schema(to_message(DEFAULT_SCHEMA)))


def _typed_rows(topic: str, partition: int, first_offset: int, batch: pa.RecordBatch, header: BatchHeader) -> Rows:
    timestamp_type = timestamp_type_of(header)
    times = timestamps_of(batch, header, is_typed=True)
    stamp = header.append_time_us if timestamp_type == LOG_APPEND_TIME else header.max_timestamp_us

    def make(first: int, count: int) -> list[Record]:
        stamps = repeat(stamp, count) if times is None else times.slice(first, count).to_pylist()
        return [
            Record(topic, partition, offset, stamp // 1000, timestamp_type, None, row, [], stamp)
            for offset, row, stamp in zip(count_from(first_offset + first), batch.slice(first, count).to_pylist(), stamps, strict=False)
        ]

    return kernel.PiecedRows(first_offset, batch.num_rows, make)


def rows_from_dicts(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Dicts as a batch of a typed topic. Raises InvalidRecordError naming what does not fit."""
    try:
        return pa.RecordBatch.from_pylist(rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRecordError(f"a row does not fit the topic's schema: {_misfit(rows, schema)}{error}") from None


def _misfit(rows: list[dict[str, Any]], schema: pa.Schema) -> str:
    """Which column the first value that does not fit is of."""
    for field in schema:
        try:
            pa.array([row.get(field.name) for row in rows], field.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError, ValueError, OverflowError):
            return f"column {field.name!r} takes {field.type}: "
        except AttributeError:
            break  # not even dicts
    return ""
