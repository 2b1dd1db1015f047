"""Members of Kafka's newer group protocol (KIP-848) share partitions, with ours too."""

from __future__ import annotations

from typing import Any

import pytest

from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S, wait_until

HEARTBEAT, DESCRIBE, COMMIT = 68, 69, 8


def make(appliance: EmbeddedAppliance, topic: str, partitions: int = 2) -> bytes:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, partitions)])
        return bytes.fromhex(str(admin.describe_topics(topic)[topic]["topic_id"]))


def beat(client: RawKafka, group: str, member: str, epoch: int, **fields: Any) -> dict[str, Any]:
    asked = {
        "group_id": group, "member_id": member, "member_epoch": epoch, "instance_id": None,
        "rack_id": None, "rebalance_timeout_ms": -1, "subscribed_topic_names": None,
        "subscribed_topic_regex": None, "server_assignor": None, "topic_partitions": None, **fields,
    }  # fmt: skip
    return client.ask(HEARTBEAT, 1, asked)


def partitions_of(response: dict[str, Any]) -> set[tuple[bytes, int]]:
    if response["assignment"] is None:
        return set()
    return {
        (topic["topic_id"], partition)
        for topic in response["assignment"]["topic_partitions"]
        for partition in topic["partitions"]
    }


def test_a_member_joins_owns_and_leaves(appliance: EmbeddedAppliance, gateway: str) -> None:
    topic_id = make(appliance, "joined")
    with RawKafka(gateway) as client:
        fields = {"subscribed_topic_names": ["joined"], "topic_partitions": [],
                  "rebalance_timeout_ms": 9_000, "server_assignor": "uniform"}  # fmt: skip
        joined = beat(client, "joining", "m-1", 0, **fields)
        assert joined["error_code"] == 0
        assert partitions_of(joined) == {(topic_id, 0), (topic_id, 1)}
        owned = [{"topic_id": topic_id, "partitions": [0, 1]}]
        kept = beat(client, "joining", "m-1", joined["member_epoch"], topic_partitions=owned)
        assert kept["error_code"] == 0
        (group,) = client.ask(DESCRIBE, 1, {"group_ids": ["joining"]})["groups"]
        assert (group["group_state"], group["assignor_name"]) == ("Stable", "uniform")
        (member,) = group["members"]
        (assigned,) = member["assignment"]["topic_partitions"]
        assert (assigned["topic_name"], assigned["partitions"]) == ("joined", [0, 1])
        assert beat(client, "joining", "m-1", -1)["error_code"] == 0
        unknown = beat(client, "joining", "m-1", joined["member_epoch"])
        assert unknown["error_code"] == KafkaError.UNKNOWN_MEMBER_ID


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"server_assignor": "none-such"}, KafkaError.UNSUPPORTED_ASSIGNOR),
        ({"subscribed_topic_regex": "("}, KafkaError.INVALID_REGULAR_EXPRESSION),
        ({"subscribed_topic_regex": "(?=a)b"}, KafkaError.INVALID_REGULAR_EXPRESSION),
    ],
)
def test_a_join_that_cannot_be_is_refused(
    gateway: str, fields: dict[str, Any], error: KafkaError
) -> None:
    with RawKafka(gateway) as client:
        found = beat(client, "refusing", "m", 0, subscribed_topic_names=["t"],
                     topic_partitions=[], **fields)  # fmt: skip
        assert found["error_code"] == error


def test_a_pattern_takes_topics_that_come_later(appliance: EmbeddedAppliance, gateway: str) -> None:
    first = make(appliance, "pattern-a", 1)
    with RawKafka(gateway) as client:
        joined = beat(client, "patterns", "m", 0, subscribed_topic_regex="pattern-.*",
                      subscribed_topic_names=[], topic_partitions=[])  # fmt: skip
        assert partitions_of(joined) == {(first, 0)}
        second = make(appliance, "pattern-b", 1)
        epoch, found = joined["member_epoch"], set[tuple[bytes, int]]()

        def has_both() -> bool:
            nonlocal epoch
            owned = [{"topic_id": topic, "partitions": [0]} for topic, _ in found]
            answer = beat(client, "patterns", "m", epoch, topic_partitions=owned)
            assert answer["error_code"] == 0
            epoch = answer["member_epoch"]
            found.update(partitions_of(answer))
            return found == {(first, 0), (second, 0)}

        wait_until(has_both, "the member has both topics")


def test_a_pattern_is_taken_up_again_after_a_restart_of_the_gateway(
    appliance: EmbeddedAppliance,
) -> None:
    first = make(appliance, "kept-a", 1)
    with RawKafka(appliance.kafka_addresses[0]) as client:
        joined = beat(client, "kept", "m", 0, subscribed_topic_regex="kept-.*",
                      topic_partitions=[])  # fmt: skip
        assert joined["error_code"] == 0
    kill_gateway(appliance)
    second = make(appliance, "kept-b", 1)
    epoch, found = joined["member_epoch"], set[tuple[bytes, int]]()
    with RawKafka(appliance.kafka_addresses[0]) as client:

        def has_both() -> bool:
            nonlocal epoch
            owned = [{"topic_id": topic, "partitions": [0]} for topic, _ in found]
            answer = beat(client, "kept", "m", epoch, topic_partitions=owned)
            assert answer["error_code"] == 0
            epoch = answer["member_epoch"]
            found.update(partitions_of(answer))
            return found == {(first, 0), (second, 0)}

        wait_until(has_both, "the member has the topic that came after the restart")


def test_librdkafka_moves_to_our_consumer_with_its_offsets(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    make(appliance, "moving", 1)
    with Producer(appliance.address) as producer:
        for number in range(10):
            producer.send("moving", b"%d" % number)
    consumer = confluent.Consumer(
        {"bootstrap.servers": gateway, "group.id": "movers", "group.protocol": "consumer",
         "auto.offset.reset": "earliest", "enable.auto.commit": False}
    )  # fmt: skip
    consumer.subscribe(["moving"])
    for number in range(4):
        (message,) = consumer.consume(1, HANG_LIMIT_S)
        assert message.value() == b"%d" % number
        consumer.commit(message, asynchronous=False)
    consumer.close()
    with Consumer(
        "moving", bootstrap=appliance.address, group_id="movers", auto_offset_reset="earliest"
    ) as ours:
        assert next(iter(ours)).value == b"4"
