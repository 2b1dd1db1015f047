"""Transactional ids that were idle for long: the epoch is asked for before it is used."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ProducerFencedError,
)
from tailrace.producer.batches.accumulator import NS_PER_MS
from tailrace.producer.transactions.state import State
from tailrace.protocol.frame import Api
from tests.conformance.logging_front import DrivenProducer
from tests.conformance.transactions.transaction_front import (
    LOST_AFTER,
    LOST_BEFORE,
    TransactionFront,
)
from tests.conformance.transactions.transaction_worlds import (
    SCRIPTED,
    SETTINGS,
    Made,
    ScriptedWorld,
)

INIT, DESCRIBE = Api.INIT_TRANSACTIONS, Api.DESCRIBE_TRANSACTION


@SCRIPTED
@pytest.mark.parametrize("planned", [
    None, LOST_BEFORE, LOST_AFTER, ErrorCode.NOT_READY, ErrorCode.CONCURRENT_TRANSACTIONS,
], ids=str)  # fmt: skip
def test_after_an_idle_time_the_first_transaction_has_the_epoch_that_the_appliance_says(
    world: ScriptedWorld, planned: Any
) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            await made.send(b"x")
        made.front.unregister()
        made.be_idle()
        made.front.plan[DESCRIBE].append(planned)
        for value in (b"y", b"z"):
            async with made.producer.transaction():
                await made.send(value)
        assert made.front.committed() == [b"x", b"y", b"z"]
        assert made.front.count(INIT) == 1
        assert made.front.count(DESCRIBE) == (1 if planned in (None, LOST_BEFORE) else 2)
        assert {one["owner"] for api, one in made.front.requests if api is DESCRIBE} == {
            made.state.owner
        }

    world.run(body)


@SCRIPTED
def test_an_idle_time_before_the_first_transaction_counts_too(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.init_transactions()
        made.front.unregister()
        made.be_idle()
        async with made.producer.transaction():
            await made.send(b"x")
        assert made.front.committed() == [b"x"]

    world.run(body)


@SCRIPTED
def test_transactions_without_a_request_do_not_end_the_idle_time(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.init_transactions()
        made.state.answered_ns -= made.state.idle_ns // 2
        async with made.producer.transaction():
            pass
        await made.producer.begin_transaction()
        await made.producer.abort_transaction()
        made.front.unregister()
        made.state.answered_ns -= made.state.idle_ns // 2
        async with made.producer.transaction():
            await made.send(b"x")
        assert made.front.committed() == [b"x"]

    world.run(body)


@SCRIPTED
def test_a_producer_that_is_used_never_asks_for_its_epoch(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        for ends_well in (True, False):
            await made.producer.begin_transaction()
            made.be_idle()
            await made.send(b"x")
            await made.producer.flush()
            if ends_well:
                await made.producer.commit_transaction()
            else:
                await made.producer.abort_transaction()
        async with made.producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"x", b"y"]
        assert made.front.count(DESCRIBE) == 0

    world.run(body)


@SCRIPTED
def test_a_producer_that_was_replaced_while_it_was_idle_is_fenced_as_it_begins(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        await made.producer.init_transactions()
        made.front.take_over()
        made.be_idle()
        for _ in range(2):
            with pytest.raises(ProducerFencedError, match="client other-1"):
                await made.producer.begin_transaction()
        assert made.state.state is State.FENCED
        assert made.front.count(DESCRIBE) == 1

    world.run(body)


@SCRIPTED
def test_an_id_that_has_expired_while_it_was_idle_is_taken_again(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            await made.send(b"x")
        made.front.is_forgotten = True
        made.be_idle()
        async with made.producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"x", b"y"]
        assert made.front.count(INIT) == 2

    world.run(body)


def test_the_idle_time_is_that_of_the_appliance_by_the_producers_clock() -> None:
    front = TransactionFront()
    driven = DrivenProducer(front, **SETTINGS)
    with driven.producer as producer:
        producer.init_transactions()
        asked_at_ms = []
        for idle_ms in (front.idle_ms - 60_000, front.idle_ms, 0):
            driven.now_ns += idle_ms * NS_PER_MS
            with producer.transaction():
                producer.send("t", b"x", partition=0)
            asked_at_ms.append(front.count(DESCRIBE))
        assert asked_at_ms == [0, 1, 1]
        assert front.committed() == [b"x"] * 3
