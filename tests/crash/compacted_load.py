"""Load on a compacted topic for a torture, and its checker: writers that own their keys, a reader
that goes along, an operator that has it cleaned all the time.

Invariants that `check` asserts:
- What can be read at an offset is what was acknowledged there.
- The last record of each key is the last one that was sent, or is gone if it is a tombstone.
- The dictionary of the reader that went along over all cleanings is that of the log.
"""

from __future__ import annotations

import collections
import random
import threading
from dataclasses import dataclass, field
from typing import Any

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import TailraceError

TOPIC = "table"
PARTITIONS = 2
KEYS = 25
CONFIGS: dict[str, Any] = {
    "cleanup.policy": "compact", "segment.bytes": 64 << 10, "min.cleanable.dirty.ratio": 0.2,
}  # fmt: skip
BYTES_PER_SECOND = 2_000_000
"""So slow is the cleaner, that kills meet it."""
Place = tuple[int, bytes]
"""(partition, key)."""


@dataclass(slots=True)
class CompactedCounts:
    """Counts of what was done."""

    acknowledged: int = 0
    read: int = 0
    compactions: int = 0


@dataclass(slots=True)
class CompactedLoad:
    """The load's threads call `write`, `follow` and `compact`."""

    address: str
    stop: threading.Event
    counts: CompactedCounts = field(default_factory=CompactedCounts)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last: dict[Place, bytes | None] = field(default_factory=dict)
    """The last value that was sent of each key."""
    _stored: dict[tuple[int, int], tuple[bytes, bytes | None]] = field(default_factory=dict)
    """(partition, offset) -> what was acknowledged there."""
    _followed: dict[Place, bytes | None] = field(default_factory=dict)
    """The dictionary of the reader that goes along."""
    _position: dict[int, int] = field(default_factory=lambda: collections.defaultdict(lambda: -1))
    failures: collections.Counter[str] = field(default_factory=collections.Counter)

    def create(self, admin: Admin) -> None:
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, CONFIGS)])

    def write(self, name: str, rng: random.Random) -> None:
        """Update keys of the writer's own, one in twelve by a tombstone."""
        number = 0
        with Producer(
            self.address, acks="all", batch_size=2_048, delivery_timeout_ms=600_000,
            buffer_memory=1 << 20, max_block_ms=600_000,
        ) as producer:  # fmt: skip
            while not self.stop.is_set():
                key = b"%s-%d" % (name.encode(), rng.randrange(KEYS))
                partition = sum(key) % PARTITIONS
                value = None if rng.random() < 1 / 12 else b"%d:" % number + rng.randbytes(80)
                self._last[partition, key] = value

                def done(
                    metadata: Any, error: TailraceError | None, key: bytes = key,
                    value: bytes | None = value, partition: int = partition,
                ) -> None:  # fmt: skip
                    with self._lock:
                        if error is not None:
                            self.failures[str(error)] += 1
                            return
                        self.counts.acknowledged += 1
                        self._stored[partition, metadata.offset] = key, value

                producer.send(TOPIC, value, key, partition=partition, on_delivery=done)
                number += 1
                if number % 50 == 0:
                    self.stop.wait(0.01)
            producer.flush(600)

    def follow(self) -> None:
        """Read along from the beginning, as slowly as it comes."""
        with Consumer(
            bootstrap=self.address, auto_offset_reset="none", max_partition_fetch_bytes=8_192
        ) as consumer:
            keys = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(keys)
            for key in keys:
                consumer.seek(key, 0)
            while not self.stop.is_set():
                self._poll(consumer)

    def _follow_to_the_end(self) -> None:
        """Go on where the reader was, when everything is written."""
        with Consumer(bootstrap=self.address) as consumer:
            keys = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(keys)
            for key in keys:
                consumer.seek(key, self._position[key.partition] + 1)
            ends = consumer.end_offsets(keys)
            while any(consumer.position(key) < end for key, end in ends.items()):
                self._poll(consumer)

    def _poll(self, consumer: Consumer) -> None:
        try:
            records = consumer.poll(200, 50)
        except TailraceError as error:
            if not error.retriable:
                raise
            return
        for record in records:
            assert record.offset > self._position[record.partition], "a record came twice"
            self._position[record.partition] = record.offset
            assert record.key is not None
            self._followed[record.partition, record.key] = record.value
            self.counts.read += 1

    def compact(self) -> None:
        """Ask for a cleaning, one after the other."""
        with Admin(self.address, request_timeout_ms=5_000) as admin:
            while not self.stop.is_set():
                try:
                    admin.compact_topic(TOPIC, timeout_ms=5_000)
                except TailraceError as error:
                    if not error.retriable:
                        raise
                    self.stop.wait(0.2)
                else:
                    self.counts.compactions += 1
                    self.stop.wait(0.3)

    def check(self) -> None:
        """Hold the log against what was sent, before and after a last cleaning."""
        assert not self.failures, self.failures.most_common(3)
        self._follow_to_the_end()
        self._check_log()
        with Admin(self.address) as admin:
            rows = admin.compact_topic(TOPIC, timeout_ms=300_000)
            assert all(row["cleaned_below"] == row["log_end_offset"] for row in rows)
        assert len(self._check_log()) <= len(self._last)

    def _check_log(self) -> list[tuple[int, int]]:
        found: dict[tuple[int, int], tuple[bytes | None, bytes | None]] = {}
        with Consumer(bootstrap=self.address) as consumer:
            keys = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(keys)
            for key in keys:
                consumer.seek(key, 0)
            ends = consumer.end_offsets(keys)
            while any(consumer.position(key) < end for key, end in ends.items()):
                for record in consumer.poll(2_000, 5_000):
                    place = record.partition, record.offset
                    assert place not in found
                    found[place] = record.key, record.value
        table: dict[Place, bytes | None] = {}
        for place, (record_key, value) in sorted(found.items()):
            assert self._stored.get(place) == (record_key, value), (place, record_key)
            assert record_key is not None
            table[place[0], record_key] = value
        for at, value in self._last.items():
            assert table.get(at) == value, f"{at} is {table.get(at)!r}, was sent as {value!r}"
            assert value is None or at in table
            assert self._followed.get(at) == value, f"the reader has {self._followed.get(at)!r}"
        for number in range(PARTITIONS):
            behind = max((o for p, o in self._stored if p == number), default=-1)
            assert ends[TopicPartition(TOPIC, number)] == behind + 1, "the end does not move"
        return list(found)
