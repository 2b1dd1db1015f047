"""All share groups: what the group service hands over of their requests, and what time does to
their members and locks.

Owner: the group service, in the process `groups`; pure but for the store.
Invariants: a request that is refused has changed nothing. What a request changed is written before
    the commit that its answer waits for.
Crash: members, locks, delivery counts and what is done come back from the store; locks and sessions
    begin anew, so nothing is delivered twice for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from itertools import islice
from typing import Any

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.members import counted_names
from appliance.groups.base.messages import (
    Answer,
    Partition,
    Push,
    Requester,
    SessionKey,
    TopicImage,
    work_for,
)
from appliance.groups.base.request_validation import member_in, topics_in
from appliance.groups.base.store import GroupRow, GroupStore
from appliance.groups.share import describe as describing
from appliance.groups.share import request_validation as requests
from appliance.groups.share.expiry import EmptyGroups
from appliance.groups.share.members import ShareMember
from appliance.groups.share.quotas import Quotas
from appliance.groups.share.share_group import ShareGroup
from appliance.groups.share.share_partition import RUNS_MAX
from appliance.groups.share.timers import Timers
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    FencedMemberError,
    GroupFullError,
    GroupNotEmptyError,
    InvalidRequestError,
    NotSupportedError,
    TailraceError,
    UnknownGroupError,
    UnknownMemberError,
)
from tailrace.protocol.frame import Api
from tailrace.protocol.messages import encode_error, encode_json, encode_reply

logger = logging.getLogger(__name__)
RUN_BYTES_MAX = 140
"""Of one entry of `acquired`, as JSON."""
_LEAVE, _JOIN = -1, 0
_CHANGING = frozenset(
    {Api.GROUP_HEARTBEAT, Api.SHARE_ACQUIRE, Api.SHARE_ACKNOWLEDGE, Api.ALTER_GROUP_OFFSETS}
)
_Timer = tuple[str, str, int]
"""(group, member id, -1), or (group, topic id, partition)."""
_NO_MEMBER: Mapping[str, int] = {}


class ShareService:
    """See the module's docstring. A `GroupsOfAKind`."""

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
        self._runs_max = max(1, min(RUNS_MAX, answer_max // 8 // RUN_BYTES_MAX))
        self._wall_us = wall_us
        self._now_ns = now_ns
        store.begin_time(now_ns)
        self._groups: dict[str, ShareGroup] = {}
        self._members_of: dict[SessionKey, set[tuple[str, str]]] = {}
        """Connection -> (group, member id) of those whose heartbeats come over it."""
        self._timers: Timers[_Timer] = Timers()
        self._room = Quotas(topics)
        self._empty = EmptyGroups(limits.offsets_retention_minutes, now_ns)
        self._changed: set[str] = set()
        """Groups that differ from what the last commit kept, or may."""
        self._deleted: dict[int, str] = {}
        """Id -> name of groups that were deleted since the last commit; several may have had the
        same name.
        """
        self._removed: dict[str, list[ShareMember]] = {}
        """Group -> members that were removed since the last commit."""
        self._answers: list[tuple[Answer, bool]] = []
        """(answer, whether it tells of a change)."""
        self._pushes: list[Push] = []
        for row in store.groups("share"):
            self._load(row, now_ns)

    def _load(self, row: GroupRow, now_ns: int) -> ShareGroup:
        group = self._groups[row.name] = ShareGroup.load(
            row, self._store, self._topics, now_ns, self._store.elapsed_ms(now_ns)
        )
        if group.changed_partitions or group.gone_partitions or group.is_changed:
            self._changed.add(group.name)
        for member in group.members.values():
            self._bind(group, member)
            self._watch_member(group, member)
        for key in group.partitions:
            self._watch_partition(group, key)
        return group

    # ---- requests --------------------------------------------------------------------------------

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """Carry out a request whose `group` is known to be a name that a share group may have.
        Raises TailraceError.
        """
        self._now_ns = now_ns
        name: str = request["group"]
        session = SessionKey(requester.front, requester.session)
        if api in _CHANGING:
            self._changed.add(name)  # first: whatever fails, a rollback knows where to look
        if api == Api.GROUP_HEARTBEAT:
            answer = self._heartbeat(name, session, request, now_ns)
        elif api == Api.SHARE_ACQUIRE:
            answer = self._acquire(name, session, request, now_ns)
        elif api == Api.SHARE_ACKNOWLEDGE:
            answer = self._acknowledge(name, request, now_ns)
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
                "has no committed offsets"
            )
        code, body = encode_reply(ErrorCode.OK, answer, self._answer_max)
        self._answers.append((Answer(requester, int(code), body), api in _CHANGING))

    def _group(self, name: str) -> ShareGroup:
        group = self._groups.get(name)
        if group is None:
            raise UnknownGroupError(f"there is no group {name!r:.100}")
        return group

    def _member(self, name: str, request: dict[str, Any]) -> tuple[ShareGroup, ShareMember]:
        """Who asks. Raises UnknownMemberError, FencedMemberError, InvalidRequestError."""
        member_id = member_in(request)
        epoch = requests.whole(request, "member_epoch", 0, 1 << 62)
        group = self._groups.get(name)
        member = None if group is None else group.members.get(member_id)
        if group is None or member is None:
            raise UnknownMemberError(
                f"share group {name!r:.100} has no member {member_id!r}; what it had acquired was "
                "released"
            )
        if epoch != member.epoch:
            raise FencedMemberError(
                f"member {member_id!r} of share group {name!r:.100} has epoch {member.epoch}, not "
                f"{epoch}"
            )
        return group, member

    # ---- members ---------------------------------------------------------------------------------

    def _heartbeat(
        self, name: str, session: SessionKey, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any]:
        epoch = requests.whole(request, "member_epoch", -2, 1 << 62)
        if epoch == _JOIN:
            group, member = self._join(name, request, now_ns)
        elif epoch < _JOIN:
            return self._leave(name, member_in(request), now_ns)
        else:
            topics = topics_in(request)
            group, member = self._member(name, request)
            if topics is not None and topics != member.topics:
                self._room.take(self._groups.values(), group, topics, is_new=False, now_ns=now_ns)
                member.topics = topics
                group.changed_members.add(member.member_id)
                self._subscribe(group, member)
        self._move_session(group, member, session)
        member.touch(session, now_ns)
        self._watch_member(group, member)
        answer: dict[str, Any] = {"member_id": member.member_id, "member_epoch": member.epoch}
        if epoch == _JOIN or request.get("topics") is not None:
            named = [
                topic
                for topic_name in member.topics
                if (topic := self._topics.by_name(topic_name)) is not None
            ]
            answer["topic_names"] = {
                topic.topic_id: topic.name for topic in named[: self._runs_max]
            }
        return answer

    def _join(
        self, name: str, request: dict[str, Any], now_ns: int
    ) -> tuple[ShareGroup, ShareMember]:
        member_id, join = member_in(request), requests.join_of(request, self._limits)
        group = self._groups.get(name)
        is_new = group is None or member_id not in group.members
        if group is not None and is_new and len(group.members) >= self._limits.members_max:
            raise GroupFullError(
                f"share group {name!r:.100} has {len(group.members)} members; group.members.max "
                f"allows {self._limits.members_max}"
            )
        self._room.take(
            self._groups.values(), group, join.topics, is_new=is_new, now_ns=now_ns
        )  # behind what else may refuse it
        if group is None:
            row = GroupRow(
                self._store.new_group_id(),
                name,
                "share",
                0,
                "",
                0,
                self._wall_us() // 1000,
                0,
                "{}",
            )
            group = self._groups[name] = ShareGroup(row, self._topics)
        if member_id in group.members:  # it knows nothing of what it had before
            self._wake(group, group.release(member_id))
            group.waiting.pop(member_id, None)
            self._forget_session(group.members[member_id], name)
        member = ShareMember(
            member_id,
            0,
            join.topics,
            join.client_id,
            join.session_timeout_ms,
            join.heartbeat_interval_ms,
            join.resets_to_earliest,
            now_ns,
        )
        group.add(member)
        self._subscribe(group, member)
        logger.info(
            "share_member_joined group=%r member=%s members=%d", name, member_id, len(group.members)
        )
        return group, member

    def _subscribe(self, group: ShareGroup, member: ShareMember) -> None:
        group.subscribe(member)
        group.first_sight(member, is_joining=True)

    def _leave(self, name: str, member_id: str, now_ns: int) -> dict[str, Any]:
        group = self._groups.get(name)
        member = None if group is None else group.members.get(member_id)
        if group is not None and member is not None:
            self._remove(group, member, "it left")
        return {"member_id": member_id, "member_epoch": _LEAVE}

    def _remove(self, group: ShareGroup, member: ShareMember, reason: str) -> None:
        """A member is gone: others get what it had acquired."""
        self._removed.setdefault(group.name, []).append(member)
        freed = group.release(member.member_id)
        group.remove(member, self._wall_us() // 1000, self._store.elapsed_ms(self._now_ns))
        self._forget_session(member, group.name)
        self._timers.set((group.name, member.member_id, -1), None)
        self._changed.add(group.name)
        self._wake(group, freed)
        logger.info(
            "share_member_gone group=%r member=%s reason=%r released=%d",
            group.name,
            member.member_id,
            reason,
            sum(freed.values()),
        )

    def _move_session(self, group: ShareGroup, member: ShareMember, session: SessionKey) -> None:
        if member.session != session:
            self._forget_session(member, group.name)
            member.session = session
            self._bind(group, member)
            group.changed_members.add(
                member.member_id
            )  # a successor of this process is told of the connection's end, too

    def _bind(self, group: ShareGroup, member: ShareMember) -> None:
        if member.session is not None:
            self._members_of.setdefault(member.session, set()).add((group.name, member.member_id))

    def _forget_session(self, member: ShareMember, name: str) -> None:
        if member.session is not None:
            members = self._members_of.get(member.session, set())
            members.discard((name, member.member_id))
            if not members:
                self._members_of.pop(member.session, None)

    def session_closed(self, session: SessionKey, now_ns: int, *, with_front: bool = False) -> None:
        """A connection is gone: those whose heartbeats came over it have a moment to come back over
        another; and a heartbeat's time and FRONT_GRACE_NS more `with_front`: that a front was
        killed they learn by their next heartbeat only.
        """
        for name, member_id in self._members_of.pop(session, ()):
            group = self._groups.get(name)
            member = None if group is None else group.members.get(member_id)
            if group is None or member is None:
                continue
            member.closed(now_ns, with_front=with_front)
            self._watch_member(group, member)

    # ---- records ---------------------------------------------------------------------------------

    def _acquire(
        self, name: str, session: SessionKey, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any]:
        group, member = self._member(name, request)
        count = requests.whole(request, "max_records", 0, requests.RECORDS_MAX)
        given, sequence = requests.acknowledgements_of(request), self._sequence(member, request)
        member.acquires_over = session
        if sequence and sequence == member.sequence:
            return member.last_answer
        if count and not given and not group.room_of(member, count):
            raise InvalidRequestError(
                f"this consumer has {member.acquired_at_most} records that it is not done with, "
                "as many as it may have: acknowledge some of them first"
            )
        refused, freed = group.acknowledge(member, given, self._runs_max, now_ns)
        answer = group.acquire(member, count, self._runs_max, now_ns)
        answer["refused"] = refused
        changed = bool(given or answer["acquired"] or answer["dead"])
        self._after_records(group, member, sequence if changed else 0, answer)
        self._wake(group, freed)
        if count and not answer["acquired"] and not answer["dead"]:
            group.waiting.setdefault(member.member_id)
        else:
            group.waiting.pop(member.member_id, None)
        return answer

    def _acknowledge(self, name: str, request: dict[str, Any], now_ns: int) -> dict[str, Any]:
        group, member = self._member(name, request)
        given, sequence = requests.acknowledgements_of(request), self._sequence(member, request)
        if sequence and sequence == member.sequence:
            return member.last_answer
        refused, freed = group.acknowledge(member, given, self._runs_max, now_ns)
        answer = {"refused": refused}
        self._after_records(group, member, sequence if given else 0, answer)
        self._wake(group, freed)
        return answer

    @staticmethod
    def _sequence(member: ShareMember, request: dict[str, Any]) -> int:
        """The request's number, 0: it has none. Raises InvalidRequestError for one that is older
        than the last.
        """
        sequence = requests.whole(request, "sequence", 0, 1 << 62, 0)
        if 0 < sequence < member.sequence:
            raise InvalidRequestError(
                f"sequence is {sequence}, and the request before had {member.sequence}; numbers "
                "ascend"
            )
        return sequence

    def _after_records(
        self, group: ShareGroup, member: ShareMember, sequence: int, answer: dict[str, Any]
    ) -> None:
        if sequence:
            member.sequence, member.last_answer = sequence, answer
            group.changed_members.add(member.member_id)
        for key in group.changed_partitions:
            self._watch_partition(group, key)

    def _wake(self, group: ShareGroup, freed: dict[Partition, int]) -> None:
        """Tell members that found nothing that there are records again: no more members than
        records, whatever number sleeps.
        """
        count = sum(freed.values())
        if count and group.waiting:
            for member in list(islice(group.sleepers({topic_id for topic_id, _ in freed}), count)):
                self._push(group, member)

    def _push(self, group: ShareGroup, member: ShareMember) -> None:
        group.waiting.pop(member.member_id, None)
        if member.acquires_over is not None:
            body = encode_json({"group": group.name, "member_id": member.member_id})
            self._pushes.append(Push(*member.acquires_over, int(Api.GROUP_HEARTBEAT), body))

    # ---- time ------------------------------------------------------------------------------------

    def _watch_member(self, group: ShareGroup, member: ShareMember) -> None:
        self._timers.set((group.name, member.member_id, -1), member.deadline_ns())

    def _watch_partition(self, group: ShareGroup, key: Partition) -> None:
        partition = group.partitions.get(key)
        self._timers.set(
            (group.name, *key), None if partition is None else partition.next_deadline_ns()
        )

    def next_deadline_ns(self) -> int | None:
        """When `step` next has something to do."""
        timer_ns, sweep_ns = self._timers.next_ns(), self._empty.next_deadline_ns()
        return sweep_ns if timer_ns is None else min(timer_ns, sweep_ns)

    def step(self, now_ns: int, suspended: Mapping[str, int] = _NO_MEMBER) -> None:
        """Remove members that were silent for too long, free records whose locks have passed, and
        forget groups that nobody needs any more. Raises GroupFailure, StorageError, DiskFullError.
        """
        for name in self._empty.step(self._groups, now_ns, self._store.elapsed_ms(now_ns)):
            if name not in suspended:
                logger.info("share_group_expired group=%r", name)
                with work_for(name):
                    self.delete(name, now_ns)
        self._now_ns = now_ns
        due = list(self._timers.due(now_ns))
        done = 0
        try:
            for timer in due:
                name = timer[0]
                if name in suspended:
                    self._timers.set(timer, suspended[name])
                else:
                    with work_for(name):
                        self._fire(timer, now_ns)
                done += 1
        finally:
            for timer in due[done:]:
                self._timers.set(timer, now_ns)

    def _fire(self, timer: _Timer, now_ns: int) -> None:
        """A member's timer, or that of a partition's locks."""
        name, part, number = timer
        group = self._groups.get(name)
        if group is None:
            return
        if number < 0:
            member = group.members.get(part)
            if member is not None:
                self._remove(
                    group,
                    member,
                    "its connection closed"
                    if member.closed_ns is not None
                    else "its session timed out",
                )
            return
        partition = group.partitions.get((part, number))
        if partition is not None:
            freed = partition.expire(now_ns)
            if freed:
                group.changed_partitions.add((part, number))
                self._changed.add(name)
                self._wake(group, {(part, number): freed})
            self._watch_partition(group, (part, number))

    def topics_changed(self, now_ns: int, suspended: Container[str] = ()) -> None:
        """The catalog is another. Raises GroupFailure."""
        self._now_ns = now_ns
        for group in self._groups.values():
            if group.name not in suspended:
                with work_for(group.name):
                    self._follow_topics(group)

    def _follow_topics(self, group: ShareGroup) -> None:
        if group.follow_topics(self._store.elapsed_ms(self._now_ns)):
            for member_id in list(group.waiting):
                self._push(group, group.members[member_id])
        if group.changed_partitions or group.gone_partitions or group.is_changed:
            self._changed.add(group.name)
            for key in group.gone_partitions:
                self._watch_partition(group, key)

    # ---- the store -------------------------------------------------------------------------------

    def settle(self, suspended: Container[str] = ()) -> None:
        """Write the rows that have changed since the last commit. Raises GroupFailure,
        StorageError, DiskFullError.
        """
        for name in self._changed:
            if name in self._groups and name not in suspended:
                with work_for(name):
                    self._groups[name].settle(self._store)

    def drain_answers(self) -> list[Answer]:
        """Answers to what was handled since; what they tell of is kept."""
        self._changed.clear()
        self._deleted.clear()
        self._removed.clear()
        answers, self._answers = self._answers, []
        return [answer for answer, _ in answers]

    def drain_pushes(self) -> list[Push]:
        """What members are to be told."""
        pushes, self._pushes = self._pushes, []
        return pushes

    def rolled_back(self, now_ns: int, error: TailraceError, failed: str | None = None) -> None:
        """Nothing of what was written since the last commit was kept: what was changed is as the
        store has it, and those who asked for it are told `error`. `failed`: the group for which
        work has failed.
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
        self._pushes.clear()
        names = self._changed.union(self._deleted.values(), () if failed is None else (failed,))
        rows = {row.name: row for row in self._store.groups("share") if row.name in names}
        for name in names:
            old = self._groups.pop(name, None)
            row = rows.get(name)
            group = None if row is None else self._load(row, now_ns)
            if old is not None:
                self._carry_over(old, group)
        self._deleted.clear()
        self._removed.clear()

    def _carry_over(self, old: ShareGroup, group: ShareGroup | None) -> None:
        """What the store does not know of members: their connections, and when they were heard."""
        for member in (*self._removed.get(old.name, ()), *old.members.values()):
            known = None if group is None else group.members.get(member.member_id)
            if group is None or known is None:
                self._forget_session(member, old.name)
                self._timers.set((old.name, member.member_id, -1), None)
                continue
            self._forget_session(known, old.name)
            known.session, known.last_request_ns, known.closed_ns = (
                member.session,
                member.last_request_ns,
                member.closed_ns,
            )
            known.acquires_over = member.acquires_over
            self._bind(group, known)
            self._watch_member(group, known)
        for key in old.partitions:
            if group is None or key not in group.partitions:
                self._timers.set((old.name, *key), None)

    # ---- operators -------------------------------------------------------------------------------

    def _alter_offsets(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Where the group goes on; null: as if it had never seen the partition."""
        group = self._group(name)
        if group.members:
            raise GroupNotEmptyError(f"share group {name!r:.100} has {_members_text(group)}")
        refused = describing.alter(group, self._topics, request, self._answer_max)
        group.empty_since_ms, group.empty_elapsed_ms = (
            self._wall_us() // 1000,
            self._store.elapsed_ms(self._now_ns),
        )
        group.is_changed = True  # somebody still wants it
        for key in {*group.changed_partitions, *group.gone_partitions}:
            self._watch_partition(group, key)
        return {"refused": refused}

    def has(self, group: str) -> bool:
        """Whether there is a share group of this name."""
        return group in self._groups

    def count(self) -> int:
        """How many share groups there are."""
        return len(self._groups)

    def summary(self, group: str) -> dict[str, Any]:
        """Its row in LIST_GROUPS."""
        return describing.summary(self._groups[group])

    def delete(self, group: str, now_ns: int) -> None:
        """Forget a group. Raises GroupNotEmptyError, UnknownGroupError, StorageError,
        DiskFullError.
        """
        found = self._group(group)
        if found.members:
            raise GroupNotEmptyError(f"share group {group!r:.100} has {_members_text(found)}")
        self._deleted[found.group_id] = (
            group  # first: whatever fails, a rollback knows where to look
        )
        self._store.delete_group(
            found.group_id
        )  # at once: a group of either kind may have the name in the same step
        for key in found.partitions:
            self._timers.set((group, *key), None)
        del self._groups[group]
        self._changed.discard(group)


def _members_text(group: ShareGroup) -> str:
    return counted_names(
        len(group.members), (repr(member.client_id) for member in group.members.values())
    )
