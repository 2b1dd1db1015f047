"""Transactional ids that are idle, at rest, or expired."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from appliance.groups.base.limits import TransactionLimits
from tailrace.core.errors import (
    StorageError,
    TransactionAbortedError,
    UnknownTransactionalIdError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    Fenced,
    Owner,
    World,
    markers,
)


def test_an_idle_id_is_unregistered_and_its_owner_registers_it_again(world: World) -> None:
    a = Owner(world)
    a.write()
    a.end()
    world.settle()
    world.wait(2 * 3_600)
    world.settle()
    with pytest.raises(Fenced):
        a.write()
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing", owner=a.owner)
    a.take(found)
    a.write()
    a.end()
    world.settle()
    assert markers(world) == [["commit", "commit"]] * 2


def resting(world: World) -> list[Owner]:
    """Three owners without anything open, behind a restart of the coordinator."""
    owners = [Owner(world, name) for name in ("a", "b", "c")]
    for one in owners:
        one.end()
    world.settle()
    world.wait(5)  # the rows of carried-out decisions go
    world.kill()
    world.settle()
    assert len(world.coordinator._table) == 0
    return owners


def test_ids_at_rest_behind_a_restart_are_registered_and_go_on_when_they_are_used(
    world: World,
) -> None:
    a, b, c = resting(world)
    a.write()
    world.settle()
    a.end()
    b.write(1)
    b.end("abort")
    world.kill_worker(0)  # it is fed by loaded and packed ids
    world.settle()
    for one in (a, b, c):
        one.write()
        world.settle()
        one.end()
    world.settle()
    assert markers(world)[0] == ["commit"] * 4
    assert markers(world)[1] == ["commit", "abort", *["commit"] * 3]


def test_ids_at_rest_behind_a_restart_are_unregistered_when_they_are_idle(world: World) -> None:
    a, b, _ = resting(world)
    world.wait(1_800)
    a.end()
    world.wait(1_900)
    world.settle()
    with pytest.raises(Fenced):
        b.write()
    a.write()
    a.end()
    found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="b", owner=b.owner)
    b.take(found)
    b.write()
    b.end()


def test_the_timeout_of_an_id_at_rest_begins_with_its_report_though_it_is_read_only_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is in the database, and a disk fails meanwhile."""
    a, _, _ = resting(world)
    a.write()
    with monkeypatch.context() as patch:
        patch.setattr(world.coordinator._rows, "id_of_number", fails)
        world.settle()
    world.wait(70)
    world.settle()
    assert markers(world) == [["abort"]] * 2


def fails(*_: Any) -> NoReturn:
    raise StorageError("the disk is gone")


def test_an_owner_learns_when_to_ask_before_its_id_is_unregistered(tmp_path: Path) -> None:
    world = World(tmp_path, limits=TransactionLimits(id_expiration_ms=60_000))
    body = world.ask(Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=60_000)
    a = Owner(world)
    assert body["idle_ms"] == 30_000
    world.wait(body["idle_ms"] / 1_000)
    world.settle()
    a.write()


def test_a_repeated_question_of_an_idle_owner_waits_for_every_worker_too(world: World) -> None:
    a = Owner(world)
    world.wait(2 * 3_600)
    world.settle()
    asked: dict[str, Any] = {"transactional_id": "billing", "owner": a.owner}
    numbers = [world.send(Api.DESCRIBE_TRANSACTION, **asked) for _ in range(2)]
    world.step()
    numbers.append(world.send(Api.DESCRIBE_TRANSACTION, **asked))
    world.step()
    assert not world.answers.keys() & set(numbers)
    world.settle()
    assert {world.answer(number)["producer_epoch"] for number in numbers} == {1}


def test_a_commit_of_an_idle_id_is_answered_with_the_next_epoch(world: World) -> None:
    a = Owner(world)
    world.wait(2 * 3_600)
    world.settle()
    world.kill()
    world.settle()
    with pytest.raises(TransactionAbortedError, match="not used for long") as caught:
        a.end()
    a.take(caught.value.body)  # type: ignore[attr-defined]
    world.settle()
    a.write()
    a.end()


def test_an_unused_id_is_forgotten_and_its_numbers_are_not_given_again(tmp_path: Path) -> None:
    world = World(tmp_path, limits=TransactionLimits(id_expiration_ms=7_200_000))
    a = Owner(world)
    world.wait(3_700)
    world.settle()
    world.wait(2 * 7_200)
    world.settle()
    assert world.ask(Api.LIST_TRANSACTIONS)["transactions"] == []
    with pytest.raises(UnknownTransactionalIdError):
        a.end()
    world.kill()
    b = Owner(world)
    assert b.producer_id != a.producer_id
    assert b.owner > a.owner
    assert world.store.read("SELECT id_number FROM transactional_ids") == [(2,)]
