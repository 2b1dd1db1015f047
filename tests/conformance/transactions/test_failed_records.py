"""Records of a transaction that fail: it becomes abortable."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidTransactionError,
    TailraceError,
    TransactionAbortedError,
)
from tailrace.protocol.frame import Api
from tests.conformance.transactions.transaction_front import (
    LOST_AFTER,
    LOST_BEFORE,
)
from tests.conformance.transactions.transaction_worlds import (
    SCRIPTED,
    LoopScripted,
    Made,
    ScriptedWorld,
    ThreadScripted,
)

END = Api.END_TRANSACTION


@SCRIPTED
@pytest.mark.parametrize(
    "code",
    [ErrorCode.UNKNOWN_SEQUENCE, ErrorCode.UNSAFE_BATCH, ErrorCode.STALE_PRODUCER_EPOCH],
    ids=lambda code: code.name,
)
def test_a_failed_record_makes_the_transaction_abortable_and_never_takes_an_epoch(
    world: ScriptedWorld, code: ErrorCode
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"good")
        await producer.flush()
        made.front.plan[Api.PRODUCE].append(code)
        (failed,) = await made.send(b"bad")
        with pytest.raises(TransactionAbortedError, match=r"a record of t-0 failed") as caught:
            await producer.commit_transaction()
        assert isinstance(caught.value.__cause__, TailraceError)
        assert caught.value.__cause__.code is code
        with pytest.raises(Exception, match=code.name):
            await failed
        with pytest.raises(TransactionAbortedError, match="cannot be committed"):
            await made.send(b"later")
        with pytest.raises(TransactionAbortedError, match="cannot be committed"):
            await producer.commit_transaction()
        with pytest.raises(InvalidTransactionError, match="has to be aborted"):
            await producer.begin_transaction()
        assert made.front.count(END) == 0
        await producer.abort_transaction()
        async with producer.transaction():
            await made.send(b"again")
        assert made.front.committed() == [b"again"]
        assert made.front.epoch == -1, "INIT_PRODUCER_ID was asked"

    world.run(body)


@SCRIPTED
def test_a_block_aborts_when_its_commit_is_refused_and_may_be_repeated(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        made.front.plan[Api.PRODUCE].append(ErrorCode.UNSAFE_BATCH)
        for attempt in range(2):
            try:
                async with made.producer.transaction():
                    await made.send(b"x")
                assert attempt == 1
            except TransactionAbortedError:
                assert attempt == 0
        assert made.front.committed() == [b"x"]

    world.run(body)


@SCRIPTED
def test_what_was_not_sent_fails_with_the_first_failure_so_that_a_flush_ends(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"first")
        await made.producer.flush()
        made.front.plan[Api.PRODUCE].append(ErrorCode.UNSAFE_BATCH)
        handles: list[Any] = []
        with contextlib.suppress(TransactionAbortedError):  # the failure may be known by then
            for _ in range(40):
                handles += await made.send(b"x" * 2_000)
        await made.producer.flush(60)
        assert handles
        assert all(handle.done() for handle in handles)
        assert None not in [handle.exception() for handle in handles]
        await made.producer.abort_transaction()

    world.run(body, batch_size=4_000, max_in_flight_requests_per_connection=1)


@SCRIPTED
def test_a_batch_waits_shortly_while_the_end_before_is_carried_out(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        made.front.plan[Api.PRODUCE].extend([ErrorCode.CONCURRENT_TRANSACTIONS] * 4)
        async with made.producer.transaction():
            started_ns = made.plain._sender_thread.now_ns()
            (handle,) = await made.send(b"x")
            await handle
            waited_ns = made.plain._sender_thread.now_ns() - started_ns
        assert made.front.committed() == [b"x"]
        if world.name == "thread":  # its clock is the test's
            assert waited_ns < 60_000_000, "2 + 4 + 8 + 16 ms, and not retry_backoff_ms"

    world.run(body, retry_backoff_ms=10_000)


@SCRIPTED
@pytest.mark.parametrize("lost", [LOST_BEFORE, LOST_AFTER])
def test_a_batch_whose_connection_was_lost_is_sent_again_under_its_sequence(
    world: ScriptedWorld, lost: str
) -> None:
    async def body(made: Made) -> None:
        made.front.plan[Api.PRODUCE].append(lost)
        async with made.producer.transaction():
            await made.send(b"x")
        assert made.front.committed() == [b"x"]

    world.run(body)


def test_an_expired_record_makes_the_transaction_abortable() -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"x")
        await made.producer.flush()
        made.front.is_silent = True
        await made.send(b"late")
        with pytest.raises(TransactionAbortedError, match="not acknowledged within"):
            await made.producer.commit_transaction()
        made.front.is_silent = False
        made.front.restart()
        await made.producer.abort_transaction()
        async with made.producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"y"]

    ThreadScripted().run(body, delivery_timeout_ms=1_000)


@SCRIPTED
def test_a_topic_that_a_front_does_not_know_yet_is_written_to_once_it_does(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        made.front.plan[Api.PRODUCE].append(ErrorCode.UNKNOWN_TOPIC)
        async with made.producer.transaction():
            await made.send(b"a", b"b")
        assert made.front.committed() == [b"a", b"b"]
        assert {one.producer_epoch for one in made.front.headers} == {0}

    world.run(body, retry_backoff_ms=5)


def test_a_topic_that_is_deleted_within_a_transaction_makes_it_abortable() -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"a")
        await made.producer.flush()
        made.front.is_topic_gone = True
        made.front.plan[Api.PRODUCE].append(ErrorCode.UNKNOWN_TOPIC)
        await made.send(b"b")
        with pytest.raises(TransactionAbortedError, match="was deleted"):
            await made.producer.commit_transaction()
        made.front.is_topic_gone = False
        await made.producer.abort_transaction()
        async with made.producer.transaction():
            await made.send(b"c")
        assert made.front.committed() == [b"c"]

    ThreadScripted().run(body)


@SCRIPTED
def test_a_pause_for_the_end_before_is_no_retry(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        made.front.plan[Api.PRODUCE].extend([ErrorCode.CONCURRENT_TRANSACTIONS] * 4)
        async with made.producer.transaction():
            await made.send(b"x")
        assert made.front.committed() == [b"x"]

    world.run(body, retries=0)


def test_a_send_that_waits_does_not_get_into_the_next_transaction() -> None:
    """It waited for room in the first one, and was added to the second."""

    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        made.front.is_holding = True
        handles = [await producer.send("t", b"x" * 20_000, partition=0) for _ in range(3)]
        waits = asyncio.ensure_future(producer.send("t", b"late" * 5_000, partition=0))
        await asyncio.sleep(0.01)
        assert not waits.done()
        await producer.abort_transaction()
        await producer.begin_transaction()
        with pytest.raises(InvalidTransactionError, match="ended while"):
            await waits
        assert all(handle.done() for handle in handles)
        made.front.is_holding = False
        made.front.answer_all()
        await producer.abort_transaction()

    LoopScripted().run(body, buffer_memory=65_536)
