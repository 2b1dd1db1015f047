"""A topic is deleted and created again under consumers of Kafka's classic protocol: they read the
new one from its first record, and no offset of the deleted one is committed in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka
    import kafka.errors

import confluent_kafka

from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kafka.conftest import SETTINGS
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S, children, wait_until

OLD_COUNT, NEW_COUNT = 10, 30
METADATA, OFFSET_COMMIT, OFFSET_FETCH, EPOCHS = 3, 8, 9, 23


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    """Clients that ask for a topic create none, between its deletion and its creation."""
    with contextlib.closing(start_embedded(settings=SETTINGS, auto_create_topics=False)) as made:
        yield made


def make(appliance: EmbeddedAppliance, topic: str) -> bytes:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1)])
        return bytes.fromhex(str(admin.describe_topics(topic)[topic]["topic_id"]))


def make_again(appliance: EmbeddedAppliance, topic: str) -> bytes:
    with Admin(appliance.address) as admin:
        admin.delete_topics([topic])
    return make(appliance, topic)


def send(appliance: EmbeddedAppliance, topic: str, first: int, count: int) -> None:
    with Producer(appliance.address) as producer:
        for number in range(first, first + count):
            producer.send(topic, b"%d" % number)


def committed(appliance: EmbeddedAppliance, topic: str) -> int | None:
    with Consumer(bootstrap=appliance.address, group_id=f"g-{topic}") as consumer:
        found = consumer.committed(TopicPartition(topic, 0))
    return None if found is None else int(found)


class Confluent:
    """librdkafka's consumer."""

    def __init__(self, gateway: str, topic: str, reset: str = "earliest") -> None:
        self._consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": gateway, "group.id": f"g-{topic}",
                "auto.offset.reset": reset, "enable.auto.commit": False,
                "topic.metadata.refresh.interval.ms": 500,
            }
        )  # fmt: skip
        self._consumer.subscribe([topic])

    def poll(self) -> list[int]:
        messages = self._consumer.consume(100, 0.3)
        return [int(one.value()) for one in messages if not one.error()]

    def commit(self, topic: str, offset: int) -> None:
        """Raises KafkaException."""
        place = confluent_kafka.TopicPartition(topic, 0, offset)
        (done,) = self._consumer.commit(offsets=[place], asynchronous=False) or [place]
        if done.error is not None:
            raise confluent_kafka.KafkaException(done.error)

    def close(self) -> None:
        self._consumer.close()


class KafkaPython:
    """kafka-python's consumer."""

    def __init__(self, gateway: str, topic: str, reset: str = "earliest") -> None:
        self._consumer: Any = kafka.KafkaConsumer(
            topic, bootstrap_servers=gateway, group_id=f"g-{topic}", auto_offset_reset=reset,
            enable_auto_commit=False, metadata_max_age_ms=500,
        )  # fmt: skip

    def poll(self) -> list[int]:
        found = self._consumer.poll(300)
        return [int(one.value) for records in found.values() for one in records]

    def commit(self, topic: str, offset: int) -> None:
        """Raises KafkaError."""
        place = kafka.TopicPartition(topic, 0)
        self._consumer.commit({place: kafka.OffsetAndMetadata(offset, "", -1)})

    def close(self) -> None:
        self._consumer.close()


@pytest.fixture(params=[Confluent, KafkaPython])
def reader(
    request: pytest.FixtureRequest, appliance: EmbeddedAppliance, gateway: str, topic: str
) -> Iterator[Any]:
    make(appliance, topic)
    send(appliance, topic, 0, OLD_COUNT)
    with contextlib.closing(request.param(gateway, topic)) as made:
        yield made


def read(reader: Any, count: int) -> list[int]:
    found: list[int] = []

    def is_enough() -> bool:
        found.extend(reader.poll())
        return len(found) >= count

    wait_until(is_enough, f"{count} records are read")
    return found


def test_a_member_reads_a_topic_that_was_made_again_from_its_first_record(
    appliance: EmbeddedAppliance, topic: str, reader: Any
) -> None:
    """It went on at offset 10 of the new topic."""
    assert read(reader, OLD_COUNT) == list(range(OLD_COUNT))
    reader.commit(topic, OLD_COUNT)
    assert committed(appliance, topic) == OLD_COUNT
    make_again(appliance, topic)
    send(appliance, topic, 100, NEW_COUNT)
    assert read(reader, NEW_COUNT) == list(range(100, 100 + NEW_COUNT))
    reader.commit(topic, NEW_COUNT)
    assert committed(appliance, topic) == NEW_COUNT


@pytest.mark.parametrize("reader", [Confluent], indirect=True)
def test_a_member_reads_it_from_its_first_record_behind_a_restart_of_the_gateway(
    appliance: EmbeddedAppliance, topic: str, reader: Any
) -> None:
    """The gateway remembers no reader then: the leader epoch tells the topics apart."""
    assert read(reader, OLD_COUNT) == list(range(OLD_COUNT))
    os.kill(children(appliance)["tr-kafka-0"], signal.SIGSTOP)  # no fetch comes before the new one
    make_again(appliance, topic)
    send(appliance, topic, 100, NEW_COUNT)
    kill_gateway(appliance)
    assert read(reader, NEW_COUNT) == list(range(100, 100 + NEW_COUNT))


def test_an_offset_of_the_deleted_topic_is_refused_by_its_leader_epoch(
    appliance: EmbeddedAppliance, gateway: str, topic: str
) -> None:
    make(appliance, topic)
    send(appliance, topic, 0, OLD_COUNT)

    def epoch_of(client: RawKafka) -> int:
        asked = {"topics": [{"name": topic}], "allow_auto_topic_creation": False}
        (found,) = client.ask(METADATA, 9, asked)["topics"]
        return int(found["partitions"][0]["leader_epoch"]) if found["partitions"] else -1

    def commit(client: RawKafka, epoch: int) -> int:
        partition = {
            "partition_index": 0, "committed_offset": 5, "committed_leader_epoch": epoch,
            "committed_metadata": "",
        }  # fmt: skip
        answer = client.ask(
            OFFSET_COMMIT, 9,
            {"group_id": f"g-{topic}", "generation_id_or_member_epoch": -1, "member_id": "",
             "group_instance_id": None, "topics": [{"name": topic, "partitions": [partition]}]},
        )  # fmt: skip
        return int(answer["topics"][0]["partitions"][0]["error_code"])

    with RawKafka(gateway) as client:
        wait_until(lambda: epoch_of(client) >= 0, "the gateway knows the topic")
        old = epoch_of(client)
        assert commit(client, old) == 0
        make_again(appliance, topic)
        send(appliance, topic, 100, NEW_COUNT)
        wait_until(lambda: epoch_of(client) > old, "the gateway knows the new topic")
        assert commit(client, old) == KafkaError.UNKNOWN_TOPIC_ID
        assert committed(appliance, topic) is None
        partition = {"partition": 0, "current_leader_epoch": epoch_of(client), "leader_epoch": old}
        asked = {"replica_id": -1, "topics": [{"topic": topic, "partitions": [partition]}]}
        (entry,) = client.ask(EPOCHS, 4, asked)["topics"][0]["partitions"]
        assert (entry["error_code"], entry["leader_epoch"], entry["end_offset"]) == (0, old, 0)
        assert commit(client, epoch_of(client)) == 0
        asked = {"groups": [{"group_id": f"g-{topic}", "member_id": None, "member_epoch": -1,
                             "topics": [{"name": topic, "partition_indexes": [0]}]}],
                 "require_stable": False}  # fmt: skip
        (found,) = client.ask(OFFSET_FETCH, 9, asked)["groups"][0]["topics"]
        assert found["partitions"][0]["committed_leader_epoch"] == epoch_of(client)
        for of_another_cluster in (5, epoch_of(client) + 1, 2**31 - 1):
            assert commit(client, of_another_cluster) == 0
            (found,) = client.ask(OFFSET_FETCH, 9, asked)["groups"][0]["topics"]
            assert found["partitions"][0]["committed_leader_epoch"] == -1


def test_a_members_offset_in_a_deleted_topic_is_not_committed_in_the_one_of_its_name(
    appliance: EmbeddedAppliance, topic: str, reader: Any
) -> None:
    """The group skipped the first records of the new topic."""
    read(reader, OLD_COUNT)
    make_again(appliance, topic)
    # At once: librdkafka fetches in advance, and has read the new topic soon.
    with pytest.raises((kafka.errors.KafkaError, confluent_kafka.KafkaException)):
        reader.commit(topic, OLD_COUNT)
    assert committed(appliance, topic) is None
    send(appliance, topic, 100, NEW_COUNT)
    assert read(reader, NEW_COUNT) == list(range(100, 100 + NEW_COUNT))
    reader.commit(topic, NEW_COUNT)
    assert committed(appliance, topic) == NEW_COUNT


@pytest.mark.parametrize("kind", [Confluent, KafkaPython])
def test_a_group_that_was_away_reads_a_topic_that_was_made_again_from_its_first_record(
    appliance: EmbeddedAppliance, gateway: str, topic: str, kind: Any
) -> None:
    """With "latest" it skipped what was written while it was away."""
    make(appliance, topic)
    send(appliance, topic, 0, OLD_COUNT)
    with contextlib.closing(kind(gateway, topic)) as reader:
        read(reader, OLD_COUNT)
        reader.commit(topic, OLD_COUNT)
    make_again(appliance, topic)
    send(appliance, topic, 100, NEW_COUNT)
    with contextlib.closing(kind(gateway, topic, "latest")) as reader:
        assert read(reader, NEW_COUNT) == list(range(100, 100 + NEW_COUNT))


def test_a_commit_by_topic_id_is_of_that_topic(
    appliance: EmbeddedAppliance, gateway: str, topic: str
) -> None:
    old = make(appliance, topic)
    send(appliance, topic, 0, OLD_COUNT)
    group = f"g-{topic}"

    def commit(client: RawKafka, topic_id: bytes) -> int:
        partition = {
            "partition_index": 0, "committed_offset": 5, "committed_leader_epoch": -1,
            "committed_metadata": "",
        }  # fmt: skip
        answer = client.ask(
            OFFSET_COMMIT, 10,
            {"group_id": group, "generation_id_or_member_epoch": -1, "member_id": "",
             "group_instance_id": None,
             "topics": [{"topic_id": topic_id, "partitions": [partition]}]},
        )  # fmt: skip
        return int(answer["topics"][0]["partitions"][0]["error_code"])

    with RawKafka(gateway) as client:
        client.set_timeout(HANG_LIMIT_S)
        wait_until(lambda: commit(client, old) == 0, "the gateway knows the topic")
        new = make_again(appliance, topic)
        send(appliance, topic, 0, OLD_COUNT)
        wait_until(lambda: commit(client, old) == KafkaError.UNKNOWN_TOPIC_ID, "it is deleted")
        assert committed(appliance, topic) is None
        wait_until(lambda: commit(client, new) == 0, "the gateway knows the new topic")
        asked = {"topic_id": new, "partition_indexes": [0]}
        answer = client.ask(
            OFFSET_FETCH, 10,
            {"groups": [{"group_id": group, "member_id": None, "member_epoch": -1,
                         "topics": [asked]}],
             "require_stable": False},
        )  # fmt: skip
        ((found,),) = (one["partitions"] for one in answer["groups"][0]["topics"])
        assert found["committed_offset"] == 5
