"""Random kills of real processes under load; then the checker. `make torture SECONDS=60 SEED=1`;
`make test` runs a short one.

Several producers and consumers, and a compacted topic that is cleaned all the time, while
`tests.crash.disturbance` does its work.
"""

from __future__ import annotations

import collections
import pathlib
import random
import sys
from dataclasses import dataclass, field
from typing import Any

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import TailraceError
from tests.crash import compacted_load
from tests.crash.compacted_load import BYTES_PER_SECOND, CompactedCounts, CompactedLoad
from tests.crash.disturbance import Harm
from tests.crash.torture_base import Enough, TortureBase, run_from_command_line, run_torture
from tests.kit.appliances.cleaned_segments import is_merged
from tests.kit.checker import History, check, value_of

PARTITIONS = 6
CONFIGS: dict[str, Any] = {"segment.bytes": 600 << 10, "small.batch.bytes": 16 << 10}
"""Small batches are merged meanwhile."""
TOPIC = "torture"


@dataclass(slots=True)
class Counts:
    harm: Harm = field(default_factory=Harm)
    acknowledged: int = 0
    failed: int = 0
    read: int = 0
    merged: int = 0
    """Segments whose small batches were merged, at the end."""
    compacted: CompactedCounts = field(default_factory=CompactedCounts)


class Torture(TortureBase[Counts]):
    """One run."""

    def __init__(self, seed: int, data_dir: str) -> None:
        counts = Counts()
        self._data_dir = data_dir
        super().__init__(
            counts, counts.harm, seed, data_dir, "tr-cleaner-0",
            {
                "cleaner.check.interval.ms": 50,
                "cleaner.io.max.bytes.per.second": BYTES_PER_SECOND,
            },
        )  # fmt: skip
        self.compacted = CompactedLoad(self.address, self._stop, counts.compacted)
        self._seed = seed
        self.history = History()
        self.reasons: collections.Counter[str] = collections.Counter()
        """Reasons of the records that were given up."""

    def _produce(self, name: str, acks: int | str) -> None:
        number = 0
        # A small buffer: on a crowded machine a large one would hold more than is acknowledged
        # within the delivery timeout.
        with Producer(
            self.address,
            acks=acks,
            batch_size=2048,
            delivery_timeout_ms=600_000,
            buffer_memory=1 << 20,
            max_block_ms=600_000,
        ) as producer:
            while not self._stop.is_set():
                partition = number % PARTITIONS
                value = value_of(name, number, b"x" * 100)
                with self._lock:
                    self.history.send(partition, value)

                def done(
                    metadata: object,
                    error: TailraceError | None,
                    value: bytes = value,
                    partition: int = partition,
                ) -> None:
                    with self._lock:
                        if error is None:
                            self.counts.acknowledged += 1
                            self.history.acknowledge(partition, value, metadata.offset)  # type: ignore[attr-defined]
                        else:
                            self.counts.failed += 1
                            self.reasons[f"{name}: {error}"] += 1

                producer.send(TOPIC, value, partition=partition, on_delivery=done)
                number += 1
                if number % 50 == 0:
                    self._stop.wait(0.005)
            producer.flush(600)

    def _consume(self) -> None:
        with Consumer(bootstrap=self.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(TOPIC, p) for p in range(PARTITIONS)])
            while not self._stop.is_set():
                try:
                    records = consumer.poll(200)
                except TailraceError as error:
                    if not error.retriable:
                        raise
                    continue
                with self._lock:
                    for record in records:
                        self.history.read(record.partition, record.offset, record.value or b"")
                        self.counts.read += 1

    def run(self, enough: Enough[Counts]) -> Counts:
        with Admin(self.address) as admin:
            admin.create_topics([NewTopic(TOPIC, PARTITIONS, CONFIGS)])
            self.compacted.create(admin)
        threads = [
            self.thread(self._produce, f"p{n}", acks) for n, acks in enumerate(("all", 1, "all"))
        ]
        threads += [self.thread(self._consume) for _ in range(2)]
        threads += [
            self.thread(self.compacted.write, f"w{n}", random.Random(self._seed + n))
            for n in range(2)
        ]
        threads += [self.thread(self.compacted.follow), self.thread(self.compacted.compact)]
        threads += [self.thread(self.alter_settings, [TOPIC, compacted_load.TOPIC])]
        self.disturb(enough, threads)
        assert self.counts.failed == 0, (
            f"{self.counts.failed} records were given up: {self.reasons.most_common(5)}"
        )
        readable: dict[int, list[tuple[int, bytes]]] = {p: [] for p in range(PARTITIONS)}
        with Consumer(bootstrap=self.address, auto_offset_reset="earliest") as consumer:
            keys = [TopicPartition(TOPIC, p) for p in range(PARTITIONS)]
            consumer.assign(keys)
            ends = consumer.end_offsets(keys)
            while any(consumer.position(key) < end for key, end in ends.items()):
                for record in consumer.poll(2000, 5000):
                    readable[record.partition].append((record.offset, record.value or b""))
        check(self.history, readable)
        self.compacted.check()
        assert self.appliance.stop() == 0
        segments = pathlib.Path(self._data_dir).glob(f"{TOPIC}-*/*.arrows")
        self.counts.merged = sum(map(is_merged, segments))
        return self.counts


def torture(seed: int, enough: Enough[Counts]) -> Counts:
    return run_torture(lambda data_dir: Torture(seed, data_dir), enough)


if __name__ == "__main__":
    sys.exit(run_from_command_line(torture))
