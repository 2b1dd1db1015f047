"""Where a topic's partitions are served: the front's copy of the catalog, fed by the coordinator.

Owner: one front. Invariants: a route is only there when the partition is open for it; older versions never replace newer ones.
"""

from __future__ import annotations

import base64
from typing import Any

from shm.catalog_messages import Assignment


class Routing:
    """Topics by name, partitions by (topic id, partition)."""

    def __init__(self) -> None:
        self._routes: dict[tuple[bytes, int], Assignment] = {}
        self._topics: dict[str, bytes] = {}
        """Delay logs are no topics: they are found by id only."""
        self.changes = 0
        """How often a route has come, changed or gone: what was derived from them holds while this stays."""
        self._names: list[str] | None = []
        """Of all topics, sorted; None: to be sorted anew."""

    def apply(self, assignment: Assignment) -> None:
        """Take in one partition's news."""
        key = (assignment.topic_id, assignment.partition)
        known = self._routes.get(key)
        if known is not None and known.version > assignment.version:
            return
        self.changes += 1
        if assignment.dropped:
            self._routes.pop(key, None)
            if self._topics.get(assignment.topic) == assignment.topic_id:
                del self._topics[assignment.topic]
                self._names = None
            return
        self._routes[key] = assignment
        if not assignment.delay_of:
            if assignment.topic not in self._topics:
                self._names = None
            self._topics[assignment.topic] = assignment.topic_id

    def find(self, topic_id: bytes, partition: int) -> Assignment | None:
        """Where a partition is served; None: nowhere (yet)."""
        return self._routes.get((topic_id, partition))

    def knows(self, topic_id: bytes) -> bool:
        """Whether there is such a topic, or delay log."""
        return (topic_id, 0) in self._routes

    def find_by_name(self, topic: str, partition: int) -> Assignment | None:
        """`find` for a topic by name; delay logs have none."""
        topic_id = self._topics.get(topic)
        return None if topic_id is None else self._routes.get((topic_id, partition))

    def partition_count(self, topic: str) -> int:
        """0 when there is no such topic."""
        first = self.find_by_name(topic, 0)
        return 0 if first is None else first.partition_count

    def names(self) -> list[str]:
        """Of all topics, ascending; another list after each change."""
        if self._names is None:
            self._names = sorted(self._topics)
        return self._names

    def describe(self, topic: str) -> dict[str, Any] | None:
        """What a client needs to know of a topic, for JSON; None when there is none."""
        first = self.find_by_name(topic, 0)
        if first is None:
            return None
        routes = [self._routes.get((first.topic_id, p)) for p in range(first.partition_count)]
        delay_log = self._routes.get((bytes.fromhex(first.delay_log), 0)) if first.delay_log else None
        return {
            "name": topic,
            "delay_log": None if delay_log is None else _schema_of(delay_log),
            "topic_id": first.topic_id.hex(),
            "version": first.version,
            "typed": first.typed,
            "schema_id": first.schema_id,
            "schema": base64.b64encode(first.schema).decode("ascii"),
            "settings": first.settings,
            "created_us": first.created_us,
            "partitions": [_partition_of(r) for r in routes if r is not None],
            **({"slot_map_version": max(len(r.slot_counts) for r in routes if r is not None)} if first.slot_counts else {}),
        }


def _partition_of(route: Assignment) -> dict[str, Any]:
    if not route.slot_counts:
        return {"front": route.front}
    return {"front": route.front, "slots": route.slots, "hand_over": {str(source): offset for source, offset in route.hand_over}}


def _schema_of(delay_log: Assignment) -> dict[str, Any]:
    """What a producer needs to know of a topic's delay log, beside the topic itself."""
    return {
        "topic_id": delay_log.topic_id.hex(),
        "schema_id": delay_log.schema_id,
        "schema": base64.b64encode(delay_log.schema).decode("ascii"),
    }
