"""A member's side of a group, against the appliance's own service in memory: what is taken when,
what is told when, what a lost answer costs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from appliance.groups.base.messages import SessionKey
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InstanceIdInUseError, InvalidRequestError, TailraceError
from tailrace.group.membership import (
    HEARTBEAT_SLOTS,
    LEAVE_EPOCH,
    NS_PER_MS,
    POLLING_NS,
    ChangeKind,
    MemberIdentity,
    Membership,
    Partition,
    Phase,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import SECOND_NS, Bench, FakeTopics, Refused
from tests.kit.matrices import short

GROUP = "billing"
Heard = tuple[ErrorCode, str, dict[str, Any]]


class Member:
    """A membership, a connection to the bench that may fail, and a consumer that does what it is
    told when it polls.
    """

    numbers = itertools.count(1)

    def __init__(
        self,
        bench: Bench,
        *topics: str,
        instance_id: str | None = None,
        max_poll_interval_ms: int = 300_000,
    ) -> None:
        number = next(self.numbers)
        self.bench = bench
        self.session = SessionKey(0, number)
        identity = MemberIdentity(
            GROUP,
            f"m{number:05d}",
            instance_id,
            "test",
            "sticky",
            10_000,
            3_000,
            max_poll_interval_ms,
        )
        self.membership = Membership(identity, bench.now_ns)
        self.membership.subscribe(topics or ("orders",), False, bench.now_ns)
        self.has: set[Partition] = set()
        """The partitions that its consumer reads."""
        self.told: list[tuple[ChangeKind, int]] = []
        self.heartbeats: list[dict[str, Any]] = []
        self.errors: list[TailraceError] = []

    def send(self) -> tuple[int, Heard] | None:
        """The heartbeat that is due, and what the service says to it."""
        due = self.membership.step(self.bench.now_ns)
        if due is None:
            return None
        token, request = due
        self.heartbeats.append(request)
        try:
            correlation_id = self.bench.send(Api.GROUP_HEARTBEAT, request, self.session)
        except TailraceError as error:
            self.bench.finish_step()
            return token, (error.code, error.detail, {})
        answer = self.bench.finish_step()[correlation_id]
        if isinstance(answer, Refused):
            return token, (ErrorCode(answer.code), answer.message, {})
        return token, (ErrorCode.OK, "", orjson.loads(orjson.dumps(answer)))

    def beat(self) -> bool:
        """One heartbeat, if one is due, and its answer."""
        sent = self.send()
        if sent is not None:
            self.hear(*sent)
        return sent is not None

    def hear(self, token: int, heard: Heard) -> None:
        self.membership.answered(token, *heard, self.bench.now_ns)

    def poll(self, *, steps: int = 100) -> None:
        """The consumer makes the steps that are due."""
        now_ns = self.bench.now_ns
        self.membership.polled_ns = now_ns
        for _ in range(steps):
            change = self.membership.next_change()
            if change is None:
                break
            self.told.append((change.kind, len(change.partitions)))
            if change.kind is ChangeKind.ASSIGN:
                assert not change.partitions & self.has
                self.membership.taking(change.partitions)
                self.has |= change.partitions
            elif change.kind is ChangeKind.REVOKE:
                assert change.partitions <= self.has
                self.has -= change.partitions
                self.membership.revoked(change.partitions, now_ns)
            else:
                assert change.partitions == self.has
                self.has.clear()
                self.membership.ack_lost(now_ns)
        error = self.membership.pop_error(now_ns)
        if error is not None:
            self.errors.append(error)


def settle(*members: Member) -> None:
    """Until nobody has anything to say."""
    bench = members[0].bench
    for _ in range(60):
        acted = False
        for member in members:
            acted = member.beat() or acted
            member.poll()
            deliver_pushes(members)
        if not acted:
            return
        bench.now_ns += 100 * NS_PER_MS
    raise AssertionError("they do not come to rest")


def deliver_pushes(members: Iterable[Member]) -> None:
    """ "There is news": a heartbeat is due at once."""
    pushes, members_of = members_bench(members).pushes, {one.session: one for one in members}
    while pushes:
        push = pushes.pop()
        if (member := members_of.get(SessionKey(push.front, push.session))) is not None:
            member.membership.heartbeat_soon(member.bench.now_ns)


def members_bench(members: Iterable[Member]) -> Bench:
    return next(iter(members)).bench


def come_to_rest(*members: Member, seconds: int = 6) -> None:
    """`settle`, with several heartbeats of each member."""
    for _ in range(seconds):
        for member in members:
            member.membership.heartbeat_soon(member.bench.now_ns)
        settle(*members)
        members[0].bench.now_ns += SECOND_NS


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path)
    yield found
    found.close()


def test_nothing_is_taken_before_the_appliance_knows_and_quiet_heartbeats_say_nothing(
    bench: Bench,
) -> None:
    one = Member(bench)
    one.beat()
    one.poll()
    assert (one.has, one.membership.phase) == (set(), Phase.MEMBER), (
        "assigned, and not reported yet"
    )
    assert one.beat(), "at once"
    one.poll()
    assert len(one.has) == 4
    assert not one.beat()
    bench.now_ns += 3 * SECOND_NS
    assert one.beat()
    join, claim, quiet = one.heartbeats
    assert (join["member_epoch"], join["topics"], join["owned"], join["session_timeout_ms"]) == (
        0,
        ["orders"],
        {},
        10_000,
    )
    assert sum(map(len, claim["owned"].values())) == 4
    assert (quiet["topics"], quiet["owned"]) == (None, None)
    assert "session_timeout_ms" not in quiet


def test_a_revocation_comes_first_and_what_is_kept_is_not_touched(bench: Bench) -> None:
    one, two = Member(bench), Member(bench)
    settle(one)
    before = set(one.has)
    settle(one, two)
    assert one.told == [(ChangeKind.ASSIGN, 4), (ChangeKind.REVOKE, 2)]
    assert two.told == [(ChangeKind.ASSIGN, 2)]
    assert one.has < before
    assert one.has | two.has == before
    two.membership.leave(bench.now_ns)
    assert two.beat()
    assert two.membership.phase is Phase.OUT
    come_to_rest(one)
    assert one.told[2:] == [(ChangeKind.ASSIGN, 2)]


def test_a_slow_consumer_holds_its_own_partitions_only(bench: Bench) -> None:
    one, two = Member(bench), Member(bench)
    settle(one)
    for _ in range(8):
        one.membership.heartbeat_soon(bench.now_ns)
        two.membership.heartbeat_soon(bench.now_ns)
        one.beat()
        two.beat()
        two.poll()
        bench.now_ns += SECOND_NS
    assert len(one.has) == 4, "its program does not poll"
    assert not two.has
    come_to_rest(one, two)
    assert len(one.has) == len(two.has) == 2


def test_a_lost_answer_is_told_all_again_and_an_answer_that_comes_too_late_is_ignored(
    bench: Bench,
) -> None:
    one = Member(bench)
    sent = one.send()
    assert sent is not None
    one.membership.not_answered(sent[0], bench.now_ns)
    settle(one)
    assert len(one.has) == 4
    one.hear(sent[0], (ErrorCode.UNKNOWN_MEMBER, "", {}))
    assert one.membership.phase is Phase.MEMBER
    bench.now_ns += 3 * SECOND_NS
    sent = one.send()
    assert sent is not None
    assert one.membership.due_ns() == bench.now_ns + 10_000 // 3 * NS_PER_MS, (
        "given up in time to be heard of again"
    )
    bench.now_ns += 4 * SECOND_NS
    settle(one)
    assert one.heartbeats[-1]["topics"] == ["orders"], "all is told again"
    assert sum(map(len, one.heartbeats[-1]["owned"].values())) == 4
    assert one.told == [(ChangeKind.ASSIGN, 4)]


def test_a_restart_of_the_group_process_is_no_rebalance(bench: Bench) -> None:
    one, two = Member(bench), Member(bench)
    come_to_rest(one, two)
    had = set(one.has), set(two.has)
    one.told.clear()
    bench.restart()
    come_to_rest(one, two)
    assert (one.has, two.has) == had
    assert not one.told


def test_a_fenced_member_loses_all_and_joins_again_when_it_is_told(bench: Bench) -> None:
    one, two = Member(bench), Member(bench)
    come_to_rest(one, two)
    for _ in range(12):
        bench.wait(1)
        two.membership.heartbeat_soon(bench.now_ns)
        settle(two)
    assert len(two.has) == 4, "it was silent for too long"
    assert one.beat()
    assert one.membership.phase is Phase.LOST
    assert not one.beat(), "its consumer still reads"
    one.told.clear()
    one.poll()
    assert one.told == [(ChangeKind.LOST, 2)]
    come_to_rest(one, two)
    assert len(one.has) == 2


def test_a_member_that_is_not_polled_leaves_and_says_so_at_the_next_poll(bench: Bench) -> None:
    one, two = Member(bench, max_poll_interval_ms=5_000), Member(bench)
    come_to_rest(one, two)
    one.told.clear()
    until_ns = bench.now_ns + 5 * SECOND_NS
    one.membership.polled_ns = bench.now_ns
    while bench.now_ns < until_ns:
        bench.now_ns += SECOND_NS
        one.beat()
    settle(two)
    assert one.heartbeats[-1]["member_epoch"] == -1
    come_to_rest(two)
    assert len(two.has) == 4
    change = one.membership.next_change()
    assert change is not None
    assert "max_poll_interval_ms (5000 ms)" in change.reason
    come_to_rest(one, two)
    assert one.told[0] == (ChangeKind.LOST, 2)
    assert len(one.has) == 2
    one.membership.polled_ns = POLLING_NS
    bench.now_ns += 100_000 * SECOND_NS
    assert one.membership.step(bench.now_ns) is not None, "a poll that waits is a poll"
    assert one.membership.phase is Phase.MEMBER


def test_an_instance_that_lives_refuses_another_and_one_that_went_gives_its_place(
    bench: Bench,
) -> None:
    one = Member(bench, instance_id="pod")
    settle(one)
    two = Member(bench, instance_id="pod")
    two.beat()
    two.poll()
    assert [type(error) for error in two.errors] == [InstanceIdInUseError]
    one.membership.leave(bench.now_ns)
    one.beat()
    assert one.heartbeats[-1]["member_epoch"] == -2
    come_to_rest(two)
    assert len(two.has) == 4
    one.membership.subscribe(["orders"], False, bench.now_ns)
    one.beat()
    assert one.membership.phase is Phase.REFUSED


def test_what_cannot_be_is_raised_once_for_each_try_and_what_passes_is_tried_again_quietly(
    bench: Bench,
) -> None:
    one = Member(bench)
    sent = one.send()
    assert sent is not None
    for code in (
        ErrorCode.NOT_READY,
        ErrorCode.TOO_MANY_REQUESTS,
        ErrorCode.STORAGE_ERROR,
        ErrorCode.UNKNOWN_MEMBER,
    ):
        one.hear(sent[0], (code, "later", {}))
        assert one.send() is None, "after a pause"
        bench.now_ns += 2 * SECOND_NS
        sent = one.send()
        assert sent is not None
    one.hear(sent[0], (ErrorCode.INVALID_REQUEST, "never", {}))
    assert one.send() is None
    one.poll()
    one.poll()
    assert [type(error) for error in one.errors] == [InvalidRequestError]
    come_to_rest(one)
    assert len(one.has) == 4


def test_leaving_ends_whatever_the_appliance_says(bench: Bench) -> None:
    one = Member(bench)

    def phase() -> Phase:
        return one.membership.phase

    one.membership.leave(bench.now_ns)
    assert phase() is Phase.OUT, "it was never there"
    one.membership.subscribe(["orders"], False, bench.now_ns)
    sent = one.send()
    one.membership.leave(bench.now_ns)
    assert phase() is Phase.LEAVING, "its join may have arrived"
    assert sent is not None
    one.hear(*sent)
    sent = one.send()
    assert sent is not None
    one.hear(sent[0], (ErrorCode.NOT_READY, "", {}))
    assert phase() is Phase.LEAVING
    one.membership.subscribe(["orders"], False, bench.now_ns)
    bench.now_ns += SECOND_NS
    one.beat()
    assert phase() is Phase.JOINING, "it was subscribed again meanwhile"
    come_to_rest(one)
    assert len(one.has) == 4


def test_a_member_leaves_though_the_answer_to_its_join_was_lost(bench: Bench) -> None:
    one = Member(bench)
    sent = one.send()
    assert sent is not None
    one.membership.not_answered(sent[0], bench.now_ns)
    one.membership.leave(bench.now_ns)
    one.beat()
    assert one.membership.phase is Phase.OUT
    assert one.heartbeats[-1]["member_epoch"] == LEAVE_EPOCH
    one.membership.leave(bench.now_ns)
    assert not one.beat(), "it has left already"


@pytest.mark.parametrize("seed", short(range(25), *range(8)))
def test_random_schedules_never_let_two_read_a_partition_and_come_to_rest(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    topics = FakeTopics(orders=5, clicks=3)
    bench = Bench(tmp_path, topics)
    bench.store._db.execute("PRAGMA synchronous=OFF")
    members: list[Member] = []
    try:
        for _ in range(200):
            act = chance.random()
            member = chance.choice(members) if members else None
            if member is None or (act < 0.06 and len(members) < 6):
                members.append(Member(bench, "orders", "clicks"))
            elif act < 0.09:
                members.remove(member)
                member.membership.leave(bench.now_ns)
                member.has.clear()
                if chance.random() < 0.7:
                    member.send()
            elif act < 0.11:
                topics.grow("orders", min(12, topics.by_name("orders").partition_count + 1))  # type: ignore[union-attr]
                bench.service.topics_changed(bench.now_ns)
                bench.finish_step()
            elif act < 0.13:
                bench.restart()
            elif act < 0.5:
                sent = member.send()
                if sent is not None:
                    if chance.random() < 0.25:
                        member.membership.not_answered(sent[0], bench.now_ns)
                    else:
                        member.hear(*sent)
            elif act < 0.8:
                member.poll(steps=chance.randrange(1, 4))
            else:
                bench.now_ns += chance.choice((10, 100, 1_000)) * NS_PER_MS
                for one in members:
                    one.membership.heartbeat_soon(bench.now_ns)
            check(bench, members)
        come_to_rest(*members, seconds=15)  # some left without a word
        check(bench, members)
        owned = [partition for one in members for partition in one.has]
        assert len(owned) == len(set(owned)) == topics.by_name("orders").partition_count + 3  # type: ignore[union-attr]
        counts = [len(one.has) for one in members]
        assert max(counts) - min(counts) <= 1
    finally:
        bench.close()


def check(bench: Bench, members: list[Member]) -> None:
    """Members that the appliance knows, and who do not owe it a leave, read each partition once."""
    group = bench.service._table.get(GROUP)
    known = set() if group is None else set(group.members)
    readers: dict[Partition, str] = {}
    for member in members:
        name = member.membership.identity.member_id
        assert member.has == member.membership.taken
        if name in known and member.membership.phase is Phase.MEMBER:
            for partition in member.has:
                assert readers.setdefault(partition, name) == name, f"{partition} has two readers"


def test_what_is_confirmed_stays_claimed_while_something_else_is_to_be_given_up(
    bench: Bench,
) -> None:
    one = Member(bench)
    topic = bench.topics.id_of("orders")

    def hear(*partitions: int) -> dict[str, Any]:
        """A heartbeat is answered with this assignment; returns the heartbeat."""
        bench.now_ns += 3 * SECOND_NS
        due = one.membership.step(bench.now_ns)
        assert due is not None
        answer = {
            "member_epoch": 1,
            "assignment": {topic: list(partitions)},
            "topic_names": {topic: "orders"},
            "catalog_version": 1,
        }
        one.hear(due[0], (ErrorCode.OK, "", answer))
        return due[1]

    hear(0)
    hear(0)
    one.poll()
    hear(0, 1)
    assert hear(0, 1)["owned"] == {topic: [0, 1]}
    hear(1)
    assert hear(1)["owned"] is None, "0 is still read, and 1 may be taken at any moment"
    one.poll(steps=1)
    assert one.told[-1] == (ChangeKind.REVOKE, 1)
    assert hear(1)["owned"] == {topic: [1]}
    one.poll()
    assert one.has == {(topic, 1)}


def test_heartbeats_without_news_come_at_moments_that_members_share_and_never_later_than_the_interval(  # noqa: E501
    bench: Bench,
) -> None:
    bench.topics.create("wide", 40)
    members = [Member(bench, "wide") for _ in range(40)]
    come_to_rest(*members)
    for member in members:
        member.beat()
    started_ns = bench.now_ns

    def due_of(member: Member) -> int:
        due_ns = member.membership.due_ns()
        assert due_ns is not None
        return due_ns

    sent_ns: dict[Member, list[int]] = {member: [] for member in members}
    while bench.now_ns < started_ns + 9 * SECOND_NS:
        member = min(members, key=due_of)
        sent_ns[member].append(due_of(member))
        bench.now_ns = max(bench.now_ns, due_of(member)) + NS_PER_MS // 3  # its thread is late
        assert member.beat()
    for times in sent_ns.values():
        assert started_ns < times[0] <= started_ns + 3 * SECOND_NS
        assert {later - earlier for earlier, later in itertools.pairwise(times)} == {
            3 * SECOND_NS
        }, "the rate is what was asked for"
    moments = {times[0] % (3 * SECOND_NS) for times in sent_ns.values()}
    assert HEARTBEAT_SLOTS // 2 < len(moments) <= HEARTBEAT_SLOTS, "shared, and not one for all"
