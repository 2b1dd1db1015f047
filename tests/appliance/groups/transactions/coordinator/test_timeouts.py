"""Transactions that are aborted by their timeout or by an operator."""

from __future__ import annotations

import pytest

from tailrace.core.errors import (
    DiskFullError,
    TransactionAbortedError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    SECOND_NS,
    Owner,
    World,
    markers,
)


def test_a_transaction_is_aborted_when_its_timeout_is_over_and_not_before(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    world.wait(60)  # nothing was sent: nothing times out
    a.write()
    world.run_workers()
    world.wait(4.9)
    assert markers(world) == [[], []]
    world.wait(0.2)
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]
    with pytest.raises(TransactionAbortedError, match="longer than its timeout, 5000 ms") as caught:
        a.end()
    a.take(caught.value.body)  # type: ignore[attr-defined]
    a.write()
    a.end()


def test_a_commit_that_meets_its_timeout_is_one_of_the_two(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    a.write()
    world.run_workers()
    world.now_ns += 6 * SECOND_NS
    number = world.send(Api.END_TRANSACTION, **a.request())  # read before timers run
    world.step()
    assert world.answer(number)["outcome"] == "commit"
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]
    assert world.ask(Api.LIST_TRANSACTIONS)["totals"]["aborts"] == 0


def test_a_timeout_starts_anew_after_a_restart(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    a.write()
    world.run_workers()
    world.wait(4)
    world.kill()
    world.run_workers()
    world.wait(4)
    assert markers(world) == [[], []]
    world.wait(2)
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]


def test_a_timeout_that_could_not_be_committed_is_tried_again(world: World) -> None:
    a = Owner(world, timeout_ms=5_000)
    a.write()
    world.run_workers()
    world.now_ns += 6 * SECOND_NS
    world.step(DiskFullError("full"))
    world.run_workers()
    assert markers(world) == [[], []]
    world.wait(2)
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]


def test_an_operator_aborts_and_the_owner_may_go_on(world: World) -> None:
    a = Owner(world)
    a.write()
    assert world.ask(Api.ABORT_TRANSACTION, transactional_id="billing") == {}
    world.settle()
    assert markers(world) == [["abort"], ["abort"]]
    with pytest.raises(TransactionAbortedError, match="by an operator"):
        a.end()
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing", owner=a.owner)
    a.take(found)
    a.write()
    a.end()
