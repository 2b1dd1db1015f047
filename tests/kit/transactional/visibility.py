"""The moment at which committed records are visible.

A commit returns when its decision is durable. Its records appear milliseconds later, when the
markers in their partitions are durable too (docs/transactions.md). A test that reads once waits.
"""

from __future__ import annotations

from functools import partial

from tailrace import Consumer, TopicPartition
from tests.kit.processes import wait_until


def await_visible(address: str, topic: str, partitions: int = 1) -> None:
    """Wait until no transaction is open in these partitions of a topic."""
    keys = [TopicPartition(topic, number) for number in range(partitions)]
    wait_until(partial(_has_no_open, address, keys), f"what {topic} has is visible")


def _has_no_open(address: str, keys: list[TopicPartition]) -> bool:
    ends = []
    for isolation_level in ("read_committed", "read_uncommitted"):
        with Consumer(bootstrap=address, isolation_level=isolation_level) as consumer:
            ends.append(consumer.end_offsets(keys))
    return ends[0] == ends[1]
