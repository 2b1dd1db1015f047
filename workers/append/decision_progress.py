"""Progress of decisions: which are carried out, so that the coordinator may forget them.

Progress is reported at once if somebody may wait for it, else after SETTLED_AFTER_NS with what has
come meanwhile.

A decision is carried out when each of its markers is as durable as its topic requires. A marker
that was refused by a disk, or cannot be written now, is missing. A decision with missing markers is
unfinished, and later ones go on.

Owner: one worker.

Invariants:
- A decision is reported after the verdicts of all markers of its transactions, also of those that a
  predecessor wrote.
- A marker is missing in a partition until its marker is durable there, or nothing of it is open
  there, or the partition is gone.

Crash: markers that are not settled are found in the ring. Decisions are fed again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from shm.memory.layout import Verdict
from shm.messages.transaction_messages import Outcome, Settled
from shm.queues.ring import RingWriter
from workers.append.open_transaction_index import Key

SETTLED_AFTER_NS = 10_000_000
"""Delay of a report that nobody waits for. An id has at most 32 decisions without one."""


class DecisionProgress:
    """Markers under way, missing ones, and the decisions that wait for them."""

    def __init__(self, ring: RingWriter, epoch_of: Callable[[int], int | None]) -> None:
        """`epoch_of`: slot -> the leader epoch in which its partition was taken up, None without
        one.
        """
        self._ring = ring
        self._epoch_of = epoch_of
        self._written: deque[tuple[int, int, Key, Outcome]] = deque()
        """Markers that are not settled, oldest first: descriptor number, slot, transaction."""
        self._written_count: Counter[Key] = Counter()
        self.missing: dict[int, dict[Key, Outcome]] = {}
        """Owed markers by slot."""
        self._missing_count: Counter[Key] = Counter()
        self.stale: set[int] = set()
        """Slots whose log has refused a marker and was not taken up since: what is open there is
        unknown.
        """
        self._applied: deque[tuple[int, Sequence[Key]]] = deque()
        """Decisions that wait for verdicts: ordinal, transactions."""
        self._unfinished: dict[int, Sequence[Key]] = {}
        self._ordinal = 0
        self._is_reported = True
        self._is_urgent = False
        """True if the next report does not wait."""
        self._urgent_ordinal = 0
        """The last decision that somebody may wait for."""
        self._due_ns: int | None = None
        self._has_resolved = False
        for number in range(ring.settled.load(), ring.next_number):
            found = ring.descriptor(number)
            if found.has_bytes and found.control_type:
                self.wrote(
                    number,
                    found.slot,
                    (found.producer_id, found.producer_epoch),
                    Outcome(found.control_type),
                )

    @property
    def is_waiting(self) -> bool:
        """True while a marker waits for its verdict."""
        return bool(self._written)

    def begin_feed(self) -> None:
        """Forget the decisions: a feed has all that are not carried out. Owed markers stay."""
        self._applied.clear()
        self._unfinished.clear()
        self._ordinal, self._is_reported = 0, True
        self._urgent_ordinal, self._is_urgent, self._due_ns = 0, False, None

    def end_feed(self) -> None:
        """Report the progress in any case: the coordinator learns that its feed was read."""
        self._is_reported, self._is_urgent = False, True

    def wrote(self, number: int, slot: int, key: Key, outcome: Outcome) -> None:
        """Note a marker in the ring."""
        self._written.append((number, slot, key, outcome))
        self._written_count[key] = self._written_count.get(key, 0) + 1  # no call of __missing__

    def add_missing(self, slot: int, key: Key, outcome: Outcome) -> None:
        """Note a marker that cannot be written now."""
        missing = self.missing.setdefault(slot, {})
        if key not in missing:
            self._missing_count[key] += 1
        missing[key] = outcome

    def resolve(self, slot: int, key: Key) -> None:
        """Note that a marker is not missing any more."""
        missing = self.missing.get(slot)
        if missing is not None and missing.pop(key, None) is not None:
            _decrement(self._missing_count, key)
            self._has_resolved = True
            if not missing:
                del self.missing[slot]

    def forget(self, slot: int) -> None:
        """Note that a partition is gone."""
        self.stale.discard(slot)
        for key in list(self.missing.get(slot, ())):
            self.resolve(slot, key)

    def apply(self, ordinal: int, keys: Sequence[Key], *, is_urgent: bool) -> None:
        """Note a decision whose markers are written or missing. `is_urgent`: a request waits for
        it, or for earlier ones of its transactional id.
        """
        if is_urgent:
            self._urgent_ordinal = max(self._urgent_ordinal, ordinal)
        if not keys and self._applied and not self._applied[-1][1]:
            ordinal = max(ordinal, self._applied.pop()[0])  # a feed may have thousands
        self._applied.append((ordinal, keys))

    def advance(self) -> None:
        """Read the verdicts of settled markers. Call it in each step before the ring is written:
        settled descriptors are used again.
        """
        settled = self._ring.settled.load()  # SYNC POINT: settled (verdicts before it)
        while self._written and self._written[0][0] < settled:
            number, slot, key, outcome = self._written.popleft()
            _decrement(self._written_count, key)
            self._has_resolved = True
            if self._ring.outcome(number).verdict is Verdict.FAILED:
                if self._ring.descriptor(number).leader_epoch == self._epoch_of(slot):
                    self.stale.add(slot)  # else it was taken up before the verdict was read
                self.add_missing(slot, key, outcome)
        while self._applied:
            ordinal, keys = self._applied[0]
            if any(key in self._written_count for key in keys):
                break
            self._applied.popleft()
            if any(key in self._missing_count for key in keys):
                self._unfinished[ordinal] = keys
            if self._ordinal < self._urgent_ordinal:
                self._is_urgent = True
            self._ordinal = max(self._ordinal, ordinal)
            self._is_reported = False
        if self._has_resolved:
            self._has_resolved = False
            self._finish()

    def _finish(self) -> None:
        finished = [
            ordinal
            for ordinal, keys in self._unfinished.items()
            if not any(key in self._missing_count or key in self._written_count for key in keys)
        ]
        for ordinal in finished:
            del self._unfinished[ordinal]
            self._is_reported, self._is_urgent = False, True

    @property
    def due_ns(self) -> int | None:
        """Time of the next report; None: there is none, or `is_due` was not asked yet."""
        return self._due_ns

    def is_due(self, now_ns: int) -> bool:
        """True if the progress has changed and is to be reported now."""
        if self._is_reported:
            return False
        if self._due_ns is None:
            self._due_ns = now_ns + SETTLED_AFTER_NS
        return self._is_urgent or bool(self._unfinished) or now_ns >= self._due_ns

    def report(self) -> Settled:
        """Return the progress."""
        self._is_reported, self._is_urgent, self._due_ns = True, False, None
        return Settled(self._ordinal, tuple(sorted(self._unfinished)))


def _decrement(counts: Counter[Key], key: Key) -> None:
    if counts[key] > 1:
        counts[key] -= 1
    else:
        del counts[key]
