"""Producers that know a topic and are connected to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tailrace.client.connections.runtime import Runtime
from tailrace.client.records.partitioners import DefaultPartitioner
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tailrace.producer.producer import Producer
from tests.kit.peers.scripted_front import NobodyThere

PARTITIONS = 3
LIMIT_BYTES = 60_000


def ignore(_metadata: object, _error: object) -> None:
    pass


@contextmanager
def producer(**settings: Any) -> Iterator[Producer]:
    """A producer that knows a topic and is connected to nothing."""
    environment = Runtime(
        lambda: 1_000_000_000,
        lambda _: NobodyThere(),
        lambda _fds, _ns: None,
        lambda: 0.5,
        has_threads=False,
    )
    made = Producer(
        "tcp://127.0.0.1:1", runtime=environment, linger_ms=1000, max_block_ms=0, **settings
    )
    if type(made._records.partitioner) is DefaultPartitioner:
        made._records.partitioner = DefaultPartitioner(seed=1)
    described: dict[str, Any] = {
        "name": "t", "topic_id": "00" * 16, "version": 1, "typed": False, "schema_id": 1,
        "schema": "", "partitions": [{}] * PARTITIONS,
        "settings": {"max.message.bytes": LIMIT_BYTES, "delay.enabled": False, "delay.levels": "",
        "durability": "memory"},
    }  # fmt: skip
    info = TopicInfo(described)
    info._schema = DEFAULT_SCHEMA
    info.schema_message = to_message(DEFAULT_SCHEMA)
    made._metadata._adopt(info)
    try:
        yield made
    finally:
        made._sender_thread.stop()
