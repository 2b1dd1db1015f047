"""Branches of transactions, of Producer and AsyncProducer: the owner that makes and names them, and
the writer of one.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tailrace import FinishedBranch, TransactionBranch, WrittenPartition
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRequestError,
    InvalidSettingError,
    InvalidTransactionError,
    ProducerFencedError,
    RequestTimeoutError,
    TransactionAbortedError,
)
from tailrace.producer.producer import Producer
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

CREATE, JOIN, END = Api.CREATE_BRANCHES, Api.JOIN_TRANSACTION, Api.END_TRANSACTION
BRANCH = TransactionBranch("billing-1", 1, FIRST_ID, 0, 0)


def opened_front() -> TransactionFront:
    """A front where an owner has opened the transaction of BRANCH."""
    return TransactionFront().known(owner=1)


def written(branch: TransactionBranch, number: int) -> FinishedBranch:
    """The result of a writer that has joined as the `number`th."""
    return FinishedBranch(branch, BRANCH_ID + number, branch.producer_epoch, ())


async def join_and_write(made: Made, number: int, *values: bytes) -> tuple[int, int]:
    """Another process has joined, and its batches are in the log."""
    key = BRANCH_ID + number, made.front.registered
    made.front.attempts[f"writer {number}"] = key
    made.front.write(*key, *values)
    return key


# ---- the owner -----------------------------------------------------------------------------------


@SCRIPTED
def test_the_named_branches_commit_with_the_owners_records_and_no_others(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        first = await producer.create_transaction_branches(2)
        more = await producer.create_transaction_branches(1)
        assert [branch.number for branch in first + more] == [0, 1, 2]
        assert {branch.producer_id for branch in first + more} == {FIRST_ID}
        assert made.front.branch_count == 3, "a request has the count in all"
        for number in range(3):
            await join_and_write(made, number, b"row %d" % number)
        await made.send(b"own")
        finished = [written(first[0], 0), written(more[0], 2)]
        await producer.commit_transaction(branches=finished)
        assert made.front.committed() == [b"own", b"row 0", b"row 2"]
        async with producer.transaction() as transaction:
            (branch,) = await producer.create_transaction_branches(1)
            assert branch.number == 0
            await join_and_write(made, 0, b"next")
            transaction.branches = [written(branch, 0)]
        assert made.front.committed()[-1] == b"next"

    world.run(body)


@SCRIPTED
def test_a_commit_that_forgets_its_branches_is_refused_and_may_be_repeated(
    world: ScriptedWorld,
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        (branch,) = await producer.create_transaction_branches(1)
        await join_and_write(made, 0, b"row")
        with pytest.raises(InvalidTransactionError, match="has 1 branches: name those that count"):
            await producer.commit_transaction()
        await producer.commit_transaction(branches=[written(branch, 0), written(branch, 0)])
        assert made.front.committed() == [b"row"]

        async def forgets() -> None:
            async with producer.transaction():
                await producer.create_transaction_branches(1)

        with pytest.raises(InvalidTransactionError, match="name those that count"):
            await forgets()
        assert made.front.decisions[-1].outcome == "abort"
        async with producer.transaction() as transaction:
            await producer.create_transaction_branches(1)
            transaction.branches = []
        assert made.front.decisions[-1].outcome == "commit"

    world.run(body)


@SCRIPTED
def test_an_abort_of_branches_alone_is_asked_for(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.producer.create_transaction_branches(1)
        await made.producer.abort_transaction()
        assert made.front.decisions[-1].outcome == "abort"
        assert made.front.count(END) == 1

    world.run(body)


@SCRIPTED
def test_branches_of_another_transaction_are_refused(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        (old,) = await producer.create_transaction_branches(1)
        await producer.commit_transaction(branches=[])
        await producer.begin_transaction()
        others = [old, BRANCH, TransactionBranch("other", old.owner, FIRST_ID, 1, 0)]
        for other in others:
            with pytest.raises(InvalidTransactionError, match="is not one of this transaction"):
                await producer.commit_transaction(branches=[written(other, 0)])
        for wrong in (old, 7, [old], ["x"]):
            with pytest.raises(InvalidRequestError, match="of each writer"):
                await producer.commit_transaction(branches=wrong)
        for count in (0, -1, True, "2", None):
            with pytest.raises(InvalidRequestError, match="count is"):
                await producer.create_transaction_branches(count)
        await producer.commit_transaction()

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("lost", [LOST_BEFORE, LOST_AFTER, ErrorCode.NOT_READY])
def test_a_lost_answer_makes_no_branch_twice_and_decides_once(
    world: ScriptedWorld, lost: Any
) -> None:
    async def body(made: Made) -> None:
        producer, plan = made.producer, made.front.plan
        await producer.begin_transaction()
        plan[CREATE].append(lost)
        branches = await producer.create_transaction_branches(2)
        assert made.front.branch_count == 2
        for number in range(2):
            await join_and_write(made, number, b"row %d" % number)
        plan[END].append(lost)
        await producer.commit_transaction(branches=[written(branches[1], 1)])
        assert made.front.committed() == [b"row 1"]
        assert len(made.front.decisions) == 2, "an init's, and this one"

    world.run(body)


@SCRIPTED
def test_a_commit_of_unknown_outcome_keeps_its_branches(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        (branch,) = await producer.create_transaction_branches(1)
        await join_and_write(made, 0, b"row")
        made.front.plan[END].append(SILENT)
        with pytest.raises(RequestTimeoutError, match="is not known"):
            await producer.commit_transaction(CLOSE_S, branches=[written(branch, 0)])
        with pytest.raises(InvalidTransactionError, match="named other branches"):
            await producer.commit_transaction(branches=[])
        await producer.commit_transaction()
        assert made.front.committed() == [b"row"]

    world.run(body)


@SCRIPTED
@pytest.mark.parametrize("by", ["timeout", "owner"])
def test_branches_of_a_transaction_that_was_ended_cannot_be_made(
    world: ScriptedWorld, by: str
) -> None:
    async def body(made: Made) -> None:
        producer = made.producer
        await producer.begin_transaction()
        await made.send(b"row")
        await producer.flush()
        if by == "timeout":
            made.front.abort_by("timeout")
            with pytest.raises(TransactionAbortedError):
                await producer.create_transaction_branches(1)
            await producer.abort_transaction()
            async with producer.transaction():
                await made.send(b"next")
            assert made.front.committed() == [b"next"]
        else:
            made.front.take_over()
            with pytest.raises(ProducerFencedError, match="has taken the id over"):
                await producer.create_transaction_branches(1)
            with pytest.raises(ProducerFencedError):
                await producer.begin_transaction()

    world.run(body)


@SCRIPTED
def test_too_many_branches_leave_the_transaction_as_it_is(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        await made.producer.begin_transaction()
        await made.send(b"row")
        made.front.plan[CREATE].append(Refused(ErrorCode.INVALID_REQUEST, "at most 2000 branches"))
        with pytest.raises(InvalidRequestError, match="at most 2000"):
            await made.producer.create_transaction_branches(5_000)
        await made.producer.commit_transaction(branches=[])
        assert made.front.committed() == [b"row"]

    world.run(body)


@SCRIPTED
def test_outside_of_a_transaction_there_are_no_branches(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        with pytest.raises(InvalidTransactionError, match="does not fit"):
            await made.producer.create_transaction_branches(1)
        with pytest.raises(InvalidTransactionError, match="writes no branch"):
            await made.producer.finish_branch()

    world.run(body)


# ---- the writer ----------------------------------------------------------------------------------

WRITER: dict[str, Any] = {"transactional_id": None, "transaction_branch": BRANCH}


@SCRIPTED
def test_a_writer_sends_at_once_and_finishes_with_what_it_has_written(
    world: ScriptedWorld,
) -> None:
    front = opened_front()

    async def body(made: Made) -> None:
        await made.send(b"a", b"b")
        await made.send(b"c", partition=1)
        finished = await made.producer.finish_branch()
        assert finished == FinishedBranch(
            BRANCH, BRANCH_ID, 0, (WrittenPartition("t", 0, 1, 2), WrittenPartition("t", 1, 1, 1))
        )
        assert (finished.record_count, finished.batch_count) == (3, 2)
        assert await made.producer.finish_branch() == finished
        with pytest.raises(InvalidTransactionError, match="is finished"):
            await made.send(b"late")
        assert front.count(JOIN) == 1
        assert {(one.producer_id, one.producer_epoch) for one in front.headers} == {(BRANCH_ID, 0)}
        front._decide("commit", "owner", (), [(finished.producer_id, finished.producer_epoch)])
        assert front.committed() == [b"a", b"b", b"c"]

    world.run(body, front, **WRITER)


@SCRIPTED
def test_a_writer_without_records_asks_nothing(world: ScriptedWorld) -> None:
    front = opened_front()

    async def body(made: Made) -> None:
        finished = await made.producer.finish_branch()
        assert finished == FinishedBranch(BRANCH, -1, -1, ())
        assert front.count(JOIN) == 0

    world.run(body, front, **WRITER)


@SCRIPTED
def test_a_writer_can_neither_commit_nor_abort(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        for call in ("begin_transaction", "commit_transaction", "abort_transaction"):
            with pytest.raises(InvalidTransactionError, match="neither commit nor abort"):
                await getattr(made.producer, call)()

    world.run(body, opened_front(), **WRITER)


@SCRIPTED
@pytest.mark.parametrize("lost", [LOST_BEFORE, LOST_AFTER, ErrorCode.NOT_READY])
def test_a_join_whose_answer_was_lost_is_repeated_for_the_same_branch(
    world: ScriptedWorld, lost: Any
) -> None:
    front = opened_front()
    front.plan[JOIN].append(lost)

    async def body(made: Made) -> None:
        await made.send(b"a")
        finished = await made.producer.finish_branch()
        assert finished.record_count == 1
        assert len(front.attempts) == 1

    world.run(body, front, **WRITER)


@SCRIPTED
@pytest.mark.parametrize("lost", [LOST_AFTER, ErrorCode.CONCURRENT_TRANSACTIONS])
def test_a_batch_that_is_sent_again_is_in_the_branch_once(world: ScriptedWorld, lost: Any) -> None:
    front = opened_front()
    front.plan[Api.PRODUCE].append(lost)

    async def body(made: Made) -> None:
        await made.send(b"a")
        assert (await made.producer.finish_branch()).record_count == 1
        front._decide("commit", "owner", (), front.attempts.values())
        assert front.committed() == [b"a"]

    world.run(body, front, **WRITER)


@SCRIPTED
@pytest.mark.parametrize("when", ["before it joins", "after it has joined"])
@pytest.mark.parametrize("by", ["commit", "owner"])
def test_a_writer_of_an_ended_transaction_fails_with_the_reason(
    world: ScriptedWorld, by: str, when: str
) -> None:
    front = opened_front()
    expected = TransactionAbortedError if by == "commit" else ProducerFencedError

    async def body(made: Made) -> None:
        if when == "after it has joined":
            await made.send(b"in time")
            await made.producer.flush()
        if by == "commit":
            front._decide("commit", "owner")
        else:
            front.take_over()
        (future,) = await made.send(b"late")
        with pytest.raises(expected):
            await made.producer.finish_branch()
        with pytest.raises(expected):
            await future
        with pytest.raises(expected):
            await made.send(b"later")
        with pytest.raises(expected):
            await made.producer.finish_branch()

    world.run(body, front, **WRITER)


@SCRIPTED
def test_a_batch_that_a_worker_refuses_for_good_fails_the_branch(world: ScriptedWorld) -> None:
    """Its join says that the transaction goes on: the worker has lost its registration."""
    front = opened_front()
    front.plan[Api.PRODUCE].append(ErrorCode.PRODUCER_FENCED)

    async def body(made: Made) -> None:
        await made.send(b"a")
        with pytest.raises(TransactionAbortedError, match="refused a batch of the branch"):
            await made.producer.finish_branch()
        assert front.count(JOIN) == 2

    world.run(body, front, **WRITER)


@SCRIPTED
def test_a_failed_record_fails_the_branch_and_what_was_not_sent(world: ScriptedWorld) -> None:
    front = opened_front()
    front.plan[Api.PRODUCE].append(ErrorCode.CORRUPT_BATCH)

    async def body(made: Made) -> None:
        (first,) = await made.send(b"a")
        with pytest.raises(TransactionAbortedError, match=r"a record of t-0 failed"):
            await made.producer.finish_branch()
        with pytest.raises(CorruptBatchError):
            await first
        with pytest.raises(TransactionAbortedError, match="in another branch"):
            await made.send(b"b")
        with pytest.raises(TransactionAbortedError):
            await made.producer.finish_branch()

    world.run(body, front, **WRITER)


@SCRIPTED
def test_finish_branch_waits_no_longer_than_its_timeout_and_may_be_repeated(
    world: ScriptedWorld,
) -> None:
    front = opened_front()
    front.plan[JOIN].append(SILENT)

    async def body(made: Made) -> None:
        await made.send(b"a")
        with pytest.raises(RequestTimeoutError, match=r"call finish_branch\(\) again"):
            await made.producer.finish_branch(CLOSE_S)
        front.restart()
        assert (await made.producer.finish_branch()).record_count == 1

    world.run(body, front, **WRITER)


# ---- values and settings -------------------------------------------------------------------------


def test_branches_go_through_pickle_and_json() -> None:
    finished = FinishedBranch(BRANCH, 5, 6, (WrittenPartition("t", 1, 2, 3),))
    for value in (BRANCH, finished):
        assert pickle.loads(pickle.dumps(value)) == value
        assert type(value).from_json(value.to_json()) == value
        assert type(value).from_json(value.to_json().encode()) == value
        assert hash(value) == hash(type(value).from_json(value.to_json()))


@pytest.mark.parametrize(
    "text",
    ["", "x", "[]", "{}", "null", '{"a": 1}', BRANCH.to_json().replace("1", '"1"'),
     BRANCH.to_json()[:-1] + ', "more": 1}', "[" * 100_000, b"\xff"],
)  # fmt: skip
def test_another_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequestError, match="as to_json"):
        TransactionBranch.from_json(text)
    with pytest.raises(InvalidRequestError, match="as to_json"):
        FinishedBranch.from_json(text)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"transaction_branch": "x"}, "give a TransactionBranch"),
        ({"transaction_branch": BRANCH, "transactional_id": "a"}, "exclude each other"),
        ({"transaction_branch": BRANCH, "acks": 1}, "acks is 1 beside a transaction_branch"),
        ({"transaction_branch": BRANCH, "enable_idempotence": False}, "enable_idempotence"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidSettingError, match=sentence):
        Producer("tcp://127.0.0.1:1", **settings)
