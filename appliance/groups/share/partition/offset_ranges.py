"""The in-flight offsets of a share partition, as a run-length list of states.

The state is stored per span, not per record. A member that acquires 500 records and accepts them
one by one costs a handful of changes to a short list.

Owner: one SharePartition.
Invariants (`_check_invariants` repeats them):
- Spans follow each other without a gap, from the start offset to the first offset that was never
  acquired.
- No two neighbours have the same state (kind, delivery count, member and lock).
- The first span is not done.
- There are at most two spans for each record in flight, since all done records share one state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from enum import IntEnum, unique
from itertools import pairwise
from typing import NamedTuple


@unique
class Kind(IntEnum):
    """The state of a record (KIP-932's RecordState); the numbers are stored."""

    AVAILABLE = 0
    """Released, or its lock has expired: another member may acquire it."""
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    ARCHIVED = 3
    """Rejected, or removed from the log, as earlier versions stored it. Nothing distinguishes it
    from ACKNOWLEDGED, to which `merge_done` converts it.
    """


class State(NamedTuple):
    """The common state of a span's records."""

    kind: Kind
    delivery_count: int
    """Number of deliveries; 0 once the record is done."""
    member: str = ""
    """Id of the member that has acquired it."""
    locked_until_ns: int = 0


ACKNOWLEDGED = State(Kind.ACKNOWLEDGED, 0)
ARCHIVED = State(Kind.ARCHIVED, 0)
_DONE = frozenset({Kind.ACKNOWLEDGED, Kind.ARCHIVED})


class OffsetRange(NamedTuple):
    """Offsets `first` to `last`, both included."""

    first: int
    last: int
    state: State

    @property
    def size(self) -> int:
        """Number of offsets."""
        return self.last - self.first + 1


class OffsetRanges:
    """The spans of a partition. All offsets below `start` are done; `next` and those above it were
    never acquired.
    """

    __slots__ = ("_firsts", "_states", "counts", "next", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.next = start
        self._firsts: list[int] = []
        self._states: list[State] = []
        self.counts = [0, 0, 0, 0]
        """Number of offsets of each kind."""

    def __len__(self) -> int:
        return len(self._firsts)

    def __iter__(self) -> Iterator[OffsetRange]:
        return self.between(self.start, self.next - 1)

    @property
    def available_count(self) -> int:
        """Number of offsets that were acquired and are free again."""
        return self.counts[Kind.AVAILABLE]

    @property
    def acquired_count(self) -> int:
        """Number of offsets under a lock."""
        return self.counts[Kind.ACQUIRED]

    @property
    def in_flight_count(self) -> int:
        """Number of offsets that were acquired and are not done."""
        return self.counts[Kind.AVAILABLE] + self.counts[Kind.ACQUIRED]

    def between(self, first: int, last: int) -> Iterator[OffsetRange]:
        """A snapshot of the spans, cut to `first` to `last`. `put` may be called during the
        iteration.
        """
        first, last = max(first, self.start), min(last, self.next - 1)
        if first > last:
            return iter(())
        at, end = bisect_right(self._firsts, first) - 1, bisect_right(self._firsts, last)
        edges = [first, *self._firsts[at + 1 : end], last + 1]
        return iter(
            [
                OffsetRange(edges[i], edges[i + 1] - 1, state)
                for i, state in enumerate(self._states[at:end])
            ]
        )

    def append(self, count: int, state: State) -> OffsetRange:
        """Add the next `count` offsets in this state."""
        span = OffsetRange(self.next, self.next + count - 1, state)
        self.next += count
        self.counts[state.kind] += count
        if not self._states or self._states[-1] != state:
            self._firsts.append(span.first)
            self._states.append(state)
        return span

    def put(self, first: int, last: int, state: State) -> None:
        """Set the state of the in-flight offsets `first` to `last`. Done offsets at the front are
        dropped.
        """
        assert self.start <= first <= last < self.next
        firsts, states, counts = self._firsts, self._states, self.counts
        at, end = bisect_right(firsts, first) - 1, bisect_right(firsts, last)
        for span in self.between(first, last):
            counts[span.state.kind] -= span.size
        counts[state.kind] += last - first + 1
        new_firsts, new_states = [first], [state]
        if firsts[at] < first:
            new_firsts.insert(0, firsts[at])
            new_states.insert(0, states[at])
        behind = firsts[end] if end < len(firsts) else self.next
        if last + 1 < behind:
            new_firsts.append(last + 1)
            new_states.append(states[end - 1])
        elif end < len(firsts):  # the following span may have the same state now
            new_firsts.append(firsts[end])
            new_states.append(states[end])
            end += 1
        if at:
            at -= 1
            new_firsts.insert(0, firsts[at])
            new_states.insert(0, states[at])
        kept = [i for i in range(len(new_states)) if not i or new_states[i] != new_states[i - 1]]
        firsts[at:end] = [new_firsts[i] for i in kept]
        states[at:end] = [new_states[i] for i in kept]
        if states[0].kind in _DONE:
            self._forget_done()

    def change(self, first: int, last: int, new_state: Callable[[State], State | None]) -> int:
        """Replace the state of each span from `first` to `last` by `new_state(state)`, None for no
        change. Returns the number of changed offsets.
        """
        changed = 0
        for span in self.between(first, last):
            state = new_state(span.state)
            if state is not None and state != span.state:
                self.put(span.first, span.last, state)
                changed += span.size
        return changed

    def merge_done(self) -> None:
        """Convert ARCHIVED to ACKNOWLEDGED, so that two neighbours are never both done."""
        if self.counts[Kind.ARCHIVED]:
            self.change(
                self.start, self.next - 1, lambda state: ACKNOWLEDGED if state == ARCHIVED else None
            )

    def drop_below(self, offset: int) -> None:
        """Mark all offsets below `offset` as done."""
        if offset <= self.start:
            return
        if offset >= self.next:
            self.start = self.next = offset
            self._firsts.clear()
            self._states.clear()
            self.counts = [0, 0, 0, 0]
            return
        self.put(self.start, offset - 1, ACKNOWLEDGED)

    def cut_off(self, offset: int) -> None:
        """Remove `offset` and those above it, as if they had never been acquired."""
        if offset <= self.start:
            self.drop_below(self.next)
            self.start = self.next = offset
        elif offset < self.next:
            for span in self.between(offset, self.next - 1):
                self.counts[span.state.kind] -= span.size
            end = bisect_right(self._firsts, offset - 1)
            del self._firsts[end:]
            del self._states[end:]
            self.next = offset

    def _forget_done(self) -> None:
        done = 0
        while done < len(self._states) and self._states[done].kind in _DONE:
            done += 1
        self.start = self._firsts[done] if done < len(self._firsts) else self.next
        edges = [*self._firsts[:done], self.start]
        for i in range(done):
            self.counts[self._states[i].kind] -= edges[i + 1] - edges[i]
        del self._firsts[:done]
        del self._states[:done]

    def _check_invariants(self) -> None:
        """Check the invariants, for tests."""
        spans = list(self)
        assert len(spans) == len(self._firsts) == len(self._states)
        at = self.start
        counts = [0, 0, 0, 0]
        for span in spans:
            assert span.first == at
            assert span.size > 0
            counts[span.state.kind] += span.size
            at = span.last + 1
        assert at == self.next
        assert counts == self.counts
        assert all(one.state != other.state for one, other in pairwise(spans))
        assert not spans or spans[0].state.kind not in _DONE
