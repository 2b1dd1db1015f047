"""Acknowledgements of share groups that go with the commit of a transaction."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.core.errors import (
    FencedMemberError,
    InvalidGroupError,
    InvalidRequestError,
    LockLostError,
    ProducerFencedError,
    StorageError,
    TailraceError,
    TransactionAbortedError,
    UnknownMemberError,
)
from tailrace.protocol.frame import Api
from tests.appliance.groups.transactions.kit import Owner, World
from tests.kit.matrices import short

LOCK_S = 30


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, with_share=True)
    yield made
    made.store.close()


class Member:
    """A member of the share group g, and the offsets of partition 0 that it has acquired."""

    def __init__(self, world: World, member_id: str = "a") -> None:
        self.world = world
        self.member_id = member_id
        self.sequence = 0
        self.join()

    def join(self) -> None:
        body = self.world.ask(
            Api.GROUP_HEARTBEAT, group="g", kind="share", member_id=self.member_id, member_epoch=0,
            topics=["jobs"], session_timeout_ms=300_000, offset_reset="earliest",
        )  # fmt: skip
        self.epoch = body["member_epoch"]

    def request(self, **more: Any) -> dict[str, Any]:
        return {
            "group": "g", "member_id": self.member_id, "member_epoch": self.epoch, **more
        }  # fmt: skip

    def acquire(self, count: int) -> list[tuple[int, int]]:
        """(offset, delivery count) of the records."""
        self.sequence += 1
        body = self.world.ask(
            Api.SHARE_ACQUIRE, **self.request(max_records=count, sequence=self.sequence)
        )
        return [
            (offset, delivery_count)
            for _, _, first, last, delivery_count, *_ in body["acquired"]
            for offset in range(first, last + 1)
        ]

    def acknowledge(self, first: int, last: int, outcome: str) -> None:
        """Acknowledge records outside of a transaction."""
        self.sequence += 1
        self.world.ask(
            Api.SHARE_ACKNOWLEDGE, sequence=self.sequence, **self.done(first, last, outcome)
        )

    def done(self, first: int, last: int, outcome: str = "accept") -> dict[str, Any]:
        """An entry of `acknowledgements`."""
        topic_id = self.world.topics.id_of("jobs")
        return self.request(acknowledge=[[topic_id, 0, first, last, outcome]])


@pytest.fixture
def member(world: World) -> Member:
    world.topics.create(
        "jobs", 1, group_share_record_lock_duration_ms=LOCK_S * 1_000,
        group_share_delivery_count_limit=1_000,
    )  # fmt: skip
    return Member(world)


def start_offset(world: World) -> int:
    body = world.ask(Api.DESCRIBE_GROUP, group="g", part="partitions")
    return int(body["partitions"][0]["start_offset"])


def test_a_commit_acknowledges_and_an_abort_does_not(world: World, member: Member) -> None:
    owner = Owner(world)
    assert len(member.acquire(4)) == 4
    owner.end("abort", acknowledgements=[member.done(0, 3)])
    assert start_offset(world) == 0
    owner.end(acknowledgements=[member.done(0, 1)])
    assert start_offset(world) == 2
    owner.end(
        acknowledgements=[
            member.done(2, 2),
        ]
    )
    owner.end(acknowledgements=[member.done(3, 3, "release")])
    assert member.acquire(1) == [(3, 2)]


def test_a_repeated_commit_is_answered_alike_and_acknowledges_once(
    world: World, member: Member
) -> None:
    owner = Owner(world)
    member.acquire(1)
    request = owner.request(acknowledgements=[member.done(0, 0, "release")])
    first = world.ask(Api.END_TRANSACTION, **request)
    assert member.acquire(1) == [(0, 2)]
    assert world.ask(Api.END_TRANSACTION, **request) == first
    world.kill()
    assert world.ask(Api.END_TRANSACTION, **request) == first
    assert Member(world, "b").acquire(1) == [(1, 1)]  # the first member has its lock


def test_a_record_that_another_member_has_refuses_the_commit_and_decides_nothing(
    world: World, member: Member
) -> None:
    owner, other = Owner(world), Member(world, "b")
    member.acquire(2)
    world.wait(LOCK_S + 1)
    assert other.acquire(2) == [(0, 2), (1, 2)]
    orders = {
        "group": "h", "member_id": None, "member_epoch": -1, "entries": [["orders", 0, 5, -1, ""]]
    }  # fmt: skip
    with pytest.raises(LockLostError, match="not locked by this member"):
        owner.end(offsets=[orders], acknowledgements=[member.done(0, 1)])
    assert world.store.read("SELECT count(*) FROM offsets") == [(0,)]
    owner.end(acknowledgements=[other.done(0, 1)])
    assert start_offset(world) == 2
    with pytest.raises(LockLostError):
        owner.end(acknowledgements=[other.done(1, 1)])


def test_locks_expire_under_an_open_transaction_unless_their_member_renews_them(
    world: World, member: Member
) -> None:
    owner = Owner(world, timeout_ms=900_000)
    owner.write()
    member.acquire(2)
    for _ in range(4):
        world.wait(LOCK_S - 5)
        member.acknowledge(0, 0, "renew")
    with pytest.raises(LockLostError, match="nothing of the transaction was decided"):
        owner.end(acknowledgements=[member.done(0, 1)])
    assert start_offset(world) == 0
    owner.end(acknowledgements=[member.done(0, 0)])
    assert start_offset(world) == 1


def test_one_record_that_is_lost_acknowledges_none(world: World, member: Member) -> None:
    owner = Owner(world)
    member.acquire(2)
    for lost in (member.done(0, 2), member.done(1, 5)):
        with pytest.raises(LockLostError):
            owner.end(acknowledgements=[lost])
    assert start_offset(world) == 0
    owner.end(acknowledgements=[member.done(0, 1)])
    assert start_offset(world) == 2


def test_a_member_that_has_gone_or_joined_anew_cannot_commit(world: World, member: Member) -> None:
    owner = Owner(world)
    member.acquire(1)
    before = member.done(0, 0)
    member.join()
    with pytest.raises(FencedMemberError):
        owner.end(acknowledgements=[before])
    with pytest.raises(LockLostError):  # the join has released them
        owner.end(acknowledgements=[member.done(0, 0)])
    world.ask(Api.GROUP_HEARTBEAT, **{**member.request(), "kind": "share", "member_epoch": -1})
    with pytest.raises(UnknownMemberError):
        owner.end(acknowledgements=[member.done(0, 0)])
    assert start_offset(world) == 0


def test_an_owner_that_is_fenced_or_timed_out_acknowledges_nothing(
    world: World, member: Member
) -> None:
    owner = Owner(world, timeout_ms=1_000)
    member.acquire(1)
    owner.write()
    world.run_workers()
    world.wait(3)
    with pytest.raises(TransactionAbortedError):
        owner.end(acknowledgements=[member.done(0, 0)])
    Owner(world)
    with pytest.raises(ProducerFencedError):
        owner.end(acknowledgements=[member.done(0, 0)])
    assert start_offset(world) == 0


def test_a_kill_before_the_commit_acknowledges_nothing_and_behind_it_all(
    world: World, member: Member
) -> None:
    owner = Owner(world)
    member.acquire(1)
    owner.write()
    request = owner.request(acknowledgements=[member.done(0, 0)])
    world.send(Api.END_TRANSACTION, **request)
    world.kill()  # before the commit
    assert start_offset(world) == 0
    world.send(Api.END_TRANSACTION, **request)
    world.step()
    world.kill()  # the answer is lost
    assert start_offset(world) == 1
    owner.take(world.ask(Api.END_TRANSACTION, **request))
    world.settle()
    assert [what for what, *_ in world.workers.workers[0].log] == ["data", "commit"]


def test_a_commit_that_the_database_refuses_is_undone_in_memory(
    world: World, member: Member
) -> None:
    owner = Owner(world)
    member.acquire(1)
    number = world.send(Api.END_TRANSACTION, **owner.request(acknowledgements=[member.done(0, 0)]))
    world.step(StorageError("the disk said no"))
    with pytest.raises(StorageError):
        world.answer(number)
    assert start_offset(world) == 0
    owner.end(acknowledgements=[member.done(0, 0)])
    assert start_offset(world) == 1


@pytest.mark.parametrize("outcome", ["reject", "renew", "unread"])
def test_other_outcomes_are_refused(world: World, member: Member, outcome: str) -> None:
    member.acquire(1)
    with pytest.raises(InvalidRequestError, match="accept or release"):
        Owner(world).end(acknowledgements=[member.done(0, 0, outcome)])


@pytest.mark.parametrize("given", [{}, [1], [{}], [{"group": 1}], [{"group": "g"}] * 65, "x"])
def test_malformed_acknowledgements_are_refused(world: World, member: Member, given: Any) -> None:
    with pytest.raises(InvalidRequestError):
        Owner(world).end(acknowledgements=given)


def test_a_member_named_twice_and_a_consumer_group_are_refused(
    world: World, member: Member
) -> None:
    owner = Owner(world)
    member.acquire(2)
    with pytest.raises(InvalidRequestError, match="names a member twice"):
        owner.end(acknowledgements=[member.done(0, 0), member.done(1, 1)])
    world.ask(Api.COMMIT_OFFSETS, group="h", offsets=[["orders", 0, 5, -1, ""]])
    with pytest.raises(InvalidGroupError, match="no share group"):
        owner.end(acknowledgements=[{**member.done(0, 0), "group": "h"}])


@pytest.mark.parametrize("seed", short(range(20), *range(7)))
def test_whatever_workers_do_and_whenever_the_process_is_killed_each_input_has_one_output(
    world: World, member: Member, seed: int
) -> None:
    rng, count = random.Random(seed), 25
    world.topics.default_end = count
    members = [member, Member(world, "b"), Member(world, "c")]
    owners = [Owner(world, f"t-{one.member_id}") for one in members]
    taken: list[list[int]] = [[], [], []]
    outputs: list[int] = []
    for _ in range(2_000):
        if start_offset(world) == count:
            break
        index = rng.randrange(3)
        one, owner, mine = members[index], owners[index], taken[index]
        action = rng.random()
        if action < 0.45:
            mine += [offset for offset, _ in one.acquire(rng.randint(1, 3))]
        elif action < 0.5:
            world.wait(rng.choice([1, LOCK_S + 1]))
        elif action < 0.55:
            world.kill()
        elif action < 0.6:
            one.join()
        elif mine:
            offset = mine.pop(rng.randrange(len(mine)))
            request = owner.request(acknowledgements=[one.done(offset, offset)])
            if rng.random() < 0.3:  # killed before, or behind the commit; the answer is lost
                try:
                    world.send(Api.END_TRANSACTION, **request)
                    if rng.random() < 0.5:
                        world.step()
                except TailraceError:
                    continue
                world.kill()
            try:
                owner.take(world.ask(Api.END_TRANSACTION, **request))
            except (LockLostError, FencedMemberError):
                continue
            outputs.append(offset)
    assert sorted(outputs) == list(range(count))
