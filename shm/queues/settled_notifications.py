"""Settled notifications: which fronts a flusher rings after it has settled batches.

A front needs them while clients wait for acks=all, or fetches for a watermark. With acks=1 alone
the worker has rung the front already, and a second ring would cost a step without work. The front's
cursor then advances at its next walk.

Owner: each front stores its NOTIFICATIONS_OFF word (initially 0: ring). Flushers read it.

Invariants:
- A front that waits walks over everything that settled, without another ring.
- A front's cursor is behind `settled` by less than ALL_EVERY and one group.
- In a crowded ring all fronts are rung, so that a worker waiting for space does not depend on a
  sleeping front (see `Ring.is_crowded`).

Proof of the first:
- The front stores "wanted" (F1), fences, and loads `settled` (F2) before it sleeps.
- The flusher stores `settled` (W1), fences, and loads the word (W2).
- Of two threads that each store, fence and load, at least one sees the other's store. Either W2
  sees F1 and the front is rung, or F2 sees W1 and the front does not sleep.
- Without the fences a load may overtake the store before it, and both miss (litmus:
  `tests/shm/memory/test_atomic_word.py`).
- Storing "unwanted" needs no fence: an extra ring is harmless.

Crash: a front's successor stores "wanted" before it reads anything. A worker's or flusher's
successor rings every process (`ProcessContext.report_ready`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shm.memory.atomic_word import AtomicCounter, full_fence
from shm.queues.doorbell import Doorbell
from shm.queues.ring import Ring

ALL_EVERY = 1024
"""Interval, in descriptors, at which all fronts are rung.

A front that is behind catches up in one step.
"""


class SettledNotifications:
    """Flusher's side."""

    def __init__(self, fronts: Sequence[tuple[Doorbell, AtomicCounter]]) -> None:
        """`fronts` has each front's doorbell and NOTIFICATIONS_OFF word."""
        self._fronts = fronts

    def announce(self, ring: Ring, before: int, settled: int) -> bool:
        """Ring the fronts after `settled` was stored. Return True if the ring is crowded."""
        full_fence()
        is_crowded = ring.is_crowded()
        rings_all = is_crowded or before // ALL_EVERY != settled // ALL_EVERY
        for bell, unwanted in self._fronts:
            # SYNC POINT: settled unwanted (fenced after settled)
            if rings_all or not unwanted.load():
                bell.ring()
        return is_crowded


class SettledInterest:
    """Front's side."""

    def __init__(self, unwanted: AtomicCounter) -> None:
        self._disabled = unwanted
        self._is_enabled = True
        unwanted.store(0)

    def show(self, is_enabled: bool) -> bool:
        """Store before sleeping whether notifications are wanted. Return True if they were not
        before: then check once more for settled batches.
        """
        if is_enabled is self._is_enabled:
            return False
        self._is_enabled = is_enabled
        self._disabled.store(int(not is_enabled))
        if is_enabled:
            full_fence()  # SYNC POINT: settled unwanted (before settled is loaded again)
        return is_enabled
