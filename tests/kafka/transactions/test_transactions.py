"""Transactions of Kafka producers: decided once, whatever client, version or kill."""

from __future__ import annotations

from typing import Any

import pytest

from netfront.kafka.wire.errors import KafkaError
from tailrace import Admin, Producer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.peers.kafka_owners import END, MINUTE_MS, Owner, committed, make, owner
from tests.kit.peers.raw_kafka import RawKafka, kill_gateway
from tests.kit.processes import HANG_LIMIT_S, wait_until

KILLED_OFTEN = pytest.mark.slow_because(
    "a gateway that has died several times in this file starts again after seconds"
)

OFFSET_COMMIT, OFFSET_FETCH, JOIN = 8, 9, 11
INIT, SEND_OFFSETS, HEARTBEAT = 22, 28, 68
DESCRIBE, LIST = 65, 66


def offset_of(client: RawKafka, group: str, topic: str) -> tuple[int, int]:
    """The stable offset of partition 0 and the error code."""
    asked = {"group_id": group, "require_stable": True,
             "topics": [{"name": topic, "partition_indexes": [0]}]}  # fmt: skip
    found = client.ask(OFFSET_FETCH, 7, asked)["topics"][0]["partitions"][0]
    return found["committed_offset"], found["error_code"]


def beat(client: RawKafka, group: str, member: str, epoch: int, *topics: str) -> int:
    """A heartbeat of a member of the newer protocol; returns its epoch."""
    asked = {
        "group_id": group, "member_id": member, "member_epoch": epoch, "instance_id": None,
        "rack_id": None, "rebalance_timeout_ms": MINUTE_MS, "subscribed_topic_names": [*topics],
        "subscribed_topic_regex": None, "server_assignor": None,
        "topic_partitions": [] if epoch == 0 else None,
    }  # fmt: skip
    found = client.ask(HEARTBEAT, 1, asked)
    assert found["error_code"] == 0, found
    return int(found["member_epoch"])


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


@pytest.mark.parametrize("version", [1, 2])
def test_a_transaction_goes_on_with_its_offsets_after_the_gateways_death(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"killed-{version}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, version) as one:
        if version == 2:
            assert one.write(topic, topic_id, b"a") == 0
            assert one.end(True) == 0
        assert one.send_offset(f"g-{topic}", topic, 0) == 0
        assert one.write(topic, topic_id, b"open") == 0
        kill_gateway(appliance)
        with RawKafka(gateway) as client:
            one.client = client
            assert one.write(topic, topic_id, b"open", sequence=0) == 0
            assert one.end(True) == 0
            assert offset_of(client, f"g-{topic}", topic) == (0, 0)
            if version == 2:
                assert one.write(topic, topic_id, b"b") == 0
                assert one.end(True) == 0
    kept = [b"a", b"open", b"b"] if version == 2 else [b"open"]
    assert committed(appliance, topic, len(kept)) == kept


@pytest.mark.parametrize("version", [1, 2])
def test_offsets_of_an_open_transaction_are_pending_behind_a_restart_before_its_producer_is_heard(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    topic = f"pending-{version}"
    make(appliance, topic)
    with owner(gateway, topic, version) as one:
        assert one.send_offset(f"g-{topic}", topic, 0) == 0
        kill_gateway(appliance)
        with RawKafka(gateway) as one.client:
            unstable = (-1, KafkaError.UNSTABLE_OFFSET_COMMIT)
            assert offset_of(one.client, f"g-{topic}", topic) == unstable
            assert one.end(True) == 0
            assert offset_of(one.client, f"g-{topic}", topic) == (0, 0)


def test_offsets_that_were_given_up_behind_a_restart_are_not_committed(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    topic = "given-up"
    make(appliance, topic)
    with owner(gateway, topic, 2, timeout_ms=300) as one:
        assert one.send_offset("g-given-up", topic, 0) == 0
        kill_gateway(appliance)
        with RawKafka(gateway) as one.client:
            wait_until(
                lambda: offset_of(one.client, "g-given-up", topic) == (-1, 0),
                "the offset is stable",
            )
            assert one.end(True) == KafkaError.TRANSACTION_ABORTABLE
            assert one.end(False) == 0
            assert offset_of(one.client, "g-given-up", topic) == (-1, 0)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_replaced_owner_gets_no_further_epoch(
    appliance: EmbeddedAppliance, gateway: str, is_killed: bool
) -> None:
    topic = f"bumped-{is_killed}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, 2) as first, owner(gateway, topic, 2) as second:
        if is_killed:
            kill_gateway(appliance)
        with RawKafka(gateway) as client:
            first.client = second.client = client
            assert first.go_on() == KafkaError.PRODUCER_FENCED
            assert second.go_on() == 0
            assert second.write(topic, topic_id, b"kept") == 0
            assert second.end(True) == 0
    assert committed(appliance, topic, 1) == [b"kept"]


@KILLED_OFTEN
@pytest.mark.parametrize("outcome", [True, False])
def test_an_older_producer_goes_on_after_the_gateways_death(
    appliance: EmbeddedAppliance, gateway: str, outcome: bool
) -> None:
    topic = f"killed-old-{outcome}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, 1) as one:
        assert one.write(topic, topic_id, b"a") == 0
        assert one.end(True) == 0
        assert one.write(topic, topic_id, b"b") == 0
        assert one.write(topic, topic_id, b"c") == 0
        kill_gateway(appliance)
        with RawKafka(gateway) as client:
            one.client = client
            assert one.write(topic, topic_id, b"c", sequence=2) == 0  # sent again
            assert one.write(topic, topic_id, b"d", sequence=3) == 0
            assert one.end(outcome) == 0
            kill_gateway(appliance)
        with RawKafka(gateway) as client:
            one.client = client
            assert one.write(topic, topic_id, b"e", sequence=4) == 0
            assert one.end(True) == 0
            stranger = Owner.__new__(Owner)
            stranger.__dict__.update(one.__dict__ | {"epoch": one.epoch + 1})
            assert stranger.end(True) == KafkaError.PRODUCER_FENCED
    kept = [b"a", b"b", b"c", b"d", b"e"] if outcome else [b"a", b"e"]
    assert committed(appliance, topic, len(kept)) == kept


@KILLED_OFTEN
def test_librdkafka_goes_on_after_the_gateways_death(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    make(appliance, "rdkafka-killed")
    producer = confluent.Producer(
        {"bootstrap.servers": gateway, "transactional.id": "rdkafka-killed"}
    )
    producer.init_transactions(HANG_LIMIT_S)
    for number in range(4):
        producer.begin_transaction()
        for part in range(2):
            producer.produce("rdkafka-killed", b"%d-%d" % (number, part), partition=0)
        producer.flush(HANG_LIMIT_S)
        if number == 2:
            kill_gateway(appliance)
        producer.commit_transaction(HANG_LIMIT_S)
        if number == 1:
            kill_gateway(appliance)
    assert committed(appliance, "rdkafka-killed", 8) == [
        b"%d-%d" % (number, part) for number in range(4) for part in range(2)
    ]


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


def test_a_member_of_the_newer_protocol_commits_with_its_transaction_over_a_rebalance(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "own-a")
    make(appliance, "own-b")
    with owner(gateway, "own", 2) as one, RawKafka(gateway) as member:
        epoch = beat(member, "g-own", "m", 0, "own-a")
        assert one.send_offset("g-own", "own-a", 0, "m", epoch) == 0
        following = beat(member, "g-own", "m", epoch, "own-a", "own-b")
        assert following > epoch
        assert one.send_offset("g-own", "own-b", 0, "m", following) == 0
        assert one.end(True) == 0
        assert offset_of(member, "g-own", "own-a") == offset_of(member, "g-own", "own-b") == (0, 0)


def test_a_transaction_with_offsets_of_a_member_that_left_only_aborts(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    topic_id = make(appliance, "left")
    with owner(gateway, "left", 2) as one, RawKafka(gateway) as member:
        epoch = beat(member, "g-left", "m", 0, "left")
        assert one.send_offset("g-left", "left", 0, "m", epoch + 9) == KafkaError.ILLEGAL_GENERATION
        assert one.send_offset("g-left", "left", 0, "m", epoch) == 0
        assert one.write("left", topic_id, b"lost") == 0
        beat(member, "g-left", "m", -1)
        assert one.send_offset("g-left", "left", 0, "m", epoch) == KafkaError.UNKNOWN_MEMBER_ID
        assert one.end(True) == KafkaError.TRANSACTION_ABORTABLE
        assert one.end(False) == 0
        assert offset_of(member, "g-left", "left") == (-1, 0)


def test_a_classic_member_of_a_group_without_members_commits_nothing(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "zombie")
    with owner(gateway, "zombie", 2) as one:
        join = {"group_id": "g-zombie", "session_timeout_ms": 10_000, "member_id": "",
                "rebalance_timeout_ms": MINUTE_MS, "protocol_type": "consumer",
                "protocols": [{"name": "range", "metadata": b""}]}  # fmt: skip
        partition = {"partition_index": 0, "committed_offset": 0, "committed_leader_epoch": -1,
                     "committed_metadata": ""}  # fmt: skip

        def commit(member: str, generation: int) -> int:
            asked = {"group_id": "g-zombie", "member_id": member, "group_instance_id": None,
                     "generation_id_or_member_epoch": generation,
                     "topics": [{"name": "zombie", "partitions": [partition]}]}  # fmt: skip
            found = one.client.ask(OFFSET_COMMIT, 8, asked)
            return int(found["topics"][0]["partitions"][0]["error_code"])

        for is_pending in (False, True):
            if is_pending:
                found = one.client.ask(JOIN, 5, join)
                assert found["error_code"] == KafkaError.MEMBER_ID_REQUIRED
            for member, generation in (("old", 3), ("", 3)):
                sent = one.send_offset("g-zombie", "zombie", 0, member, generation)
                assert sent == KafkaError.UNKNOWN_MEMBER_ID
                assert commit(member, generation) == KafkaError.UNKNOWN_MEMBER_ID
        assert offset_of(one.client, "g-zombie", "zombie") == (-1, 0)
        assert commit("", -1) == 0
        assert one.send_offset("g-zombie", "zombie", 0) == 0
        assert one.end(True) == 0
        assert offset_of(one.client, "g-zombie", "zombie") == (0, 0)


def test_offsets_of_a_dead_producer_hold_up_its_group_for_the_transactions_timeout(
    appliance: EmbeddedAppliance, gateway: str
) -> None:
    make(appliance, "dead")
    with owner(gateway, "dead", 2, timeout_ms=300) as one:
        assert one.send_offset("g-dead", "dead", 0) == 0
        wait_until(
            lambda: offset_of(one.client, "g-dead", "dead") == (-1, 0), "the offset is stable"
        )
        assert one.end(True) == KafkaError.TRANSACTION_ABORTABLE
        assert one.end(False) == 0
        assert one.send_offset("g-dead", "dead", 0) == 0
        assert one.end(True) == 0
        assert offset_of(one.client, "g-dead", "dead") == (0, 0)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_librdkafka_transforms_a_topic_exactly_once_and_a_removed_member_commits_nothing(
    appliance: EmbeddedAppliance, gateway: str, protocol: str
) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    source, target, group = f"ctp-{protocol}", f"ctp-out-{protocol}", f"g-ctp-{protocol}"
    make(appliance, source)
    make(appliance, target)
    with Producer(appliance.address) as writer:
        for number in range(4):
            writer.send(source, b"%d" % number)
    producer = confluent.Producer({"bootstrap.servers": gateway, "transactional.id": target})
    producer.init_transactions(HANG_LIMIT_S)
    consumer = confluent.Consumer(
        {"bootstrap.servers": gateway, "group.id": group, "auto.offset.reset": "earliest",
         "enable.auto.commit": False, "group.protocol": protocol}
    )  # fmt: skip
    consumer.subscribe([source])

    def transform() -> Any:
        """Pass one record on; returns the member and its offset."""
        producer.begin_transaction()
        record = consumer.poll(HANG_LIMIT_S)
        producer.produce(target, record.value())
        offsets = consumer.position(consumer.assignment())
        metadata = consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction(offsets, metadata)
        return metadata, offsets

    transform()
    producer.commit_transaction(HANG_LIMIT_S)
    transform()
    producer.commit_transaction(HANG_LIMIT_S)
    metadata, offsets = transform()
    producer.abort_transaction(HANG_LIMIT_S)
    consumer.close()
    producer.begin_transaction()
    producer.produce(target, b"zombie")
    with pytest.raises(confluent.KafkaException) as refused:
        producer.send_offsets_to_transaction(offsets, metadata)
    assert refused.value.args[0].txn_requires_abort()
    producer.abort_transaction(HANG_LIMIT_S)
    assert committed(appliance, target, 2) == [b"0", b"1"]
    with RawKafka(gateway) as client:
        assert offset_of(client, group, source) == (2, 0)


@KILLED_OFTEN
@pytest.mark.parametrize("is_killed", [False, True])
def test_an_end_whose_answer_was_lost_is_repeated(
    appliance: EmbeddedAppliance, gateway: str, is_killed: bool
) -> None:
    name = f"repeated-end-{is_killed}"
    topic_id = make(appliance, name)
    for commits in (True, False):
        with owner(gateway, name, 2) as one:
            earlier = one.producer_id, one.epoch
            assert one.write(name, topic_id, b"%d" % commits) == 0
            assert one.end(commits) == 0
            following = one.producer_id, one.epoch
            assert following != earlier
            if is_killed:
                kill_gateway(appliance)
            with RawKafka(gateway) as client:
                asked = {"transactional_id": name, "producer_id": earlier[0],
                         "producer_epoch": earlier[1], "committed": commits}  # fmt: skip
                for _ in range(2):
                    found = client.ask(END, 5, asked)
                    assert found["error_code"] == 0
                    assert (found["producer_id"], found["producer_epoch"]) == following
                found = client.ask(END, 5, asked | {"committed": not commits})
                expected = (
                    KafkaError.PRODUCER_FENCED if commits else KafkaError.TRANSACTION_ABORTABLE
                )
                assert found["error_code"] == expected
                one.client = client
                assert one.write(name, topic_id, b"next") == 0
                assert one.end(True) == 0
                with RawKafka(gateway) as other:
                    Owner(other, name, 2)
                assert client.ask(END, 5, asked)["error_code"] == KafkaError.PRODUCER_FENCED
    assert committed(appliance, name, 3) == [b"1", b"next", b"next"]


@pytest.mark.parametrize("version", [1, 2])
def test_an_offset_that_cannot_be_committed_is_refused_before_the_commit(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    """The commit was refused for it, with an error that ends a producer of Java, and the group had
    pending offsets until the transaction's timeout.
    """
    topic, group = f"odd-offsets-{version}", f"g-odd-offsets-{version}"
    topic_id = make(appliance, topic)
    with owner(gateway, topic, version) as one, RawKafka(gateway) as client:
        assert one.write(topic, topic_id, b"0") == 0
        wait_until(
            lambda: one.send_offset(group, topic, 1) == KafkaError.NONE, "the record is durable"
        )
        for offset in (-1, -5, 2**62 + 1, 2**63 - 1):
            assert one.send_offset(group, topic, offset) == KafkaError.OFFSET_OUT_OF_RANGE
        for name in ("", "x" * 300):
            assert one.send_offset(name, topic, 0) == KafkaError.INVALID_GROUP_ID
        assert one.end(True) == 0
        wait_until(lambda: offset_of(client, group, topic) == (1, 0), "the offset is committed")


@pytest.mark.parametrize("version", [1, 2])
def test_an_offset_beyond_its_log_aborts_the_commit_alone(
    appliance: EmbeddedAppliance, gateway: str, version: int
) -> None:
    """It was refused when it was sent, which ended kafka-python's producer: it sends one in a
    transaction that it aborts.
    """
    topic, group = f"beyond-{version}", f"g-beyond-{version}"
    topic_id, late_id = make(appliance, topic), make(appliance, f"{topic}-late")
    aborted = KafkaError.TRANSACTION_ABORTABLE if version == 2 else KafkaError.INVALID_TXN_STATE
    with owner(gateway, topic, version) as one, RawKafka(gateway) as client:
        for offset in (100, 2**62):
            for commits in (False, True):
                assert one.send_offset(group, topic, offset) == 0
                if commits:
                    assert one.write(topic, topic_id, b"aborted") == 0
                    assert one.end(True) == aborted
                assert one.end(False) == 0
                assert offset_of(client, group, topic) == (-1, 0)
        late = f"{topic}-late"
        assert one.send_offset(group, late, 1) == 0, "of a record that comes until the commit"
        assert one.write(late, late_id, b"0") == 0
        assert one.write(topic, topic_id, b"0", sequence=0) == 0
        assert one.end(True) == 0
        wait_until(lambda: offset_of(client, group, late) == (1, 0), "the offset is committed")
    assert committed(appliance, topic, 1) == [b"0"]


def test_a_producers_id_comes_with_its_epoch(gateway: str) -> None:
    with RawKafka(gateway) as client:
        for name in (None, "half"):
            for producer_id, epoch in ((5, -1), (-1, 5)):
                asked = {"transactional_id": name, "transaction_timeout_ms": MINUTE_MS,
                         "producer_id": producer_id, "producer_epoch": epoch}  # fmt: skip
                assert client.ask(INIT, 5, asked)["error_code"] == KafkaError.INVALID_REQUEST
