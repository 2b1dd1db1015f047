"""A member's side of a group, sans-IO: epochs, heartbeats, and how its partitions change (after
KIP-848).

    OUT --subscribe()--> JOINING --answered--> MEMBER --fenced, unknown, poll() came too late--> LOST --ack_lost()--> JOINING
     ^                      '------ refused (the error waits for poll) --> REFUSED --pop_error()--> JOINING
     '---- answered -- LEAVING <-- leave() -- any

What a member has changes in steps, each of which the appliance learns by a heartbeat before the
next:

    assignment lacks what is taken      the consumer revokes it (`next_change`), then it is no longer reported
    assignment has more than is taken   it is reported as owned first; when the appliance confirms that, the consumer takes it (`next_change`)

So nothing is taken that the appliance could give to another in the same moment, and what is kept is
never touched.

Owner: its user's lock: no method may be called by two threads at a time.
Invariants: at most one heartbeat is under way; the consumer has taken nothing that is not reported,
    and reads nothing that it has not taken; an answer to a heartbeat that was given up is ignored.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from zlib import crc32

from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.errors import CommitFailedError, TailraceError, error_for

JOIN_EPOCH = 0
LEAVE_EPOCH = -1
AWAY_EPOCH = -2
"""A static member goes, and its place is kept for session_timeout_ms."""
NS_PER_MS = 1_000_000
RETRY_FIRST_NS = 50 * NS_PER_MS
RETRY_MAX_NS = 1_000 * NS_PER_MS
NEVER_NS = 2**63 - 1
HEARTBEAT_SLOTS = 8
"""Members of one host, whose monotonic clock is one, send heartbeats at so many moments in an
interval, each at its own of them: those of one moment wake the appliance's processes together, and
not all of a group's members have the same.
"""
POLLING_NS = NEVER_NS >> 1
"""The time of the last poll, while the consumer is in one: far enough ahead."""

Partition = tuple[str, int]
"""(topic id, 32 hexadecimal digits; partition)."""
Partitions = frozenset[Partition]
NOTHING: Partitions = frozenset()

GONE_CODES = frozenset({ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER})
TRANSIENT_CODES = frozenset(code for code, row in ERROR_TABLE.items() if row.retriable) | {
    ErrorCode.STORAGE_ERROR,
    ErrorCode.INTERNAL_ERROR,
}
"""A member that meets these goes on trying: its session lives, or the appliance says otherwise when
it can.
"""


class Phase(Enum):
    """See the module's diagram."""

    OUT = "out"
    JOINING = "joining"
    MEMBER = "member"
    REFUSED = "refused"
    LOST = "lost"
    LEAVING = "leaving"


class ChangeKind(Enum):
    """What is to be done with the partitions of a Change."""

    REVOKE = "revoke"
    ASSIGN = "assign"
    LOST = "lose"


class Change(NamedTuple):
    """A step that the consumer is to make: see `Membership.next_change`."""

    kind: ChangeKind
    partitions: Partitions
    reason: str = ""
    """Why they are lost, as a sentence."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """What a member tells of itself when it joins."""

    group: str
    member_id: str
    instance_id: str | None
    client_id: str
    assignor: str
    session_timeout_ms: int
    heartbeat_interval_ms: int
    max_poll_interval_ms: int


class Membership:
    """See the module's docstring. Times are of one monotonic clock, in nanoseconds."""

    def __init__(self, identity: MemberIdentity, now_ns: int) -> None:
        self.identity = identity
        self._interval_ns = identity.heartbeat_interval_ms * NS_PER_MS
        self._moment_ns = (
            crc32(identity.member_id.encode())
            % HEARTBEAT_SLOTS
            * (self._interval_ns // HEARTBEAT_SLOTS)
        )
        """Where in each interval its heartbeat comes, if nothing happens."""
        self.phase = Phase.OUT
        self.epoch = JOIN_EPOCH
        self.taken = NOTHING
        """What the consumer has."""
        self.assigned: Partitions | None = None
        """What the appliance last said it is to have; None: not known yet."""
        self.confirmed = NOTHING
        """Of that, what the appliance knows that this member has heard of."""
        self.topic_names: dict[str, str] = {}
        self.paused_topics: frozenset[str] = frozenset()
        """Ids of the topics whose delivery is paused."""
        self.catalog_version = -1
        self.error: TailraceError | None = None
        """Why it cannot join; for poll to raise."""
        self.has_events = False
        """Whether `next_change`, `error`, `catalog_version` or `paused_topics` may have something
        new for the consumer.
        """
        self.heartbeat_count = 0
        self.join_count = 0
        self.polled_ns = POLLING_NS
        """When poll() was last left; POLLING_NS while it runs, and before the first."""
        self._topics: list[str] = []
        self._follows_catalog = False
        self._is_topics_reported = False
        self._reported: Partitions = NOTHING
        """What the appliance knows that this member owns, if `_is_owned_reported`."""
        self._is_owned_reported = False
        self._lost_reason = ""
        self._has_expired = False
        """Whether that is because poll was not called: a commit says so."""
        self._stays_out = False
        """After LEAVING: not to join again."""
        self._token = 0
        self._under_way: Partitions | None = None
        """What the heartbeat under way reports; None: none is under way."""
        self._owned_report_in_flight = False
        self._abandon_ns = NEVER_NS
        self._due_ns = now_ns
        self._failures = 0

    # ---- the consumer's side ---------------------------------------------------------------------

    def subscribe(self, topics: Iterable[str], follows_catalog: bool, now_ns: int) -> None:
        """Be a member that wants these topics. `follows_catalog`: be told when the appliance's
        topics change.
        """
        self._topics = list(topics)
        self._follows_catalog = follows_catalog
        self._is_topics_reported = False
        self._stays_out = False
        if self.phase is Phase.OUT:
            self._begin_to_join(now_ns)
        self._due_ns = min(self._due_ns, now_ns) if not self._failures else self._due_ns

    def leave(self, now_ns: int) -> None:
        """Leave the group; `phase` is OUT when the appliance has heard of it. What was taken is the
        consumer's to drop before.
        """
        self._stays_out = True
        self._forget_partitions()
        self._lost_reason = ""
        self.error = None
        if self.phase in (Phase.JOINING, Phase.MEMBER) and (
            self.join_count or self._under_way is not None
        ):
            self._begin_to_leave(now_ns)
        elif self.phase is not Phase.LEAVING:
            self.phase = Phase.OUT

    def next_change(self) -> Change | None:
        """What the consumer is to do next; it says so when it is done, by `revoked`, `taking` or
        `ack_lost`, and asks again.
        """
        if self._lost_reason:
            return Change(ChangeKind.LOST, self.taken, self._lost_reason)
        if self.phase is not Phase.MEMBER or self.assigned is None:
            return None
        surplus = self.taken - self.assigned
        if surplus:
            return Change(ChangeKind.REVOKE, surplus)
        more = self.confirmed - self.taken
        return Change(ChangeKind.ASSIGN, more) if more else None

    def revoked(self, partitions: Partitions, now_ns: int) -> None:
        """The consumer has given these up: the appliance is told at once."""
        self.taken -= partitions
        self._schedule_report(now_ns)

    def taking(self, partitions: Partitions) -> None:
        """The consumer begins to read these. To be said before it does."""
        self.taken |= partitions

    def ack_lost(self, now_ns: int) -> None:
        """The consumer has dropped everything: the member may join again."""
        self._lost_reason = ""
        self.taken = NOTHING
        if self.phase is Phase.LOST:
            self._begin_to_join(now_ns)

    def pop_error(self, now_ns: int) -> TailraceError | None:
        """What poll is to raise, once; it is tried again then."""
        error, self.error = self.error, None
        if error is not None and self.phase is Phase.REFUSED:
            self._begin_to_join(now_ns)
            self._due_ns = now_ns + RETRY_FIRST_NS
        return error

    def member_fields(self) -> dict[str, Any]:
        """What a commit says of its member. Raises CommitFailedError when it is none."""
        if self.phase is not Phase.MEMBER:
            why = (
                self._lost_reason
                if self._has_expired and self._lost_reason
                else "it joins at its next poll"
            )
            raise CommitFailedError(
                f"this consumer is no member of its group now: {why}", ErrorCode.UNKNOWN_MEMBER
            )
        return {
            "group": self.identity.group,
            "member_id": self.identity.member_id,
            "member_epoch": self.epoch,
        }

    def heartbeat_soon(self, now_ns: int) -> None:
        """There is a reason to believe that the appliance has news."""
        if not self._failures:
            self._due_ns = min(self._due_ns, now_ns)

    # ---- the appliance's side --------------------------------------------------------------------

    def due_ns(self) -> int | None:
        """When `step` next has something to do; None: when the consumer has."""
        if self.phase in (Phase.OUT, Phase.LOST, Phase.REFUSED):
            return None
        due_ns = self._abandon_ns if self._under_way is not None else self._due_ns
        return due_ns if self.phase is Phase.LEAVING else min(due_ns, self._poll_deadline_ns())

    def _poll_deadline_ns(self) -> int:
        return self.polled_ns + self.identity.max_poll_interval_ms * NS_PER_MS

    def step(self, now_ns: int) -> tuple[int, dict[str, Any]] | None:
        """The heartbeat that is to be sent now, with a token for `answered`; None: none is due. To
        be called only when it can be sent.
        """
        if self.phase in (Phase.JOINING, Phase.MEMBER) and now_ns >= self._poll_deadline_ns():
            self._expire(now_ns)
        if self.phase in (Phase.OUT, Phase.LOST, Phase.REFUSED):
            return None
        if self._under_way is not None:
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
        self._under_way = reported
        self._abandon_ns = now_ns + max(1_000, one.session_timeout_ms // 3) * NS_PER_MS
        self._due_ns = now_ns + self._interval_ns - (now_ns - self._moment_ns) % self._interval_ns
        self.heartbeat_count += 1
        return self._token, request

    def _report(self) -> Partitions:
        """What the appliance is to know that this member owns. Something new is not claimed before
        what is to be given up is free; what has been confirmed stays claimed, for the consumer may
        take it at any moment.
        """
        if self.assigned is None or not self.taken <= self.assigned:
            return self.taken | self.confirmed
        return self.assigned

    def answered(
        self, token: int, code: ErrorCode, detail: str, answer: dict[str, Any], now_ns: int
    ) -> None:
        """What the appliance says to the heartbeat `token`. Raises KeyError, TypeError or
        ValueError for an answer that is none.
        """
        if token != self._token or self._under_way is None:
            return
        if code is not ErrorCode.OK:
            self._refused(code, detail, now_ns)
            return
        reported = self._under_way
        if self.phase is Phase.LEAVING:
            self._under_way = None
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
        self._under_way = None
        self._failures = 0
        self.epoch = epoch
        if self.phase is Phase.JOINING:
            self.phase = Phase.MEMBER
            self.join_count += 1
        if (paused, version) != (self.paused_topics, self.catalog_version):
            self.paused_topics, self.catalog_version = paused, version
            self.has_events = True
        self._reported = reported
        # An assignment that is what was reported: the appliance has restarted and does not know
        # what this member has.
        self._is_owned_reported = assigned != reported or self._owned_report_in_flight
        self.topic_names.update(names)
        self.assigned = reported if assigned is None else assigned
        self.confirmed = self.assigned & reported
        self._schedule_report(now_ns)
        if self.next_change() is not None:
            self.has_events = True

    def _refused(self, code: ErrorCode, detail: str, now_ns: int) -> None:
        if self.phase is Phase.LEAVING and code not in TRANSIENT_CODES:
            self._under_way = None
            self._left(now_ns)
        elif code in GONE_CODES and self.phase is Phase.MEMBER:
            self._under_way = None
            self._lose(str(error_for(code, detail)))
        elif code in GONE_CODES or code in TRANSIENT_CODES:
            self.not_answered(self._token, now_ns)
            self._pause(now_ns)
        else:
            self._under_way = None
            self.fail(error_for(code, detail))

    def not_answered(self, token: int, now_ns: int) -> None:
        """The connection was lost, or no answer came: all is told again with the next heartbeat."""
        if token != self._token or self._under_way is None:
            return
        self._under_way = None
        self._is_topics_reported = self._is_owned_reported = False
        self._due_ns = now_ns

    def _pause(self, now_ns: int) -> None:
        self._due_ns = now_ns + min(RETRY_MAX_NS, RETRY_FIRST_NS << min(self._failures, 10))
        self._failures += 1

    def reconnected(self, now_ns: int) -> None:
        """The appliance does not know yet that this member has come over another connection: it is
        told at once.
        """
        self._due_ns = now_ns

    def fail(self, error: TailraceError) -> None:
        """No heartbeat can be made any more, or joining makes no sense; poll says so."""
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
        self._under_way = None  # its answer is not waited for
        self._failures = 0
        self._due_ns = now_ns

    def _left(self, now_ns: int) -> None:
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
        """The consumer does not poll: others get its partitions."""
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
    """{topic id: [partitions]}, both in order."""
    found: dict[str, list[int]] = {}
    for topic_id, partition in sorted(partitions):
        found.setdefault(topic_id, []).append(partition)
    return found


def partitions_in(topics: dict[str, list[int]]) -> Partitions:
    """The partitions of `by_topic`."""
    return frozenset(
        (topic_id, partition) for topic_id, partitions in topics.items() for partition in partitions
    )
