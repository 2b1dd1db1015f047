"""Reads of logs with transactions at a front: what is open or aborted is not shown, and costs no
bytes.
"""

from __future__ import annotations

import logging
import random
import tracemalloc
from pathlib import Path

import pytest

from netfront.fetch.log import log_reader, transaction_indexes
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import read_header
from tailrace.format.record_batch.header_peek import frame_at
from tailrace.format.segments.segment import INDEX_SUFFIX
from tailrace.format.segments.transaction_index import (
    ENTRY,
    HEADER,
    TRANSACTION_INDEX_SUFFIX,
    AbortedTransaction,
    encode_entry,
)
from tailrace.protocol.fetch_messages import FETCH_UNCOMMITTED, FETCHED_GAPS
from tailrace.protocol.frame import Api
from tests.kit.batches import TIME_US
from tests.kit.log_files.file_fronts import KEY, FileFront
from tests.kit.log_files.transaction_logs import FIRST_ID, grow
from tests.kit.matrices import short
from tests.kit.stepped.fronts import FakeClient

SEEDS = short(range(12), *range(4))


@pytest.fixture
def world(tmp_path: Path) -> FileFront:
    return FileFront(tmp_path)


@pytest.fixture
def client(world: FileFront) -> FakeClient:
    return world.connect(b"client")


def offsets_in(data: memoryview) -> list[int]:
    """Offsets of the records in a response's batches."""
    found: list[int] = []
    at = 0
    while at < len(data):
        frame = frame_at(data, at, len(data))
        assert frame is not None
        header = read_header(data, at)
        found += range(header.base_offset, header.base_offset + header.record_count)
        at += frame[0]
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_sees_exactly_the_committed_records_from_any_offset_with_any_limit(
    world: FileFront, client: FakeClient, seed: int
) -> None:
    rng = random.Random(seed)
    log = world.logs[0]
    for _ in range(60):
        grow(rng, log)
    for _ in range(25):
        for isolation in (0, FETCH_UNCOMMITTED):
            world.files.is_cold = rng.random() < 0.2
            start = offset = rng.randrange(log.state.high_watermark + 1)
            seen: list[int] = []
            max_bytes = rng.choice((1, 900, 5_000, 1 << 20))
            end = log.state.last_stable_offset if not isolation else log.state.high_watermark
            while offset < end:
                entry, data = world.fetched(client, offset, flags=isolation, max_bytes=max_bytes)
                assert entry.error == 0
                assert entry.last_stable_offset == log.state.last_stable_offset
                seen += offsets_in(data)
                before, at = offset, 0
                while at < len(data):
                    frame = frame_at(data, at, len(data))
                    assert frame is not None
                    if frame[1] > offset:
                        assert entry.flags == FETCHED_GAPS
                    at, offset = at + frame[0], frame[2]
                if entry.resume_offset >= 0:
                    assert entry.resume_offset > offset
                    offset = entry.resume_offset
                assert offset > before, "each answer is progress"
            model = log.uncommitted(start) if isolation else log.committed(start)
            assert [each for each in seen if each >= start] == [number for number, _ in model]
        grow(rng, log)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("isolation_level", ["read_committed", "read_uncommitted"])
def test_a_consumer_gets_the_committed_records_in_order_while_the_log_grows(
    world: FileFront, seed: int, isolation_level: str
) -> None:
    rng = random.Random(seed)
    log = world.logs[0]
    for _ in range(10):
        grow(rng, log)
    log.append()
    with world.consumer(
        isolation_level=isolation_level,
        fetch_max_wait_ms=10,
        fetch_min_bytes=rng.choice((1, 1_000)),
        max_partition_fetch_bytes=rng.choice((1024, 4096, 1 << 20)),
        max_poll_records=rng.choice((1, 3, 500)),
    ) as consumer:
        seen: list[tuple[int, bytes]] = []
        for _ in range(40):
            for _ in range(rng.randrange(4)):
                grow(rng, log)
                world.settled()
            if rng.random() < 0.2:
                for batch in consumer.poll_arrow(timeout_ms=20):
                    values = batch.batch.column("value").to_pylist()
                    seen += list(zip(range(batch.base_offset, 1 << 62), values, strict=False))
            else:
                seen += [(record.offset, record.value) for record in consumer.poll(timeout_ms=20)]
            if rng.random() < 0.3:
                is_all = isolation_level == "read_uncommitted"
                end = log.state.high_watermark if is_all else log.state.last_stable_offset
                assert consumer.end_offsets([KEY])[KEY] == end
                assert consumer.lag(KEY) == end - consumer.position(KEY)
        for producer in list(log.open):
            log.end(producer, commit=rng.random() < 0.5)
        world.settled()
        end = log.state.high_watermark
        for _ in range(10_000):
            if consumer.position(KEY) == end:
                break
            seen += [(record.offset, record.value) for record in consumer.poll(timeout_ms=20)]
        assert consumer.position(KEY) == end
        assert consumer.lag(KEY) == 0
        assert seen == (
            log.uncommitted() if isolation_level != "read_committed" else log.committed()
        )


def test_an_open_transaction_holds_readers_and_a_later_offset_waits(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append()
    log.append(2, (1, 0))
    log.append()
    entry, data = world.fetched(client)
    assert offsets_in(data) == [0, 1, 2]
    assert (entry.high_watermark, entry.last_stable_offset) == (8, 3)
    for offset in (3, 4, 8):
        entry, data = world.fetched(client, offset)
        assert (entry.error, len(data), entry.resume_offset) == (0, 0, -1)
    assert world.fetched(client, 9)[0].error == ErrorCode.OFFSET_OUT_OF_RANGE
    entry, data = world.fetched(client, 3, flags=FETCH_UNCOMMITTED)
    assert offsets_in(data) == [3, 4, 5, 6, 7]


def test_a_waiting_fetch_is_answered_when_the_last_stable_offset_moves_and_not_before(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    waiting = client.fetch([log.route()], max_wait_ms=10_000)
    world.settle()
    log.append()
    world.settled()
    world.settle()
    assert not client.heard()
    log.end((1, 0), commit=True)
    world.settled()
    world.settle()
    assert waiting in client.heard()


def test_an_aborted_end_is_answered_as_soon_as_it_is_stable(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.append(2, (1, 0))
    log.end((1, 0), commit=False)
    entry, data = world.fetched(client, max_wait_ms=60_000, min_bytes=1 << 20)
    assert len(data), "the marker is sent"
    assert (offsets_in(data), entry.resume_offset, entry.flags) == ([], -1, FETCHED_GAPS)


def test_a_large_aborted_transaction_is_passed_over_in_few_answers_without_its_bytes(
    world: FileFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "LEFT_OUT_MAX_BYTES", 256 << 10)
    log = world.logs[0]
    for number in range(400):
        log.append(10, (1, 0), value_bytes=1_000, publish=False)
        if number % 100 == 99:
            log.roll()
    log.end((1, 0), commit=False)
    log.append(1)
    offset, answers, sent = 0, 0, 0
    seen: list[int] = []
    while offset < log.state.last_stable_offset:
        entry, data = world.fetched(client, offset, max_bytes=64 << 10)
        offset = max(entry.resume_offset, *(each + 1 for each in offsets_in(data)), offset)
        if entry.resume_offset < 0 and data:
            offset = log.state.last_stable_offset
        seen += offsets_in(data)
        answers += 1
        sent += len(data)
    assert seen == [log.state.high_watermark - 1]
    assert answers <= 30
    assert sent < 4_000


def test_a_large_aborted_batch_is_passed_over_by_its_header(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(3, (1, 0), value_bytes=1 << 20)
    log.append(3, (1, 0), value_bytes=1 << 20)
    log.end((1, 0), commit=False)
    log.append(2)
    entry, data = world.fetched(client, max_bytes=64 << 10)
    assert offsets_in(data) == [7, 8]
    assert entry.flags == FETCHED_GAPS
    assert world.files.read_bytes < 1 << 20


@pytest.mark.parametrize("harm", ["flipped entry", "flipped header", "missing", "cut"])
def test_a_transaction_without_an_intact_index_is_not_shown_and_logged_once(
    world: FileFront, client: FakeClient, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    log = world.logs[0]
    log.append()
    log.append(2, (1, 0))
    log.end((1, 0), commit=False)
    log.roll()
    log.append()
    match harm:
        case "flipped entry":
            log.damage(0, TRANSACTION_INDEX_SUFFIX, HEADER.size + 9)
        case "flipped header":
            log.damage(0, TRANSACTION_INDEX_SUFFIX, 9)
        case "missing":
            log.remove(0, TRANSACTION_INDEX_SUFFIX)
        case "cut":
            path = log.path(0, TRANSACTION_INDEX_SUFFIX)
            path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        entry, data = world.fetched(client)
        assert offsets_in(data) == [0, 1, 2], "what is before it is shown"
        for _ in range(3):
            entry, data = world.fetched(client, 3)
            assert (entry.error, len(data)) == (ErrorCode.NOT_READY, 0)
    assert caplog.text.count("transaction_index_damaged") == 1
    assert offsets_in(world.fetched(client, 6)[1]) == [6, 7, 8], "the next segment is readable"
    assert offsets_in(world.fetched(client, 3, flags=FETCH_UNCOMMITTED)[1])[:2] == [3, 4]


def test_a_repaired_index_is_read_again(world: FileFront, client: FakeClient) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.end((1, 0), commit=False)
    path = log.path(0, TRANSACTION_INDEX_SUFFIX)
    intact = path.read_bytes()
    path.unlink()
    assert world.fetched(client)[0].error == ErrorCode.NOT_READY
    path.write_bytes(intact)
    assert world.fetched(client)[0].error == 0


def test_an_index_is_read_again_in_a_new_leader_epoch(world: FileFront, client: FakeClient) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.append(2, (2, 0))
    log.end((1, 0), commit=False)
    log.end((2, 0), commit=True)
    assert offsets_in(world.fetched(client)[1]) == [2, 3]
    # Both markers were taken back and written again, the other way round.
    path = log.path(0, TRANSACTION_INDEX_SUFFIX)
    entry = AbortedTransaction(FIRST_ID + 2, 0, 2, 4)
    path.write_bytes(path.read_bytes()[: HEADER.size] + encode_entry(entry))
    log.state = log.state._replace(leader_epoch=1)
    assert offsets_in(world.fetched(client)[1]) == [0, 1]


def test_a_flipped_bit_in_the_header_of_an_aborted_batch_is_damage_not_a_gap(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.append(2, (1, 0))
    log.end((1, 0), commit=False)
    data = bytearray(log.path(0).read_bytes())
    at = len(log.schema)
    size = int.from_bytes(data[at + 4 : at + 8], "little")
    data[at + 8 + size - 136 + 64] ^= 1  # base_sequence
    log.path(0).write_bytes(data)
    entry, _ = world.fetched(client)
    assert (entry.error, entry.resume_offset) == (ErrorCode.CORRUPT_BATCH, 2)


def test_an_old_client_reads_what_it_can_and_hears_why_it_can_read_no_more(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append()
    log.append()
    log.append(2, (1, 0))
    log.end((1, 0), commit=True)
    entry, data = world.fetched(client, version=2)
    assert (entry.error, offsets_in(data)) == (0, [0, 1, 2, 3, 4, 5])
    assert (entry.last_stable_offset, entry.resume_offset) == (-1, -1)
    entry, _ = world.fetched(client, 6, version=2)
    assert entry.error == ErrorCode.UNSUPPORTED_VERSION


def test_a_log_without_an_abort_reads_no_transaction_index(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.end((1, 0), commit=True)
    log.remove(0, TRANSACTION_INDEX_SUFFIX)
    assert offsets_in(world.fetched(client)[1]) == [0, 1]


def test_the_index_of_a_removed_segment_is_closed(world: FileFront, client: FakeClient) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.end((1, 0), commit=False)
    log.roll()
    log.append()
    world.fetched(client)
    opened = world.log.files._open_files._open
    assert any(path.endswith(TRANSACTION_INDEX_SUFFIX) for path in opened)
    log.remove(0, TRANSACTION_INDEX_SUFFIX)
    log.remove(0, INDEX_SUFFIX)
    log.path(0).unlink()
    log.state = log.state._replace(log_start_offset=3, segment_count=1)
    world.fetched(client, 3)
    assert not any(path.endswith(TRANSACTION_INDEX_SUFFIX) for path in opened)
    assert not world.log.files._transactions._known


def test_a_later_abort_is_left_out_also_of_an_older_segment(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(1, (1, 0))
    log.end((1, 0), commit=False)
    log.append(2, (2, 0))
    log.roll()
    log.append(1)
    assert offsets_in(world.fetched(client)[1]) == []
    log.end((2, 0), commit=False)
    assert offsets_in(world.fetched(client, 2)[1]) == [4]


def test_what_was_read_ahead_ends_where_an_open_transaction_began(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    for _ in range(8):
        log.append(1, value_bytes=1_000)
    log.append(1, (1, 0), value_bytes=1_000)
    entry, data = world.fetched(client, max_bytes=5_000)
    offset = offsets_in(data)[-1] + 1
    log.end((1, 0), commit=False)
    log.append(1)
    seen = offsets_in(data)
    while offset < log.state.last_stable_offset:
        entry, data = world.fetched(client, offset, max_bytes=5_000)
        seen += offsets_in(data)
        offset = max([offset, entry.resume_offset, *(each + 1 for each in offsets_in(data))])
        if len(data) and entry.resume_offset < 0:
            frame_end = read_header(data, 0)
            offset = max(offset, frame_end.next_offset)
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 10]


@pytest.mark.parametrize("seed", short(range(6), *range(2)))
@pytest.mark.parametrize("isolation_level", ["read_committed", "read_uncommitted"])
def test_a_search_by_time_finds_no_aborted_and_no_open_record(
    world: FileFront, seed: int, isolation_level: str
) -> None:
    rng = random.Random(seed)
    log = world.logs[0]
    for _ in range(40):
        grow(rng, log)
    is_all = isolation_level == "read_uncommitted"
    records = log.uncommitted() if is_all else log.committed()
    with world.consumer(isolation_level=isolation_level) as consumer:
        for offset in range(log.state.high_watermark + 1):
            first = next((number for number, _ in records if number >= offset), None)
            found = consumer.offsets_for_times({KEY: TIME_US // 1000 + offset})[KEY]
            assert (None if found is None else found.offset) == first


def test_a_search_by_time_in_a_segment_without_its_index_is_not_answered(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.end((1, 0), commit=False)
    log.append(1)
    log.remove(0, TRANSACTION_INDEX_SUFFIX)
    asked = {"topic": "t", "partition": 0, "at": TIME_US}
    _, answer = client.ask(Api.LIST_OFFSETS, {"partitions": [asked]})
    assert answer["offsets"][0]["code"] == ErrorCode.NOT_READY
    isolation = {"isolation": "read_uncommitted"}
    _, answer = client.ask(Api.LIST_OFFSETS, {"partitions": [asked], **isolation})
    assert answer["offsets"][0]["offset"] == 0


def test_ends_follow_the_isolation_level_of_the_request(
    world: FileFront, client: FakeClient
) -> None:
    log = world.logs[0]
    log.append(2)
    log.append(2, (1, 0))
    ends = []
    for isolation in ({}, {"isolation": "read_committed"}, {"isolation": "read_uncommitted"}):
        asked = [{"topic": "t", "partition": 0, "at": "latest"}]
        _, answer = client.ask(Api.LIST_OFFSETS, {"partitions": asked, **isolation})
        found = answer["offsets"][0]
        ends.append((found["offset"], found["end"], found["high_watermark"]))
    assert ends == [(2, 2, 4), (2, 2, 4), (4, 4, 4)]
    code, _ = client.ask(Api.LIST_OFFSETS, {"partitions": [], "isolation": "serializable"})
    assert code is ErrorCode.MALFORMED_REQUEST


def test_positions_pass_over_markers_without_a_poll_that_returns_something(
    world: FileFront,
) -> None:
    log = world.logs[0]
    log.append(2, (1, 0))
    log.end((1, 0), commit=True)
    with world.consumer(fetch_max_wait_ms=10) as consumer:
        assert [record.offset for record in consumer.poll(timeout_ms=100)] == [0, 1]
        assert consumer.position(KEY) == 3
        log.append(2, (1, 1))
        log.end((1, 1), commit=False)
        world.settled()
        assert consumer.poll(timeout_ms=100) == []
        assert (consumer.position(KEY), consumer.lag(KEY)) == (6, 0)


def test_every_way_of_reading_leaves_aborted_records_out(world: FileFront) -> None:
    log = world.logs[0]
    for number in range(6):
        log.append(2, (1, number))
        log.end((1, number), commit=number % 2 == 0)
    model = log.committed()
    with world.consumer(fetch_max_wait_ms=10) as consumer:
        seen = []
        for record in consumer:
            seen.append((record.offset, record.value))
            if len(seen) == len(model):
                break
        assert seen == model
        consumer.seek_to_beginning(KEY)
        assert [record.offset for record in consumer.consume(6, timeout=1.0)] == [
            offset for offset, _ in model
        ]
        consumer.seek_to_beginning(KEY)
        seen = []
        while len(seen) < len(model):
            for batch in consumer.poll_arrow(timeout_ms=100):
                values = batch.batch.column("value").to_pylist()
                seen += list(zip(range(batch.base_offset, 1 << 62), values, strict=False))
        assert seen == model


def test_a_large_index_is_read_in_pieces_between_which_others_are_served(
    world: FileFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction_indexes, "_PIECE_BYTES", 4 * ENTRY.size)
    log = world.logs[0]
    for number in range(20):
        log.append(1, (1, number))
        log.end((1, number), commit=False)
    log.append(1)
    entry, data = world.fetched(client)
    assert (entry.error, offsets_in(data)) == (0, [40])
    assert world.pieces_read == 4, "the fifth piece is followed by the answer"
    asked = [{"topic": "t", "partition": 0, "at": TIME_US}]
    world.log.files._transactions.forget_below("")
    _, answer = client.ask(Api.LIST_OFFSETS, {"partitions": asked})
    assert answer["offsets"][0]["offset"] == 40


@pytest.mark.long
@pytest.mark.slow_because("it makes and reads an index of a million entries")
def test_a_segment_with_a_million_aborted_transactions_is_read_in_pieces_and_bounded_memory(
    world: FileFront, client: FakeClient
) -> None:
    count = 1 << 20
    log = world.logs[0]
    log.append(1, (1, 0))
    log.end((1, 0), commit=False)
    log.append(1)
    with Path(log.path(0, TRANSACTION_INDEX_SUFFIX)).open("ab") as index:
        for first in range(0, count, 1 << 16):
            index.write(
                b"".join(
                    encode_entry(
                        AbortedTransaction(FIRST_ID + 2 + n // 32_768, n % 32_768, 2 * n, 2 * n + 1)
                    )
                    for n in range(first, first + (1 << 16))
                )
            )
    tracemalloc.start()
    entry, data = world.fetched(client)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (entry.error, offsets_in(data)) == (0, [2])
    assert world.pieces_read == count // transaction_indexes.ENTRIES_AT_ONCE
    assert taken < 128 * count, "bytes an entry"
