"""Readers without a group and partitions that are added: they can be assigned at once, and with
hash slots every key keeps its order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, Record, TopicPartition
from tailrace.aio import AsyncConsumer, AsyncProducer
from tailrace.core.errors import PartitionOutOfRangeError, RecordTooLargeError, UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import wait_until

KEYS = [b"key %d" % number for number in range(40)]


@pytest.fixture
def admin(appliance: EmbeddedAppliance) -> Iterator[Admin]:
    with Admin(appliance.address) as made:
        yield made


def produce(producer: Producer, topic: str, first: int, count: int) -> None:
    """Produce the values first to first + count - 1 of each key, in small batches."""
    for number in range(first, first + count):
        for key in KEYS:
            producer.send(topic, b"%d" % number, key=key)
        producer.flush(60)


class InOrder:
    """Counts values of keys, and finds out what is not in order."""

    def __init__(self) -> None:
        self.following = dict.fromkeys(KEYS, 0)

    def take(self, records: list[Record]) -> None:
        for record in records:
            assert record.key is not None
            assert int(record.value or b"") == self.following[record.key], (
                f"{record.key!r} at {record.partition}:{record.offset}"
            )
            self.following[record.key] += 1

    def read(self, consumer: Consumer, count: int) -> None:
        """Until there are so many of each key."""
        while not self.has(count):
            records = consumer.poll(60_000)
            assert records, "nothing comes any more"
            self.take(records)

    def has(self, count: int) -> bool:
        return set(self.following.values()) == {count}


def test_a_running_producer_sends_to_added_partitions_at_once_when_they_are_named(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics([NewTopic(topic, 1)])

    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            await producer.send_and_wait(topic, b"old")
            admin.create_partitions({topic: 6})
            assert (await producer.send_and_wait(topic, b"new", partition=5)).partition == 5

    with Producer(appliance.address) as records, Producer(appliance.address) as frames:
        for producer in (records, frames):
            producer.send(topic, b"old").result(60)
        admin.create_partitions({topic: 3})
        assert records.send(topic, b"new", partition=2).result(60).partition == 2
        (written,) = frames.send_arrow(topic, pa.table({"value": [b"new"]}), partition=2).result(60)
        assert written.partition == 2
        for use in (
            lambda: records.send(topic, b"new", partition=3),
            lambda: frames.send_arrow(topic, pa.table({"value": [b"new"]}), partition=3),
        ):
            with pytest.raises(PartitionOutOfRangeError, match="has partitions 0 to 2, not 3"):
                use()
    asyncio.run(main())


def test_a_running_producer_notices_added_partitions_and_changed_settings(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics([NewTopic(topic, 1, {"max.message.bytes": 100_000})])
    with Producer(appliance.address, metadata_max_age_ms=50) as producer:
        with pytest.raises(RecordTooLargeError):
            producer.send(topic, bytes(200_000))
        admin.alter_topics({topic: {"max.message.bytes": 500_000}})
        admin.create_partitions({topic: 4})
        used: set[int] = set()

        def has_all() -> bool:
            futures = [producer.send(topic, b"x", key=key) for key in KEYS]
            used.update(future.result(60).partition for future in futures)
            return used == {0, 1, 2, 3}

        wait_until(has_all, "the producer uses all partitions")
        assert producer.send(topic, bytes(200_000)).result(60)
        admin.delete_topics([topic])
        admin.create_topics([NewTopic(topic, 4)])
        futures = [producer.send(topic, b"x", key=key) for key in KEYS]
        assert {future.result(60).partition for future in futures} == {0, 1, 2, 3}


def test_a_partition_that_was_added_can_be_assigned_at_once(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics([NewTopic(topic, 1)])
    keys = [TopicPartition(topic, number) for number in range(3)]
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        before = consumer._fetch_loop.cursors[keys[0]]
        with pytest.raises(PartitionOutOfRangeError, match="has partitions 0 to 0, not 1"):
            consumer.assign(keys)
        admin.create_partitions({topic: 3})
        assert consumer.assignment() == keys[:1]
        consumer.assign(keys)
        assert consumer.assignment() == keys
        assert consumer._fetch_loop.cursors[keys[0]] is before, (
            "those already assigned keep their positions"
        )
        admin.create_partitions({topic: 4})
        assert consumer.partitions_for(topic) == [0, 1, 2, 3]
        with pytest.raises(PartitionOutOfRangeError):
            consumer.assign([TopicPartition(topic, 4)])
        with Producer(appliance.address) as producer:
            producer.send(topic, b"new", partition=2).result(60)
        assert [record.value for record in consumer.poll(60_000)] == [b"new"]
        admin.delete_topics([topic])
        with pytest.raises(UnknownTopicError):
            consumer.partitions_for(topic)
        admin.create_topics([NewTopic(topic, 1)])
        assert consumer.partitions_for(topic) == [0]
        with Producer(appliance.address) as producer:
            producer.send(topic, b"another", partition=0).result(60)
        consumer.assign(keys[:1])
        assert consumer._fetch_loop.cursors[keys[0]] is not before, (
            "it is a partition of another topic"
        )
        assert [record.value for record in consumer.poll(60_000)] == [b"another"]


def test_a_coroutine_assigns_partitions_of_several_topics_that_were_added(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    topics = [topic, f"{topic}-b", f"{topic}-c"]
    admin.create_topics([NewTopic(name, 1) for name in topics])

    async def main() -> None:
        async with AsyncConsumer(*topics, bootstrap=appliance.address) as consumer:
            assert await consumer.assignment() == [TopicPartition(name, 0) for name in topics]
            admin.create_partitions(dict.fromkeys(topics, 2))
            both = [TopicPartition(name, number) for name in topics for number in range(2)]
            await consumer.assign(both)
            assert await consumer.assignment() == both
            with pytest.raises(PartitionOutOfRangeError):
                await consumer.assign([TopicPartition(topics[1], 2)])
            assert await consumer.partitions_for(topics[2]) == [0, 1]

    asyncio.run(main())


def test_without_a_group_a_reader_of_all_partitions_sees_every_key_in_order(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics([NewTopic(topic, 1, {"partitioner": "hash_slots"})])
    live, rounds = InOrder(), 0
    with (
        Producer(appliance.address, linger_ms=0) as producer,
        Consumer(
            topic,
            bootstrap=appliance.address,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=1_024,
        ) as consumer,
    ):
        live.take(consumer.poll(0))
        for partitions in (2, 3, 5):
            produce(producer, topic, rounds, 20)
            admin.create_partitions({topic: partitions})
            produce(producer, topic, rounds + 20, 5)
            rounds += 25
            consumer.assign([TopicPartition(topic, number) for number in range(partitions)])
            live.take(consumer.poll(1_000, max_records=30))
        live.read(consumer, rounds)
        again = InOrder()
        consumer.seek_to_beginning()
        assert [
            key for key, cursor in consumer._fetch_loop.cursors.items() if cursor.waits_for_others
        ], "what is read anew waits anew"
        assert consumer.paused() == []
        again.read(consumer, rounds)
        later = consumer.assignment()[1:]
        with Consumer(bootstrap=appliance.address, auto_offset_reset="earliest") as other:
            other.assign(later[-1:])
            assert other.poll(60_000), "what is read elsewhere is not waited for"
        ends = consumer.end_offsets(later)

        async def of_coroutines() -> None:
            found = InOrder()
            async with AsyncConsumer(
                topic,
                bootstrap=appliance.address,
                auto_offset_reset="earliest",
                max_partition_fetch_bytes=1_024,
            ) as reader:
                while not found.has(rounds):
                    found.take(await reader.poll(1_000))

        asyncio.run(of_coroutines())
        assert consumer.end_offsets(later) == ends
