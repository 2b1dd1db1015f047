"""Moments at which something is due, one for each key; the next is known without looking at all of
them.

Owner: ShareService. Invariants: a key has at most one moment; what was moved or taken away before it
    came is not due.
"""  # noqa: E501

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
_SPARE = 64


class Timers(Generic[Key]):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._moments: dict[Key, int] = {}
        self._heap: list[tuple[int, Key]] = []

    def set(self, key: Key, moment_ns: int | None) -> None:
        """`key` is due then; None: never."""
        if moment_ns is None:
            self._moments.pop(key, None)
        elif self._moments.get(key) != moment_ns:
            self._moments[key] = moment_ns
            heapq.heappush(self._heap, (moment_ns, key))
            if len(self._heap) > 4 * len(self._moments) + _SPARE:
                self._heap = [(moment, key) for key, moment in self._moments.items()]
                heapq.heapify(self._heap)

    def due(self, now_ns: int) -> Iterator[Key]:
        """Take the keys that are due, one by one."""
        while self._drop_stale() and self._heap[0][0] <= now_ns:
            _, key = heapq.heappop(self._heap)
            del self._moments[key]
            yield key

    def next_ns(self) -> int | None:
        """The first moment; None: nothing will be due."""
        return self._heap[0][0] if self._drop_stale() else None

    def _drop_stale(self) -> bool:
        while self._heap and self._moments.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return bool(self._heap)
