"""retry_later against a real appliance: records come again to the same group, after their delay, so
often and no more.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import pytest

from tailrace import (
    Admin,
    Consumer,
    InvalidRequestError,
    NewTopic,
    NotSupportedError,
    Producer,
    Record,
    TopicExistsError,
    TopicPartition,
)
from tailrace.aio import AsyncConsumer
from tailrace.core.topic_names import retry_topic
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.members.queues import fits, read
from tests.kit.processes import children, kill_and_wait_for_successor, stopped, wait_until

LONG_MS = 60_000


def make(appliance: EmbeddedAppliance, topic: str, count: int, partitions: int = 1) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, partitions))
    with Producer(appliance.address) as producer:
        for number in range(count):
            producer.send(
                topic,
                b"%d" % number,
                key=b"k",
                headers=[("h", b"x"), ("retry.attempt", b"nonsense")],
                partition=number % partitions,
            )


def group(appliance: EmbeddedAppliance, topic: str, name: str = "g", **settings: Any) -> Consumer:
    settings.setdefault("auto_offset_reset", "earliest")
    return Consumer(topic, bootstrap=appliance.address, group_id=name, **settings)


def take(consumer: Consumer, count: int) -> list[Record]:
    found: list[Record] = []
    while len(found) < count:
        records = consumer.poll(LONG_MS, count - len(found))
        assert records, f"{len(found)} of {count} records came"
        found += records
    return found


def test_a_record_comes_again_after_its_delay_with_its_origin_and_then_is_dead_lettered(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 3, partitions=2)
    with group(appliance, topic, max_retry_attempts=2, auto_offset_reset="earliest") as consumer:
        records = take(consumer, 3)
        (failing,) = (record for record in records if record.value == b"1")
        since = time.time()
        assert consumer.retry_later(failing, timedelta(milliseconds=300)) == 1
        consumer.commit()
        (again,) = take(consumer, 1)
        assert time.time() - since >= 0.3
        assert (again.topic, again.partition, again.key, again.value) == (
            f"{topic}.g.retry",
            1,
            b"k",
            b"1",
        )
        headers = dict(again.headers)
        with Admin(appliance.address) as admin:
            topic_id = admin.topic_info(topic)[topic].topic_id.hex().encode()
        assert again.headers[:2] == [("h", b"x"), ("retry.attempt", b"nonsense")], (
            "the sender's own"
        )
        assert headers == {
            "h": b"x", "retry.topic_id": topic_id, "retry.topic": topic.encode(),
            "retry.partition": b"1", "retry.offset": b"0", "retry.attempt": b"1",
            "retry.first_timestamp": b"%d" % failing.timestamp,
        }  # fmt: skip
        assert consumer.retry_later(again, 0.05) == 2
        (again,) = take(consumer, 1)
        assert dict(again.headers) == {**headers, "retry.attempt": b"2"}
        assert len(again.headers) == 8, "those of the first attempt are replaced"
        assert consumer.retry_later(again, "50ms") == 0
        consumer.commit()
    with Consumer(
        f"{topic}.dlq", bootstrap=appliance.address, auto_offset_reset="earliest"
    ) as consumer:
        (letter,) = take(consumer, 1)
        headers = dict(letter.headers)
        assert (letter.key, letter.value, letter.partition, headers["h"]) == (b"k", b"1", 1, b"x")
        assert (headers["dlq.topic"], headers["dlq.partition"], headers["dlq.offset"]) == (
            topic.encode(),
            b"1",
            b"0",
        )
        assert (headers["dlq.group"], headers["dlq.delivery_count"]) == (b"g", b"3")
        assert b"tried again 2 times" in headers["dlq.reason"]
    with Admin(appliance.address) as admin:
        assert {topic, f"{topic}.g.retry", f"{topic}.dlq"} <= set(admin.list_topics())


def test_what_waits_is_not_lost_with_the_consumer_and_comes_to_its_group_alone(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 2)
    with (
        group(appliance, topic, "late", auto_offset_reset="latest") as other,
        group(appliance, topic) as consumer,
    ):
        assert other.poll(200) == []
        first = take(consumer, 2)[0]
        consumer.retry_later(first, 1)
    kill_and_wait_for_successor(appliance, "tr-groups-0")
    with group(
        appliance, topic, auto_offset_reset="latest"
    ) as consumer:  # no position in the retry topic: it begins at its beginning all the same
        (again,) = take(consumer, 1)
        assert (again.value, dict(again.headers)["retry.attempt"]) == (b"0", b"1")
        consumer.commit()
        assert consumer.poll(300) == []
    with group(appliance, topic, "other") as other:
        assert [record.topic for record in take(other, 2)] == [topic, topic]
        assert other.poll(300) == []


def test_a_deserialized_record_is_retried_as_it_is_stored(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 3)
    with group(appliance, topic, value_deserializer=json.loads) as consumer:
        records = take(consumer, 3)
        assert [record.value for record in records] == [0, 1, 2]
        consumer.retry_later(records[1], 0)
        (again,) = take(consumer, 1)
        assert again.value == 1
    with Consumer(bootstrap=appliance.address) as plain:
        key = TopicPartition(f"{topic}.g.retry", 0)
        plain.assign([key])
        plain.seek(key, 0)
        assert take(plain, 1)[0].value == b"1"


def test_what_cannot_be_retried_is_said(appliance: EmbeddedAppliance, topic: str) -> None:
    import pyarrow as pa

    make(appliance, topic, 1)
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        (record,) = take(consumer, 1)
        with pytest.raises(InvalidRequestError, match="no group"):
            consumer.retry_later(record, 1)
    with group(appliance, topic) as consumer:
        for delay in (-1, "soon", None, True, timedelta(seconds=-1), float("nan")):
            with pytest.raises(InvalidRequestError, match="delay is"):
                consumer.retry_later(record, delay)
        with pytest.raises(InvalidRequestError, match="no record"):
            consumer.retry_later(b"x", 1)  # type: ignore[arg-type]
    typed = f"{topic}-typed"
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(typed, 1, schema=pa.schema([("n", pa.int64())])))
    with Producer(appliance.address) as producer:
        producer.send(typed, {"n": 1})
    with group(appliance, typed) as consumer:
        (record,) = take(consumer, 1)
        with pytest.raises(NotSupportedError, match="has a schema"):
            consumer.retry_later(record, 1)


def test_a_record_as_large_as_its_topic_allows_is_retried_and_dead_lettered_whole(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """With the added headers it was larger than the retry topic's max.message.bytes: refused,
    delivered again, refused again.
    """
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 1, {"max.message.bytes": 4_096}))
    with Producer(appliance.address) as producer:
        assert any(fits(producer, topic, size) for size in range(4_000, 0, -10))
    with (
        group(appliance, topic, max_retry_attempts=1) as consumer,
        Admin(appliance.address) as admin,
    ):
        (record,) = take(consumer, 1)
        assert consumer.retry_later(record, 0) == 1
        (again,) = take(consumer, 1)
        assert again.value == record.value
        assert consumer.retry_later(again, 0) == 0
        admin.alter_topics({topic: {"max.message.bytes": 1 << 20}})
        with Producer(appliance.address) as producer:
            producer.send(topic, b"y" * 1_000_000, partition=0).result(60)
        (larger,) = take(consumer, 1)
        assert consumer.retry_later(larger, 0) == 1, "the retry topic grows with its topic"
        (again,) = take(consumer, 1)
        assert consumer.retry_later(again, 0) == 0
    letters = read(appliance, f"{topic}.dlq", 2)
    assert [letter.value for letter in letters] == [record.value, larger.value]


@pytest.mark.parametrize("name", ["eu.mails", "g" * 240, "über uns"])
def test_any_group_name_has_a_retry_topic(
    appliance: EmbeddedAppliance, topic: str, name: str
) -> None:
    make(appliance, topic, 1)
    with group(appliance, topic, name) as consumer:
        (record,) = take(consumer, 1)
        consumer.retry_later(record, 0)
        (again,) = take(consumer, 1)
        assert (again.topic, again.value) == (retry_topic(topic, name), b"0")
        consumer.retry_later(again, 0)
        assert dict(take(consumer, 1)[0].headers)["retry.attempt"] == b"2"


def test_two_groups_whose_names_join_alike_have_retry_topics_of_their_own(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """`shop` with the group eu.mails, and `shop.eu` with the group mails, had one; what waits there
    from then is given to whom it is for.
    """
    dotted, shared = f"{topic}.eu", f"{topic}.eu.mails.retry"
    make(appliance, topic, 1)
    make(appliance, dotted, 1)
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(shared, 1, {"delay.enabled": True}))
        for origin in (topic, dotted):  # as version 0.1 wrote them
            said = {
                "topic": origin,
                "partition": "0",
                "offset": "0",
                "attempt": "1",
                "first_timestamp": "1",
            }
            producer.send(
                shared,
                origin.encode(),
                headers=[(f"retry.{key}", value.encode()) for key, value in said.items()],
            )
    for origin, name, other in ((topic, "eu.mails", dotted), (dotted, "mails", topic)):
        with group(appliance, origin, name) as consumer:
            records = take(consumer, 2)
            assert {record.value for record in records} == {b"0", origin.encode()}
            for record in records:
                assert consumer.retry_later(record, 0) in (1, 2)
            again = take(consumer, 2)
            assert {dict(record.headers)["retry.topic"] for record in again} == {origin.encode()}
            consumer.commit()
            assert consumer.poll(300) == [], f"nothing of {other}"


@pytest.mark.parametrize("name", ["g", "eu.g"])
def test_an_assigned_consumer_reads_the_retries_of_its_partitions(
    appliance: EmbeddedAppliance, topic: str, name: str
) -> None:
    """Nobody read them: the record never came again."""
    make(appliance, topic, 4, partitions=2)
    one = TopicPartition(topic, 1)
    with Consumer(
        bootstrap=appliance.address, group_id=name, auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign([one])
        records = take(consumer, 2)
        assert consumer.retry_later(records[0], "1ms") == 1
        (again,) = take(consumer, 1)
        assert (again.value, again.partition, again.topic) == (
            records[0].value,
            1,
            retry_topic(topic, name),
        )
        assert consumer.retry_later(again, "1ms") == 2
        consumer.commit()
    with Consumer(
        bootstrap=appliance.address, group_id=name, auto_offset_reset="latest"
    ) as successor:
        successor.assign([one])
        assert dict(take(successor, 1)[0].headers)["retry.attempt"] == b"2"
        with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
            admin.create_partitions({topic: 3})
            producer.send(topic, b"new", partition=2).result(60)
        successor.assign([TopicPartition(topic, 2)])
        successor.seek(TopicPartition(topic, 2), 0)
        (record,) = take(successor, 1)
        assert successor.retry_later(record, "1ms") == 1
        assert take(successor, 1)[0].partition == 2, "the retry topic has grown with its topic"


def test_an_assigned_async_consumer_reads_the_retries_of_its_partitions(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)

    async def main() -> None:
        async with AsyncConsumer(
            bootstrap=appliance.address, group_id="g", auto_offset_reset="earliest"
        ) as consumer:
            await consumer.assign([TopicPartition(topic, 0)])
            (record,) = await consumer.poll(LONG_MS)
            assert await consumer.retry_later(record, "1ms") == 1
            (again,) = await consumer.poll(LONG_MS)
            assert (again.topic, again.value) == (f"{topic}.g.retry", b"0")

    asyncio.run(main())


def test_an_async_consumer_retries_alike(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 2)

    async def main() -> None:
        async with AsyncConsumer(
            topic,
            bootstrap=appliance.address,
            group_id="g",
            auto_offset_reset="earliest",
            value_deserializer=json.loads,
        ) as consumer:
            records: list[Record] = []
            while len(records) < 2:
                records += await consumer.poll(LONG_MS)
            assert await consumer.retry_later(records[1], 0.1) == 1
            (again,) = await consumer.poll(LONG_MS)
            assert (again.topic, again.value, dict(again.headers)["retry.offset"]) == (
                f"{topic}.g.retry",
                1,
                b"1",
            )
            await consumer.commit()

    asyncio.run(main())


def test_members_that_make_the_retry_topic_at_once_both_retry(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """The second is told that the topic exists while the first still waits for it."""
    make(appliance, topic, 2)
    flusher = children(appliance)["tr-flusher-0"]
    with (
        group(appliance, topic) as first,
        group(appliance, topic) as second,
        ThreadPoolExecutor() as pool,
        Admin(appliance.address) as admin,
    ):
        records = take(first, 2)

        def is_decided() -> bool:
            try:
                admin.create_topics(NewTopic(f"{topic}.g.retry"), validate_only=True)
            except TopicExistsError:
                return True
            return False

        with stopped(flusher):
            one = pool.submit(first.retry_later, records[0], 0)
            wait_until(is_decided, "the topic is decided")
            other = pool.submit(second.retry_later, records[1], 0)
            wait([other], timeout=0.5)  # so long it may go wrong
            assert not one.done()
            assert not other.done(), other.exception()
        assert one.result() == other.result() == 1


def test_patterns_read_no_retries_of_other_groups_and_no_dead_letters(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 2)
    with group(appliance, topic, "mails", max_retry_attempts=1) as mails:
        first, second = take(mails, 2)
        assert mails.retry_later(first, "1ms") == 1
        (again,) = take(mails, 1)
        assert mails.retry_later(again, "1ms") == 0  # a dead letter
        assert mails.retry_later(second, "1ms") == 1
        assert take(mails, 1)[0].topic == f"{topic}.mails.retry"
    machinery = {f"{topic}.mails.retry", f"{topic}.dlq"}
    with Consumer(
        bootstrap=appliance.address, group_id="billing", auto_offset_reset="earliest"
    ) as billing:
        assert machinery < set(billing.topics()), "and no delay log is a topic"
        assert not [name for name in billing.topics() if "@" in name]
        billing.subscribe(pattern=f"{topic}.*")
        records = take(billing, 2)
        assert billing.subscription() == {topic}
        assert {record.topic for record in records} == {topic}
        billing.retry_later(records[0], "1ms")
        assert take(billing, 1)[0].topic == f"{topic}.billing.retry", (
            "its own retries are read all the same"
        )
        assert billing.subscription() == {topic}
        billing.subscribe(pattern=rf"{topic}.*\.dlq")
        assert dict(take(billing, 1)[0].headers)["dlq.topic"] == topic.encode()
        assert billing.subscription() == {f"{topic}.dlq"}
