"""Fetches at a front: what waits, is large or comes in numbers is answered, and costs other clients
nothing.
"""

from __future__ import annotations

import errno

import pytest

from netfront.fetch import fetch_progress
from netfront.fetch import fetch_service as fetches
from netfront.fetch import purgatory as purgatory
from netfront.fetch.throttled_fetches import CHECKS_PER_STEP
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import fetch_messages
from tests.kit.stepped.fronts import FakeClient, FakeFront


def test_waiting_fetches_are_bounded_for_a_connection_and_in_all(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.add_topic("t", 4_096)
    wide = [client.fetch(topic) for _ in range(5)]
    world.settle()
    heard = client.heard()
    assert list(heard) == wide[4:]
    assert heard[wide[4]][0] is ErrorCode.TOO_MANY_REQUESTS
    other = world.connect(b"other")
    for _ in range(purgatory.SESSION_FETCHES_MAX + 1):
        last = other.fetch(topic[:1])
    world.settle()
    assert list(other.heard()) == [last]
    monkeypatch.setattr(purgatory, "ENTRIES_MAX", world.front._fetches._purgatory.entry_count)
    third = world.connect(b"third")
    asked = third.fetch(topic[:1])
    world.settle()
    assert third.heard()[asked][0] is ErrorCode.TOO_MANY_REQUESTS
    assert (
        len(world.front._fetch_wheel)
        == world.front._fetches._purgatory.fetch_count
        == 4 + purgatory.SESSION_FETCHES_MAX
    )


def test_a_batch_that_settles_costs_a_wide_waiting_fetch_of_other_partitions_nothing(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 4_097)
    asked = [client.fetch(topic[1:], max_wait_ms=60_000) for _ in range(3)]
    world.settle()
    looks = world.log.looks
    world.append(topic[0])
    assert world.log.looks == looks, "it waits for other partitions"
    world.append(topic[9])
    assert world.log.looks - looks <= 3, "only the partition that moved is looked at"
    world.settle()
    answers = client.heard()
    assert set(answers) == set(asked)
    entries = fetch_messages.decode_fetched(answers[asked[0]][1])
    assert [bytes(data) for _, data in entries if len(data)] == [b"x"]
    assert len(entries) == 4_096


def test_thousands_that_wait_for_one_batch_are_answered_in_slices(world: FakeFront) -> None:
    topic = world.add_topic("t", 1)
    clients = [world.connect(b"c%d" % number) for number in range(3)]
    for client in clients:
        for _ in range(purgatory.SESSION_FETCHES_MAX):
            client.fetch(topic)
    world.settle()
    world.append(topic[0])
    first = sum(len(client.heard()) for client in clients)
    assert 0 < first <= CHECKS_PER_STEP
    world.append(topic[0], b"yy")
    world.settle()
    assert (
        first + sum(len(client.heard()) for client in clients) == 3 * purgatory.SESSION_FETCHES_MAX
    )
    assert not world.front._fetches._moved


def test_fetches_of_a_dropped_partition_are_answered_and_forgotten(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 2)
    world.append(topic[1])
    served = client.fetch(topic[1:])
    waiting = [client.fetch(topic[:1], max_wait_ms=60_000) for _ in range(50)]
    wide = client.fetch([*topic[:1], *world.add_topic("u", 100)], max_wait_ms=60_000)
    world.settle()
    assert set(client.heard()) == {served}
    service = world.front._fetches
    assert service._entries._place_count == 1
    for assignment in topic:
        dropped = {field: getattr(assignment, field) for field in assignment.__dataclass_fields__}
        world.controller.tell(type(assignment)(**{**dropped, "dropped": True, "version": 99}))
    world.settle()
    heard = client.heard()
    assert set(heard) == {*waiting, wide}
    assert (
        fetch_messages.decode_fetched(heard[waiting[0]][1])[0][0].error
        == ErrorCode.UNKNOWN_TOPIC_ID
    )
    assert {entry.error for entry, _ in fetch_messages.decode_fetched(heard[wide][1])} == {
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.OK,
    }
    assert not service._purgatory._by_slot
    assert not service._purgatory.fetch_count
    assert not len(world.front._fetch_wheel)
    assert not service._entries._places
    assert service._entries._place_count == 0


def test_a_fetch_waits_until_its_client_has_read_what_it_was_sent(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0])
    world.transport.unsent[client.identity] = fetch_progress.SESSION_UNSENT_MAX_BYTES
    for _ in range(10):
        client.fetch(topic, max_wait_ms=0)
    world.step()
    for _ in range(200):
        world.step(after_ms=5)
    assert not client.heard(), "neither its data nor empty answers pile up"
    world.transport.unsent[client.identity] = 0
    world.step(after_ms=5)
    world.settle()
    assert len(client.heard()) == 10
    assert (
        world.front._fetches.next_deadline_ns() > world.now_ns
        or not world.front._fetches._throttled.fetches
    )


def test_when_all_clients_have_much_unread_who_has_nothing_gets_little_and_nobody_much(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 1)
    for _ in range(10):
        world.append(topic[0], bytes(200_000))
    world.transport.others_unsent = fetch_progress.UNSENT_MAX_BYTES
    asked = client.fetch(topic, max_bytes=4 << 20)
    world.settle()
    ((entry, data),) = fetch_messages.decode_fetched(client.heard()[asked][1])
    assert entry.error == 0
    assert 200_000 <= len(data) <= fetch_progress.SCARCE_BYTES
    world.transport.others_unsent = fetch_progress.UNSENT_HARD_MAX_BYTES
    asked = client.fetch(topic, max_bytes=4 << 20)
    for _ in range(10):
        world.step(after_ms=5)
    assert not client.heard()
    world.transport.others_unsent = 0
    world.step(after_ms=5)
    assert len(fetch_messages.decode_fetched(client.heard()[asked][1])[0][1]) == 2_000_000


def test_a_fetch_that_wants_more_bytes_counts_what_comes_and_reads_it_twice_at_most(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0], bytes(10))
    asked = client.fetch(topic, min_bytes=1_000, max_wait_ms=60_000)
    world.settle()
    for _ in range(98):
        world.append(topic[0], bytes(10))
    assert not client.heard()
    world.append(topic[0], bytes(10))
    ((_, data),) = fetch_messages.decode_fetched(client.heard()[asked][1])
    assert len(data) == 1_000


def test_a_fetch_that_wants_more_bytes_is_answered_with_what_there_is_when_its_time_is_up(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0], bytes(10))
    asked = client.fetch(topic, min_bytes=1_000, max_wait_ms=100)
    world.settle()
    world.append(topic[0], bytes(10))
    assert not client.heard()
    world.step(after_ms=101)
    assert len(fetch_messages.decode_fetched(client.heard()[asked][1])[0][1]) == 20


def test_a_fetch_that_names_a_partition_twice_is_refused(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 1)
    asked = client.fetch([*topic, *topic])
    world.settle()
    assert client.heard()[asked][0] is ErrorCode.INVALID_REQUEST


def test_cold_reads_hold_a_bounded_number_of_descriptors_and_the_others_wait_their_turn(
    world: FakeFront, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "READS_MAX", 4)
    topic = world.add_topic("t", 1)
    world.append(topic[0])
    world.log.is_cold = True
    asked = [client.fetch(topic) for _ in range(10)]
    world.settle()
    assert len(world.pool.submitted) == 4
    world.log.is_cold = False
    world.pool.done, world.pool.submitted = world.pool.submitted, []
    world.step()
    world.step(after_ms=5)
    world.settle()
    assert set(client.heard()) == set(asked)
    assert world.front._fetches._reading == 0


def test_a_fetch_that_meets_too_few_descriptors_is_told_to_ask_again(
    world: FakeFront, client: FakeClient
) -> None:
    topic = world.add_topic("t", 1)
    world.append(topic[0])
    world.log.failure = OSError(errno.EMFILE, "too many open files")
    asked = client.fetch(topic)
    world.settle()
    assert (
        fetch_messages.decode_fetched(client.heard()[asked][1])[0][0].error == ErrorCode.NOT_READY
    )
