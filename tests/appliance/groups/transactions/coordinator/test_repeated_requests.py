"""Requests that come again, or late: answered, and decided once."""

from __future__ import annotations

import pytest

from appliance.groups.transactions.ids.ends import (
    BY_PRODUCER,
    BY_TIMEOUT,
    KEPT,
    KEPT_BY_OTHERS,
    End,
    decoded,
    with_end,
)
from appliance.groups.transactions.step import WAIT_NS
from shm.messages.transaction_messages import Outcome
from tailrace.core.errors import (
    DiskFullError,
    InvalidTransactionError,
    ProducerFencedError,
    TransactionAbortedError,
    UnknownTransactionalIdError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    Owner,
    World,
    commit_of,
    markers,
)


def test_a_commit_whose_answer_was_lost_is_answered_again_and_decides_nothing(
    world: World,
) -> None:
    a = Owner(world)
    a.write()
    request = a.request(offsets=[commit_of()])
    first = world.ask(Api.END_TRANSACTION, **request)
    assert world.ask(Api.END_TRANSACTION, **request) == first
    world.kill()
    assert world.ask(Api.END_TRANSACTION, **request) == first
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]


def test_a_repeated_commit_does_not_end_the_transaction_after_it(world: World) -> None:
    a = Owner(world)
    a.write()
    request = a.request()
    a.end()
    world.settle()
    a.write()  # the next transaction has begun
    assert world.ask(Api.END_TRANSACTION, **request)["producer_epoch"] == a.epoch
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]
    assert world.workers.workers[0].open_in() == {a.producer_id: a.epoch}
    a.end("abort")
    with pytest.raises(InvalidTransactionError, match="committed before"):
        world.ask(Api.END_TRANSACTION, **{**request, "outcome": "abort"})


def test_a_repeated_commit_is_answered_as_one_after_an_operator_has_aborted_the_next(
    world: World,
) -> None:
    a = Owner(world)
    request = a.request()
    world.ask(Api.END_TRANSACTION, **request)
    world.ask(Api.ABORT_TRANSACTION, transactional_id="billing")
    body = world.ask(Api.END_TRANSACTION, **request)
    assert (body["outcome"], body["producer_epoch"]) == ("commit", 2)


def test_the_outcome_of_an_owners_transaction_is_known_however_often_others_abort_since(
    world: World,
) -> None:
    """An operator's script aborts all ids again and again."""
    a = Owner(world)
    committed = a.request()
    world.ask(Api.END_TRANSACTION, **committed)
    for _ in range(KEPT_BY_OTHERS - 1):
        world.ask(Api.ABORT_TRANSACTION, transactional_id="billing")
        world.settle()
        body = world.ask(Api.END_TRANSACTION, **committed)
        assert body["outcome"] == "commit"
    a.epoch = body["producer_epoch"]
    open_one = a.request()
    for _ in range(KEPT_BY_OTHERS):
        world.ask(Api.ABORT_TRANSACTION, transactional_id="billing")
        world.settle()
        with pytest.raises(TransactionAbortedError, match="by an operator"):
            world.ask(Api.END_TRANSACTION, **open_one)


def test_the_ends_that_are_kept_have_a_bound_and_an_owners_end_leaves_two() -> None:
    text = "[]"
    for epoch in range(3 * KEPT_BY_OTHERS):
        text = with_end(text, End(1, 7, epoch, Outcome.ABORT, BY_TIMEOUT, 0))
    assert len(decoded(text)) == KEPT_BY_OTHERS
    text = with_end(text, End(1, 7, 3 * KEPT_BY_OTHERS, Outcome.COMMIT, BY_PRODUCER, 0))
    assert [one.by for one in decoded(text)] == [BY_PRODUCER, BY_TIMEOUT]
    assert len(decoded(text)) == KEPT


def test_a_request_that_waited_too_long_is_answered_once_when_its_step_is_undone(
    world: World,
) -> None:
    Owner(world)
    number = world.send(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000)
    world.now_ns += 2 * WAIT_NS
    world.step(DiskFullError("the disk is full"))
    assert number in world.answers


def test_an_epoch_that_nobody_was_given_is_refused(world: World) -> None:
    a = Owner(world)
    a.epoch += 1
    with pytest.raises(InvalidTransactionError):
        a.end()
    a.owner += 1
    with pytest.raises(ProducerFencedError):
        a.end()
    with pytest.raises(UnknownTransactionalIdError):
        world.ask(Api.END_TRANSACTION, **{**a.request(), "transactional_id": "other"})
