"""Sparse batches: batches of a cleaned segment, whose rows carry their offsets.

Rows of one or of several batches become one, without those that were removed:

    stored    |10 11 12|13 14|15 16 17 18|19|        four batches
    cleaned   |10    12    14            18 |19|      a sparse batch of 4 rows, another one of 1 row
              base_offset 10, last_offset_delta 8, record_count 4, offset [10, 12, 14, 18]

The header's range is the range of offsets that the batch stands for, removed rows included. The
ranges of successive batches touch, in a cleaned segment as in any other: the range of a batch
reaches to the next one, the last one's to the next segment. So a lost batch is never taken for
removed rows, and code that looks at headers alone needs no other rule. A range without rows is a
batch without rows.

Owner: pure. The cleaner encodes, readers decode.

Invariants:
- `split_offsets` of what `encode_sparse_batch` wrote are its rows and their offsets.
- base_offset <= offsets <= last offset, strictly ascending, one for each row.
- A batch is of no transaction and of no producer: what was aborted is gone, and what is kept was
  committed. Sequences are in the producers' snapshots.
- `max_timestamp_us` is at least the time of each row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_SPARSE,
    SEQUENCE_MODULUS,
    BatchFormatError,
    BatchHeader,
)
from tailrace.format.record_batch.header_stamps import insert_header
from tailrace.format.record_batch.sparse_layout import offset_column_name

if TYPE_CHECKING:
    from tailrace.format.crc32c import Readable

RANGE_MAX = SEQUENCE_MODULUS
"""The most offsets of a batch's range. A longer range is that of several batches."""
_OFFSETS = pa.int64()


def sparse_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of a topic's cleaned segments: the topic's, then the column with offsets."""
    return schema.append(pa.field(offset_column_name(schema.names), _OFFSETS, nullable=False))


def cleaned_schema_message(schema: pa.Schema) -> bytes:
    """The start of each cleaned segment of a topic with this schema."""
    return bytes(sparse_schema(schema).serialize())


def encode_sparse_batch(
    rows: pa.RecordBatch,
    offsets: Any,
    *,
    base_offset: int,
    next_offset: int,
    seed: int,
    schema_id: int,
    compression: str,
    max_timestamp_us: int,
    append_time_us: int,
    leader_epoch: int,
    first_timestamp_us: int | None = None,
    attributes: int = 0,
    min_tick: int = -1,
    due_us: int = -1,
    max_bytes: int | None = None,
) -> bytearray:
    """Encode rows of the topic's schema as one batch for the range `base_offset` to
    `next_offset - 1`.

    `offsets` are int64, an Arrow or NumPy array or a list, one for each row. `compression` is
    "none", "lz4" or "zstd". `max_timestamp_us` is the largest time of the rows (without rows: of
    what was removed, or 0), `first_timestamp_us` that of the first row (None: the largest).
    `leader_epoch` is that of the newest batch of the range, removed ones included: a reader that
    goes on behind the range names this epoch. `append_time_us` is the newest batch's, too.

    `attributes` may have ATTRIBUTE_LOG_APPEND_TIME, and ATTRIBUTE_DELAYED with `min_tick`. The
    times of rows follow the rule of every batch (`BatchHeader.has_one_time`). In a topic of the
    default schema they are in the column `timestamp`, with LogAppendTime, too: write them there,
    also where the column was null. In a typed topic, rows whose time is their header's
    (`append_time_us` with LogAppendTime, else `max_timestamp_us`) are encoded together only with
    rows of the same time.

    `due_us` is the time, us, since which tombstones of the batch are in a cleaned segment. -1: it
    has none.

    Raises ValueError if offsets are not ascending in the range, or a batch would exceed
    `max_bytes`.
    """
    column = _offset_array(offsets)
    _check_offsets(column, rows.num_rows, base_offset, next_offset)
    schema = sparse_schema(rows.schema)
    batch = pa.RecordBatch.from_arrays([*rows.columns, column], schema=schema)
    header = BatchHeader(
        attributes=attributes | ATTRIBUTE_SPARSE,
        base_offset=base_offset, last_offset_delta=next_offset - base_offset - 1,
        record_count=rows.num_rows,
        first_timestamp_us=max_timestamp_us if first_timestamp_us is None else first_timestamp_us,
        max_timestamp_us=max_timestamp_us, append_time_us=append_time_us,
        leader_epoch=leader_epoch, schema_id=schema_id,
        # What lies before the batch was durable when it was made: a damaged batch there is
        # corruption, not a torn tail.
        durable_offset=base_offset, due_us=due_us, min_tick=min_tick,
    )  # fmt: skip
    if compression == "none":
        encoded = insert_header(batch.serialize(), header, seed)
    else:
        header.attributes |= ATTRIBUTE_COMPRESSED
        options = pa.ipc.IpcWriteOptions(compression=compression)
        encoded = insert_header(_compressed(batch, options), header, seed)
    if max_bytes is not None and len(encoded) > max_bytes:
        raise ValueError(
            f"the batch of offsets {base_offset} to {next_offset - 1} would have {len(encoded)} "
            f"bytes, more than {max_bytes}; encode fewer rows"
        )
    return encoded


def _compressed(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
        end = sink.tell()
    # The stream begins with the schema message, which has no body. The batch follows.
    stream = memoryview(sink.getvalue())
    return stream[8 + int.from_bytes(stream[4:8], "little") : end]


def split_offsets(header: BatchHeader, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows of a decoded sparse batch in the topic's schema, and the offset of each (int64).

    `batch` was decoded by `sparse_schema`. Raises BatchFormatError if its offsets contradict the
    header.
    """
    offsets = batch.column(batch.num_columns - 1)
    try:
        offsets.validate(full=True)
        _check_offsets(offsets, batch.num_rows, header.base_offset, header.next_offset)
        if batch.num_rows != header.record_count:
            raise ValueError(f"it has {batch.num_rows} rows; the header says {header.record_count}")
    except ValueError as error:
        raise BatchFormatError(
            f"the sparse batch at offset {header.base_offset} is inconsistent: {error}"
        ) from None
    columns = batch.columns[:-1]
    schema = pa.schema(list(batch.schema)[:-1])
    return pa.RecordBatch.from_arrays(columns, schema=schema), offsets


def decode_sparse_batch(
    data: Readable, header: BatchHeader, schema: pa.Schema
) -> tuple[pa.RecordBatch, pa.Array]:
    """The rows and offsets of a sparse batch of a topic with this schema. The batch's form,
    checksums and unpacked size are checked. Its arrays refer to `data`.

    Raises BatchFormatError, pyarrow.ArrowInvalid.
    """
    rows, offsets = read_rows(header, pa.ipc.read_message(pa.py_buffer(data)), schema)
    rows.validate(full=True)
    return rows, offsets


def read_rows(
    header: BatchHeader, message: pa.Message, schema: pa.Schema
) -> tuple[pa.RecordBatch, pa.Array]:
    """`decode_sparse_batch` of a message, whose rows Arrow has not validated."""
    return split_offsets(header, pa.ipc.read_record_batch(message, sparse_schema(schema)))


def _offset_array(offsets: Any) -> pa.Array:
    if isinstance(offsets, pa.ChunkedArray):
        offsets = offsets.combine_chunks()
    if not isinstance(offsets, pa.Array):
        offsets = pa.array(offsets, _OFFSETS)
    return offsets if offsets.type == _OFFSETS else offsets.cast(_OFFSETS)


def _check_offsets(offsets: pa.Array, row_count: int, base_offset: int, next_offset: int) -> None:
    """Raises ValueError unless there is one offset for each row, ascending, in the range."""
    if not 0 <= base_offset < next_offset <= base_offset + RANGE_MAX:
        raise ValueError(
            f"a batch cannot stand for the offsets {base_offset} to {next_offset - 1}; it has 1 to "
            f"{RANGE_MAX} of them"
        )
    if len(offsets) != row_count or offsets.null_count:
        raise ValueError(
            f"there are {len(offsets) - offsets.null_count} offsets for {row_count} rows"
        )
    if not row_count:
        return
    import numpy as np

    numbers = np.frombuffer(offsets.buffers()[1], np.int64, row_count, 8 * offsets.offset)
    first, last = int(numbers[0]), int(numbers[-1])
    if first < base_offset or last >= next_offset or (numbers[1:] <= numbers[:-1]).any():
        raise ValueError(
            f"the offsets {first} to {last} do not ascend from {base_offset} to {next_offset - 1}"
        )
