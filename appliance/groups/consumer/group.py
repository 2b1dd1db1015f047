"""A consumer group: its members, the owners of its partitions, and the target assignment (KIP-848).

A change of members, subscriptions or partitions makes the group dirty. `assign` then increments the
group epoch and computes the target assignment. Members reconcile one by one, at their heartbeats
(`members.reconcile`). A member waits only for partitions that another member still owns.

Owner: the service.
Invariants:
- `owners` maps each owned partition to the member that has it in `assigned` or `revoking`.
- `epoch` never decreases.
- `unsettled` holds the members whose assignment is not their target at the group epoch.
- A heartbeat without a change does no work here. A change costs O(members + partitions), once a
  step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.assignors import DEFAULT_ASSIGNOR, MemberView
from appliance.groups.base.deleted_topics import DeletedTopics
from appliance.groups.base.members import Member, reconcile
from appliance.groups.base.messages import Partition, TopicImage
from appliance.groups.base.request_validation import CONSUMER
from appliance.groups.store.schema import GroupRow, MemberRow

EMPTY, ASSIGNING, RECONCILING, GROUP_STABLE = "EMPTY", "ASSIGNING", "RECONCILING", "STABLE"


class ConsumerGroup:
    """One group."""

    __slots__ = (
        "assign_after_ns",
        "assignor",
        "begins",
        "begun",
        "blocked",
        "by_instance",
        "created_ms",
        "deleted_topics",
        "empty_elapsed_ms",
        "empty_since_ms",
        "epoch",
        "followed_count",
        "freed",
        "group_id",
        "is_blocked_known",
        "is_dirty",
        "is_row_changed",
        "members",
        "name",
        "names",
        "owners",
        "paused",
        "rebalances",
        "signature",
        "target_owners",
        "touched",
        "trouble",
        "unsettled",
    )  # fmt: skip

    def __init__(self, group_id: int, name: str, now_ms: int, elapsed_ms: int = 0) -> None:
        """`now_ms`: wall clock. `elapsed_ms`: elapsed time."""
        self.group_id = group_id
        self.name = name
        self.epoch = 0
        self.assignor = DEFAULT_ASSIGNOR
        self.rebalances = 0
        self.created_ms = now_ms
        self.empty_since_ms = now_ms
        self.empty_elapsed_ms = elapsed_ms
        self.signature: dict[str, tuple[str, int]] = {}
        """Subscribed topics that exist, as of the last assignment: name -> (id, partition
        count).
        """
        self.begun: dict[str, int] = {}
        """Topic id -> its partition count when the group started to read it (see
        `start_offsets`).
        """
        self.begins: dict[str, dict[str, int]] = {}
        """Topic id -> partition (str) -> log end offset at that time, of partitions that are
        blocked at first (see `hash_slot_handover`).
        """
        self.names: dict[str, str] = {}
        """Topic id -> name, of the topics in `begun`."""
        self.deleted_topics = DeletedTopics()
        self.followed_count = 0
        """Partitions of `signature`, as the table has counted them."""
        self.trouble = ""
        """The error of the group's own assignor; empty: none."""
        self.members: dict[str, Member] = {}
        self.by_instance: dict[str, str] = {}
        self.owners: dict[Partition, str] = {}
        self.target_owners: dict[Partition, str] = {}
        self.unsettled: set[str] = set()
        self.touched: set[str] = set()
        """Ids of members whose rows have to be written, or deleted if they have gone."""
        self.freed: set[Partition] = set()
        """Partitions that lost their owner since the last `next_owners`."""
        self.paused: tuple[str, ...] = ()
        """Ids of subscribed topics whose delivery is paused."""
        self.blocked: dict[Partition, int] = {}
        """Partitions that wait for their sources to be drained (see `hash_slot_handover`) -> start
        of the wait, ns.
        """
        self.is_blocked_known = False
        self.is_dirty = False
        self.is_row_changed = True
        self.assign_after_ns = 0
        """Earliest time of the next assignment, since large groups pause between assignments."""

    # ---- rows ------------------------------------------------------------------------------------

    def row(self) -> GroupRow:
        detail = orjson.dumps(
            {
                "topics": self.signature, "begun": self.begun, "begins": self.begins,
                "names": self.names, "gone": self.deleted_topics.to_json(),
                "trouble": self.trouble, "is_dirty": self.is_dirty,
            }
        ).decode()  # fmt: skip
        return GroupRow(
            self.group_id, self.name, CONSUMER, self.epoch, self.assignor, self.rebalances,
            self.created_ms, self.empty_since_ms, detail,
            self.empty_elapsed_ms,
        )  # fmt: skip

    @classmethod
    def of_rows(cls, row: GroupRow, members: Iterable[MemberRow], now_ns: int) -> ConsumerGroup:
        """The group of stored rows, with new sessions for its members."""
        group = cls(row.group_id, row.name, row.created_ms, row.empty_elapsed_ms)
        group.epoch, group.assignor, group.rebalances, group.empty_since_ms = (
            row.epoch,
            row.assignor,
            row.rebalances,
            row.empty_since_ms,
        )
        detail = orjson.loads(row.detail)
        group.signature = {
            name: (topic_id, count) for name, (topic_id, count) in detail["topics"].items()
        }
        group.begun, group.begins = (
            detail.get("begun", dict(group.signature.values())),
            detail.get("begins", {}),
        )
        group.names = detail.get(
            "names",
            {
                topic_id: name
                for name, (topic_id, _) in group.signature.items()
                if topic_id in group.begun
            },
        )
        group.deleted_topics = DeletedTopics(detail.get("gone"))
        group.trouble = detail["trouble"]
        for member_row in members:
            group.add(Member.of_row(member_row, now_ns))
        group.touched.clear()
        group.is_row_changed, group.is_dirty = False, detail["is_dirty"]
        group.unsettled = {
            one.member_id for one in group.members.values() if not one.is_settled(group.epoch)
        }
        return group

    # ---- members ---------------------------------------------------------------------------------

    def add(self, member: Member) -> None:
        """Add a member with the partitions that it owns."""
        self.members[member.member_id] = member
        if member.instance_id is not None:
            self.by_instance[member.instance_id] = member.member_id
        for partition in (*member.assigned, *member.revoking):
            self.owners[partition] = member.member_id
        for partition in member.target:
            self.target_owners[partition] = member.member_id
        self.unsettled.add(member.member_id)
        self.touched.add(member.member_id)
        self.is_dirty = self.is_row_changed = True
        self.empty_since_ms = 0

    def remove(self, member: Member, now_ms: int, elapsed_ms: int) -> None:
        """Remove a member and free its partitions."""
        del self.members[member.member_id]
        if (
            member.instance_id is not None
            and self.by_instance.get(member.instance_id) == member.member_id
        ):
            del self.by_instance[member.instance_id]
        self.release(member)
        self.unsettled.discard(member.member_id)
        self.touched.add(member.member_id)
        self.is_dirty = self.is_row_changed = True
        if not self.members:
            self.empty_since_ms, self.empty_elapsed_ms = now_ms, elapsed_ms

    def release(self, member: Member) -> None:
        """Free all partitions of a member."""
        for partition in (*member.assigned, *member.revoking):
            del self.owners[partition]
            self.freed.add(partition)
        member.assigned, member.revoking = {}, {}

    def replace(self, old: Member, new: Member) -> None:
        """Replace a static member that returned with another member id. The new member inherits the
        target, so that no other member's target changes.
        """
        was_dirty = self.is_dirty
        new.target = old.target
        self.remove(old, 0, 0)
        self.add(new)
        self.is_dirty = was_dirty or old.settings.topics != new.settings.topics

    def changed(self, member: Member) -> None:
        """Note that a member's epoch, state or assignment changed, so that its row is written."""
        member.quiet_answer = b""
        self.touched.add(member.member_id)
        if member.is_settled(self.epoch):
            self.unsettled.discard(member.member_id)
        else:
            self.unsettled.add(member.member_id)

    # ---- assignment ------------------------------------------------------------------------------

    def subscribed(self, topics: TopicImage) -> dict[str, tuple[str, int]]:
        """The existing topics of all subscriptions: name -> (id, partition count)."""
        found: dict[str, tuple[str, int]] = {}
        seen: set[tuple[str, ...]] = set()
        for member in self.members.values():
            names = member.settings.topics
            if names in seen:
                continue
            seen.add(names)
            for name in names:
                if name not in found and (topic := topics.by_name(name)) is not None:
                    found[name] = topic.topic_id, topic.partition_count
        return found

    def assign(self, topics: TopicImage, assignors: Assignors) -> None:
        """Start the next epoch and compute its target assignment."""
        self.signature = self.subscribed(topics)
        self.epoch += 1
        self.rebalances += 1
        self.is_dirty, self.is_row_changed, self.is_blocked_known = False, True, False
        name_of = {topic_id: name for name, (topic_id, _) in self.signature.items()}
        subscriptions: dict[tuple[str, ...], frozenset[str]] = {}
        views = {
            one.member_id: MemberView(
                subscriptions.setdefault(one.settings.topics, frozenset(one.settings.topics)),
                one.instance_id,
                [
                    (name_of[topic_id], partition)
                    for topic_id, partition in one.target
                    if topic_id in name_of
                ],
            )
            for one in self.members.values()
        }
        counts = {name: count for name, (_, count) in self.signature.items()}
        assignment, self.trouble = assignors.assign(self.assignor, views, counts, self.name)
        self.target_owners = {}
        for member_id, partitions in assignment.items():
            target = frozenset(
                [(self.signature[topic][0], partition) for topic, partition in partitions]
            )
            member = self.members[member_id]
            if target != member.target:
                member.target = target
                self.touched.add(member_id)
            self.target_owners.update(dict.fromkeys(target, member_id))
        self.unsettled = set(self.members)

    def reconcile(self, member: Member, reported: frozenset[Partition] | None, now_ns: int) -> None:
        """Advance a member one step towards its target at its heartbeat."""
        revoking = member.revoking
        if reconcile(member, self.epoch, self.owners, reported, now_ns, self.blocked):
            if revoking and member.revoking is not revoking:
                self.freed.update(revoking)
            self.changed(member)

    def block(self, blocked: dict[Partition, int]) -> None:
        """Replace the blocked partitions. Those that are no longer blocked become free."""
        self.freed.update(self.blocked.keys() - blocked.keys())
        self.blocked, self.is_blocked_known = blocked, True

    def members_to_answer(self) -> list[Member]:
        """After `assign`: the members that have a partition to release, or a free one to get."""
        return [
            one
            for one in self.members.values()
            if not one.assigned.keys() <= one.target
            or any(partition not in self.owners for partition in one.target - one.assigned.keys())
        ]

    def next_owners(self) -> set[str]:
        """Members whose target has a freed partition. Clears `freed`."""
        found = {
            self.target_owners[one]
            for one in self.freed
            if one in self.target_owners and one not in self.owners
        } & self.members.keys()
        self.freed.clear()
        return found

    # ---- description -----------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if not self.members:
            return EMPTY
        if self.is_dirty:
            return ASSIGNING
        return RECONCILING if self.unsettled else GROUP_STABLE

    def summary(self) -> dict[str, Any]:
        """The group's row in LIST_GROUPS."""
        return {
            "group": self.name, "kind": CONSUMER, "state": self.state, "members": len(self.members),
            "assignor": self.assignor, "epoch": self.epoch,
        }  # fmt: skip

    def names_of(self, topic_ids: Iterable[str], topics: TopicImage) -> Mapping[str, str]:
        """{topic id: name} of the topics that exist."""
        return {
            topic_id: topic.name
            for topic_id in topic_ids
            if (topic := topics.by_id(topic_id)) is not None
        }

    def check_invariants(self) -> None:
        """Check the invariants, for tests."""
        owned = {
            partition: one.member_id
            for one in self.members.values()
            for partition in (*one.assigned, *one.revoking)
        }
        assert owned == self.owners, "owners are what members have"
        assert sum(len(one.assigned) + len(one.revoking) for one in self.members.values()) == len(
            owned
        ), "a partition has one owner"
        assert self.unsettled == {
            one.member_id for one in self.members.values() if not one.is_settled(self.epoch)
        }, "unsettled"
        assert all(one.epoch <= self.epoch for one in self.members.values()), (
            "a member's epoch is the group's at most"
        )
        assert all(
            (one.state == "REVOKING") == bool(one.revoking) for one in self.members.values()
        ), "revoking"
        targets = {
            partition: one.member_id for one in self.members.values() for partition in one.target
        }
        assert self.is_dirty or targets == self.target_owners, "target_owners"
