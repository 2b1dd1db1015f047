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
from itertools import islice
from typing import Any

import orjson

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
from appliance.groups.share import describe as describing
from appliance.groups.share import request_validation as requests
from appliance.groups.share.expiry import EmptyGroups
from appliance.groups.share.group_table import ShareGroupTable, Timer
from appliance.groups.share.members import ShareMember
from appliance.groups.share.quotas import Quotas
from appliance.groups.share.share_group import ShareGroup
from appliance.groups.share.share_partition import RUNS_MAX
from appliance.groups.share.transactional import PreparedAcknowledgements, check
from appliance.groups.store.group_store import GroupStore
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    FencedMemberError,
    GroupFullError,
    GroupNotEmptyError,
    InvalidRequestError,
    NotAuthorizedError,
    NotSupportedError,
    TailraceError,
    UnknownGroupError,
    UnknownMemberError,
)
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import encode_error, encode_json, encode_reply

logger = logging.getLogger(__name__)
RUN_BYTES_MAX = 140
"""Limit of one entry of `acquired`, as JSON."""
_LEAVE, _JOIN = -1, 0
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
        self._runs_max = max(1, min(RUNS_MAX, answer_max // 8 // RUN_BYTES_MAX))
        self._wall_us = wall_us
        self._now_ns = now_ns
        store.begin_time(now_ns)
        self._quotas = Quotas(topics)
        self._empty = EmptyGroups(limits, now_ns)
        self._answers: list[tuple[Answer, bool]] = []
        """(answer, True if its request may have changed something)."""
        self._pushes: list[Push] = []
        self._table = ShareGroupTable(store, topics, now_ns)

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
            answer = self._heartbeat(name, session, request, now_ns)
        elif api == Api.SHARE_ACQUIRE and (unread := self._unchecked(name, request)):
            self._answers.append((Answer(requester, int(ErrorCode.NOT_READY), unread), False))
            return
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
                "has no committed offsets; commit in a consumer group"
            )
        code, body = encode_reply(ErrorCode.OK, answer, self._answer_max)
        self._answers.append((Answer(requester, int(code), body), api in _CHANGING))

    def _group(self, name: str) -> ShareGroup:
        group = self._table.by_name.get(name)
        if group is None:
            raise UnknownGroupError(f"there is no group {name!r:.100}")
        return group

    def _member(self, name: str, request: dict[str, Any]) -> tuple[ShareGroup, ShareMember]:
        """The requesting member and its group. Raises UnknownMemberError, FencedMemberError,
        InvalidRequestError, NotAuthorizedError.
        """
        member_id = member_in(request)
        epoch = requests.whole(request, "member_epoch", 0, 1 << 62)
        group = self._table.by_name.get(name)
        member = None if group is None else group.members.get(member_id)
        if group is None or member is None:
            raise UnknownMemberError(
                f"share group {name!r:.100} has no member {member_id!r}: it was removed, and its "
                "acquired records were released"
            )
        _check_user(group, member, request)
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
            return self._leave(name, member_in(request), request)
        else:
            topics = topics_in(request)
            group, member = self._member(name, request)
            if not member.user and user_in(request):
                member.user = user_in(request)
                group.changed_members.add(member.member_id)
            if topics is not None and topics != member.topics:
                self._quotas.reserve(
                    self._table.by_name.values(), group, topics, is_new=False, now_ns=now_ns
                )
                member.topics = topics
                group.changed_members.add(member.member_id)
                self._subscribe(group, member)
        self._table.move_session(group, member, session)
        member.touch(session, now_ns)
        self._table.watch_member(group, member)
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
        group = self._table.by_name.get(name)
        is_new = group is None or member_id not in group.members
        if group is not None and not is_new:
            _check_user(group, group.members[member_id], request)
        if group is not None and is_new and len(group.members) >= self._limits.members_max:
            raise GroupFullError(
                f"share group {name!r:.100} has {len(group.members)} members; group.members.max "
                f"allows {self._limits.members_max}"
            )
        self._quotas.reserve(
            self._table.by_name.values(), group, join.topics, is_new=is_new, now_ns=now_ns
        )  # last, since a later refusal would have to undo it
        if group is None:
            group = self._table.create(name, self._wall_us() // 1000)
        if member_id in group.members:  # it has lost the records that it had acquired
            self._wake(group, group.release(member_id))
            group.waiting.pop(member_id, None)
            self._table.forget_session(group, group.members[member_id])
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
        member.user = user_in(request)
        group.add(member)
        self._subscribe(group, member)
        logger.info(
            "share_member_joined group=%r member=%s members=%d", name, member_id, len(group.members)
        )
        return group, member

    def _subscribe(self, group: ShareGroup, member: ShareMember) -> None:
        group.subscribe(member)
        group.first_sight(member, is_joining=True)

    def _leave(self, name: str, member_id: str, request: dict[str, Any]) -> dict[str, Any]:
        group = self._table.by_name.get(name)
        member = None if group is None else group.members.get(member_id)
        if group is not None and member is not None:
            _check_user(group, member, request)
            self._remove(group, member, "left")
        return {"member_id": member_id, "member_epoch": _LEAVE}

    def _remove(self, group: ShareGroup, member: ShareMember, reason: str) -> None:
        """Remove a member and offer its acquired records to others."""
        freed = self._table.remove(
            group, member, self._wall_us() // 1000, self._store.elapsed_ms(self._now_ns)
        )
        self._wake(group, freed)
        logger.info(
            "share_member_gone group=%r member=%s reason=%r released=%d",
            group.name,
            member.member_id,
            reason,
            sum(freed.values()),
        )

    def session_closed(self, session: SessionKey, now_ns: int, *, with_front: bool = False) -> None:
        """Start the grace period of the members of a closed connection: CLOSED_GRACE_NS. When it
        closed `with_front`, the client notices it only at its next heartbeat, so a heartbeat
        interval and FRONT_GRACE_NS are added.
        """
        self._table.session_closed(session, now_ns, with_front=with_front)

    # ---- records ---------------------------------------------------------------------------------

    def _unchecked(self, name: str, request: dict[str, Any]) -> bytes:
        """The refusal of a request whose front has checked other topics than those of its member;
        empty: it has checked them, or the appliance has no users.
        """
        if not user_in(request):
            return b""
        _, member = self._member(name, request)
        if sorted(set(member.topics)) == request.get("topics"):
            return b""
        return orjson.dumps(
            {
                "message": "the rights to the topics of this member are looked up: ask again",
                "group": name, "member_id": member.member_id, "topics": list(member.topics),
            }
        )  # fmt: skip

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
                f"this consumer has {member.acquired_at_most} acquired records, the limit: "
                "acknowledge some of them first"
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

    def prepare(self, name: str, request: dict[str, Any]) -> PreparedAcknowledgements:
        """Check acknowledgements that go with the commit of a transaction. Changes nothing. Raises
        TailraceError.
        """
        return check(*self._member(name, request), request)

    def apply(self, prepared: PreparedAcknowledgements, now_ns: int) -> None:
        """Apply the acknowledgements of a transaction that is committed in this step."""
        self._now_ns = now_ns
        self._table.changed.add(prepared.group)
        group = self._table.by_name[prepared.group]
        member = group.members[prepared.member_id]
        _, freed = group.acknowledge(member, prepared.given, self._runs_max, now_ns)
        for key in group.changed_partitions:
            self._table.watch_partition(group, key)
        self._wake(group, freed)

    @staticmethod
    def _sequence(member: ShareMember, request: dict[str, Any]) -> int:
        """The request's sequence; 0: none. Raises InvalidRequestError when it is lower than the
        last one.
        """
        sequence = requests.whole(request, "sequence", 0, 1 << 62, 0)
        if 0 < sequence < member.sequence:
            raise InvalidRequestError(
                f"sequence is {sequence}, and the request before had {member.sequence}; sequences "
                "must ascend"
            )
        return sequence

    def _after_records(
        self, group: ShareGroup, member: ShareMember, sequence: int, answer: dict[str, Any]
    ) -> None:
        if sequence:
            member.sequence, member.last_answer = sequence, answer
            group.changed_members.add(member.member_id)
        for key in group.changed_partitions:
            self._table.watch_partition(group, key)

    def _wake(self, group: ShareGroup, freed: dict[Partition, int]) -> None:
        """Push to waiting members that records are available, to at most one for each record."""
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
                self._remove(group, member, reason)
            return
        partition = group.partitions.get((part, number))
        if partition is not None:
            freed = partition.expire(now_ns)
            if freed:
                group.changed_partitions.add((part, number))
                self._table.changed.add(name)
                self._wake(group, {(part, number): freed})
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
                self._push(group, group.members[member_id])
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
        pushes, self._pushes = self._pushes, []
        return pushes

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
        self._pushes.clear()
        self._table.rolled_back(now_ns, failed)

    # ---- operators -------------------------------------------------------------------------------

    def _alter_offsets(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        """Set the start offsets of a group without members; null forgets the partition."""
        group = self._group(name)
        if group.members:
            raise GroupNotEmptyError(f"share group {name!r:.100} has {_members_text(group)}")
        refused = describing.alter(group, self._topics, request, self._answer_max)
        group.empty_since_ms, group.empty_elapsed_ms = (
            self._wall_us() // 1000,
            self._store.elapsed_ms(self._now_ns),
        )
        group.is_changed = True  # the change renews its retention
        for key in {*group.changed_partitions, *group.gone_partitions}:
            self._table.watch_partition(group, key)
        return {"refused": refused}

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


def user_in(request: dict[str, Any]) -> str:
    """The user of a request, which its front names; empty: the appliance has no users."""
    user = request.get("user")
    return user if isinstance(user, str) else ""


def _check_user(group: ShareGroup, member: ShareMember, request: dict[str, Any]) -> None:
    """Raises NotAuthorizedError if the member is another user's."""
    user = user_in(request)
    if user and member.user and user != member.user:
        raise NotAuthorizedError(
            f"member {member.member_id!r} of share group {group.name!r:.100} belongs to another "
            "user: join with a member id of your own"
        )


def _members_text(group: ShareGroup) -> str:
    return counted_names(
        len(group.members), (repr(member.client_id) for member in group.members.values())
    )
