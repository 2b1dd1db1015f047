"""The order of sends to one topic while one of them waits."""

from __future__ import annotations

import asyncio
import heapq

WOKEN_MIN, WOKEN_MAX = 64, 1 << 20


class SendGate:
    """Lets callers send in the order of their arrival.

    Callers are numbered as they arrive. A caller that waits for room or metadata holds the gate,
    and the others queue. When it has sent, many of them are woken at once, in order, so that their
    records share batches. If one has to wait, it holds the gate, and those that were woken after it
    queue again. The number that is woken at once follows what there was room for: twice as many
    when all could send. Else each record of 10,000 tasks would wake all the others for nothing.

    Owner: the loop's thread.

    Invariants:
    - At most one caller holds the gate.
    - A caller sends after every caller that arrived before it has sent, failed or been cancelled.
    """

    __slots__ = (
        "_is_locked", "_last_arrival", "_waiters", "_wake_count", "_woken", "user_count"
    )  # fmt: skip

    def __init__(self) -> None:
        self._is_locked = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        """Heap of the waiting callers, by arrival number."""
        self._woken: set[int] = set()
        """Arrival numbers of callers that were woken and have not run yet."""
        self._wake_count = WOKEN_MIN
        """Callers that are woken at once."""
        self._last_arrival = 0
        self.user_count = 0
        """Callers inside. The gate is dropped when there are none."""

    async def acquire(self) -> None:
        """Wait for the turn, then hold the gate. Cancelled, it holds nothing."""
        arrival = self._last_arrival = self._last_arrival + 1
        must_wait = self._is_locked or bool(self._woken) or bool(self._waiters)
        while must_wait:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (arrival, waiter)
            heapq.heappush(self._waiters, entry)
            try:
                await waiter
            except BaseException:
                if entry in self._waiters:
                    self._waiters.remove(entry)
                    heapq.heapify(self._waiters)
                self._woken.discard(arrival)
                self._wake()
                raise
            self._woken.discard(arrival)
            must_wait = self._is_locked
            if must_wait:
                self._wake_count = WOKEN_MIN
        self._is_locked = True

    def release(self) -> None:
        """Release the gate, and wake the waiting callers."""
        self._is_locked = False
        self._wake()

    def _wake(self) -> None:
        if self._is_locked or self._woken:
            return  # the holder, or the last caller that was woken, wakes the rest
        while self._waiters and len(self._woken) < self._wake_count:
            arrival, waiter = heapq.heappop(self._waiters)
            if not waiter.done():
                self._woken.add(arrival)
                waiter.set_result(None)
        if len(self._woken) == self._wake_count:
            self._wake_count = min(2 * self._wake_count, WOKEN_MAX)
