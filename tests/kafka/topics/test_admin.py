"""Topics, settings and records are administered by Kafka's clients as by ours."""

from __future__ import annotations

from typing import Any

import pytest

from netfront.kafka.apis.call import NODE_ID
from netfront.kafka.wire.errors import KafkaError
from shm.messages.kafka_topic_settings import FIXED
from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import wait_until

CREATE_TOPICS, DELETE_TOPICS, DELETE_RECORDS, CREATE_PARTITIONS = 19, 20, 21, 37
DESCRIBE_CONFIGS, ALTER_CONFIGS, LOG_DIRS, INCREMENTAL = 32, 33, 35, 44
TOPIC, BROKER = 2, 4


def new_topic(name: str, **fields: Any) -> dict[str, Any]:
    topic = {"name": name, "num_partitions": -1, "replication_factor": -1, "assignments": [],
             "configs": [], **fields}  # fmt: skip
    topic["configs"] = [{"name": n, "value": v} for n, v in dict(topic["configs"]).items()]
    return topic


def create(client: RawKafka, *topics: dict[str, Any], version: int = 7, **fields: Any) -> Any:
    asked = {"topics": list(topics), "timeout_ms": 30_000, "validate_only": False, **fields}
    return client.ask(CREATE_TOPICS, version, asked)["topics"]


def settings_of(appliance: EmbeddedAppliance, topic: str) -> dict[str, Any]:
    with Admin(appliance.address) as admin:
        return dict(admin.describe_topics(topic)[topic]["configs"])


@pytest.mark.parametrize("version", range(2, 8))
def test_every_version_creates_and_deletes(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    name = f"created-{version}"
    with RawKafka(gateway) as client:
        partitions = 3 if version < 4 else -1  # the default is allowed since version 4
        topic = new_topic(name, num_partitions=partitions, configs={"retention.ms": "1000"})
        (entry,) = create(client, topic, version=version)
        assert (entry["error_code"], entry["name"]) == (0, name)
        assert settings_of(appliance, name)["retention.ms"] == 1000
        (entry,) = create(client, topic, version=version)
        assert entry["error_code"] == KafkaError.TOPIC_ALREADY_EXISTS
        asked = {"topic_names": [name], "topics": [{"name": name}], "timeout_ms": 30_000}
        (entry,) = client.ask(DELETE_TOPICS, version - 1, asked)["responses"]
        assert entry["error_code"] == 0
    with Admin(appliance.address) as admin:
        assert name not in admin.list_topics()


def test_a_topic_is_deleted_by_id(appliance: EmbeddedAppliance, gateway: str) -> None:
    with RawKafka(gateway) as client:
        (entry,) = create(client, new_topic("by-its-id"))
        asked = {"topics": [{"name": None, "topic_id": entry["topic_id"]}], "timeout_ms": 1}
        (deleted,) = client.ask(DELETE_TOPICS, 6, asked)["responses"]
        assert (deleted["error_code"], deleted["name"]) == (0, "by-its-id")
        (deleted,) = client.ask(DELETE_TOPICS, 6, asked)["responses"]
        assert deleted["error_code"] == KafkaError.UNKNOWN_TOPIC_ID


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"replication_factor": 3}, KafkaError.INVALID_REPLICATION_FACTOR, "one broker"),
        ({"num_partitions": 0}, KafkaError.INVALID_PARTITIONS, "1 or more"),
        ({"configs": {"no.such": "1"}}, KafkaError.INVALID_CONFIG, "no.such"),
        ({"configs": {"min.insync.replicas": "2"}}, KafkaError.INVALID_CONFIG, "or use '1'"),
        ({"configs": {"flush.ms": "50"}}, KafkaError.INVALID_CONFIG, "flush.ms is '50'"),
        ({"configs": {"cleanup.policy": "shred"}}, KafkaError.INVALID_CONFIG, "shred"),
        ({"configs": {"retention.ms": "long"}}, KafkaError.INVALID_CONFIG, "long"),
        (
            {"assignments": [{"partition_index": 0, "broker_ids": [7]}]},
            KafkaError.INVALID_REPLICA_ASSIGNMENT,
            f"broker {NODE_ID}",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(
    gateway: str, fields: dict[str, Any], error: KafkaError, said: str
) -> None:
    with RawKafka(gateway) as client:
        (entry,) = create(client, new_topic("refused", **fields))
        assert entry["error_code"] == error
        assert said in entry["error_message"]


def test_a_validation_creates_nothing(appliance: EmbeddedAppliance, gateway: str) -> None:
    with RawKafka(gateway) as client:
        (entry,) = create(client, new_topic("only-checked"), validate_only=True)
        assert entry["error_code"] == 0
        twice = create(client, new_topic("twice"), new_topic("twice"))
        assert [entry["error_code"] for entry in twice] == [KafkaError.INVALID_REQUEST]
    with Admin(appliance.address) as admin:
        assert not {"only-checked", "twice"} & set(admin.list_topics())


def test_kafkas_values_become_ours(appliance: EmbeddedAppliance, gateway: str) -> None:
    configs = {"cleanup.policy": "delete,compact", "compression.type": "uncompressed",
               "min.insync.replicas": "1", "max.compaction.lag.ms": str((1 << 63) - 1)}  # fmt: skip
    with RawKafka(gateway) as client:
        (entry,) = create(client, new_topic("mapped", configs=configs))
        assert entry["error_code"] == 0
    found = settings_of(appliance, "mapped")
    assert (found["cleanup.policy"], found["compression.type"]) == ("compact,delete", "none")


def test_settings_of_kafka_that_cannot_be_chosen_are_taken_with_the_value_that_holds(
    gateway: str,
) -> None:
    with RawKafka(gateway) as client:
        (entry,) = create(client, new_topic("fixed", configs=FIXED))
        assert entry["error_code"] == 0
        resource = {
            "resource_type": TOPIC,
            "resource_name": "fixed",
            "configuration_keys": [*FIXED],
        }
        asked = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
        (found,) = client.ask(DESCRIBE_CONFIGS, 4, asked)["results"]
        assert {each["name"]: each["value"] for each in found["configs"]} == FIXED
        given = [
            {"name": name, "config_operation": operation, "value": value}
            for name, operation, value in (
                ("unclean.leader.election.enable", 0, "false"), ("flush.ms", 1, None),
            )
        ]  # fmt: skip
        change = {"resource_type": TOPIC, "resource_name": "fixed", "configs": given}
        (changed,) = client.ask(INCREMENTAL, 1, {"resources": [change], "validate_only": False})[
            "responses"
        ]
        assert changed["error_code"] == 0
        change["configs"] = [{**given[0], "value": "true"}]
        (refused,) = client.ask(INCREMENTAL, 1, {"resources": [change], "validate_only": False})[
            "responses"
        ]
        assert refused["error_code"] == KafkaError.INVALID_CONFIG


def test_partitions_are_added(appliance: EmbeddedAppliance, gateway: str) -> None:
    with RawKafka(gateway) as client:
        create(client, new_topic("growing", num_partitions=2))
        for count, error in ((4, 0), (4, 37), (3, 37)):
            topics = [{"name": "growing", "count": count, "assignments": None}]
            asked = {"topics": topics, "timeout_ms": 1, "validate_only": False}
            (entry,) = client.ask(CREATE_PARTITIONS, 3, asked)["results"]
            assert entry["error_code"] == error
        (topic,) = client.ask(3, 12, {"topics": [{"name": "growing"}]})["topics"]
        assert len(topic["partitions"]) == 4


def test_records_are_deleted(appliance: EmbeddedAppliance, gateway: str) -> None:
    with RawKafka(gateway) as client:
        create(client, new_topic("shortened", num_partitions=1))
        with Producer(appliance.address) as producer:
            for number in range(5):
                producer.send("shortened", b"%d" % number)
        for partition, offset, wished in ((0, 3, (0, 3)), (0, 99, (1, -1)), (5, 0, (3, -1)),
                                          (0, -1, (0, 5))):  # fmt: skip
            partitions = [{"partition_index": partition, "offset": offset}]
            asked = {"topics": [{"name": "shortened", "partitions": partitions}], "timeout_ms": 1}
            (entry,) = client.ask(DELETE_RECORDS, 2, asked)["topics"][0]["partitions"]
            assert (entry["error_code"], entry["low_watermark"]) == wished


@pytest.mark.parametrize("policy", ["compact", "delete", "compact,delete"])
def test_records_of_a_topic_that_is_only_compacted_are_deleted_by_our_admin_alone(
    appliance: EmbeddedAppliance, gateway: str, policy: str
) -> None:
    topic = f"shortened-{policy.replace(',', '-')}"
    with RawKafka(gateway) as client, Admin(appliance.address) as admin:
        create(client, new_topic(topic, num_partitions=1, configs={"cleanup.policy": policy}))
        with Producer(appliance.address) as producer:
            for number in range(5):
                producer.send(topic, b"%d" % number, key=b"%d" % number)
        partitions = [{"partition_index": 0, "offset": 2}]
        asked = {"topics": [{"name": topic, "partitions": partitions}], "timeout_ms": 1}
        (entry,) = client.ask(DELETE_RECORDS, 2, asked)["topics"][0]["partitions"]
        wished = (KafkaError.POLICY_VIOLATION, -1) if policy == "compact" else (0, 2)
        assert (entry["error_code"], entry["low_watermark"]) == wished
        key = TopicPartition(topic, 0)
        assert admin.delete_records({key: 3}) == {key: 3}


# ---- settings ------------------------------------------------------------------------------------


def described(client: RawKafka, kind: int, name: str) -> dict[str, dict[str, Any]]:
    resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
    (result,) = client.ask(DESCRIBE_CONFIGS, 4, {"resources": [resource]})["results"]
    assert result["error_code"] == 0
    return {config["name"]: config for config in result["configs"]}


def change(client: RawKafka, kind: int, name: str, *changes: tuple[str, int, str | None]) -> Any:
    configs = [{"name": n, "config_operation": o, "value": v} for n, o, v in changes]
    resource = {"resource_type": kind, "resource_name": name, "configs": configs}
    asked = {"resources": [resource], "validate_only": False}
    return client.ask(INCREMENTAL, 1, asked)["responses"][0]


def test_settings_of_a_topic_are_changed_one_by_one(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with RawKafka(gateway) as client:
        create(client, new_topic("settings"))
        assert change(client, TOPIC, "settings", ("retention.ms", 0, "5000"))["error_code"] == 0
        wait_until(
            lambda: described(client, TOPIC, "settings")["retention.ms"]["value"] == "5000",
            "the front has the setting",
        )
        assert described(client, TOPIC, "settings")["retention.ms"]["config_source"] == 1
        changes = [("retention.ms", 1, None), ("cleanup.policy", 2, "compact")]
        assert change(client, TOPIC, "settings", *changes)["error_code"] == 0
        found = settings_of(appliance, "settings")
        assert found["retention.ms"] == 7 * 86_400_000
        assert found["cleanup.policy"] == "compact,delete"
        error = change(client, TOPIC, "settings", ("retention.ms", 2, "1"))
        assert error["error_code"] == KafkaError.INVALID_CONFIG
        error = change(client, TOPIC, "nowhere", ("retention.ms", 0, "1"))
        assert error["error_code"] == KafkaError.UNKNOWN_TOPIC_OR_PARTITION
        error = change(client, TOPIC, "settings", ("no.such", 1, None))
        assert error["error_code"] == KafkaError.INVALID_CONFIG


def test_the_full_form_replaces_all_settings(appliance: EmbeddedAppliance, gateway: str) -> None:
    with RawKafka(gateway) as client:
        create(client, new_topic("replaced", configs={"retention.ms": "7000"}))
        configs = [{"name": "segment.ms", "value": "9000"}]
        resource = {"resource_type": TOPIC, "resource_name": "replaced", "configs": configs}
        asked = {"resources": [resource], "validate_only": False}
        assert client.ask(ALTER_CONFIGS, 2, asked)["responses"][0]["error_code"] == 0
    found = settings_of(appliance, "replaced")
    assert (found["retention.ms"], found["segment.ms"]) == (7 * 86_400_000, 9000)


def test_settings_of_the_broker_are_the_appliances(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    with RawKafka(gateway) as client:
        found = described(client, BROKER, str(NODE_ID))
        assert found["kafka.num.partitions"]["value"] == "4"
        assert found["kafka.listen"]["read_only"]
        assert change(client, BROKER, str(NODE_ID), ("groups.max", 0, "500"))["error_code"] == 0
        assert described(client, BROKER, str(NODE_ID))["groups.max"]["value"] == "500"
        assert change(client, BROKER, str(NODE_ID), ("groups.max", 1, None))["error_code"] == 0
        error = change(client, BROKER, "9", ("groups.max", 0, "1"))
        assert error["error_code"] == KafkaError.INVALID_REQUEST


@pytest.mark.parametrize("version", range(1, 6))
def test_log_directories_have_their_partitions(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    with RawKafka(gateway) as client, Admin(appliance.address) as admin:
        if "stored" not in admin.list_topics():
            admin.create_topics([NewTopic("stored", partitions=2)])
            with Producer(appliance.address) as producer:
                producer.send("stored", bytes(1000), partition=1)
        asked = {"topics": [{"topic": "stored", "partitions": [0, 1]}]}
        (result,) = client.ask(LOG_DIRS, version, asked)["results"]
        assert result["log_dir"] == appliance.data_dir
        sizes = {
            p["partition_index"]: p["partition_size"] for p in result["topics"][0]["partitions"]
        }
        assert sizes[0] == 0
        assert sizes[1] > 1000


def test_what_one_broker_need_not_do_is_answered(gateway: str) -> None:
    with RawKafka(gateway) as client:
        create(client, new_topic("elected", num_partitions=1))
        asked = {"election_type": 0, "timeout_ms": 1,
                 "topic_partitions": [{"topic": "elected", "partitions": [0, 8]}]}  # fmt: skip
        (result,) = client.ask(43, 2, asked)["replica_election_results"]
        assert [p["error_code"] for p in result["partition_result"]] == [84, 3]
        assert client.ask(46, 0, {"topics": None, "timeout_ms": 1})["topics"] == []
        found = client.ask(74, 1, {"resource_types": []})["config_resources"]
        assert {"resource_name": str(NODE_ID), "resource_type": BROKER} in found


@pytest.mark.parametrize("version", [0, 1])
def test_partitions_stay_where_they_are(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    with RawKafka(gateway) as client:
        create(client, new_topic("stays", num_partitions=1))
        partitions = [
            {"partition_index": 0, "replicas": [NODE_ID]},
            {"partition_index": 0, "replicas": [NODE_ID, 8]},
            {"partition_index": 0, "replicas": None},
            {"partition_index": 9, "replicas": [NODE_ID]},
        ]
        asked = {"timeout_ms": 1, "topics": [{"name": "stays", "partitions": partitions}]}
        (found,) = client.ask(45, version, asked)["responses"]
        assert [p["error_code"] for p in found["partitions"]] == [0, 39, 85, 3]
        for path, code in ((appliance.data_dir, 0), ("/elsewhere", 57)):
            asked = {"dirs": [{"path": path, "topics": [{"name": "stays", "partitions": [0]}]}]}
            (found,) = client.ask(34, version + 1, asked)["results"]
            assert [p["error_code"] for p in found["partitions"]] == [code]


def test_librdkafka_administers(appliance: EmbeddedAppliance, gateway: str) -> None:
    confluent = pytest.importorskip("confluent_kafka.admin")
    admin = confluent.AdminClient({"bootstrap.servers": gateway})
    (made,) = admin.create_topics([confluent.NewTopic("rd-admin", 2, 1)]).values()
    made.result()
    resource = confluent.ConfigResource("topic", "rd-admin")
    (found,) = admin.describe_configs([resource]).values()
    assert found.result()["retention.ms"].value == str(7 * 86_400_000)
    (grown,) = admin.create_partitions([confluent.NewPartitions("rd-admin", 3)]).values()
    grown.result()
    (gone,) = admin.delete_topics(["rd-admin"]).values()
    gone.result()
    with Admin(appliance.address) as ours:
        assert "rd-admin" not in ours.list_topics()
