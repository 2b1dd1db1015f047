"""Lists of transactions, and those that hang."""

from __future__ import annotations

from typing import Any

from shm.messages.transaction_messages import ProducerEpoch
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import (
    SECOND_NS,
    Owner,
    World,
    markers,
)


def test_states_are_those_of_the_protocol(world: World) -> None:
    a = Owner(world)

    def state() -> str:
        found = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")
        return str(found["state"])

    assert state() == "empty"
    a.write()
    world.run_workers()
    assert state() == "ongoing"
    world.now_ns += SECOND_NS
    listed = world.ask(Api.LIST_TRANSACTIONS, states=["ongoing"])
    assert listed["transactions"][0]["open_ms"] == 1_000
    assert listed["totals"]["oldest_ms"] == 1_000
    a.end()
    assert state() == "committing"
    world.settle()
    assert state() == "empty"
    a.end("abort")
    assert state() == "aborting"
    described = world.ask(Api.DESCRIBE_TRANSACTION, transactional_id="billing")
    assert described["workers_pending"] == ["worker-0", "worker-1"]
    assert described["last"]["outcome"] == "abort"


def test_a_list_of_many_ids_has_pages(world: World) -> None:
    names = [f"id-{number:05}" for number in range(2_500)]
    for name in names:
        world.send(Api.INIT_TRANSACTIONS, transactional_id=name, timeout_ms=1_000)
    world.step()
    world.settle()
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        page: dict[str, Any] = world.ask(Api.LIST_TRANSACTIONS, next=after)
        found += [one["transactional_id"] for one in page["transactions"]]
        after = page["next"]
    assert found == names


def test_a_hanging_transaction_is_listed_and_ended(world: World) -> None:
    Owner(world)
    zero = world.workers.workers[0]
    damage = ProducerEpoch((1 << 62) + 5, 3)
    world.workers.unfed = {0}  # nothing reaches it
    zero.log = [("data", *damage)]
    world.coordinator.asked(0, [damage], world.now_ns)
    world.workers.is_requested = False
    world.step()
    world.wait(11)
    listed = world.ask(Api.LIST_TRANSACTIONS, hanging=True)["transactions"]
    assert [(one["producer_id"], one["workers"]) for one in listed] == [
        (damage.producer_id, ["worker-0"])
    ]
    world.workers.is_requested, world.workers.unfed = True, {0}
    fields: dict[str, Any] = {"producer_id": damage.producer_id, "producer_epoch": damage.epoch}
    world.step()
    world.ask(Api.ABORT_TRANSACTION, **fields)
    world.settle()
    assert markers(world)[0] == ["abort"]
    assert world.ask(Api.LIST_TRANSACTIONS, hanging=True)["transactions"] == []
