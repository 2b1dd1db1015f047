"""Transactions of Producer and AsyncProducer, against an appliance that does what a test says: what
a commit and an abort send, and to whom it is reported.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tailrace.core.errors import (
    InvalidTransactionError,
    TransactionAbortedError,
)
from tailrace.producer.transactions.state import State
from tailrace.protocol.frame import Api
from tests.conformance.transactions.transaction_front import (
    FIRST_ID,
)
from tests.conformance.transactions.transaction_worlds import (
    SCRIPTED,
    Made,
    ScriptedWorld,
)

END, INIT = Api.END_TRANSACTION, Api.INIT_TRANSACTIONS


@SCRIPTED
def test_a_block_commits_what_was_sent_in_it_and_each_transaction_has_an_epoch(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        for number in range(3):
            async with made.producer.transaction():
                await made.send(b"a%d" % number, b"b%d" % number)
                await made.send(b"c%d" % number, partition=1)
        assert made.front.committed(0) == [b"a0", b"b0", b"a1", b"b1", b"a2", b"b2"]
        assert made.front.committed(1) == [b"c0", b"c1", b"c2"]
        assert made.front.count(INIT) == 1
        assert {(one.producer_id, one.base_sequence) for one in made.front.headers} == {
            (FIRST_ID, 0)
        }, "each transaction begins at sequence 0"
        assert sorted({one.producer_epoch for one in made.front.headers}) == [0, 1, 2]
        assert made.state.state is State.READY

    world.run(body)


@SCRIPTED
def test_a_block_that_raises_aborts_and_the_producer_goes_on(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        handles: list[Any] = []

        async def fails() -> None:
            async with made.producer.transaction():
                handles.extend(await made.send(b"acked"))
                await made.producer.flush()
                handles.extend(await made.send(b"unsent"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fails()
        acked, unsent = handles
        assert (await acked).offset == 0
        with pytest.raises(TransactionAbortedError, match="was aborted before"):
            await unsent
        async with made.producer.transaction():
            await made.send(b"next")
        assert made.front.committed() == [b"next"]
        assert made.front.aborted() == [b"acked"]

    world.run(body)


@SCRIPTED
def test_kafkas_methods_do_the_same(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.init_transactions(5)
        await producer.init_transactions()
        await producer.begin_transaction()
        await made.send(b"x")
        await producer.commit_transaction(5)
        await producer.begin_transaction()
        await made.send(b"y")
        await producer.flush()
        await producer.abort_transaction(5)
        assert made.front.committed() == [b"x"]
        assert made.front.aborted() == [b"y"]
        assert [request["timeout_ms"] for api, request in made.front.requests if api is INIT] == [
            7_000
        ]

    world.run(body, transaction_timeout_ms=7_000)


@SCRIPTED
def test_a_frame_is_part_of_the_transaction(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        table = pa.table({"value": pa.array([b"1", b"2"], pa.binary())})
        async with made.producer.transaction():
            await made.producer.send_arrow("t", table, partition=2)
        assert made.front.committed(2) == [b"1", b"2"]
        with pytest.raises(InvalidTransactionError, match=r"begin_transaction\(\)"):
            await made.producer.send_arrow("t", table)

    world.run(body)


@SCRIPTED
def test_a_transaction_without_records_asks_nothing(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            pass
        await made.producer.begin_transaction()
        await made.producer.abort_transaction()
        assert made.front.count(END) == 0

    world.run(body)


@SCRIPTED
def test_the_next_id_and_epoch_are_those_of_the_answer(world: ScriptedWorld) -> None:
    """At the last epoch the appliance gives another producer id."""

    async def body(made: Made) -> None:
        made.front.epoch_max = 1
        for number in range(4):
            async with made.producer.transaction():
                await made.send(b"%d" % number)
        assert [(one.producer_id - FIRST_ID, one.producer_epoch) for one in made.front.headers] == [
            (0, 0), (0, 1), (1, 0), (1, 1),
        ]  # fmt: skip
        assert made.front.committed() == [b"0", b"1", b"2", b"3"]

    world.run(body)


@SCRIPTED
def test_callbacks_come_with_the_acknowledgement_and_not_with_the_commit(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        called: list[Any] = []
        await made.producer.begin_transaction()
        (handle,) = await made.send(
            b"x", on_delivery=lambda metadata, _error: called.append(metadata.offset)
        )
        await handle
        assert called == [0]
        assert not made.front.decisions[1:]
        await made.producer.abort_transaction()
        assert called == [0]

    world.run(body)
