"""Batches of transactions at the worker's quick way (`kernel.fast_append`) against its long one:
the same history of batches and decisions, the same bytes and the same state.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from shm.memory.layout import FLAG_TRANSACTIONAL
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneMessage
from tailrace import kernel
from tests.kit.log_files.logs import Bench, assignment, simulated_regions
from tests.kit.log_files.simdisk import SimDisk, SimFiles
from tests.kit.matrices import short
from tests.kit.stepped.coordinator import ABORT, COMMIT, PID, SEALED, Coordinator, transactional
from workers.flush.flusher_settings import FlusherSettings

compiled_only = pytest.mark.skipif(
    kernel.compiled is None, reason="no compiled kernel is used here"
)
REGIONS = ("ring", "front>worker", "groups>worker", "worker>groups", "table")


def make_bench(*, is_checked: bool, time_type: str = "CreateTime") -> Bench:
    made = Bench(
        "/data", simulated_regions(1 << 17, 256, is_checked=is_checked), SimFiles(SimDisk()),
        FlusherSettings(journal_bytes=1 << 20),
        assignments=[
            assignment(n, slot=n, message_timestamp_type=time_type) for n in range(2)
        ],
    )  # fmt: skip
    made.settle()
    return made


def state_of(bench: Bench) -> list[Any]:
    opened = bench.worker._opened.open_transactions
    return [
        [
            (p.next_offset, p.last_append_us, p.leader_epoch, p.producers.to_snapshot())
            for p in (bench.worker._partitions[slot] for slot in range(2))
        ],
        opened._slots,
        opened._of_slot,
        bench.worker._appender.refused_count,
        bench.worker._appender.byte_count,
        {name: bytes(bench.regions[name].bytes) for name in REGIONS},
    ]


class History:
    """Random batches and decisions of three transactional ids, for several benches alike."""

    def __init__(self, rng: random.Random, benches: list[Bench]) -> None:
        self.rng, self.benches = rng, benches
        self.coordinators = [Coordinator(bench) for bench in benches]
        self.epochs = [0, 0, 0]
        self.sequences: dict[tuple[int, int], int] = {}
        for number in range(3):
            self.decide(number, [], [(PID + number, 0)])
        self.feed()

    def decide(self, number: int, ended: list[Any], registered: list[Any]) -> None:
        for each in self.coordinators:
            each.decide(number + 1, ended, registered)

    def feed(self) -> None:
        for each in self.coordinators:
            each.feed()

    def batch(self, number: int) -> None:
        rng, slot, count = self.rng, self.rng.randrange(2), self.rng.randint(1, 9)
        sequence = self.sequences.get((number, slot), 0)
        wrong = rng.choice([0] * 12 + [5, -1])
        epoch = max(0, self.epochs[number] + rng.choice([0] * 12 + [1, -1]))
        made = transactional(
            PID + number, epoch, max(0, sequence + wrong), count=count, partition=slot
        )
        if not wrong and epoch == self.epochs[number]:
            self.sequences[number, slot] = sequence + count
        acks = rng.randrange(3)
        for bench in self.benches:
            if not bench.to_worker.try_write(LaneKind.PRODUCE, slot, acks, 1 << 32, 7, 0, (made,)):
                bench.settle()

    def end(self, number: int) -> None:
        before = self.epochs[number]
        self.epochs[number] += 1
        self.sequences = {at: n for at, n in self.sequences.items() if at[0] != number}
        self.decide(
            number,
            [(PID + number, before, self.rng.choice((COMMIT, ABORT)))],
            [(PID + number, before + 1)],
        )

    def step(self) -> None:
        rng = self.rng
        number, kind = rng.randrange(3), rng.random()
        if kind < 0.8:
            self.batch(number)
        elif kind < 0.87:
            self.end(number)
        elif kind < 0.89:
            self.decide(number, [], [(PID + number, self.epochs[number], SEALED)])
        elif kind < 0.9:
            self.feed()
        elif kind < 0.92:
            late_us = rng.randrange(200_000_000_000)
            for bench in self.benches:
                bench.now_us += late_us
        elif kind < 0.95:
            for coordinator in self.coordinators:
                coordinator.settle()
        if rng.random() < 0.2:
            for bench in self.benches:
                bench.to_worker.commit()
                bench.step_worker()


@compiled_only
@pytest.mark.parametrize("seed", short(range(25), *range(8)))
def test_both_ways_leave_the_same_bytes_and_transactions(seed: int) -> None:
    time_type = ("CreateTime", "LogAppendTime")[seed % 2]
    benches = [make_bench(is_checked=checked, time_type=time_type) for checked in (False, True)]
    assert benches[0].worker._appender._has_fast_path
    assert not benches[1].worker._appender._has_fast_path
    history = History(random.Random(seed), benches)
    for _ in range(150):
        history.step()
    for coordinator in history.coordinators:
        coordinator.settle()
    quick, long = map(state_of, benches)
    assert quick == long
    assert benches[0].worker._appender._has_fast_path, "the kernel has failed at no batch"


def long_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Correlation ids of the batches that take the long way from now on."""
    found: list[int] = []
    produce = bench.worker._appender.append

    def note(source: int, message: LaneMessage) -> bool:
        found.append(message.correlation_id)
        return produce(source, message)

    monkeypatch.setattr(bench.worker._appender, "append", note)
    return found


@compiled_only
def test_no_batch_of_a_transaction_takes_the_long_way_not_the_first_in_a_partition_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = make_bench(is_checked=False)
    coordinator = Coordinator(bench)
    coordinator.decide(2, [], [(PID + 1, 0)])
    coordinator.feed()
    coordinator.decide(1, [], [(PID, 0)])
    coordinator.settle()
    found = long_way(bench, monkeypatch)
    for number in range(3):
        bench.send(transactional(PID + 1, sequence=2 * number), correlation_id=30 + number)
    coordinator.settle()
    assert found == [30], "an id at rest since the feed takes it once"
    found.clear()
    for number in range(4):
        bench.send(transactional(sequence=2 * number), correlation_id=number)
    bench.send(transactional(partition=1), slot=1, correlation_id=10)
    bench.send(transactional(sequence=2, partition=1), slot=1, correlation_id=11)
    coordinator.settle()
    assert found == []
    assert bench.ring.descriptor(bench.ring.producer_position.load() - 1).flags & FLAG_TRANSACTIONAL
    coordinator.decide(1, [(PID, 0, COMMIT)], [(PID, 1)])
    coordinator.settle()
    found.clear()
    for number in range(3):
        bench.send(transactional(epoch=1, sequence=2 * number), correlation_id=20 + number)
    coordinator.settle()
    assert found == []
    opened = bench.worker._opened.open_transactions
    assert opened.slots_of((PID, 1)) == [0]
    assert not opened.slots_of((PID, 0))


@compiled_only
@pytest.mark.parametrize("after", ["sealed", "ended", "later", "gone", "unfed"])
def test_a_batch_whose_epoch_is_not_taken_any_more_takes_the_long_way(
    after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(is_checked=False)
    coordinator = Coordinator(bench)
    coordinator.decide(1, [], [(PID, 0)])
    coordinator.feed()
    bench.send(transactional())
    coordinator.settle()
    if after == "unfed":
        coordinator.send(LaneKind.TRANSACTIONS_FEED)
    else:
        ended = [(PID, 0, COMMIT)] if after == "ended" else []
        registered: dict[str, Any] = {"sealed": [(PID, 0, SEALED)], "gone": []}
        coordinator.decide(1, ended, registered.get(after, [(PID, 1)]))
    found = long_way(bench, monkeypatch)
    refused = bench.worker._appender.refused_count
    bench.send(transactional(sequence=2), correlation_id=7)
    bench.settle()
    assert found
    assert set(found) == {7}
    assert bench.worker._appender.refused_count == refused + 1
