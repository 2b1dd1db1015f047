"""A share partition: the acquisition state and delivery count of each record, for one share group.

    never acquired --acquire--> ACQUIRED --accept, reject--> ACKNOWLEDGED
                                  | ^
         release, lock expired,   v |
         member gone           AVAILABLE

Each acquisition increments the delivery count. At the delivery limit a record is *dead*: it is
acquired only to be dead-lettered, and its count stays. A member acknowledges as *unread* the
records that its program never got. Their acquisition does not count as a delivery, even if the lock
has expired.

The semantics are those of KIP-932 (Kafka's share groups) with two differences:
- Acquisitions are stored like acknowledgements, so locks and delivery counts survive a restart.
- The limit applies to the number of records in flight, not to their distance. One slow record does
  not block the partition.

Owner: a ShareGroup; pure, with the time as an argument.
Invariants:
- A record has at most one lock.
- `in_flight_count <= locks_max` after each acquisition.
- There are at most two spans for each record in flight, and no deadline without a lock.
- A record below `start_offset` is done for good.
Crash: the encoded state (see `codec`) is written in the transaction of the request that changed it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from appliance.groups.share.partition.offset_ranges import (
    ACKNOWLEDGED,
    Kind,
    OffsetRange,
    OffsetRanges,
    State,
)

LOCK_TICK_NS = 50_000_000
"""Granularity of lock expiry. Consecutive acquisitions of a member share a span and a deadline."""
DELIVERY_COUNT_MAX = 1 << 30
RUNS_MAX = 2_000
OUTCOMES = frozenset({"accept", "release", "reject", "renew", "unread"})


class Acquired(NamedTuple):
    """A run of offsets `first` to `last` that a member has acquired."""

    first: int
    last: int
    delivery_count: int
    is_dead: bool
    """The records are at the delivery limit and have to be dead-lettered."""


class SharePartition:
    """The state of one partition in one share group."""

    __slots__ = ("_available_from", "_deadlines", "_watched_ns", "spans")

    def __init__(self, spans: OffsetRanges) -> None:
        spans.merge_done()
        self.spans = spans
        self._available_from = spans.start
        """No offset below is AVAILABLE."""
        self._deadlines: list[int] = []
        """Heap of lock deadlines; it may have stale entries."""
        self._watched_ns = 0
        """The deadline pushed last."""

    @classmethod
    def starting_at(cls, offset: int) -> SharePartition:
        """A partition without acquisitions, from a start offset."""
        return cls(OffsetRanges(offset))

    @property
    def start_offset(self) -> int:
        """The share-partition start offset: every record below is done."""
        return self.spans.start

    @property
    def next_offset(self) -> int:
        """The first offset that was never acquired."""
        return self.spans.next

    def room(self, locks_max: int) -> int:
        """Number of records that may still come in flight."""
        return max(0, locks_max - self.spans.in_flight_count)

    def acquired_by(self, member: str) -> int:
        """Number of records that a member has acquired."""
        if not self.spans.acquired_count:
            return 0
        return sum(
            span.size
            for span in self.spans
            if span.state.kind is Kind.ACQUIRED and span.state.member == member
        )

    # ---- acquiring -------------------------------------------------------------------------------

    def acquire(
        self,
        member: str,
        count_max: int,
        end_offset: int,
        delivery_limit: int,
        locks_max: int,
        now_ns: int,
        lock_ns: int,
        runs_max: int = RUNS_MAX,
    ) -> list[Acquired]:
        """Lock up to `count_max` records for a member, in up to `runs_max` runs. Records that are
        available again come first, then new ones below `end_offset`.
        """
        until_ns = self._until_ns(now_ns, lock_ns)
        result = self._reacquire(member, count_max, runs_max, delivery_limit, until_ns)
        count = min(
            count_max - sum(each.last - each.first + 1 for each in result),
            self.room(locks_max),
            end_offset - self.spans.next,
        )
        if count > 0 and len(result) < runs_max:
            span = self.spans.append(count, State(Kind.ACQUIRED, 1, member, until_ns))
            result.append(Acquired(span.first, span.last, 1, False))
        if result:
            self._watch(until_ns)
        return result

    def _reacquire(
        self, member: str, count_max: int, runs_max: int, delivery_limit: int, until_ns: int
    ) -> list[Acquired]:
        result: list[Acquired] = []
        if not self.spans.available_count or count_max <= 0:
            return result
        left = count_max
        for span in self.spans.between(self._available_from, self.spans.next - 1):
            if span.state.kind is not Kind.AVAILABLE:
                continue
            if not left or len(result) >= runs_max:
                self._available_from = span.first
                return result
            last = min(span.last, span.first + left - 1)
            count = span.state.delivery_count
            is_dead = count >= delivery_limit
            if not is_dead:
                count = min(count + 1, DELIVERY_COUNT_MAX)
            self.spans.put(span.first, last, State(Kind.ACQUIRED, count, member, until_ns))
            result.append(Acquired(span.first, last, count, is_dead))
            left -= last - span.first + 1
            self._available_from = last + 1
            if last < span.last:
                return result
        self._available_from = self.spans.next
        return result

    def _until_ns(self, now_ns: int, lock_ns: int) -> int:
        return -(-(now_ns + lock_ns) // LOCK_TICK_NS) * LOCK_TICK_NS

    def _watch(self, until_ns: int) -> None:
        if until_ns != self._watched_ns:
            self._watched_ns = until_ns
            heapq.heappush(self._deadlines, until_ns)

    # ---- acknowledging ---------------------------------------------------------------------------

    def acknowledge(
        self, member: str, first: int, last: int, outcome: str, now_ns: int, lock_ns: int
    ) -> list[tuple[int, int]]:
        """Apply an acknowledgement of a member: accept, release, reject, renew or unread.

        Returns the runs of offsets without a lock of the member, which stay unchanged. For unread
        the list is empty, since the member loses nothing.
        """
        if outcome == "unread":
            self._undo_delivery(member, first, last)
            self._forget_deadlines()
            return []
        until_ns = self._until_ns(now_ns, lock_ns)
        lost: list[tuple[int, int]] = []
        start, behind = self.spans.start, self.spans.next
        if first < start:
            lost.append((first, min(last, start - 1)))
        for span in self.spans.between(first, last):
            if span.state.kind is not Kind.ACQUIRED or span.state.member != member:
                _add_run(lost, span.first, span.last)
            elif outcome == "release":
                self._free(span)
            elif outcome == "renew":
                self.spans.put(span.first, span.last, span.state._replace(locked_until_ns=until_ns))
                self._watch(until_ns)
            else:
                self.spans.put(span.first, span.last, ACKNOWLEDGED)
        if last >= behind:
            _add_run(lost, max(first, behind), last)
        self._forget_deadlines()
        return lost

    def not_locked_by(self, member: str, first: int, last: int) -> list[tuple[int, int]]:
        """The runs of these offsets without a lock of the member. Changes nothing."""
        start, behind = self.spans.start, self.spans.next
        lost: list[tuple[int, int]] = []
        if first < start:
            lost.append((first, min(last, start - 1)))
        for span in self.spans.between(first, last):
            if span.state.kind is not Kind.ACQUIRED or span.state.member != member:
                _add_run(lost, span.first, span.last)
        if last >= behind:
            _add_run(lost, max(first, behind), last)
        return lost

    def _undo_delivery(self, member: str, first: int, last: int) -> None:
        """Undo the last delivery of records that the member's program never got.

        If another member has acquired a record since, it keeps the lock and its own delivery
        counts.
        """
        for span in self.spans.between(first, last):
            kind, count, owner, until_ns = span.state
            if kind is Kind.AVAILABLE or (kind is Kind.ACQUIRED and owner == member):
                state = State(Kind.AVAILABLE, max(0, count - 1))
                self._available_from = min(self._available_from, span.first)
            elif kind is Kind.ACQUIRED:
                state = State(kind, max(1, count - 1), owner, until_ns)
            else:
                continue
            self.spans.put(span.first, span.last, state)

    def _forget_deadlines(self) -> None:
        """Clear the deadlines when no lock is left."""
        if self._deadlines and not self.spans.acquired_count:
            self._deadlines.clear()
            self._watched_ns = 0

    def _free(self, span: OffsetRange) -> None:
        self.spans.put(span.first, span.last, State(Kind.AVAILABLE, span.state.delivery_count))
        self._available_from = min(self._available_from, span.first)

    # ---- expiry of locks -------------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """Time of the next call of `expire`; None: nothing is locked."""
        return self._deadlines[0] if self._deadlines and self.spans.acquired_count else None

    def expire(self, now_ns: int) -> int:
        """Free the records whose locks have expired. Returns their number."""
        if not self._deadlines or self._deadlines[0] > now_ns:
            return 0
        while self._deadlines and self._deadlines[0] <= now_ns:
            heapq.heappop(self._deadlines)
        self._watched_ns = 0
        return self._free_where(lambda state: state.locked_until_ns <= now_ns)

    def release_member(self, member: str) -> int:
        """Free the records of a member that has gone. Returns their number."""
        return self._free_where(lambda state: state.member == member)

    def _free_where(self, chosen: Callable[[State], bool]) -> int:
        if not self.spans.acquired_count:
            return 0
        freed = 0
        for span in self.spans:
            if span.state.kind is Kind.ACQUIRED and chosen(span.state):
                self._free(span)
                freed += span.size
        self._forget_deadlines()
        return freed

    def extend_locks(self, now_ns: int, lock_ns: int) -> None:
        """Restart all locks after a start, since the time that the process was down is unknown."""
        until_ns = self._until_ns(now_ns, lock_ns)
        for span in self.spans:
            if span.state.kind is Kind.ACQUIRED:
                self.spans.put(span.first, span.last, span.state._replace(locked_until_ns=until_ns))
                self._watch(until_ns)

    # ---- changes of the log ----------------------------------------------------------------------

    def follow_log(self, beginning_offset: int, end_offset: int) -> bool:
        """Follow the bounds of the log. Records that retention removed are done; records that the
        log lost in a crash count as never acquired. Returns whether the state changed.
        """
        before = self.spans.start, self.spans.next
        if end_offset < self.spans.next:
            self.spans.cut_off(end_offset)
        if beginning_offset > self.spans.start:
            self.spans.drop_below(beginning_offset)
        self._available_from = max(self.spans.start, min(self._available_from, self.spans.next))
        self._forget_deadlines()
        return (self.spans.start, self.spans.next) != before


def _add_run(runs: list[tuple[int, int]], first: int, last: int) -> None:
    if runs and runs[-1][1] == first - 1:
        runs[-1] = runs[-1][0], last
    else:
        runs.append((first, last))
