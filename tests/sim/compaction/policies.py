"""Policies of the simulated topic: somebody who alters cleanup.policy, retention and
small.batch.bytes while the topic is in use; and what the log start may do meanwhile.

- ALTERED: all of it changes. In the end the topic is compacted, and keeps what it has.
- MERGED: nothing is compacted and nothing expires. Small batches of sealed segments are merged, and
  every record stays.

Owner: one `tests.sim.compaction.schedule.CompactionSchedule`, of which some have policies.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from shm.tables.partition_table import PartitionTable
from tailrace.client.connections.connection import Connection
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol import json_messages as requests
from tailrace.protocol.frame import Api
from tests.sim.compaction.table_history import TableHistory
from tests.sim.machine.machine_parts import ADDRESS, MS, SECOND
from tests.sim.machine.world import World
from tests.sim.transactions.schedule import WRITTEN

ALTERED, MERGED = "altered", "merged"
SMALL_BYTES = 32 << 10
OF_TWELVE = (3, 6, 7, 8, 9)
"""The seeds of each twelve that may have policies: the planted faults of the others keep theirs."""
RATE = 0.8
"""Part of these that have some."""
ALTERATION_RATE = 0.05
"""Part of the turns."""
KEPT: dict[str, Any] = {"retention.ms": -1, "retention.bytes": -1}


class Altered(Protocol):
    """A schedule as its policies know it."""

    seed: int
    world: World
    table: TableHistory
    topic_id: bytes

    @property
    def faults(self) -> Sequence[str]: ...

    def observe_starts(self) -> None: ...


class Policies:
    """See the module's docstring."""

    def __init__(self, schedule: Altered, kind: str, rng: random.Random) -> None:
        self.kind = kind
        self._rng = rng
        self._schedule = schedule
        self._shortest_ms = -1
        """The shortest retention.ms that was asked for, -1: none."""
        self._has_bytes = rng.random() < 0.3
        self._connection: Connection | None = None
        self.alterations = 0

    def first(self) -> dict[str, Any]:
        """Settings of the new topic."""
        some = self._some() if self.kind == ALTERED else {
            "cleanup.policy": "delete", "small.batch.bytes": SMALL_BYTES, **KEPT,
        }  # fmt: skip
        return {"segment.bytes": self._rng.choice((4_000, 8_000)), **some}

    def last(self) -> dict[str, Any]:
        """Settings with which the topic is cleaned in the end."""
        return {"cleanup.policy": "compact", **KEPT}

    def _some(self) -> dict[str, Any]:
        rng = self._rng
        retention_ms = rng.choice((-1, 300, 5_000, 600_000))
        if retention_ms >= 0:
            known_ms = self._shortest_ms
            self._shortest_ms = retention_ms if known_ms < 0 else min(known_ms, retention_ms)
        retention_bytes = rng.choice((-1, 6_000)) if self._has_bytes else -1
        return {
            "cleanup.policy": rng.choice(("compact", "delete", "compact,delete", "compact,delete")),
            "small.batch.bytes": rng.choice((0, SMALL_BYTES)),
            "retention.ms": retention_ms, "retention.bytes": retention_bytes,
        }  # fmt: skip

    def check_start(self, place: TopicPartition, before: int, start: int) -> None:
        """A log start has moved."""
        assert self.kind == ALTERED, f"{place}: nothing expires, and the log begins at {start}"
        assert self._shortest_ms >= 0 or self._has_bytes, f"{place} begins at {start} for no reason"
        schedule = self._schedule
        if self._has_bytes or any(each.startswith("clock") for each in schedule.faults):
            return  # segments may go earlier, and a jump in a pause is not known
        now_ns = schedule.world.now_ns
        sent_ns = schedule.table.newest_sent_ns(place, before, start)
        assert now_ns - sent_ns >= self._shortest_ms * MS, (
            f"{place} begins at {start} instead of {before} at {now_ns}, and what was sent at "
            f"{sent_ns} is gone: retention.ms was {self._shortest_ms} at least"
        )

    # ---- an actor --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Connect."""
        self._connection = Connection(ADDRESS, "policies", self._schedule.world.runtime)

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def turn(self) -> None:
        self.pump()
        if self.kind == MERGED or self._rng.random() > ALTERATION_RATE:
            return
        if self._connected.is_ready:
            self.alterations += 1
            body = {"topics": [{"name": WRITTEN, "configs": self._some()}]}
            self._connected.request(Api.ALTER_TOPICS, [requests.encode_json(body)], lambda _: None)

    def pump(self) -> None:
        self._connected.process()
        self._connected.tick(self._connected.now_ns())
        self._schedule.observe_starts()

    def next_wake_ns(self, now_ns: int) -> int:
        tick_ns = self._connected.next_tick_ns()
        return now_ns + SECOND if tick_ns is None else tick_ns

    def is_ready(self, now_ns: int) -> bool:
        """True if it has something to do."""
        socket: Any = self._connected._socket
        has_input = socket is not None and bool(socket.link.to_client)
        return has_input or self.next_wake_ns(now_ns) <= now_ns


def policies_of(schedule: Altered) -> Policies | None:
    """Those of a schedule, None if it has none."""
    rng = random.Random(f"policies of {schedule.seed}")
    if schedule.seed % 12 not in OF_TWELVE or rng.random() >= RATE:
        return None
    return Policies(schedule, rng.choice((ALTERED, ALTERED, MERGED)), rng)


def starts(schedule: Altered) -> dict[TopicPartition, int]:
    """Start offsets of the partitions, as far as flushers show them."""
    world, found = schedule.world, {}
    for data_dir in range(len(world.data_dirs)):
        region = world.regions.get(world._spec_regions.get(f"table-{data_dir}", ""))
        for state in PartitionTable(region).all() if region is not None else ():
            if state.topic_id == schedule.topic_id:
                found[TopicPartition(WRITTEN, state.partition)] = state.log_start_offset
    return found
