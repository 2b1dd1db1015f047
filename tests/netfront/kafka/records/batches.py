"""Batches of both kinds for tests: Kafka's by kafka-python's encoder, ours by this SDK's."""

from __future__ import annotations

import struct
import warnings
from typing import Any

from tailrace.batch.arrow_codec import decode_with_offsets, encode
from tailrace.format.crc32c import crc32c
from tailrace.format.record_batch.arrow_metadata import read_schema
from tailrace.format.record_batch.batch_header import BatchHeader, checksum_seed
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.kernel.reference import header_lists
from tailrace.kernel.reference_arrow import default_rows

with warnings.catch_warnings():  # it reads its message definitions in a way that is deprecated
    warnings.simplefilter("ignore")
    from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder

SEED = checksum_seed(bytes(range(16)), 3)
LAYOUT = read_schema(to_message(DEFAULT_SCHEMA))
NOW_US = 1_700_000_000_000_000
CODEC_NUMBERS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}

Row = tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]]]
"""(key, value, timestamp in ms, headers)."""
ROWS: list[Row] = [
    (b"k1", b"v1", 1_700_000_000_000, [("trace", b"\x00\x01"), ("empty", b""), ("null", None)]),
    (None, b"no key", 1_700_000_000_005, []),
    (b"tombstone", None, 1_699_999_999_999, []),
    (b"", b"", 0, [("ü", "ß".encode())]),
    (b"long", bytes(range(256)) * 300, 4_000_000_000_000, []),
]
TRANSACTIONAL_ID = (1 << 62) + 7


__all__ = [
    "DefaultRecordBatch",
    "kafka_batch",
    "our_batch",
    "read_kafka",
    "read_ours",
    "with_fields",
]


def kafka_batch(
    rows: list[Row],
    *,
    compression: str = "none",
    producer: tuple[int, int, int] = (-1, -1, -1),
    is_transactional: bool = False,
) -> bytearray:
    """A batch as kafka-python's producer sends it. `producer`: id, epoch, base sequence."""
    builder = DefaultRecordBatchBuilder(
        2, CODEC_NUMBERS[compression], is_transactional, *producer, 1 << 30
    )
    for row, (key, value, time_ms, headers) in enumerate(rows):
        assert builder.append(row, time_ms, key, value, headers) is not None
    return bytearray(builder.build())


def with_fields(batch: bytes | bytearray, **fields: Any) -> bytearray:
    """The batch with other numbers in its header, and its checksum made again."""
    places = {
        "base_offset": (0, ">q"), "length": (8, ">i"), "leader_epoch": (12, ">i"),
        "magic": (16, ">b"), "attributes": (21, ">h"), "last_offset_delta": (23, ">i"),
        "base_ms": (27, ">q"), "max_ms": (35, ">q"), "producer_id": (43, ">q"),
        "producer_epoch": (51, ">h"), "base_sequence": (53, ">i"), "record_count": (57, ">i"),
    }  # fmt: skip
    changed = bytearray(batch)
    for name, number in fields.items():
        at, form = places[name]
        struct.pack_into(form, changed, at, number)
    struct.pack_into(">I", changed, 17, crc32c(bytes(changed[21:])))
    return changed


def read_ours(data: bytes | bytearray) -> tuple[BatchHeader, list[Row]]:
    """The header and the rows of a batch of ours, verified. Times are in ms."""
    header, batch, _ = decode_with_offsets(memoryview(data), DEFAULT_SCHEMA, SEED)
    times = batch.column(0).cast("int64").to_pylist()
    rows = zip(
        batch.column(1).to_pylist(),
        batch.column(2).to_pylist(),
        [time_us // 1000 for time_us in times],
        header_lists(batch.column(3)),
        strict=True,
    )
    return header, list(rows)


def read_kafka(data: bytes | bytearray) -> list[tuple[int, Row]]:
    """(offset, row) of each record of a batch, by kafka-python's decoder."""
    batch = DefaultRecordBatch(bytes(data))
    assert batch.validate_crc()
    return [
        (record.offset, (record.key, record.value, record.timestamp, list(record.headers)))
        for record in batch
    ]


def our_batch(rows: list[Row], compression: str = "none") -> bytearray:
    """A batch of ours, as this SDK's producer sends it. It has the base offset 0."""
    frame = default_rows(
        [1000 * row[2] for row in rows],
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[3] for row in rows] if any(row[3] for row in rows) else None,  # type: ignore[misc]
    )
    times = [1000 * row[2] for row in rows]
    return encode(
        frame, schema_id=0, seed=SEED, compression=compression,
        first_timestamp_us=times[0], max_timestamp_us=max(times),
    )  # fmt: skip
