"""Transactions of Kafka producers: decided once, whatever client, version or kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, Consumer, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.kafka_batches import kafka_batch
from tests.kit.processes import HANG_LIMIT_S, wait_until
from tests.kit.raw_kafka import RawKafka, kill_gateway

PRODUCE, INIT, ADD_PARTITIONS, END = 0, 22, 24, 26
DESCRIBE, LIST = 65, 66
MINUTE_MS = 60_000


def make(appliance: EmbeddedAppliance, topic: str) -> bytes:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
        return bytes.fromhex(str(admin.describe_topics(topic)[topic]["topic_id"]))


def committed(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes | None]:
    """The first `count` committed values of a topic."""
    found: list[bytes | None] = []
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while len(found) < count:
            some = consumer.poll(timeout_ms=60_000)
            assert some, found
            found += [record.value for record in some]
    return found


class Owner:
    """A transactional producer over the protocol: of transaction version 1 or 2."""

    def __init__(self, client: RawKafka, name: str, version: int, timeout_ms: int = MINUTE_MS):
        self.client = client
        self.name = name
        self.version = version
        self.sequence = 0
        asked = {"transactional_id": name, "transaction_timeout_ms": timeout_ms,
                 "producer_id": -1, "producer_epoch": -1}  # fmt: skip
        found = client.ask(INIT, 5, asked)
        assert found["error_code"] == 0
        self.producer_id, self.epoch = found["producer_id"], found["producer_epoch"]

    def write(self, topic: str, topic_id: bytes, *values: bytes, sequence: int = -1) -> int:
        """Returns the error code."""
        first = self.sequence if sequence < 0 else sequence
        records = kafka_batch(
            *values, producer=(self.producer_id, self.epoch, first), is_transactional=True
        )
        if self.version == 1:
            assert self.add(topic) == 0
        if sequence < 0:
            self.sequence += len(values)
        version = 13 if self.version == 2 else 9
        data = [{"index": 0, "records": records}]
        topics = [{"name": topic, "topic_id": topic_id, "partition_data": data}]
        asked = {"transactional_id": self.name, "acks": -1, "timeout_ms": MINUTE_MS,
                 "topic_data": topics}  # fmt: skip
        found = self.client.ask(PRODUCE, version, asked)
        return int(found["responses"][0]["partition_responses"][0]["error_code"])

    def add(self, topic: str) -> int:
        """Add a partition; returns the error code."""
        asked = {"v3_and_below_transactional_id": self.name,
                 "v3_and_below_producer_id": self.producer_id,
                 "v3_and_below_producer_epoch": self.epoch,
                 "v3_and_below_topics": [{"name": topic, "partitions": [0]}]}  # fmt: skip
        found = self.client.ask(ADD_PARTITIONS, 3, asked)
        (topic_entry,) = found["results_by_topic_v3_and_below"]
        return int(topic_entry["results_by_partition"][0]["partition_error_code"])

    def end(self, commits: bool) -> int:
        """Commit or abort; returns the error code."""
        asked = {"transactional_id": self.name, "producer_id": self.producer_id,
                 "producer_epoch": self.epoch, "committed": commits}  # fmt: skip
        found = self.client.ask(END, 5 if self.version == 2 else 3, asked)
        if self.version == 2 and not found["error_code"]:
            self.producer_id, self.epoch = found["producer_id"], found["producer_epoch"]
            self.sequence = 0
        return int(found["error_code"])


@contextmanager
def owner(gateway: str, name: str, version: int, timeout_ms: int = MINUTE_MS) -> Iterator[Owner]:
    with RawKafka(gateway) as client:
        yield Owner(client, name, version, timeout_ms)


@pytest.mark.parametrize("version", [1, 2])
def test_many_transactions_of_one_producer(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"many-{version}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, version) as one:
        for number in range(6):
            assert one.write(topic, topic_id, b"%d" % number, b"+") == 0
            assert one.write(topic, topic_id, b"-") == 0
            assert one.end(number % 2 == 0) == 0
    assert committed(appliance, topic, 9) == [b"0", b"+", b"-", b"2", b"+", b"-", b"4", b"+", b"-"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_repeated_batch_is_appended_once_and_a_gap_is_refused(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"repeated-{version}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, version) as one:
        assert one.write(topic, topic_id, b"a") == 0
        assert one.end(True) == 0
        first = one.sequence
        assert one.write(topic, topic_id, b"b") == 0
        assert one.write(topic, topic_id, b"b", sequence=first) == 0
        assert one.end(True) == 0
    assert committed(appliance, topic, 2) == [b"a", b"b"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_second_owner_fences_the_first(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"fenced-{version}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, version) as first:
        assert first.write(topic, topic_id, b"lost") == 0
        with owner(gateway, topic, version) as second:
            if version == 2:
                assert first.write(topic, topic_id, b"late") == KafkaError.INVALID_PRODUCER_EPOCH
            else:
                assert first.add(topic) == KafkaError.PRODUCER_FENCED
            assert first.end(True) == KafkaError.PRODUCER_FENCED
            assert second.write(topic, topic_id, b"kept") == 0
            assert second.end(True) == 0
    assert committed(appliance, topic, 1) == [b"kept"]


def described(gateway: str, name: str) -> dict[str, Any]:
    with RawKafka(gateway) as client:
        (found,) = client.ask(DESCRIBE, 0, {"transactional_ids": [name]})["transaction_states"]
        return dict(found)


@pytest.mark.parametrize("version", [1, 2])
def test_a_transaction_that_times_out_cannot_be_committed_and_the_next_one_can(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"timeout-{version}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, version, timeout_ms=300) as one:
        assert one.write(topic, topic_id, b"late") == 0
        epoch = one.epoch
        wait_until(
            lambda: described(gateway, topic)["producer_epoch"] > epoch,
            "the transaction is aborted",
        )
        error = KafkaError.TRANSACTION_ABORTABLE if version == 2 else KafkaError.INVALID_TXN_STATE
        assert one.end(True) == error
        assert one.end(False) == 0
        assert one.write(topic, topic_id, b"next") == 0
        assert one.end(True) == 0
    assert committed(appliance, topic, 1) == [b"next"]


def test_a_producer_of_version_2_goes_on_after_the_gateways_death(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    topic_id = make(appliance, "killed-2")
    with owner(gateway, "killed-2", 2) as one:
        assert one.write("killed-2", topic_id, b"a") == 0
        assert one.end(True) == 0
        assert one.write("killed-2", topic_id, b"b") == 0
        kill_gateway(appliance)
        with RawKafka(gateway) as client:
            one.client = client
            assert one.write("killed-2", topic_id, b"b", sequence=0) == 0
            assert one.end(True) == 0
    assert committed(appliance, "killed-2", 2) == [b"a", b"b"]


def test_an_older_producer_is_fenced_after_the_gateways_death(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    topic_id = make(appliance, "killed-1")
    with owner(gateway, "killed-1", 1) as one:
        assert one.write("killed-1", topic_id, b"a") == 0
        assert one.end(True) == 0
        assert one.write("killed-1", topic_id, b"b") == 0
        kill_gateway(appliance)
        with RawKafka(gateway) as client:
            one.client = client
            assert one.end(True) == KafkaError.PRODUCER_FENCED
            assert Owner(client, "killed-1", 1).write("killed-1", topic_id, b"c") == 0
    assert committed(appliance, "killed-1", 1) == [b"a"]


def test_transactions_are_described_and_listed(appliance: EmbeddedAppliance, gateway: str) -> None:
    topic_id = make(appliance, "shown")
    with owner(gateway, "shown", 2) as one:
        assert one.write("shown", topic_id, b"a") == 0
        wait_until(
            lambda: described(gateway, "shown")["transaction_state"] == "Ongoing",
            "the worker has reported it",
        )
        asked = {"state_filters": ["Ongoing"], "duration_filter": -1}
        listed = one.client.ask(LIST, 1, asked)["transaction_states"]
        assert "shown" in {found["transactional_id"] for found in listed}
        found = one.client.ask(DESCRIBE, 0, {"transactional_ids": ["none"]})["transaction_states"]
        assert found[0]["error_code"] == KafkaError.TRANSACTIONAL_ID_NOT_FOUND
        assert one.end(False) == 0


def test_librdkafka_commits_with_offsets_and_aborts(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    make(appliance, "rd-in")
    make(appliance, "rd-out")
    producer = confluent.Producer({"bootstrap.servers": gateway, "transactional.id": "rd"})
    consumer = confluent.Consumer({"bootstrap.servers": gateway, "group.id": "rd-group"})
    producer.init_transactions(HANG_LIMIT_S)
    for number, commits in enumerate((True, False, True)):
        producer.begin_transaction()
        producer.produce("rd-out", b"%d" % number)
        offsets = [confluent.TopicPartition("rd-in", 0, 0)]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
        if commits:
            producer.commit_transaction(HANG_LIMIT_S)
        else:
            producer.abort_transaction(HANG_LIMIT_S)
    consumer.close()
    assert committed(appliance, "rd-out", 2) == [b"0", b"2"]
    with Admin(appliance.address) as admin:
        assert admin.list_group_offsets("rd-group")


def test_kafka_python_commits_and_aborts(appliance: EmbeddedAppliance, gateway: str) -> None:
    kafka_python: Any = pytest.importorskip("kafka")
    make(appliance, "kp-out")
    producer = kafka_python.KafkaProducer(bootstrap_servers=gateway, transactional_id="kp")
    producer.init_transactions()
    for number in range(3):
        producer.begin_transaction()
        producer.send("kp-out", b"%d" % number)
        if number == 1:
            producer.abort_transaction()
        else:
            producer.commit_transaction()
    producer.close()
    assert committed(appliance, "kp-out", 2) == [b"0", b"2"]
