"""The rules of joining, staying in and leaving a consumer group, and the sessions of its members.

A static member (with an instance id) keeps its place for its session timeout. Another consumer with
the same instance id takes the place when the old one has left temporarily (epoch -2) or its
connection has closed. It is refused while the old one is alive. A dynamic member whose connection
closes may return over another one within CLOSED_GRACE_NS.

Owner: the service.
Invariants:
- Each member has at most one timer, at or before its deadline.
- A heartbeat moves no timer. A timer that fires early is set again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from appliance.groups.base.assignor_plugins import Assignors
from appliance.groups.base.limits import (
    CLOSED_GRACE_NS,
    FRONT_GRACE_NS,
    MEMBERS_IN_ALL_MAX,
    NAME_BYTES,
    PATTERN_MAX,
    SUBSCRIPTIONS_MAX_BYTES,
    GroupLimits,
)
from appliance.groups.base.members import REVOKING, STABLE, WAITING, Member, MemberSettings
from appliance.groups.base.messages import Partition, SessionKey, TopicImage
from appliance.groups.base.request_validation import (
    flag_in,
    owned_in,
    settings_in,
    shown,
    text_in,
    topics_in,
    user_in,
)
from appliance.groups.consumer.group import ConsumerGroup
from shm.runtime.timing_wheel import NEVER_NS, TimingWheel
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    FencedMemberError,
    GroupFullError,
    InstanceIdInUseError,
    InvalidRequestError,
    NotAuthorizedError,
    TailraceError,
    UnknownMemberError,
    UnsupportedAssignorError,
)


class Sessions:
    """Members' connections and timers."""

    def __init__(self, now_ns: int, expired: Callable[[int, Member, int], None]) -> None:
        """`expired`: called with (group id, member, now) when a member's timer fires. It removes
        the member or calls `watch`.
        """
        self.started_ns = now_ns
        self._expired = expired
        self._wheel: TimingWheel[tuple[int, Member]] = TimingWheel(now_ns)
        self._members: dict[SessionKey, dict[Member, int]] = {}
        self._subscription_bytes = 0

    def watch(self, group_id: int, member: Member, not_before_ns: int = 0) -> None:
        """See to it that the member's timer fires at its deadline, or before, but not before
        `not_before_ns`.
        """
        if member.has_new_settings or not member.subscription_bytes:
            self._count(member, subscription_bytes(member.settings.topics))
        deadline_ns = max(not_before_ns, member.deadline_ns(CLOSED_GRACE_NS))
        if member.timer is not None:
            if member.timer.deadline_ns <= deadline_ns:
                return
            self._wheel.cancel(member.timer)
        member.timer = self._wheel.add(deadline_ns, (group_id, member))

    def touch(self, group_id: int, member: Member, session: SessionKey, now_ns: int) -> None:
        """Note a heartbeat of the member over this connection."""
        if member.session != session:
            self._unbind(member)
            member.session = session
            self._members.setdefault(session, {})[member] = group_id
        member.closed_ns = None
        member.last_heartbeat_ns = now_ns
        self.watch(group_id, member)

    def closed(self, session: SessionKey, now_ns: int, *, with_front: bool) -> None:
        """Start the grace period of the members of a closed connection. `with_front`: it closed
        with its front, which a client notices only when it sends its next heartbeat.
        """
        for member, group_id in self._members.pop(session, {}).items():
            member.session = None
            member.closed_ns = now_ns + (
                FRONT_GRACE_NS + member.settings.heartbeat_interval_ms * 1_000_000
                if with_front
                else 0
            )
            self.watch(group_id, member)

    def _unbind(self, member: Member) -> None:
        if member.session is not None and (there := self._members.get(member.session)) is not None:
            there.pop(member, None)
            if not there:
                del self._members[member.session]

    def _count(self, member: Member, size_bytes: int) -> None:
        self._subscription_bytes += size_bytes - member.subscription_bytes
        member.subscription_bytes = size_bytes

    def check_room(self, topics: tuple[str, ...], *, is_new: bool) -> None:
        """Raises GroupFullError when members or subscriptions of all groups are at their limit."""
        if is_new and len(self._wheel) >= MEMBERS_IN_ALL_MAX:
            raise GroupFullError(
                f"all groups together have {len(self._wheel)} members; an appliance serves at most "
                f"{MEMBERS_IN_ALL_MAX}"
            )
        if self._subscription_bytes + subscription_bytes(topics) > SUBSCRIPTIONS_MAX_BYTES:
            raise GroupFullError(
                "the topic names in the subscriptions of all members take "
                f"{self._subscription_bytes} bytes: subscribe to fewer topics"
            )

    def forget(self, member: Member) -> None:
        """Remove the session and the timer of a member."""
        self._count(member, 0)
        self._unbind(member)
        if member.timer is not None:
            self._wheel.cancel(member.timer)
            member.timer = None

    def resume(self, group_id: int, member: Member, before: Member) -> None:
        """Continue the session of `before` with `member`, which was reloaded from the store."""
        member.last_heartbeat_ns = before.last_heartbeat_ns
        member.session, member.closed_ns = before.session, before.closed_ns
        if before.session is not None:
            self._members.setdefault(before.session, {})[member] = group_id
        self.watch(group_id, member)

    def advance(self, now_ns: int) -> None:
        """Call `expired` for the members whose timers fire. When one call fails, its timer and the
        following ones fire again in the next step.
        """
        if now_ns < self._wheel.quiet_until_ns:
            return
        fired = self._wheel.advance(now_ns)
        for _, member in fired:
            member.timer = None
        done = 0
        try:
            for group_id, member in fired:
                self._expired(group_id, member, now_ns)
                done += 1
        finally:
            for group_id, member in fired[done:]:
                self.watch(group_id, member)

    def next_deadline_ns(self) -> int | None:
        until_ns = self._wheel.quiet_until_ns
        return None if until_ns == NEVER_NS else until_ns


def subscription_bytes(topics: tuple[str, ...]) -> int:
    """Memory of a subscription."""
    return NAME_BYTES * len(topics) + sum(map(len, topics))


def reason_to_remove(member: Member, now_ns: int) -> str:
    """The reason to remove a member now; empty: it stays."""
    if now_ns < member.deadline_ns(CLOSED_GRACE_NS):
        return ""
    if now_ns >= member.last_heartbeat_ns + member.settings.session_timeout_ms * 1_000_000:
        return f"no heartbeat for session_timeout_ms={member.settings.session_timeout_ms}"
    if (
        member.state == REVOKING
        and now_ns >= member.revoking_since_ns + member.settings.rebalance_timeout_ms * 1_000_000
    ):
        return (
            "did not give partitions back within "
            f"max_poll_interval_ms={member.settings.rebalance_timeout_ms}"
        )
    return "connection closed"


# ---- joining -------------------------------------------------------------------------------------


def joining_in(
    request: Mapping[str, Any], limits: GroupLimits
) -> tuple[MemberSettings, frozenset[Partition]]:
    """The settings and the owned partitions of a join request. Raises InvalidRequestError."""
    return settings_in(request, limits), owned_in(request) or frozenset()


def check_assignor(
    assignors: Assignors, group: ConsumerGroup | None, member_id: str, settings: MemberSettings
) -> None:
    """Raises UnsupportedAssignorError when the assignor is unknown or the other members use another
    one.
    """
    name = settings.assignor
    if name is None:
        return
    if not assignors.has(name):
        raise UnsupportedAssignorError(
            f"there is no assignor {shown(name)}; available are {', '.join(assignors.names)}. One "
            "of an installed package must be named in the appliance's setting group.assignors"
        )
    if (
        group is not None
        and name != group.assignor
        and len(group.members) > (member_id in group.members)
    ):
        raise UnsupportedAssignorError(
            f"the members of {group.name} use the assignor {group.assignor}, this one requests "
            f"{name}"
        )


def place_of_instance(
    group: ConsumerGroup, member_id: str, settings: MemberSettings, started_ns: int, now_ns: int
) -> Member | None:
    """The static member with the same instance id, which the joining one replaces; None: there is
    none. Raises InstanceIdInUseError when it is alive, TailraceError (NOT_READY) when that is
    unknown.
    """
    holder = None if settings.instance_id is None else group.by_instance.get(settings.instance_id)
    if holder is None or holder == member_id:
        return None
    old = group.members[holder]
    if old.is_away or old.closed_ns is not None:
        return old
    if old.session is None:  # no heartbeat since a restart of this process
        if now_ns - started_ns >= CLOSED_GRACE_NS:
            return old
        raise TailraceError(
            f"the member with the instance id {settings.instance_id} has sent no heartbeat since "
            "the group coordinator restarted, and may be alive",
            ErrorCode.NOT_READY,
        )
    raise InstanceIdInUseError(
        f"the group {group.name} has a live member with the instance id {settings.instance_id}: "
        f"{holder}, client id {old.settings.client_id!r}"
    )


def check_user(group: ConsumerGroup, member: Member | None, request: Mapping[str, Any]) -> None:
    """Raises NotAuthorizedError if the member, or the one whose place is asked for, is another
    user's.
    """
    user = user_in(request)
    if member is not None and user and member.settings.user and user != member.settings.user:
        raise NotAuthorizedError(
            f"member {member.member_id} of the group {group.name} belongs to another user: join "
            "with a member id and an instance id of your own"
        )


def full(group: ConsumerGroup) -> GroupFullError:
    """The error for a join of a group with `group.members.max` members."""
    return GroupFullError(
        f"the group {group.name} has {len(group.members)} members, as many as group.members.max "
        "allows"
    )


def rejoin(group: ConsumerGroup, member: Member, settings: MemberSettings) -> None:
    """Reset a member that joins again: it owns nothing."""
    if member.settings.topics != settings.topics:
        group.is_dirty = group.is_row_changed = True
    if member.instance_id != settings.instance_id:
        if member.instance_id is not None:
            del group.by_instance[member.instance_id]
        if settings.instance_id is not None:
            group.by_instance[settings.instance_id] = member.member_id
    group.release(member)
    member.settings, member.has_new_settings = settings, True
    member.epoch = member.previous_epoch = 0
    member.state, member.is_away = STABLE, False
    group.changed(member)


# ---- staying -------------------------------------------------------------------------------------


def known_member(group: ConsumerGroup, request: Mapping[str, Any], member_id: str) -> Member:
    """The member of an id. Raises UnknownMemberError, or FencedMemberError when another member has
    taken its instance id, NotAuthorizedError when it is another user's.
    """
    member = group.members.get(member_id)
    if member is not None:
        check_user(group, member, request)
        return member
    instance_id = request.get("instance_id")
    holder = group.by_instance.get(instance_id) if isinstance(instance_id, str) else None
    if holder is not None:
        raise FencedMemberError(
            f"another consumer with the instance id {instance_id} has taken this member's place "
            f"in {group.name}: {holder}"
        )
    raise UnknownMemberError(
        f"the group {group.name} has no member {member_id}: it left, or was removed"
    )


def checked_heartbeat(
    member: Member, epoch: int, request: Mapping[str, Any]
) -> frozenset[Partition] | None:
    """The member's owned partitions, if the heartbeat has them. Raises FencedMemberError for a
    wrong epoch. The previous epoch is accepted, since the answer with the new one may be lost.
    """
    reported = owned_in(request)
    if member.is_away:
        raise FencedMemberError("this static member has left temporarily: join again")
    if epoch == member.epoch:
        return reported
    has_missed_answer = epoch == member.previous_epoch and (
        reported is None or reported <= member.assigned.keys() | member.revoking.keys()
    )
    if not has_missed_answer:
        raise FencedMemberError(
            f"the heartbeat is of epoch {epoch}, the member's is {member.epoch}"
        )
    return reported


def subscription_in(
    member: Member, request: Mapping[str, Any], sessions: Sessions
) -> MemberSettings:
    """The member's settings with the subscription of this request. Raises InvalidRequestError,
    GroupFullError.
    """
    topics, follows = topics_in(request), flag_in(request, "follows_catalog")
    if topics is not None and topics != member.settings.topics:
        sessions.check_room(topics, is_new=False)
    pattern = text_in(request, "pattern", PATTERN_MAX)
    return replace(
        member.settings,
        pattern=member.settings.pattern if pattern is None else pattern,
        user=member.settings.user or user_in(request),
        topics=member.settings.topics if topics is None else topics,
        follows_catalog=member.settings.follows_catalog if follows is None else follows,
    )


def resubscribe(group: ConsumerGroup, member: Member, changed: MemberSettings) -> None:
    """Replace the member's settings if they changed."""
    if changed != member.settings:
        if changed.topics != member.settings.topics:
            group.is_dirty = group.is_row_changed = True
        member.settings, member.has_new_settings = changed, True
        group.changed(member)


def leave_temporarily(group: ConsumerGroup, member: Member) -> None:
    """Let a static member leave temporarily. It keeps its partitions, except those that it had to
    release. Raises InvalidRequestError.
    """
    if member.instance_id is None:
        raise InvalidRequestError(
            "only a member with an instance_id leaves temporarily (epoch -2); others leave with "
            "epoch -1"
        )
    for partition in member.revoking:
        del group.owners[partition]
        group.freed.add(partition)
    if member.revoking:
        member.revoking, member.state = {}, WAITING
    member.is_away = True
    group.changed(member)


def paused_of(subscribed: Mapping[str, tuple[str, int]], topics: TopicImage) -> tuple[str, ...]:
    """The ids of the subscribed topics whose delivery is paused."""
    found = []
    for topic_id, _ in subscribed.values():
        topic = topics.by_id(topic_id)
        if topic is not None and topic.settings.get("delivery.paused"):
            found.append(topic_id)
    return tuple(sorted(found))
