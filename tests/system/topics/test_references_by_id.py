"""References that last name a topic, not its name: a topic is deleted and made again under
consumers, queues and leases that knew the old one.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import Any

import pytest

from tailrace import (
    Admin,
    Consumer,
    InvalidRequestError,
    NewTopic,
    Producer,
    Record,
    ShareConsumer,
    TopicPartition,
    UnknownTopicError,
    UnknownTopicIdError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.idempotent import SqlSink
from tests.kit.members.groups import poll_until, read_until
from tests.kit.members.queues import share, take

COUNT = 10
LONG_MS = 60_000


def send(appliance: EmbeddedAppliance, topic: str, first: int = 0) -> None:
    with Producer(appliance.address) as producer:
        for number in range(first, first + COUNT):
            producer.send(topic, str(number).encode(), partition=0)
        producer.flush()


def make_again(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        admin.delete_topics([topic])
        admin.create_topics([NewTopic(topic, 1)])


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic, 1)])
    send(appliance, topic)
    return topic


def test_a_commit_of_what_was_read_before_a_topic_was_made_again_is_refused_and_its_reader_gets_everything(  # noqa: E501
    appliance: EmbeddedAppliance, made: str
) -> None:
    key, group = TopicPartition(made, 0), f"g-{made}"
    settings: dict[str, Any] = {
        "bootstrap": appliance.address,
        "group_id": group,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    with Consumer(**settings) as old:
        old.assign([key])
        assert len(read_until([old], COUNT)) == COUNT
        make_again(appliance, made)
        send(appliance, made, 100)
        with pytest.raises(UnknownTopicIdError, match="created later"):
            old.commit()
        with pytest.raises(UnknownTopicError):
            old.commit({key: 5})
    with Consumer(**settings) as new:
        new.assign([key])
        assert [record.value for record in read_until([new], COUNT)] == [
            str(number).encode() for number in range(100, 100 + COUNT)
        ]
        new.commit()
        assert new.committed(key) == COUNT


def test_a_consumer_of_a_deleted_topic_is_not_told_an_offset_of_the_one_that_has_its_name(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """`position()` asked by name, and went on at the group's offset in the new topic."""
    key = TopicPartition(made, 0)
    settings: dict[str, Any] = {
        "bootstrap": appliance.address,
        "group_id": f"g-{made}",
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    with Consumer(**settings) as old, Consumer(**settings) as new:
        old.assign([key])
        make_again(appliance, made)
        send(appliance, made, 100)
        new.assign([key])
        new.commit({key: 5})
        assert new.committed(key) == 5
        assert new.position(key) == 5
        assert old.committed(key) is None
        assert old.position(key) == 0


def test_a_group_with_latest_that_was_away_reads_a_topic_that_was_made_again_from_its_first_record(
    appliance: EmbeddedAppliance, made: str
) -> None:
    settings: dict[str, Any] = {
        "bootstrap": appliance.address,
        "group_id": f"g-{made}",
        "auto_offset_reset": "latest",
    }
    with Consumer(made, **settings) as consumer:
        poll_until([consumer], consumer.assignment, "it has the partition")
        poll_until(
            [consumer],
            lambda: consumer.position(TopicPartition(made, 0)) == COUNT,
            "it begins at the end",
        )
        send(appliance, made)
        read_until([consumer], COUNT)
    make_again(appliance, made)
    send(appliance, made, 100)
    with Consumer(made, **settings) as consumer:
        assert [record.offset for record in read_until([consumer], COUNT)] == list(range(COUNT))


def test_a_queue_whose_topic_was_made_again_while_it_was_away_delivers_it_from_the_first_record(
    appliance: EmbeddedAppliance, made: str
) -> None:
    with (
        share(appliance, made, auto_offset_reset="latest") as consumer,
        Admin(appliance.address) as admin,
    ):
        while f"g-{made}" not in admin.list_groups():
            assert consumer.poll(50) == [], "it begins at the end"
    make_again(appliance, made)
    send(appliance, made, 100)
    with share(appliance, made, auto_offset_reset="latest") as consumer:
        assert [record.offset for record in take(consumer, COUNT)] == list(range(COUNT))


def test_a_record_of_a_deleted_topic_cannot_be_committed_in_the_topic_that_has_its_name(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """`commit(record)` meant the topic that was read by then, and skipped its records."""
    key = TopicPartition(made, 0)
    with Consumer(
        made,
        bootstrap=appliance.address,
        group_id=f"g-{made}",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as consumer:
        old = read_until([consumer], COUNT)
        make_again(appliance, made)
        send(appliance, made, 100)
        new = read_until([consumer], COUNT)
        consumer.commit(new[2])
        for given in (old[4], {TopicPartition(old[4].topic, 0): 5}):
            with pytest.raises(UnknownTopicIdError):
                consumer.commit(given)
        ended: list[Exception | None] = []
        consumer.commit_async(new[3], lambda _offsets, error: ended.append(error))
        consumer.commit_async(old[4], lambda _offsets, error: ended.append(error))
        consumer.commit_async(new[4], lambda _offsets, error: ended.append(error))
        poll_until([consumer], lambda: len(ended) == 3, "the commits have ended")
        assert [type(error) for error in ended] == [type(None), UnknownTopicIdError, type(None)]
        assert consumer.committed(key) == 5


@pytest.mark.parametrize("outcome", ["accept", "release", "reject"])
def test_a_record_of_a_deleted_topic_cannot_be_acknowledged_in_the_topic_that_has_its_name(
    appliance: EmbeddedAppliance, made: str, outcome: str
) -> None:
    """The record of the new topic with its offset was accepted, and never handled."""
    with share(appliance, made, share_acknowledgement_mode="explicit") as consumer:
        old = take(consumer, COUNT)
        make_again(appliance, made)
        send(appliance, made, 100)
        new = take(consumer, COUNT)
        with pytest.raises(InvalidRequestError, match="was deleted"):
            consumer.acknowledge(old[2], outcome)
        consumer.acknowledge(new[2], "accept")
        consumer.commit()


def test_what_a_queue_has_acquired_of_a_topic_that_it_does_not_know_yet_has_no_delivery(
    appliance: EmbeddedAppliance, made: str
) -> None:
    with share(appliance, made, share_acknowledgement_mode="explicit") as consumer:
        take(consumer, COUNT)
        make_again(appliance, made)
        send(appliance, made, 100)
        poll_loop = consumer._poll_loop
        while not poll_loop.fetch_loop._unplaced:
            poll_loop.run_once(COUNT)
    with share(appliance, made) as consumer:
        assert [record.delivery_count for record in take(consumer, COUNT)] == [1] * COUNT


def test_a_loop_over_a_queue_accepts_no_record_of_the_topic_that_has_the_name_of_its_own(
    appliance: EmbeddedAppliance, made: str
) -> None:
    def fail(consumer: ShareConsumer) -> None:
        for record in consumer:
            assert record.value == b"0", "the job fails"

    with share(appliance, made) as consumer:
        for record in consumer:
            if record.value != b"0":
                break
            consumer.commit()
            make_again(appliance, made)
            send(appliance, made, 100)
            with pytest.raises(AssertionError, match="the job fails"):
                fail(consumer)
    with share(appliance, made) as consumer:
        assert {record.offset for record in take(consumer, COUNT)} == set(range(COUNT))


def test_a_lease_of_a_topic_that_was_made_again_is_refused(
    appliance: EmbeddedAppliance, made: str
) -> None:
    key = TopicPartition(made, 0)
    with Admin(appliance.address) as admin:
        old = admin.topic_info([made])[made].topic_id
        admin.lease_offsets("scan", {key: 0}, 60_000, topic_ids={made: old})
        make_again(appliance, made)
        with pytest.raises(UnknownTopicIdError):
            admin.lease_offsets("scan", {key: 0}, 60_000, topic_ids={made: old})
        admin.lease_offsets(
            "scan", {key: 0}, 60_000, topic_ids={made: admin.topic_info([made])[made].topic_id}
        )
        admin.lease_offsets("scan", {key: 0}, 0)


def test_a_consumer_that_was_assigned_a_topic_made_again_is_told_by_kind(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """The position is of the old topic: it is neither applied to the new one nor reset."""
    key = TopicPartition(topic, 0)
    with Admin(appliance.address) as admin, Consumer(bootstrap=appliance.address) as consumer:
        admin.create_topics(NewTopic(topic))
        consumer.assign([key])
        consumer.seek_to_beginning()
        assert consumer.position(key) == 0
        admin.delete_topics([topic])
        admin.create_topics(NewTopic(topic))
        with pytest.raises(UnknownTopicIdError):
            consumer.poll(60_000)


@pytest.mark.parametrize("group", [None, "g"])
@pytest.mark.parametrize("is_given_up", [False, True], ids=["assign", "unsubscribe, assign"])
def test_a_consumer_that_assigns_again_reads_the_topic_that_was_made_again(
    appliance: EmbeddedAppliance, made: str, group: str | None, is_given_up: bool
) -> None:
    """The error advises it. The topic was taken from what was known of the deleted one, and each
    poll raised.
    """
    key = TopicPartition(made, 0)
    with Consumer(
        bootstrap=appliance.address, group_id=group and f"g-{made}", auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([key])
        assert len(consumer.consume(COUNT)) == COUNT
        make_again(appliance, made)
        send(appliance, made, 100)
        with pytest.raises(UnknownTopicIdError):
            consumer.poll(LONG_MS)
        if is_given_up:
            consumer.unsubscribe()
        consumer.assign([key])
        assert [int(record.value) for record in consumer.consume(COUNT)] == list(range(100, 110))


def test_a_kept_partition_of_a_deleted_topic_does_not_keep_others_from_being_assigned(
    appliance: EmbeddedAppliance, made: str
) -> None:
    other = f"{made}-other"
    with Admin(appliance.address) as admin, Consumer(bootstrap=appliance.address) as consumer:
        admin.create_topics(NewTopic(other))
        consumer.assign([TopicPartition(made, 0)])
        admin.delete_topics([made])
        consumer.assign([TopicPartition(made, 0), TopicPartition(other, 0)])
        assert len(consumer.assignment()) == 2
        with pytest.raises(UnknownTopicError):
            Consumer(bootstrap=appliance.address).assign([TopicPartition(made, 0)])


def test_the_place_of_a_deleted_topics_record_is_not_sought_in_the_topic_that_was_made_again(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """A program that seeks back to a record that has failed skipped records of the new topic."""
    with Consumer(
        made, bootstrap=appliance.address, group_id=f"g-{made}", auto_offset_reset="earliest"
    ) as consumer:
        failed = consumer.consume(COUNT)[5]
        consumer.seek(TopicPartition(failed.topic, failed.partition), failed.offset)
        assert consumer.consume(1) == [failed]
        make_again(appliance, made)
        send(appliance, made, 100)
        assert consumer.consume(1)[0].value == b"100"
        with pytest.raises(UnknownTopicIdError, match="deleted"):
            consumer.seek(TopicPartition(failed.topic, failed.partition), failed.offset)
        assert consumer.consume(1)[0].offset == 1


def test_a_partition_that_is_assigned_by_the_name_in_a_deleted_topics_record_is_the_new_topics(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """Its commits were refused as those of the deleted topic."""
    key = TopicPartition(made, 0)
    with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as reader:
        reader.assign([key])
        record = reader.consume(1)[0]
    make_again(appliance, made)
    send(appliance, made, 100)
    with Consumer(
        bootstrap=appliance.address, group_id=f"g-{made}", auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([TopicPartition(record.topic, record.partition)])
        assert consumer.consume(COUNT)[0].value == b"100"
        consumer.commit()
        assert consumer.committed(key) == COUNT


def test_a_sink_that_seeks_in_a_topic_that_was_made_again_knows_no_gaps_of_the_deleted_one(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """Records of the new topic were refused as left out of a transaction over the deleted one."""
    key = TopicPartition(made, 0)
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        sink = SqlSink(database, "billing")
        for turn in range(2):
            with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
                consumer.assign([key])
                sink.seek(consumer)
                records = consumer.consume(COUNT)
            if turn == 0:
                with sink.transaction(records[:3] + records[6:]):
                    pass
                make_again(appliance, made)
                send(appliance, made, 100)
        with sink.transaction(records[:8]) as tx:
            assert len(tx.records) == 8
        with sink.transaction(records) as tx:
            assert [record.offset for record in tx.records] == [8, 9]


@pytest.mark.parametrize("has_noticed", [False, True])
@pytest.mark.parametrize("deserializes", [False, True])
def test_a_retry_of_a_deleted_topics_record_is_of_that_record_or_none(
    appliance: EmbeddedAppliance, made: str, deserializes: bool, has_noticed: bool
) -> None:
    """With a deserializer the record at the same place of the new topic was retried instead, and
    without one the header named the new topic.
    """
    with Consumer(
        made,
        bootstrap=appliance.address,
        group_id=f"g-{made}",
        auto_offset_reset="earliest",
        value_deserializer=bytes if deserializes else None,
    ) as consumer:
        record = consumer.consume(COUNT)[5]
        make_again(appliance, made)
        send(appliance, made, 100)
        if has_noticed:
            assert read_until([consumer], COUNT)[5].value == b"105"
        if deserializes:
            with pytest.raises(UnknownTopicError):
                consumer.retry_later(record, 0)
        else:
            assert consumer.retry_later(record, 0) == 1
            found: list[Record] = []
            while not found:
                found = [one for one in consumer.poll(1_000) if one.topic != made]
            assert found[0].value == b"5"
            assert dict(found[0].headers)["retry.topic_id"].decode() == record.topic_id.hex()


def test_a_partition_of_a_deleted_topic_without_a_position_says_so(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """A listener that raises leaves a partition without a position."""

    class Listener:
        def on_partitions_assigned(self, _assigned: list[TopicPartition]) -> None:
            raise LookupError

        def on_partitions_revoked(self, _revoked: list[TopicPartition]) -> None:
            pass

    with Consumer(bootstrap=appliance.address, group_id=f"g-{made}") as consumer:
        consumer.subscribe([made], listener=Listener())
        with pytest.raises(LookupError):
            consumer.poll(LONG_MS)
        with Admin(appliance.address) as admin:
            admin.delete_topics([made])
        with pytest.raises(UnknownTopicError, match="has no position"):
            consumer.position(TopicPartition(made, 0))
