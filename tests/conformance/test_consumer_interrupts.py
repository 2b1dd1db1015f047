"""A signal's handler raises at each point of a consumer's calls: every record reaches the program
once, in order, and nothing is committed before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tailrace import Record, TopicBatch
from tests.conformance.interrupts import at, points
from tests.conformance.reading_front import KEY, DrivenConsumer

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""
COUNT = 24
STEPS = [pytest.param(23, id="each_23rd"), pytest.param(11, id="each_11th", marks=pytest.mark.long)]
"""Points of a call at which a signal comes: each of them would take minutes."""


class Program:
    """A program that has read some records, and remembers what it was given."""

    def __init__(self, **settings: Any) -> None:
        self.driven = DrivenConsumer(COUNT, **settings)
        self.consumer = self.driven.consumer
        self.seen: list[int] = []
        self.batches: list[TopicBatch] = []
        self.take(self.consumer.poll(1_000, 4))

    def take(self, records: list[Record]) -> None:
        self.seen += [record.offset for record in records]

    def check(self, where: str) -> None:
        """After the interrupt the program goes on."""
        for batch in self.batches:
            self.seen += batch.offsets.to_pylist()
        self.consumer.resume(KEY)
        assert self.consumer.positions() == {KEY: len(self.seen)}, where
        for _ in range(100):
            if len(self.seen) >= COUNT:
                break
            self.take(self.consumer.poll(100, 5))
            assert max(self.driven.front.committed, default=0) <= len(self.seen), (
                f"committed before it was given, after an interrupt at {where}"
            )
        assert self.seen == list(range(COUNT)), f"after an interrupt at {where}"
        self.consumer.commit()
        assert self.driven.front.committed[-1] == COUNT, where
        self.consumer.close()


def _poll(program: Program) -> Callable[[], object]:
    return lambda: program.take(program.consumer.poll(1_000, 7))


def _poll_of_a_few(program: Program) -> Callable[[], object]:
    return lambda: program.take(program.consumer.poll(1_000, 1))


def _consume(program: Program) -> Callable[[], object]:
    return lambda: program.take(program.consumer.consume(11, timeout=10))


def _poll_arrow(program: Program) -> Callable[[], object]:
    return lambda: program.batches.extend(program.consumer.poll_arrow(1_000))


def _loop(program: Program) -> Callable[[], object]:
    def loop() -> None:
        for record in program.consumer:
            program.seen.append(record.offset)
            if record.offset == 13:
                break

    return loop


def _loop_that_reads_otherwise(program: Program) -> Callable[[], object]:
    def loop() -> None:
        for record in program.consumer:
            program.seen.append(record.offset)
            program.take(program.consumer.poll(0, 2))
            program.consumer.commit()
            if program.seen[-1] >= 13:
                break

    return loop


def _commit(program: Program) -> Callable[[], object]:
    return program.consumer.commit


def _commit_async(program: Program) -> Callable[[], object]:
    return lambda: program.consumer.commit_async(callback=lambda _offsets, _error: None)


def _position(program: Program) -> Callable[[], object]:
    return lambda: program.consumer.position(KEY)


def _pause(program: Program) -> Callable[[], object]:
    next(iter(program.consumer))
    program.seen.append(len(program.seen))

    return lambda: program.consumer.pause(KEY)


CALLS = [
    _poll,
    _poll_of_a_few,
    _consume,
    _poll_arrow,
    _loop,
    _loop_that_reads_otherwise,
    _commit,
    _commit_async,
    _position,
    _pause,
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("deserializes", [False, True], ids=["stored", "deserialized"])
@pytest.mark.parametrize("prepare", CALLS, ids=lambda prepare: prepare.__name__.strip("_"))
def test_a_signal_at_any_point_of_a_call_costs_no_record_and_commits_none(
    prepare: Callable[[Program], Callable[[], object]], deserializes: bool, step: int
) -> None:
    settings = {"value_deserializer": bytes.decode} if deserializes else {}
    for point in points(step=step):
        program = Program(**settings)
        call = prepare(program)
        with at(point) as interruption:
            call()
        program.check(interruption.where)
        if not interruption.was_made:
            return


@pytest.mark.parametrize("step", STEPS)
def test_a_signal_at_any_point_of_a_seek_leaves_the_old_position_or_the_new_one(step: int) -> None:
    for point in points(step=step):
        program = Program()
        next(iter(program.consumer))
        with at(point) as interruption:
            program.consumer.seek(KEY, 2)
        position = program.consumer.position(KEY)
        assert position in (2, 5), interruption.where
        assert [record.offset for record in program.consumer.consume(3, 10)] == list(
            range(position, position + 3)
        ), interruption.where
        program.consumer.close()
        if not interruption.was_made:
            return


@pytest.mark.parametrize("step", STEPS)
def test_a_signal_at_any_point_of_a_close_commits_nothing_that_was_not_given_and_the_next_close_ends_the_consumer(  # noqa: E501
    step: int,
) -> None:
    for point in points(step=step):
        program = Program()
        next(iter(program.consumer))
        with at(point) as interruption:
            program.consumer.close()
        program.consumer.close()
        assert max(program.driven.front.committed, default=0) <= 5, interruption.where
        assert not program.consumer._connection.is_usable, interruption.where
        if not interruption.was_made:
            return
