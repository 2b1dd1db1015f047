"""Barrier of the feeds of fronts and scheduler: they wait while a topic that clients know is
changing.

A process that was fed in the middle of a change would lack the topic, and refuse it as a deleted
one; or it would know the decision before the workers do.

Owner: the controller.
Invariants:
- A feed also waits for the topics whose creation a predecessor has decided: their creator may have
  been answered. It does not wait for other creations.
- A feed waits PATIENCE_NS at most: a failing disk carries nothing out. A change that has outlasted
  this holds no later feed up.
Crash: nothing is kept. A successor waits anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from appliance.catalog.catalog import Topic
from shm.memory.layout import Role

PATIENCE_NS = 5_000_000_000
"""Longest wait of a front or the scheduler for its feed."""
CREATED_VERSION = 1
"""The version of a topic that has never been changed."""


def is_known_to_clients(topic: Topic) -> bool:
    """True if a topic's creation was carried out, or if it was changed before that, as its creator
    may do after a timeout. A topic on its way out of the bin is not known yet.
    """
    is_created = topic.state == "active" or topic.version > CREATED_VERSION
    return is_created and topic.state != "deleting" and not topic.is_coming_back


class FeedBarrier:
    """Decides whether a process that has asked for its feed gets it now."""

    def __init__(self, topics: Mapping[str, Topic], lacks_memory: Callable[[Topic], bool]) -> None:
        """`topics`: by name, the controller's present ones. `lacks_memory`: true for a topic whose
        dedicated worker cannot be started, which may last.
        """
        self._topics = topics
        self._lacks_memory = lacks_memory
        self._inherited = {topic.topic_id for topic in topics.values() if topic.state == "changing"}
        self._waiting: dict[tuple[Role, int], tuple[int, int]] = {}
        """Process -> (its request, the time until which it waits)."""
        self._overdue: set[tuple[bytes, int]] = set()
        """(topic id, version) of changes that have outlasted PATIENCE_NS."""

    def is_open(self, process: tuple[Role, int], request: int, now_ns: int) -> bool:
        """True if a process may be fed. `request`: the number of its request, for which the
        patience is counted.
        """
        awaited = [topic for topic in self._topics.values() if self._is_awaited(topic)]
        if not awaited:
            self._waiting.pop(process, None)
            return True
        number, until_ns = self._waiting.get(process, (0, 0))
        if number != request:
            until_ns = now_ns + PATIENCE_NS
            self._waiting[process] = request, until_ns
        if now_ns < until_ns:
            return False
        self._overdue.update((topic.topic_id, topic.version) for topic in awaited)
        return True

    def _is_awaited(self, topic: Topic) -> bool:
        return (
            topic.state == "changing"
            and (topic.topic_id in self._inherited or is_known_to_clients(topic))
            and (topic.topic_id, topic.version) not in self._overdue
            and not self._lacks_memory(topic)
        )
