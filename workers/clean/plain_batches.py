"""Plain batches: rows of successive small batches, put together and encoded as batches of about
TARGET_BYTES.

A stretch of stored batches is an Arrow stream, so that Arrow decodes all of them at once.

Owner: one run of the cleaner.

Invariants:
- The offsets of what is written touch, and every row keeps its own.
- A row keeps its time: rows with times in a column share a batch, and rows whose time is that of
  their header share one with rows of the same time.
- Each batch that was encoded is decoded again and compared with its rows.
- No batch is larger than max.message.bytes, beside a single row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import pyarrow as pa

from tailrace.format.record_batch.arrow_metadata import codec_of, read_schema
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_COMPRESSED,
    ATTRIBUTE_LOG_APPEND_TIME,
    END_OF_STREAM,
    BatchHeader,
)
from tailrace.format.record_batch.batch_validation import null_count_of
from tailrace.format.record_batch.header_stamps import insert_header
from tailrace.format.schema import TIMESTAMP_TYPE
from workers.clean.sources import UnreadableError
from workers.clean.superseded import offsets_of

TARGET_BYTES = 256 << 10
"""As producers fill a batch. Batches of 64 KiB are scanned at half the rate."""
STRETCH_BYTES = 4 << 20
STRETCH_BATCHES = 4_096
TIMESTAMP = "timestamp"


class PlainBatches:
    """Puts rows together and encodes them."""

    def __init__(
        self,
        write: Callable[[bytearray, int, int], None],
        *,
        message: bytes,
        schema: pa.Schema,
        seed: int,
        compression: str,
        max_message_bytes: int,
        typed: bool,
    ) -> None:
        """`write` is called with the bytes, base offset and largest time of each batch. `message`:
        the schema message of the segment.
        """
        self._write = write
        self._message = message
        self._seed = seed
        self._compression = compression
        self._max_message_bytes = max_message_bytes
        self._target_bytes = min(TARGET_BYTES, max(1, max_message_bytes // 2))
        self._typed = typed
        index = schema.get_field_index(TIMESTAMP)
        has_times = index >= 0 and schema.field(index).type == TIMESTAMP_TYPE
        self._time_index = index if has_times else -1
        self._time_node = -1
        """The node of the column with times, of a typed topic."""
        if has_times and typed:
            nodes = read_schema(message).nodes
            self._time_node = [each.top_level and each.name for each in nodes].index(TIMESTAMP)
        self._headers: list[BatchHeader] = []
        self._pieces: list[memoryview] = []
        self._bytes = 0
        self._codec = "none"
        self._rows: pa.RecordBatch | None = None
        """Rows that are decoded and not encoded yet. They are the last of `_ended`."""
        self._ended: list[tuple[int, int]] = []
        """(offset behind the batch, its append time) of batches whose rows are not all encoded."""
        self._start = 0
        self._last: BatchHeader | None = None

    def can_take(self, data: memoryview) -> bool:
        """False if rows of a batch have the time of its header beside rows that have their own, in
        a column that is the producer's.
        """
        return self._time_node < 0 or not null_count_of(data, self._time_node)

    def add(self, header: BatchHeader, data: memoryview) -> None:
        """Add the next batch. Raises UnreadableError, OSError."""
        if self._last is not None and not self._can_follow(self._last, header):
            self.flush()
        if self._last is None:
            self._start = header.base_offset
        self._last = header
        if self._codec == "none" and header.attributes & ATTRIBUTE_COMPRESSED:
            self._codec = codec_of(data)
        self._headers.append(header)
        self._pieces.append(data)
        self._bytes += len(data)
        if self._bytes >= STRETCH_BYTES or len(self._pieces) >= STRETCH_BATCHES:
            self._decode()
            self._encode_rows(is_last=False)

    def flush(self) -> None:
        """Encode what was added. Raises UnreadableError, OSError."""
        if self._last is None:
            return
        if self._pieces:
            self._decode()
        self._encode_rows(is_last=True)
        self._last, self._rows, self._codec = None, None, "none"
        self._ended.clear()

    def _has_one_time(self, header: BatchHeader) -> bool:
        return self._time_index < 0 or header.has_one_time(is_typed=self._typed)

    def _can_follow(self, before: BatchHeader, header: BatchHeader) -> bool:
        """True if the rows of a batch can be in one with those of the batch before it."""
        if (
            before.schema_id != header.schema_id
            or before.leader_epoch != header.leader_epoch
            or (before.attributes ^ header.attributes) & ATTRIBUTE_LOG_APPEND_TIME
        ):
            return False
        if not self._has_one_time(header):
            return not self._has_one_time(before)
        if header.attributes & ATTRIBUTE_LOG_APPEND_TIME:
            return before.append_time_us == header.append_time_us
        return (
            before.first_timestamp_us
            == before.max_timestamp_us
            == header.first_timestamp_us
            == header.max_timestamp_us
        )

    # ---- decoding --------------------------------------------------------------------------------

    def _decode(self) -> None:
        headers, pieces = self._headers, self._pieces
        self._headers, self._pieces, self._bytes = [], [], 0
        first = headers[0].base_offset
        try:
            stream = b"".join((self._message, *pieces, END_OF_STREAM))
            with pa.ipc.open_stream(pa.py_buffer(stream)) as reader:
                batches = list(reader)
            if [rows.num_rows for rows in batches] != [each.record_count for each in headers]:
                raise UnreadableError(
                    f"rows of offsets from {first} are not those of their headers"
                )
            for rows in batches:
                rows.validate(full=True)
        except pa.ArrowException as error:
            raise UnreadableError(
                f"offsets {first} to {headers[-1].last_offset}: {error}"
            ) from None
        if not self._has_one_time(headers[0]):
            batches = [
                _with_times(rows, self._time_index, header.max_timestamp_us)
                for rows, header in zip(batches, headers, strict=True)
            ]
        if self._rows is not None:
            batches.insert(0, self._rows)
        (self._rows,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
        self._ended += [(header.next_offset, header.append_time_us) for header in headers]

    # ---- encoding --------------------------------------------------------------------------------

    def _encode_rows(self, *, is_last: bool) -> None:
        """Encode the decoded rows; without `is_last` those that fill a batch."""
        rows = self._rows
        assert rows is not None
        count = max(1, self._target_bytes * rows.num_rows // max(1, rows.nbytes))
        at = 0
        while at < rows.num_rows and (is_last or rows.num_rows - at >= count):
            self._encode(cut_out(rows, at, min(count, rows.num_rows - at)))
            at += count
        self._rows = rows.slice(at) if at < rows.num_rows else None

    def _encode(self, rows: pa.RecordBatch) -> None:
        """Encode rows as one batch, or as several if it would be too large."""
        count = rows.num_rows
        encoded, header = self._encoded(rows)
        if len(encoded) > self._max_message_bytes and count > 1:
            self._encode(cut_out(rows, 0, count // 2))
            self._encode(cut_out(rows, count // 2, count - count // 2))
            return
        decoded = pa.ipc.read_record_batch(pa.ipc.read_message(encoded), rows.schema)
        if not decoded.equals(rows) and decoded.serialize() != rows.serialize():  # equals: not NaN
            raise UnreadableError(
                f"what was written for offset {header.base_offset} is not what was read"
            )
        self._write(encoded, header.base_offset, header.max_timestamp_us)
        self._start = header.next_offset
        ended = sum(end <= self._start for end, _ in self._ended)
        del self._ended[:ended]

    def _encoded(self, rows: pa.RecordBatch) -> tuple[bytearray, BatchHeader]:
        last = self._last
        assert last is not None
        end = self._start + rows.num_rows
        count = bisect_left(self._ended, (end, -1)) + 1
        first_us, max_us = last.first_timestamp_us, last.max_timestamp_us
        if not self._has_one_time(last):
            times = offsets_of(rows.column(self._time_index))
            first_us, max_us = int(times[0]), int(times.max())
        header = BatchHeader(
            attributes=last.attributes & ATTRIBUTE_LOG_APPEND_TIME,
            base_offset=self._start, last_offset_delta=rows.num_rows - 1,
            record_count=rows.num_rows, first_timestamp_us=first_us, max_timestamp_us=max_us,
            append_time_us=max(time_us for _, time_us in self._ended[:count]),
            leader_epoch=last.leader_epoch, schema_id=last.schema_id,
            # What lies before the batch was durable when it was made.
            durable_offset=self._start, merged_count=count,
        )  # fmt: skip
        compression = self._codec if self._compression == "producer" else self._compression
        if compression == "none":
            return insert_header(rows.serialize(), header, self._seed), header
        header.attributes |= ATTRIBUTE_COMPRESSED
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
            writer.write_batch(rows)
            written = sink.tell()
        # The stream begins with the schema message, which has no body. The batch follows.
        stream = memoryview(sink.getvalue())
        message = stream[8 + int.from_bytes(stream[4:8], "little") : written]
        return insert_header(message, header, self._seed), header


def cut_out(rows: pa.RecordBatch, start: int, count: int) -> pa.RecordBatch:
    """Rows of a batch, with nested columns copied: a slice would be written with all children."""
    piece = rows.slice(start, count)
    if count == rows.num_rows or not any(pa.types.is_nested(each.type) for each in piece.schema):
        return piece
    columns = [
        pa.concat_arrays([column]) if pa.types.is_nested(column.type) else column
        for column in piece.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=piece.schema)


def _with_times(rows: pa.RecordBatch, index: int, time_us: int) -> pa.RecordBatch:
    """Rows with a time each: where the column has none, that of the header."""
    times = rows.column(index)
    if not times.null_count:
        return rows
    filled = times.fill_null(pa.scalar(time_us, pa.int64()).cast(times.type))
    columns = [*rows.columns[:index], filled, *rows.columns[index + 1 :]]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)
