"""Kafka's share consumers acquire and acknowledge records of our share groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.topics import read_all
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import kill_and_wait_for_successor, wait_until

HEARTBEAT, FETCH, ACKNOWLEDGE = 76, 78, 79
ACCEPT, RELEASE = 1, 2


class Sharer:
    """A member of a share group over the protocol."""

    def __init__(self, client: RawKafka, group: str, topic: str, topic_id: bytes) -> None:
        self.client = client
        self.group = group
        self.topic_id = topic_id
        self.session_epoch = 0
        self.epoch = 0
        joined = self.beat([topic])
        assert joined["error_code"] == 0
        (assigned,) = joined["assignment"]["topic_partitions"]
        assert (assigned["topic_id"], assigned["partitions"]) == (topic_id, [0])

    def beat(self, topics: list[str] | None = None) -> dict[str, Any]:
        asked = {"group_id": self.group, "member_id": "sharer", "member_epoch": self.epoch,
                 "subscribed_topic_names": topics}  # fmt: skip
        found = self.client.ask(HEARTBEAT, 1, asked)
        self.epoch = found["member_epoch"]
        return found

    def ask(self, api: int, *runs: tuple[int, int, list[int]], **fields: Any) -> dict[str, Any]:
        batches = [
            {"first_offset": first, "last_offset": last, "acknowledge_types": types}
            for first, last, types in runs
        ]
        partitions = [{"partition_index": 0, "acknowledgement_batches": batches}]
        topics = [{"topic_id": self.topic_id, "partitions": partitions}]
        asked = {"group_id": self.group, "member_id": "sharer", "max_wait_ms": 0, "min_bytes": 1,
                 "max_records": 100, "batch_size": 100,
                 "share_session_epoch": self.session_epoch, "forgotten_topics_data": [],
                 "topics": topics, **fields}  # fmt: skip
        found = self.client.ask(api, 2, asked)
        if not found["error_code"]:
            self.session_epoch += 1
        return found

    def fetch(self, *runs: tuple[int, int, list[int]], **fields: Any) -> dict[str, Any]:
        """The entry of the partition."""
        found = self.ask(FETCH, *runs, **fields)
        assert found["error_code"] == 0
        if not found["responses"]:
            return {"acquired_records": [], "records": b""}
        entry: dict[str, Any] = found["responses"][0]["partitions"][0]
        return entry


def make(appliance: EmbeddedAppliance, topic: str, configs: dict[str, Any] | None = None) -> bytes:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1, configs or {})])
        return bytes.fromhex(str(admin.describe_topics(topic)[topic]["topic_id"]))


def send(appliance: EmbeddedAppliance, topic: str, *values: bytes) -> None:
    with Producer(appliance.address) as producer:
        for value in values:
            producer.send(topic, value)


@contextmanager
def sharing(
    appliance: EmbeddedAppliance,
    gateway: str,
    group: str,
    topic: str,
    configs: dict[str, Any] | None = None,
) -> Iterator[Sharer]:
    """The one member of a group that reads a new topic."""
    topic_id = make(appliance, topic, configs)
    with RawKafka(gateway) as client:
        yield Sharer(client, group, topic, topic_id)


def acquired(entry: dict[str, Any]) -> list[tuple[int, int, int]]:
    return [
        (run["first_offset"], run["last_offset"], run["delivery_count"])
        for run in entry["acquired_records"]
    ]


def test_a_member_is_told_of_a_topic_and_of_partitions_that_came_later(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with sharing(appliance, gateway, "told", "shared-early") as sharer:
        told: dict[bytes, list[int]] = {}

        def heard() -> dict[bytes, list[int]]:
            found = sharer.beat()
            assert found["error_code"] == 0
            for topic in (found["assignment"] or {}).get("topic_partitions", ()):
                told[topic["topic_id"]] = topic["partitions"]
            return told

        sharer.beat(["shared-early", "shared-late"])
        late_id = make(appliance, "shared-late")
        wait_until(lambda: heard().get(late_id) == [0], "the topic is assigned")
        with Admin(appliance.address) as admin:
            admin.create_partitions({"shared-early": 3})
        wait_until(lambda: heard()[sharer.topic_id] == [0, 1, 2], "the partitions are assigned")
        assert sharer.beat()["assignment"] is None
        kill_gateway(appliance)
    with RawKafka(gateway) as sharer.client:
        assert sharer.beat()["error_code"] == KafkaError.UNKNOWN_MEMBER_ID
        sharer.epoch = 0
        found = sharer.beat(["shared-early"])["assignment"]["topic_partitions"]
        assert [topic["partitions"] for topic in found] == [[0, 1, 2]]


def test_records_of_partitions_that_a_client_does_not_fetch_are_given_back(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with sharing(appliance, gateway, "grown", "shared-grown") as sharer:
        assert acquired(sharer.fetch()) == []
        with Admin(appliance.address) as admin:
            admin.create_partitions({"shared-grown": 2})
        with Producer(appliance.address) as producer:
            producer.send("shared-grown", b"a", partition=1).result()
        place = {"topic_id": sharer.topic_id,
                 "partitions": [{"partition_index": 1, "acknowledgement_batches": []}]}  # fmt: skip
        for _ in range(3):
            assert sharer.ask(FETCH, max_wait_ms=100)["responses"] == []

        got: list[tuple[int, int, int]] = []
        while not got:  # the first response may be empty, and another waits for the record
            for topic in sharer.ask(FETCH, topics=[place], max_wait_ms=60_000)["responses"]:
                got += acquired(topic["partitions"][0])
        assert got == [(0, 0, 1)]


def test_records_are_acquired_accepted_and_released(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with sharing(appliance, gateway, "sharers", "shared") as sharer:
        assert acquired(sharer.fetch()) == []
        send(appliance, "shared", b"a", b"b", b"c", b"d")
        entry = sharer.fetch(max_wait_ms=60_000)
        while sum(last - first + 1 for first, last, _ in acquired(entry)) < 4:
            more = sharer.fetch(max_wait_ms=60_000)  # the records came in several batches
            entry["acquired_records"] += more["acquired_records"]
            entry["records"] = bytes(entry["records"]) + bytes(more["records"])
        assert {count for _, _, count in acquired(entry)} == {1}
        assert all(value in bytes(entry["records"]) for value in (b"a", b"b", b"c", b"d"))
        entry = sharer.fetch((0, 3, [ACCEPT, RELEASE, ACCEPT, ACCEPT]), max_wait_ms=60_000)
        assert entry["acknowledge_error_code"] == 0
        assert acquired(entry) == [(1, 1, 2)]
        found = sharer.ask(ACKNOWLEDGE, (1, 1, [ACCEPT]))
        assert found["responses"][0]["partitions"][0]["error_code"] == 0
        found = sharer.ask(ACKNOWLEDGE, (1, 1, [ACCEPT]))
        error = found["responses"][0]["partitions"][0]["error_code"]
        assert error == KafkaError.INVALID_RECORD_STATE
        assert sharer.ask(FETCH, share_session_epoch=-1)["error_code"] == 0


def test_sessions_and_acknowledgements_that_do_not_fit_are_refused(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with sharing(appliance, gateway, "sessions", "sessions") as sharer:
        lost = sharer.ask(FETCH, share_session_epoch=5)
        assert lost["error_code"] == KafkaError.SHARE_SESSION_NOT_FOUND
        sharer.fetch()
        wrong = sharer.ask(FETCH, share_session_epoch=7)
        assert wrong["error_code"] == KafkaError.INVALID_SHARE_SESSION_EPOCH
        for run in ((0, 5, [1, 1]), (-1, 0, [1]), (5, 2, [1]), (0, 0, [9]), (0, 1 << 62, [1, 2])):
            found = sharer.ask(FETCH, run)
            assert found["error_code"] == KafkaError.INVALID_REQUEST
        sharer.epoch = -1
        assert sharer.beat()["error_code"] == 0


def alter_start(client: RawKafka, group: str, topic: str, offset: int) -> tuple[int, list[int]]:
    """The error of AlterShareGroupOffsets, and those of its partitions."""
    partitions = [{"partition_index": 0, "start_offset": offset}]
    topics = [{"topic_name": topic, "partitions": partitions}]
    found = client.ask(91, 0, {"group_id": group, "topics": topics})
    return found["error_code"], [
        part["error_code"] for each in found["responses"] for part in each["partitions"]
    ]


def test_a_group_begins_where_it_was_put_before_it_had_members(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    topic_id = make(appliance, "shared-start")
    send(appliance, "shared-start", b"a", b"b", b"c")
    with RawKafka(gateway) as client, Admin(appliance.address) as admin:
        unknown = [KafkaError.UNKNOWN_TOPIC_OR_PARTITION]
        assert alter_start(client, "put", "no-such-topic", 0) == (0, unknown)
        assert "put" not in admin.list_groups()
        assert alter_start(client, "put", "shared-start", 99) == (0, [1])
        assert "put" not in admin.list_groups()
        assert alter_start(client, "put", "shared-start", 1) == (0, [0])
        kill_and_wait_for_successor(appliance, "tr-groups-0")
        assert admin.list_groups()["put"]["kind"] == "share"
        sharer = Sharer(client, "put", "shared-start", topic_id)
        entry = sharer.fetch(max_wait_ms=60_000)
        assert acquired(entry)[0][0] == 1
        error, _ = alter_start(client, "put", "shared-start", 0)
        assert error == KafkaError.NON_EMPTY_GROUP


def test_a_consumer_group_is_not_made_a_share_group(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "not-shared")
    send(appliance, "not-shared", b"a")
    with RawKafka(gateway) as client, Admin(appliance.address) as admin:
        admin.alter_group_offsets("eaters", {TopicPartition("not-shared", 0): 1})
        error, _ = alter_start(client, "eaters", "not-shared", 0)
        assert error == KafkaError.INVALID_GROUP_ID
        assert admin.list_groups()["eaters"]["kind"] == "consumer"


def test_partitions_that_do_not_exist_are_named_in_the_answer(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with sharing(appliance, gateway, "strange", "shared-known") as sharer:
        topics = [
            {"topic_id": each, "partitions": [{"partition_index": index,
                                               "acknowledgement_batches": []}]}
            for each, index in ((sharer.topic_id, 0), (sharer.topic_id, 9), (b"x" * 16, 0))
        ]  # fmt: skip
        found = {
            (topic["topic_id"], part["partition_index"]): part["error_code"]
            for topic in sharer.ask(FETCH, topics=topics)["responses"]
            for part in topic["partitions"]
        }
        assert found[sharer.topic_id, 9] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        assert found[b"x" * 16, 0] == KafkaError.UNKNOWN_TOPIC_ID
        assert found.get((sharer.topic_id, 0), 0) == 0


@pytest.mark.parametrize("member_epoch", [3, -5])
def test_a_heartbeat_of_no_member_is_refused(gateway: str, member_epoch: int) -> None:
    with RawKafka(gateway) as client:
        asked = {"group_id": "strangers", "member_id": "x", "member_epoch": member_epoch,
                 "subscribed_topic_names": None}  # fmt: skip
        assert client.ask(HEARTBEAT, 1, asked)["error_code"] != 0


def release_twice(appliance: EmbeddedAppliance, sharer: Sharer, topic: str) -> None:
    """Send one record, and have it released as often as it may be delivered."""
    sharer.fetch()
    send(appliance, topic, b"poison")
    assert acquired(sharer.fetch(max_wait_ms=60_000)) == [(0, 0, 1)]
    assert acquired(sharer.fetch((0, 0, [RELEASE]), max_wait_ms=60_000)) == [(0, 0, 2)]
    assert acquired(sharer.fetch((0, 0, [RELEASE]))) == []


def test_a_record_at_the_delivery_limit_becomes_a_dead_letter(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    limit = {"group.share.delivery.count.limit": 2}
    with sharing(appliance, gateway, "poisoned", "poisoned", limit) as sharer:
        release_twice(appliance, sharer, "poisoned")
        (letter,) = read_all(appliance, "poisoned.dlq", 1)
        assert (letter.value, letter.key) == (b"poison", None)
        headers = dict(letter.headers)
        assert (headers["dlq.offset"], headers["dlq.group"]) == (b"0", b"poisoned")
        assert b"delivered 2 times" in headers["dlq.reason"]
        with Admin(appliance.address) as admin:
            assert admin.describe_groups("poisoned")["poisoned"]["partitions"][0]["lag"] == 0


def test_a_dead_letter_that_cannot_be_written_stays_in_its_queue(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    settings = {
        "group.share.delivery.count.limit": 2, "dead.letter.topic": "unwritable",
        "group.share.record.lock.duration.ms": 1_000,
    }  # fmt: skip
    schema = pa.schema([("row", pa.int64())])
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic("unwritable", 1, schema=schema)])
    with sharing(appliance, gateway, "keepers", "kept", settings) as sharer:
        release_twice(appliance, sharer, "kept")
        assert "kafka_dead_letter_not_written group=keepers" in appliance_log(appliance)
        with Admin(appliance.address) as admin:
            assert admin.describe_groups("keepers")["keepers"]["partitions"][0]["lag"] == 1
            admin.alter_topics({"kept": {"dead.letter.topic": ""}})
        wait_until(
            lambda: not acquired(sharer.fetch()) and has_letter(appliance), "the letter is written"
        )


def has_letter(appliance: EmbeddedAppliance) -> bool:
    with Admin(appliance.address) as admin:
        return "kept.dlq" in admin.list_topics()


def appliance_log(appliance: EmbeddedAppliance) -> str:
    with open(appliance.log_path, encoding="utf-8") as log:
        return log.read()
