"""`tailrace migrate` from Apache Kafka and back, if `python -m bench.peers` has fetched it."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from bench.peers.kafka import CACHE, NODE, Kafka
from tailrace import Admin, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit import cli
from tests.kit.processes import wait_until
from tests.system.migrate.houses import rows

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        shutil.which("java") is None or not glob.glob(f"{os.path.join(CACHE, NODE[0])}/libs/*.jar"),
        reason="Java or Kafka's jars are not here (`python -m bench.peers` fetches them)",
    ),
]
TIME_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    directory: pathlib.Path = tmp_path_factory.mktemp("kafka")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAVA_TOOL_OPTIONS", raising=False)  # those of Spark's tests
        node = Kafka(str(directory), {"log.cleaner.backoff.ms": 200})
    try:
        yield node
    finally:
        node.server.stop()


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(auto_create_topics=False)
    try:
        yield running
    finally:
        running.stop()


def in_kafka(kafka: Kafka, topic: str) -> list[tuple[Any, ...]]:
    """The committed records of partition 0."""
    from confluent_kafka import Consumer, KafkaError
    from confluent_kafka import TopicPartition as Assigned

    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap, "group.id": "reader",
            "isolation.level": "read_committed", "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )  # fmt: skip
    found: list[tuple[Any, ...]] = []
    try:
        consumer.assign([Assigned(topic, 0, 0)])
        while True:
            for message in consumer.consume(1_000, 1):
                error = message.error()
                if error is not None:
                    assert error.code() == KafkaError._PARTITION_EOF
                    return found
                found.append(
                    (message.offset(), message.timestamp()[1], message.key(), message.value(),
                     tuple(message.headers() or ()))
                )  # fmt: skip
    finally:
        consumer.close()


def producer_of(kafka: Kafka, **options: Any) -> Any:
    from confluent_kafka import Producer

    return Producer({"bootstrap.servers": kafka.bootstrap, **options})


def produce_plain(producer: Any, plain: str, compacted: str) -> None:
    """Records with and without keys, values and headers; and many of few keys."""
    for n in range(5_000):
        producer.produce(
            plain, None if n % 9 == 4 else b"%d" % n, None if n % 5 == 2 else b"k%d" % n,
            timestamp=TIME_MS + n,
            headers=[("a", b"%d" % n), ("a", None), ("b", b"")] if n % 4 == 0 else None,
        )  # fmt: skip
        producer.produce(compacted, b"%d" % n, b"k%d" % (n % 60), timestamp=TIME_MS + n)
        if n % 500 == 0:
            producer.flush()
    producer.flush()


def produce_transactions(kafka: Kafka, topic: str) -> None:
    """Nine transactions, of which a third is aborted."""
    writer = producer_of(kafka, **{"transactional.id": "t"})
    writer.init_transactions()
    for n in range(9):
        writer.begin_transaction()
        for each in range(40):
            writer.produce(topic, b"%d of %d" % (each, n), timestamp=TIME_MS + each)
        writer.flush()
        if n % 3 == 1:
            writer.abort_transaction()
        else:
            writer.commit_transaction()


def commit(kafka: Kafka, group: str, offsets: dict[str, int]) -> None:
    """Set a group's offsets in partition 0 of some topics."""
    from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException
    from confluent_kafka import TopicPartition as Assigned
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    asked = ConsumerGroupTopicPartitions(
        group, [Assigned(topic, 0, offset) for topic, offset in offsets.items()]
    )

    def is_set() -> bool:
        try:
            found = admin.alter_consumer_group_offsets([asked])[group].result()
        except KafkaException:  # the coordinator of a new cluster takes a while
            return False
        return not any(each.error for each in found.topic_partitions)

    wait_until(is_set, "Kafka has the group")


def test_plain_compacted_and_transactional_topics_with_their_groups(
    kafka: Kafka, appliance: EmbeddedAppliance
) -> None:
    plain = kafka.topic(1, {"retention.ms": "-1", "compression.type": "gzip"})
    compacted = kafka.topic(
        1,
        {
            "cleanup.policy": "compact", "segment.ms": "1000", "retention.ms": "-1",
            "min.cleanable.dirty.ratio": "0.01",
        },
    )  # fmt: skip
    transactional = kafka.topic(1, {"retention.ms": "-1"})
    producer = producer_of(kafka)
    produce_plain(producer, plain, compacted)
    produce_transactions(kafka, transactional)

    def is_cleaned() -> bool:
        producer.produce(compacted, b"later", b"later", timestamp=TIME_MS + 9_999)
        producer.flush()
        return len(in_kafka(kafka, compacted)) < 4_000

    wait_until(is_cleaned, "Kafka has compacted")
    at = in_kafka(kafka, transactional)[100][0]
    commit(kafka, "billing", {plain: 4_321, transactional: at})
    address = f"kafka:{kafka.bootstrap}"
    topics = f"{plain},{compacted},{transactional}"
    for _ in range(2):
        cli.run(appliance, "migrate", "--from", address, "--topics", topics, is_process=True)
    assert rows(appliance.address, plain)[0] == in_kafka(kafka, plain)
    for topic in (compacted, transactional):
        here = [row[1:] for row in rows(appliance.address, topic)[0]]
        assert here == [row[1:] for row in in_kafka(kafka, topic)]
    cli.run(appliance, "migrate", "switch", is_process=True)
    with Admin(appliance.address) as ours:
        found = ours.list_group_offsets("billing")
        assert found[TopicPartition(plain, 0)] == 4_321
        assert ours.describe_topics(plain)[plain]["configs"]["compression.type"] == "zstd"
        offset = found[TopicPartition(transactional, 0)]
    assert offset is not None
    there = next(row for row in rows(appliance.address, transactional)[0] if row[0] == int(offset))
    assert there[1:] == in_kafka(kafka, transactional)[100][1:]


def test_the_way_back(kafka: Kafka, appliance: EmbeddedAppliance) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions
    from confluent_kafka.admin import AdminClient

    from tailrace import NewTopic, Producer

    with Admin(appliance.address) as ours, Producer(appliance.address) as producer:
        ours.create_topics([NewTopic("home", configs={"retention.ms": -1})])
        for n in range(3_000):
            producer.send(
                "home", None if n % 9 == 4 else b"%d" % n, key=b"k%d" % n, timestamp=TIME_MS + n,
                headers=[("a", b"%d" % n)] if n % 4 == 0 else None,
            )  # fmt: skip
        producer.flush()
        ours.alter_group_offsets("billing", {TopicPartition("home", 0): 1_234})
    address = f"kafka:{kafka.bootstrap}"
    arguments = ("--to", address, "--topics", "home", "--name", "back")
    for _ in range(2):
        cli.run(appliance, "migrate", *arguments, is_process=True)
    cli.run(appliance, "migrate", "switch", "--to", address, "--name", "back", is_process=True)
    there = in_kafka(kafka, "home")
    assert [row[1:] for row in there] == [row[1:] for row in rows(appliance.address, "home")[0]]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("billing")])
    (partition,) = [
        each for each in found["billing"].result().topic_partitions if each.topic == "home"
    ]
    assert next(row for row in there if row[0] == partition.offset)[3] == b"1234"
