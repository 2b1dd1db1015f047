"""A failure of one group is that group's alone: its neighbours of the same step are answered, and
no timer is lost.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from appliance.groups.agent.service import GroupService
from appliance.groups.agent.transaction import Opened
from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.topic_image import CatalogTopicImage
from appliance.groups.consumer.group import ConsumerGroup
from appliance.groups.consumer.group_table import GroupTable
from appliance.groups.consumer.heartbeats import Heartbeats
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.share.membership import ShareMembership
from appliance.groups.share.share_service import ShareService
from appliance.groups.store.group_store import GroupStore
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import SECOND_NS, START_US, Bench, Client, FakeTopics
from tests.kit.stepped.group_agents import AgentWorld

ANSWER_MAX = 1 << 14


class RealWorld(AgentWorld):
    """The agent with the real service, over a file."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "groups.db")
        self.topics = FakeTopics(orders=4)
        self.numbers = itertools.count(1)
        super().__init__()

    def _open(self, _topics: CatalogTopicImage, now_ns: int) -> Opened:
        store, limits = GroupStore(self.path), GroupLimits()
        share = ShareService(store, self.topics, limits, ANSWER_MAX, now_ns, self.wall_us)
        self.real = GroupService(
            store, self.topics, limits, ANSWER_MAX, now_ns, self.wall_us, share=share
        )
        self.real_store = store
        return store, self.real

    def wall_us(self) -> int:
        return START_US + self.now_ns // 1_000

    def put_request(self, api: int, **content: Any) -> int:
        number = next(self.numbers)
        self.ask(api, content, correlation_id=number, word=1 << 32 | number)
        return number

    def beat(
        self, group: str, epoch: int = 0, kind: str = "consumer", member: str = "m", **more: Any
    ) -> int:
        """A heartbeat; a member joins with `epoch` 0, and leaves with -1."""
        topics = {"topics": ["orders"]} if epoch == 0 else {}
        return self.put_request(
            Api.GROUP_HEARTBEAT,
            group=group,
            kind=kind,
            member_id=member,
            member_epoch=epoch,
            **topics,
            **more,
        )

    def commit(self, group: str, offset: int = 1) -> int:
        return self.put_request(
            Api.COMMIT_OFFSETS, group=group, offsets=[["orders", 0, offset, -1, ""]]
        )

    def answers(self) -> dict[int, Any]:
        """Correlation id -> code, of one step."""
        self.step()
        return self.codes()

    def kinds(self) -> set[ErrorCode]:
        """All codes of one step."""
        return set(self.answers().values())

    def listed(self) -> dict[str, tuple[str, int]]:
        """Group -> (kind, members)."""
        self.put_request(Api.LIST_GROUPS)
        self.step()
        [(*_, body)] = [one for one in self.heard() if b'"groups"' in one[4]]
        return {row["group"]: (row["kind"], row["members"]) for row in orjson.loads(body)["groups"]}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RealWorld]:
    found = RealWorld(tmp_path)
    yield found
    found.agent.close()


@pytest.mark.parametrize(("before", "after"), [("share", "consumer"), ("consumer", "share")])
def test_a_group_becomes_one_of_the_other_kind_in_one_step(
    world: RealWorld, before: str, after: str
) -> None:
    world.beat("g", kind=before)
    assert world.kinds() == {ErrorCode.OK}
    asked = [
        world.beat("g", -1, before),
        world.put_request(Api.DELETE_GROUPS, groups=["g"]),
        world.beat("g", 0, after),
        world.commit("neighbour"),
    ]
    assert world.answers() == dict.fromkeys(asked, ErrorCode.OK)
    assert world.listed() == {"g": (after, 1), "neighbour": ("consumer", 0)}


def test_a_group_that_changes_its_kind_often_in_one_step_is_what_it_was_last(
    world: RealWorld,
) -> None:
    for kind in ["share", "consumer"] * 5:
        world.beat("g", 0, kind)
        world.beat("g", -1, kind)
        world.put_request(Api.DELETE_GROUPS, groups=["g"])
    world.beat("g", 0, "share")
    assert world.kinds() == {ErrorCode.OK, ErrorCode.UNKNOWN_MEMBER}, (
        "whoever was removed behind its heartbeat is told so"
    )
    assert world.listed() == {"g": ("share", 1)}


def test_an_assignment_that_fails_costs_its_group_alone_and_is_tried_again(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ConsumerGroup.assign

    def assign(group: ConsumerGroup, *rest: Any) -> None:
        if group.name == "bad":
            raise RuntimeError("nobody expected this")
        real(group, *rest)

    monkeypatch.setattr(ConsumerGroup, "assign", assign)
    bad, good, committed = world.beat("bad"), world.beat("good"), world.commit("third")
    assert world.answers() == {
        bad: ErrorCode.INTERNAL_ERROR,
        good: ErrorCode.OK,
        committed: ErrorCode.OK,
    }
    again, other = world.beat("bad"), world.commit("third", 2)
    assert world.answers() == {again: ErrorCode.NOT_READY, other: ErrorCode.OK}, (
        "for a moment nothing is tried for it"
    )
    assert world.listed() == {"good": ("consumer", 1), "third": ("consumer", 0)}
    monkeypatch.setattr(ConsumerGroup, "assign", real)
    world.step(1)
    bad = world.beat("bad")
    assert world.answers() == {bad: ErrorCode.OK}


def test_a_group_that_fails_for_good_costs_its_neighbours_nothing(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.beat("bad")
    world.step()
    real = ConsumerGroup.assign

    def assign(group: ConsumerGroup, *rest: Any) -> None:
        if group.name == "bad":
            raise RuntimeError("for good")
        real(group, *rest)

    monkeypatch.setattr(ConsumerGroup, "assign", assign)
    world.topics.grow("orders", 5)
    world.real.topics_changed(world.now_ns)
    for number in range(20):
        asked = [world.beat(f"good{number}"), world.commit("third", number)]
        codes = world.answers()
        assert [codes[one] for one in asked] == [ErrorCode.OK] * 2
        world.step(0.3)


def test_a_share_group_whose_rows_cannot_be_written_costs_no_other_its_answer(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ShareGroup.settle

    def settle(group: ShareGroup, store: GroupStore) -> None:
        if group.name == "bad":
            raise ValueError("a row that cannot be")
        real(group, store)

    monkeypatch.setattr(ShareGroup, "settle", settle)
    bad, good, other = (
        world.beat("bad", 0, "share"),
        world.beat("good", 0, "share"),
        world.beat("third"),
    )
    assert world.answers() == {
        bad: ErrorCode.INTERNAL_ERROR,
        good: ErrorCode.OK,
        other: ErrorCode.OK,
    }
    assert world.listed() == {"good": ("share", 1), "third": ("consumer", 1)}


@pytest.mark.parametrize("kind", ["consumer", "share"])
def test_members_that_fall_silent_are_removed_though_one_of_them_cannot_be(
    world: RealWorld, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for number in range(8):
        world.beat(f"g{number}", 0, kind, session_timeout_ms=1_000)
    assert world.kinds() == {ErrorCode.OK}
    owner: Any = Heartbeats if kind == "consumer" else ShareMembership
    real = owner.remove

    def remove(self: Any, group: Any, *rest: Any) -> None:
        if group.name == "g3":
            raise KeyError("g3")
        real(self, group, *rest)

    monkeypatch.setattr(owner, "remove", remove)
    for _ in range(30):
        world.step(0.1)
    assert {group: members for group, (_, members) in world.listed().items() if members} == {
        "g3": 1
    }
    monkeypatch.setattr(owner, "remove", real)
    for _ in range(20):
        world.step(0.1)
    assert not any(members for _, members in world.listed().values())


def test_a_member_that_joins_in_the_step_of_a_sweep_keeps_its_group_and_the_offsets(
    bench: Bench,
) -> None:
    bench.ask(Api.COMMIT_OFFSETS, group="billing", offsets=[["orders", 0, 7, -1, ""]])
    bench.now_ns += 8 * 86_400 * SECOND_NS  # the retention is over; the sweep comes with this step
    member = Client(bench)
    member.heartbeat()
    bench.wait(30)
    member.heartbeat()
    assert bench.offset("billing", "orders", 0) == 7


def test_a_group_that_was_joined_and_left_in_the_step_of_a_sweep_stays_as_long_as_any_other(
    bench: Bench,
) -> None:
    Client(bench).heartbeat()
    Client(bench).leave()
    bench.now_ns += 700 * SECOND_NS
    request = Client(bench, member_id="second").request()
    bench.send(Api.GROUP_HEARTBEAT, request)
    bench.send(Api.GROUP_HEARTBEAT, {**request, "member_epoch": -1})
    bench.finish_step()
    bench.wait(500)
    assert bench.summary("billing")["members"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_failures_of_groups_lose_nothing_that_was_answered_and_cost_no_other_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, world = random.Random(seed), RealWorld(tmp_path)
    bad: set[str] = set()
    for owner, name in (
        (GroupTable, "write"),
        (ShareGroup, "settle"),
        (ConsumerGroup, "assign"),
        (Heartbeats, "_answer"),
    ):
        _fail_for(monkeypatch, owner, name, bad)
    kept: dict[str, int] = {}
    for step in range(150):
        bad.clear()
        bad.update(f"g{number}" for number in range(12) if chance.random() < 0.1)
        asked: dict[int, tuple[str, int | None]] = {}
        for number in chance.sample(range(12), 5):
            group = f"g{number}"
            if number % 3 == 0:
                asked[world.beat(group, 0, "share", session_timeout_ms=5_000)] = group, None
            elif number % 3 == 1:
                asked[world.beat(group, 0, member=f"m{step}", session_timeout_ms=5_000)] = (
                    group,
                    None,
                )
            else:
                asked[world.commit(group, step + 1)] = group, step + 1
        for correlation_id, code in world.answers().items():
            group, offset = asked.pop(correlation_id)
            was_failing = group in world.real._suspended.until
            assert code is ErrorCode.OK or was_failing or group in bad, (group, code)
            if code is ErrorCode.OK and offset is not None:
                kept[group] = offset
        assert not asked, "each request has one answer"
        for one in world.real._table:
            if one.name not in world.real._suspended.until:
                one.check_invariants()
        world.step(chance.choice([0.0, 0.1, 0.4]))
        world.heard()
    bad.clear()
    world.step(2)
    world.heard()
    world.agent.close()
    again = RealWorld(tmp_path)
    asked_of = {
        again.put_request(Api.FETCH_OFFSETS, group=group, partitions=[["orders", 0]]): group
        for group in kept
    }
    again.step()
    found = {
        asked_of[number]: orjson.loads(body)["offsets"][0][2]
        for _, _, number, _, body in again.heard()
    }
    assert found == kept
    again.agent.close()


def _fail_for(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, bad: set[str]) -> None:
    real = getattr(owner, name)

    def failing(self: Any, *rest: Any) -> Any:
        named = [one for one in (self, *rest) if isinstance(one, ConsumerGroup | ShareGroup)]
        if named and named[0].name in bad:
            raise RuntimeError(name)
        return real(self, *rest)

    monkeypatch.setattr(owner, name, failing)
