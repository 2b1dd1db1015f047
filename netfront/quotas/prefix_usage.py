"""Prefix usage: what the topics of each prefix store, and the topics that are beyond their quota.

Stored bytes are in the partition table. The scheduler is asked for the number of delayed records.

Owner: one front.

Invariants:
- Usage is read again every CHECK_NS. Between two checks a prefix may exceed its quota by what is
  sent meanwhile.
- A prefix without a rule costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from netfront.fetch.log.log_reader import LogReader
from netfront.fetch.log.read_result import LogReadError
from netfront.partition_routes import PartitionRoutes
from shm.messages.lane_messages import Assignment
from shm.quotas.quota_rules import Entity, Rules, begins
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api

CHECK_NS = 1_000_000_000
PENDING_CHECK_NS = 2_000_000_000
BYTES = "stored_bytes_max"
PENDING = "delayed_records_max"

Ask = Callable[[int, bytes, Callable[[ErrorCode, bytes], None]], None]


class PrefixUsage:
    """The sums of prefixes that a front enforces."""

    def __init__(
        self,
        routing: PartitionRoutes,
        reader: LogReader,
        block: Callable[[frozenset[bytes]], None],
        ask: Ask,
    ) -> None:
        """`block` gets the ids of the topics and delay logs to which nothing may be appended. `ask`
        asks another process: (API, body, callback).
        """
        self._routing = routing
        self._reader = reader
        self._block = block
        self._ask = ask
        self._limits: dict[str, dict[Entity, int]] = {BYTES: {}, PENDING: {}}
        self._used: dict[tuple[str, Entity], int] = {}
        self._pending: dict[str, int] = {}
        """Delayed records by topic."""
        self._pages: dict[str, int] = {}
        self._blocked: frozenset[bytes] = frozenset()
        self._check_at_ns = self._ask_at_ns = NEVER_NS

    def use_rules(self, rules: Rules, now_ns: int) -> None:
        """Use changed rules."""
        self._limits = {
            quota: {entity: values[quota] for entity, values in rules.items() if quota in values}
            for quota in (BYTES, PENDING)
        }
        self._used.clear()
        has_any = any(self._limits.values())
        self._check_at_ns = now_ns if has_any else NEVER_NS
        self._ask_at_ns = now_ns if self._limits[PENDING] else NEVER_NS
        if not has_any:
            self._set_blocked(frozenset())

    def next_deadline_ns(self) -> int:
        """Return the time when `step` next has work."""
        return min(self._check_at_ns, self._ask_at_ns)

    def step(self, now_ns: int) -> int:
        """Read the usage, and block the topics of prefixes that are beyond their quota."""
        if now_ns >= self._ask_at_ns:
            self._ask_at_ns = now_ns + PENDING_CHECK_NS
            self._pages = {}
            self._ask(Api.DESCRIBE_DELAYS, b"{}", self._on_delays)
        if now_ns >= self._check_at_ns:
            self._check_at_ns = now_ns + CHECK_NS
            self._check()
        return 1

    def _check(self) -> None:
        blocked: set[bytes] = set()
        names = self._routing.names()
        for entity, limit in self._limits[BYTES].items():
            topics = [name for name in names if begins(name, entity.prefix or "")]
            used = self._used[BYTES, entity] = sum(map(self._stored_bytes, topics))
            if used >= limit:
                for topic in topics:
                    blocked |= self._ids_of(topic)
        for entity, limit in self._limits[PENDING].items():
            topics = [name for name in names if begins(name, entity.prefix or "")]
            used = self._used[PENDING, entity] = sum(self._pending.get(name, 0) for name in topics)
            if used >= limit:
                for topic in topics:
                    route = self._routing.find_by_name(topic, 0)
                    if route is not None and route.delay_log:
                        blocked.add(bytes.fromhex(route.delay_log))
        self._set_blocked(frozenset(blocked))

    def _set_blocked(self, blocked: frozenset[bytes]) -> None:
        if blocked != self._blocked:
            self._blocked = blocked
            self._block(blocked)

    def _ids_of(self, topic: str) -> set[bytes]:
        route = self._routing.find_by_name(topic, 0)
        if route is None:
            return set()
        return {route.topic_id} | ({bytes.fromhex(route.delay_log)} if route.delay_log else set())

    def _stored_bytes(self, topic: str) -> int:
        """Bytes of a topic's log and of its delay log."""
        return sum(
            self._size(route)
            for topic_id in self._ids_of(topic)
            for partition in range(self._routing.partition_count(topic))
            if (route := self._routing.find(topic_id, partition)) is not None
        )

    def _size(self, route: Assignment) -> int:
        try:
            return self._reader.state(route).size_bytes
        except LogReadError:
            return 0

    def _on_delays(self, code: ErrorCode, body: bytes) -> None:
        """Take a page of the scheduler's partitions. Without an answer the last count stays."""
        if code is not ErrorCode.OK:
            return
        answer: dict[str, Any] = orjson.loads(body)
        for row in answer["partitions"]:
            self._pages[row["topic"]] = self._pages.get(row["topic"], 0) + int(row["pending"])
        if answer.get("after") is None:
            self._pending = self._pages
        else:
            following = orjson.dumps({"after": answer["after"]})
            self._ask(Api.DESCRIBE_DELAYS, following, self._on_delays)

    def describe(self) -> list[dict[str, Any]]:
        """Use of each prefix."""
        return [
            {
                "prefix": entity.prefix, "quota": quota, "used": used,
                "limit": self._limits[quota].get(entity, 0),
            }
            for (quota, entity), used in self._used.items()
        ]  # fmt: skip
