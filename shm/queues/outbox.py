"""Outbox: the lane to another process, its doorbell, and the items that wait for lane space.

Owner: the writing process.

Invariants:
- Items are written in the order in which they were put.
- A flush rings at most once, for all that it published.

Crash: waiting items are lost with their process. Items in the lane stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneWriter

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Queue in front of a lane. `write` copies one item into the lane and returns False if it
    cannot do so yet.
    """

    __slots__ = ("_write", "bell", "lane", "waiting")

    def __init__(self, lane: LaneWriter, bell: Doorbell, write: Callable[[Item], bool]) -> None:
        self.lane = lane
        self.bell = bell
        self.waiting: deque[Item] = deque()
        """Items not in the lane yet, oldest first. The caller bounds their number."""
        self._write = write

    def put(self, item: Item) -> None:
        """Write an item now, or queue it behind waiting ones. The reader sees it after `flush`."""
        if self.waiting or not self._write(item):
            self.waiting.append(item)

    def flush(self) -> int:
        """Write waiting items while there is space, commit, and ring.

        Return how many were written.
        """
        count = 0
        waiting = self.waiting
        while waiting and self._write(waiting[0]):
            waiting.popleft()
            count += 1
        if self.lane.commit():
            self.bell.ring()
        return count

    def is_empty(self) -> bool:
        """True if no item waits and the reader has consumed the whole lane."""
        return not self.waiting and self.lane.is_empty()
