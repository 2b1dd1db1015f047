"""A producer whose transactional id another one has taken, or whose transaction was ended."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ProducerFencedError,
    RequestTimeoutError,
    TransactionAbortedError,
)
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

DESCRIBE = Api.DESCRIBE_TRANSACTION


@SCRIPTED
@pytest.mark.parametrize("sends", [True, False])
def test_another_owner_fences_for_good_and_the_sentence_says_whom(
    world: ScriptedWorld, sends: bool
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        await producer.flush()
        made.front.take_over()
        if sends:
            (handle,) = await made.send(b"zombie")
            with pytest.raises(ProducerFencedError, match="other-1 has taken the id over since"):
                await handle
            assert made.front.count(DESCRIBE) == 1
        for call in (
            producer.commit_transaction,
            producer.begin_transaction,
            producer.abort_transaction,
            producer.init_transactions,
            lambda: producer.send("t", b"y", partition=0),
        ):
            with pytest.raises(ProducerFencedError, match="other-1"):
                await call()
        assert made.front.committed() == []

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("by", ["timeout", "operator"])
@pytest.mark.parametrize("sends", [True, False])
def test_a_transaction_that_the_appliance_aborted_is_aborted_and_the_producer_goes_on(
    world: ScriptedWorld, by: str, sends: bool
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        await producer.flush()
        made.front.abort_by(by)
        if sends:
            (handle,) = await made.send(b"late")
            with pytest.raises(TransactionAbortedError):
                await handle
        with pytest.raises(TransactionAbortedError, match=by):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await made.send(b"next")
        assert made.front.committed() == [b"next"]
        assert made.front.aborted() == [b"x"]

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize(
    "planned", [LOST_BEFORE, LOST_AFTER, ErrorCode.NOT_READY, ErrorCode.TIMED_OUT]
)
def test_the_question_who_fenced_is_repeated(world: ScriptedWorld, planned: Any) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"x")
        await made.producer.flush()
        made.front.abort_by("timeout")
        made.front.plan[DESCRIBE].append(planned)
        (handle,) = await made.send(b"late")
        with pytest.raises(TransactionAbortedError, match="transaction_timeout_ms"):
            await handle
        assert made.front.count(DESCRIBE) == (1 if planned is LOST_BEFORE else 2)
        await made.producer.abort_transaction()

    world.run(body)


@SCRIPTED
def test_an_abort_does_not_wait_for_who_fenced(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"x")
        await made.producer.flush()
        made.front.abort_by("timeout")
        made.front.plan[DESCRIBE].extend([SILENT] * 9)
        await made.send(b"late")
        with pytest.raises(RequestTimeoutError, match="nothing is decided"):
            await made.producer.commit_transaction(CLOSE_S)
        await made.producer.abort_transaction()
        async with made.producer.transaction():
            await made.send(b"next")
        assert made.front.committed() == [b"next"]

    world.run(body)
