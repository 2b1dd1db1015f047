"""Prepared transactions: what ends them, what does not, and who may decide them after kills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.limits import TransactionLimits
from shm.messages.transaction_messages import ProducerEpoch
from tailrace.core.errors import (
    DiskFullError,
    InvalidRequestError,
    InvalidTransactionError,
    ProducerFencedError,
    TransactionAbortedError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import SECOND_NS, Owner, World

LIMIT_S = 3_600


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, limits=TransactionLimits(prepared_max_ms=LIMIT_S * 1_000))
    yield made
    made.store.close()


def prepare(owner: Owner, tag: str = "") -> dict[str, Any]:
    return owner.world.ask(Api.END_TRANSACTION, **owner.request("prepare", tag=tag))


def prepared(world: World, tag: str = "") -> Owner:
    """An owner whose transaction has batches, and is prepared everywhere."""
    owner = Owner(world)
    owner.write()
    prepare(owner, tag)
    world.settle()
    return owner


def decide(decider: Owner, outcome: str = "commit", **more: Any) -> dict[str, Any]:
    """Decide by id."""
    request = {
        "transactional_id": decider.name, "producer_id": decider.producer_id,
        "producer_epoch": decider.epoch, "outcome": outcome, "by_id": True, **more,
    }  # fmt: skip
    return decider.world.ask(Api.END_TRANSACTION, **request)


def describe(world: World) -> dict[str, Any]:
    return world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")


def markers(world: World) -> list[list[str]]:
    return [[one[0] for one in w.log if one[0] != "data"] for w in world.workers.workers]


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_its_owner_decides_it(world: World, outcome: str) -> None:
    a = prepared(world)
    assert markers(world) == [[], []]
    body = a.end(outcome)
    assert body["outcome"] == outcome
    world.settle()
    assert markers(world) == [[outcome]] * 2
    a.write()
    a.end()
    world.settle()
    assert markers(world) == [[outcome, "commit"]] * 2


def test_workers_get_it_sealed_and_a_kill_of_all_leaves_it_so(world: World) -> None:
    a = prepared(world, "xid-7")
    for lose in (world.kill, world.lose_power):
        lose()
        world.settle()
        assert markers(world) == [[], []], "the answer to a worker's question ends nothing"
        found = describe(world)
        assert found["state"] == "prepared"
        assert found["prepared"]["tag"] == "xid-7"
        row = world.store.read("SELECT prepared FROM transactional_ids")
        assert row != [("",)]
    assert decide(a) == {"outcome": "commit"}
    world.settle()
    assert markers(world) == [["commit"]] * 2
    assert describe(world)["prepared"] is None


def test_a_question_of_a_worker_about_it_aborts_nothing(world: World) -> None:
    a = prepared(world)
    world.coordinator.asked(0, [ProducerEpoch(*a.current)], world.now_ns)
    world.settle()
    assert markers(world) == [[], []]


def test_a_decision_by_id_may_be_repeated_and_never_reversed(world: World) -> None:
    a = prepared(world)
    for _ in range(2):
        assert decide(a) == {"outcome": "commit"}, "no next epoch for who is not the owner"
    with pytest.raises(InvalidTransactionError, match="was committed before"):
        decide(a, "abort")
    assert a.end()["outcome"] == "commit", "the owner learns it, with its next epoch"
    world.settle()
    a.write()


def test_the_commit_of_the_owner_may_be_repeated(world: World) -> None:
    a = prepared(world)
    request = a.request()
    first = world.ask(Api.END_TRANSACTION, **request)
    assert world.ask(Api.END_TRANSACTION, **request) == first
    world.settle()
    assert markers(world) == [["commit"]] * 2


def test_forged_decisions_by_id_are_refused_and_end_nothing(world: World) -> None:
    a = prepared(world)
    forgeries: list[dict[str, Any]] = [{"producer_epoch": a.epoch + 1}, {"producer_id": 5}]
    for forged in forgeries:
        with pytest.raises(InvalidTransactionError, match="not a prepared"):
            decide(a, **forged)
    for malformed in ({"outcome": "x"}, {"owner": a.owner}, {"offsets": [{"group": "g"}]}):
        with pytest.raises(InvalidRequestError):
            decide(a, **malformed)
    with pytest.raises(ProducerFencedError):
        world.ask(Api.END_TRANSACTION, **{**a.request(), "owner": a.owner + 1})
    world.settle()
    assert describe(world)["state"] == "prepared"


def test_what_is_not_prepared_cannot_be_decided_by_id(world: World) -> None:
    a = Owner(world)
    a.write()
    with pytest.raises(InvalidTransactionError, match="not a prepared"):
        decide(a)
    a.end()


def test_an_init_keeps_it_and_fences_its_former_owner(world: World) -> None:
    a = prepared(world, "xid")
    with pytest.raises(InvalidTransactionError, match="which no init ends"):
        Owner(world)
    assert prepare(a, "xid")["producer_epoch"] == a.epoch, "a refused init has changed nothing"
    b = Owner(world, keep_prepared=True)
    assert b.current == a.current
    assert b.owner > a.owner
    with pytest.raises(ProducerFencedError):
        a.end()
    world.kill()
    world.settle()
    assert markers(world) == [[], []]
    b.end()
    world.settle()
    assert markers(world) == [["commit"]] * 2
    b.write()


def test_an_init_that_keeps_what_is_not_prepared_aborts_it(world: World) -> None:
    a = Owner(world)
    a.write()
    body = world.ask(
        Api.INIT_TRANSACTIONS, transactional_id="billing", timeout_ms=1, keep_prepared=True
    )
    assert body["prepared"] is None
    world.settle()
    assert markers(world) == [["abort"]] * 2


def test_preparing_may_be_repeated_with_its_tag_alone(world: World) -> None:
    a = prepared(world, "one")
    assert prepare(a, "one")["outcome"] == "prepare"
    with pytest.raises(InvalidTransactionError, match="another tag"):
        prepare(a, "two")
    decide(a, "abort")
    with pytest.raises(TransactionAbortedError):
        prepare(a, "one")


def test_what_is_prepared_is_fixed(world: World) -> None:
    a = Owner(world)
    a.write()
    acknowledgements = [{"group": "g", "member_id": "m", "acknowledge": []}]
    with pytest.raises(InvalidRequestError, match="since their locks expire"):
        world.ask(Api.END_TRANSACTION, **a.request("prepare", acknowledgements=acknowledgements))
    assert describe(world)["prepared"] is None
    prepare(a)
    with pytest.raises(InvalidRequestError, match="content is fixed"):
        a.end(offsets=[{"group": "g", "entries": [["orders", 0, 5]]}])
    with pytest.raises(InvalidTransactionError, match="or offsets"):
        world.ask(
            Api.END_TRANSACTION,
            **a.request("prepare", offsets=[{"group": "g", "entries": [["orders", 0, 5]]}]),
        )
    a.end()


def test_a_decision_that_claims_to_be_empty_still_writes_markers_after_a_kill(world: World) -> None:
    a = prepared(world)
    a.end(is_empty=True)
    world.lose_power()
    world.settle()
    assert markers(world) == [["commit"]] * 2


def test_neither_its_timeout_nor_idleness_ends_it(world: World) -> None:
    a = prepared(world)
    world.wait(LIMIT_S - 60)
    world.settle()
    assert describe(world)["state"] == "prepared"
    assert world.ask(Api.LIST_TRANSACTIONS, hanging=True)["transactions"] == []
    a.end()


@pytest.mark.parametrize("is_killed", [False, True])
def test_the_operators_limit_aborts_it(
    world: World, is_killed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    a = prepared(world)
    world.wait(LIMIT_S / 2)
    if is_killed:
        world.kill()
    world.wait(LIMIT_S / 2 + 2)
    world.settle()
    assert markers(world) == [["abort"]] * 2
    assert "prepared_transaction_aborted id='billing' by=limit" in caplog.text
    with pytest.raises(TransactionAbortedError, match=r"transaction\.prepared\.max\.ms"):
        a.end()


def test_without_a_limit_it_waits_for_ever(tmp_path: Path) -> None:
    world = World(tmp_path, limits=TransactionLimits(prepared_max_ms=0))
    prepared(world)
    world.now_ns += 30 * 86_400 * SECOND_NS
    world.step()
    world.settle()
    assert describe(world)["state"] == "prepared"
    world.store.close()


def test_an_operator_aborts_it(world: World) -> None:
    prepared(world)
    world.ask(Api.ABORT_TRANSACTION, transactional_id="billing")
    world.settle()
    assert markers(world) == [["abort"]] * 2


def test_a_failed_write_leaves_it_open_and_then_prepared(world: World) -> None:
    a = Owner(world)
    a.write()
    number = world.send(Api.END_TRANSACTION, **a.request("prepare"))
    world.step(DiskFullError("full"))
    assert number in world.undone
    assert describe(world)["prepared"] is None
    a.write()
    prepare(a)
    number = world.send(Api.END_TRANSACTION, **a.request())
    world.step(DiskFullError("full"))
    assert number in world.undone
    assert describe(world)["state"] == "prepared"
    world.wait(300)
    a.end()
    world.settle()
    assert markers(world) == [["commit"]] * 2
