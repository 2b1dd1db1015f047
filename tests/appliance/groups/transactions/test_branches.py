"""Branches: which of them a decision commits, who gets one, and what kills and late writers do."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from appliance.groups.transactions import decider
from tailrace.core.errors import (
    DiskFullError,
    InvalidRequestError,
    InvalidTransactionError,
    ProducerFencedError,
    TailraceError,
    TransactionAbortedError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import SECOND_NS, Fenced, Owner, World

Branch = tuple[int, int]
"""(producer id, epoch)"""


def transaction(owner: Owner) -> dict[str, Any]:
    return {
        "transactional_id": owner.name, "owner": owner.owner, "producer_id": owner.producer_id,
        "producer_epoch": owner.epoch,
    }  # fmt: skip


def create(owner: Owner, count: int) -> None:
    assert owner.world.ask(Api.CREATE_BRANCHES, **transaction(owner), count=count) == {
        "count": count
    }


def join(owner: Owner, attempt: str = "", **more: Any) -> Branch:
    request = {**transaction(owner), "attempt": attempt or uuid.uuid4().hex, **more}
    body = owner.world.ask(Api.JOIN_TRANSACTION, **request)
    return body["producer_id"], body["producer_epoch"]


def write(world: World, branch: Branch, *workers: int) -> None:
    for index in workers or range(len(world.workers.workers)):
        world.workers.workers[index].read()
        world.workers.workers[index].produce(*branch)
        world.workers.workers[index].flush()


def ends(world: World) -> list[dict[Branch, str]]:
    """The markers of each worker's log."""
    return [
        {(producer_id, epoch): what for what, producer_id, epoch in w.log if what != "data"}
        for w in world.workers.workers
    ]


def registered(world: World) -> set[Branch]:
    """The branches that DESCRIBE_TRANSACTION shows."""
    body = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")
    return {(one[0], one[1]) for one in body["branches"]}


# ---- decisions -----------------------------------------------------------------------------------


def test_the_named_branches_commit_with_their_owner_and_the_others_abort(world: World) -> None:
    a = Owner(world)
    create(a, 3)
    first, again, late = join(a), join(a), join(a)
    own = a.current
    for branch in (first, again, late):
        write(world, branch)
    a.write()
    a.end(branches=[list(first), list(late)])
    world.settle()
    assert ends(world) == [{own: "commit", first: "commit", again: "abort", late: "commit"}] * 2


def test_a_branch_is_committed_that_wrote_to_one_worker_and_its_owner_to_none(
    world: World,
) -> None:
    a = Owner(world)
    branch = join(a)
    write(world, branch, 1)
    a.end(branches=[list(branch)], is_empty=True)
    world.lose_power()
    world.settle()
    assert ends(world) == [{}, {branch: "commit"}], "the row outlives a claim to be empty"


@pytest.mark.parametrize("by", ["producer", "init", "timeout", "operator"])
def test_every_abort_aborts_all_branches(world: World, by: str) -> None:
    a = Owner(world)
    branches = [join(a) for _ in range(3)]
    write(world, branches[0], 0)
    world.run_workers()
    if by == "producer":
        a.end("abort")
    elif by == "init":
        Owner(world)
    elif by == "timeout":
        world.wait(61)
    else:
        world.ask(Api.ABORT_TRANSACTION, transactional_id="billing")
    world.settle()
    assert ends(world) == [{branches[0]: "abort"}, {}]
    for branch in branches:
        with pytest.raises(Fenced):
            write(world, branch, 0)


def test_a_timeout_begins_with_the_first_batch_of_any_branch(world: World) -> None:
    a = Owner(world)
    branch = join(a)
    world.wait(600)
    assert a.end(branches=[list(branch)])["outcome"] == "commit", "nothing was open"
    branch = join(a)
    write(world, branch, 0)
    world.run_workers()
    world.wait(61)
    with pytest.raises(TransactionAbortedError, match="longer than its timeout"):
        a.end(branches=[list(branch)])


def test_a_commit_that_is_repeated_after_a_kill_commits_the_same_branches(world: World) -> None:
    a = Owner(world)
    kept, other = join(a), join(a)
    for branch in (kept, other):
        write(world, branch)
    request = a.request(branches=[list(kept)])
    first = world.ask(Api.END_TRANSACTION, **request)
    world.lose_power()
    assert world.ask(Api.END_TRANSACTION, **request) == first
    world.settle()
    assert ends(world) == [{kept: "commit", other: "abort"}] * 2


def test_a_failed_commit_of_the_database_decides_nothing_and_gives_no_branch_twice(
    world: World,
) -> None:
    a = Owner(world)
    mine = join(a, "mine")
    number = world.send(Api.END_TRANSACTION, **a.request(branches=[list(mine)]))
    world.step(DiskFullError("full"))
    assert world.answers[number][0]
    number = world.send(Api.JOIN_TRANSACTION, **transaction(a), attempt="other")
    world.step(DiskFullError("full"))
    assert world.answers[number][0]
    assert join(a, "mine") == mine
    assert join(a, "third") != mine
    assert join(a, "other") not in (mine, join(a, "third"))
    a.end(branches=[list(mine)])


# ---- the pool ------------------------------------------------------------------------------------


def test_the_next_transactions_have_the_same_producer_ids_under_raised_epochs(
    world: World,
) -> None:
    a = Owner(world)
    before: set[Branch] = set()
    for _ in range(3):
        create(a, 5)
        branches = [join(a) for _ in range(5)]
        assert len(set(branches)) == 5
        assert not before or {(one[0], one[1] + 1) for one in before} == set(branches)
        for branch in branches:
            write(world, branch)
        a.end(branches=[list(branch) for branch in branches])
        world.settle()
        before = set(branches)
    for branch in before:
        with pytest.raises(Fenced):
            write(world, branch)


def test_what_a_transaction_does_not_use_is_not_registered_for_the_next_ones(
    world: World,
) -> None:
    a = Owner(world)
    for count, expected in ((20, 20), (2, 2), (0, 0), (20, 20)):
        if count:
            create(a, count)
        a.end(branches=[list(join(a)) for _ in range(count)])
        assert len(registered(world)) == expected
    ids = {one[0] for one in registered(world)}
    assert ids == set(range(min(ids), min(ids) + 20)), "and its producer ids are used again"


def test_a_join_is_answered_once_every_worker_knows_the_new_producer_id(world: World) -> None:
    a = Owner(world)
    world.workers.workers[1].is_up = False
    number = world.send(Api.JOIN_TRANSACTION, **transaction(a), attempt="x")
    world.step()
    world.settle()
    assert number not in world.answers
    world.workers.workers[1].is_up = True
    world.settle()
    body = world.answer(number)
    write(world, (body["producer_id"], body["producer_epoch"]))


def test_used_up_epochs_of_a_branch_bring_a_new_producer_id(world: World) -> None:
    a = Owner(world)
    used_up = join(a)
    a.end(branches=[])
    world.settle()
    text = world.store.read("SELECT branches FROM transactional_ids")[0][0]
    world.store.write_many(
        "UPDATE transactional_ids SET branches = ?", [(text.replace(",1]", ",32767]"),)]
    )
    world.store.commit()
    world.kill()
    a = Owner(world)
    branch = join(a)
    assert branch[1] == 0
    assert branch[0] not in (used_up[0], a.producer_id)
    write(world, branch)
    a.end(branches=[list(branch)])
    world.settle()
    assert ends(world)[0][branch] == "commit"


def test_more_branches_than_a_transaction_may_have_are_refused_and_change_nothing(
    world: World,
) -> None:
    a = Owner(world)
    create(a, 2_000)
    with pytest.raises(InvalidRequestError, match="at most 2000 branches"):
        create(a, 2_001)
    attempts = {join(a) for _ in range(2_000)}
    assert len(attempts) == 2_000
    with pytest.raises(InvalidRequestError, match="those of repeated tasks included"):
        join(a)
    a.end(branches=[list(one) for one in attempts])


def test_branches_of_all_ids_together_are_bounded_and_free_again_after_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decider, "BRANCHES_IN_ALL_MAX", 10)
    a, b = Owner(world, "a"), Owner(world, "b")
    create(a, 6)
    with pytest.raises(InvalidRequestError, match="at most 10 are possible"):
        create(b, 5)
    number = world.send(Api.CREATE_BRANCHES, **transaction(b), count=4)
    world.step(DiskFullError("full"))
    assert world.answers[number][0]
    create(b, 4)
    world.kill()
    with pytest.raises(InvalidRequestError, match="at most 10 are possible"):
        join(a)
    a.end(branches=[])
    a.end(branches=[])  # the pool has what the transaction before needed: nothing
    create(b, 4)
    b.end(branches=[])


# ---- writers -------------------------------------------------------------------------------------


def test_each_attempt_gets_its_own_branch_and_a_repeated_request_the_same(world: World) -> None:
    a = Owner(world)
    create(a, 1)
    first = join(a, "one")
    assert join(a, "one") == first
    assert join(a, "two") != first


def test_a_kill_of_the_coordinator_gives_no_branch_of_before_to_another_writer(
    world: World,
) -> None:
    a = Owner(world)
    create(a, 4)
    before = {join(a) for _ in range(2)}
    for branch in before:
        write(world, branch)
    world.kill()
    world.settle()
    after = {join(a) for _ in range(3)}
    assert not after & before
    for branch in after:
        write(world, branch)
    a.end(branches=[list(branch) for branch in before | after])
    world.settle()
    assert set(ends(world)[0].values()) == {"commit"}


def test_a_writer_of_an_ended_transaction_is_refused_with_the_reason(world: World) -> None:
    a = Owner(world)
    late = transaction(a)
    a.end(branches=[list(join(a))])
    with pytest.raises(TransactionAbortedError, match="was committed at"):
        world.ask(Api.JOIN_TRANSACTION, **late, attempt="x")
    late = transaction(a)
    a.end("abort")
    with pytest.raises(TransactionAbortedError, match="was aborted at"):
        world.ask(Api.JOIN_TRANSACTION, **late, attempt="x")
    late = transaction(a)
    Owner(world)
    with pytest.raises(ProducerFencedError, match="has taken over"):
        world.ask(Api.JOIN_TRANSACTION, **late, attempt="x")
    with pytest.raises(ProducerFencedError, match="has taken over"):
        world.ask(Api.CREATE_BRANCHES, **late, count=1)


def test_a_join_that_waits_is_refused_when_its_transaction_ends_meanwhile(world: World) -> None:
    a = Owner(world)
    for worker in world.workers.workers:
        worker.is_up = False
    number = world.send(Api.JOIN_TRANSACTION, **transaction(a), attempt="x")
    world.step()
    world.send(Api.END_TRANSACTION, **a.request("abort"))
    world.step()
    for worker in world.workers.workers:
        worker.is_up = True
    world.settle()
    with pytest.raises(TransactionAbortedError):
        world.answer(number)


def test_an_idle_id_forgets_its_branches_and_the_next_transaction_makes_them_anew(
    world: World,
) -> None:
    a = Owner(world)
    old = join(a)
    world.wait(2 * 3_600)
    world.settle()
    assert registered(world) == set()
    with pytest.raises(Fenced):
        write(world, old)
    with pytest.raises(TransactionAbortedError, match="was not used for long"):
        join(a)
    b = Owner(world)
    branch = join(b)
    assert branch == (old[0], old[1] + 1)
    write(world, branch)
    b.end(branches=[list(branch)])
    world.settle()
    assert ends(world)[0] == {branch: "commit"}


# ---- forgeries -----------------------------------------------------------------------------------


def test_branches_of_others_are_refused_and_nothing_is_decided(world: World) -> None:
    a, b = Owner(world), Owner(world, "other")
    mine, other = join(a), join(b)
    write(world, mine)
    for forged in (other, (mine[0], mine[1] + 1), (5, 0), a.current):
        with pytest.raises(InvalidTransactionError, match="is not a branch"):
            a.end(branches=[list(mine), list(forged)])
    assert ends(world) == [{}, {}]
    a.end(branches=[list(mine)])
    world.settle()
    assert ends(world) == [{mine: "commit"}] * 2


@pytest.mark.parametrize(
    "branches",
    [7, "x", [7], [[1]], [[1, 2, 3]], [["1", 2]], [[True, 2]], [[-1, 2]], [[1 << 63, 2]],
     [[1, 1 << 15]], [[1, 2], [1, 2]], [[1, 2]] * 2_001, {"a": 1}],
)  # fmt: skip
def test_malformed_branches_are_refused(world: World, branches: Any) -> None:
    a = Owner(world)
    with pytest.raises(InvalidRequestError):
        a.end(branches=branches)
    with pytest.raises(InvalidRequestError):
        a.end("prepare", branches=branches)
    a.end()


def test_an_abort_that_names_branches_is_refused(world: World) -> None:
    a = Owner(world)
    branch = join(a)
    with pytest.raises(InvalidRequestError, match="an abort takes no branches"):
        a.end("abort", branches=[list(branch)])


@pytest.mark.parametrize(
    "wrong",
    [{"attempt": ""}, {"attempt": 7}, {"attempt": "x" * 65}, {"owner": None}, {"owner": "x"},
     {"producer_id": None}, {"producer_epoch": -1}, {"transactional_id": ""}],
)  # fmt: skip
def test_malformed_joins_are_refused(world: World, wrong: dict[str, Any]) -> None:
    a = Owner(world)
    with pytest.raises(TailraceError):
        world.ask(Api.JOIN_TRANSACTION, **{**transaction(a), "attempt": "x", **wrong})


@pytest.mark.parametrize("count", [None, 0, -1, "3", True, 1.5, 1 << 40])
def test_malformed_counts_are_refused(world: World, count: Any) -> None:
    a = Owner(world)
    with pytest.raises(InvalidRequestError):
        world.ask(Api.CREATE_BRANCHES, **transaction(a), count=count)


# ---- prepared ------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_prepared_branches_are_decided_with_their_transaction_after_kills(
    world: World, outcome: str
) -> None:
    a = Owner(world)
    named, other = join(a), join(a)
    for branch in (named, other):
        write(world, branch)
    a.write()
    own = a.current
    world.ask(Api.END_TRANSACTION, **a.request("prepare", branches=[list(named)]))
    world.lose_power()
    world.settle()
    with pytest.raises(InvalidTransactionError, match="takes no more records"):
        join(a)
    assert ends(world) == [{}, {}]
    with pytest.raises(InvalidRequestError, match="content is fixed"):
        a.end(branches=[list(other)])
    a.end(outcome)
    world.settle()
    assert ends(world) == [{own: outcome, named: outcome, other: "abort"}] * 2


def test_preparing_again_takes_the_same_branches_only(world: World) -> None:
    a = Owner(world)
    named, other = join(a), join(a)
    for _ in range(2):
        world.ask(Api.END_TRANSACTION, **a.request("prepare", branches=[list(named)]))
    with pytest.raises(InvalidTransactionError, match="or other branches"):
        world.ask(Api.END_TRANSACTION, **a.request("prepare", branches=[list(other)]))
    with pytest.raises(InvalidTransactionError, match="takes no more records"):
        join(a)
    assert world.now_ns < 600 * SECOND_NS
