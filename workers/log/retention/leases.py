"""Retention leases: offsets that readers keep from retention, with an expiry time.

The controller stores them (`appliance.control.offset_leases`) and sends them to a flusher before
FED. Retention waits for FED, so it never runs without them.

Owner: the flusher of one data directory. Expiry times are on its timing wheel.

Invariants:
- A lease belongs to a partition of one topic, not to a slot. The next topic in the slot has none of
  it.
- A lease that is sent twice counts once.

Crash: nothing is kept here. The controller sends them to a successor again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shm.runtime.timing_wheel import Timer, TimingWheel

Task = Callable[[], int]
LogKey = tuple[bytes, int]
"""(topic id, partition)"""


class RetentionLeases:
    """Leases of every partition of one data directory."""

    def __init__(self, wheel: TimingWheel[Task], on_end: Callable[[LogKey], int]) -> None:
        """`on_end` is called when a lease has expired or was released."""
        self._wheel = wheel
        self._on_end = on_end
        self._of: dict[LogKey, dict[str, tuple[int, Timer[Task]]]] = {}
        """(lowest offset to keep, expiry timer) by partition and lease."""

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def apply(self, requested: dict[str, Any], now_ns: int) -> None:
        """Apply one lease from the controller (see `LaneKind.LEASE`). 0 ms releases it."""
        key = (bytes.fromhex(requested["topic_id"]), int(requested["partition"]))
        name, ttl_ms = str(requested["lease"]), int(requested["ttl_ms"])
        was_leased = self._revoke_lease(key, name)
        if ttl_ms > 0:
            deadline_ns = now_ns + ttl_ms * 1_000_000
            timer = self._wheel.add(deadline_ns, lambda: self._end(key, name, deadline_ns))
            self._of.setdefault(key, {})[name] = int(requested["offset"]), timer
        elif was_leased:
            self._on_end(key)

    def lowest(self, key: LogKey) -> int | None:
        """Return the lowest leased offset, or None."""
        return min((offset for offset, _ in self._of.get(key, {}).values()), default=None)

    def forget(self, key: LogKey) -> None:
        """Remove the leases of a deleted partition."""
        for name in list(self._of.get(key, ())):
            self._revoke_lease(key, name)

    def _revoke_lease(self, key: LogKey, name: str) -> bool:
        leases = self._of.get(key, {})
        known = leases.pop(name, None)
        if known is not None:
            self._wheel.cancel(known[1])
        if not leases:
            self._of.pop(key, None)
        return known is not None

    def _end(self, key: LogKey, name: str, deadline_ns: int) -> int:
        """End a lease by its timer, unless it was replaced at the same moment."""
        known = self._of.get(key, {}).get(name)
        if known is None or known[1].deadline_ns != deadline_ns:
            return 0
        self._revoke_lease(key, name)
        return 1 + self._on_end(key)
