"""The states of a transaction, row by row: which call is allowed, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.core.errors import (
    InvalidSettingError,
    InvalidTransactionError,
    ProducerFencedError,
    TransactionAbortedError,
)
from tailrace.producer.producer import Producer
from tailrace.producer.transactions.state import ALLOWED, Call, State, TransactionState
from tailrace.protocol.frame import Api
from tests.conformance.transactions.transaction_worlds import (
    SCRIPTED,
    Made,
    ScriptedWorld,
)

END = Api.END_TRANSACTION


def test_a_call_is_allowed_by_the_table_of_states_and_refused_elsewhere_with_a_sentence() -> None:
    for call in Call:
        for state in State:
            machine = TransactionState("billing-1")
            machine._phase = State.OPEN if state is State.ABORTABLE else state
            machine.failure = TransactionAbortedError("x") if state is State.ABORTABLE else None
            machine.caller = object() if state is State.COMMITTING else None
            machine.fenced_detail = "client other-1 has it"
            assert machine.state is state
            if state in ALLOWED[call]:
                machine.check(call)
                continue
            with pytest.raises(
                (InvalidTransactionError, TransactionAbortedError, ProducerFencedError)
            ) as caught:
                machine.check(call)
            if isinstance(caught.value, InvalidTransactionError):
                assert caught.value.detail.startswith(call.value)
                assert state.value in caught.value.detail
                assert "billing-1" in caught.value.detail
            assert isinstance(caught.value, ProducerFencedError) == (state is State.FENCED)


@SCRIPTED
def test_calls_that_do_not_fit_the_state_are_refused(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        for call in (
            lambda: producer.send("t", b"x", partition=0),
            producer.commit_transaction,
            producer.abort_transaction,
            lambda: producer.send_offsets_to_transaction({}, "g"),
        ):
            with pytest.raises(InvalidTransactionError, match=r"no producer id yet.*begin_tr"):
                await call()
        await producer.begin_transaction()
        with pytest.raises(InvalidTransactionError, match=r"is open.*commit_transaction"):
            await producer.begin_transaction()
        with pytest.raises(InvalidTransactionError, match="is open"):
            await producer.init_transactions()
        await made.send(b"x")
        await producer.commit_transaction()
        with pytest.raises(InvalidTransactionError, match="no transaction is open"):
            await made.send(b"outside")
        with pytest.raises(InvalidTransactionError, match="no transaction is open"):
            await producer.abort_transaction()
        assert made.front.committed() == [b"x"]

    world.run(body)


@SCRIPTED
def test_a_commit_after_a_commit_and_an_abort_after_an_abort_do_nothing(
    world: ScriptedWorld,
) -> None:
    """The caller of one that was interrupted cannot know that it was done."""

    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"x")
        await producer.commit_transaction()
        await producer.commit_transaction()
        await producer.begin_transaction()
        await made.send(b"y")
        await producer.abort_transaction()
        await producer.abort_transaction()
        with pytest.raises(InvalidTransactionError, match="no transaction is open"):
            await producer.commit_transaction()
        assert made.front.count(END) == 2

    world.run(body)


@SCRIPTED
def test_the_program_may_end_the_transaction_within_its_block(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            await made.send(b"x")
            await made.producer.abort_transaction()
        async with made.producer.transaction():
            await made.send(b"y")
            await made.producer.commit_transaction()
        assert made.front.committed() == [b"y"]

    world.run(body)


@pytest.mark.parametrize(("given", "sentence"), [
    ({"acks": 1}, "acks is 1 beside a transactional_id"),
    ({"acks": "0"}, "acks is 0 beside a transactional_id"),
    ({"enable_idempotence": False}, "enable_idempotence is False"),
    ({"transactional_id": ""}, "transactional_id is ''"),
    ({"transactional_id": "x" * 256}, "text of 256 characters"),
    ({"transactional_id": 5}, "transactional_id is 5"),
    ({"transaction_timeout_ms": 0}, "transaction_timeout_ms is 0"),
])  # fmt: skip
def test_settings_that_contradict_transactions_are_refused(
    given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        Producer("tcp://127.0.0.1:1", **{"transactional_id": "billing-1", **given})


def test_a_producer_without_an_id_says_how_to_have_one() -> None:
    with Producer("tcp://127.0.0.1:1") as producer:
        for call in (producer.begin_transaction, producer.commit_transaction, producer.transaction):
            with pytest.raises(InvalidTransactionError, match="give it one"):
                call()
