"""Prepared transactions of Producer and AsyncProducer: KIP-939's calls in every state, lost
answers, successors, and a close that decides nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tailrace import FinishedBranch, PreparedTransaction
from tailrace.client.records.attached_records import AttachedMember, AttachedRecords
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidTransactionError,
    ProducerFencedError,
    RequestTimeoutError,
    TransactionAbortedError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.producer.transactions.state import State
from tailrace.protocol.frame import Api
from tests.conformance.transactions.transaction_front import (
    BRANCH_ID,
    FIRST_ID,
    LOST_AFTER,
    LOST_BEFORE,
    SILENT,
    Refused,
    TransactionFront,
)
from tests.conformance.transactions.transaction_worlds import CLOSE_S, SCRIPTED, Made, ScriptedWorld

END, INIT = Api.END_TRANSACTION, Api.INIT_TRANSACTIONS
OFFSETS = {TopicPartition("in", 0): 7}


async def prepare(made: Made, tag: str = "xid-1") -> PreparedTransaction:
    await made.producer.begin_transaction()
    await made.send(b"row")
    await made.producer.send_offsets_to_transaction(OFFSETS, "group")
    prepared = await made.producer.prepare_transaction(tag)
    assert isinstance(prepared, PreparedTransaction)
    return prepared


def prepared_front(tag: str = "xid-1") -> TransactionFront:
    """A front where another producer has prepared a transaction."""
    front = TransactionFront().known(registered=2)
    front._decide("abort", "init")
    front.write(FIRST_ID, 3, b"row")
    front.prepared = {"tag": tag, "offsets": [], "branches": []}
    return front


@SCRIPTED
@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_prepared_transaction_waits_for_its_decision(world: ScriptedWorld, outcome: str) -> None:
    async def body(made: Made) -> None:
        prepared = await prepare(made)
        assert prepared == PreparedTransaction("billing-1", FIRST_ID, 0, "xid-1")
        assert made.front.committed() == []
        assert made.state.state is State.PREPARED
        with pytest.raises(InvalidTransactionError, match="the transaction is prepared"):
            await made.send(b"late")
        with pytest.raises(InvalidTransactionError, match="the transaction is prepared"):
            await made.producer.begin_transaction()
        if outcome == "commit":
            await made.producer.commit_transaction()
        else:
            await made.producer.abort_transaction()
        assert made.front.committed() == ([b"row"] if outcome == "commit" else [])
        assert len(made.front.offsets) == (outcome == "commit")
        async with made.producer.transaction():
            await made.send(b"next")
        assert made.front.committed()[-1] == b"next"

    world.run(body)


@SCRIPTED
def test_the_decision_carries_no_content_and_the_preparation_all_of_it(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        (branch,) = await producer.create_transaction_branches(1)
        made.front.attempts["w"] = (BRANCH_ID, 0)
        made.front.write(BRANCH_ID, 0, b"branch")
        with pytest.raises(InvalidTransactionError, match="name those that count"):
            await producer.prepare_transaction()
        await producer.prepare_transaction(branches=[FinishedBranch(branch, BRANCH_ID, 0, ())])
        with pytest.raises(InvalidTransactionError, match="named other branches"):
            await producer.commit_transaction(branches=[])
        await producer.commit_transaction()
        assert made.front.committed() == [b"branch"]

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("lost", [LOST_BEFORE, LOST_AFTER, ErrorCode.NOT_READY])
def test_lost_answers_are_asked_for_again(world: ScriptedWorld, lost: Any) -> None:
    async def body(made: Made) -> None:
        made.front.plan[END].append(lost)
        await prepare(made)
        made.front.plan[END].append(lost)
        await made.producer.commit_transaction()
        assert made.front.committed() == [b"row"]
        assert len(made.front.decisions) == 2, "an init's, and this one"

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("then", ["prepare", "abort"])
def test_a_preparation_of_unknown_outcome_is_repeated_or_aborted(
    world: ScriptedWorld, then: str
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        made.front.plan[END].append(SILENT)
        await producer.begin_transaction()
        await made.send(b"row")
        with pytest.raises(RequestTimeoutError, match="not known whether the transaction is prep"):
            await producer.prepare_transaction("xid", CLOSE_S)
        assert made.state.state is State.PREPARING
        with pytest.raises(InvalidTransactionError, match="call prepare_transaction"):
            await producer.commit_transaction()
        with pytest.raises(InvalidTransactionError, match="with the tag 'xid'"):
            await producer.prepare_transaction("other")
        if then == "prepare":
            assert (await producer.prepare_transaction("xid")).tag == "xid"
            await producer.commit_transaction()
            assert made.front.committed() == [b"row"]
        else:
            await producer.abort_transaction()
            assert made.front.aborted() == [b"row"]

    world.run(body)


@SCRIPTED
def test_a_second_preparation_returns_the_first(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        prepared = await prepare(made)
        assert await made.producer.prepare_transaction("xid-1") == prepared
        assert made.front.count(END) == 1
        assert await made.producer.init_transactions() == prepared
        with pytest.raises(InvalidTransactionError, match="with the tag"):
            await made.producer.prepare_transaction()
        await made.producer.abort_transaction()

    world.run(body)


@SCRIPTED
def test_closing_the_producer_leaves_it_prepared(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await prepare(made)
        await made.producer.close()
        assert made.front.prepared is not None
        assert made.front.count(END) == 1

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("raises", [False, True])
def test_a_block_in_which_it_is_prepared_decides_nothing(
    world: ScriptedWorld, raises: bool
) -> None:
    async def body(made: Made) -> None:
        async def block() -> None:
            async with made.producer.transaction():
                await made.send(b"row")
                await made.producer.prepare_transaction("xid")
                if raises:
                    raise ZeroDivisionError

        if raises:
            with pytest.raises(ZeroDivisionError):
                await block()
        else:
            await block()
        assert made.front.prepared is not None
        assert made.front.count(END) == 1
        await made.producer.commit_transaction()
        assert made.front.committed() == [b"row"]

    world.run(body)


# ---- a successor ---------------------------------------------------------------------------------

KNOWN = PreparedTransaction("billing-1", FIRST_ID, 3, "xid-1")
Decide = Callable[[Any], Awaitable[Any]]


@SCRIPTED
@pytest.mark.parametrize(
    ("decide", "is_committed"),
    [
        (lambda producer: producer.commit_transaction(), True),
        (lambda producer: producer.abort_transaction(), False),
        (lambda producer: producer.complete_transaction(KNOWN), True),
        (lambda producer: producer.complete_transaction(None), False),
        (
            lambda producer: producer.complete_transaction(
                PreparedTransaction("billing-1", FIRST_ID, 2, "xid-1")
            ),
            False,
        ),
    ],
)
def test_a_successor_decides_what_was_prepared(
    world: ScriptedWorld, decide: Decide, is_committed: bool
) -> None:
    front = prepared_front()

    async def body(made: Made) -> None:
        producer = made.producer
        assert await producer.init_transactions(keep_prepared=True) == KNOWN
        with pytest.raises(InvalidTransactionError, match="the transaction is prepared"):
            await producer.begin_transaction()
        assert await decide(producer) in (None, is_committed)
        assert front.committed() == ([b"row"] if is_committed else [])
        async with producer.transaction():
            await made.send(b"next")
        assert front.committed()[-1] == b"next"

    world.run(body, front)


@SCRIPTED
def test_without_keep_prepared_a_successor_is_refused_and_may_ask_again(
    world: ScriptedWorld,
) -> None:
    front = prepared_front("other tag")

    async def body(made: Made) -> None:
        for call in ("init_transactions", "begin_transaction"):
            with pytest.raises(InvalidTransactionError, match="has a prepared transaction"):
                await getattr(made.producer, call)()
        found = await made.producer.init_transactions(keep_prepared=True)
        assert found is not None
        assert found.tag == "other tag"
        await made.producer.abort_transaction()

    world.run(body, front)


@SCRIPTED
def test_keep_prepared_where_nothing_is_prepared_returns_nothing(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        assert await made.producer.init_transactions(keep_prepared=True) is None
        assert await made.producer.complete_transaction(None) is False
        async with made.producer.transaction():
            await made.send(b"row")
        assert made.front.committed() == [b"row"]

    world.run(body)


@SCRIPTED
def test_completing_what_was_decided_before_finds_its_outcome(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        committed = await prepare(made)
        await made.producer.commit_transaction()
        aborted = await prepare(made, "xid-2")
        await made.producer.abort_transaction()
        decided = len(made.front.decisions)
        assert await made.producer.complete_transaction(committed) is True
        with pytest.raises(InvalidTransactionError, match="before"):
            await made.producer.complete_transaction(aborted)
        unknown = PreparedTransaction("billing-1", 5, 5, "")
        with pytest.raises(InvalidTransactionError, match="not a prepared"):
            await made.producer.complete_transaction(unknown)
        assert len(made.front.decisions) == decided

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("call", ["abort", "complete"])
def test_what_an_operator_has_committed_is_never_taken_for_aborted(
    world: ScriptedWorld, call: str
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await prepare(made)
        made.front.commit_by("operator")
        with pytest.raises(InvalidTransactionError, match="was committed before"):
            await (
                producer.abort_transaction()
                if call == "abort"
                else producer.complete_transaction(None)
            )
        assert made.front.committed() == [b"row"]
        await producer.commit_transaction()
        async with producer.transaction():
            await made.send(b"next")
        assert made.front.committed() == [b"row", b"next"]

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("call", ["abort", "complete"])
def test_an_abort_of_a_prepared_transaction_whose_end_is_not_known_says_so(
    world: ScriptedWorld, call: str
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await prepare(made)
        made.front.commit_by("operator")
        made.front.is_forgotten = True  # its id was unused for long
        with pytest.raises(InvalidTransactionError, match="not known how the prepared"):
            await (
                producer.abort_transaction()
                if call == "abort"
                else producer.complete_transaction(None)
            )
        async with producer.transaction():
            await made.send(b"next")
        assert made.front.committed() == [b"row", b"next"]

    world.run(body)


@SCRIPTED
def test_complete_does_not_fit_an_open_transaction(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        with pytest.raises(InvalidTransactionError, match=r"complete_transaction\(\) does not fit"):
            await made.producer.complete_transaction(None)
        await made.producer.begin_transaction()
        with pytest.raises(InvalidTransactionError, match=r"complete_transaction\(\) does not fit"):
            await made.producer.complete_transaction(None)
        other = PreparedTransaction("other", 1, 1, "")
        await made.producer.abort_transaction()
        with pytest.raises(InvalidTransactionError, match="is one of 'other'"):
            await made.producer.complete_transaction(other)
        for wrong in (7, "x", [other]):
            with pytest.raises(InvalidRequestError, match="prepared is"):
                await made.producer.complete_transaction(wrong)

    world.run(body)


# ---- refusals ------------------------------------------------------------------------------------


@SCRIPTED
def test_a_transaction_whose_record_failed_cannot_be_prepared(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        made.front.plan[Api.PRODUCE].append(ErrorCode.CORRUPT_BATCH)
        await made.send(b"row")
        for _ in range(2):
            with pytest.raises(TransactionAbortedError, match="a record of t-0 failed"):
                await made.producer.prepare_transaction()
        await made.producer.abort_transaction()
        assert made.front.count(END) == 1

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("when", ["prepare", "commit"])
def test_one_that_was_aborted_meanwhile_is_abortable(world: ScriptedWorld, when: str) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"row")
        if when == "commit":
            await producer.prepare_transaction()
        else:
            await producer.flush()
        made.front.abort_by("limit")
        with pytest.raises(TransactionAbortedError, match="aborted by limit"):
            await getattr(producer, f"{when}_transaction")()
        await producer.abort_transaction()
        async with producer.transaction():
            await made.send(b"next")
        assert made.front.committed() == [b"next"]

    world.run(body)


@SCRIPTED
def test_another_owner_fences_the_one_that_has_prepared(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await prepare(made)
        made.front.owner += 1
        for _ in range(2):
            with pytest.raises(ProducerFencedError, match="has taken the id over"):
                await made.producer.commit_transaction()
        assert made.front.prepared is not None

    world.run(body)


@SCRIPTED
def test_refused_offsets_make_it_abortable(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.producer.send_offsets_to_transaction(OFFSETS, "group")
        made.front.plan[END].append(Refused(ErrorCode.FENCED_MEMBER, "of an older member epoch"))
        with pytest.raises(TransactionAbortedError, match="of an older member epoch"):
            await made.producer.prepare_transaction()
        await made.producer.abort_transaction()
        assert made.front.prepared is None

    world.run(body)


@SCRIPTED
def test_tags_and_acknowledgements_that_it_does_not_take(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        for tag in (None, 7, b"x", "x" * 1_025):
            with pytest.raises(InvalidRequestError, match="tag is"):
                await made.producer.prepare_transaction(tag)
        member = AttachedMember("queue", "m", 1)
        made.state.attached.append(AttachedRecords(member, (("q", 0, 1),), [("0" * 32, 0, 1)]))
        with pytest.raises(InvalidTransactionError, match="their locks expire"):
            await made.producer.prepare_transaction()
        await made.producer.commit_transaction()

    world.run(body)


def test_it_goes_through_pickle_and_json() -> None:
    assert pickle.loads(pickle.dumps(KNOWN)) == KNOWN
    assert PreparedTransaction.from_json(KNOWN.to_json()) == KNOWN
    for wrong in ("{}", "x", KNOWN.to_json().replace("3", '"3"')):
        with pytest.raises(InvalidRequestError, match="as to_json"):
            PreparedTransaction.from_json(wrong)
