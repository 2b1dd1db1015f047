"""Who is rung when a flusher has settled batches: the fronts that wait for that, and sometimes all of them.

A front waits for it while clients wait for acks=all, or fetches for a watermark. With acks=1 alone nobody does: the front was rung by the worker, and a
second ring would cost it a step that finds nothing (one of three for each ack). Its cursor in the ring follows when it next walks for another reason.

Owner: each front stores its SETTLED_UNWANTED word (0, as a fresh slot has it: ring); flushers read it.
Invariants: what settled while a front waited is walked over by it without another ring. Proof: the front stores "wanted" (F1), fences, and looks at `settled`
    (F2) before it sleeps; the flusher stores `settled` (W1), fences, and looks at the word (W2). Of two threads that each store, fence and load, at least one
    sees what the other has stored: either W2 sees F1 and the front is rung, or F2 sees W1 and the front does not sleep. Without the fences a load may
    overtake the store before it, and both miss (`tests/shm/test_cell.py` is the litmus). What says "unwanted" needs no fence: a ring too many is no harm.
    A front's cursor stays behind `settled` by less than ALL_EVERY and a group; and in a ring that is crowded all are rung, so a worker that waits for room
    does not wait for a front that sleeps (see `Ring.is_crowded`).
Crash: a successor of a front stores "wanted" before it takes anything; one of a worker or flusher rings everybody (`ProcessContext.report_ready`).
"""

from __future__ import annotations

from collections.abc import Sequence

from shm.cell import Cell, full_fence
from shm.doorbell import Doorbell
from shm.ring import Ring

ALL_EVERY = 1024
"""After so many descriptors all fronts are rung: one that is behind walks over what it missed in one step."""


class SettledNews:
    """The flusher's side."""

    def __init__(self, fronts: Sequence[tuple[Doorbell, Cell]]) -> None:
        """Each front's bell, and its SETTLED_UNWANTED word."""
        self._fronts = fronts

    def announce(self, ring: Ring, before: int, settled: int) -> bool:
        """`settled` has moved on from `before`, and was stored. Returns whether the ring is crowded."""
        full_fence()
        is_crowded = ring.is_crowded()
        rings_all = is_crowded or before // ALL_EVERY != settled // ALL_EVERY
        for bell, unwanted in self._fronts:
            if rings_all or not unwanted.load():  # SYNC POINT: settled unwanted (fenced after settled)
                bell.ring()
        return is_crowded


class SettledInterest:
    """The front's side."""

    def __init__(self, unwanted: Cell) -> None:
        self._unwanted = unwanted
        self._is_wanted = True
        unwanted.store(0)

    def show(self, is_wanted: bool) -> bool:
        """Before sleeping. Returns whether it was not wanted before: then look once more at what may have settled."""
        if is_wanted is self._is_wanted:
            return False
        self._is_wanted = is_wanted
        self._unwanted.store(int(not is_wanted))
        if is_wanted:
            full_fence()  # SYNC POINT: settled unwanted (before settled is looked at again)
        return is_wanted
