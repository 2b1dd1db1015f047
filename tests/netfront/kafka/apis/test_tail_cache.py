"""The cache of the log's end serves what the producer sent, and nothing that is not in the log."""

from __future__ import annotations

import dataclasses
import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from netfront.kafka.apis.cluster.leader_epochs import to_kafka
from netfront.kafka.apis.records import conversion
from netfront.kafka.apis.records import tail_cache as module
from netfront.kafka.apis.records.conversion import convert_outgoing
from netfront.kafka.apis.records.tail_cache import TailCache
from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.compression import CODECS, pack
from netfront.kafka.records.incoming import to_batches
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_LOG_APPEND_TIME,
    BatchHeader,
    checksum_seed,
    header_position,
    read_header,
)
from tailrace.format.record_batch.header_stamps import stamp_appended
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.kernel.reference_kafka import put_cell, put_zigzag

TOPIC_ID = b"t" * 16
START_MS = 1_700_000_000_000
INCOMPRESSIBLE = random.Random(1).randbytes(2_048)


def kafka_batch(value: bytes, compression: str = "none", count: int = 1) -> bytes:
    records = bytearray()
    for row in range(count):
        record = bytearray(1)
        for number in (row, row):
            put_zigzag(record, number)
        for cell in (b"k", value):
            put_cell(record, cell)
        put_zigzag(record, 0)
        put_zigzag(records, len(record))
        records += record
    codec = CODECS.index(compression)
    batch = bytearray(layout.HEADER_BYTES) + pack(codec, memoryview(records))
    header = layout.KafkaHeader(
        attributes=codec, last_offset_delta=count - 1, base_ms=START_MS,
        max_ms=START_MS + count - 1, record_count=count,
    )  # fmt: skip
    layout.write_kafka_header(batch, header)
    return bytes(batch)


def route_with(**settings: Any) -> Any:
    return SimpleNamespace(
        topic_id=TOPIC_ID, partition=0, typed=False, settings=settings, older_schemas={},
        schema=to_message(DEFAULT_SCHEMA), schema_id=0, created_us=0,
    )  # fmt: skip


def in_log(sent: bytes, offset: int, epoch: int = 3) -> tuple[bytearray, BatchHeader]:
    """The batch of the log, at an offset."""
    (made,) = to_batches(
        sent, seed=checksum_seed(TOPIC_ID, 0), now_us=5, max_message_bytes=1 << 20
    )  # fmt: skip
    data = bytearray(made.data)
    with memoryview(data) as view:
        stamp_appended(
            view, header_position(view), read_header(data), base_offset=offset, append_time_us=-1,
            leader_epoch=epoch, durable_offset=0, seed=checksum_seed(TOPIC_ID, 0),
        )  # fmt: skip
    return data, read_header(data)


def test_a_cached_batch_has_its_place_and_a_valid_checksum() -> None:
    sent, cache, route = kafka_batch(b"a" * 100, "lz4", count=2), TailCache(), route_with()
    data, header = in_log(sent, 70)
    cache.add(route, 70, sent, data)
    found = convert_outgoing(route, memoryview(data), 1 << 20, "lz4", cache)
    read = layout.read_kafka_header(found.records)
    epoch = to_kafka(route, 3)
    assert (read.base_offset, read.leader_epoch, found.next_offset) == (70, epoch, 72)
    assert bytes(found.records[16:]) == sent[16:]
    with memoryview(found.records) as view:
        assert layout.crc_of(view) == read.crc
    assert cache.find(route, header, "none") is None
    again = convert_outgoing(route, memoryview(data), 1 << 20, "none", cache)
    assert layout.read_kafka_header(again.records).attributes == 0


def test_another_batch_at_the_same_offset_is_not_served() -> None:
    cache, route = TailCache(), route_with()
    sent = kafka_batch(b"lost")
    cache.add(route, 5, sent, in_log(sent, 5)[0])
    _, other = in_log(kafka_batch(b"kept"), 5)
    assert cache.find(route, other, "none") is None
    _, moved = in_log(sent, 6)
    assert cache.find(route, moved, "none") is None


@pytest.mark.parametrize("kind", ["LogAppendTime", "typed", "large", "two"])
def test_batches_that_readers_get_otherwise_are_not_kept(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, route, sent = TailCache(), route_with(), kafka_batch(b"a")
    data, header = in_log(sent, 0)
    if kind == "LogAppendTime":
        route = route_with(**{"message.timestamp.type": kind})
    elif kind == "typed":
        route.typed = True
    elif kind == "large":
        monkeypatch.setattr(module, "BATCH_MAX_BYTES", len(sent) - 1)
    else:
        sent += sent
    cache.add(route, 0, sent, data)
    assert cache.find(route, header, "none") is None
    assert cache.byte_count == 0


def test_the_oldest_batches_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, route, sent = TailCache(), route_with(), kafka_batch(b"a")
    room = 3 * (len(sent) + module.ENTRY_BYTES)
    monkeypatch.setattr(module, "BYTES_MAX", room)
    made = [in_log(sent, offset) for offset in range(5)]
    for turn in range(2):
        for offset, (data, _) in enumerate(made):
            cache.add(route, offset, sent, data)
        kept = [cache.find(route, header, "none") is not None for _, header in made]
        assert kept == [False, False, True, True, True], turn
        assert cache.byte_count == room


def test_small_batches_take_the_memory_that_is_counted() -> None:
    cache, route, sent = TailCache(), route_with(), kafka_batch(b"a")
    data, header = in_log(sent, 0)
    cache.add(route, 0, sent, data)  # what is made once is there
    count = 2_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for offset in range(1, count + 1):
            route.topic_id = bytes(bytearray(TOPIC_ID))  # as each route has its own
            cache.add(route, offset, sent, data)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before <= cache.byte_count
    assert cache.find(route, dataclasses.replace(header, base_offset=count), "none") is not None


def test_a_batch_with_the_time_of_the_log_is_converted() -> None:
    cache, route, sent = TailCache(), route_with(), kafka_batch(b"a")
    data, header = in_log(sent, 3)
    cache.add(route, 3, sent, data)
    assert cache.find(route, header, "none") is not None
    appended = dataclasses.replace(header, attributes=header.attributes | ATTRIBUTE_LOG_APPEND_TIME)
    assert cache.find(route, appended, "none") is None


def test_a_batch_that_was_packed_for_one_reader_is_not_packed_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, route = TailCache(), route_with()
    data, _ = in_log(kafka_batch(INCOMPRESSIBLE), 9)
    first = convert_outgoing(route, memoryview(data), 1 << 20, "lz4", cache)
    calls: list[Any] = []

    def note(*_: Any, **named: Any) -> bytes:
        calls.append(named)
        return b""

    monkeypatch.setattr(conversion, "from_batch", note)
    again = convert_outgoing(route, memoryview(data), 1 << 20, "lz4", cache)
    assert (again, calls) == (first, [])
    later, _ = in_log(kafka_batch(INCOMPRESSIBLE), 9, epoch=4)
    for batch, compression in ((later, "lz4"), (data, "zstd"), (data, "none")):
        convert_outgoing(route, memoryview(batch), 1 << 20, compression, cache)
    assert [named["compression"] for named in calls] == ["lz4", "zstd", "none"]


def test_packed_batches_have_their_room_and_leave_the_end_of_the_log_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache, route = TailCache(), route_with()
    made = [in_log(kafka_batch(INCOMPRESSIBLE), offset)[1] for offset in range(5)]
    packed = b"x" * module.PACKED_MIN_BYTES
    room = 3 * (len(packed) + module.ENTRY_BYTES)
    monkeypatch.setattr(module, "PACKED_MAX_BYTES", room)
    sent = kafka_batch(b"a")
    data, header = in_log(sent, 77)
    cache.add(route, 77, sent, data)
    for _ in range(2):
        for each in made:
            cache.add_packed(route, each, "lz4", packed)
        kept = [cache.find(route, each, "lz4") is not None for each in made]
        assert kept == [False, False, True, True, True]
        assert cache.packed_byte_count == room
    assert cache.find(route, header, "none") is not None
    typed = route_with()
    typed.typed = True
    for other, codec, one in (
        (route, "none", packed),
        (route, "lz4", packed[1:]),
        (typed, "lz4", packed),
    ):
        cache.add_packed(other, header, codec, one)
        assert cache.find(other, header, "lz4") is None
