"""Transactions of Producer and AsyncProducer, against an appliance that does what a test says: the
state machine row by row, each error, lost answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from tailrace.client.connections.runtime import Runtime, sleep_on
from tailrace.client.records.attached_records import AttachedMember, AttachedRecords
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ClientClosedError,
    CommitFailedError,
    InvalidRequestError,
    InvalidSettingError,
    InvalidTransactionError,
    ProducerFencedError,
    RequestTimeoutError,
    TailraceError,
    TransactionAbortedError,
    UnknownTransactionalIdError,
)
from tailrace.core.records import ConsumerGroupMetadata, OffsetAndMetadata, Record, TopicName
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.batches.accumulator import NS_PER_MS
from tailrace.producer.producer import Producer
from tailrace.producer.transactions.state import ALLOWED, Call, State, TransactionState
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import SHARE_RUNS_MAX
from tailrace.share.outcomes import AcknowledgeType
from tests.conformance.logging_front import DrivenProducer
from tests.conformance.transaction_front import (
    FIRST_ID,
    LOST_AFTER,
    LOST_BEFORE,
    SILENT,
    Refused,
    TransactionFront,
)
from tests.conformance.transaction_worlds import (
    SCRIPTED,
    SETTINGS,
    LoopScripted,
    Made,
    ScriptedWorld,
    ThreadScripted,
)
from tests.kit.hosts.forks import REFUSED, USED, wait_for_child

END, INIT, DESCRIBE = Api.END_TRANSACTION, Api.INIT_TRANSACTIONS, Api.DESCRIBE_TRANSACTION
CLOSE_S = 0.05
"""A timeout that has to pass."""


# ---- commit and abort ----------------------------------------------------------------------------


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


# ---- the state machine ---------------------------------------------------------------------------


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


# ---- records that fail ---------------------------------------------------------------------------


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


# ---- fenced --------------------------------------------------------------------------------------


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


# ---- answers that are lost -----------------------------------------------------------------------


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


# ---- idle ids ------------------------------------------------------------------------------------


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


# ---- offsets -------------------------------------------------------------------------------------


@SCRIPTED
def test_offsets_go_with_the_commit_and_with_nothing_else(world: ScriptedWorld) -> None:
    topic_id = bytes(range(16))
    key = TopicPartition(TopicName("in", topic_id), 0)
    member = ConsumerGroupMetadata("g", 4, "m-1", None, is_subscribed=True)

    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await producer.send_offsets_to_transaction({key: 1}, member)
        await producer.abort_transaction()
        assert made.front.offsets == []
        async with producer.transaction():
            await producer.send_offsets_to_transaction({key: 4}, member)
            await producer.send_offsets_to_transaction(
                {key: OffsetAndMetadata(5, "m", 2), TopicPartition("other", 1): 7}, member
            )
            await producer.send_offsets_to_transaction({TopicPartition("x", 0): 1}, "by hand")
        assert made.front.offsets == [
            {
                "group": "g", "member_id": "m-1", "member_epoch": 4,
                "entries": [["in", 0, 5, 2, "m", topic_id.hex()], ["other", 1, 7, -1, ""]],
            },
            {
                "group": "by hand", "member_id": None, "member_epoch": -1,
                "entries": [["x", 0, 1, -1, ""]],
            },
        ]  # fmt: skip

    world.run(body)


@SCRIPTED
def test_offsets_that_are_refused_make_the_transaction_abortable(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        made.front.plan[END].append(
            Refused(ErrorCode.FENCED_MEMBER, "the member has joined again since")
        )

        async def fails() -> None:
            async with made.producer.transaction():
                await made.send(b"x")
                await made.producer.send_offsets_to_transaction(
                    {TopicPartition("in", 0): 1}, ConsumerGroupMetadata("g", 4, "m-1", None, True)
                )

        with pytest.raises(TransactionAbortedError, match="joined again since") as caught:
            await fails()
        assert isinstance(caught.value.__cause__, TailraceError)
        assert caught.value.__cause__.code is ErrorCode.FENCED_MEMBER
        async with made.producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"y"]
        assert made.front.offsets == []

    world.run(body)


@SCRIPTED
def test_a_commit_that_no_request_can_carry_is_refused_at_once_and_the_producer_goes_on(
    world: ScriptedWorld,
) -> None:
    """Sent, it would end the connection, and be sent again until its timeout."""
    offsets = {
        TopicPartition("in", number): OffsetAndMetadata(1, "m" * 4_096) for number in range(300)
    }

    async def body(made: Made) -> None:
        producer = made.producer
        for end in (producer.commit_transaction, producer.prepare_transaction):
            await producer.begin_transaction()
            await made.send(b"too much")
            await producer.send_offsets_to_transaction(offsets, "g")
            with pytest.raises(TransactionAbortedError, match="Commit more often") as caught:
                await end()
            assert isinstance(caught.value.__cause__, TailraceError)
            assert caught.value.__cause__.code is ErrorCode.REQUEST_TOO_LARGE
            await producer.abort_transaction()
        async with producer.transaction():
            await made.send(b"y")
        assert made.front.committed() == [b"y"]
        outcomes = [one.outcome for one in made.front.decisions]
        assert outcomes[1:] == ["abort", "abort", "commit"], "the first is that of its init"
        assert made.front.offsets == []

    world.run(body)


@SCRIPTED
def test_offsets_of_nobody_are_refused(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            with pytest.raises(CommitFailedError, match="not a member"):
                await made.producer.send_offsets_to_transaction(
                    {}, ConsumerGroupMetadata("g", -1, "m-1", None, is_subscribed=True)
                )
            with pytest.raises(InvalidRequestError, match=r"consumer.group_metadata\(\)"):
                await made.producer.send_offsets_to_transaction({}, None)
            with pytest.raises(InvalidRequestError, match="offsets"):
                await made.producer.send_offsets_to_transaction([1], "g")

    world.run(body)


# ---- acknowledgements ----------------------------------------------------------------------------


class _Queue:
    """A share consumer without an appliance: it attaches what it is given."""

    def __init__(self, epoch: int = 3) -> None:
        self.member = AttachedMember("q", "m-1", epoch)
        self.attached: list[AttachedRecords] = []

    def _attach(self, records: Iterable[Record], outcome: str) -> AttachedRecords:
        places = tuple((one.topic, one.partition, one.offset) for one in records)
        rows = [(f"id of {topic}", number, offset) for topic, number, offset in places]
        self.attached.append(AttachedRecords(self.member, places, rows, outcome))
        return self.attached[-1]

    @property
    def ends(self) -> list[str | None]:
        return [one.ended_by for one in self.attached]


def _record(offset: int) -> Record:
    return Record("jobs", 0, offset, 0, 0, None, b"x", [], 0)


@SCRIPTED
def test_acknowledgements_go_with_the_commit_and_end_with_the_transaction(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        producer, queue = made.producer, _Queue()
        acknowledge = producer.send_acknowledgements_to_transaction
        with pytest.raises(InvalidTransactionError, match="begin_transaction"):
            await acknowledge(queue, [_record(0)])
        await producer.begin_transaction()
        await acknowledge(queue, [_record(0)])
        await producer.abort_transaction()
        assert "acknowledgements" not in made.front.requests[-1][1]
        made.front.plan[END].append(LOST_AFTER)  # asked again, with the same acknowledgements
        async with producer.transaction():
            await acknowledge(queue, [_record(offset) for offset in (4, 3, 1)])
            await acknowledge(queue, _record(5), AcknowledgeType.RELEASE)
            await acknowledge(queue, [])
            assert queue.ends == ["abort", None, None]
        carried = [
            {
                "group": "q", "member_id": "m-1", "member_epoch": 3,
                "acknowledge": [
                    ["id of jobs", 0, 1, 1, "accept"], ["id of jobs", 0, 3, 4, "accept"],
                    ["id of jobs", 0, 5, 5, "release"],
                ],
            }
        ]  # fmt: skip
        sent = [request for api, request in made.front.requests if api is END]
        assert [one.get("acknowledgements") for one in sent[-2:]] == [carried, carried]
        assert queue.ends == ["abort", "commit", "commit"]

    world.run(body)


@SCRIPTED
def test_a_lost_lock_makes_the_transaction_abortable(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        queue = _Queue()
        made.front.plan[END].append(Refused(ErrorCode.LOCK_LOST, "the lock has expired"))

        async def fails() -> None:
            async with made.producer.transaction():
                await made.send(b"x")
                await made.producer.send_acknowledgements_to_transaction(queue, _record(0))

        with pytest.raises(TransactionAbortedError, match="lock has expired"):
            await fails()
        assert queue.ends == ["abort"]
        assert made.front.committed() == []

    world.run(body)


@SCRIPTED
def test_acknowledgements_that_a_commit_cannot_carry_are_refused(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        acknowledge, queue = made.producer.send_acknowledgements_to_transaction, _Queue()
        async with made.producer.transaction():
            for given, sentence in (
                ((made.producer, [_record(0)]), "no share consumer"),
                ((queue, [1]), "pass a record"),
                ((queue, 1), "pass a record"),
                ((queue, [_record(0)], "reject"), "dead-letter topic"),
                ((queue, [_record(0)], "renew"), "accept or release"),
                ((queue, [_record(0)], []), "accept or release"),
                ((queue, [_record(2 * n) for n in range(SHARE_RUNS_MAX + 1)]), "commit more often"),
            ):
                with pytest.raises(InvalidRequestError, match=sentence):
                    await acknowledge(*given)
        assert queue.ends == ["abort"]  # the one that was too large

    world.run(body)


# ---- the end -------------------------------------------------------------------------------------


@SCRIPTED
def test_a_close_aborts_what_is_open(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"x")
        await made.producer.flush()
        await made.producer.close()
        assert made.front.aborted() == [b"x"]
        with pytest.raises(ClientClosedError):
            await made.producer.begin_transaction()

    world.run(body)


@SCRIPTED
def test_a_close_without_an_answer_ends(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        (handle,) = await made.send(b"x")
        made.front.plan[END].append(SILENT)
        await made.producer.close(CLOSE_S)
        assert handle.done()

    world.run(body)


# ---- threads, and a child process ----------------------------------------------------------------


def test_one_thread_at_a_time_ends_a_transaction() -> None:
    async def body(made: Made) -> None:
        plain = made.plain
        plain.begin_transaction()
        plain.send("t", b"x", partition=0)
        steps = plain._transactions.commit(None)
        made.front.plan[Api.PRODUCE].append(ErrorCode.CONCURRENT_TRANSACTIONS)
        next(steps)  # it waits, as another thread's does
        for call in (plain.commit_transaction, plain.abort_transaction, plain.begin_transaction):
            with pytest.raises(InvalidTransactionError, match=r"is in commit_transaction\(\)"):
                call()
        with pytest.raises(InvalidTransactionError, match="being committed"):
            plain.send("t", b"y", partition=0)
        steps.close()
        plain.commit_transaction()
        assert made.front.committed() == [b"x"]

    ThreadScripted().run(body)


def test_threads_share_a_transaction_and_nothing_leaves_it() -> None:
    """Real threads, over a front that answers when somebody sleeps."""
    front = TransactionFront()
    lock = threading.Lock()
    runtime = Runtime(
        time.monotonic_ns,
        lambda _: front.connect(),
        lambda fds, ns: sleep_on((), min(ns, 1_000_000)),
        lambda: 0.5,
    )
    producer = Producer("tcp://127.0.0.1:1", runtime=runtime, **SETTINGS)
    accepted: list[list[bytes]] = []
    refused = 0
    for _ in range(5):
        values: list[bytes] = []
        go = threading.Event()

        def send(name: int, values: list[bytes] = values, go: threading.Event = go) -> None:
            nonlocal refused
            go.wait()
            for number in range(200):
                value = b"%d-%d-%d" % (len(accepted), name, number)
                try:
                    producer.send("t", value, partition=name % 3)
                except InvalidTransactionError:
                    with lock:
                        refused += 1
                    return
                with lock:
                    values.append(value)

        threads = [threading.Thread(target=send, args=(name,)) for name in range(3)]
        producer.begin_transaction()
        for thread in threads:
            thread.start()
        go.set()
        producer.commit_transaction()
        for thread in threads:
            thread.join()
        accepted.append(values)
    producer.close()
    by_epoch: dict[bytes, int] = {}
    for index, one in enumerate(one for one in front.decisions if one.outcome == "commit"):
        for _, value in front._taken.get((one.producer_id, one.epoch), []):
            by_epoch[value] = index
    for values in accepted:
        assert set(values) <= set(by_epoch), "a record that was accepted is not committed"


def test_a_handler_that_interrupted_the_producer_itself_cannot_end_its_transaction() -> None:
    """It would wait for the run of the sender that it has interrupted."""

    async def body(made: Made) -> None:
        plain = made.plain
        plain.begin_transaction()
        plain.send("t", b"x", partition=0)
        plain._sender_thread._is_running_once = True  # what such a handler finds
        for call in (plain.commit_transaction, plain.abort_transaction):
            with pytest.raises(TailraceError, match="inside a signal handler"):
                call()
        plain._sender_thread._is_running_once = False
        plain.commit_transaction()
        assert made.front.committed() == [b"x"]

    ThreadScripted().run(body)


def test_a_child_process_can_neither_send_nor_end_its_parents_transaction() -> None:
    async def body(made: Made) -> None:
        plain = made.plain
        refused: list[str] = []
        pid = -1
        with contextlib.suppress(ClientClosedError), plain.transaction():
            plain.send("t", b"x", partition=0)
            plain.flush()
            pid = os.fork()
            if pid == 0:
                for call in (
                    lambda: plain.send("t", b"child", partition=0),
                    plain.commit_transaction,
                    plain.abort_transaction,
                ):
                    try:
                        call()
                    except ClientClosedError as error:
                        refused.append(error.detail)
        if pid == 0:  # the block's end has raised too
            plain.close()
            is_right = len(refused) == 3 and not made.front.count(END)
            os._exit(REFUSED if is_right else USED)
        assert wait_for_child(pid) == REFUSED
        assert made.front.committed() == [b"x"]

    ThreadScripted().run(body)
