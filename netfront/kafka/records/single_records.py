"""Single records of Kafka's batches: read one by one, and written.

This is for the rare record that needs work of its own. All others are converted by columns.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.compression import unpack
from tailrace.format.crc32c import Readable
from tailrace.kernel.reference_kafka import RecordReader, put_cell, put_zigzag

HEADERS_MAX = 1 << 20
Headers = list[tuple[str, bytes | None]]


class KafkaRecord(NamedTuple):
    """One record."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def records_of(batches: Readable, unpacked_max: int) -> Iterator[KafkaRecord]:
    """The records of whole batches of magic 2, without those of control batches.

    Raises RecordFault, CompressionError.
    """
    data = memoryview(batches).cast("B")
    at = 0
    while at < len(data):
        end = at + layout.LENGTH_FROM + layout.length_at(data, at)
        header = layout.read_kafka_header(data, at)
        if not header.attributes & layout.ATTRIBUTE_CONTROL:
            records = unpack(
                header.attributes & layout.CODEC_MASK, data[at + layout.HEADER_BYTES : end],
                unpacked_max,
            )  # fmt: skip
            reader = RecordReader(memoryview(records).cast("B"))
            for reader.row in range(header.record_count):
                yield _next(reader, header)
        at = end


def _next(reader: RecordReader, header: layout.KafkaHeader) -> KafkaRecord:
    end = reader.varint(5, reader.end)
    end += reader.at
    reader.at += 1
    time_ms = header.base_ms + reader.varint(10, end)
    offset = header.base_offset + reader.varint(5, end)
    key, value = reader.cell(end), reader.cell(end)
    return KafkaRecord(offset, time_ms, key, value, reader.headers(end, HEADERS_MAX))


def encoded_record(
    key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]
) -> bytes:
    """A record that stands alone in its batch, with the batch's time."""
    body = bytearray(b"\0")
    put_zigzag(body, 0)
    put_zigzag(body, 0)
    put_cell(body, key)
    put_cell(body, value)
    put_zigzag(body, len(headers))
    for name, content in headers:
        put_cell(body, name.encode())
        put_cell(body, content)
    out = bytearray()
    put_zigzag(out, len(body))
    return bytes(out + body)
