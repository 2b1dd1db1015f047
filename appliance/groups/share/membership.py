"""Membership of share groups: members join, stay by heartbeats, and leave.

Owner: the share service.
Invariants:
- A refused heartbeat has changed nothing.
- A member of another user is neither used nor removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from appliance.groups.base.limits import GroupLimits
from appliance.groups.base.messages import (
    SessionKey,
    TopicImage,
)
from appliance.groups.base.request_validation import member_in, topics_in, user_in
from appliance.groups.share import request_validation as requests
from appliance.groups.share.group.members import ShareMember
from appliance.groups.share.group.share_group import ShareGroup
from appliance.groups.share.group_table import ShareGroupTable
from appliance.groups.share.quotas import Quotas
from appliance.groups.share.wake_ups import WakeUps
from appliance.groups.store.group_store import GroupStore
from tailrace.core.errors import (
    FencedMemberError,
    GroupFullError,
    NotAuthorizedError,
    UnknownMemberError,
)

logger = logging.getLogger(__name__)
_LEAVE, _JOIN = -1, 0


class ShareMembership:
    """The members of all share groups."""

    def __init__(
        self,
        table: ShareGroupTable,
        topics: TopicImage,
        limits: GroupLimits,
        store: GroupStore,
        wake_ups: WakeUps,
        wall_us: Callable[[], int],
        runs_max: int,
    ) -> None:
        """`runs_max`: most topics that an answer names."""
        self._table = table
        self._topics = topics
        self._limits = limits
        self._store = store
        self._wake_ups = wake_ups
        self._wall_us = wall_us
        self._runs_max = runs_max
        self._quotas = Quotas(topics)

    def heartbeat(
        self, name: str, session: SessionKey, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any]:
        """Join, stay or leave; returns the answer. Raises TailraceError."""
        epoch = requests.whole(request, "member_epoch", -2, 1 << 62)
        if epoch == _JOIN:
            group, member = self._join(name, request, now_ns)
        elif epoch < _JOIN:
            return self._leave(name, member_in(request), request, now_ns)
        else:
            topics = topics_in(request)
            group, member = self.member_of(name, request)
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
            self._wake_ups.released(group, group.release(member_id))
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
        group.subscriptions.apply(member, group.members)
        group.first_sight(member, is_joining=True)

    def _leave(
        self, name: str, member_id: str, request: dict[str, Any], now_ns: int
    ) -> dict[str, Any]:
        group = self._table.by_name.get(name)
        member = None if group is None else group.members.get(member_id)
        if group is not None and member is not None:
            _check_user(group, member, request)
            self.remove(group, member, "left", now_ns)
        return {"member_id": member_id, "member_epoch": _LEAVE}

    def remove(self, group: ShareGroup, member: ShareMember, reason: str, now_ns: int) -> None:
        """Remove a member and offer its acquired records to others."""
        freed = self._table.remove(
            group, member, self._wall_us() // 1000, self._store.elapsed_ms(now_ns)
        )
        self._wake_ups.released(group, freed)
        logger.info(
            "share_member_gone group=%r member=%s reason=%r released=%d",
            group.name,
            member.member_id,
            reason,
            sum(freed.values()),
        )

    def member_of(self, name: str, request: dict[str, Any]) -> tuple[ShareGroup, ShareMember]:
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


def _check_user(group: ShareGroup, member: ShareMember, request: dict[str, Any]) -> None:
    """Raises NotAuthorizedError if the member is another user's."""
    user = user_in(request)
    if user and member.user and user != member.user:
        raise NotAuthorizedError(
            f"member {member.member_id!r} of share group {group.name!r:.100} belongs to another "
            "user: join with a member id of your own"
        )
