"""Contents of an appliance: records for a topic, all that it has, and the offsets of a group."""

from __future__ import annotations

import time
from typing import Any

from tailrace import Admin, Consumer, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import HANG_LIMIT_S


def produce(
    appliance: EmbeddedAppliance, topic: str, values: range, size: int = 0, **settings: Any
) -> None:
    with Producer(appliance.address, **settings) as producer:
        handles = [
            producer.send(topic, b"%d" % number + bytes(size), key=b"%d" % number)
            for number in values
        ]
        for handle in handles:
            handle.result(HANG_LIMIT_S)


def everything(appliance: EmbeddedAppliance, topic: str) -> dict[int, list[tuple[int, bytes]]]:
    """Partition -> (offset, value) of all committed records."""
    with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        count = consumer.partitions_for(topic)
        keys = [TopicPartition(topic, number) for number in sorted(count or ())]
        ends = consumer.end_offsets(keys)
        consumer.assign(keys)
        found: dict[int, list[tuple[int, bytes]]] = {key.partition: [] for key in keys}
        deadline = time.monotonic() + HANG_LIMIT_S
        while any(consumer.position(key) < ends[key] for key in keys):
            assert time.monotonic() < deadline, "not all of the topic can be read"
            for record in consumer.poll(timeout_ms=200):
                found[record.partition].append((record.offset, bytes(record.value)))
    return found


def committed(appliance: EmbeddedAppliance, group: str, topic: str) -> dict[int, int]:
    with Admin(appliance.address) as admin:
        offsets = admin.list_group_offsets(group)
    return {
        key.partition: found.offset
        for key, found in offsets.items()
        if found is not None and key.topic == topic
    }
