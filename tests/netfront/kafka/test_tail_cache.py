"""The cache of the log's end serves what the producer sent, and nothing that is not in the log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from netfront.kafka.apis.records import tail_cache as module
from netfront.kafka.apis.records.conversion import convert_outgoing
from netfront.kafka.apis.records.tail_cache import TailCache
from netfront.kafka.records import batch_layout as layout
from netfront.kafka.records.compression import CODECS, pack
from netfront.kafka.records.incoming import to_batches
from tailrace.format.record_batch.batch_header import (
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
        schema=to_message(DEFAULT_SCHEMA), schema_id=0,
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
    assert (read.base_offset, read.leader_epoch, found.next_offset) == (70, 3, 72)
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
    monkeypatch.setattr(module, "BYTES_MAX", 3 * len(sent))
    made = [in_log(sent, offset) for offset in range(5)]
    for turn in range(2):
        for offset, (data, _) in enumerate(made):
            cache.add(route, offset, sent, data)
        kept = [cache.find(route, header, "none") is not None for _, header in made]
        assert kept == [False, False, True, True, True], turn
        assert cache.byte_count == 3 * len(sent)
