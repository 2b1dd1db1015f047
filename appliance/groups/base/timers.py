"""Deadlines by key, in a heap with lazy deletion.

Owner: the service that has made it.
Invariants: a key has at most one deadline. A deadline that was moved or removed is never due.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
_SPARE = 64


class Timers(Generic[Key]):
    """At most one deadline for each key."""

    def __init__(self) -> None:
        self._moments: dict[Key, int] = {}
        self._heap: list[tuple[int, Key]] = []

    def set(self, key: Key, moment_ns: int | None) -> None:
        """Set the deadline of a key; None removes it."""
        if moment_ns is None:
            self._moments.pop(key, None)
        elif self._moments.get(key) != moment_ns:
            self._moments[key] = moment_ns
            heapq.heappush(self._heap, (moment_ns, key))
            if len(self._heap) > 4 * len(self._moments) + _SPARE:
                self._heap = [(moment, key) for key, moment in self._moments.items()]
                heapq.heapify(self._heap)

    def due(self, now_ns: int) -> Iterator[Key]:
        """Remove and yield the keys that are due."""
        while self._drop_stale() and self._heap[0][0] <= now_ns:
            _, key = heapq.heappop(self._heap)
            del self._moments[key]
            yield key

    def next_ns(self) -> int | None:
        """The earliest deadline; None: there is none."""
        return self._heap[0][0] if self._drop_stale() else None

    def _drop_stale(self) -> bool:
        while self._heap and self._moments.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return bool(self._heap)
