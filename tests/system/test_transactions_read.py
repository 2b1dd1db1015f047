"""Committed reads of a running appliance: nothing that was not committed is shown, by any way of
reading.
"""

from __future__ import annotations

from typing import Any

import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.client.settings import ProducerSettings
from tailrace.embedded_appliance import EmbeddedAppliance

pytestmark = pytest.mark.skipif(
    "transactional_id" not in ProducerSettings.__dataclass_fields__,
    reason="the producer's side of transactions is not part of this build",
)
ROUNDS = 6


def fill(address: str, topic: str) -> list[bytes]:
    """Transactions of which every second is aborted, between other records. The result is what a
    reader of committed records is to see.
    """
    with Admin(address) as admin:
        admin.create_topics([NewTopic(topic, partitions=1)])
    committed: list[bytes] = []
    options: dict[str, Any] = {"transactional_id": topic}
    producer: Any
    with Producer(address) as plain, Producer(address, **options) as producer:
        producer.init_transactions()
        for number in range(ROUNDS):
            values = [b"%d-%d" % (number, n) for n in range(3)]
            producer.begin_transaction()
            for value in values:
                producer.send(topic, value)
            producer.flush()
            other = b"plain-%d" % number
            plain.send(topic, other).result()
            if number % 2:
                producer.abort_transaction()
                committed.append(other)
            else:
                producer.commit_transaction()
                committed += [*values, other]
    return committed


def test_consumers_scans_and_queues_show_what_was_committed(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    model, key = fill(appliance.address, topic), TopicPartition(topic, 0)
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", group_id="g"
    ) as consumer:
        seen: list[bytes] = []
        while len(seen) < len(model):
            seen += [record.value for record in consumer.poll(1_000)]
        assert seen == model
        end = consumer.end_offsets([key])[key]
        while consumer.position(key) < end:
            assert consumer.poll(100) == []
        assert consumer.lag(key) == 0
    with Consumer(
        bootstrap=appliance.address,
        auto_offset_reset="earliest",
        isolation_level="read_uncommitted",
    ) as consumer:
        consumer.assign([key])
        everything = 0
        while everything < 4 * ROUNDS:
            everything += len(consumer.poll(1_000))
        assert everything == 4 * ROUNDS
    for from_files in (True, False):
        table = tailrace.scan(
            topic, appliance.address, columns=["value"], from_files=from_files
        ).read_all()
        assert table["value"].to_pylist() == model
    with tailrace.ShareConsumer(
        topic, bootstrap=appliance.address, group_id="queue", auto_offset_reset="earliest"
    ) as queue:
        delivered: list[bytes] = []
        while len(delivered) < len(model):
            delivered += [record.value for record in queue.poll(1_000)]
        assert delivered == model
