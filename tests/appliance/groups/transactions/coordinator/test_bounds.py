"""Bounds of decisions, ids and epochs; requests that are malformed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.transactions.decider import UNSETTLED_MAX
from appliance.groups.transactions.ids.numbers import EPOCH_MAX
from tailrace.core.errors import (
    ConcurrentTransactionsError,
    InvalidRequestError,
    TailraceError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    Fenced,
    Owner,
    World,
    commit_of,
    markers,
    offsets,
)


def test_an_id_has_a_bound_of_decisions_that_are_not_carried_out(world: World) -> None:
    a = Owner(world)
    for _ in range(UNSETTLED_MAX):
        a.end()
    with pytest.raises(ConcurrentTransactionsError, match="worker-0, worker-1"):
        a.end()
    world.settle()
    a.end()


def test_an_empty_transaction_costs_no_row_and_moves_the_epoch(world: World) -> None:
    a = Owner(world)
    world.settle()
    world.wait(5)
    for expected in range(1, 2 * UNSETTLED_MAX):
        assert a.end(is_empty=True, offsets=[commit_of(offset=expected)])["producer_epoch"] == (
            expected
        )
    assert offsets(world) == 2 * UNSETTLED_MAX - 1
    assert world.store.read("SELECT count(*) FROM decisions") == [(0,)]
    world.settle()
    a.write()


def test_epochs_that_are_used_up_give_a_new_producer_id_and_late_batches_are_refused(
    world: World,
) -> None:
    a = Owner(world)
    entry = world.coordinator._table.get("billing", 0)
    assert entry is not None
    world.coordinator._table.change(entry, entry.row._replace(epoch=EPOCH_MAX - 1))
    a.epoch = EPOCH_MAX - 1
    world.kill_worker(0)
    world.kill_worker(1)
    world.settle()
    a.write()
    a.end()
    world.settle()
    assert a.epoch == EPOCH_MAX
    a.write()
    old = a.current
    request = a.request()
    a.end()  # answered when every worker knows the new producer id
    assert a.producer_id != old[0]
    assert a.epoch == 0
    assert world.ask(Api.END_TRANSACTION, **request)["producer_id"] == a.producer_id
    for worker in world.workers.workers:
        with pytest.raises(Fenced):
            worker.produce(*old)
    a.write()
    world.kill()
    a.end()
    world.settle()
    assert markers(world) == [["commit"] * 3] * 2


def test_an_empty_transaction_of_the_last_epoch_is_answered_when_every_worker_has_the_next_id(
    world: World,
) -> None:
    a = Owner(world)
    entry = world.coordinator._table.get("billing", 0)
    assert entry is not None
    world.coordinator._table.change(entry, entry.row._replace(epoch=EPOCH_MAX))
    a.epoch = EPOCH_MAX
    world.settle()
    slow = world.workers.workers[1]
    slow.is_up = False
    number = world.send(Api.END_TRANSACTION, **a.request(is_empty=True))
    world.step()
    world.run_workers()
    assert number not in world.answers, "the batches of the next id would be fenced there"
    slow.is_up = True
    world.settle()
    a.take(world.answer(number))
    assert a.epoch == 0
    a.write()


def test_too_many_ids_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path, limits=TransactionLimits(ids_max=2))
    Owner(world, "a")
    Owner(world, "b")
    with pytest.raises(TailraceError, match=r"transactional\.ids\.max"):
        Owner(world, "c")
    Owner(world, "a")


@pytest.mark.parametrize(
    "request_",
    [
        {"transactional_id": "", "timeout_ms": 1},
        {"transactional_id": "x" * 256, "timeout_ms": 1},
        {"transactional_id": 5, "timeout_ms": 1},
        {"transactional_id": "a"},
        {"transactional_id": "a", "timeout_ms": 0},
        {"transactional_id": "a", "timeout_ms": 900_001},
        {"transactional_id": "a", "timeout_ms": 1, "client_id": "\n"},
    ],
)
def test_a_malformed_init_is_refused(world: World, request_: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        world.ask(Api.INIT_TRANSACTIONS, **request_)


@pytest.mark.parametrize(
    "change",
    [
        {"owner": None}, {"owner": "x"}, {"producer_id": -1}, {"producer_epoch": 1 << 20},
        {"outcome": "maybe"}, {"outcome": None}, {"offsets": {}}, {"offsets": [1]},
        {"offsets": [commit_of(), commit_of()]}, {"offsets": [{"group": "g"}]}, {"is_empty": 5},
    ],
)  # fmt: skip
def test_a_malformed_end_is_refused_and_decides_nothing(
    world: World, change: dict[str, Any]
) -> None:
    a = Owner(world)
    with pytest.raises(InvalidRequestError):
        world.ask(Api.END_TRANSACTION, **{**a.request(), **change})
    assert a.end()["outcome"] == "commit"
