"""Pace of a loop over a share consumer: limits how many records it acquires at a time.

The first time it acquires one record. Then the number doubles up to what the program processes in a
quarter of a lock duration, or in SLICE_NS. Other consumers cannot have the records that wait behind
the current one.

Owner: one share consumer.

Invariants:
- 1 <= `requested` <= its limit.
- At the slowest recent pace, more than one requested record takes at most a quarter of a lock
  duration.
"""

from __future__ import annotations

SLICE_NS = 250_000_000
NS_PER_MS = 1_000_000
DECAY = 0.75
"""The weight of an older, slower pace at each update."""


class Pace:
    """The pace of one loop."""

    def __init__(self) -> None:
        self._requested = 0
        self._started_ns = 0
        self._delivered_count = 0
        self._record_ns = 0.0
        """The estimated processing time of a record."""

    def on_delivered(self, now_ns: int) -> None:
        """Note that a record was delivered to the loop."""
        if not self._delivered_count:
            self._started_ns = now_ns
        self._delivered_count += 1

    def requested(self, now_ns: int, lock_ms: int, limit: int) -> int:
        """The number of records to acquire now. The program has processed all records that were
        given.
        """
        if self._delivered_count:
            record_ns = (now_ns - self._started_ns) / self._delivered_count
            self._record_ns = max(record_ns, DECAY * self._record_ns + (1 - DECAY) * record_ns)
            self._delivered_count = 0
        slice_ns = min(SLICE_NS, lock_ms * NS_PER_MS // 4)
        in_time = limit if self._record_ns * limit <= slice_ns else int(slice_ns / self._record_ns)
        self._requested = max(1, min(limit, 2 * self._requested, in_time))
        return self._requested
