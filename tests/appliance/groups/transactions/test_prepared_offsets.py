"""Offsets of groups in a prepared transaction: applied with its commit alone, and neither told nor
changed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.limits import TransactionLimits
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ConcurrentTransactionsError,
    DiskFullError,
    FencedMemberError,
    InvalidGroupError,
    TailraceError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import SECOND_NS, Owner, World

LIMIT_S = 3_600


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(
        tmp_path, limits=TransactionLimits(prepared_max_ms=LIMIT_S * 1_000), with_share=True
    )
    yield made
    made.store.close()


def offsets_of(offset: int, group: str = "g", partition: int = 0, **more: Any) -> dict[str, Any]:
    return {"group": group, "entries": [["orders", partition, offset, 3, "note"]], **more}


def prepared(world: World, *offsets: dict[str, Any], name: str = "billing") -> Owner:
    owner = Owner(world, name)
    owner.write()
    request = owner.request("prepare", offsets=list(offsets))
    world.ask(Api.END_TRANSACTION, **request)
    world.settle()
    return owner


def committed(world: World, group: str = "g", partition: int = 0) -> int:
    body = world.ask(Api.FETCH_OFFSETS, group=group, partitions=[["orders", partition]])
    return int(body["offsets"][0][2])


def decide(owner: Owner, outcome: str) -> None:
    """Decide by id."""
    owner.world.ask(
        Api.END_TRANSACTION, transactional_id=owner.name, producer_id=owner.producer_id,
        producer_epoch=owner.epoch, outcome=outcome, by_id=True,
    )  # fmt: skip


def commit(world: World, offset: int, **more: Any) -> list[Any]:
    body = world.ask(Api.COMMIT_OFFSETS, group="g", offsets=[["orders", 0, offset]], **more)
    refused: list[Any] = body["refused"]
    return refused


@pytest.mark.parametrize("loses", ["nothing", "coordinator", "power"])
@pytest.mark.parametrize("by_id", [False, True])
@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_they_are_applied_with_a_commit_and_not_with_an_abort(
    world: World, outcome: str, by_id: bool, loses: str
) -> None:
    commit(world, 2)
    a = prepared(world, offsets_of(5), offsets_of(7, "h", 1))
    if loses == "coordinator":
        world.kill()
    elif loses == "power":
        world.lose_power()
    for group, partition in (("g", 0), ("h", 1)):
        with pytest.raises(ConcurrentTransactionsError, match="prepared transaction of 'billing'"):
            committed(world, group, partition)
    assert committed(world, "g", 1) == -1, "another partition has none"
    if by_id:
        decide(a, outcome)
    else:
        a.end(outcome)
    expected = (5, 7) if outcome == "commit" else (2, -1)
    assert (committed(world), committed(world, "h", 1)) == expected
    world.kill()
    assert (committed(world), committed(world, "h", 1)) == expected


def test_the_limit_of_an_operator_leaves_the_offsets_of_before(world: World) -> None:
    commit(world, 2)
    prepared(world, offsets_of(5))
    world.wait(LIMIT_S + 2)
    assert committed(world) == 2


def test_metadata_and_leader_epoch_are_kept(world: World) -> None:
    prepared(world, offsets_of(5)).end()
    body = world.ask(Api.FETCH_OFFSETS, group="g", partitions=[["orders", 0]])
    assert body["offsets"][0][2:5] == [5, 3, "note"]


def test_nothing_changes_them_before_the_decision(world: World) -> None:
    commit(world, 2)
    a = prepared(world, offsets_of(5))
    refused = commit(world, 9)
    assert [one[:3] for one in refused] == [["orders", 0, int(ErrorCode.CONCURRENT_TRANSACTIONS)]]
    for offset in (0, None):
        body = world.ask(Api.ALTER_GROUP_OFFSETS, group="g", offsets=[["orders", 0, offset, ""]])
        assert body["refused"][0][2] == int(ErrorCode.CONCURRENT_TRANSACTIONS)
    body = world.ask(Api.COMMIT_OFFSETS, group="g", offsets=[["orders", 1, 9]])
    assert body["refused"] == [], "another partition is free"
    b = Owner(world, "other")
    b.write()
    with pytest.raises(ConcurrentTransactionsError, match="nothing of the transaction was decided"):
        b.end(offsets=[offsets_of(6)])
    with pytest.raises(ConcurrentTransactionsError):
        world.ask(Api.END_TRANSACTION, **b.request("prepare", offsets=[offsets_of(6)]))
    a.end()
    assert committed(world) == 5
    b.end(offsets=[offsets_of(6)])
    assert committed(world) == 6


def test_its_group_is_neither_deleted_nor_expires_nor_becomes_a_share_group(world: World) -> None:
    a = prepared(world, offsets_of(5, "new"))
    body = world.ask(Api.DELETE_GROUPS, groups=["new"])
    assert body["results"][0]["code"] == int(ErrorCode.INVALID_TRANSACTION)
    assert "decide it first" in body["results"][0]["message"]
    with pytest.raises(InvalidGroupError, match="is a consumer group"):
        world.ask(
            Api.GROUP_HEARTBEAT, group="new", kind="share", member_id="m", member_epoch=0,
            topics=["orders"],
        )  # fmt: skip
    world.wait(LIMIT_S - 60)
    decide(a, "commit")
    assert committed(world, "new") == 5
    body = world.ask(Api.DELETE_GROUPS, groups=["new"])
    assert body["results"][0]["code"] == 0


def test_members_are_checked_when_it_is_prepared_and_not_when_it_is_decided(world: World) -> None:
    member: dict[str, Any] = {
        "group": "g", "kind": "consumer", "member_id": "m", "member_epoch": 0,
        "topics": ["orders"], "session_timeout_ms": 45_000, "owned": {},
    }  # fmt: skip
    epoch = world.ask(Api.GROUP_HEARTBEAT, **member)["member_epoch"]
    with pytest.raises(FencedMemberError):
        prepared(world, offsets_of(5, member_id="m", member_epoch=epoch + 1), name="other")
    a = prepared(world, offsets_of(5, member_id="m", member_epoch=epoch))
    world.ask(Api.GROUP_HEARTBEAT, group="g", member_id="m", member_epoch=-1)
    other = {**member, "member_id": "n"}
    world.ask(Api.GROUP_HEARTBEAT, **other)
    with pytest.raises(ConcurrentTransactionsError):
        committed(world)
    a.end()
    assert committed(world) == 5, "the new member begins behind what was processed"


def test_offsets_of_a_topic_that_was_deleted_since_are_left_out(world: World) -> None:
    world.topics.create("payments", 1)
    both = {"group": "g", "entries": [["orders", 0, 5], ["payments", 0, 6]]}
    a = prepared(world, both)
    world.topics.delete("payments")
    world.service.topics_changed(world.now_ns)
    world.step()
    world.topics.create("payments", 1)
    a.end()
    assert committed(world) == 5
    body = world.ask(Api.FETCH_OFFSETS, group="g", partitions=[["payments", 0]])
    assert body["offsets"][0][2] <= 0, "the topic that has the name now is another one"


def test_a_failed_write_frees_them_and_a_failed_decision_does_not(world: World) -> None:
    commit(world, 2)
    a = Owner(world)
    a.write()
    number = world.send(Api.END_TRANSACTION, **a.request("prepare", offsets=[offsets_of(5)]))
    world.step(DiskFullError("full"))
    assert number in world.undone
    assert committed(world) == 2
    world.ask(Api.END_TRANSACTION, **a.request("prepare", offsets=[offsets_of(5)]))
    number = world.send(Api.END_TRANSACTION, **a.request("abort"))
    world.step(DiskFullError("full"))
    assert number in world.undone
    with pytest.raises(ConcurrentTransactionsError):
        committed(world)
    a.end()
    assert committed(world) == 5


def test_a_repeated_request_has_the_same_offsets(world: World) -> None:
    a = Owner(world)
    request = a.request("prepare", offsets=[offsets_of(5), offsets_of(6, "h")])
    world.ask(Api.END_TRANSACTION, **request)
    with pytest.raises(ConcurrentTransactionsError):
        committed(world)
    assert world.ask(Api.END_TRANSACTION, **request)["outcome"] == "prepare"
    for wrong in ([offsets_of(5)], [offsets_of(5), offsets_of(7, "h")], []):
        with pytest.raises(TailraceError, match="or offsets"):
            world.ask(Api.END_TRANSACTION, **a.request("prepare", offsets=wrong))
    a.end()
    assert (committed(world), committed(world, "h")) == (5, 6)
    assert world.now_ns < 600 * SECOND_NS


def test_a_new_owner_decides_them(world: World) -> None:
    prepared(world, offsets_of(5))
    b = Owner(world, keep_prepared=True)
    with pytest.raises(ConcurrentTransactionsError):
        committed(world)
    b.end()
    assert committed(world) == 5
