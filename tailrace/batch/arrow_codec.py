"""Codec between records and Arrow batches, the SDK's only user of Arrow data.

A batch is encoded once, by its producer, and decoded once, by its reader. Nothing between looks
inside.

Invariants:
- `decode(encode(rows)) == rows`
- A row of a sparse batch has the offset in its column, any other that of its place in the batch.
- A decoded batch has passed the checks of form and checksums and, unless trusted, Arrow's full
  validation.
- The unpacked size is checked before anything is decompressed, also for trusted batches.
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
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRecordError,
    RecordTooLargeError,
    UnsupportedBatchError,
)
from tailrace.core.records import CREATE_TIME, LOG_APPEND_TIME, Record
from tailrace.format import exact_values
from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_LOG_APPEND_TIME,
    BatchChecksumError,
    BatchFormatError,
    BatchHeader,
    verify_batch,
)
from tailrace.format.record_batch.batch_validation import (
    ROWS_FREE,
    UNPACKED_MAX_BYTES,
    UnsafeBatchError,
    unpacked_bytes,
)
from tailrace.format.record_batch.header_stamps import insert_header
from tailrace.format.schema import DEFAULT_SCHEMA, TIMESTAMP_TYPE, to_message
from tailrace.kernel.batch_shape import shape_of

MISFITS = (
    pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, TypeError, ValueError,
    OverflowError,
)  # fmt: skip
"""Errors of pyarrow for a value that its column does not take."""


class Rows(Protocol):
    """Rows of a batch that become Records when they are taken (see `tailrace.kernel`)."""

    def __len__(self) -> int:
        """The number of rows left."""

    @property
    def next_offset(self) -> int:
        """The offset of the first row left."""

    def take(self, into: list[Record], count: int) -> None:
        """Append the next `count` rows, or all that are left, to `into`."""


def cut_out(batch: pa.RecordBatch, start: int, count: int) -> pa.RecordBatch:
    """Rows of a batch with nested columns copied. A slice would send more of their children."""
    piece = batch.slice(start, count)
    if not any(pa.types.is_nested(field.type) for field in piece.schema):
        return piece
    columns = [
        pa.concat_arrays([column]) if pa.types.is_nested(column.type) else column
        for column in piece.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=piece.schema)


def with_delays(
    rows: pa.RecordBatch,
    schema: pa.Schema,
    dues_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]],
    repeats: list[str | None] | None,
) -> pa.RecordBatch:
    """Convert rows of a topic to rows of its delay log with this schema."""
    count = rows.num_rows
    dues = pa.py_buffer(np.ascontiguousarray(dues_us, np.int64))
    repeat = pa.nulls(count, pa.utf8()) if repeats is None else pa.array(repeats, pa.utf8())
    return pa.RecordBatch.from_arrays(
        [
            *rows.columns[: len(schema) - 3],
            pa.Array.from_buffers(pa.int64(), count, [None, dues]),  # pa.array loads pandas
            pa.nulls(count, pa.int64()),
            repeat,
        ],
        schema=schema,
    )


def encode(
    batch: pa.RecordBatch,
    *,
    schema_id: int,
    seed: int,
    compression: str,
    first_timestamp_us: int,
    max_timestamp_us: int,
) -> bytearray:
    """Encode `batch` for protocol and log. Offsets, producer and
    append time are set later in place.
    """
    header = BatchHeader(
        record_count=batch.num_rows, last_offset_delta=batch.num_rows - 1,
        first_timestamp_us=first_timestamp_us, max_timestamp_us=max_timestamp_us,
        schema_id=schema_id,
    )  # fmt: skip
    return encode_as(batch, header, seed, compression)


def encode_as(
    batch: pa.RecordBatch, header: BatchHeader, seed: int, compression: str | pa.Codec
) -> bytearray:
    """Encode `batch` with this header. `compression` is a name, or a codec with its level."""
    if compression == "none":
        return insert_header(batch.serialize(), header, seed)
    header.attributes |= ATTRIBUTE_COMPRESSED
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as writer:
        writer.write_batch(batch)
        end = sink.tell()
    # The stream begins with the schema message, which has no body. The batch follows.
    stream = memoryview(sink.getvalue())
    start = 8 + int.from_bytes(stream[4:8], "little")
    return insert_header(stream[start:end], header, seed)


def decode(
    data: memoryview,
    schema: pa.Schema,
    seed: int,
    *,
    trust: bool = False,
    unpacked_max_bytes: int = UNPACKED_MAX_BYTES,
) -> tuple[BatchHeader, pa.RecordBatch]:
    """Decode and verify one whole batch. Its arrays refer to `data`, which must not change.

    Raises CorruptBatchError, UnsupportedBatchError (for a sparse batch, too: see
    `decode_with_offsets`), RecordTooLargeError.
    """
    header, batch, offsets = decode_with_offsets(
        data, schema, seed, trust=trust, unpacked_max_bytes=unpacked_max_bytes
    )
    if offsets is not None:
        raise UnsupportedBatchError(
            f"the batch at offset {header.base_offset} is sparse; its rows have offsets of their "
            "own, which this reader would not show"
        )
    return header, batch


def decode_with_offsets(
    data: memoryview,
    schema: pa.Schema,
    seed: int,
    *,
    trust: bool = False,
    unpacked_max_bytes: int = UNPACKED_MAX_BYTES,
) -> tuple[BatchHeader, pa.RecordBatch, pa.Array | None]:
    """Decode and verify one whole batch: (header, rows in the topic's schema, the offset of each
    row, or None if they are consecutive).

    Otherwise as `decode`.
    """
    try:
        header = verify_batch(data, seed)
    except BatchChecksumError as error:
        raise CorruptBatchError(error.reason) from None
    except BatchFormatError as error:
        raise UnsupportedBatchError(error.reason) from None
    # An uncompressed batch (the appliance has verified that bit) cannot exceed its own size, unless
    # its rows have no bytes. So most batches skip this check.
    if header.attributes & ATTRIBUTE_COMPRESSED or header.record_count > ROWS_FREE:
        check_unpacked(data, header, unpacked_max_bytes)
    offsets = None
    try:
        message = pa.ipc.read_message(pa.py_buffer(data))
        if not header.is_sparse:
            batch = pa.ipc.read_record_batch(message, schema)
        else:
            from tailrace.format.record_batch.sparse_batch import read_rows

            batch, offsets = read_rows(header, message, schema)
        if not trust:
            batch.validate(full=True)
    except BatchFormatError as error:
        raise CorruptBatchError(error.reason) from None
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptBatchError(
            f"the batch at offset {header.base_offset} is inconsistent: {error}"
        ) from None
    return header, batch, offsets


def check_unpacked(data: memoryview, header: BatchHeader, max_bytes: int) -> None:
    """Check the unpacked size of a batch (form and checksums verified).

    Raises RecordTooLargeError, CorruptBatchError.
    """
    try:
        size = unpacked_bytes(data, header)
    except UnsafeBatchError as error:
        raise CorruptBatchError(
            f"the batch at offset {header.base_offset} is inconsistent: {error}"
        ) from None
    rows_max = min(ROWS_FREE + 8 * size, max(ROWS_FREE, max_bytes // 8))
    if size > max_bytes or header.record_count > rows_max:
        raise RecordTooLargeError(
            f"batch decompresses to {size} bytes and {header.record_count} rows; the limit is "
            f"{max_bytes} bytes and {max_bytes // 8} rows (max_decompressed_batch_bytes)"
        )


def timestamp_type_of(header: BatchHeader) -> int:
    """LOG_APPEND_TIME or CREATE_TIME, the type of the batch's timestamps."""
    return LOG_APPEND_TIME if header.attributes & ATTRIBUTE_LOG_APPEND_TIME else CREATE_TIME


def timestamp_range(batch: pa.RecordBatch, fallback_us: int) -> tuple[int, int]:
    """(first, largest) timestamp in the `timestamp` column, else `fallback_us`.

    The column counts only if it has the default type.
    """
    index = batch.schema.get_field_index("timestamp")
    if index < 0 or batch.schema.field(index).type != TIMESTAMP_TYPE or not batch.num_rows:
        return fallback_us, fallback_us
    column = batch.column(index).cast(pa.int64())
    import pyarrow.compute as pc

    largest = pc.max(column).as_py()
    first = column[0].as_py()
    return (fallback_us if first is None else first), (fallback_us if largest is None else largest)


def times_of_rows(
    batch: pa.RecordBatch, sent_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]
) -> Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]:
    """The time of each row that is sent to a typed topic, in microseconds: its column `timestamp`.
    `sent_us`: the times of their `send`, which count without such a column.

    A row without a value has the largest time, as readers see it.
    """
    index = batch.schema.get_field_index("timestamp")
    if index < 0 or batch.schema.field(index).type != TIMESTAMP_TYPE or not batch.num_rows:
        return sent_us
    column = batch.column(index).cast(pa.int64())
    times: np.ndarray[Any, np.dtype[np.int64]]
    if not column.null_count:
        times = column.to_numpy()
        return times
    is_null = column.is_null().to_numpy(zero_copy_only=False)
    times = np.where(is_null, np.asarray(sent_us, np.int64), column.fill_null(0).to_numpy())
    times[is_null] = times.max()
    return times


def timestamps_of(batch: pa.RecordBatch, header: BatchHeader, *, is_typed: bool) -> pa.Array | None:
    """The time of each row in microseconds (int64), None if each has the batch's largest.

    LIST_OFFSETS finds records by the same rule.
    """
    index = batch.schema.get_field_index("timestamp")
    if (
        index < 0
        or batch.schema.field(index).type != TIMESTAMP_TYPE
        or header.has_one_time(is_typed=is_typed)
    ):
        return None
    return batch.column(index).cast(pa.int64()).fill_null(header.max_timestamp_us)


def to_records(
    topic: str,
    partition: int,
    first_offset: int,
    batch: pa.RecordBatch,
    header: BatchHeader,
    typed: bool,
    offsets: pa.Array | None = None,
) -> list[Record]:
    """Convert the rows of a decoded batch to Records, the first one with `first_offset`. `offsets`:
    that of each row; None: they are consecutive.

    Raises CorruptBatchError for an invalid batch that was trusted.
    """
    made: list[Record] = []
    try:
        rows = to_rows(topic, partition, first_offset, batch, header, typed, offsets)
        rows.take(made, batch.num_rows)
    except ValueError as error:
        raise CorruptBatchError(
            f"the batch at offset {header.base_offset} is inconsistent: {error}"
        ) from None
    return made


def to_rows(
    topic: str,
    partition: int,
    first_offset: int,
    batch: pa.RecordBatch,
    header: BatchHeader,
    typed: bool,
    offsets: pa.Array | None = None,
) -> Rows:
    """Wrap the rows of a decoded batch, the first one with `first_offset`, to take Records from.
    `offsets` as for `to_records`.

    For an invalid batch that was trusted, this and `take` raise ValueError.
    """
    count = batch.num_rows
    timestamp_type = timestamp_type_of(header)
    numbers = None if offsets is None else numbers_in(offsets)
    if typed:
        return _typed_rows(topic, partition, first_offset, batch, header, numbers)
    if header.has_one_time(is_typed=False):
        stamps = np.full(count, header.append_time_us)
    else:
        column = batch.column(0).view(pa.int64())
        if column.null_count:
            column = column.fill_null(header.max_timestamp_us)
        # `to_numpy()` would import pandas at its first call. Meanwhile a member of a group would
        # hold its partitions without reading them.
        stamps = (
            np.frombuffer(column.buffers()[1], np.int64, count, column.offset * 8)
            if count
            else np.empty(0, np.int64)
        )
    return kernel.RecordRows(
        Record,
        topic,
        partition,
        first_offset,
        timestamp_type,
        stamps,
        batch.column(1),
        batch.column(2),
        batch.column(3),
        numbers,
    )


def numbers_in(offsets: pa.Array) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The numbers of an int64 column without nulls. `to_numpy()` would import pandas."""
    if not len(offsets):
        return np.empty(0, np.int64)
    return np.frombuffer(offsets.buffers()[1], np.int64, len(offsets), offsets.offset * 8)


def rows_from(
    position: int, rows: pa.RecordBatch, offsets: pa.Array
) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows with an offset of at least `position`, and their offsets."""
    gone = int(numbers_in(offsets).searchsorted(position))
    return (rows.slice(gone), offsets.slice(gone)) if gone else (rows, offsets)


def plain_rows(
    batch: memoryview, seed: int, topic: str, partition: int, position: int | None
) -> tuple[Rows, int, int] | None:
    """(rows from `position` on, next offset, leader epoch) of a batch of an untyped topic.

    The batch is verified as by `decode`, without Arrow. None for rarer forms and invalid batches;
    use `decode` for these.
    """
    return kernel.fetched_rows(
        batch,
        seed,
        _default_shape(),
        Record,
        topic,
        partition,
        -1 if position is None else position,
    )


@cache
def _default_shape() -> kernel.BatchShape:
    return shape_of(read_schema(to_message(DEFAULT_SCHEMA)))


def _typed_rows(
    topic: str,
    partition: int,
    first_offset: int,
    batch: pa.RecordBatch,
    header: BatchHeader,
    numbers: np.ndarray[Any, np.dtype[np.int64]] | None,
) -> Rows:
    timestamp_type = timestamp_type_of(header)
    times = timestamps_of(batch, header, is_typed=True)
    stamp = header.append_time_us if timestamp_type == LOG_APPEND_TIME else header.max_timestamp_us

    def make(first: int, count: int) -> list[Record]:
        stamps = repeat(stamp, count) if times is None else times.slice(first, count).to_pylist()
        offsets = (
            count_from(first_offset + first)
            if numbers is None
            else numbers[first : first + count].tolist()
        )
        return [
            Record(topic, partition, offset, stamp // 1000, timestamp_type, None, row, [], stamp)
            for offset, row, stamp in zip(
                offsets,
                batch.slice(first, count).to_pylist(),
                stamps,
                strict=False,
            )
        ]

    return kernel.ChunkedRows(first_offset, batch.num_rows, make, numbers)


def rows_from_dicts(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Convert dicts to a batch of a typed topic. Raises
    InvalidRecordError that names the misfit.
    """
    columns = [[row.get(name) for row in rows] for name in schema.names]
    try:
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    except MISFITS as error:
        raise InvalidRecordError(
            f"a row does not fit the topic's schema: {_misfit(rows, schema)}{error}"
        ) from None
    for field, column in zip(schema, columns, strict=True):
        found = exact_values.found_in(column, field.type)
        if found is not None:
            raise InvalidRecordError(
                f"a row does not fit the topic's schema: column {field.name!r} takes {field.type}, "
                f"which would keep {found.value!r:.100} only in part"
            )
    return batch


def _misfit(rows: list[dict[str, Any]], schema: pa.Schema) -> str:
    """A prefix that names the first column with an unsuitable value."""
    for field in schema:
        try:
            pa.array([row.get(field.name) for row in rows], field.type)
        except MISFITS:
            return f"column {field.name!r} takes {field.type}: "
        except AttributeError:
            break  # not even dicts
    return ""
