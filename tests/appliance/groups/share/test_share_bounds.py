"""Bounds of share groups, and the removal of state that is not needed."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.messages import Requester
from appliance.groups.base.request_validation import settings_in
from appliance.groups.share.group import members, share_group
from appliance.groups.share.request_validation import join_of
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, TailraceError, UnknownGroupError
from tailrace.protocol.frame import Api
from tests.appliance.groups.share.world import Member, S, World

RETENTION_S = 3_600


@pytest.fixture
def world(tmp_path: pathlib.Path) -> Iterator[World]:
    made = World(tmp_path, GroupLimits(offsets_retention_minutes=RETENTION_S // 60))
    yield made
    made.close()


def pass_time(world: World, seconds: int, *alive: Member) -> None:
    """In steps that keep members alive."""
    for _ in range(seconds // 20):
        world.advance(20 * S)
        for member in alive:
            member.heartbeat()


def test_a_group_without_members_goes_after_the_retention_and_not_before(world: World) -> None:
    topic = world.topics.make("t", end=10)
    for name in ("left", "moved", "restarted"):
        member = world.join(name, "m", "t", offset_reset="earliest")
        member.acquire(5)
        member.heartbeat(-1)
    alive = world.join("alive", "m", "t", offset_reset="earliest")
    assert world.groups.next_deadline_ns() is not None
    pass_time(world, RETENTION_S - 100, alive)
    assert world.groups.count() == 4
    world.request(Api.ALTER_GROUP_OFFSETS, {"group": "moved", "offsets": [["t", 0, 7, ""]]})
    world.restart()
    alive.heartbeat()
    pass_time(world, 200, alive)
    assert [name for name in ("left", "moved", "restarted", "alive") if world.groups.has(name)] == [
        "moved",
        "alive",
    ]
    world.restart()
    assert [name for name in ("left", "moved", "restarted", "alive") if world.groups.has(name)] == [
        "moved",
        "alive",
    ]
    assert {row.group_id for row in world.store.share_states(1)} == set()
    assert world.join("left", "m", "t").acquire(5)["ends"] == [
        [topic, 0, 10]
    ]  # a group of its own, without a past
    assert world.join("moved", "m", "t").acquire(5)["acquired"] == [[topic, 0, 7, 9, 1]]


def test_an_expiry_that_cannot_be_committed_is_made_later(world: World) -> None:
    world.topics.make("t", end=10)
    world.join("g", "m", "t").heartbeat(-1)
    world.now_ns += (RETENTION_S + 60) * S

    def fail() -> None:
        raise TailraceError("the disk is gone", ErrorCode.STORAGE_ERROR)

    world.store.before_commit.append(fail)
    world.groups.step(world.now_ns)
    world.commit()
    world.store.before_commit.remove(fail)
    assert world.groups.has("g")
    world.advance(60 * S)
    assert not world.groups.has("g")


def test_a_group_that_is_deleted_twice_in_one_step_leaves_nothing_behind(world: World) -> None:
    world.topics.make("t", end=10)
    first = world.join("g", "m", "t", offset_reset="earliest")
    first.acquire(5)
    first.heartbeat(-1)
    world.groups.delete("g", world.now_ns)
    joining = {"group": "g", "kind": "share", "member_id": "m", "member_epoch": 0, "topics": ["t"]}
    world.groups.handle(Requester(0, 1, 1), Api.GROUP_HEARTBEAT, joining, world.now_ns)
    world.groups.handle(
        Requester(0, 1, 2), Api.GROUP_HEARTBEAT, {**joining, "member_epoch": -1}, world.now_ns
    )
    world.groups.delete("g", world.now_ns)
    world.commit()
    assert world.store.groups("share") == []
    assert world.join("g", "again", "t").epoch == 1


def test_a_member_that_is_done_with_nothing_gets_no_more_until_it_acknowledges(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.topics.make("t", 2, end=100)
    for module in (members, share_group):
        monkeypatch.setattr(module, "SHARE_ACQUIRED_MAX", 30)
    hoards, other = (
        world.join("g", "hoards", "t", offset_reset="earliest"),
        world.join("g", "other", "t"),
    )
    assert sum(run[3] - run[2] + 1 for run in hoards.acquire(20)["acquired"]) == 20
    assert sum(run[3] - run[2] + 1 for run in hoards.acquire(20)["acquired"]) == 10
    with pytest.raises(InvalidRequestError, match="30 acquired records"):
        hoards.acquire(1)
    assert sum(run[3] - run[2] + 1 for run in other.acquire(20)["acquired"]) == 20
    blocked = [
        (*key, span.first, span.last)
        for key, partition in world.groups._table.by_name["g"].partitions.items()
        for span in partition.spans
        if span.state.member == "hoards"
    ]
    answer = hoards.acquire(50, (*blocked[0], "accept"))
    assert (
        sum(run[3] - run[2] + 1 for run in answer["acquired"]) == blocked[0][3] - blocked[0][2] + 1
    )
    with pytest.raises(InvalidRequestError):
        hoards.acquire(1)
    world.restart()
    with pytest.raises(InvalidRequestError):
        hoards.acquire(1)
    for _ in range(2):  # its locks pass: it has nothing any more
        world.advance(20 * S)
        hoards.heartbeat()
        other.heartbeat()
    assert sum(run[3] - run[2] + 1 for run in hoards.acquire(50)["acquired"]) == 30


def test_a_member_that_subscribes_to_one_thing_after_another_leaves_nothing_behind(
    world: World,
) -> None:
    world.topics.make("t")
    member = world.join("g", "m", "t")
    for number in range(500):
        world.request(
            Api.GROUP_HEARTBEAT, member.named(kind="share", topics=["t", f"later-{number}"])
        )
    assert len(world.groups._table.by_name["g"].subscriptions) < 50


@pytest.mark.parametrize(
    "changes",
    [{"session_timeout_ms": 999}, {"session_timeout_ms": "5"}, {"heartbeat_interval_ms": 0},
    {"client_id": "\n"}, {"topics": [""]}, {"topics": None}],
)  # fmt: skip
def test_members_of_both_kinds_are_refused_for_the_same_with_the_same_words(
    changes: dict[str, Any],
) -> None:
    request = {"topics": ["t"], **changes}
    sentences = []
    for check in (settings_in, join_of):
        with pytest.raises(InvalidRequestError) as caught:
            check(request, GroupLimits())
        sentences.append(caught.value.detail)
    assert sentences[0] == sentences[1]


def test_retention_that_has_overtaken_a_group_is_no_lag(world: World) -> None:
    world.topics.make("t", end=100)
    member = world.join("g", "m", "t", offset_reset="earliest")
    (run,) = member.acquire(20)["acquired"]
    key = (run[0], 0)

    def row() -> Any:
        return world.request(Api.DESCRIBE_GROUP, {"group": "g", "part": "partitions"})[
            "partitions"
        ][0]

    assert row()["lag"] == 100
    world.topics.start_offsets[key] = 15
    assert row()["lag"] == 85
    world.topics.start_offsets[key] = 70
    assert row()["lag"] == 30
    assert member.acknowledge((*key, 0, 19, "accept")) == []
    assert member.acquire(100)["acquired"] == [[*key, 70, 99, 1]]


def test_offsets_that_are_moved_are_bounded_and_all_or_nothing_is_said(
    tmp_path: pathlib.Path,
) -> None:
    world = World(tmp_path, answer_max=120_000)
    world.topics.make("t", end=10)
    member = world.join("g", "m", "t", offset_reset="earliest")
    member.heartbeat(-1)
    wrong = [["x" * 200, number, 0, ""] for number in range(1_000)]
    for offsets in (
        [["t", 0, 5, ""], *wrong],
        [["t", 0, 5, ""]] * 5_000,
        [["t", 0, 5]] * 3 + [["t", 0]],
    ):
        with pytest.raises(InvalidRequestError):
            world.request(Api.ALTER_GROUP_OFFSETS, {"group": "g", "offsets": offsets})
    page = world.request(Api.FETCH_OFFSETS, {"group": "g", "partitions": [["t", 0]]})
    assert page["offsets"][0][2] == 0
    with pytest.raises(UnknownGroupError):
        world.request(Api.ALTER_GROUP_OFFSETS, {"group": "none", "offsets": []})
    world.close()


class CountedDict(dict[str, Any]):
    """Counts how often a member is looked up."""

    count = 0

    def __getitem__(self, key: str) -> Any:
        self.count += 1
        return super().__getitem__(key)


@pytest.mark.parametrize("sleepers", [10, 1_000])
def test_a_record_that_comes_free_costs_the_same_however_many_members_sleep(
    world: World, sleepers: int
) -> None:
    topic = world.topics.make("t", end=1, group_share_delivery_count_limit=100)
    busy = world.join("g", "busy", "t", offset_reset="earliest")
    group = world.groups._table.by_name["g"]
    assert busy.acquire(1)["acquired"]
    for number in range(sleepers):
        world.join("g", f"m{number:04d}", "t", session=number + 10).acquire(1)
    for _ in range(5):
        group.members = counted = CountedDict(group.members)
        pushes = len(world.pushes)
        busy.acknowledge((topic, 0, 0, 0, "release"))
        assert len(world.pushes) == pushes + 1, "one record wakes one member"
        assert counted.count <= 5
        assert busy.acquire(1)["acquired"]
    assert len(group.waiting) == sleepers - 5
