"""Fair queue: each session may have a few requests in progress, and its others wait for those.

Owner: one front.

Invariants:
- At most `at_once_max` requests of a session are in progress.
- A session's requests begin in the order of arrival.
- A waiting request has requests of its own session in progress before it.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Requests of all sessions at a shared service. The caller bounds the number that waits."""

    def __init__(self, at_once_max: int) -> None:
        self._at_once_max = at_once_max
        self._under_way: dict[int, set[int]] = {}
        """Correlation ids by session word."""
        self._waiting: dict[int, deque[tuple[int, Item]]] = {}

    def begin(self, word: int, correlation_id: int, item: Item) -> bool:
        """Start the request and return True, or queue it and return False. `end`, `drop` or
        `forget` return a queued request later.
        """
        under_way = self._under_way.setdefault(word, set())
        if len(under_way) < self._at_once_max:
            under_way.add(correlation_id)
            return True
        self._waiting.setdefault(word, deque()).append((correlation_id, item))
        return False

    def end(self, word: int, correlation_id: int) -> Item | None:
        """End a request that was in progress. Return the next one to begin, if any."""
        under_way = self._under_way.get(word)
        if under_way is None or correlation_id not in under_way:
            return None
        under_way.remove(correlation_id)
        waiting = self._waiting.get(word)
        if waiting is None:
            if not under_way:
                del self._under_way[word]
            return None
        following, item = waiting.popleft()
        if not waiting:
            del self._waiting[word]
        under_way.add(following)
        return item

    def drop(self, word: int, correlation_id: int) -> Item | None:
        """Remove a waiting request and return it, or None if it does not wait."""
        waiting = self._waiting.get(word, ())
        for place, (number, item) in enumerate(waiting):
            if number == correlation_id:
                del waiting[place]  # type: ignore[union-attr]
                if not waiting:
                    del self._waiting[word]
                return item
        return None

    def forget(self, word: int) -> list[Item]:
        """Remove a session's requests. Return those that waited."""
        self._under_way.pop(word, None)
        return [item for _, item in self._waiting.pop(word, ())]
