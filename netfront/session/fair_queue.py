"""Turns of sessions at what all of them share: a few requests of each are under way, the others of a session wait for those.

Owner: one front. Invariants: at most `at_once_max` requests of a session have a turn; those of a session have theirs in the order in which they came; whoever
    waits has others of his session before him that are under way.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Turns(Generic[Item]):
    """See the module's docstring. Who bounds what waits counts it."""

    def __init__(self, at_once_max: int) -> None:
        self._at_once_max = at_once_max
        self._under_way: dict[int, set[int]] = {}
        """Session word -> correlation ids."""
        self._waiting: dict[int, deque[tuple[int, Item]]] = {}

    def begin(self, word: int, correlation_id: int, item: Item) -> bool:
        """Whether the request has its turn now; else it is kept, and returned by `end`, `drop` or `forget`."""
        under_way = self._under_way.setdefault(word, set())
        if len(under_way) < self._at_once_max:
            under_way.add(correlation_id)
            return True
        self._waiting.setdefault(word, deque()).append((correlation_id, item))
        return False

    def end(self, word: int, correlation_id: int) -> Item | None:
        """The turn of a request is over, if it had one; returns what has its turn now."""
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
        """A request that waits is not to have its turn any more; None: it does not wait."""
        waiting = self._waiting.get(word, ())
        for place, (number, item) in enumerate(waiting):
            if number == correlation_id:
                del waiting[place]  # type: ignore[union-attr]
                if not waiting:
                    del self._waiting[word]
                return item
        return None

    def forget(self, word: int) -> list[Item]:
        """The session is gone; returns what waited."""
        self._under_way.pop(word, None)
        return [item for _, item in self._waiting.pop(word, ())]
