"""Owners of transactional ids: who is fenced, who learns what, and when an init is answered."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.groups.transactions.step import WAIT_NS
from tailrace.core.errors import (
    InvalidRequestError,
    ProducerFencedError,
    TailraceError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    SECOND_NS,
    Fenced,
    Owner,
    World,
    markers,
)


def test_a_second_owner_aborts_what_is_open_and_fences_the_first(world: World) -> None:
    a = Owner(world)
    a.write()
    b = Owner(world, client_id="b")
    assert markers(world) == [["abort"], ["abort"]]
    assert b.epoch == a.epoch + 1
    with pytest.raises(ProducerFencedError, match="'b' has taken over") as caught:
        a.end()
    assert "the transaction was aborted" in str(caught.value)
    with pytest.raises(Fenced):
        a.write()
    with pytest.raises(ProducerFencedError):
        world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing", owner=a.owner)
    b.write()
    b.end()


def test_a_fenced_owner_learns_that_its_commit_was_made(world: World) -> None:
    a = Owner(world)
    a.write()
    request = a.request()
    world.ask(Api.END_TRANSACTION, **request)  # its answer was lost
    Owner(world, client_id="b")
    with pytest.raises(ProducerFencedError, match="the transaction was committed"):
        world.ask(Api.END_TRANSACTION, **request)


def test_a_fenced_owner_that_asks_about_its_transaction_learns_how_it_ended(world: World) -> None:
    a = Owner(world)
    a.end()
    world.settle()
    a.write()
    asked: dict[str, Any] = {"transactional_id": a.name, "owner": a.owner}
    mine = {"producer_id": a.producer_id, "producer_epoch": a.epoch}
    b = Owner(world, client_id="b")
    for about, outcome in (
        (mine, "was aborted at"),
        ({**mine, "producer_epoch": a.epoch - 1}, "was committed at"),
        ({"producer_id": b.producer_id, "producer_epoch": b.epoch}, "is not known here"),
        ({}, "is not known here"),
    ):
        with pytest.raises(ProducerFencedError, match=outcome):
            world.ask(Api.DESCRIBE_TRANSACTION, **asked, **about)
    b.end()  # the outcome of another owner's transaction is not told
    other = {"producer_id": b.producer_id, "producer_epoch": b.epoch - 1}
    with pytest.raises(ProducerFencedError, match="is not known here"):
        world.ask(Api.DESCRIBE_TRANSACTION, **asked, **other)
    with pytest.raises(InvalidRequestError):
        world.ask(Api.DESCRIBE_TRANSACTION, **asked, producer_id="x", producer_epoch=0)


def test_two_owners_that_alternate_never_write_under_each_others_epoch(world: World) -> None:
    a = Owner(world)
    for _ in range(5):
        b = Owner(world, client_id="b")
        with pytest.raises(ProducerFencedError):
            a.end()
        with pytest.raises(Fenced):
            a.write(0)
        a = Owner(world, client_id="a")
        with pytest.raises(ProducerFencedError):
            b.end()
        a.write()
        a.end()
        world.settle()
    assert markers(world) == [["commit"] * 5] * 2


def test_init_is_answered_when_the_markers_are_durable_everywhere(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    number = world.send(
        Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000, client_id="b"
    )
    world.step()
    for worker in world.workers.workers:
        worker.read()
    world.coordinator.workers_changed()
    world.step()
    assert number not in world.answers, "markers in the ring are not durable"
    world.workers.workers[0].flush()
    world.coordinator.workers_changed()
    world.step()
    assert number not in world.answers
    world.workers.workers[1].flush()
    world.coordinator.workers_changed()
    world.step()
    assert world.answer(number)["owner"] > a.owner


def test_an_init_names_the_worker_that_it_waits_for(world: World) -> None:
    Owner(world)
    world.workers.workers[1].is_up = False
    number = world.send(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000)
    world.step()
    world.run_workers()
    world.wait(WAIT_NS / SECOND_NS)
    with pytest.raises(TailraceError, match="carried out by worker-1"):
        world.answer(number)


def test_of_two_inits_that_wait_the_older_one_is_fenced(world: World) -> None:
    Owner(world)
    first, second = (
        world.send(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1000)
        for _ in range(2)
    )
    world.step()
    world.settle()
    with pytest.raises(ProducerFencedError):
        world.answer(first)
    assert world.answer(second)["producer_epoch"] == 2


def test_a_repeat_of_the_newest_init_is_answered_again_and_takes_nothing_over(
    world: World,
) -> None:
    init: dict[str, Any] = {
        "transactional_id": "billing", "timeout_ms": 60_000, "attempt": "ab" * 16,
    }  # fmt: skip
    numbers = [world.send(Api.INIT_TRANSACTIONS, **init) for _ in range(2)]
    world.step()
    world.settle()
    first, second = map(world.answer, numbers)
    assert first == second
    world.kill()
    a = Owner(world, attempt="ab" * 16)
    assert (a.owner, a.epoch) == (first["owner"], 0)
    world.settle()
    a.write()
    assert world.ask(Api.INIT_TRANSACTIONS, **init) == first
    a.end()
    world.settle()
    assert markers(world) == [["commit"], ["commit"]]


def test_an_init_of_another_attempt_or_of_none_takes_over(world: World) -> None:
    owners = [Owner(world, attempt=attempt).owner for attempt in ("a", "b", "a", "", "")]
    assert len(set(owners)) == 5


def test_a_repeated_init_of_an_idle_id_registers_it(world: World) -> None:
    Owner(world, attempt="a")
    world.wait(2 * 3_600)
    world.settle()
    Owner(world, attempt="a").write()


def test_a_worker_that_does_not_exist_any_more_is_not_waited_for(world: World) -> None:
    Owner(world)
    world.workers.workers[1].is_up = world.workers.workers[1].exists = False
    assert Owner(world).epoch == 1
