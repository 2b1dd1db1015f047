"""Groups under random schedules: members that join, leave, die and come back, answers that are
lost, topics that grow and go, restarts, rollbacks.

Every schedule is a seed. After each step the invariants are looked at; at the end all comes to
rest, balanced.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from appliance.groups.base.messages import Partition, SessionKey
from appliance.groups.consumer import heartbeats
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import StorageError, TailraceError
from tailrace.protocol.frame import Api
from tests.appliance.groups.kit import SECOND_NS, Bench, FakeTopics, Refused
from tests.kit.matrices import short

GROUP = "billing"
STEPS = 220
REJOIN = {ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER}


class Member:
    """A member whose program is slow, and whose network loses answers. What it does is what
    service.py asks of clients.
    """

    def __init__(self, number: int, topics: list[str], instance_id: str | None) -> None:
        self.member_id = f"m{number:03d}"
        self.session = SessionKey(number % 2, number)
        self.topics = topics
        self.instance_id = instance_id
        self.epoch = 0
        self.owned: set[Partition] = set()
        self.requested: set[Partition] | None = None
        """The assignment it was told, until it has it so."""
        self.may_take = True
        self.reported: set[Partition] | None = None
        """In the heartbeat under way."""
        self.last_said: set[Partition] | None = None
        self.is_terse = number % 2 == 0
        """It says nothing where nothing has changed for it; others confirm each assignment."""
        self.is_to_report = True
        self.is_joined = False

    def request(self) -> dict[str, Any]:
        request: dict[str, Any] = {
            "group": GROUP,
            "member_id": self.member_id,
            "member_epoch": self.epoch,
            "instance_id": self.instance_id,
        }
        if self.epoch == 0:
            self.owned, self.requested = set(), None
            request |= {
                "topics": self.topics,
                "session_timeout_ms": 10_000,
                "rebalance_timeout_ms": 20_000,
            }
        if self.is_to_report or self.epoch == 0:
            owned: dict[str, list[int]] = {}
            for topic_id, partition in self.owned:
                owned.setdefault(topic_id, []).append(partition)
            request["owned"] = owned
            self.may_take = False
        self.reported = set(self.owned) if "owned" in request else None
        self.is_to_report = False
        return request

    def missed(self) -> None:
        """No answer, or one that says that nothing was done."""
        self.is_to_report = True

    def answered(self, answer: Any) -> None:
        if isinstance(answer, Refused | TailraceError):
            self.missed()
            if answer.code in REJOIN:
                self.epoch, self.is_joined = 0, False
                self.owned, self.requested = set(), None
            return
        assert answer["member_epoch"] >= self.epoch, "epochs never go back"
        self.epoch, self.is_joined, self.may_take = answer["member_epoch"], True, True
        self.last_said = self.last_said if self.reported is None else self.reported
        if "assignment" in answer:
            self.requested = {
                (topic_id, partition)
                for topic_id, partitions in answer["assignment"].items()
                for partition in partitions
            }
            if self.requested == self.reported or (
                self.is_terse and self.requested == self.owned == self.last_said
            ):
                self.requested = None

    def apply(self) -> None:
        """Its program polls: it takes and gives back what it was told."""
        if self.requested is not None:
            self.owned = self.requested if self.may_take else self.owned & self.requested
            if self.owned == self.requested:
                self.requested = None
            self.is_to_report = True


class Schedule:
    """One seed's run."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.topics = FakeTopics(orders=4, clicks=3)
        self.bench = Bench(path, self.topics)
        self._quicken()
        self.members: list[Member] = []
        self.number = 0
        self.committed: dict[Partition, int] = {}
        self.epoch = 0
        self.fails = False
        self.is_equal = self.random.random() < 0.6

    def _quicken(self) -> None:
        self.bench.store.write_many("UPDATE meta SET value = value WHERE name = ?", [("",)])
        self.bench.store.rollback()
        self.bench.store._db.execute("PRAGMA synchronous=OFF")
        self.bench.store.before_commit.append(self._maybe_fail)

    def _maybe_fail(self) -> None:
        if self.fails and self.bench.store.is_in_transaction:
            raise StorageError("the disk is not what it was")

    # ---- what happens ----------------------------------------------------------------------------

    def step(self) -> None:
        self.bench.now_ns += self.random.choice((0, 10_000_000, SECOND_NS // 2, 2 * SECOND_NS))
        self.random.choices(
            (self.join, self.leave, self.die, self.change_topics, self.restart, self.exchange),
            weights=(8, 3, 3, 3, 2, 80),
        )[0]()
        self.check()

    def join(self) -> None:
        if len(self.members) < 7:
            self.number += 1
            names = (
                ["orders", "clicks"]
                if self.is_equal
                else self.random.choice((["orders"], ["clicks"], ["orders", "clicks", "later"]))
            )
            instance_id = f"pod-{self.random.randrange(4)}" if self.random.random() < 0.4 else None
            self.members.append(Member(self.number, names, instance_id))
        self.exchange()

    def leave(self) -> None:
        if self.members:
            member = self.members.pop(self.random.randrange(len(self.members)))
            epoch = -2 if member.instance_id is not None and self.random.random() < 0.6 else -1
            request = {"group": GROUP, "member_id": member.member_id, "member_epoch": epoch}
            try:
                self.bench.send(Api.GROUP_HEARTBEAT, request, member.session)
            except TailraceError:
                pass  # it has nothing to leave
            self.bench.finish_step()

    def die(self) -> None:
        if self.members:
            member = self.members.pop(self.random.randrange(len(self.members)))
            if self.random.random() < 0.7:
                self.bench.service.session_closed(member.session, self.bench.now_ns)
            self.bench.finish_step()

    def change_topics(self) -> None:
        names = [topic.name for topic in self.topics.topics()]
        kind = self.random.randrange(4)
        if kind == 0:
            name = self.random.choice(names)
            count = self.topics.views[name].partition_count
            self.topics.grow(name, min(12, count + self.random.randrange(1, 4)))
        elif kind == 1 and "later" not in names:
            self.topics.create("later", self.random.randrange(1, 5))
        elif kind == 2 and "later" in names:
            gone = self.topics.id_of("later")
            self.topics.delete("later")
            self.committed = {
                partition: offset
                for partition, offset in self.committed.items()
                if partition[0] != gone
            }
        elif kind == 3:
            self.topics.set("orders", delivery_paused=self.random.random() < 0.5)
        self.bench.service.topics_changed(self.bench.now_ns)
        self.bench.finish_step()

    def restart(self) -> None:
        self.fails = False
        self.bench.restart()
        self._quicken()

    def exchange(self) -> None:
        """One step of the service with heartbeats and commits of some members."""
        self.fails = self.random.random() < 0.08
        sent: dict[int, Member] = {}
        commits: dict[int, tuple[Member, dict[Partition, int]]] = {}
        for member in self.members:
            if self.random.random() < 0.3:
                member.apply()
            if member.is_joined and self.random.random() < 0.3:
                self._send_commit(member, commits)
            if self.random.random() < 0.6:
                try:
                    sent[self.bench.send(Api.GROUP_HEARTBEAT, member.request(), member.session)] = (
                        member
                    )
                except TailraceError as error:
                    member.answered(error)
        if self.random.random() < 0.1 and self.members:
            self.bench.service.session_closed(
                self.random.choice(self.members).session, self.bench.now_ns
            )
        answers = self.bench.finish_step()
        self.fails = False
        for correlation_id, member in sent.items():
            if self.random.random() < 0.1:
                member.missed()
            else:
                member.answered(answers[correlation_id])
        for correlation_id, (member, offsets) in commits.items():
            self._take_commit(member, offsets, answers[correlation_id])

    def _send_commit(
        self, member: Member, commits: dict[int, tuple[Member, dict[Partition, int]]]
    ) -> None:
        """Commit offsets, mostly of partitions that the member owns."""
        everything = [
            (topic.topic_id, partition)
            for topic in self.topics.topics()
            for partition in range(topic.partition_count)
        ]
        chosen = self.random.sample(everything, 1) + sorted(member.owned)
        offsets = {
            one: self.random.randrange(1_000)
            for one in chosen
            if self.topics.by_id(one[0]) is not None
        }
        entries = [
            [self.topics.by_id(topic_id).name, partition, offset]  # type: ignore[union-attr]
            for (topic_id, partition), offset in offsets.items()
        ]
        epoch = member.epoch if self.random.random() < 0.8 else max(1, member.epoch - 1)
        request = {
            "group": GROUP,
            "member_id": member.member_id,
            "member_epoch": epoch,
            "offsets": entries,
        }
        try:
            commits[self.bench.send(Api.COMMIT_OFFSETS, request, member.session)] = member, offsets
        except TailraceError as error:
            if error.code not in REJOIN:
                raise
            for one in everything:
                assert self._owner(one) != member.member_id or epoch > self._server_epoch(member)

    def _server_epoch(self, member: Member) -> int:
        group = self.bench.service._table.get(GROUP)
        assert group is not None
        return group.members[member.member_id].epoch if member.member_id in group.members else -1

    def _owner(self, partition: Partition) -> str | None:
        group = self.bench.service._table.get(GROUP)
        return None if group is None else group.owners.get(partition)

    def _take_commit(self, member: Member, offsets: dict[Partition, int], answer: Any) -> None:
        if isinstance(answer, Refused):
            assert answer.code == ErrorCode.STORAGE_ERROR
            return
        refused = {
            (self.topics.id_of(topic), partition) for topic, partition, _, _ in answer["refused"]
        }
        for partition, offset in offsets.items():
            if partition not in refused:
                others = [
                    one.member_id
                    for one in self.members
                    if one is not member and partition in one.owned and self._is_known(one)
                ]
                assert not others, f"{member.member_id} committed what {others} own"
                self.committed[partition] = offset

    def _is_known(self, member: Member) -> bool:
        group = self.bench.service._table.get(GROUP)
        return member.is_joined and group is not None and member.member_id in group.members

    # ---- what must hold --------------------------------------------------------------------------

    def check(self) -> None:
        group = self.bench.service._table.get(GROUP)
        if group is None:
            assert not self.committed
            return
        group.check_invariants()
        assert group.epoch >= self.epoch, "epochs never go back"
        self.epoch = group.epoch
        for member in self.members:
            if self._is_known(member):
                known = group.members[member.member_id]
                assert member.owned <= known.assigned.keys() | known.revoking.keys(), (
                    "nobody owns what the group thinks is free"
                )
        for (topic_id, partition), offset in self.committed.items():
            row = self.bench.store.offset(group.group_id, topic_id, partition)
            assert row is not None
            assert row.committed == offset

    def come_to_rest(self) -> None:
        """No more faults; all that is dead times out."""
        self.bench.wait(21)
        for _ in range(40):
            self.bench.wait(0.5)
            for member in self.members:
                member.apply()
                try:
                    member.answered(
                        self.bench.ask(Api.GROUP_HEARTBEAT, member.session, **member.request())
                    )
                except (TailraceError, Refused) as error:
                    member.answered(error)
                self.check()
        group = self.bench.service._table.get(GROUP)
        live = [member for member in self.members if self._is_known(member)]
        assert len({member.instance_id for member in self.members if member.instance_id}) + sum(
            member.instance_id is None for member in self.members
        ) == len(live)
        if group is None or not live:
            return
        assert group.state == "STABLE"
        names = {name for member in live for name in member.topics}
        everything = {
            (t.topic_id, partition)
            for t in self.topics.topics()
            if t.name in names
            for partition in range(t.partition_count)
        }
        owned = [partition for member in live for partition in member.owned]
        assert sorted(owned) == sorted(everything), "every partition has one owner"
        loads = [len(member.owned) for member in live]
        if len({tuple(member.topics) for member in live}) == 1:
            assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("block", short(range(6), 0, 2))
def test_random_schedules_keep_ownership_epochs_and_offsets(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if block % 3 == 2:  # groups of this size are large, too
        monkeypatch.setattr(heartbeats, "ASSIGNED_AT_ONCE_MEMBERS", 1)
        monkeypatch.setattr(heartbeats, "ASSIGN_PAUSE_NS_PER_MEMBER", SECOND_NS // 2)
    for seed in range(block * 10, block * 10 + 10):
        path = tmp_path / str(seed)
        path.mkdir()
        schedule = Schedule(path, seed)
        try:
            for _ in range(STEPS):
                schedule.step()
            schedule.come_to_rest()
        except BaseException:
            print(f"seed {seed}")
            raise
        finally:
            schedule.bench.close()
