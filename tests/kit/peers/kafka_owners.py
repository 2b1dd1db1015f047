"""Transactional producers over the protocol, of either version of transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tailrace import Admin, Consumer, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.kafka_batches import kafka_batch
from tests.kit.peers.raw_kafka import RawKafka

PRODUCE, INIT, ADD_PARTITIONS, END, SEND_OFFSETS = 0, 22, 24, 26, 28
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

    def go_on(self) -> int:
        """Ask for the next epoch of the own one, as after an error; returns the error code."""
        asked = {"transactional_id": self.name, "transaction_timeout_ms": MINUTE_MS,
                 "producer_id": self.producer_id, "producer_epoch": self.epoch}  # fmt: skip
        found = self.client.ask(INIT, 5, asked)
        if not found["error_code"]:
            self.producer_id, self.epoch = found["producer_id"], found["producer_epoch"]
            self.sequence = 0
        return int(found["error_code"])

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

    def send_offset(
        self, group: str, topic: str, offset: int, member: str = "", epoch: int = -1
    ) -> int:
        """Send the offset of partition 0 to the transaction; returns the error code."""
        partition = {"partition_index": 0, "committed_offset": offset,
                     "committed_leader_epoch": -1, "committed_metadata": ""}  # fmt: skip
        asked = {"transactional_id": self.name, "group_id": group, "producer_id": self.producer_id,
                 "producer_epoch": self.epoch, "generation_id": epoch, "member_id": member,
                 "group_instance_id": None,
                 "topics": [{"name": topic, "partitions": [partition]}]}  # fmt: skip
        found = self.client.ask(SEND_OFFSETS, 5 if self.version == 2 else 3, asked)
        return int(found["topics"][0]["partitions"][0]["error_code"])


@contextmanager
def owner(gateway: str, name: str, version: int, timeout_ms: int = MINUTE_MS) -> Iterator[Owner]:
    with RawKafka(gateway) as client:
        yield Owner(client, name, version, timeout_ms)
