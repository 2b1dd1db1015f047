"""Partition routes of a front: its copy of the catalog, fed by the controller.

Owner: one front.

Invariants:
- A route exists only while its partition is open.
- An older version never replaces a newer one.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from shm.messages.lane_messages import Assignment

if TYPE_CHECKING:
    from shm.rights.authorizer import Principal


class PartitionRoutes:
    """Routes by (topic id, partition), and topic ids by name."""

    def __init__(self) -> None:
        self._routes: dict[tuple[bytes, int], Assignment] = {}
        self._topics: dict[str, bytes] = {}
        """Topic ids by name. Delay logs are not in it: they are found by id only."""
        self.changes = 0
        """Number of changes to the routes.

        Values derived from routes are valid while it stays the same.
        """
        self._names: list[str] | None = []
        """Names of all topics, sorted. None after a change."""

    def apply(self, assignment: Assignment) -> None:
        """Apply the assignment of one partition."""
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
        """Return the route of a partition, or None if it has none (yet)."""
        return self._routes.get((topic_id, partition))

    def knows(self, topic_id: bytes) -> bool:
        """True if the topic or delay log has a route."""
        return (topic_id, 0) in self._routes

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of a topic by its id. For a delay log it is the name of its topic."""
        route = self._routes.get((topic_id, 0))
        if route is not None and route.delay_of:
            route = self._routes.get((bytes.fromhex(route.delay_of), 0))
        return None if route is None else route.topic

    def topic_name_of_hex(self, topic_id: str) -> str | None:
        """`topic_name` of an id in hexadecimal, as a client writes it."""
        try:
            return self.topic_name(bytes.fromhex(topic_id))
        except ValueError:
            return None

    def refuses_read(self, principal: Principal | None, topic_id: bytes) -> bool:
        """True if the principal may not read the topic. None is no principal: it may. The delayed
        records of a topic need `describe delay` too.
        """
        if principal is None:
            return False
        name = self.topic_name(topic_id) or ""
        if not principal.may("read", "topic", name):
            return True
        route = self._routes.get((topic_id, 0))
        return (
            route is not None
            and bool(route.delay_of)
            and not principal.may("describe", "delay", name)
        )

    def find_by_name(self, topic: str, partition: int) -> Assignment | None:
        """`find` for a topic by name; delay logs have none."""
        topic_id = self._topics.get(topic)
        return None if topic_id is None else self._routes.get((topic_id, partition))

    def name_of(self, topic_id: bytes) -> str:
        """The name of a topic, or of the topic whose delay log it is; "" if there is none."""
        route = self._routes.get((topic_id, 0))
        if route is None:
            return ""
        if route.delay_of:
            return self.name_of(bytes.fromhex(route.delay_of))
        return route.topic

    def partition_count(self, topic: str) -> int:
        """Return the topic's partition count, 0 if there is no such topic."""
        first = self.find_by_name(topic, 0)
        return 0 if first is None else first.partition_count

    def names(self) -> list[str]:
        """Return the names of all topics, ascending. Each change makes a new list."""
        if self._names is None:
            self._names = sorted(self._topics)
        return self._names

    def describe(self, topic: str, older_schema_bytes: int = 1 << 62) -> dict[str, Any] | None:
        """Return the topic's metadata for a client, ready for JSON, or None if
        there is no such topic. Older schemas of more bytes than given are left out.
        """
        first = self.find_by_name(topic, 0)
        if first is None:
            return None
        routes = [self._routes.get((first.topic_id, p)) for p in range(first.partition_count)]
        delay_log = (
            self._routes.get((bytes.fromhex(first.delay_log), 0)) if first.delay_log else None
        )
        return {
            "name": topic,
            "delay_log": (
                None if delay_log is None else _delay_log_of(delay_log, older_schema_bytes)
            ),
            "topic_id": first.topic_id.hex(),
            "version": first.version,
            "typed": first.typed,
            **_schemas_of(first, older_schema_bytes),
            "settings": first.settings,
            "created_us": first.created_us,
            "partitions": [_partition_of(r) for r in routes if r is not None],
            **(
                {"slot_map_version": max(len(r.slot_counts) for r in routes if r is not None)}
                if first.slot_counts
                else {}
            ),
        }


def _partition_of(route: Assignment) -> dict[str, Any]:
    if not route.slot_counts:
        return {"front": route.front}
    return {
        "front": route.front,
        "slots": route.slots,
        "hand_over": {str(source): offset for source, offset in route.hand_over},
    }


def _schemas_of(route: Assignment, older_bytes_max: int) -> dict[str, Any]:
    """Return the present schema, and the earlier versions where there are any."""
    found: dict[str, Any] = {
        "schema_id": route.schema_id,
        "schema": base64.b64encode(route.schema).decode("ascii"),
    }
    older = route.older_schemas
    if older:
        found["schema_ids"] = [*sorted(older), route.schema_id]
        if sum(map(len, older.values())) <= older_bytes_max:
            found["older_schemas"] = {
                str(number): base64.b64encode(older[number]).decode("ascii")
                for number in sorted(older)
            }
    return found


def _delay_log_of(delay_log: Assignment, older_bytes_max: int) -> dict[str, Any]:
    """Return the id and the schemas of a topic's delay log, which its producers need."""
    return {
        "topic_id": delay_log.topic_id.hex(),
        **_schemas_of(delay_log, older_bytes_max),
    }
