"""Consumer groups of Kafka's classic protocol, with real clients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

import tailrace
from netfront.kafka.wire.errors import KafkaError
from tailrace.core.errors import GroupNotEmptyError, InvalidGroupError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.raw_kafka import RawKafka
from tests.kit.processes import HANG_LIMIT_S, wait_until

confluent = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")


def filled(appliance: EmbeddedAppliance, topic: str, partitions: int = 4, count: int = 40) -> None:
    """A topic with records 0 to count - 1, spread over its partitions."""
    with tailrace.Admin(bootstrap=appliance.address) as admin:
        admin.create_topics([tailrace.NewTopic(topic, partitions)])
    with tailrace.Producer(bootstrap=appliance.address) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, partition=number % partitions)


@contextlib.contextmanager
def consumer(gateway: str, group: str, topic: str, **settings: Any) -> Iterator[Any]:
    made = confluent.Consumer(
        {"bootstrap.servers": gateway, "group.id": group, "auto.offset.reset": "earliest",
         "enable.auto.commit": False, "session.timeout.ms": 6000, "heartbeat.interval.ms": 500,
         **{name.replace("_", "."): value for name, value in settings.items()}}
    )  # fmt: skip
    try:
        made.subscribe([topic])
        yield made
    finally:
        made.close()


def read(consumers: list[Any], count: int) -> list[bytes]:
    """The values of `count` records, by all consumers."""
    found: list[bytes] = []

    def has_all() -> bool:
        for each in consumers:
            record = each.poll(0.05)
            if record is not None:
                assert record.error() is None, record.error()
                found.append(record.value())
        return len(found) >= count

    wait_until(has_all, f"{count} records")
    return found


def test_a_group_shares_the_partitions_and_its_offsets(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    filled(appliance, "shared")
    with (
        consumer(gateway, "g-shared", "shared") as one,
        consumer(gateway, "g-shared", "shared") as two,
    ):
        assert sorted(read([one, two], 40), key=int) == [b"%d" % n for n in range(40)]

        def both_have_some() -> bool:
            one.poll(0.05)
            two.poll(0.05)
            return len(one.assignment()) == len(two.assignment()) == 2

        wait_until(both_have_some, "each member has two partitions")
        offsets = [confluent.TopicPartition("shared", each, 10) for each in range(4)]
        for each in (one, two):
            own = {each.partition for each in each.assignment()}
            each.commit(offsets=[at for at in offsets if at.partition in own], asynchronous=False)
    with tailrace.Admin(bootstrap=appliance.address) as admin:
        committed = admin.list_group_offsets("g-shared")
    found = {at.partition: None if each is None else each.offset for at, each in committed.items()}
    assert found == dict.fromkeys(range(4), 10)


def test_a_group_moves_between_the_protocols(appliance: EmbeddedAppliance, gateway: str) -> None:
    filled(appliance, "moved", partitions=1)
    with tailrace.Consumer(
        "moved", bootstrap=appliance.address, group_id="g-moved", auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as ours:  # fmt: skip
        values: list[bytes] = []
        while len(values) < 10:
            values += [record.value for record in ours.poll(timeout_ms=500, max_records=10)]
        ours.commit()
        with contextlib.closing(
            confluent.Consumer(
                {"bootstrap.servers": gateway, "group.id": "g-moved", "session.timeout.ms": 6000}
            )
        ) as refused:
            refused.subscribe(["moved"])
            errors = []

            def is_refused() -> bool:
                record = refused.poll(0.1)
                errors.append(record.error().name() if record is not None else "")
                return "INCONSISTENT_GROUP_PROTOCOL" in errors

            wait_until(is_refused, "the join is refused")
    with consumer(gateway, "g-moved", "moved") as theirs:
        assert read([theirs], 15) == [b"%d" % n for n in range(10, 25)]
        theirs.commit(asynchronous=False)
        with (
            pytest.raises(InvalidGroupError, match="classic"),
            tailrace.Consumer("moved", bootstrap=appliance.address, group_id="g-moved") as ours,
        ):
            ours.poll(timeout_ms=int(HANG_LIMIT_S * 1000))
        with tailrace.Admin(bootstrap=appliance.address) as admin:
            at = tailrace.TopicPartition("moved", 0)
            with pytest.raises(GroupNotEmptyError):
                admin.alter_group_offsets("g-moved", {at: 0})
            with pytest.raises(GroupNotEmptyError):
                admin.delete_groups(["g-moved"])
    with tailrace.Consumer(
        "moved", bootstrap=appliance.address, group_id="g-moved", enable_auto_commit=False
    ) as ours:
        assert next(iter(ours)).value == b"25"


def test_a_member_that_dies_is_removed(appliance: EmbeddedAppliance, gateway: str) -> None:
    filled(appliance, "died")
    with RawKafka(gateway) as dead:
        join: dict[str, Any] = {
            "group_id": "g-died", "session_timeout_ms": 1000, "rebalance_timeout_ms": 60_000,
            "member_id": "", "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b"\0\0\0\0\0\1\0\4died\xff\xff\xff\xff"}],
        }  # fmt: skip
        asked = dead.ask(11, 5, join)
        assert asked["error_code"] == KafkaError.MEMBER_ID_REQUIRED
        joined = dead.ask(11, 5, {**join, "member_id": asked["member_id"]})
        assert (joined["error_code"], joined["generation_id"]) == (0, 1)
        assert joined["leader"] == joined["member_id"] == asked["member_id"]
    with consumer(gateway, "g-died", "died") as alive:

        def has_all() -> bool:
            alive.poll(0.05)
            return len(alive.assignment()) == 4

        wait_until(has_all, "the other member has all partitions")


def test_static_members_keep_their_partitions(appliance: EmbeddedAppliance, gateway: str) -> None:
    filled(appliance, "static")
    with consumer(gateway, "g-static", "static", group_instance_id="a") as one:
        read([one], 40)
        generation = one.consumer_group_metadata()
    with consumer(gateway, "g-static", "static", group_instance_id="a") as again:
        read([again], 40)
        assert len(again.assignment()) == 4
        assert again.consumer_group_metadata() is not generation


def test_groups_are_listed_described_and_deleted(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    from confluent_kafka.admin import AdminClient

    filled(appliance, "described")
    admin = AdminClient({"bootstrap.servers": gateway})
    with consumer(gateway, "g-described", "described") as member:
        read([member], 40)
        member.commit(asynchronous=False)
        listed = admin.list_consumer_groups().result(HANG_LIMIT_S)
        states = {each.group_id: each.state.name for each in listed.valid}
        assert states["g-described"] == "STABLE"
        found = admin.describe_consumer_groups(["g-described"])["g-described"].result(HANG_LIMIT_S)
        assert found.state.name == "STABLE"
        (described,) = found.members
        assert {at.partition for at in described.assignment.topic_partitions} == set(range(4))
        with pytest.raises(confluent.KafkaException, match="NON_EMPTY_GROUP"):
            admin.delete_consumer_groups(["g-described"])["g-described"].result(HANG_LIMIT_S)
    found = admin.describe_consumer_groups(["g-described"])["g-described"].result(HANG_LIMIT_S)
    assert (found.state.name, found.members) == ("EMPTY", [])
    asked = [confluent.ConsumerGroupTopicPartitions("g-described")]
    offsets = admin.list_consumer_group_offsets(asked)["g-described"].result(HANG_LIMIT_S)
    assert {at.partition: at.offset for at in offsets.topic_partitions} == dict.fromkeys(
        range(4), 10
    )
    admin.delete_consumer_groups(["g-described"])["g-described"].result(HANG_LIMIT_S)
    listed = admin.list_consumer_groups().result(HANG_LIMIT_S)
    assert "g-described" not in {each.group_id for each in listed.valid}


def test_offsets_of_a_transaction_are_of_the_generation(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    filled(appliance, "exact")
    producer = confluent.Producer({"bootstrap.servers": gateway, "transactional.id": "exact"})
    producer.init_transactions(HANG_LIMIT_S)
    with consumer(gateway, "g-exact", "exact") as member:
        read([member], 40)
        metadata = member.consumer_group_metadata()
        for offset in (4, 7):
            producer.begin_transaction()
            at = [confluent.TopicPartition("exact", each, offset) for each in range(4)]
            producer.send_offsets_to_transaction(at, metadata, HANG_LIMIT_S)
            producer.commit_transaction(HANG_LIMIT_S)
            found = member.committed(
                [confluent.TopicPartition("exact", each) for each in range(4)], HANG_LIMIT_S
            )
            assert [each.offset for each in found] == [offset] * 4
    with consumer(gateway, "g-exact", "exact") as other:
        read([other], 12)
        producer.begin_transaction()
        with pytest.raises(confluent.KafkaException) as refused:
            producer.send_offsets_to_transaction(
                [confluent.TopicPartition("exact", 0, 9)], metadata, HANG_LIMIT_S
            )
        assert refused.value.args[0].txn_requires_abort()
        producer.abort_transaction(HANG_LIMIT_S)


def test_a_commit_of_a_forgotten_member_is_refused_however_long_its_id_is(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    # as Kafka Streams' ids, which have the application's in them, after a restart of the gateway
    filled(appliance, "forgotten", count=1)
    partition = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1,
                 "committed_metadata": ""}  # fmt: skip
    topics = [{"name": "forgotten", "partitions": [partition]}]
    with RawKafka(gateway) as client:
        for member in ("m" * 64, "m" * 65, "m" * 200):
            asked = {"group_id": "forgotten", "generation_id_or_member_epoch": 1,
                     "member_id": member, "group_instance_id": None, "topics": topics}  # fmt: skip
            found = client.ask(8, 8, asked)
            code = found["topics"][0]["partitions"][0]["error_code"]
            assert code == KafkaError.UNKNOWN_MEMBER_ID
            transactional = client.ask(22, 4, {
                "transactional_id": "forgotten", "transaction_timeout_ms": 60_000,
                "producer_id": -1, "producer_epoch": -1,
            })  # fmt: skip
            asked = {"transactional_id": "forgotten", "group_id": "forgotten",
                     "producer_id": transactional["producer_id"],
                     "producer_epoch": transactional["producer_epoch"], "generation_id": 1,
                     "member_id": member, "group_instance_id": None, "topics": topics}  # fmt: skip
            found = client.ask(28, 3, asked)
            code = found["topics"][0]["partitions"][0]["error_code"]
            assert code == KafkaError.UNKNOWN_MEMBER_ID
