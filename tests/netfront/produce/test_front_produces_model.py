"""PRODUCE at a front, at random: three clients that come and go, two workers, lanes that fill up,
timeouts; held against a model of who is told what.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from netfront.socket.flow_control import CreditLedger
from shm.queues.lane import LaneMessage
from tailrace.core.error_codes import ErrorCode
from tests.kit.matrices import short
from tests.kit.stepped.fronts import FakeClient, FakeFront
from tests.kit.stepped.produce import TIMED_OUT, batch, number_of, produced


@dataclass
class _Sent:
    """A request, and what should be answered."""

    numbers: list[int]
    deadline_ns: int
    expected: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Place -> (error, offset)."""


class _Model:
    """Three clients, two workers; who has been told what."""

    def __init__(self) -> None:
        self.world = FakeFront(2, 1 << 13, CreditLedger(1 << 22, 1 << 22, 1 << 20))
        self.topic = self.world.add_topic("t", 4)
        self.generations = [0, 0, 0]
        self.clients = [self._connect(number) for number in range(3)]
        self.sent: dict[tuple[bytes, int], _Sent] = {}
        """(identity, correlation id) -> a request that is not answered."""
        self.place_of: dict[int, tuple[tuple[bytes, int], int]] = {}
        self.order: dict[int, list[int]] = {p: [] for p in range(4)}
        """Partition -> numbers of batches, as they have to come."""
        self.next_number = 1

    def _connect(self, number: int) -> FakeClient:
        return self.world.connect(b"%d.%d" % (number, self.generations[number]))

    def send(self, client: int, acks: int, timeout_ms: int, batches: list[tuple[int, int]]) -> None:
        made = []
        numbers: list[int] = []
        request = _Sent(numbers, self.world.now_ns + timeout_ms * 1_000_000)
        for place, (partition, size) in enumerate(batches):
            number, self.next_number = self.next_number, self.next_number + 1
            numbers.append(number)
            made.append((replace(self.topic[0], partition=partition), batch(number, size)))
            code = ErrorCode.OK
            if partition > 3:
                code = ErrorCode.PARTITION_OUT_OF_RANGE
            elif size > 1_024:
                code = ErrorCode.RECORD_TOO_LARGE
            elif size < 137:
                code = ErrorCode.UNSUPPORTED_BATCH
            if code is ErrorCode.OK:
                self.order[partition].append(number)
            else:
                request.expected[place] = int(code), -1
        key = (
            self.clients[client].identity,
            self.clients[client].produce(made, acks=acks, timeout_ms=timeout_ms),
        )
        for place, number in enumerate(numbers):
            self.place_of[number] = key, place
        if acks:
            self.sent[key] = request
        self.step()

    def work(self, worker: int, count: int, refuses: bool) -> None:
        fake = self.world.workers[worker]
        for _ in range(count):
            taken = fake.take()
            if taken is None:
                break
            self._answer(worker, *taken, refuses)
        self.step()

    def _answer(self, worker: int, message: LaneMessage, data: bytes, refuses: bool) -> None:
        number = number_of(data)
        partition = next(p for p in range(4) if self.topic[p].slot == message.slot)
        assert partition % 2 == worker
        assert self.order[partition].pop(0) == number, (
            "a partition's batches come in the order in which they were sent"
        )
        code = ErrorCode.CORRUPT_BATCH if refuses else ErrorCode.OK
        offset = self.world.workers[worker].answer(message, code)
        key, place = self.place_of[number]
        if key in self.sent:
            self.sent[key].expected[place] = int(code), offset

    def step(self, after_ms: int = 0) -> None:
        self.world.step(after_ms)
        self.world.settle()
        for client in self.clients:
            for correlation_id, answer in client.heard().items():
                self._check(self.sent.pop((client.identity, correlation_id)), answer)
        late = [
            request
            for request in self.sent.values()
            if request.deadline_ns <= self.world.now_ns - 1_000_000
        ]
        assert not late, "a request is answered when its timeout has passed"
        assert not [
            request
            for request in self.sent.values()
            if len(request.expected) == len(request.numbers)
        ], "all is known and not told"

    def _check(self, request: _Sent, answer: tuple[ErrorCode, list[bytes]]) -> None:
        entries = produced(answer)
        assert len(entries) == len(request.numbers)
        for place, found in enumerate(entries):
            if place in request.expected:
                assert (found.error, found.base_offset) == request.expected[place]
            else:
                assert found == TIMED_OUT
                assert self.world.now_ns >= request.deadline_ns

    def leave(self, client: int) -> None:
        session = self.world.front._sessions.by_identity(self.clients[client].identity)
        assert session is not None
        self.world.front._session_lifecycle.drop(session)
        self.sent = {
            key: request
            for key, request in self.sent.items()
            if key[0] != self.clients[client].identity
        }
        self.generations[client] += 1
        self.clients[client] = self._connect(client)


SIZES = (0, 100, 200, 200, 1_000, 1_020, 2_000)


@pytest.mark.parametrize("seed", short(range(100), *range(25)))
def test_whatever_comes_and_goes_every_request_is_answered_once_with_what_became_of_each_batch(
    seed: int,
) -> None:
    model, rng = _Model(), random.Random(seed)
    for _ in range(40):
        kind = rng.choices(("send", "work", "step", "leave"), (8, 8, 4, 1))[0]
        if kind == "send":
            batches = [(rng.randrange(6), rng.choice(SIZES)) for _ in range(rng.randrange(1, 13))]
            model.send(rng.randrange(3), rng.choice((0, 1, -1)), rng.choice((20, 1_000)), batches)
        elif kind == "work":
            model.work(rng.randrange(2), rng.randrange(1, 9), rng.random() < 0.5)
        elif kind == "step":
            model.step(rng.choice((0, 1, 21, 50)))
        else:
            model.leave(rng.randrange(3))
    while any(model.order.values()):
        before = sum(map(len, model.order.values()))
        for worker in range(2):
            model.work(worker, 100, False)
        assert sum(map(len, model.order.values())) < before, (
            "what waits for room goes when there is room"
        )
    assert not model.sent
    assert not len(model.world.front._produce_service._pending_produces)
    assert all(s.credit.received == s.credit.released for s in model.world.front._sessions.all())
