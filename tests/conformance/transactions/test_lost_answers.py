"""Requests about transactions whose answer is lost: repeated, never for the next transaction."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidTransactionError,
    RequestTimeoutError,
    TransactionAbortedError,
    UnknownTransactionalIdError,
)
from tailrace.producer.transactions.state import State
from tailrace.protocol.frame import Api
from tests.conformance.transactions.transaction_front import (
    LOST_AFTER,
    LOST_BEFORE,
    SILENT,
)
from tests.conformance.transactions.transaction_worlds import (
    CLOSE_S,
    SCRIPTED,
    Made,
    ScriptedWorld,
)

END, INIT = Api.END_TRANSACTION, Api.INIT_TRANSACTIONS


@SCRIPTED
@pytest.mark.parametrize("planned", [
    LOST_BEFORE, LOST_AFTER, ErrorCode.TIMED_OUT, ErrorCode.NOT_READY, ErrorCode.SHUTTING_DOWN,
    ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.STORAGE_ERROR,
], ids=str)  # fmt: skip
@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_end_is_repeated_until_it_has_an_answer(
    world: ScriptedWorld, outcome: str, planned: Any
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        for number in range(2):
            await producer.begin_transaction()
            await made.send(b"%d" % number)
            await producer.flush()
            made.front.plan[END].append(planned)
            await (
                producer.commit_transaction()
                if outcome == "commit"
                else producer.abort_transaction()
            )
        decided = made.front.decisions[1:]
        assert [one.outcome for one in decided] == [outcome] * 2, "one decision each"
        assert made.front.committed() == ([b"0", b"1"] if outcome == "commit" else [])

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("planned", [
    LOST_BEFORE, LOST_AFTER, ErrorCode.NOT_READY, ErrorCode.CONCURRENT_TRANSACTIONS,
    ErrorCode.TIMED_OUT,
], ids=str)  # fmt: skip
def test_init_is_repeated(world: ScriptedWorld, planned: Any) -> None:
    async def body(made: Made) -> None:
        made.front.plan[INIT].append(planned)
        await made.producer.init_transactions()
        async with made.producer.transaction():
            await made.send(b"x")
        assert made.front.committed() == [b"x"]

    world.run(body)


@SCRIPTED
def test_an_init_that_is_carried_out_behind_its_repeat_fences_nobody(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        made.front.plan[INIT] += [LOST_BEFORE, SILENT, LOST_AFTER]
        with pytest.raises(RequestTimeoutError):
            await made.producer.init_transactions(CLOSE_S)
        await made.producer.init_transactions()
        ghost = next(request for api, request in made.front.requests if api is INIT)
        await made.producer.begin_transaction()
        await made.send(b"x")
        await made.producer.flush()
        made.front._initialize(ghost)
        await made.producer.commit_transaction()
        assert made.front.committed() == [b"x"]
        assert made.front.owner == 1

    world.run(body)


@SCRIPTED
def test_two_producers_and_two_inits_of_one_have_attempts_of_their_own(
    world: ScriptedWorld,
) -> None:
    attempts: list[str] = []

    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"x")
        await made.producer.flush()
        made.front.is_forgotten = True
        await made.producer.abort_transaction()
        await made.producer.init_transactions()
        attempts.extend(one["attempt"] for api, one in made.front.requests if api is INIT)

    for _ in range(2):
        world.run(body)
    assert len(set(attempts)) == len(attempts) == 4


@SCRIPTED
def test_init_without_an_answer_ends_in_time_and_may_be_repeated(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        made.front.plan[INIT].append(SILENT)
        with pytest.raises(RequestTimeoutError):
            await made.producer.init_transactions(CLOSE_S)
        async with made.producer.transaction():
            await made.send(b"x")
        assert made.front.committed() == [b"x"]

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("planned", [SILENT, ErrorCode.TIMED_OUT], ids=str)
def test_a_commit_without_an_answer_is_repeated_by_the_program_until_it_is_known(
    world: ScriptedWorld, planned: Any
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        made.front.plan[END].extend([planned] * 200)
        for _ in range(2):
            with pytest.raises(RequestTimeoutError, match="outcome of the commit is not known"):
                await producer.commit_transaction(CLOSE_S)
        assert made.state.state is State.DECIDING
        for call in (
            producer.abort_transaction,
            producer.begin_transaction,
            lambda: producer.send("t", b"y", partition=0),
            lambda: producer.send_offsets_to_transaction({}, "g"),
        ):
            with pytest.raises(InvalidTransactionError, match=r"commit_transaction\(\) again"):
                await call()
        made.front.plan[END].clear()
        await producer.commit_transaction()
        assert made.front.committed() == [b"x"]
        assert [one.outcome for one in made.front.decisions[1:]] == ["commit"]

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("then", ["commit", "abort"])
def test_a_commit_that_another_transaction_is_in_the_way_of_is_repeated_or_aborted(
    world: ScriptedWorld, then: str
) -> None:
    """A prepared transaction has offsets of the same group, perhaps for days."""

    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        made.front.plan[END].extend([ErrorCode.CONCURRENT_TRANSACTIONS] * 200)
        for _ in range(2):
            with pytest.raises(RequestTimeoutError, match=r"in the way.* nothing is decided"):
                await producer.commit_transaction(CLOSE_S)
        assert made.state.state is State.WAITING
        for call in (producer.begin_transaction, lambda: producer.send("t", b"y", partition=0)):
            with pytest.raises(InvalidTransactionError, match=r"again, or abort_transaction\(\)"):
                await call()
        made.front.plan[END].clear()
        await (producer.commit_transaction() if then == "commit" else producer.abort_transaction())
        assert made.front.committed() == ([b"x"] if then == "commit" else [])
        async with producer.transaction():
            await made.send(b"next")
        assert made.front.committed()[-1:] == [b"next"]

    world.run(body)


@SCRIPTED
def test_a_block_that_another_transaction_is_in_the_way_of_is_aborted_and_may_be_repeated(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        async def block() -> None:
            async with made.producer.transaction():
                await made.send(b"x")

        made.front.is_in_the_way = True
        with pytest.raises(RequestTimeoutError, match="nothing is decided"):
            await block()
        assert made.front.aborted() == [b"x"]
        made.front.is_in_the_way = False
        await block()
        assert made.front.committed() == [b"x"]

    world.run(body, max_block_ms=60)


@SCRIPTED
def test_an_abort_without_an_answer_is_repeated_by_the_program(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        made.front.plan[END].extend([SILENT])
        with pytest.raises(RequestTimeoutError, match=r"abort_transaction\(\) again"):
            await producer.abort_transaction(CLOSE_S)
        with pytest.raises(InvalidTransactionError, match="being aborted"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"y"]

    world.run(body)


@SCRIPTED
def test_a_commit_that_ends_before_all_is_acknowledged_has_decided_nothing(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        for ends in (producer.commit_transaction, producer.abort_transaction):
            await producer.begin_transaction()
            await made.send(b"first")
            await producer.flush()
            made.front.plan[Api.PRODUCE].extend([ErrorCode.CONCURRENT_TRANSACTIONS] * 2_000)
            await made.send(b"x")
            with pytest.raises(RequestTimeoutError, match="nothing is decided"):
                await producer.commit_transaction(CLOSE_S)
            assert made.state.state is State.OPEN
            made.front.plan[Api.PRODUCE].clear()
            await made.send(b"y")
            await ends()
        assert [one.outcome for one in made.front.decisions[1:]] == ["commit", "abort"]
        assert made.front.committed() == [b"first", b"x", b"y"]

    world.run(body)


@SCRIPTED
def test_a_commit_that_meets_the_timeout_is_aborted_and_one_that_was_decided_is_not(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        await producer.flush()
        made.front.plan[END].append(LOST_BEFORE)
        made.front.abort_by("timeout")
        with pytest.raises(TransactionAbortedError, match="timeout"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        assert made.front.count(END) == 1, "the error had the next epoch: nothing is left to ask"
        await producer.begin_transaction()
        await made.send(b"y")
        made.front.plan[END].append(LOST_AFTER)
        await producer.commit_transaction()
        assert made.front.committed() == [b"y"]

    world.run(body)


@SCRIPTED
def test_an_id_that_was_forgotten_is_taken_again(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        await producer.flush()
        made.front.is_forgotten = True
        with pytest.raises(UnknownTransactionalIdError, match="cannot be found out"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"y"]
        assert made.front.count(INIT) == 2

    world.run(body)
