"""Kafka's side of `bench.members.rebalance`: a node whose group coordinator has our members'
settings, and a sender. Members: kafka_member.py.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from bench.members.member_notes import HEARTBEAT_INTERVAL_MS, SESSION_TIMEOUT_MS
from bench.peers.kafka import Kafka
from bench.peers.servers import Missing

NAME = "Apache Kafka 4.3.0"
_PROPERTIES = {
    "group.consumer.session.timeout.ms": SESSION_TIMEOUT_MS,
    "group.consumer.min.session.timeout.ms": SESSION_TIMEOUT_MS,
    "group.consumer.heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
    "group.consumer.min.heartbeat.interval.ms": HEARTBEAT_INTERVAL_MS,
}
"""With the new protocol these are the broker's to say; the least that it allows is 45 s and 5 s
without the second and the fourth.
"""
_BOUNDS = [
    "-XX:MaxDirectMemorySize=256m",
    "-XX:MaxMetaspaceSize=256m",
    "-XX:ReservedCodeCacheSize=128m",
]
"""Beside 1 GiB of heap."""


@contextmanager
def kafka_group(
    directory: str, partition_count: int
) -> Iterator[tuple[list[str], Callable[[Collection[int]], None]]]:
    """The command of a process of members, without their number and file, and what sends a record
    to each of some partitions. Raises Missing.
    """
    if importlib.util.find_spec("confluent_kafka") is None:
        raise Missing(
            "the Python package confluent-kafka is missing (pip install -r "
            "bench/peers/requirements.txt)"
        )
    from confluent_kafka import Producer

    os.makedirs(directory)
    node = Kafka(directory, _PROPERTIES, _BOUNDS)
    try:
        topic = node.topic(partition_count)
        producer: Any = Producer({"bootstrap.servers": node.bootstrap, "acks": "1", "log_level": 2})

        def send(partitions: Collection[int]) -> None:
            for partition in partitions:
                producer.produce(topic, b"x" * 100, partition=partition)
            producer.poll(0)

        yield (
            [
                sys.executable,
                "-P",
                "-m",
                "bench.peers.kafka_member",
                node.bootstrap,
                "members",
                topic,
            ],
            send,
        )
        producer.purge()
        producer.flush(1)
    finally:
        node.stop()
