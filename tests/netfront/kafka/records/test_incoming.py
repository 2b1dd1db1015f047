"""Kafka's record batches become batches of the log."""

from __future__ import annotations

import pytest

from netfront.kafka.records.errors import KafkaError, KafkaRecordsError
from netfront.kafka.records.incoming import ConvertedBatch, to_batches
from tailrace.format.record_batch.batch_validation import validate_batch
from tests.netfront.kafka.records.batches import (
    CODEC_NUMBERS,
    LAYOUT,
    NOW_US,
    ROWS,
    SEED,
    TRANSACTIONAL_ID,
    Row,
    kafka_batch,
    read_ours,
    with_fields,
)


def converted(records: bytes | bytearray, max_message_bytes: int = 1 << 20) -> list[ConvertedBatch]:
    return to_batches(records, seed=SEED, now_us=NOW_US, max_message_bytes=max_message_bytes)


@pytest.mark.parametrize("compression", CODEC_NUMBERS)
def test_a_batch_of_each_compression_keeps_its_records(compression: str) -> None:
    (batch,) = converted(kafka_batch(ROWS, compression=compression))
    header, rows = read_ours(batch.data)
    assert rows == ROWS
    assert (header.record_count, header.last_offset_delta, header.producer_id) == (5, 4, -1)
    assert header.max_timestamp_us == 4_000_000_000_000_000
    assert header.first_timestamp_us == 1_700_000_000_000_000


def test_producer_and_transaction_are_kept() -> None:
    producer = (TRANSACTIONAL_ID, 5, 2**31 - 2)
    (batch,) = converted(kafka_batch(ROWS, producer=producer, is_transactional=True))
    header, _ = read_ours(batch.data)
    assert header.is_transactional
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == producer
    assert batch[1:] == (5, 0, 0, *producer, True)


def test_batches_of_one_request_stay_batches() -> None:
    first, second = kafka_batch(ROWS, producer=(9, 0, 10)), kafka_batch(ROWS, producer=(9, 0, 15))
    made = converted(first + second)
    assert [(b.record_count, b.batch_index, b.base_sequence) for b in made] == [
        (5, 0, 10),
        (5, 1, 15),
    ]


def test_a_batch_that_grows_too_large_is_split_the_same_way_each_time() -> None:
    rows: list[Row] = [(b"%d" % n, b"x" * 100, n, [("h", b"v")]) for n in range(1000)]
    records = kafka_batch(rows, compression="lz4", producer=(9, 1, 2**31 - 100))
    made = converted(records, 16 << 10)
    assert len(made) == 16
    assert converted(records, 16 << 10) == made
    assert all(len(batch.data) <= 16 << 10 for batch in made)
    found: list[Row] = []
    for batch in made:
        header, part = read_ours(batch.data)
        assert header.base_sequence == batch.base_sequence == (2**31 - 100 + len(found)) % 2**31
        assert batch.first_record == len(found)
        found += part
    assert found == rows


def test_a_record_that_is_too_large_is_refused_by_its_index() -> None:
    rows: list[Row] = [(None, b"x", 1, []), (None, b"x" * 5000, 1, []), (None, b"x", 1, [])]
    with pytest.raises(KafkaRecordsError, match="is too large") as refused:
        converted(kafka_batch(rows), 4096)
    assert (refused.value.code, refused.value.record_index) == (KafkaError.MESSAGE_TOO_LARGE, 1)


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_large_record_that_its_producer_has_packed_small_is_stored_packed(
    compression: str,
) -> None:
    """It was refused, where Kafka counts the packed batch."""
    rows: list[Row] = [(b"k", b"x" * 60_000, 1, [("h", b"v")]), (None, b"small", 2, [])]
    records = kafka_batch(rows, compression=compression, producer=(9, 1, 2**31 - 1))
    (batch,) = converted(records, 4096)
    assert len(batch.data) <= 4096
    header, found = read_ours(batch.data)
    assert found == rows
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 1, 2**31 - 1)
    assert converted(records, 4096) == [batch]
    validate_batch(batch.data, header, LAYOUT, max_message_bytes=4096)


def test_a_packed_batch_is_split_where_it_would_unpack_to_too_much() -> None:
    rows: list[Row] = [(None, bytes([n]) * 500_000, n, []) for n in range(4)]
    made = converted(kafka_batch(rows, compression="zstd", producer=(9, 0, 5)), 1 << 16)
    assert [(one.record_count, one.base_sequence) for one in made] == [(2, 5), (2, 7)]
    assert [row for one in made for row in read_ours(one.data)[1]] == rows
    assert max(len(one.data) for one in made) <= 1 << 16


def test_a_record_that_unpacks_to_too_much_is_refused_by_its_index() -> None:
    rows: list[Row] = [(None, b"x", 1, []), (None, b"x" * (2 << 20), 1, [])]
    with pytest.raises(KafkaRecordsError, match="record 1 of the batch is too large") as refused:
        converted(kafka_batch(rows, compression="zstd"), 1 << 16)
    assert refused.value.code == KafkaError.MESSAGE_TOO_LARGE


def test_the_batches_of_a_partition_unpack_to_a_bounded_size_together() -> None:
    records = kafka_batch([(None, bytes(30 << 20), 1, [])], compression="zstd")
    with pytest.raises(KafkaRecordsError, match="unpack to more than") as refused:
        converted(records * 3, 64 << 20)
    assert (refused.value.code, refused.value.batch_index) == (KafkaError.MESSAGE_TOO_LARGE, 2)


def test_a_record_without_a_timestamp_gets_the_time_of_the_appliance() -> None:
    records = with_fields(kafka_batch([(b"k", b"v", 5, [])]), base_ms=-1)
    _, rows = read_ours(converted(records)[0].data)
    assert rows[0][2] == NOW_US // 1000


def test_a_null_key_is_refused_where_a_key_is_required() -> None:
    with pytest.raises(KafkaRecordsError, match="record 1 of the batch has no key") as refused:
        to_batches(
            kafka_batch(ROWS), seed=SEED, now_us=0, max_message_bytes=1 << 20, requires_key=True
        )
    assert (refused.value.code, refused.value.record_index) == (KafkaError.INVALID_RECORD, 1)


@pytest.mark.parametrize(
    ("fields", "code", "sentence"),
    [
        ({"magic": 1}, KafkaError.INVALID_RECORD, "magic 1"),
        ({"magic": 3}, KafkaError.INVALID_RECORD, "magic 3"),
        ({"attributes": 32}, KafkaError.INVALID_RECORD, "control"),
        ({"attributes": 8}, KafkaError.INVALID_TIMESTAMP, "LogAppendTime"),
        ({"attributes": 64}, KafkaError.INVALID_RECORD, "unknown attributes 0x0040"),
        ({"attributes": -32768}, KafkaError.INVALID_RECORD, "unknown attributes 0x8000"),
        ({"attributes": 5}, KafkaError.UNSUPPORTED_COMPRESSION_TYPE, "compression 5"),
        ({"attributes": 1}, KafkaError.CORRUPT_MESSAGE, "gzip data"),
        ({"attributes": 2}, KafkaError.CORRUPT_MESSAGE, "snappy data"),
        ({"attributes": 3}, KafkaError.CORRUPT_MESSAGE, "lz4 data"),
        ({"attributes": 4}, KafkaError.CORRUPT_MESSAGE, "zstd data"),
        ({"length": 10}, KafkaError.CORRUPT_MESSAGE, "claims 10 bytes"),
        ({"length": -1}, KafkaError.CORRUPT_MESSAGE, "claims -1 bytes"),
        ({"length": 2**31 - 1}, KafkaError.CORRUPT_MESSAGE, "claims 2147483647 bytes"),
        ({"record_count": 0, "last_offset_delta": -1}, KafkaError.INVALID_RECORD, "claims 0"),
        ({"record_count": 4}, KafkaError.INVALID_RECORD, "delta must be one less"),
        ({"record_count": 4, "last_offset_delta": 3}, KafkaError.CORRUPT_MESSAGE, "count does"),
        ({"record_count": 6, "last_offset_delta": 5}, KafkaError.CORRUPT_MESSAGE, "bytes"),
        (
            {"record_count": 2**31 - 1, "last_offset_delta": 2**31 - 2},
            KafkaError.CORRUPT_MESSAGE,
            "claims 2147483647 records",
        ),
        ({"base_ms": 2**63 - 1}, KafkaError.INVALID_TIMESTAMP, "record 0"),
        ({"base_ms": -(2**63)}, KafkaError.INVALID_TIMESTAMP, "record 0"),
        ({"producer_id": -2}, KafkaError.INVALID_RECORD, "producer id -2"),
        ({"producer_id": 4}, KafkaError.INVALID_RECORD, "epoch -1"),
        ({"attributes": 16}, KafkaError.INVALID_RECORD, "in a transaction"),
        (
            {"attributes": 16, "producer_id": 4, "producer_epoch": 0, "base_sequence": 0},
            KafkaError.INVALID_PRODUCER_ID_MAPPING,
            "not that of a transactional producer",
        ),
        (
            {"producer_id": TRANSACTIONAL_ID, "producer_epoch": 0, "base_sequence": 0},
            KafkaError.INVALID_TXN_STATE,
            "outside a transaction",
        ),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    fields: dict[str, int], code: KafkaError, sentence: str
) -> None:
    good = kafka_batch(ROWS)
    with pytest.raises(KafkaRecordsError, match=sentence) as refused:
        converted(good + with_fields(good, **fields))
    assert (refused.value.code, refused.value.batch_index) == (code, 1)


def test_a_wrong_checksum_is_refused() -> None:
    batch = kafka_batch(ROWS)
    batch[-1] ^= 1
    with pytest.raises(KafkaRecordsError, match="CRC32C") as refused:
        converted(batch)
    assert refused.value.code == KafkaError.CORRUPT_MESSAGE


@pytest.mark.parametrize("length", [0, 1, 16, 17, 60, 61, 100])
def test_a_batch_that_is_cut_off_is_refused(length: int) -> None:
    with pytest.raises(KafkaRecordsError):
        converted(kafka_batch(ROWS)[:length])


@pytest.mark.parametrize("compression", ["snappy", "lz4", "zstd"])
def test_memory_that_is_used_again_shows_nothing_of_earlier_records(compression: str) -> None:
    large: list[Row] = [(b"k", b"secret " * 40_000, 1, [])]
    for rows in (large, ROWS, large, ROWS[:1]):
        (batch,) = converted(kafka_batch(rows, compression=compression))
        assert read_ours(batch.data)[1] == rows


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_a_compressed_bomb_is_refused(compression: str) -> None:
    records = kafka_batch([(None, bytes(65 << 20), 1, [])], compression=compression)
    with pytest.raises(KafkaRecordsError, match="unpack to more than 67108864 bytes") as refused:
        converted(records)
    assert refused.value.code == KafkaError.MESSAGE_TOO_LARGE


def _record(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes((2 * len(body),)) + body


START = b"\0\0\0"  # attributes, timestamp delta, offset delta


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        (_record(START, b"\x01\x01\x00", b"!"), "bytes behind its headers"),
        (_record(START, b"\x03\x01\x00", b"!!"), "a length below -1"),
        (_record(START, b"\x01\x03\x00", b"!!"), "a length below -1"),
        (_record(START, b"\x7e\x01\x00", b"!!"), "longer than the bytes"),
        (_record(START, b"\x01\x01\x01", b"!!"), "more headers"),
        (_record(START, b"\x01\x01\x7e", b"!!"), "more headers"),
        (_record(START, b"\x01\x01\x02\x01\x00"), "without a key"),
        (_record(START, b"\x01\x01\x02\x02\xff\x00"), "not UTF-8"),
        (_record(b"\0\0\x02", b"\x01\x01\x00"), "offset delta"),
        (_record(b"\0", b"\x80" * 10, b"\0\0\0\0"), "too many bytes"),
        (_record(b"\0\0", b"\xff" * 5, b"\0\0\0\0"), "too many bytes"),
        (b"\x01" + START + b"\x01\x01\x00", "a length below -1"),
        (b"\x7e" + START + b"\x01\x01\x00", "longer than the bytes"),
        (b"\x80\x80\x80\x80\x80\x80\x80", "too many bytes"),
        (b"\x80\x80\x80\x80\x7f\x80\x80", "too many bytes"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(record: bytes, sentence: str) -> None:
    empty = kafka_batch([(None, None, 1, [])])[:61]
    records = with_fields(empty + record, length=49 + len(record))
    with pytest.raises(KafkaRecordsError, match=sentence) as refused:
        converted(records)
    assert refused.value.record_index == 0
