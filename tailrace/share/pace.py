"""How many records a loop over a queue acquires at a time: as many as its program handles well
within their locks.

The first time it is one, and then up to twice as many each time, until they take about a quarter of
a lock, or SLICE_NS: what waits behind the record that is being handled is locked meanwhile, and
other consumers could have it.

Owner: one share consumer. Invariant: 1 <= `requested` <= its limit; what is wanted takes no longer
than a quarter of a lock at the
    slowest pace that was seen of late, but for a single record.
"""

from __future__ import annotations

SLICE_NS = 250_000_000
NS_PER_MS = 1_000_000
FORGETS = 0.75
"""What a pace that was slower than the last one counts for, each time."""


class Pace:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._requested = 0
        self._started_ns = 0
        self._given_count = 0
        self._record_ns = 0.0
        """About how long the program takes for a record."""

    def given(self, now_ns: int) -> None:
        """The program has a record, and will ask for another one."""
        if not self._given_count:
            self._started_ns = now_ns
        self._given_count += 1

    def requested(self, now_ns: int, lock_ms: int, limit: int) -> int:
        """How many records to acquire now, where the program has handled all that it was given."""
        if self._given_count:
            record_ns = (now_ns - self._started_ns) / self._given_count
            self._record_ns = max(record_ns, FORGETS * self._record_ns + (1 - FORGETS) * record_ns)
            self._given_count = 0
        slice_ns = min(SLICE_NS, lock_ms * NS_PER_MS // 4)
        in_time = limit if self._record_ns * limit <= slice_ns else int(slice_ns / self._record_ns)
        self._requested = max(1, min(limit, 2 * self._requested, in_time))
        return self._requested
