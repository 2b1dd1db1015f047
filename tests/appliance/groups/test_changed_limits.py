"""Changed settings act in a process of groups that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.limits import GroupLimits, TransactionLimits
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import Bench, Client
from tests.appliance.groups.transactions.kit import Owner, World

MINUTE_S = 60


def settings(**changed: Any) -> dict[str, Any]:
    """Settings that the supervisor publishes to the process of groups."""
    usual = {
        "group.members.max": 10_000, "groups.max": 100_000,
        "group.session.timeout.min.ms": 1_000, "group.session.timeout.max.ms": 1_800_000,
        "offsets.retention.minutes": 10_080, "transaction.max.timeout.ms": 900_000,
        "transactional.id.expiration.ms": 604_800_000, "transaction.prepared.max.ms": 604_800_000,
        "transactional.ids.max": 1_000_000,
    }  # fmt: skip
    return usual | {name.replace("__", "."): value for name, value in changed.items()}


def test_the_defaults_of_the_limits_are_those_of_the_settings() -> None:
    groups, transactions = GroupLimits(), TransactionLimits()
    groups.take(settings())
    transactions.take(settings())
    assert (groups, transactions) == (GroupLimits(), TransactionLimits())


def test_numbers_of_members_and_groups_and_their_timeouts_change(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    Client(bench, group="a").heartbeat()
    bench.limits.take(settings(group__members__max=1, groups__max=1))
    with pytest.raises(TailraceError, match="has 1 members"):
        Client(bench, group="a", member_id="m2").heartbeat()
    with pytest.raises(TailraceError, match="groups"):
        Client(bench, group="b").heartbeat()
    bench.limits.take(settings(group__session__timeout__max__ms=5_000))
    with pytest.raises(TailraceError, match="5000"):
        Client(bench, group="b", session_timeout_ms=10_000).heartbeat()
    bench.limits.take(settings())
    Client(bench, group="b", session_timeout_ms=10_000).heartbeat()
    bench.close()


def test_offsets_expire_after_the_new_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.ask(Api.COMMIT_OFFSETS, group="tool", offsets=[["orders", 0, 5]])
    bench.wait(30 * MINUTE_S)
    assert bench.offset("tool", "orders", 0) == 5
    bench.limits.take(settings(offsets__retention__minutes=10))
    bench.wait(2 * MINUTE_S)
    assert bench.offset("tool", "orders", 0) == -1
    bench.close()


def test_a_prepared_transaction_is_aborted_after_the_new_time(tmp_path: Path) -> None:
    world = World(tmp_path)
    owner = Owner(world)
    owner.write()
    world.ask(Api.END_TRANSACTION, **owner.request("prepare", tag=""))
    world.settle()
    world.wait(10 * MINUTE_S)
    world.settle()
    described: dict[str, Any] = {"transactional_id": "billing"}
    assert world.ask(Api.DESCRIBE_TRANSACTION, **described)["state"] == "prepared"
    world.limits.take(settings(transaction__prepared__max__ms=60_000))
    world.coordinator.limits_changed()
    world.wait(2)
    world.settle()
    assert world.ask(Api.DESCRIBE_TRANSACTION, **described)["last"]["by"] == "limit"
    world.store.close()


def test_the_number_of_transactional_ids_changes(tmp_path: Path) -> None:
    world = World(tmp_path)
    Owner(world)
    world.limits.take(settings(transactional__ids__max=1))
    asked: dict[str, Any] = {"transactional_id": "another", "timeout_ms": 60_000}
    with pytest.raises(TailraceError):
        world.ask(Api.INIT_TRANSACTIONS, **asked)
    world.limits.take(settings())
    world.ask(Api.INIT_TRANSACTIONS, **asked)
    world.store.close()


def test_a_transactional_id_is_forgotten_after_the_new_time(tmp_path: Path) -> None:
    world = World(tmp_path)
    owner = Owner(world)
    owner.write()
    owner.end()
    world.settle()
    world.wait(3 * MINUTE_S)
    world.settle()
    assert world.ask(Api.LIST_TRANSACTIONS)["transactions"]
    world.limits.take(settings(transactional__id__expiration__ms=60_000))
    for _ in range(4):
        world.wait(61)
        world.settle()
    assert world.ask(Api.LIST_TRANSACTIONS)["transactions"] == []
    world.store.close()
