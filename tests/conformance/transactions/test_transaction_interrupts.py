"""A signal's handler raises at each point of a transaction's calls, and a task is cancelled at each
of its waits: the same call again finds the outcome, and nothing is committed twice or in part.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tailrace.core.errors import TransactionAbortedError
from tailrace.producer.transactions.state import State
from tests.conformance.interrupts import at, points
from tests.conformance.logging_front import DrivenProducer
from tests.conformance.transactions.transaction_front import TransactionFront
from tests.conformance.transactions.transaction_worlds import SETTINGS, LoopScripted, Made
from tests.kit.runs.cancellation import CancelledAt

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""
STEPS = [pytest.param(7, id="each_7th"), pytest.param(1, id="each", marks=pytest.mark.long)]


class Program:
    """A program that makes transactions of numbered records."""

    def __init__(self) -> None:
        self.front = TransactionFront(partitions=2)
        self.driven = DrivenProducer(self.front, **SETTINGS)
        self.producer = self.driven.producer
        self._numbers = itertools.count()

    @property
    def state(self) -> State:
        transactions = self.producer._transactions
        assert transactions is not None
        return transactions._state.state

    def send(self, count: int = 1) -> list[bytes]:
        values = [b"%05d" % next(self._numbers) for _ in range(count)]
        for value in values:
            self.producer.send("t", value, partition=0)
        return values

    def opened(self) -> list[bytes]:
        """A transaction is open, of which one record is acknowledged and two are not sent."""
        self.producer.begin_transaction()
        values = self.send()
        self.producer.flush()
        return values + self.send(2)

    def check(self, expected: list[bytes], where: str) -> None:
        """This was committed, and the program goes on."""
        assert self.front.committed() == expected, where
        with self.producer.transaction():
            values = self.send(2)
        assert self.front.committed() == expected + values, where
        accumulator = self.producer._sender_thread.accumulator
        assert (
            accumulator.buffered_bytes,
            accumulator.incomplete_count,
            accumulator.in_flight_count,
        ) == (0, 0, 0), where
        self.producer.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_commit_that_is_interrupted_at_any_point_is_repeated_and_commits_once(step: int) -> None:
    for point in points(step=step):
        program = Program()
        values = program.opened()
        with at(point) as interruption:
            program.producer.commit_transaction()
        program.producer.commit_transaction()
        assert [one.outcome for one in program.front.decisions[1:]] == ["commit"], (
            interruption.where
        )
        program.check(values, interruption.where)
        if not interruption.was_made:
            return


@pytest.mark.parametrize("step", STEPS)
def test_an_abort_that_is_interrupted_at_any_point_is_repeated(step: int) -> None:
    for point in points(step=step):
        program = Program()
        program.opened()
        with at(point) as interruption:
            program.producer.abort_transaction()
        program.producer.abort_transaction()
        assert [one.outcome for one in program.front.decisions[1:]] == ["abort"], interruption.where
        program.check([], interruption.where)
        if not interruption.was_made:
            return


@pytest.mark.parametrize("step", STEPS)
def test_a_commit_that_was_interrupted_may_be_aborted_unless_its_outcome_is_unknown(
    step: int,
) -> None:
    seen: set[State] = set()
    for point in points(step=step):
        program = Program()
        values = program.opened()
        with at(point) as interruption:
            program.producer.commit_transaction()
        seen.add(program.state)
        if program.state is State.OPEN:
            program.producer.abort_transaction()
            program.check([], interruption.where)
        else:
            assert program.state in (State.DECIDING, State.READY), interruption.where
            program.producer.commit_transaction()
            program.check(values, interruption.where)
        if not interruption.was_made:
            assert seen == {State.OPEN, State.DECIDING, State.READY}
            return


@pytest.mark.parametrize("step", STEPS)
def test_the_first_begin_that_is_interrupted_at_any_point_is_repeated(step: int) -> None:
    for point in points(step=step):
        program = Program()
        with at(point) as interruption:
            program.producer.begin_transaction()
        if program.state is not State.OPEN:
            program.producer.begin_transaction()
        values = program.send()
        program.producer.commit_transaction()
        program.check(values, interruption.where)
        if not interruption.was_made:
            return


@pytest.mark.parametrize("step", STEPS)
def test_a_block_that_is_interrupted_at_any_point_is_committed_whole_or_not_at_all(
    step: int,
) -> None:
    outcomes: set[int] = set()
    for point in points(step=step):
        program = Program()
        program.producer.init_transactions()
        with at(point) as interruption, program.producer.transaction():
            program.send(3)
            program.producer.flush()
            program.send(2)
        if program.state is State.DECIDING:
            program.producer.commit_transaction()
        if program.state not in (State.READY, State.UNINITIALIZED):
            program.producer.abort_transaction()  # at the block's end, before it could
        committed = program.front.committed()
        assert len(committed) in (0, 5), interruption.where
        outcomes.add(len(committed))
        program.check(committed, interruption.where)
        if not interruption.was_made:
            assert outcomes == {0, 5}
            return


@pytest.mark.parametrize("step", STEPS)
def test_a_send_in_a_transaction_that_is_interrupted_leaves_it_whole(step: int) -> None:
    """The sequences go on where they were: no new epoch is taken inside a transaction."""
    for point in points(step=step):
        program = Program()
        program.opened()
        with at(point) as interruption:
            program.send(2)
            program.producer.flush()
        try:
            program.producer.commit_transaction()
        except TransactionAbortedError as error:
            raise AssertionError(f"{error} after an interrupt at {interruption.where}") from error
        committed = program.front.committed()
        assert committed == sorted(set(committed)), interruption.where
        assert len(committed) >= 3, interruption.where
        program.check(committed, interruption.where)
        if not interruption.was_made:
            return


# ---- tasks ---------------------------------------------------------------------------------------


async def _commit(made: Made) -> None:
    await made.producer.commit_transaction()


async def _abort(made: Made) -> None:
    await made.producer.abort_transaction()


@pytest.mark.parametrize("ends", [_commit, _abort])
def test_a_call_that_is_cancelled_at_any_wait_is_repeated(
    ends: Callable[[Made], Awaitable[None]],
) -> None:
    was_made = True

    async def body(made: Made) -> None:
        nonlocal was_made
        await made.producer.begin_transaction()
        await made.send(b"a")
        await made.producer.flush()
        await made.send(b"b")
        cancelling = CancelledAt(ends(made), number)  # type: ignore[arg-type]
        await asyncio.wait([asyncio.ensure_future(_awaited(cancelling))])
        was_made = cancelling.was_made
        await ends(made)
        assert made.front.committed() == ([b"a", b"b"] if ends is _commit else [])
        async with made.producer.transaction():
            await made.send(b"c")
        assert made.front.committed()[-1:] == [b"c"]

    for number in points():
        front = TransactionFront()
        front.is_late = True
        LoopScripted().run(body, front)
        if not was_made:
            assert number > 0
            return


def test_a_block_that_is_cancelled_at_any_wait_is_committed_whole_or_not_at_all() -> None:
    was_made = True

    async def body(made: Made) -> None:
        nonlocal was_made

        async def block() -> None:
            async with made.producer.transaction():
                await made.send(b"a")
                await made.producer.flush()
                await made.send(b"b")

        cancelling = CancelledAt(block(), number)
        await asyncio.wait([asyncio.ensure_future(_awaited(cancelling))])
        was_made = cancelling.was_made
        if made.state.state is State.DECIDING:
            await made.producer.commit_transaction()
        assert made.front.committed() in ([], [b"a", b"b"])
        async with made.producer.transaction():
            await made.send(b"c")
        assert made.front.committed()[-1:] == [b"c"]

    for number in points():
        front = TransactionFront()
        front.is_late = True
        LoopScripted().run(body, front)
        if not was_made:
            assert number > 0
            return


async def _awaited(cancelling: Any) -> None:
    await cancelling
