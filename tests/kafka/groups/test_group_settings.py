"""Settings of groups by `kafka-configs --entity-type groups`: members get them as they join."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from netfront.kafka.wire.errors import KafkaError
from shm.messages.kafka_group_settings import GROUP_SETTINGS
from tailrace import Admin, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway

DESCRIBE_CONFIGS, ALTER_CONFIGS, INCREMENTAL, LIST_RESOURCES = 32, 33, 44, 74
CONSUMER_HEARTBEAT, SHARE_HEARTBEAT, SHARE_OFFSETS = 68, 76, 90
GROUP, SET, DELETE = 32, 0, 1
DEFAULT_SOURCE, GROUP_SOURCE = 5, 8


@pytest.fixture
def client(gateway: str) -> Iterator[RawKafka]:
    with RawKafka(gateway) as made:
        yield made


def change_of(group: str, *changes: tuple[str, int, str | None]) -> dict[str, Any]:
    configs = [{"name": n, "config_operation": o, "value": v} for n, o, v in changes]
    resource = {"resource_type": GROUP, "resource_name": group, "configs": configs}
    return {"resources": [resource], "validate_only": False}


def change(client: RawKafka, group: str, *changes: tuple[str, int, str | None]) -> dict[str, Any]:
    (found,) = client.ask(INCREMENTAL, 1, change_of(group, *changes))["responses"]
    assert (found["resource_type"], found["resource_name"]) == (GROUP, group)
    return dict(found)


def described(client: RawKafka, group: str) -> dict[str, tuple[str, int]]:
    """Setting -> (value, source)."""
    resource = {"resource_type": GROUP, "resource_name": group, "configuration_keys": None}
    asked = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    (found,) = client.ask(DESCRIBE_CONFIGS, 4, asked)["results"]
    assert found["error_code"] == 0
    return {one["name"]: (one["value"], one["config_source"]) for one in found["configs"]}


def test_a_share_group_begins_where_its_setting_says(
    appliance: EmbeddedAppliance, gateway: str, client: RawKafka
) -> None:
    """The setting comes before the group, and outlives the gateway."""
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics([NewTopic("begun", 1)])
        producer.send("begun", b"early").result()
    assert change(client, "early", ("share.auto.offset.reset", SET, "earliest"))["error_code"] == 0
    kill_gateway(appliance)

    def start_of(again: RawKafka, group: str) -> int:
        member = {"group_id": group, "member_id": "m", "member_epoch": 0,
                  "subscribed_topic_names": ["begun"]}  # fmt: skip
        assert again.ask(SHARE_HEARTBEAT, 1, member)["error_code"] == 0
        asked = {"groups": [{"group_id": group, "topics": None}]}
        (found,) = again.ask(SHARE_OFFSETS, 1, asked)["groups"]
        return int(found["topics"][0]["partitions"][0]["start_offset"])

    with RawKafka(gateway) as again:
        assert described(again, "early")["share.auto.offset.reset"] == ("earliest", GROUP_SOURCE)
        assert (start_of(again, "early"), start_of(again, "late")) == (0, 1)


@pytest.mark.parametrize("kind", ["consumer", "share"])
def test_members_get_the_heartbeat_interval_of_their_group(client: RawKafka, kind: str) -> None:
    group, api = f"beats-{kind}", {"consumer": CONSUMER_HEARTBEAT, "share": SHARE_HEARTBEAT}[kind]
    member = {"group_id": group, "member_id": "m", "member_epoch": 0, "instance_id": None,
              "rack_id": None, "rebalance_timeout_ms": 1_000, "subscribed_topic_names": ["beats"],
              "subscribed_topic_regex": None, "server_assignor": None,
              "topic_partitions": []}  # fmt: skip
    name = f"{kind}.heartbeat.interval.ms"
    assert client.ask(api, 1, member)["heartbeat_interval_ms"] == GROUP_SETTINGS[name].default
    assert change(client, group, (name, SET, "7000"))["error_code"] == 0
    assert client.ask(api, 1, {**member, "member_epoch": 0})["heartbeat_interval_ms"] == 7_000


def test_settings_are_described_removed_and_replaced(client: RawKafka) -> None:
    session, interval = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"
    given = (session, SET, "20000"), (interval, SET, "2000")
    assert change(client, "described", *given)["error_code"] == 0
    found = described(client, "described")
    assert (found[session], found[interval]) == (("20000", GROUP_SOURCE), ("2000", GROUP_SOURCE))
    assert found["share.isolation.level"] == ("read_committed", DEFAULT_SOURCE)
    assert change(client, "described", (session, DELETE, None))["error_code"] == 0
    assert described(client, "described")[session] == ("45000", DEFAULT_SOURCE)
    whole = change_of("described", (session, SET, "30000"))
    (answer,) = client.ask(ALTER_CONFIGS, 2, whole)["responses"]
    assert answer["error_code"] == 0
    found = described(client, "described")
    assert (found[session], found[interval]) == (("30000", GROUP_SOURCE), ("3000", DEFAULT_SOURCE))
    listed = client.ask(LIST_RESOURCES, 1, {"resource_types": [GROUP]})["config_resources"]
    assert {"resource_name": "described", "resource_type": GROUP} in listed


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("share.auto.offset.reset", "by_duration:PT1H", "it takes earliest or latest"),
        ("share.isolation.level", "read_uncommitted", "or use 'read_committed'"),
        ("share.record.lock.duration.ms", "15000", "set group.share.record.lock.duration.ms of"),
        ("streams.session.timeout.ms", "45000", "KIP-1071"),
        ("no.such", "1", "'no.such' is no setting of groups"),
        ("consumer.session.timeout.ms", "1", "group.session.timeout.min.ms"),
        ("consumer.session.timeout.ms", "much", "a whole number of ms"),
        ("consumer.heartbeat.interval.ms", "45000", "must be below consumer.session.timeout.ms"),
    ],
)
def test_what_cannot_be_is_refused_by_its_words(
    client: RawKafka, name: str, value: str, said: str
) -> None:
    found = change(client, "refused", (name, SET, value))
    assert found["error_code"] == KafkaError.INVALID_CONFIG
    assert said in found["error_message"]
    assert all(source == DEFAULT_SOURCE for _, source in described(client, "refused").values())


def test_changes_of_several_clients_at_once_are_all_kept(client: RawKafka, gateway: str) -> None:
    others = [RawKafka(gateway) for _ in range(5)]
    for number, one in enumerate(others):
        asked = change_of(f"at-once-{number}", ("share.auto.offset.reset", SET, "earliest"))
        one.send(INCREMENTAL, 1, asked)
    for one in others:
        (answer,) = one.receive(INCREMENTAL, 1)[1]["responses"]
        assert answer["error_code"] == 0
        one.close()
    for number in range(5):
        found = described(client, f"at-once-{number}")
        assert found["share.auto.offset.reset"] == ("earliest", GROUP_SOURCE)
