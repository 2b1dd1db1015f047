"""Heartbeats of consumer groups: members join, stay, change subscriptions and leave, and each
answer carries the member's assignment.

A heartbeat that changes nothing gets the member's cached answer at once. All others wait until the
step is settled. Then each changed group gets one new target, however many members joined, and the
waiting members are answered one by one.

Owner: the service.
Invariants:
- A heartbeat without a change costs no write and visits no other member.
- Each heartbeat has one answer.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

import orjson

from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.limits import (
    ASSIGN_PAUSE_NS_PER_MEMBER,
    ASSIGNED_AT_ONCE_MEMBERS,
    GroupLimits,
)
from appliance.groups.base.members import AWAY_EPOCH, REVOKING, Member, MemberSettings, by_topic
from appliance.groups.base.messages import Partition, Requester, SessionKey, TopicImage, work_for
from appliance.groups.base.request_validation import SHARE, shown
from appliance.groups.base.responses import NOTHING, Responses
from appliance.groups.base.suspended_groups import SuspendedGroups
from appliance.groups.consumer import membership
from appliance.groups.consumer.group import ConsumerGroup
from appliance.groups.consumer.group_table import GroupTable
from appliance.groups.consumer.hash_slot_handover import HandOvers
from appliance.groups.consumer.start_offsets import StartOffsets
from tailrace.core.errors import TailraceError, UnknownMemberError
from tailrace.protocol.frame import Api

logger = logging.getLogger(__name__)


class Heartbeats:
    """Handles the heartbeats of all consumer groups."""

    def __init__(
        self, table: GroupTable, sessions: membership.Sessions, outgoing: Responses,
        topics: TopicImage, limits: GroupLimits, assignors: Assignors,
        catalog_version: int, hand_overs: HandOvers, start_offsets: StartOffsets, answer_max: int,
        suspended: SuspendedGroups,
    ) -> None:  # fmt: skip
        """`catalog_version`: higher than that of any earlier service. `answer_max`: limit of an
        answer, bytes.
        """
        self._answer_max = answer_max
        self._table = table
        self._sessions = sessions
        self._outgoing = outgoing
        self._topics = topics
        self._limits = limits
        self._assignors = assignors
        self._catalog_version = catalog_version
        self._hand_overs = hand_overs
        self._start_offsets = start_offsets
        self._suspended = suspended
        self._delayed: dict[str, int] = {}
        """Group name -> time of its delayed assignment."""
        self._waiting: deque[
            tuple[Requester, ConsumerGroup, Member, frozenset[Partition] | None]
        ] = deque()

    def try_quiet(self, requester: Requester, request: dict[str, Any], now_ns: int) -> bool:
        """Answer a heartbeat without a change from the cache. Returns False for any other
        heartbeat.
        """
        name, member_id = request.get("group"), request.get("member_id")
        if type(name) is not str or type(member_id) is not str:
            return False
        group = self._table.get(name)
        if group is None or group.is_dirty:
            return False
        member = group.members.get(member_id)
        if (
            member is None
            or not member.quiet_answer
            or member.quiet_version != self._catalog_version
            or member.session != requester[:2]
            or not member.epoch == group.epoch == request.get("member_epoch")
            or request.get("topics") is not None
            or request.get("owned") is not None
            or request.get("pattern") is not None
            or request.get("kind") == SHARE
            or request.get("follows_catalog", member.settings.follows_catalog)
            != member.settings.follows_catalog
        ):
            return False
        member.last_heartbeat_ns = now_ns
        self._outgoing.answer(requester, NOTHING, member.quiet_answer)
        return True

    # ---- joining and staying ---------------------------------------------------------------------

    def join(
        self, requester: Requester, name: str, member_id: str, request: dict[str, Any], now_ns: int
    ) -> None:
        """Handle a heartbeat with epoch 0. Raises TailraceError before any change."""
        settings, reported = membership.joining_in(request, self._limits)
        group = self._table.get(name)
        membership.check_assignor(self._assignors, group, member_id, settings)
        self._sessions.check_room(
            settings.topics, is_new=group is None or member_id not in group.members
        )
        self._table.check_partitions(group, settings.topics)
        old = None
        if group is None:
            self._table.check_room(name)
            group = self._table.create(name)
        else:
            membership.check_user(group, group.members.get(member_id), request)
            old = membership.place_of_instance(
                group, member_id, settings, self._sessions.started_ns, now_ns
            )
            membership.check_user(group, old, request)
            if (
                old is None
                and member_id not in group.members
                and len(group.members) >= self._limits.members_max
            ):
                raise membership.full(group)
        self._table.change(group)
        if settings.assignor is not None:
            group.assignor = settings.assignor
        self._wait(
            requester, group, self._joined(group, member_id, settings, old), reported, now_ns
        )

    def _joined(
        self, group: ConsumerGroup, member_id: str, settings: MemberSettings, old: Member | None
    ) -> Member:
        member = group.members.get(member_id)
        if old is None and member is not None:
            membership.rejoin(group, member, settings)
            return member
        if old is not None:
            if member is not None:  # a known member takes another instance id, and its place
                self._sessions.forget(member)
                group.remove(member, 0, 0)
            logger.info(
                "member_replaced group=%s instance=%s member=%s replaces=%s",
                group.name,
                settings.instance_id,
                member_id,
                old.member_id,
            )
            self._sessions.forget(old)
            member = Member(member_id, settings)
            group.replace(old, member)
            return member
        member = Member(member_id, settings)
        group.add(member)
        return member

    def stay(
        self,
        requester: Requester,
        name: str,
        member_id: str,
        epoch: int,
        request: dict[str, Any],
        now_ns: int,
    ) -> None:
        """Handle a heartbeat with the member's epoch. Raises TailraceError."""
        group = self._table.get(name)
        if group is None:
            raise UnknownMemberError(
                f"there is no group {shown(name)}: it was deleted, or never had a member"
            )
        member = membership.known_member(group, request, member_id)
        reported = membership.checked_heartbeat(member, epoch, request)
        subscription = membership.subscription_in(member, request, self._sessions)
        if subscription.topics is not member.settings.topics:
            self._table.check_partitions(group, subscription.topics)
        self._table.change(group)
        membership.resubscribe(group, member, subscription)
        self._wait(requester, group, member, reported, now_ns)

    def _wait(
        self,
        requester: Requester,
        group: ConsumerGroup,
        member: Member,
        reported: frozenset[Partition] | None,
        now_ns: int,
    ) -> None:
        self._sessions.touch(group.group_id, member, SessionKey(*requester[:2]), now_ns)
        if reported is not None:
            member.reported = reported
        self._waiting.append((requester, group, member, reported))

    # ---- leaving ---------------------------------------------------------------------------------

    def leave(
        self, requester: Requester, name: str, member_id: str, epoch: int,
        request: dict[str, Any], now_ns: int,
    ) -> None:  # fmt: skip
        """Handle a heartbeat with epoch -1 or -2. An unknown member has left already. Raises
        InvalidRequestError, NotAuthorizedError.
        """
        group = self._table.get(name)
        member = None if group is None else group.members.get(member_id)
        if group is not None and member is not None:
            membership.check_user(group, member, request)
            self._table.change(group)
            if epoch == AWAY_EPOCH:
                membership.leave_temporarily(group, member)
                member.last_heartbeat_ns = now_ns
            else:
                self.remove(group, member, "left")
        self._outgoing.answer(
            requester, name, orjson.dumps({"member_id": member_id, "member_epoch": epoch})
        )

    def remove(self, group: ConsumerGroup, member: Member, reason: str) -> None:
        """Remove a member and log the reason."""
        logger.info(
            "member_gone group=%s member=%s client=%s reason=%r",
            group.name,
            member.member_id,
            member.settings.client_id,
            reason,
        )
        self._table.remove(group, member)

    def expired(self, group_id: int, member: Member, now_ns: int) -> None:
        """Handle the timer of a member. Raises GroupFailure."""
        group = self._table.find(group_id)
        if group is None or group.members.get(member.member_id) is not member:
            return
        if group.name in self._suspended.until:
            self._sessions.watch(group_id, member, self._suspended.until[group.name])
            return
        with work_for(group.name):
            reason = membership.reason_to_remove(member, now_ns)
            if reason:
                self.remove(group, member, reason)
            else:
                self._sessions.watch(group_id, member)

    # ---- topics ----------------------------------------------------------------------------------

    def topics_changed(self) -> None:
        """Mark groups with changed topics for assignment, and push to members that follow the
        catalog. Raises GroupFailure.
        """
        self._catalog_version += 1
        for group in self._table:
            if group.name not in self._suspended.until:
                with work_for(group.name):
                    self._follow_topics(group)

    def _follow_topics(self, group: ConsumerGroup) -> None:
        if self._start_offsets.follow_topics(group):
            self._table.change(group)
        if not group.members:
            return
        subscribed = group.subscribed(self._topics)
        if subscribed != group.signature:
            self._table.change(group)
            group.is_dirty = True
        group.is_blocked_known = False
        paused = membership.paused_of(subscribed, self._topics)
        for member in group.members.values():
            if paused != group.paused or member.settings.follows_catalog:
                self._push(group, member)
        group.paused = paused

    def _push(self, group: ConsumerGroup, member: Member) -> None:
        """Request an immediate heartbeat from a member."""
        if member.session is not None:
            body = orjson.dumps({"group": group.name, "member_id": member.member_id})
            self._outgoing.push(member.session, Api.GROUP_HEARTBEAT, body)

    # ---- the end of a step -----------------------------------------------------------------------

    def settle(self, now_ns: int) -> None:
        """Compute targets, answer the waiting heartbeats and write the changed rows. Raises
        GroupFailure, StorageError, DiskFullError.
        """
        groups = [
            group
            for group in self._table.changed_groups()
            if group.name not in self._suspended.until
        ]
        for group in groups:
            with work_for(group.name):
                self._assign(group, now_ns)
        while self._waiting:
            requester, group, member, reported = self._waiting[0]
            with work_for(group.name):
                self._answer(requester, group, member, reported, now_ns)
            self._waiting.popleft()
        for group in groups:
            with work_for(group.name):
                for member_id in group.next_owners():
                    self._push(group, group.members[member_id])
                self._table.write(group)

    def _assign(self, group: ConsumerGroup, now_ns: int) -> None:
        """Compute the group's target if it is dirty and may be assigned."""
        if group.is_dirty and self._may_assign(group, now_ns):
            before = [topic_id for topic_id, _ in group.signature.values()]
            group.assign(self._topics, self._assignors)
            self._start_offsets.assigned(group, before)
            self._table.count_partitions(group)
            group.paused = membership.paused_of(group.signature, self._topics)
            for member in group.members_to_answer():
                self._push(group, member)
        if group.blocked or not group.is_blocked_known:
            self._hand_overs.check(group, now_ns)

    def _may_assign(self, group: ConsumerGroup, now_ns: int) -> bool:
        """False while a large group pauses between assignments. Members that join meanwhile have
        no partitions.
        """
        if group.epoch and now_ns < group.assign_after_ns and group.members:
            self._delayed[group.name] = group.assign_after_ns
            return False
        self._delayed.pop(group.name, None)
        group.assign_after_ns = (
            now_ns
            + max(0, len(group.members) - ASSIGNED_AT_ONCE_MEMBERS) * ASSIGN_PAUSE_NS_PER_MEMBER
        )
        return True

    def advance(self, now_ns: int) -> None:
        """Mark groups whose delay has passed as changed, so that `settle` assigns them."""
        for name in [name for name, due_ns in self._delayed.items() if now_ns >= due_ns]:
            del self._delayed[name]
            group = self._table.get(name)
            if group is not None:
                self._table.change(group)

    def retry(self, name: str) -> None:
        """Settle the group in this step, since its suspension has ended."""
        self._delayed[name] = 0

    def next_deadline_ns(self) -> int | None:
        return min(self._delayed.values(), default=None)

    def _answer(
        self,
        requester: Requester,
        group: ConsumerGroup,
        member: Member,
        reported: frozenset[Partition] | None,
        now_ns: int,
    ) -> None:
        if group.members.get(member.member_id) is not member:  # removed in the same step
            self._outgoing.refuse(
                requester,
                UnknownMemberError(
                    f"member {member.member_id} was removed from the group {group.name}"
                ),
            )
            return
        group.reconcile(member, member.reported if reported is None else reported, now_ns)
        self._sessions.watch(group.group_id, member)
        answer: dict[str, Any] = {
            "member_id": member.member_id, "member_epoch": member.epoch,
            "paused_topics": group.paused, "catalog_version": self._catalog_version,
        }  # fmt: skip
        if member.settings.pattern:
            answer["pattern"] = member.settings.pattern
        is_confirmed = member.reported == member.assigned.keys() and member.state != REVOKING
        is_quiet = is_confirmed and member.is_settled(group.epoch)
        member.quiet_answer, member.quiet_version = (
            (orjson.dumps(answer), self._catalog_version) if is_quiet else (b"", 0)
        )
        if reported is not None or not is_confirmed:
            answer["assignment"] = by_topic(member.assigned)
            answer["topic_names"] = group.names_of(answer["assignment"], self._topics)
        body = orjson.dumps(answer)
        if len(body) > self._answer_max and answer.pop("topic_names", None) is not None:
            body = orjson.dumps(answer)  # the member fetches the names from the metadata
        self._outgoing.answer(requester, group.name, body)
        self._outgoing.is_answered(SessionKey(*requester[:2]))

    def rolled_back(self, error: TailraceError) -> None:
        """Refuse the waiting heartbeats, and settle the groups that the step changed again."""
        self._delayed |= dict.fromkeys(self._table.changed.values(), 0)
        waiting, self._waiting = self._waiting, deque()
        for requester, *_ in waiting:
            self._outgoing.refuse(requester, error, is_undone=True)
