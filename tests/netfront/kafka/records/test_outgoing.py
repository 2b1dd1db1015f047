"""Batches of the log become Kafka's record batches."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest

from netfront.kafka.records import outgoing
from netfront.kafka.records.errors import KafkaError, KafkaRecordsError
from netfront.kafka.records.incoming import to_batches
from netfront.kafka.records.outgoing import from_batch
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_LOG_APPEND_TIME,
    CONTROL_ABORT,
    CONTROL_COMMIT,
    header_position,
    read_header,
)
from tailrace.format.record_batch.control_batch import empty_message, encode_marker
from tailrace.format.record_batch.header_stamps import stamp_appended, stamp_producer
from tailrace.format.record_batch.sparse_batch import encode_sparse_batch
from tailrace.kernel.reference_arrow import default_rows
from tests.netfront.kafka.records.batches import (
    CODEC_NUMBERS,
    LAYOUT,
    NOW_US,
    ROWS,
    SEED,
    TRANSACTIONAL_ID,
    DefaultRecordBatch,
    Row,
    kafka_batch,
    our_batch,
    read_kafka,
)


def appended(batch: bytearray, base_offset: int = 1000, leader_epoch: int = 7) -> bytearray:
    """The batch as a worker appends it."""
    with memoryview(batch) as view:
        stamp_appended(
            view, header_position(batch), read_header(batch), base_offset=base_offset,
            append_time_us=NOW_US, leader_epoch=leader_epoch, durable_offset=0, seed=SEED,
        )  # fmt: skip
    return batch


def served(batch: bytes | bytearray, compression: str = "none") -> bytes:
    return bytes(from_batch(batch, seed=SEED, schema=LAYOUT, compression=compression))


@pytest.mark.parametrize("compression", CODEC_NUMBERS)
def test_a_batch_is_served_with_its_offsets_in_each_compression(compression: str) -> None:
    data = served(appended(our_batch(ROWS)), compression)
    assert read_kafka(data) == list(enumerate(ROWS, 1000))
    batch = DefaultRecordBatch(data)
    assert (batch.compression_type, batch.leader_epoch) == (CODEC_NUMBERS[compression], 7)
    assert (batch.first_timestamp, batch.max_timestamp) == (ROWS[0][2], ROWS[4][2])
    assert (batch.last_offset_delta, batch.producer_id) == (4, -1)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_compressed_batch_of_the_log_is_served(compression: str) -> None:
    data = served(appended(our_batch(ROWS, compression)))
    assert read_kafka(data) == list(enumerate(ROWS, 1000))


@pytest.mark.parametrize("size", [1, 60_000, 250_000, 1_000_000, 5_000_000])
@pytest.mark.parametrize("compression", CODEC_NUMBERS)
def test_values_of_every_size_can_be_unpacked(size: int, compression: str) -> None:
    value = np.random.default_rng(size).integers(0, 256, size // 2, np.uint8).tobytes()
    rows: list[Row] = [(None, value + bytes(size - size // 2), 1, [])]
    assert read_kafka(served(appended(our_batch(rows)), compression)) == [(1000, rows[0])]


def test_what_a_kafka_producer_sent_comes_back_byte_for_byte() -> None:
    sent = kafka_batch(ROWS, producer=(TRANSACTIONAL_ID, 3, 77), is_transactional=True)
    (batch,) = to_batches(sent, seed=SEED, now_us=0, max_message_bytes=1 << 20)
    data = served(appended(batch.data))
    # The base offset and the leader epoch lie before what the checksum covers.
    assert data[17:] == bytes(sent[17:])
    assert data[:8] == struct.pack(">q", 1000)


def test_append_time_is_the_time_of_each_record() -> None:
    batch = our_batch(ROWS)
    header = read_header(batch)
    at = header_position(batch)
    struct.pack_into("<I", batch, at + 4, ATTRIBUTE_LOG_APPEND_TIME)
    struct.pack_into("<qq", batch, at + 32, NOW_US, NOW_US)
    data = served(appended(batch))
    assert header.record_count == 5
    assert DefaultRecordBatch(data).timestamp_type == 1
    assert {row[2] for _, row in read_kafka(data)} == {NOW_US // 1000}


def sparse(rows: list[Row], offsets: list[int], **options: object) -> bytes:
    frame = default_rows(
        [1000 * row[2] for row in rows], [row[0] for row in rows], [row[1] for row in rows],
        [row[3] for row in rows],  # type: ignore[misc]
    )  # fmt: skip
    return bytes(
        encode_sparse_batch(
            frame, offsets, base_offset=10, next_offset=30, seed=SEED, schema_id=0,
            compression=str(options.pop("compression", "none")),
            max_timestamp_us=1000 * max((row[2] for row in rows), default=5),
            append_time_us=NOW_US, leader_epoch=2, **options,  # type: ignore[arg-type]
        )
    )  # fmt: skip


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_a_sparse_batch_keeps_its_gaps_and_its_range(compression: str) -> None:
    data = served(sparse(ROWS, [10, 12, 13, 20, 27], compression=compression))
    assert read_kafka(data) == list(zip([10, 12, 13, 20, 27], ROWS, strict=True))
    batch = DefaultRecordBatch(data)
    assert (batch.base_offset, batch.last_offset_delta) == (10, 19)


def test_a_sparse_batch_of_append_times_is_a_batch_for_each_time() -> None:
    rows: list[Row] = [(b"a", b"1", 5, []), (b"b", b"2", 5, []), (b"c", b"3", 9, [])]
    data = served(sparse(rows, [11, 14, 20], attributes=ATTRIBUTE_LOG_APPEND_TIME))
    length = 12 + struct.unpack_from(">i", data, 8)[0]
    first, second = DefaultRecordBatch(data[:length]), DefaultRecordBatch(data[length:])
    assert (first.base_offset, first.last_offset_delta, first.timestamp_type) == (10, 9, 1)
    assert (second.base_offset, second.last_offset_delta, second.timestamp_type) == (20, 9, 1)
    assert read_kafka(data[:length]) + read_kafka(data[length:]) == list(
        zip([11, 14, 20], rows, strict=True)
    )


def test_a_range_without_rows_is_a_batch_without_records() -> None:
    data = served(sparse([], []))
    batch = DefaultRecordBatch(data)
    assert batch.validate_crc()
    assert list(batch) == []
    assert (batch.base_offset, batch.last_offset_delta, batch.records_count) == (10, 19, 0)


@pytest.mark.parametrize(("control_type", "kind"), [(CONTROL_COMMIT, 1), (CONTROL_ABORT, 0)])
def test_a_marker_is_a_control_batch(control_type: int, kind: int) -> None:
    marker, _ = encode_marker(
        empty_message(LAYOUT), control_type=control_type, producer_id=TRANSACTIONAL_ID,
        producer_epoch=4, schema_id=0, time_us=NOW_US, seed=SEED,
    )  # fmt: skip
    data = served(appended(marker))
    batch = DefaultRecordBatch(data)
    assert batch.validate_crc()
    assert batch.is_control_batch
    assert batch.is_transactional
    assert (batch.producer_id, batch.producer_epoch) == (TRANSACTIONAL_ID, 4)
    (record,) = batch
    assert (record.offset, record.timestamp) == (1000, NOW_US // 1000)
    assert record.key == struct.pack(">hh", 0, kind)
    assert record.value == struct.pack(">hi", 0, 0)


def test_rows_without_a_time_have_that_of_their_batch() -> None:
    frame = default_rows([1, 2], [None, None], [b"a", b"b"], None)
    frame = frame.set_column(0, frame.schema.field(0), pa.array([None, 7000], frame.schema[0].type))
    from tailrace.batch.arrow_codec import encode

    batch = encode(
        frame, schema_id=0, seed=SEED, compression="none",
        first_timestamp_us=9000, max_timestamp_us=9000,
    )  # fmt: skip
    assert [row[2] for _, row in read_kafka(served(appended(batch)))] == [9, 7]


def test_producers_of_a_batch_are_kept() -> None:
    batch = our_batch(ROWS)
    with memoryview(batch) as view:
        stamp_producer(view, producer_id=55, producer_epoch=2, base_sequence=99, seed=SEED)
    made = DefaultRecordBatch(served(appended(batch)))
    assert (made.producer_id, made.producer_epoch, made.base_sequence) == (55, 2, 99)
    assert not made.is_transactional


@pytest.mark.parametrize("attributes", [0, ATTRIBUTE_LOG_APPEND_TIME])
def test_the_step_of_the_kernel_makes_what_the_general_way_makes(
    attributes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = our_batch(ROWS)
    producer = (TRANSACTIONAL_ID, 3, 77)
    with memoryview(batch) as view:
        struct.pack_into("<I", batch, header_position(batch) + 4, attributes)
        stamp_producer(view, producer_id=producer[0], producer_epoch=3, base_sequence=77, seed=SEED)
    made = served(appended(batch), "lz4")
    monkeypatch.setattr(outgoing, "plain_batch_to_kafka", lambda *_: None)
    assert served(batch, "lz4") == made


@pytest.mark.parametrize("place", [5, 200, -1])
def test_a_damaged_batch_is_never_served(place: int) -> None:
    batch = appended(our_batch(ROWS))
    batch[place] ^= 4
    with pytest.raises(KafkaRecordsError, match="cannot be served") as refused:
        served(batch)
    assert refused.value.code == KafkaError.KAFKA_STORAGE_ERROR
