"""PRODUCE at a front: requests of many batches, what becomes of each, one answer for all, and what
they may cost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from netfront.produce import produce_service as produce_service
from netfront.produce.pending_produces import TOKEN_INDEX_BITS
from netfront.produce.produce_service import OVERDRAFT_BYTES
from netfront.produce.ring_acks import AckWalker
from netfront.socket.flow_control import CreditLedger
from shm.memory.layout import FLAG_DUPLICATE, ProcessWord
from shm.messages.lane_messages import Assignment
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import produce_messages
from tests.kit.stepped.fronts import FakeClient, FakeFront, message_of
from tests.kit.stepped.produce import TIMED_OUT, batch, codes, number_of, produced

LANE_BYTES = 1 << 16


@pytest.fixture
def world() -> FakeFront:
    return FakeFront(2, LANE_BYTES)


@pytest.fixture
def topic(world: FakeFront) -> list[Assignment]:
    """Even partitions are with worker 0, odd ones with worker 1."""
    return world.add_topic("t", 4)


def waiting_count(world: FakeFront) -> int:
    return len(world.front._produce_service._pending_produces)


# ---- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("acks", [1, produce_messages.ACKS_ALL])
def test_answers_stand_in_the_order_of_the_request_whatever_order_they_come_in(
    world: FakeFront, client: FakeClient, topic: list[Assignment], acks: int
) -> None:
    asked = client.produce([(topic[p % 4], batch(p)) for p in range(8)], acks=acks)
    world.settle()
    expected = {}
    for worker in reversed(world.workers):
        for message, data in worker.acquire_all():
            assert asked not in client.heard()
            expected[number_of(data)] = worker.answer(message)
            world.step()
    world.settle()
    entries = produced(client.heard()[asked])
    assert [entry.base_offset for entry in entries] == [expected[number] for number in range(8)]
    assert all(
        entry == (0, 0, 3, entry.base_offset, 1_000 + entry.base_offset) for entry in entries
    )
    assert not waiting_count(world)


def test_what_a_worker_refuses_and_what_it_has_already_is_said_of_that_batch(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    asked = client.produce([(topic[0], batch(n)) for n in range(3)], acks=produce_messages.ACKS_ALL)
    world.settle()
    (first, _), (second, _), (third, _) = world.workers[0].acquire_all()
    world.workers[0].answer(first, flags=FLAG_DUPLICATE)
    world.workers[0].answer(second, ErrorCode.OUT_OF_ORDER_SEQUENCE)
    world.workers[0].answer(third)
    world.settle()
    entries = produced(client.heard()[asked])
    assert [(entry.error, entry.flags) for entry in entries] == [
        (0, produce_messages.PRODUCED_DUPLICATE),
        (ErrorCode.OUT_OF_ORDER_SEQUENCE, 0),
        (0, 0),
    ]


def test_a_request_that_times_out_says_what_is_known_and_is_not_answered_again(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    asked = client.produce(
        [(topic[0], batch(0)), (topic[1], batch(1)), (topic[2], batch(2))], timeout_ms=100
    )
    world.settle()
    assert world.workers[0].work() == 2
    world.settle()
    assert asked not in client.heard()
    world.step(101)
    entries = produced(client.heard()[asked])
    assert [entry.base_offset for entry in entries] == [0, -1, 1]
    assert entries[1] == TIMED_OUT
    assert world.workers[1].work() == 1
    world.settle()
    assert not client.heard(), "a late answer is dropped"
    assert not waiting_count(world)
    again = client.produce([(topic[1], batch(1))])
    world.settle()
    world.workers[1].work()
    world.settle()
    assert codes(client.heard()[again]) == [ErrorCode.OK]


def test_a_second_answer_to_the_same_batch_does_not_stand_for_another(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    asked = client.produce([(topic[0], batch(0)), (topic[1], batch(1))])
    world.settle()
    ((message, _),) = world.workers[0].acquire_all()
    for code in (ErrorCode.OK, ErrorCode.STORAGE_ERROR):
        world.workers[0].answer(message, code)
        world.settle()
    beyond = message._replace(correlation_id=message.correlation_id + 2)
    world.workers[0].answer(beyond)
    world.settle()
    assert asked not in client.heard()
    world.workers[1].work()
    world.settle()
    assert codes(client.heard()[asked]) == [ErrorCode.OK, ErrorCode.OK]


def test_answers_of_one_walk_over_all_rings_leave_behind_it(
    world: FakeFront, client: FakeClient, topic: list[Assignment], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {client.produce([(topic[n % 2], batch(n))]) for n in range(6)}
    world.settle()
    assert [worker.work() for worker in world.workers] == [3, 3]
    sent_before_the_end = []
    walk = AckWalker.walk

    def watched(walker: AckWalker, *arguments: Any) -> int:
        passed = walk(walker, *arguments)
        sent_before_the_end.append(len(client.heard()))
        return passed

    monkeypatch.setattr(AckWalker, "walk", watched)
    world.step()
    assert sent_before_the_end == [0, 0]
    assert set(client.heard()) == asked


# ---- what is refused -----------------------------------------------------------------------------


def test_a_batch_that_goes_nowhere_costs_the_others_nothing(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    unknown = replace(topic[0], topic_id=b"?" * 16)
    beyond = replace(topic[0], partition=4)
    delayed = replace(topic[3], partition=0, topic_id=b"d" * 16, delay_of="t", slot=90, version=90)
    slotted = replace(
        topic[3], partition=0, topic_id=b"s" * 16, slot_counts=[1], slot=91, version=91
    )
    world.routing.apply(delayed)
    world.routing.apply(slotted)
    refused_before = world.slot.load(ProcessWord.REFUSED_COUNT)
    asked = client.produce(
        [(topic[0], batch(0)), (unknown, batch(1)), (beyond, batch(2)), (topic[1], b""),
        (topic[1], batch(4, 2_000)), (delayed, batch(5)), (slotted, batch(6)),
         (slotted, b""), (topic[0], batch(8))]
    )  # fmt: skip
    world.settle()
    taken = world.workers[0].acquire_all()
    assert [number_of(data) for _, data in taken] == [0, 8]
    assert not world.workers[1].acquire_all()
    for message, _ in taken:
        world.workers[0].answer(message)
    world.settle()
    assert codes(client.heard()[asked]) == [
        ErrorCode.OK, ErrorCode.UNKNOWN_TOPIC, ErrorCode.PARTITION_OUT_OF_RANGE,
        ErrorCode.UNSUPPORTED_BATCH, ErrorCode.RECORD_TOO_LARGE,
        ErrorCode.DELAY_NOT_ENABLED, ErrorCode.INVALID_REQUEST, ErrorCode.INVALID_REQUEST,
        ErrorCode.OK,
    ]  # fmt: skip
    assert world.slot.load(ProcessWord.REFUSED_COUNT) - refused_before == 7


def test_a_request_of_which_all_is_refused_is_answered_at_once(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    asked = client.produce([(replace(topic[0], partition=9), batch(0)), (topic[0], b"")])
    world.step()
    assert codes(client.heard()[asked]) == [
        ErrorCode.PARTITION_OUT_OF_RANGE,
        ErrorCode.UNSUPPORTED_BATCH,
    ]
    assert not waiting_count(world)


def test_a_route_that_has_changed_is_followed(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    for assignment, taken_by, code in (
        (topic[0], 0, ErrorCode.OK),
        (replace(topic[0], worker=1, version=9), 1, ErrorCode.OK),
        (
            replace(topic[0], version=10, settings={"max.message.bytes": 150}),
            None,
            ErrorCode.RECORD_TOO_LARGE,
        ),
        (replace(topic[0], version=11, dropped=True), None, ErrorCode.UNKNOWN_TOPIC),
    ):
        world.routing.apply(assignment)
        asked = client.produce([(topic[0], batch(1))])
        world.settle()
        assert [worker.work() for worker in world.workers] == [
            int(taken_by == number) for number in range(2)
        ]
        world.settle()
        assert codes(client.heard()[asked]) == [code]


def test_without_acks_nothing_is_answered_and_the_good_ones_are_appended(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    client.produce(
        [
            (topic[0], batch(0)),
            (topic[0], b""),
            (replace(topic[0], partition=9), batch(2)),
            (topic[1], batch(3)),
        ],
        acks=0,
    )
    world.settle()
    assert [[number_of(data) for _, data in worker.acquire_all()] for worker in world.workers] == [
        [0],
        [3],
    ]
    assert not client.heard()
    credit = world.front._sessions.all()[0].credit
    assert credit.received == credit.released == 600
    assert not waiting_count(world)


def test_4096_batches_are_taken_and_answered_together() -> None:
    world = FakeFront(2, 1 << 21, CreditLedger(1 << 23, 1 << 22, 1 << 21))
    topic, client = world.add_topic("t", 4), world.connect(b"client")
    asked = client.produce([(topic[n % 4], batch(n, 144)) for n in range(4_096)], timeout_ms=60_000)
    world.settle()
    assert [worker.work() for worker in world.workers] == [2_048, 2_048]
    world.settle()
    entries = produced(client.heard()[asked])
    assert [entry.base_offset for entry in entries] == [
        n // 4 * 2 + (n % 4) // 2 for n in range(4_096)
    ]


# ---- credit, room and memory ---------------------------------------------------------------------


def test_a_request_beyond_every_grant_is_refused_and_nothing_of_it_is_in_a_lane(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    credit = world.front._sessions.all()[0].credit
    size = 1_000
    count = (credit.granted + OVERDRAFT_BYTES) // size + 1
    asked = client.produce([(topic[n % 4], batch(n, size)) for n in range(count)])
    world.settle()
    assert client.heard()[asked][0] is ErrorCode.CREDIT_EXCEEDED
    assert not any(worker.acquire_all() for worker in world.workers)
    assert credit.received == credit.released == count * size
    assert not waiting_count(world)


def test_a_full_lane_holds_back_its_own_batches_their_credit_and_their_answer_alone(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    fill = LANE_BYTES // 1_088  # what a batch of 1,000 bytes takes in a lane
    filled = client.produce(
        [(topic[0], batch(n, 1_000)) for n in range(fill)],
        acks=produce_messages.ACKS_ALL,
        timeout_ms=60_000,
    )
    world.settle()
    credit = world.front._sessions.all()[0].credit
    assert credit.received == credit.released
    mixed = client.produce([(topic[p], batch(100 + p, 1_000)) for p in (0, 1, 2, 3)])
    behind = client.produce([(topic[0], batch(200, 1_000))])
    other = client.produce([(topic[1], batch(300, 1_000))])
    world.settle()
    assert credit.received - credit.released == 3_000
    waiting = world.front._produce_service._workers[0].outbox.waiting
    assert [number_of(bytes(item.batch)) for item in waiting] == [100, 102, 200]
    assert all(type(item.batch) is bytes and len(item.batch) == 1_000 for item in waiting), (
        "what waits does not hold its request's frame"
    )
    assert world.workers[1].work() == 3
    world.settle()
    heard = client.heard()
    assert codes(heard[other]) == [ErrorCode.OK]
    assert {filled, mixed, behind}.isdisjoint(heard)
    found = []
    while taken := world.workers[0].acquire_all():
        for message, data in taken:
            found.append(number_of(data))
            world.workers[0].answer(message)
        world.settle()
    assert found == [*range(fill), 100, 102, 200]
    heard = client.heard()
    assert codes(heard[mixed]) == [ErrorCode.OK] * 4
    assert {filled, mixed, behind} == set(heard)
    assert credit.received == credit.released


@pytest.mark.parametrize("of_one", [True, False])
def test_batches_without_an_answer_are_bounded_and_a_request_beyond_is_refused_as_a_whole(
    world: FakeFront, client: FakeClient, topic: list[Assignment], of_one: bool
) -> None:
    pending_produces = world.front._produce_service._pending_produces
    pending_produces._session_max, pending_produces._all_max = (5, 100) if of_one else (100, 5)
    first = client if of_one else world.connect(b"other")
    held = first.produce([(topic[n % 4], batch(n)) for n in range(3)])
    refused = client.produce([(topic[n % 4], batch(n)) for n in range(3)])
    taken = client.produce([(topic[n % 4], batch(n)) for n in range(2)])
    world.settle()
    answer = client.heard()[refused]
    assert answer[0] is ErrorCode.TOO_MANY_REQUESTS
    assert "3 batches of " in message_of(answer)
    assert sum(worker.work() for worker in world.workers) == 5
    world.settle()
    assert {taken, held} <= {*client.heard(), *first.heard()}
    assert pending_produces.batch_count == 0


def test_the_limits_leave_room_for_five_requests_to_every_partition_there_may_be() -> None:
    assert 5 * 4_096 < produce_service.SESSION_PRODUCES_MAX < produce_service.PRODUCES_MAX
    assert produce_messages.PRODUCE_BATCHES_MAX <= 1 << TOKEN_INDEX_BITS


def test_a_client_that_goes_in_the_middle_leaves_nothing_and_its_batches_are_appended(
    world: FakeFront, client: FakeClient, topic: list[Assignment]
) -> None:
    for number in range(3):
        client.produce([(topic[p], batch(4 * number + p)) for p in range(4)], timeout_ms=100)
    world.settle()
    ((message, _), *_) = world.workers[0].acquire_all()
    world.workers[0].answer(message)
    world.settle()
    world.front._session_lifecycle.drop(world.front._sessions.all()[0])
    assert not waiting_count(world)
    assert world.workers[1].work() == 6
    world.step(200)
    world.settle()
    assert not client.heard()


def test_an_unexpected_error_in_the_middle_costs_this_request_alone(
    world: FakeFront, client: FakeClient, topic: list[Assignment], monkeypatch: pytest.MonkeyPatch
) -> None:
    world.routing.apply(replace(topic[1], version=9, settings={}))
    asked = client.produce([(topic[0], batch(0)), (topic[1], batch(1)), (topic[2], batch(2))])
    good = client.produce([(topic[2], batch(3))])
    world.settle()
    assert world.workers[0].work() == 2
    world.settle()
    heard = client.heard()
    assert heard[asked][0] is ErrorCode.INTERNAL_ERROR
    assert codes(heard[good]) == [ErrorCode.OK]
