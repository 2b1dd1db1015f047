"""A member of a consumer group, and the reconciliation of its assignment with its target.

The states are those of KIP-848 (Kafka's CurrentAssignmentBuilder):

    STABLE      the member has the assignment of its epoch
    REVOKING    the member has to release partitions first; it keeps its epoch until it confirms
    WAITING     the member has the group's epoch; another member still owns some of its partitions

Owner: the group. `reconcile` changes only its arguments.
Invariants:
- `assigned` and `revoking` are disjoint, and this member owns both (`ConsumerGroup.owners`).
- A member's epoch never decreases, except that it restarts at 0 when the member joins again.
- `assigned` maps each partition to the member epoch of its assignment. A commit of an earlier epoch
  belongs to an earlier ownership (KIP-1251).
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from appliance.groups.base.messages import Partition, SessionKey
from appliance.groups.store.schema import MemberRow

STABLE, REVOKING, WAITING = "STABLE", "REVOKING", "WAITING"
LEAVE_EPOCH = -1
AWAY_EPOCH = -2
JOIN_EPOCH = 0
NAMED_MAX = 3


@dataclass(frozen=True, slots=True)
class MemberSettings:
    """A member's subscription and timeouts, as its join request has them."""

    topics: tuple[str, ...]
    instance_id: str | None
    client_id: str
    assignor: str | None
    session_timeout_ms: int
    rebalance_timeout_ms: int
    heartbeat_interval_ms: int
    follows_catalog: bool
    pattern: str = ""
    """The text that stands for a subscription by pattern. The Kafka gateway reads it; empty: none.
    """
    user: str = ""
    """User who may use the member; empty: it has joined while the appliance had no users."""


@dataclass(slots=True, eq=False)
class Member:
    """One member."""

    member_id: str
    settings: MemberSettings
    epoch: int = 0
    previous_epoch: int = 0
    state: str = STABLE
    is_away: bool = False
    """A static member has left temporarily (epoch -2)."""
    assigned: dict[Partition, int] = field(default_factory=dict)
    """Partition -> the member epoch of its assignment."""
    revoking: dict[Partition, int] = field(default_factory=dict)
    """Owned partitions that the member has to release."""
    target: frozenset[Partition] = frozenset()
    reported: frozenset[Partition] | None = None
    """The owned partitions of its last report; None: no report since a restart."""
    session: SessionKey | None = None
    """The connection of its last heartbeat; None: it closed, or none came since a restart."""
    closed_ns: int | None = None
    """Time at which its connection closed; None once it has another one."""
    last_heartbeat_ns: int = 0
    revoking_since_ns: int = 0
    timer: Any = None
    subscription_bytes: int = 0
    """Bytes that `Sessions` counts for its subscription."""
    has_new_settings: bool = True
    """The next row includes the settings. They may be long and seldom change."""
    quiet_answer: bytes = b""
    """Cached answer to a heartbeat that changes nothing; empty: not cached."""
    quiet_version: int = 0
    """Catalog version of `quiet_answer`."""

    @property
    def instance_id(self) -> str | None:
        return self.settings.instance_id

    def epoch_of(self, partition: Partition) -> int | None:
        """The member epoch of a partition's assignment; None: the member does not own it."""
        found = self.assigned.get(partition)
        return found if found is not None else self.revoking.get(partition)

    def is_settled(self, group_epoch: int) -> bool:
        return self.state == STABLE and self.epoch == group_epoch

    def deadline_ns(self, grace_ns: int) -> int:
        """Time at which the member is removed unless a heartbeat comes."""
        deadline = self.last_heartbeat_ns + self.settings.session_timeout_ms * 1_000_000
        if self.closed_ns is not None and self.instance_id is None:
            deadline = min(deadline, self.closed_ns + grace_ns)
        if self.state == REVOKING:
            deadline = min(
                deadline, self.revoking_since_ns + self.settings.rebalance_timeout_ms * 1_000_000
            )
        return deadline

    # ---- rows ------------------------------------------------------------------------------------

    def row(self, group_id: int) -> MemberRow:
        """The member's row. Empty settings keep those in the store."""
        one, settings = self.settings, ""
        if self.has_new_settings:
            settings = orjson.dumps(
                [one.topics, one.instance_id, one.client_id, one.assignor, one.session_timeout_ms,
                one.rebalance_timeout_ms,
                 one.heartbeat_interval_ms, one.follows_catalog, one.pattern, one.user]
            ).decode()  # fmt: skip
        assignment = orjson.dumps(
            [
                self.previous_epoch,
                self.state,
                self.is_away,
                _epochs_out(self.assigned),
                _epochs_out(self.revoking),
            ]
        )
        return MemberRow(
            group_id,
            self.member_id,
            self.epoch,
            settings,
            assignment.decode(),
            orjson.dumps(by_topic(self.target)).decode(),
        )

    @classmethod
    def of_row(cls, row: MemberRow, now_ns: int) -> Member:
        """The member of a stored row, with a new session."""
        topics, *rest = orjson.loads(row.settings)
        previous_epoch, state, is_away, assigned, revoking = orjson.loads(row.assignment)
        return cls(
            row.member_id, MemberSettings(tuple(topics), *rest), row.epoch, previous_epoch, state,
            is_away, _epochs_in(assigned),
            _epochs_in(revoking), frozenset(partitions_in(orjson.loads(row.target))),
            last_heartbeat_ns=now_ns, revoking_since_ns=now_ns,
            has_new_settings=False,
        )  # fmt: skip


def reconcile(
    member: Member, group_epoch: int, owners: dict[Partition, str],
    reported: frozenset[Partition] | None, now_ns: int,
    blocked: Container[Partition] = (),
) -> bool:  # fmt: skip
    """Advance the member one step towards its target and update `owners` (partition -> member id).
    Returns whether anything changed. `owners` may lose partitions, which their next owners may get.

    `reported`: the owned partitions of this heartbeat or, if it has none, of the last report; None:
    unknown. A revoked partition stays the member's until a report after the revocation omits it. An
    older report may predate the member's last assignment. A member that missed the answer repeats
    its owned partitions.
    `blocked`: partitions that no member may get yet (see `hash_slot_handover`).
    """
    if member.state == REVOKING:
        if reported is None or not reported.isdisjoint(member.revoking):
            return False
        for partition in member.revoking:
            del owners[partition]
        member.revoking = {}
        _advance(member, group_epoch, owners, now_ns, blocked)
        return True
    return not member.is_settled(group_epoch) and _advance(
        member, group_epoch, owners, now_ns, blocked
    )


def _advance(
    member: Member,
    group_epoch: int,
    owners: dict[Partition, str],
    now_ns: int,
    blocked: Container[Partition],
) -> bool:
    surplus = member.assigned.keys() - member.target
    if surplus:
        member.revoking = {partition: member.assigned.pop(partition) for partition in surplus}
        member.state, member.revoking_since_ns = REVOKING, now_ns
        return True
    before = member.epoch, member.state, len(member.assigned)
    if member.epoch != group_epoch:
        member.previous_epoch, member.epoch = member.epoch, group_epoch
    waits = False
    for partition in member.target - member.assigned.keys():
        if partition in owners or partition in blocked:
            waits = True
        else:
            owners[partition] = member.member_id
            member.assigned[partition] = group_epoch
    member.state = WAITING if waits else STABLE
    return before != (member.epoch, member.state, len(member.assigned))


def by_topic(partitions: Iterable[Partition]) -> dict[str, list[int]]:
    """Group partitions as {topic id: [partitions]}, both in order."""
    found: dict[str, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        found.setdefault(topic_id, []).append(partition)
    return found


def partitions_in(topics: Mapping[str, Iterable[int]]) -> Iterable[Partition]:
    """The inverse of `by_topic`."""
    return (
        (topic_id, partition) for topic_id, partitions in topics.items() for partition in partitions
    )


def _epochs_out(given: Mapping[Partition, int]) -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {}
    for (topic_id, partition), epoch in sorted(given.items()):
        found.setdefault(topic_id, []).append([partition, epoch])
    return found


def _epochs_in(kept: Mapping[str, list[list[int]]]) -> dict[Partition, int]:
    return {
        (topic_id, partition): epoch
        for topic_id, pairs in kept.items()
        for partition, epoch in pairs
    }


def members_text(members: Mapping[str, Member]) -> str:
    """The members of a group for an error message, with the timeouts of those that have gone."""
    return counted_names(len(members), map(_named, members.values()))


def counted_names(count: int, names: Iterable[str]) -> str:
    """A count with the first names, such as "1 member, 'worker'"."""
    more = f" and {count - NAMED_MAX} others" if count > NAMED_MAX else ""
    return (
        f"{count} member{'' if count == 1 else 's'}, "
        f"{', '.join(itertools.islice(names, NAMED_MAX))}{more}"
    )


def _named(member: Member) -> str:
    name = repr(member.instance_id or member.settings.client_id)
    if member.instance_id is not None and (member.is_away or member.closed_ns is not None):
        return (
            f"{name} (gone; its place is kept for its session_timeout_ms, "
            f"{member.settings.session_timeout_ms} ms)"
        )
    return (
        f"{name} (its connection is closed: it is removed in a second)"
        if member.closed_ns is not None
        else name
    )
