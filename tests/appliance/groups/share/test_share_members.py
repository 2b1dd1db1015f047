"""Members of share groups: they leave, die, come back over other connections, and are fenced."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from appliance.groups.base.messages import SessionKey
from tailrace.core.errors import (
    FencedMemberError,
    InvalidRequestError,
    TailraceError,
    UnknownMemberError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.share.world import MS, S, World


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("way", ["leaves", "closes", "is silent", "joins again"])
def test_what_a_member_had_goes_to_those_who_wait(world: World, way: str) -> None:
    topic = world.topics.make("t", end=4)
    gone = world.join("g", "gone", "t", offset_reset="earliest", session_timeout_ms=10_000)
    gone.acquire(10)
    waits = [world.join("g", f"w{number}", "t", session=10 + number) for number in range(3)]
    assert [member.acquire(10)["ends"] for member in waits] == [[[topic, 0, 4]]] * 3
    gone.acknowledge((topic, 0, 0, 1, "accept"))
    world.pushes.clear()
    if way == "leaves":
        gone.heartbeat(-1)
    elif way == "closes":
        world.close_session(1)
        world.advance(999 * MS)
        assert not world.pushes
        world.advance(1 * MS)
    elif way == "is silent":
        for member in waits:
            world.now_ns += 4 * S
            member.heartbeat()
        world.advance(0)
    else:
        gone = world.join("g", "gone", "t")
    assert [push.session for push in world.pushes] == [10, 11]  # no more than there are records
    assert {push.api for push in world.pushes} == {int(Api.GROUP_HEARTBEAT)}
    assert orjson.loads(world.pushes[0].body) == {"group": "g", "member_id": "w0"}
    assert waits[0].acquire(10)["acquired"] == [[topic, 0, 2, 3, 2]]


def test_a_member_that_comes_back_over_another_connection_keeps_its_records(world: World) -> None:
    topic = world.topics.make("t", end=4)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.acquire(10)
    world.close_session(1)
    member.session = 2
    member.heartbeat()
    world.close_session(1)
    world.advance(5 * S)
    assert member.acknowledge((topic, 0, 0, 3, "accept")) == []


def test_a_killed_front_costs_its_members_nothing_before_their_next_heartbeat(world: World) -> None:
    topic = world.topics.make("t", end=4)
    member = world.join("g", "m", "t", offset_reset="earliest", heartbeat_interval_ms=4_000)
    member.acquire(10)
    world.groups.session_closed(SessionKey(0, 1), world.now_ns, with_front=True)
    world.advance(8_900 * MS)
    assert member.acknowledge((topic, 0, 0, 3, "accept")) == []
    world.advance(100 * MS)
    with pytest.raises(UnknownMemberError):
        member.heartbeat()


def test_a_connection_that_closes_behind_a_restart_is_known(world: World) -> None:
    topic = world.topics.make("t", end=4)
    world.join("g", "gone", "t", offset_reset="earliest").acquire(10)
    world.restart()
    world.close_session(1)
    world.advance(S)
    assert world.join("g", "other", "t", session=2).acquire(10)["acquired"] == [[topic, 0, 0, 3, 2]]


def test_who_is_not_a_member_gets_nothing(world: World) -> None:
    world.topics.make("t")
    member = world.join("g", "m", "t")
    with pytest.raises(FencedMemberError):
        member.heartbeat(member.epoch + 1)
    with pytest.raises(UnknownMemberError):
        world.request(Api.SHARE_ACQUIRE, {**member.acquire_request(1), "member_id": "other"})
    with pytest.raises(UnknownMemberError):
        world.request(Api.SHARE_ACKNOWLEDGE, {**member.named(acknowledge=[]), "group": "other"})
    assert member.heartbeat(-1)["member_epoch"] == -1
    assert member.heartbeat(-1)["member_epoch"] == -1
    assert not world.groups.has("other")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"member_epoch": "x"}, InvalidRequestError),
        ({"member_id": ""}, InvalidRequestError),
        ({"member_id": "\n"}, InvalidRequestError),
        ({"member_id": "x" * 100}, InvalidRequestError),
        ({"topics": None}, InvalidRequestError),
        ({"topics": []}, InvalidRequestError),
        ({"topics": [1]}, InvalidRequestError),
        ({"session_timeout_ms": 1}, InvalidRequestError),
        ({"session_timeout_ms": True}, InvalidRequestError),
        ({"offset_reset": "none"}, InvalidRequestError),
        ({"client_id": 7}, InvalidRequestError),
    ],
)
def test_a_join_that_makes_no_sense_is_refused_and_makes_no_group(
    world: World, changes: dict[str, Any], error: type[TailraceError]
) -> None:
    world.topics.make("t")
    request = {
        "group": "g",
        "kind": "share",
        "member_id": "m",
        "member_epoch": 0,
        "topics": ["t"],
        **changes,
    }
    with pytest.raises(error):
        world.request(Api.GROUP_HEARTBEAT, request)
    assert world.groups.count() == 0


def test_subscriptions_of_members_that_went_are_forgotten(world: World) -> None:
    world.topics.make("t", 3)
    stays = world.join("g", "stays", "t")
    for number in range(100):
        world.join("g", f"m{number}", "t", f"other-{number}").heartbeat(-1)
    group = world.groups._table.by_name["g"]
    assert len(group.subscriptions) < 25
    assert ("t",) in group.subscriptions
    assert stays.acquire(1)["acquired"] == []


def test_a_member_whose_row_is_damaged_joins_again_and_the_others_stay(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    topic = world.topics.make("t", end=10)
    stays, goes = (
        world.join("g", name, "t", offset_reset="earliest") for name in ("stays", "goes")
    )
    assert goes.acquire(3)["acquired"] == [[topic, 0, 0, 2, 1]]
    world.store.write_many("UPDATE members SET settings = '[' WHERE member_id = ?", [("goes",)])
    world.commit()
    world.restart()
    assert "share_member_damaged" in caplog.text
    assert stays.heartbeat()["member_epoch"] == stays.epoch
    with pytest.raises(UnknownMemberError):
        goes.heartbeat()
    world.advance(40 * S)
    stays = world.join("g", "stays", "t")
    assert stays.acquire(3)["acquired"] == [[topic, 0, 0, 2, 2]], "its lock has passed"
