"""The service of all share groups: their requests, and the timers of their members and locks.

Owner: the group service, in the process `groups`; pure but for the store.
Invariants:
- A refused request has changed nothing.
- The changes of a request are written before the commit that its answer waits for.
Crash: see `group_table`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from typing import Any

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.members import counted_names
from appliance.groups.base.messages import (
    Answer,
    Push,
    Requester,
    SessionKey,
    TopicImage,
    work_for,
)
from appliance.groups.share import describe as describing
from appliance.groups.share.expiry import EmptyGroups
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.share.group_table import ShareGroupTable, Timer
from appliance.groups.share.membership import ShareMembership
from appliance.groups.share.partition.share_partition import RUNS_MAX
from appliance.groups.share.record_requests import RecordRequests
from appliance.groups.share.transactional import PreparedAcknowledgements
from appliance.groups.share.wake_ups import WakeUps
from appliance.groups.store.group_store import GroupStore
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    GroupNotEmptyError,
    NotSupportedError,
    TailraceError,
    UnknownGroupError,
)
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_error, encode_reply

logger = logging.getLogger(__name__)
RUN_BYTES_MAX = 140
"""Limit of one entry of `acquired`, as JSON."""
_CHANGING = frozenset(
    {Api.GROUP_HEARTBEAT, Api.SHARE_ACQUIRE, Api.SHARE_ACKNOWLEDGE, Api.ALTER_GROUP_OFFSETS}
)
_NONE_SUSPENDED: Mapping[str, int] = {}


class ShareService:
    """All share groups. A `GroupsOfAKind`."""

    def __init__(
        self,
        store: GroupStore,
        topics: TopicImage,
        limits: GroupLimits,
        answer_max: int,
        now_ns: int,
        wall_us: Callable[[], int],
    ) -> None:
        """Raises StorageError."""
        self._store = store
        self._topics = topics
        self._limits = limits
        self._answer_max = answer_max
        self._wall_us = wall_us
        self._now_ns = now_ns
        store.begin_time(now_ns)
        self._empty = EmptyGroups(limits, now_ns)
        self._answers: list[tuple[Answer, bool]] = []
        """(answer, True if its request may have changed something)."""
        self._table = ShareGroupTable(store, topics, now_ns)
        self._wake_ups = WakeUps()
        runs_max = max(1, min(RUNS_MAX, answer_max // 8 // RUN_BYTES_MAX))
        self._members = ShareMembership(
            self._table, topics, limits, store, self._wake_ups, wall_us, runs_max
        )
        self._records = RecordRequests(self._table, self._members, self._wake_ups, runs_max)

    # ---- requests --------------------------------------------------------------------------------

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """Handle a request, whose `group` is a valid name of a share group. Raises
        TailraceError.
        """
        self._now_ns = now_ns
        name: str = request["group"]
        session = SessionKey(requester.front, requester.session)
        if api in _CHANGING:
            self._table.changed.add(name)  # first: a rollback needs it after any failure
        if api == Api.GROUP_HEARTBEAT:
            answer = self._members.heartbeat(name, session, request, now_ns)
        elif api == Api.SHARE_ACQUIRE and (unread := self._records.unchecked(name, request)):
            self._answers.append((Answer(requester, int(ErrorCode.NOT_READY), unread), False))
            return
        elif api == Api.SHARE_ACQUIRE:
            answer = self._records.acquire(name, session, request, now_ns)
        elif api == Api.SHARE_ACKNOWLEDGE:
            answer = self._records.acknowledge(name, request, now_ns)
        elif api == Api.DESCRIBE_GROUP:
            answer = describing.describe(
                self._group(name), self._topics, request, self._answer_max, now_ns
            )
        elif api == Api.FETCH_OFFSETS:
            answer = describing.start_offsets(
                self._group(name), self._topics, request, self._answer_max
            )
        elif api == Api.ALTER_GROUP_OFFSETS:
            answer = self._alter_offsets(name, request)
        else:
            raise NotSupportedError(
                f"{name!r:.100} is a share group: its records are acknowledged one by one, and it "
                "has no committed offsets; commit in a consumer group"
            )
        code, body = encode_reply(ErrorCode.OK, answer, self._answer_max)
        self._answers.append((Answer(requester, int(code), body), api in _CHANGING))

    def _group(self, name: str) -> ShareGroup:
        group = self._table.by_name.get(name)
        if group is None:
            raise UnknownGroupError(f"there is no group {name!r:.100}")
        return group

    def session_closed(self, session: SessionKey, now_ns: int, *, with_front: bool = False) -> None:
        """Start the grace period of the members of a closed connection: CLOSED_GRACE_NS. When it
        closed `with_front`, the client notices it only at its next heartbeat, so a heartbeat
        interval and FRONT_GRACE_NS are added.
        """
        self._table.session_closed(session, now_ns, with_front=with_front)

    # ---- transactions ---------------------------------------------------------------------------

    def prepare(self, name: str, request: dict[str, Any]) -> PreparedAcknowledgements:
        """Check acknowledgements that go with the commit of a transaction. Changes nothing. Raises
        TailraceError.
        """
        return self._records.prepare(name, request)

    def apply(self, prepared: PreparedAcknowledgements, now_ns: int) -> None:
        """Apply the acknowledgements of a transaction that is committed in this step."""
        self._now_ns = now_ns
        self._records.apply(prepared, now_ns)

    # ---- time ------------------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """Time of the next timer or sweep."""
        timer_ns, sweep_ns = self._table.timers.next_ns(), self._empty.next_deadline_ns()
        return sweep_ns if timer_ns is None else min(timer_ns, sweep_ns)

    def step(self, now_ns: int, suspended: Mapping[str, int] = _NONE_SUSPENDED) -> None:
        """Remove members whose sessions timed out, free records whose locks expired, and delete
        expired groups. Raises GroupFailure, StorageError, DiskFullError.
        """
        for name in self._empty.step(self._table.by_name, now_ns, self._store.elapsed_ms(now_ns)):
            if name not in suspended:
                logger.info("share_group_expired group=%r", name)
                with work_for(name):
                    self.delete(name, now_ns)
        self._now_ns = now_ns
        due = list(self._table.timers.due(now_ns))
        done = 0
        try:
            for timer in due:
                name = timer[0]
                if name in suspended:
                    self._table.timers.set(timer, suspended[name])
                else:
                    with work_for(name):
                        self._fire(timer, now_ns)
                done += 1
        finally:
            for timer in due[done:]:
                self._table.timers.set(timer, now_ns)

    def _fire(self, timer: Timer, now_ns: int) -> None:
        """Handle the timer of a member, or of a partition's locks."""
        name, part, number = timer
        group = self._table.by_name.get(name)
        if group is None:
            return
        if number < 0:
            member = group.members.get(part)
            if member is not None:
                reason = "session timed out" if member.closed_ns is None else "connection closed"
                self._members.remove(group, member, reason, now_ns)
            return
        partition = group.partitions.get((part, number))
        if partition is not None:
            freed = partition.expire(now_ns)
            if freed:
                group.changed_partitions.add((part, number))
                self._table.changed.add(name)
                self._wake_ups.released(group, {(part, number): freed})
            self._table.watch_partition(group, (part, number))

    def topics_changed(self, now_ns: int, suspended: Container[str] = ()) -> None:
        """Follow a change of the catalog. Raises GroupFailure."""
        self._now_ns = now_ns
        for group in self._table.by_name.values():
            if group.name not in suspended:
                with work_for(group.name):
                    self._follow_topics(group)

    def _follow_topics(self, group: ShareGroup) -> None:
        if group.follow_topics(self._store.elapsed_ms(self._now_ns)):
            for member_id in list(group.waiting):
                self._wake_ups.push(group, group.members[member_id])
        if group.changed_partitions or group.gone_partitions or group.is_changed:
            self._table.changed.add(group.name)
            for key in group.gone_partitions:
                self._table.watch_partition(group, key)

    # ---- the store -------------------------------------------------------------------------------

    def settle(self, suspended: Container[str] = ()) -> None:
        """Write the changed rows. Raises GroupFailure, StorageError, DiskFullError."""
        self._table.settle(suspended)

    def drain_answers(self) -> list[Answer]:
        """The answers of this step, after its commit or rollback."""
        self._table.forget_changes()
        answers, self._answers = self._answers, []
        return [answer for answer, _ in answers]

    def drain_pushes(self) -> list[Push]:
        """The pushes of this step."""
        return self._wake_ups.drain()

    def rolled_back(self, now_ns: int, error: TailraceError, failed: str | None = None) -> None:
        """Reload the changed groups after a rollback, and refuse the requests that changed them
        with `error`. `failed`: the group whose work has failed. Raises StorageError.
        """
        body = encode_error(error.detail)
        self._answers = [
            (
                Answer(answer.requester, int(error.code), body, is_undone=True)
                if reports_change
                else answer,
                reports_change,
            )
            for answer, reports_change in self._answers
        ]
        self._wake_ups.drain()
        self._table.rolled_back(now_ns, failed)

    # ---- operators -------------------------------------------------------------------------------

    def _alter_offsets(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Set the start offsets of a group without members; null forgets the partition. A group
        that does not exist is made if `kind` asks for it: the service has checked that it may.
        """
        if request.get("kind") == "share" and name not in self._table.by_name:
            return self._begin(name, request)
        group = self._group(name)
        if group.members:
            raise GroupNotEmptyError(f"share group {name!r:.100} has {_members_text(group)}")
        refused = describing.alter(group, self._topics, request, self._answer_max)
        self._altered(group)
        return {"refused": refused}

    def _begin(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        group = self._table.create(name, self._wall_us() // 1000)
        try:
            refused = describing.alter(group, self._topics, request, self._answer_max)
        finally:
            if not group.partitions:
                self._table.delete(group)
        if group.partitions:
            self._altered(group)
            logger.info("share_group_made group=%r partitions=%d", name, len(group.partitions))
        return {"refused": refused}

    def _altered(self, group: ShareGroup) -> None:
        group.empty_since_ms, group.empty_elapsed_ms = (
            self._wall_us() // 1000,
            self._store.elapsed_ms(self._now_ns),
        )
        group.is_changed = True  # the change renews its retention
        for key in {*group.changed_partitions, *group.gone_partitions}:
            self._table.watch_partition(group, key)

    def has(self, group: str) -> bool:
        """True when a share group has this name."""
        return group in self._table.by_name

    def count(self) -> int:
        """Number of share groups."""
        return len(self._table.by_name)

    def summary(self, group: str) -> dict[str, Any]:
        """The group's row in LIST_GROUPS."""
        return describing.summary(self._table.by_name[group])

    def delete(self, group: str, now_ns: int) -> None:
        """Delete a group. Raises GroupNotEmptyError, UnknownGroupError, StorageError,
        DiskFullError.
        """
        found = self._group(group)
        if found.members:
            raise GroupNotEmptyError(f"share group {group!r:.100} has {_members_text(found)}")
        self._table.delete(found)


def _members_text(group: ShareGroup) -> str:
    return counted_names(
        len(group.members), (repr(member.client_id) for member in group.members.values())
    )
