"""The way out to one other process: its lane, the bell that it waits on, and what does not fit the lane yet.

Owner: the writing process.
Invariants: items go into the lane in the order in which they were put; none passes one that waits; a flush rings at most once, for all that it published.
Crash: what waits here is gone with its process; what the lane has, stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from shm.doorbell import Doorbell
from shm.lane import LaneWriter

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """See the module's docstring. `write` copies one item into the lane, and returns False where it cannot yet: for want of room, or because it may not."""

    __slots__ = ("_write", "bell", "lane", "waiting")

    def __init__(self, lane: LaneWriter, bell: Doorbell, write: Callable[[Item], bool]) -> None:
        self.lane = lane
        self.bell = bell
        self.waiting: deque[Item] = deque()
        """What is not in the lane yet, oldest first; who bounds it counts it."""
        self._write = write

    def put(self, item: Item) -> None:
        """Write it now, or keep it behind what waits. Visible to the reader after `flush`."""
        if self.waiting or not self._write(item):
            self.waiting.append(item)

    def flush(self) -> int:
        """Write what waits as far as it goes, publish, ring; returns how many items that were waiting went."""
        count = 0
        waiting = self.waiting
        while waiting and self._write(waiting[0]):
            waiting.popleft()
            count += 1
        if self.lane.publish():
            self.bell.ring()
        return count

    def is_empty(self) -> bool:
        """Whether nothing waits here and the reader has consumed all of the lane."""
        return not self.waiting and self.lane.is_empty()
