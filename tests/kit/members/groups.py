"""Consumers of a group in tests: listeners that remember, members in processes of their own, and
polling until something is so.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from tailrace import Consumer, RebalanceListener, Record, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S


class Remembers(RebalanceListener):
    """Listener that keeps its calls, in order: (kind, partitions)."""

    def __init__(self, on_call: Callable[[str, list[TopicPartition]], None] | None = None) -> None:
        self.calls: list[tuple[str, list[TopicPartition]]] = []
        self._on_call = on_call

    def _told(self, kind: str, partitions: list[TopicPartition]) -> None:
        self.calls.append((kind, partitions))
        if self._on_call is not None:
            self._on_call(kind, partitions)

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        self._told("revoked", revoked)

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        self._told("assigned", assigned)

    def on_partitions_lost(self, lost: list[TopicPartition]) -> None:
        self._told("lost", lost)


def member(appliance: EmbeddedAppliance, group: str, *topics: str, **settings: Any) -> Consumer:
    """A consumer of the group that begins at the beginning."""
    return Consumer(
        *topics,
        bootstrap=appliance.address,
        group_id=group,
        **{"auto_offset_reset": "earliest", **settings},
    )


def heartbeats(consumer: Consumer) -> int:
    """Number of heartbeats that it has sent."""
    assert consumer._group is not None
    return consumer._group.membership.heartbeat_count


def poll_until(
    consumers: Iterable[Consumer], condition: Callable[[], object], what: str
) -> list[Record]:
    """Poll all of them in turn until the condition holds; returns what they read."""
    everyone, found = list(consumers), list[Record]()
    deadline = time.monotonic() + HANG_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        for consumer in everyone:
            found += consumer.poll(10)
    return found


def poll_until_shared(consumers: Sequence[Consumer], partition_count: int) -> list[Record]:
    """Poll until they own all partitions, each once, as evenly as can be; returns what they
    read.
    """

    def is_shared() -> bool:
        owned = [key for consumer in consumers for key in consumer.assignment()]
        counts = [len(consumer.assignment()) for consumer in consumers]
        return len(owned) == len(set(owned)) == partition_count and max(counts) - min(counts) <= 1

    return poll_until(
        consumers,
        is_shared,
        f"{partition_count} partitions are shared by {len(consumers)} consumers",
    )


def read_until(consumers: Sequence[Consumer], count: int) -> list[Record]:
    """Poll until so many records have come."""
    found: list[Record] = []
    deadline = time.monotonic() + HANG_LIMIT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {len(found)} of {count} records came"
        for consumer in consumers:
            found += consumer.poll(10)
    return found


def offsets_by_partition(records: Iterable[Record]) -> dict[TopicPartition, list[int]]:
    """The offsets of each partition in the order in which they came."""
    found: dict[TopicPartition, list[int]] = {}
    for record in records:
        found.setdefault(TopicPartition(record.topic, record.partition), []).append(record.offset)
    return found


MEMBER_PROGRAM = """
import json, sys
import tailrace
address, group, topics, settings, limit = json.loads(sys.argv[1])
consumer = tailrace.Consumer(*topics, bootstrap=address, group_id=group, auto_offset_reset="earliest", **settings)
count = 0
out = sys.stdout
while True:
    records = consumer.poll(100, 100)
    assigned = sorted(consumer.assignment())
    out.write(json.dumps({"assigned": assigned, "offsets": [[r.topic, r.partition, r.offset] for r in records]}) + "\\n")
    out.flush()
    count += len(records)
    if limit is not None and count >= limit:
        sys.stdin.readline()  # stands still until it is killed, or told to go on
        limit = None
"""  # noqa: E501


class MemberProcess:
    """A consumer in a process of its own. It writes a line for each poll: what it has, and what it
    read.
    """

    def __init__(
        self,
        appliance: EmbeddedAppliance,
        group: str,
        *topics: str,
        limit: int | None = None,
        **settings: Any,
    ) -> None:
        """`limit`: after so many records it polls no more, and commits nothing."""
        argument = orjson.dumps([appliance.address, group, topics, settings, limit]).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", MEMBER_PROGRAM, argument], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.getcwd()}, cwd=pathlib.Path.cwd(),
        )  # fmt: skip
        self.pid = self._process.pid

    def next_poll(self) -> dict[str, Any]:
        """Result of the next poll."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the member has ended"
        poll: dict[str, Any] = orjson.loads(line)
        return poll

    def read(self, count: int) -> list[tuple[str, int, int]]:
        """So many records, at least, as (topic, partition, offset)."""
        found: list[tuple[str, int, int]] = []
        while len(found) < count:
            found += [tuple(one) for one in self.next_poll()["offsets"]]
        return found

    def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> MemberProcess:
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()
        for file in (self._process.stdin, self._process.stdout):
            assert file is not None
            file.close()
