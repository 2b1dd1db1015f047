"""Membership state of one group member, sans-IO: epochs, heartbeats and the target assignment
(after KIP-848).

    OUT     -- subscribe() -->                        JOINING
    JOINING -- response -->                           MEMBER
    JOINING -- refused (poll raises) -->              REFUSED -- pop_error() --> JOINING
    MEMBER  -- fenced, unknown, poll() too late -->   LOST    -- ack_lost() -->  JOINING
    any     -- leave() -->                            LEAVING -- response -->    OUT

The partitions of a member change in steps. Each is reported by a heartbeat before the next:

    taken, not assigned   the consumer revokes them (`next_change`), then the report omits them;
                          those of topics that it does not subscribe to any more it revokes at once
    assigned, not taken   they are reported as owned; once the response confirms that, the consumer
                          takes them (`next_change`)

So nothing is taken that the group coordinator could assign to another member at the same time, and
partitions that stay are not touched.

Owner: the caller's lock. No method may be called by two threads at a time.

Invariants:
- At most one heartbeat is in flight. The response to an abandoned heartbeat is ignored.
- The consumer has taken reported partitions only, and reads taken partitions only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from zlib import crc32

from tailrace.client.connections.runtime import NEVER_NS
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.errors import CommitFailedError, TailraceError, error_for

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
AWAY_EPOCH = -2
"""A static member leaves, and its place is kept for session_timeout_ms."""
NS_PER_MS = 1_000_000
RETRY_FIRST_NS = 50 * NS_PER_MS
RETRY_MAX_NS = 1_000 * NS_PER_MS
HEARTBEAT_SLOTS = 8
"""Moments in an interval at which heartbeats are sent; a member's id chooses one of them. Members
of one host share a monotonic clock, so heartbeats of one moment wake the appliance's processes
together. Several moments spread a large group.
"""
POLLING_NS = NEVER_NS >> 1
"""The time of the last poll while the consumer is in one: far in the future."""

Partition = tuple[str, int]
"""(topic id in 32 hexadecimal digits, partition)."""
Partitions = frozenset[Partition]
NOTHING: Partitions = frozenset()

GONE_CODES = frozenset({ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER})
TRANSIENT_CODES = frozenset(code for code, row in ERROR_TABLE.items() if row.retriable) | {
    ErrorCode.STORAGE_ERROR,
    ErrorCode.INTERNAL_ERROR,
}
"""Codes that a member retries: its session is alive, or the appliance will say otherwise."""


class Phase(Enum):
    """The states of the module's diagram."""

    OUT = "out"
    JOINING = "joining"
    MEMBER = "member"
    REFUSED = "refused"
    LOST = "lost"
    LEAVING = "leaving"


class ChangeKind(Enum):
    """The kinds of steps for the partitions of a Change."""

    REVOKE = "revoke"
    ASSIGN = "assign"
    LOST = "lose"


class Change(NamedTuple):
    """A step for the consumer to make: see `Membership.next_change`."""

    kind: ChangeKind
    partitions: Partitions
    reason: str = ""
    """The reason why partitions are lost, as a sentence."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """The fields of a member's first heartbeat."""

    group: str
    member_id: str
    instance_id: str | None
    client_id: str
    assignor: str
    session_timeout_ms: int
    heartbeat_interval_ms: int
    max_poll_interval_ms: int


class Membership:
    """One member. Times are in nanoseconds of one monotonic clock."""

    def __init__(self, identity: MemberIdentity, now_ns: int) -> None:
        self.identity = identity
        self._interval_ns = identity.heartbeat_interval_ms * NS_PER_MS
        self._moment_ns = (
            crc32(identity.member_id.encode())
            % HEARTBEAT_SLOTS
            * (self._interval_ns // HEARTBEAT_SLOTS)
        )
        """The time within each interval at which its regular heartbeat is sent."""
        self.phase = Phase.OUT
        self.epoch = JOIN_EPOCH
        self.taken = NOTHING
        """The partitions that the consumer has."""
        self.assigned: Partitions | None = None
        """The target assignment; None: unknown."""
        self.confirmed = NOTHING
        """The assigned partitions whose report the group coordinator has confirmed."""
        self.topic_names: dict[str, str] = {}
        self.paused_topics: frozenset[str] = frozenset()
        """The ids of topics with delivery.paused."""
        self.catalog_version = -1
        self.error: TailraceError | None = None
        """The reason why it cannot join, for poll to raise."""
        self.has_events = False
        """True if `next_change`, `error`, `catalog_version` or `paused_topics` may have changed."""
        self.heartbeat_count = 0
        self.join_count = 0
        self.polled_ns = POLLING_NS
        """The time when the last poll() returned; POLLING_NS during a poll, and before the first.
        """
        self._topics: list[str] = []
        self._subscribed: frozenset[str] = frozenset()
        self._follows_catalog = False
        self._is_topics_reported = False
        self._reported: Partitions = NOTHING
        """The owned partitions in the last report, if `_is_owned_reported`."""
        self._is_owned_reported = False
        self._lost_reason = ""
        self._has_expired = False
        """True if the membership was lost because poll was not called; a commit raises that."""
        self._may_be_member = False
        """True if a join was sent since the last leave: the appliance may know this member."""
        self._stays_out = False
        """True if it does not join again after LEAVING."""
        self._token = 0
        self._in_flight: Partitions | None = None
        """The owned partitions in the heartbeat in flight; None: no heartbeat is in flight."""
        self._owned_report_in_flight = False
        self._abandon_ns = NEVER_NS
        self._due_ns = now_ns
        self._failures = 0

    # ---- the consumer's side ---------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str], follows_catalog: bool, now_ns: int) -> None:
        """Join with these topics, or replace the topics. With `follows_catalog` the responses have
        the version of the topic catalog.
        """
        self._topics = list(topics)
        self._subscribed = frozenset(self._topics)
        self._follows_catalog = follows_catalog
        self._is_topics_reported = False
        self._stays_out = False
        if self.phase is Phase.OUT:
            self._begin_to_join(now_ns)
        self.has_events = True
        self._due_ns = min(self._due_ns, now_ns) if not self._failures else self._due_ns

    def leave(self, now_ns: int) -> None:
        """Leave the group; `phase` is OUT when the appliance has confirmed it. The consumer drops
        its partitions before.
        """
        self._stays_out = True
        self._forget_partitions()
        self._lost_reason = ""
        self.error = None
        if self.phase in (Phase.JOINING, Phase.MEMBER) and self._may_be_member:
            self._begin_to_leave(now_ns)
        elif self.phase is not Phase.LEAVING:
            self.phase = Phase.OUT

    def next_change(self) -> Change | None:
        """The next step for the consumer. Report it done by `revoked`, `taking` or `ack_lost`, then
        call again.
        """
        if self._lost_reason:
            return Change(ChangeKind.LOST, self.taken, self._lost_reason)
        if self.phase is not Phase.MEMBER or self.assigned is None:
            return None
        surplus = self.taken - self._of_subscribed(self.assigned)
        if surplus:
            return Change(ChangeKind.REVOKE, surplus)
        more = self._of_subscribed(self.confirmed) - self.taken
        return Change(ChangeKind.ASSIGN, more) if more else None

    def _of_subscribed(self, partitions: Partitions) -> Partitions:
        """Those of subscribed topics: the assignment may be one of the subscription before."""
        dropped = {
            topic_id
            for topic_id, _ in partitions
            if self.topic_names.get(topic_id) not in self._subscribed
        }
        return (
            frozenset(one for one in partitions if one[0] not in dropped) if dropped else partitions
        )

    def revoked(self, partitions: Partitions, now_ns: int) -> None:
        """The consumer has revoked these partitions: report it at once."""
        self.taken -= partitions
        self._schedule_report(now_ns)

    def taking(self, partitions: Partitions) -> None:
        """The consumer begins to read these partitions. Call it before."""
        self.taken |= partitions

    def ack_lost(self, now_ns: int) -> None:
        """The consumer has dropped all partitions: the member may join again."""
        self._lost_reason = ""
        self.taken = NOTHING
        if self.phase is Phase.LOST:
            self._begin_to_join(now_ns)

    def pop_error(self, now_ns: int) -> TailraceError | None:
        """Remove and return the error for poll to raise. The member tries to join again."""
        error, self.error = self.error, None
        if error is not None and self.phase is Phase.REFUSED:
            self._begin_to_join(now_ns)
            self._due_ns = now_ns + RETRY_FIRST_NS
        return error

    def member_fields(self) -> dict[str, Any]:
        """The fields that identify the member in a commit. Raises CommitFailedError unless it is a
        member.
        """
        if self.phase is not Phase.MEMBER:
            why = (
                self._lost_reason
                if self._has_expired and self._lost_reason
                else "it joins at its next poll"
            )
            raise CommitFailedError(
                f"this consumer is not a member of its group now: {why}", ErrorCode.UNKNOWN_MEMBER
            )
        return {
            "group": self.identity.group,
            "member_id": self.identity.member_id,
            "member_epoch": self.epoch,
        }

    def heartbeat_soon(self, now_ns: int) -> None:
        """Make the next heartbeat at once."""
        if not self._failures:
            self._due_ns = min(self._due_ns, now_ns)

    # ---- the appliance's side --------------------------------------------------------------------

    def due_ns(self) -> int | None:
        """The time of the next `step`; None: none before the consumer acts."""
        if self.phase in (Phase.OUT, Phase.LOST, Phase.REFUSED):
            return None
        due_ns = self._abandon_ns if self._in_flight is not None else self._due_ns
        return due_ns if self.phase is Phase.LEAVING else min(due_ns, self._poll_deadline_ns())

    def _poll_deadline_ns(self) -> int:
        return self.polled_ns + self.identity.max_poll_interval_ms * NS_PER_MS

    def step(self, now_ns: int) -> tuple[int, dict[str, Any]] | None:
        """The heartbeat to send now, with a token for `answered`; None: none is due. Call it only
        if the heartbeat can be sent.
        """
        if self.phase in (Phase.JOINING, Phase.MEMBER) and now_ns >= self._poll_deadline_ns():
            self._expire(now_ns)
        if self.phase in (Phase.OUT, Phase.LOST, Phase.REFUSED):
            return None
        if self._in_flight is not None:
            if now_ns < self._abandon_ns:
                return None
            self.not_answered(self._token, now_ns)
        if now_ns < self._due_ns:
            return None
        return self._heartbeat(now_ns)

    def _heartbeat(self, now_ns: int) -> tuple[int, dict[str, Any]]:
        one = self.identity
        request: dict[str, Any] = {
            "group": one.group,
            "kind": "consumer",
            "member_id": one.member_id,
            "member_epoch": self.epoch,
        }
        reported = self._report()
        if self.phase is Phase.LEAVING:
            request["member_epoch"] = LEAVE_EPOCH if one.instance_id is None else AWAY_EPOCH
            reported = NOTHING
        else:
            joins = self.phase is Phase.JOINING
            reports_owned = joins or not self._is_owned_reported or reported != self._reported
            request |= {
                "topics": self._topics if joins or not self._is_topics_reported else None,
                "follows_catalog": self._follows_catalog,
                "owned": by_topic(reported) if reports_owned else None,
            }
            self._owned_report_in_flight = reports_owned
            if joins:
                self._may_be_member = True
                request |= {
                    "assignor": one.assignor,
                    "session_timeout_ms": one.session_timeout_ms,
                    "rebalance_timeout_ms": one.max_poll_interval_ms,
                    "heartbeat_interval_ms": one.heartbeat_interval_ms,
                    "client_id": one.client_id,
                }
        if one.instance_id is not None:
            request["instance_id"] = one.instance_id
        self._is_topics_reported = True
        self._token += 1
        self._in_flight = reported
        self._abandon_ns = now_ns + max(1_000, one.session_timeout_ms // 3) * NS_PER_MS
        self._due_ns = now_ns + self._interval_ns - (now_ns - self._moment_ns) % self._interval_ns
        self.heartbeat_count += 1
        return self._token, request

    def _report(self) -> Partitions:
        """The owned partitions to report in the next heartbeat. Newly assigned partitions are added
        after the revoked ones are released. Confirmed partitions stay, because the consumer may
        take them at any moment.
        """
        if self.assigned is None or not self.taken <= self.assigned:
            return self.taken | self.confirmed
        return self.assigned

    def answered(
        self, token: int, code: ErrorCode, detail: str, answer: dict[str, Any], now_ns: int
    ) -> None:
        """Apply the response to the heartbeat `token`. Raises KeyError, TypeError or ValueError for
        a malformed response.
        """
        if token != self._token or self._in_flight is None:
            return
        if code is not ErrorCode.OK:
            self._refused(code, detail, now_ns)
            return
        reported = self._in_flight
        if self.phase is Phase.LEAVING:
            self._in_flight = None
            self._left(now_ns)
            return
        assigned = (
            partitions_in(answer["assignment"]) if answer.get("assignment") is not None else None
        )
        epoch, names = int(answer["member_epoch"]), dict(answer.get("topic_names") or {})
        paused, version = (
            frozenset(answer.get("paused_topics") or ()),
            int(answer.get("catalog_version", -1)),
        )
        self._in_flight = None
        self._failures = 0
        self.epoch = epoch
        if self.phase is Phase.JOINING:
            self.phase = Phase.MEMBER
            self.join_count += 1
        if (paused, version) != (self.paused_topics, self.catalog_version):
            self.paused_topics, self.catalog_version = paused, version
            self.has_events = True
        self._reported = reported
        # If the response repeats the reported partitions, the appliance has restarted and does not
        # know what this member owns: report it again.
        self._is_owned_reported = assigned != reported or self._owned_report_in_flight
        self.topic_names.update(names)
        self.assigned = reported if assigned is None else assigned
        self.confirmed = self.assigned & reported
        self._schedule_report(now_ns)
        if self.next_change() is not None:
            self.has_events = True

    def _refused(self, code: ErrorCode, detail: str, now_ns: int) -> None:
        if self.phase is Phase.LEAVING and code not in TRANSIENT_CODES:
            self._in_flight = None
            self._left(now_ns)
        elif code in GONE_CODES and self.phase is Phase.MEMBER:
            self._in_flight = None
            self._lose(str(error_for(code, detail)))
        elif code in GONE_CODES or code in TRANSIENT_CODES:
            self.not_answered(self._token, now_ns)
            self._pause(now_ns)
        else:
            self._in_flight = None
            self.fail(error_for(code, detail))

    def not_answered(self, token: int, now_ns: int) -> None:
        """The heartbeat has no response, or the connection was lost: the next one reports
        everything.
        """
        if token != self._token or self._in_flight is None:
            return
        self._in_flight = None
        self._is_topics_reported = self._is_owned_reported = False
        self._due_ns = now_ns

    def _pause(self, now_ns: int) -> None:
        self._due_ns = now_ns + min(RETRY_MAX_NS, RETRY_FIRST_NS << min(self._failures, 10))
        self._failures += 1

    def reconnected(self, now_ns: int) -> None:
        """The connection was opened again: make a heartbeat, so that the appliance knows the new
        connection.
        """
        self._due_ns = now_ns

    def fail(self, error: TailraceError) -> None:
        """Heartbeats cannot go on, or joining is refused: poll raises the error."""
        self.error = error
        self.has_events = True
        if self.taken:
            self._lost_reason = str(error)
        self._forget_partitions(keep_taken=True)
        self.phase = Phase.REFUSED if not self._stays_out else Phase.OUT

    # ---- ends ------------------------------------------------------------------------------------

    def _begin_to_join(self, now_ns: int) -> None:
        self.phase = Phase.JOINING
        self.epoch = JOIN_EPOCH
        self._forget_partitions()
        self._failures = 0
        self._due_ns = now_ns

    def _begin_to_leave(self, now_ns: int) -> None:
        self.phase = Phase.LEAVING
        self._in_flight = None  # its response is ignored
        self._failures = 0
        self._due_ns = now_ns

    def _left(self, now_ns: int) -> None:
        self._may_be_member = False
        self.epoch = JOIN_EPOCH
        self.join_count = 0
        if self._stays_out:
            self.phase = Phase.OUT
        elif self._lost_reason:
            self.phase = Phase.LOST
        else:
            self._begin_to_join(now_ns)
        self.has_events = True

    def _expire(self, now_ns: int) -> None:
        """poll() was not called in time: leave, so that others get the partitions."""
        limit = self.identity.max_poll_interval_ms
        self._has_expired = True
        self._lost_reason = (
            f"poll() was not called for max_poll_interval_ms ({limit} ms), so the consumer left "
            "its group, and poll() joins it again. "
            "Handle fewer records at a time (max_poll_records), or raise max_poll_interval_ms"
        )
        self._forget_partitions(keep_taken=True)
        self.has_events = True
        self._begin_to_leave(now_ns)

    def _lose(self, reason: str) -> None:
        self._has_expired = False
        self._lost_reason = reason
        self._forget_partitions(keep_taken=True)
        self.phase = Phase.LOST
        self.has_events = True

    def _forget_partitions(self, *, keep_taken: bool = False) -> None:
        self.assigned = None
        self.confirmed = self._reported = NOTHING
        self._is_owned_reported = False
        if not keep_taken:
            self.taken = NOTHING

    def _schedule_report(self, now_ns: int) -> None:
        if self.phase is Phase.MEMBER and (
            not self._is_owned_reported or self._report() != self._reported
        ):
            self._due_ns = now_ns


def by_topic(partitions: Partitions) -> dict[str, list[int]]:
    """{topic id: [partitions]}, both ascending."""
    found: dict[str, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        found.setdefault(topic_id, []).append(partition)
    return found


def partitions_in(topics: dict[str, list[int]]) -> Partitions:
    """The inverse of `by_topic`."""
    return frozenset(
        (topic_id, partition) for topic_id, partitions in topics.items() for partition in partitions
    )
