"""Leases: what readers have asked to be kept from retention, and until when.

The coordinator keeps them on the disk (`appliance.leases`) and sends them to a flusher with everything else that it is fed, before FED: so retention, which
waits for that, never runs without them.

Owner: the flusher of one data directory; ends are on its timing wheel.
Invariants: a lease belongs to a partition of one topic, not to a slot, so the next topic in the slot has none of it; one that is sent twice is one.
Crash: nothing is kept here; the coordinator sends them to a successor again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workers.timing_wheel import Timer, TimingWheel

Task = Callable[[], int]
LogKey = tuple[bytes, int]
"""(topic id, partition)"""


class Leases:
    """Of every partition of one data directory."""

    def __init__(self, wheel: TimingWheel[Task], on_end: Callable[[LogKey], int]) -> None:
        """`on_end`: called when a lease has ended, by time or given back."""
        self._wheel = wheel
        self._on_end = on_end
        self._of: dict[LogKey, dict[str, tuple[int, Timer[Task]]]] = {}
        """Partition -> lease -> (lowest offset to keep, its end)."""

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def tell(self, wanted: dict[str, Any], now_ns: int) -> None:
        """One lease as the coordinator sends it (see `LaneKind.LEASE`); 0 ms: it was given back."""
        key = (bytes.fromhex(wanted["topic_id"]), int(wanted["partition"]))
        name, ttl_ms = str(wanted["lease"]), int(wanted["ttl_ms"])
        was_held = self._take_back(key, name)
        if ttl_ms > 0:
            deadline_ns = now_ns + ttl_ms * 1_000_000
            timer = self._wheel.add(deadline_ns, lambda: self._end(key, name, deadline_ns))
            self._of.setdefault(key, {})[name] = int(wanted["offset"]), timer
        elif was_held:
            self._on_end(key)

    def lowest(self, key: LogKey) -> int | None:
        """The lowest offset that a lease keeps; None: there is no lease."""
        return min((offset for offset, _ in self._of.get(key, {}).values()), default=None)

    def forget(self, key: LogKey) -> None:
        """The partition was deleted."""
        for name in list(self._of.get(key, ())):
            self._take_back(key, name)

    def _take_back(self, key: LogKey, name: str) -> bool:
        held = self._of.get(key, {})
        known = held.pop(name, None)
        if known is not None:
            self._wheel.cancel(known[1])
        if not held:
            self._of.pop(key, None)
        return known is not None

    def _end(self, key: LogKey, name: str, deadline_ns: int) -> int:
        """The timer's task; another may have come in its place at the same moment."""
        known = self._of.get(key, {}).get(name)
        if known is None or known[1].deadline_ns != deadline_ns:
            return 0
        self._take_back(key, name)
        return 1 + self._on_end(key)
