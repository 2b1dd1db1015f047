"""Reading a topic with hash slots as a consumer that keeps to hand-overs: a partition that got
slots waits until its sources are read to where they ended.
"""

from __future__ import annotations

import random

from tailrace import Consumer, Record, TopicPartition
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.hash_slots import is_drained
from tailrace.protocol.frame import Api
from tests.kit.peers.raw_client import RawClient


def described(address: str, topic: str) -> TopicInfo:
    """METADATA's description of a topic."""
    with RawClient(address) as client:
        _, body = client.ask(Api.METADATA, {"topics": [topic]})
    return topics_from_metadata(body, topic)[topic]


def logs_of(address: str, topic: str) -> dict[int, list[Record]]:
    """Partition -> all its records, offsets dense."""
    info = described(address, topic)
    keys = [TopicPartition(topic, partition) for partition in range(len(info.partitions))]
    logs: dict[int, list[Record]] = {key.partition: [] for key in keys}
    with Consumer(bootstrap=address, auto_offset_reset="earliest") as consumer:
        consumer.assign(keys)
        ends = consumer.end_offsets(keys)
        while any(len(logs[key.partition]) < ends[key] for key in keys):
            records = consumer.poll(60_000, max_records=10_000)
            assert records, "the log has fewer records than its end says"
            for record in records:
                assert record.offset == len(logs[record.partition])
                logs[record.partition].append(record)
    return logs


def in_order(info: TopicInfo, logs: dict[int, list[Record]], rng: random.Random) -> list[Record]:
    """All records as one reader meets them that takes partitions in any order, as far as hand-overs
    let it.
    """
    positions = dict.fromkeys(logs, 0)
    read: list[Record] = []
    while any(positions[partition] < len(log) for partition, log in logs.items()):
        open_now = [
            partition
            for partition, log in logs.items()
            if positions[partition] < len(log)
            and is_drained(info.hand_overs.get(partition, ()), positions)
        ]
        assert open_now, f"no partition may be read on at {positions} with {info.hand_overs}"
        partition = rng.choice(open_now)
        end = min(len(logs[partition]), positions[partition] + rng.randint(1, 200))
        read += logs[partition][positions[partition] : end]
        positions[partition] = end
    return read


def check_order(address: str, topic: str, counts: dict[bytes, int]) -> dict[bytes, set[int]]:
    """The topic holds for each key the values 0 to count - 1, once each and in order. Returns in
    which partitions each key is.
    """
    info, logs = described(address, topic), logs_of(address, topic)
    for seed in range(3):
        following = dict.fromkeys(counts, 0)
        for record in in_order(info, logs, random.Random(seed)):
            assert record.key is not None
            assert int(record.value) == following[record.key], (
                f"{record.key!r} at {record.partition}:{record.offset}"
            )
            following[record.key] += 1
        assert following == counts
    places: dict[bytes, set[int]] = {}
    for partition, log in logs.items():
        for record in log:
            places.setdefault(record.key, set()).add(partition)
    return places
