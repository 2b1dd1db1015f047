"""One partition as a queue of one share group: who has which record, how often it was delivered,
what is done.

    never acquired --acquire--> ACQUIRED --accept, reject--> ACKNOWLEDGED
                                  | ^
         release, lock passed,    v |
         member gone           AVAILABLE    (acquired again: delivery count + 1; at the limit it is *dead*: acquired to be dead-lettered, count unchanged)

A member says *unread* of what its program was never given: the acquisition does not count as a
delivery, whether its lock lasts or has passed.

The semantics are those of KIP-932 (Kafka's share groups), but for two. An acquisition is stored as
an acknowledgement is: locks and delivery counts outlive the process. What limits acquisitions is
how many records are not done, not how far apart they lie: one slow record does not hold the
partition back.

Owner: a ShareGroup; pure but for the time it is given.
Invariants: a record has at most one lock; `in_flight_count <= locks_max` after each acquisition;
    there are at most two spans for each record in flight, and no deadline when nothing is locked; a
    record below `start_offset` is done and stays it.
Crash: its bytes (see `codec`) are written in the transaction of the request that changed it.
"""  # noqa: E501

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

from appliance.groups.share.offset_ranges import (
    ACKNOWLEDGED,
    Kind,
    OffsetRange,
    OffsetRanges,
    State,
)

LOCK_TICK_NS = 50_000_000
"""Locks last to the end of a tick: those of one member's requests, one after the other, are one
span, and few moments are to be looked at.
"""
DELIVERY_COUNT_MAX = 1 << 30
RUNS_MAX = 2_000
OUTCOMES = frozenset({"accept", "release", "reject", "renew", "unread"})


class Acquired(NamedTuple):
    """What a member was given: offsets `first` to `last`."""

    first: int
    last: int
    delivery_count: int
    is_dead: bool
    """Delivered as often as it may be: to be dead-lettered."""


class SharePartition:
    """See the module's docstring."""

    __slots__ = ("_available_from", "_deadlines", "_watched_ns", "spans")

    def __init__(self, spans: OffsetRanges) -> None:
        spans.merge_done()
        self.spans = spans
        self._available_from = spans.start
        """Nothing below is AVAILABLE."""
        self._deadlines: list[int] = []
        """A heap of the moments at which locks pass; some of them are not there any more."""
        self._watched_ns = 0
        """The moment that was put there last."""

    @classmethod
    def starting_at(cls, offset: int) -> SharePartition:
        """One that nothing was taken from yet."""
        return cls(OffsetRanges(offset))

    @property
    def start_offset(self) -> int:
        """Every record below is done."""
        return self.spans.start

    @property
    def next_offset(self) -> int:
        """No record from here on was acquired yet."""
        return self.spans.next

    def room(self, locks_max: int) -> int:
        """How many records more may come in flight."""
        return max(0, locks_max - self.spans.in_flight_count)

    def acquired_by(self, member: str) -> int:
        """How many records a member has."""
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
        """Lock up to `count_max` records, in up to `runs_max` runs, for a member: those that are
        available again first, then new ones below `end_offset`.
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
        """Carry out what a member says of records that it has acquired: accept, release, reject,
        renew or unread.

        Returns the runs of offsets that it has no lock on (any more); for those nothing is done. Of
        what is unread none is returned: the member has lost nothing.
        """
        if outcome == "unread":
            self._revoke_lease(member, first, last)
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

    def _revoke_lease(self, member: str, first: int, last: int) -> None:
        """The member's program was never given these records: their last delivery does not count.

        A lock that has passed may have become another member's. That one keeps it, and at least its
        own delivery is counted.
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
        """Those of locks that were given up before they passed, when no other is left."""
        if self._deadlines and not self.spans.acquired_count:
            self._deadlines.clear()
            self._watched_ns = 0

    def _free(self, span: OffsetRange) -> None:
        self.spans.put(span.first, span.last, State(Kind.AVAILABLE, span.state.delivery_count))
        self._available_from = min(self._available_from, span.first)

    # ---- what happens to locks -------------------------------------------------------------------

    def next_deadline_ns(self) -> int | None:
        """When to call `expire` next; None: nothing is locked."""
        return self._deadlines[0] if self._deadlines and self.spans.acquired_count else None

    def expire(self, now_ns: int) -> int:
        """Free the records whose locks have passed. Returns how many."""
        if not self._deadlines or self._deadlines[0] > now_ns:
            return 0
        while self._deadlines and self._deadlines[0] <= now_ns:
            heapq.heappop(self._deadlines)
        self._watched_ns = 0
        return self._free_where(lambda state: state.locked_until_ns <= now_ns)

    def release_member(self, member: str) -> int:
        """Free what a member has acquired: it is gone. Returns how many records."""
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
        """After a start every lock lasts as long as a new one: how long the process was away is not
        known.
        """
        until_ns = self._until_ns(now_ns, lock_ns)
        for span in self.spans:
            if span.state.kind is Kind.ACQUIRED:
                self.spans.put(span.first, span.last, span.state._replace(locked_until_ns=until_ns))
                self._watch(until_ns)

    # ---- what happens to the log -----------------------------------------------------------------

    def follow_log(self, beginning_offset: int, end_offset: int) -> bool:
        """The log begins and ends here now: what was removed from it is done, and what it lost in a
        crash was never there. Returns whether that changed something.
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
