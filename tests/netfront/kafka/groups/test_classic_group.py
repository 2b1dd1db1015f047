"""The state machine of classic groups, on a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from netfront.kafka.exchange.waiter import Waiter
from netfront.kafka.groups.classic_group import INITIAL_DELAY_NS, ClassicGroup, State
from netfront.kafka.groups.classic_member import MS, GroupError, Join
from netfront.kafka.wire.errors import KafkaError

SESSION_MS, REBALANCE_MS = 10_000, 60_000
RANGE = [("range", b"r")]


def request(
    member_id: str = "",
    *,
    instance_id: str | None = None,
    protocols: list[tuple[str, bytes]] = RANGE,
    knows_id: bool = True,
    can_skip: bool = True,
) -> Join:
    return Join(
        member_id, instance_id, "client", "/host", SESSION_MS, REBALANCE_MS, "consumer", protocols,
        not knows_id, can_skip,
    )  # fmt: skip


@dataclass
class Clock:
    """A group and its time."""

    group: ClassicGroup = field(default_factory=lambda: ClassicGroup("g", 100))
    now_ns: int = 1_000_000_000

    def join(self, *arguments: Any, **named: Any) -> Waiter:
        return self.group.join(request(*arguments, **named), self.now_ns)

    def sync(self, member_id: str, **assignments: bytes) -> Waiter:
        member = self.group.member(member_id, None)
        return self.group.sync(member, list(assignments.items()), self.now_ns)

    def pass_ms(self, duration_ms: int) -> None:
        """Let time pass, deadline by deadline."""
        until_ns = self.now_ns + duration_ms * MS
        while self.group.next_deadline_ns() <= until_ns:
            self.now_ns = max(self.now_ns, self.group.next_deadline_ns())
            before = self.group.next_deadline_ns()
            self.group.advance(self.now_ns)
            assert self.group.next_deadline_ns() > self.now_ns or (
                self.group.next_deadline_ns() != before
            )
        self.now_ns = until_ns
        self.group.advance(self.now_ns)

    def stable(self, count: int) -> list[str]:
        """A stable group of so many members; the first one leads."""
        waiters = [self.join() for _ in range(count)]
        self.pass_ms(INITIAL_DELAY_NS // MS)
        ids = [waiter.value["member_id"] for waiter in waiters]
        for member_id in ids[1:]:
            self.sync(member_id)
        self.sync(ids[0])
        assert self.group.state is State.STABLE
        return ids


def test_members_join_together_and_the_leader_assigns() -> None:
    clock = Clock()
    one, two = clock.join(), clock.join()
    assert not one.is_done
    clock.pass_ms(INITIAL_DELAY_NS // MS)
    first, second = one.value["member_id"], two.value["member_id"]
    assert one.value["leader"] == two.value["leader"] == first
    assert [each["member_id"] for each in one.value["members"]] == [first, second]
    assert two.value["members"] == []
    waiting = clock.sync(second)
    assert not waiting.is_done
    leading = clock.group.sync(
        clock.group.member(first, None), [(first, b"a"), (second, b"b")], clock.now_ns
    )
    assert (leading.value["assignment"], waiting.value["assignment"]) == (b"a", b"b")
    assert (clock.group.state, clock.group.generation) == (State.STABLE, 1)


def test_a_new_member_is_given_an_id_first() -> None:
    clock = Clock()
    asked = clock.join(knows_id=False).value
    assert asked["error_code"] == KafkaError.MEMBER_ID_REQUIRED
    waiter = clock.join(asked["member_id"])
    clock.pass_ms(INITIAL_DELAY_NS // MS)
    assert waiter.value["member_id"] == asked["member_id"]
    with pytest.raises(GroupError, match="UNKNOWN_MEMBER_ID"):
        clock.join("made-up")


def test_a_given_id_that_is_not_used_is_forgotten() -> None:
    clock = Clock()
    clock.join(knows_id=False)
    waiter = clock.join()
    clock.pass_ms(SESSION_MS - 1)
    assert not waiter.is_done
    clock.pass_ms(1)
    assert waiter.value["error_code"] == 0


def test_a_rebalance_waits_for_all_and_then_leaves_the_silent_ones_behind() -> None:
    clock = Clock()
    first, second = clock.stable(2)
    waiter = clock.join()
    member = clock.group.member(first, None)
    assert clock.group.heartbeat(member, clock.now_ns) == KafkaError.REBALANCE_IN_PROGRESS
    with pytest.raises(GroupError, match="REBALANCE_IN_PROGRESS"):
        clock.sync(first)
    again = clock.join(first)
    clock.pass_ms(SESSION_MS - 1)
    assert not waiter.is_done
    clock.pass_ms(1)
    assert again.value["generation_id"] == waiter.value["generation_id"] == 2
    assert second not in clock.group.members


def test_a_silent_member_expires_and_a_leaving_one_goes_at_once() -> None:
    clock = Clock()
    first, second, third = clock.stable(3)
    clock.pass_ms(SESSION_MS - 1)
    for member_id in (first, second):
        clock.group.heartbeat(clock.group.member(member_id, None), clock.now_ns)
    assert clock.group.leave(second, None, clock.now_ns) == KafkaError.NONE
    assert clock.group.leave(second, None, clock.now_ns) == KafkaError.UNKNOWN_MEMBER_ID
    clock.pass_ms(1)
    assert list(clock.group.members) == [first]
    assert third not in clock.group.members
    assert clock.group.leave(first, None, clock.now_ns) == KafkaError.NONE
    assert clock.group.is_unused
    assert clock.group.state is State.EMPTY


def test_a_leader_that_never_assigns_is_removed() -> None:
    clock = Clock()
    one, two = clock.join(), clock.join()
    clock.pass_ms(INITIAL_DELAY_NS // MS)
    first, second = one.value["member_id"], two.value["member_id"]
    waiting = clock.sync(second)
    for _ in range(REBALANCE_MS // SESSION_MS):
        clock.group.heartbeat(clock.group.member(first, None), clock.now_ns)
        clock.pass_ms(SESSION_MS - 1)
    clock.pass_ms(SESSION_MS)
    assert waiting.value["error_code"] == KafkaError.REBALANCE_IN_PROGRESS
    assert first not in clock.group.members


def test_protocols_that_not_all_support_are_not_chosen() -> None:
    clock = Clock()
    one = clock.join(protocols=[("sticky", b""), ("range", b"1")])
    two = clock.join(protocols=[("range", b"2"), ("robin", b"")])
    with pytest.raises(GroupError, match="INCONSISTENT_GROUP_PROTOCOL"):
        clock.join(protocols=[("robin", b"")])
    clock.pass_ms(INITIAL_DELAY_NS // MS)
    assert one.value["protocol_name"] == two.value["protocol_name"] == "range"
    assert [each["metadata"] for each in one.value["members"]] == [b"1", b"2"]


def test_wrong_generations_and_protocols_are_refused() -> None:
    clock = Clock()
    clock.stable(1)
    with pytest.raises(GroupError, match="ILLEGAL_GENERATION"):
        clock.group.check_generation(0)
    with pytest.raises(GroupError, match="INCONSISTENT_GROUP_PROTOCOL"):
        clock.group.check_protocol("connect", None)
    with pytest.raises(GroupError, match="INCONSISTENT_GROUP_PROTOCOL"):
        clock.group.check_protocol(None, "sticky")


@pytest.mark.parametrize("can_skip", [True, False])
def test_a_static_member_that_starts_again_causes_no_rebalance(can_skip: bool) -> None:
    clock = Clock()
    one = clock.join(instance_id="a")
    clock.pass_ms(INITIAL_DELAY_NS // MS)
    first = one.value["member_id"]
    clock.group.sync(clock.group.member(first, "a"), [(first, b"mine")], clock.now_ns)
    again = clock.join(instance_id="a", can_skip=can_skip).value
    assert again["generation_id"] == 1
    assert again["member_id"] != first
    assert (again.get("skip_assignment", False), again["leader"] == again["member_id"]) == (
        can_skip,
        can_skip,
    )
    with pytest.raises(GroupError, match="FENCED_INSTANCE_ID"):
        clock.group.member(first, "a")
    found = clock.group.sync(clock.group.member(again["member_id"], "a"), [], clock.now_ns)
    assert found.value["assignment"] == b"mine"


def test_a_closed_connection_gives_its_member_the_session_timeout() -> None:
    clock = Clock()
    clock.stable(1)
    waiter = clock.join()
    clock.group.abandon(waiter, clock.now_ns)
    assert len(clock.group.members) == 2
    clock.pass_ms(SESSION_MS)
    assert clock.group.is_unused


class Groups(RuleBasedStateMachine):
    """Random requests of a few members: no waiter is lost, and time always has an end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.waiters: list[Waiter] = []
        self.ids: list[str] = [""]

    def _note(self, waiter: Waiter) -> None:
        self.waiters.append(waiter)

    @rule(pick=st.integers(0, 9), static=st.sampled_from([None, "a", "b"]), knows=st.booleans())
    def join(self, pick: int, static: str | None, knows: bool) -> None:
        try:
            self._note(
                self.clock.join(self.ids[pick % len(self.ids)], instance_id=static, knows_id=knows)
            )
        except GroupError:
            return
        self.waiters[-1].on_done = lambda value: self.ids.append(value.get("member_id", ""))
        if self.waiters[-1].is_done:
            self.ids.append(self.waiters[-1].value["member_id"])

    @rule(pick=st.integers(0, 9))
    def sync(self, pick: int) -> None:
        try:
            self._note(self.clock.sync(self.ids[pick % len(self.ids)]))
        except GroupError:
            return

    @rule(pick=st.integers(0, 9))
    def heartbeat(self, pick: int) -> None:
        member = self.clock.group.members.get(self.ids[pick % len(self.ids)])
        if member is not None:
            self.clock.group.heartbeat(member, self.clock.now_ns)

    @rule(pick=st.integers(0, 9))
    def leave(self, pick: int) -> None:
        self.clock.group.leave(self.ids[pick % len(self.ids)], None, self.clock.now_ns)

    @rule(duration_ms=st.sampled_from([1, 300, 9_000, 11_000, 61_000]))
    def pass_time(self, duration_ms: int) -> None:
        self.clock.pass_ms(duration_ms)

    @invariant()
    def waiters_belong_to_members(self) -> None:
        group = self.clock.group
        held = [each.joining for each in group.members.values()]
        held += [each.syncing for each in group.members.values()]
        for waiter in self.waiters:
            assert waiter.is_done or any(waiter is each for each in held)
        if group.state in (State.STABLE, State.EMPTY):
            assert all(each.joining is None for each in group.members.values())
        if group.state is not State.EMPTY and group.members:
            assert group.leader == "" or group.leader in group.members

    def teardown(self) -> None:
        for _ in range(4):
            self.clock.pass_ms(REBALANCE_MS + SESSION_MS)
        assert all(waiter.is_done for waiter in self.waiters)
        assert self.clock.group.is_unused


TestGroups = Groups.TestCase
TestGroups.settings = settings(max_examples=60, stateful_step_count=25)
