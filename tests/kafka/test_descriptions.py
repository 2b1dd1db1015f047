"""Descriptions by Kafka's administration tools: producers, share groups, the quorum, features."""

from __future__ import annotations

from typing import Any

import confluent_kafka

from netfront.kafka.apis.call import NODE_ID
from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, NewTopic, Producer, ShareConsumer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import wait_until

WRITE_MARKERS, QUORUM, UPDATE_FEATURES, PRODUCERS, TRANSACTIONS = 27, 55, 57, 61, 65
DESCRIBE_SHARE, SHARE_OFFSETS, ALTER_SHARE, DELETE_SHARE = 77, 90, 91, 92
DESCRIBE_GROUPS, INIT, LIST, CONSUMERS = 15, 22, 66, 69


def producers_of(client: RawKafka, topic: str, partition: int = 0) -> list[dict[str, Any]]:
    asked = {"topics": [{"name": topic, "partition_indexes": [partition]}]}
    (entry,) = client.ask(PRODUCERS, 0, asked)["topics"][0]["partitions"]
    assert entry["error_code"] == 0
    found: list[dict[str, Any]] = entry["active_producers"]
    return found


def test_an_open_transaction_of_a_partition_is_shown_and_an_operator_ends_it(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with Admin(appliance.address) as admin, Producer(appliance.address) as plain:
        admin.create_topics([NewTopic("written", 1)])
        for number in range(3):
            plain.send("written", b"%d" % number)
        plain.flush()
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": gateway, "transactional.id": "describes"}
        )
        producer.init_transactions()
        producer.begin_transaction()
        for _ in range(2):
            producer.produce("written", b"open", partition=0)
            producer.flush()
        with RawKafka(gateway) as client:

            def opened() -> list[dict[str, Any]]:
                found = producers_of(client, "written")
                return [one for one in found if one["current_txn_start_offset"] == 3]

            wait_until(lambda: bool(opened()), "the coordinator knows the transaction")
            (found,) = opened()
            assert found["last_sequence"] == 1
            marker = {
                "producer_id": found["producer_id"], "producer_epoch": found["producer_epoch"],
                "transaction_result": False, "coordinator_epoch": 0,
                "topics": [{"name": "written", "partition_indexes": [0]}],
            }  # fmt: skip
            answer = client.ask(WRITE_MARKERS, 1, {"markers": [marker | {"transaction_result": 1}]})
            refused = answer["markers"][0]["topics"][0]["partitions"][0]["error_code"]
            assert refused == KafkaError.INVALID_REQUEST
            answer = client.ask(WRITE_MARKERS, 1, {"markers": [marker]})
            assert answer["markers"][0]["topics"][0]["partitions"][0]["error_code"] == 0

            def is_empty() -> bool:
                asked = {"transactional_ids": ["describes"]}
                (state,) = client.ask(TRANSACTIONS, 0, asked)["transaction_states"]
                return bool(state["transaction_state"] == "Empty")

            wait_until(is_empty, "the transaction is aborted")
            assert all(
                one["current_txn_start_offset"] == -1 for one in producers_of(client, "written")
            )


def test_producers_of_a_missing_partition_are_refused(gateway: str) -> None:
    with RawKafka(gateway) as client:
        asked = {"topics": [{"name": "no-such-topic", "partition_indexes": [0]}]}
        (entry,) = client.ask(PRODUCERS, 0, asked)["topics"][0]["partitions"]
    assert entry["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def test_a_share_group_is_described_and_its_start_offsets_are_changed(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    topic = "share-described"
    with (
        Admin(appliance.address) as admin,
        Producer(appliance.address) as producer,
        RawKafka(gateway) as client,
    ):
        admin.create_topics([NewTopic(topic, 1)])
        for number in range(4):
            producer.send(topic, b"%d" % number)
        producer.flush()
        with ShareConsumer(
            topic, bootstrap=appliance.address, group_id="describees", auto_offset_reset="earliest"
        ) as consumer:
            consumer.poll(timeout_ms=10_000)
            asked = {"group_ids": ["describees"], "include_authorized_operations": True}
            (group,) = client.ask(DESCRIBE_SHARE, 1, asked)["groups"]
            (member,) = group["members"]
            assert (group["group_state"], member["subscribed_topic_names"]) == ("Stable", [topic])
            assert member["assignment"]["topic_partitions"][0]["partitions"] == [0]
            altered = {
                "group_id": "describees",
                "topics": [
                    {"topic_name": topic, "partitions": [{"partition_index": 0, "start_offset": 2}]}
                ],
            }
            answer = client.ask(ALTER_SHARE, 0, altered)
            assert answer["error_code"] == KafkaError.NON_EMPTY_GROUP
        answer = client.ask(ALTER_SHARE, 0, altered)
        assert answer["responses"][0]["partitions"][0]["error_code"] == 0

        def start_and_lag() -> tuple[int, int]:
            asked = {"groups": [{"group_id": "describees", "topics": None}]}
            (group,) = client.ask(SHARE_OFFSETS, 1, asked)["groups"]
            (partition,) = group["topics"][0]["partitions"]
            return partition["start_offset"], partition["lag"]

        wait_until(lambda: start_and_lag() == (2, 2), "the offset is set")
        deleted = {"group_id": "describees", "topics": [{"topic_name": topic}]}
        (entry,) = client.ask(DELETE_SHARE, 0, deleted)["responses"]
        assert entry["error_code"] == 0
        (entry,) = client.ask(DELETE_SHARE, 0, deleted)["responses"]
        assert entry["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def test_a_group_of_another_kind_is_no_share_group(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with Admin(appliance.address) as admin, RawKafka(gateway) as client:
        admin.create_topics([NewTopic("consumed", 1)])
        admin.alter_group_offsets("a-consumer-group", {TopicPartition("consumed", 0): 0})
        for name in ("a-consumer-group", "no-such-group"):
            (group,) = client.ask(
                DESCRIBE_SHARE, 1, {"group_ids": [name], "include_authorized_operations": False}
            )["groups"]
            (offsets,) = client.ask(
                SHARE_OFFSETS, 1, {"groups": [{"group_id": name, "topics": None}]}
            )["groups"]
            for entry in (group, offsets):
                assert entry["error_code"] == KafkaError.GROUP_ID_NOT_FOUND
                assert name in entry["error_message"]


def test_a_share_group_without_members_is_no_classic_group(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    """It was described as an empty one."""
    start = {"topic_name": "queue", "partitions": [{"partition_index": 0, "start_offset": 0}]}
    with Admin(appliance.address) as admin, RawKafka(gateway) as client:
        admin.create_topics([NewTopic("queue", 1)])
        begun = client.ask(ALTER_SHARE, 0, {"group_id": "an-empty-queue", "topics": [start]})
        assert begun["error_code"] == KafkaError.NONE
        asked = {"groups": ["an-empty-queue"], "include_authorized_operations": False}
        (older,) = client.ask(DESCRIBE_GROUPS, 5, asked)["groups"]
        assert (older["error_code"], older["group_state"]) == (KafkaError.NONE, "Dead")
        (group,) = client.ask(DESCRIBE_GROUPS, 6, asked)["groups"]
        assert group["error_code"] == KafkaError.GROUP_ID_NOT_FOUND


def test_transactions_are_listed_by_a_pattern(gateway: str) -> None:
    """Version 2 took the pattern and listed all."""
    with RawKafka(gateway) as client:
        for name in ("shop-1", "shop-2", "workshop-1"):
            begun = {"transactional_id": name, "transaction_timeout_ms": 60_000}
            assert client.ask(INIT, 4, begun)["error_code"] == 0
        asked: dict[str, Any] = {
            "state_filters": [], "producer_id_filters": [], "duration_filter": -1
        }  # fmt: skip
        every = {"shop-1", "shop-2", "workshop-1"}
        for pattern, expected in (
            ("shop-[0-9]", {"shop-1", "shop-2"}), (".*-1", {"shop-1", "workshop-1"}),
            ("shop", set()), ("", every), (None, every),
        ):  # fmt: skip
            asked["transactional_id_pattern"] = pattern
            rows = client.ask(LIST, 2, asked)["transaction_states"]
            assert {row["transactional_id"] for row in rows} & every == expected, pattern
        asked["transactional_id_pattern"] = "("
        assert client.ask(LIST, 2, asked)["error_code"] == KafkaError.INVALID_REGULAR_EXPRESSION


def test_a_transaction_of_two_phases_is_refused(gateway: str) -> None:
    """Version 6 took the flags, and the transaction ended with its timeout."""
    with RawKafka(gateway) as client:
        for flag, code in (
            ("enable2_pc", KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
            ("keep_prepared_txn", KafkaError.UNSUPPORTED_VERSION),
        ):
            asked = {"transactional_id": "two", "transaction_timeout_ms": 60_000, flag: True}
            assert client.ask(INIT, 6, asked)["error_code"] == code


def test_the_quorum_is_this_broker(gateway: str) -> None:
    asked = {
        "topics": [
            {"topic_name": "__cluster_metadata",
             "partitions": [{"partition_index": 0}, {"partition_index": 1}]}
        ]
    }  # fmt: skip
    with RawKafka(gateway) as client:
        for version in range(3):
            (topic,) = client.ask(QUORUM, version, asked)["topics"]
            found, missing = topic["partitions"]
            assert found["leader_id"] == NODE_ID
            assert [voter["replica_id"] for voter in found["current_voters"]] == [NODE_ID]
            assert missing["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION


def test_a_feature_keeps_its_level_and_the_refusal_names_it(gateway: str) -> None:
    with RawKafka(gateway) as client:
        for level, code in ((2, KafkaError.NONE), (3, KafkaError.INVALID_UPDATE_VERSION)):
            update = {
                "feature": "transaction.version", "max_version_level": level, "upgrade_type": 1,
            }  # fmt: skip
            asked = {"timeout_ms": 1, "feature_updates": [update], "validate_only": False}
            assert client.ask(UPDATE_FEATURES, 2, asked)["error_code"] == code
            (result,) = client.ask(UPDATE_FEATURES, 1, asked)["results"]
            assert result["error_code"] == code
            if code is not KafkaError.NONE:
                assert "transaction.version is 2" in result["error_message"]


def test_operations_on_a_group_are_shown_to_who_asks_for_them(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    """Those of groups of the newer protocol were not."""
    with Admin(appliance.address) as admin, RawKafka(gateway) as client:
        admin.create_topics([NewTopic("operated", 1)])
        admin.alter_group_offsets("operated", {TopicPartition("operated", 0): 0})
        for api, version, names in ((DESCRIBE_GROUPS, 5, "groups"), (CONSUMERS, 1, "group_ids")):
            for is_asked, expected in ((True, 1 << 3 | 1 << 6 | 1 << 8), (False, -(1 << 31))):
                asked = {names: ["operated"], "include_authorized_operations": is_asked}
                (group,) = client.ask(api, version, asked)["groups"]
                assert group["authorized_operations"] == expected
