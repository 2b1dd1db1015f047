"""A compacted topic of a running appliance, and a dictionary of what was written to it."""

from __future__ import annotations

import os
import pathlib
import random
from typing import Any

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance

CONFIGS: dict[str, Any] = {
    "cleanup.policy": "compact", "segment.bytes": 64 << 10, "min.cleanable.dirty.ratio": 1,
}  # fmt: skip
"""Nothing is cleaned before it is asked for."""
START_MS = 1_700_000_000_000
Pair = tuple[bytes | None, bytes | None]


class Written:
    """Records that were written to partition 0 of a topic."""

    def __init__(self, topic: str) -> None:
        self.key = TopicPartition(topic, 0)
        self.by_offset: dict[int, Pair] = {}

    def note(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        self.by_offset[offset] = key, value

    @property
    def kept(self) -> dict[int, Pair]:
        """The records that no later one of their key supersedes."""
        last = {key: offset for offset, (key, _) in sorted(self.by_offset.items())}
        return {offset: self.by_offset[offset] for offset in sorted(last.values())}

    @property
    def table(self) -> dict[bytes | None, bytes]:
        """The latest value of each key that has one."""
        return {key: value for key, value in self.kept.values() if value is not None}


def update(
    producer: Producer, written: Written, count: int, rng: random.Random, keys: int = 40
) -> None:
    """Random updates, a tenth of them tombstones. A record's time is its number, so far."""
    topic, sent = written.key.topic, []
    first = len(written.by_offset)
    for number in range(count):
        key = b"k%d" % rng.randrange(keys)
        value = None if rng.random() < 0.1 else rng.randbytes(rng.randrange(400))
        sent.append(
            (producer.send(topic, value, key, timestamp=START_MS + first + number), key, value)
        )
    producer.flush(60)
    for handle, key, value in sent:
        offset = handle.result(60).offset
        assert offset is not None
        written.note(offset, key, value)


def read(address: str, key: TopicPartition, position: int = 0, **settings: Any) -> dict[int, Pair]:
    """All records from `position` on, by offset."""
    found: dict[int, Pair] = {}
    with Consumer(bootstrap=address, **settings) as consumer:
        consumer.assign([key])
        consumer.seek(key, position)
        end = consumer.end_offsets([key])[key]
        while consumer.position(key) < end:
            for record in consumer.poll(1_000):
                assert record.offset > max(found, default=-1), "in order, and once"
                found[record.offset] = record.key, record.value
    return found


def create(appliance: EmbeddedAppliance, topic: str, **configs: Any) -> Written:
    given = {name.replace("_", "."): value for name, value in configs.items()}
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1, {**CONFIGS, **given})])
    return Written(topic)


def compact(appliance: EmbeddedAppliance, topic: str) -> list[dict[str, Any]]:
    with Admin(appliance.address) as admin:
        return admin.compact_topic(topic, timeout_ms=120_000)


def files(appliance: EmbeddedAppliance, topic: str) -> list[str]:
    return sorted(os.listdir(f"{appliance.data_dir}/{topic}-0"))


def size_of(appliance: EmbeddedAppliance, topic: str) -> int:
    directory = pathlib.Path(f"{appliance.data_dir}/{topic}-0")
    return sum(path.stat().st_size for path in directory.glob("*.arrows"))
