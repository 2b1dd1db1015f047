"""Batches of a topic's log become Kafka's record batches.

| batch | becomes |
|---|---|
| of a producer, delivered by a delay | a batch with the same offsets, producer and transaction |
| sparse, of a cleaned segment | a batch whose offsets have the same gaps and the same range |
| sparse, without rows | a batch without records for the range, as Kafka's own cleaner leaves |
| the marker of a transaction | a control batch with one record, which says commit or abort |

A row's time is rounded down to milliseconds.

Owner: pure.

Invariants:
- Both checksums and the structure of a batch are verified before it is converted: a damaged batch
  never gets a valid checksum.
- The ranges of offsets stay as they are, so a consumer never asks for an offset twice.
- With LogAppendTime the batches have Kafka's attribute, and all records of one the same time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.batch_layout import KafkaHeader, write_kafka_header
from netfront.kafka.records.compression import CODECS, CompressionError, pack, unpack_buffer
from netfront.kafka.records.errors import KafkaError, KafkaRecordsError, error_of
from netfront.kafka.records.plain_rows import PlainRows
from tailrace.core.errors import TailraceError
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.arrow_metadata import (
    ArrowMetadataError,
    SchemaLayout,
    read_record_batch,
)
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_LOG_APPEND_TIME,
    ATTRIBUTE_TRANSACTIONAL,
    CONTROL_COMMIT,
    PREFIX_BYTES,
    BatchFormatError,
    BatchHeader,
    header_position,
    verify_batch,
)
from tailrace.format.record_batch.batch_header import HEADER_BYTES as OUR_HEADER_BYTES
from tailrace.format.record_batch.batch_validation import UnsafeBatchError, validate_batch
from tailrace.kernel import plain_batch_to_kafka, records_to_kafka
from tailrace.kernel.batch_shape import shape_of
from tailrace.kernel.reference_kafka import COLUMN_BUFFERS, PlainKafka, RecordFault

if TYPE_CHECKING:
    from netfront.kafka.records.typed import TypedRows

_MARKER_KEY = struct.Struct(">hh")
_MARKER_VALUE = struct.Struct(">hi")
_I64 = struct.Struct("<q")


def from_batch(
    batch: Readable,
    *,
    seed: int,
    schema: SchemaLayout,
    compression: str = "none",
    typed: TypedRows | None = None,
) -> bytes | bytearray:
    """Convert one whole batch as it lies in the log.

    `seed` is the partition's (`checksum_seed`), `schema` the layout of the batch's schema
    (`read_schema`). `compression` is none, gzip, snappy, lz4 or zstd. `typed` converts the rows of
    a typed topic; None: the topic has the default schema. The result is one batch, or, of a sparse
    batch with LogAppendTime, one for each run of rows of the same time. A marker is a control
    batch. It is empty for a control batch that Kafka does not know.

    Raises KafkaRecordsError for a damaged batch: the partition answers its code.
    """
    view = memoryview(batch).cast("B")
    codec = CODECS.index(compression)
    if typed is None:
        try:
            plain = plain_batch_to_kafka(view, seed, shape_of(schema), layout.HEADER_BYTES)
            if plain is not None:
                return _plain(plain, codec)
        except RecordFault as fault:
            raise error_of(fault) from None
    try:
        header = verify_batch(view, seed)
        if header.is_marker:
            return _marker(header)
        if header.is_control:
            return b""
        validate_batch(view, header, schema, is_ours=True)
    except (BatchFormatError, UnsafeBatchError) as error:
        raise KafkaRecordsError(
            KafkaError.KAFKA_STORAGE_ERROR, f"a batch of the log cannot be served: {error}"
        ) from None
    if not header.record_count:
        return _without_rows(header)
    if typed is None:
        rows = _plain_rows(view, header)
    else:
        try:
            rows = typed.decode(view, seed)
        except (TailraceError, ValueError) as error:
            raise KafkaRecordsError(
                KafkaError.KAFKA_STORAGE_ERROR,
                f"the batch at offset {header.base_offset} cannot be served: {error}",
            ) from None
    has_one_time = typed is None and header.has_one_time(is_typed=False)
    return _encoded(header, rows, codec, has_one_time)


def _plain(plain: PlainKafka, codec: int) -> bytearray:
    """A batch whose records the kernel has made in one step."""
    (
        encoded, base_ms, max_ms, base_offset, last_offset_delta, count, leader_epoch, producer_id,
        producer_epoch, base_sequence, attributes,
    ) = plain  # fmt: skip
    kafka = codec
    if attributes & ATTRIBUTE_LOG_APPEND_TIME:
        kafka |= layout.ATTRIBUTE_LOG_APPEND_TIME
    if attributes & ATTRIBUTE_TRANSACTIONAL:
        kafka |= layout.ATTRIBUTE_TRANSACTIONAL
    header = KafkaHeader(
        base_offset, 0, leader_epoch, layout.MAGIC, 0, kafka, last_offset_delta, base_ms, max_ms,
        producer_id, producer_epoch, base_sequence, count,
    )  # fmt: skip
    try:
        return _finished(encoded, header, codec)
    except CompressionError as error:
        raise KafkaRecordsError(KafkaError.UNSUPPORTED_COMPRESSION_TYPE, str(error)) from None


def _encoded(
    header: BatchHeader, rows: PlainRows, codec: int, has_one_time: bool
) -> bytes | bytearray:
    """The rows of a batch with this header. Raises KafkaRecordsError."""
    is_appended = bool(header.attributes & ATTRIBUTE_LOG_APPEND_TIME)
    time_us = header.max_timestamp_us
    if has_one_time and is_appended:
        time_us = header.append_time_us
    try:
        runs = [(0, header.record_count)]
        if is_appended and not has_one_time:
            runs = list(_runs(rows, header.record_count, time_us))
        parts = []
        base = header.base_offset
        for first, count in runs:
            end = header.next_offset
            if first + count < header.record_count:
                end = _offset(rows, first + count, header)
            encoded, base_ms, max_ms = records_to_kafka(
                rows.buffers, rows.nodes, first, count, time_us, has_one_time, rows.offsets,
                base, layout.HEADER_BYTES,
            )  # fmt: skip
            kafka = _header(header, base, end, codec, is_appended)
            kafka = kafka._replace(base_ms=base_ms, max_ms=max_ms, record_count=count)
            parts.append(_finished(encoded, kafka, codec))
            base = end
    except RecordFault as fault:
        raise error_of(fault) from None
    except CompressionError as error:
        raise KafkaRecordsError(KafkaError.UNSUPPORTED_COMPRESSION_TYPE, str(error)) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _runs(rows: PlainRows, count: int, time_us: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of each run of rows with the same time in ms."""
    times = memoryview(rows.buffers[1]).cast("B")[: 8 * count].cast("q")
    if rows.nodes[1]:
        yield 0, count  # a row without a time has that of its batch
        return
    first = 0
    for row in range(1, count):
        if times[row] // 1000 != times[first] // 1000:
            yield first, row - first
            first = row
    yield first, count - first


def _offset(rows: PlainRows, row: int, header: BatchHeader) -> int:
    if rows.offsets is None:
        return header.base_offset + row
    return int(_I64.unpack_from(rows.offsets, 8 * row)[0])


def _header(header: BatchHeader, base: int, end: int, codec: int, is_appended: bool) -> KafkaHeader:
    attributes = codec
    if is_appended:
        attributes |= layout.ATTRIBUTE_LOG_APPEND_TIME
    if header.is_transactional:
        attributes |= layout.ATTRIBUTE_TRANSACTIONAL
    return KafkaHeader(
        base_offset=base,
        leader_epoch=header.leader_epoch,
        attributes=attributes,
        last_offset_delta=end - base - 1,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
    )


def _finished(encoded: bytearray, header: KafkaHeader, codec: int) -> bytearray:
    """The batch of records that stand behind room for the header."""
    if codec:
        with memoryview(encoded) as view, view[layout.HEADER_BYTES :] as records:
            encoded = pack(codec, records, layout.HEADER_BYTES)
    write_kafka_header(encoded, header)
    return encoded


def _without_rows(header: BatchHeader) -> bytearray:
    encoded = bytearray(layout.HEADER_BYTES)
    is_appended = bool(header.attributes & ATTRIBUTE_LOG_APPEND_TIME)
    time_ms = header.max_timestamp_us // 1000
    kafka = _header(header, header.base_offset, header.next_offset, 0, is_appended)
    write_kafka_header(encoded, kafka._replace(base_ms=time_ms, max_ms=time_ms))
    return encoded


def _marker(header: BatchHeader) -> bytearray:
    """The control batch of a transaction's end: its record says abort (0) or commit (1)."""
    kind = 1 if header.control_type == CONTROL_COMMIT else 0
    key, value = _MARKER_KEY.pack(0, kind), _MARKER_VALUE.pack(0, 0)
    # attributes, both deltas; the lengths of key and value as zigzag varints; no headers
    record = bytes((0, 0, 0, 2 * len(key))) + key + bytes((2 * len(value),)) + value + b"\0"
    encoded = bytearray(layout.HEADER_BYTES) + bytes((2 * len(record),)) + record
    time_ms = header.max_timestamp_us // 1000
    write_kafka_header(
        encoded,
        KafkaHeader(
            base_offset=header.base_offset,
            leader_epoch=header.leader_epoch,
            attributes=layout.ATTRIBUTE_TRANSACTIONAL | layout.ATTRIBUTE_CONTROL,
            base_ms=time_ms,
            max_ms=time_ms,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            record_count=1,
        ),
    )
    return encoded


def _plain_rows(batch: memoryview, header: BatchHeader) -> PlainRows:
    """The columns of a verified batch of the default schema. Raises KafkaRecordsError."""
    try:
        metadata = read_record_batch(batch, PREFIX_BYTES)
    except ArrowMetadataError as error:
        raise KafkaRecordsError(KafkaError.KAFKA_STORAGE_ERROR, str(error)) from None
    body = batch[header_position(batch) + OUR_HEADER_BYTES :]
    places = metadata.buffers
    views: list[Readable] = [
        body[places[index] : places[index] + places[index + 1]]
        for index in range(0, len(places), 2)
    ]
    if metadata.compressed:
        views = [_unpacked(buffer, header) for buffer in views]
    offsets = views[-1] if header.is_sparse else None
    return PlainRows(views[:COLUMN_BUFFERS], metadata.nodes[:14], offsets)


def _unpacked(buffer: Readable, header: BatchHeader) -> Readable:
    """A compressed buffer of a valid batch: 8 bytes of unpacked size (-1: stored), then data."""
    if not len(buffer):
        return buffer
    (size,) = _I64.unpack_from(buffer, 0)
    data = memoryview(buffer)[8:]
    if size == -1:
        return data
    try:
        return unpack_buffer(data, size)
    except CompressionError as error:
        raise KafkaRecordsError(
            KafkaError.KAFKA_STORAGE_ERROR,
            f"the batch at offset {header.base_offset} cannot be served: {error}",
        ) from None
