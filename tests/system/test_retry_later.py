"""retry_later against a real appliance: records come again to the same group, after their delay, so often and no more."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import pytest

from tailrace import (
    Admin,
    Consumer,
    InvalidRequestError,
    InvalidTopicNameError,
    NewTopic,
    NotSupportedError,
    Producer,
    Record,
    RecordTooLargeError,
    TopicExistsError,
    TopicPartition,
)
from tailrace.aio import AsyncConsumer
from tailrace.private_appliance import EmbeddedAppliance
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until
from tests.system.test_share_dead_letters import fits

LONG_MS = 60_000


def make(appliance: EmbeddedAppliance, topic: str, count: int, partitions: int = 1) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, partitions))
    with Producer(appliance.address) as producer:
        for number in range(count):
            producer.send(
                topic, b"%d" % number, key=b"k", headers=[("h", b"x"), ("retry.attempt", b"nonsense")], partition=number % partitions
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


def test_a_record_comes_again_after_its_delay_with_its_origin_and_then_is_dead_lettered(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 3, partitions=2)
    with group(appliance, topic, retry_attempts_max=2, auto_offset_reset="earliest") as consumer:
        records = take(consumer, 3)
        (failing,) = (record for record in records if record.value == b"1")
        since = time.time()
        assert consumer.retry_later(failing, timedelta(milliseconds=300)) == 1
        consumer.commit()
        (again,) = take(consumer, 1)
        assert time.time() - since >= 0.3
        assert (again.topic, again.partition, again.key, again.value) == (f"{topic}.g.retry", 1, b"k", b"1")
        headers = dict(again.headers)
        assert headers == {
            "h": b"x", "retry.topic": topic.encode(), "retry.partition": b"1", "retry.offset": b"0", "retry.attempt": b"1",
            "retry.first_timestamp": b"%d" % failing.timestamp,
        }  # fmt: skip
        assert consumer.retry_later(again, 0.05) == 2
        (again,) = take(consumer, 1)
        assert dict(again.headers) == {**headers, "retry.attempt": b"2"}
        assert consumer.retry_later(again, "50ms") == 0
        consumer.commit()
    with Consumer(f"{topic}.dlq", bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        (letter,) = take(consumer, 1)
        headers = dict(letter.headers)
        assert (letter.key, letter.value, letter.partition, headers["h"]) == (b"k", b"1", 1, b"x")
        assert (headers["dlq.topic"], headers["dlq.partition"], headers["dlq.offset"]) == (topic.encode(), b"1", b"0")
        assert (headers["dlq.group"], headers["dlq.delivery_count"]) == (b"g", b"3")
        assert b"tried again 2 times" in headers["dlq.reason"]
    with Admin(appliance.address) as admin:
        assert {topic, f"{topic}.g.retry", f"{topic}.dlq"} <= set(admin.list_topics())


def test_what_waits_is_not_lost_with_the_consumer_and_comes_to_its_group_alone(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 2)
    with group(appliance, topic, "late", auto_offset_reset="latest") as other, group(appliance, topic) as consumer:
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


def test_a_deserialized_record_is_retried_as_it_is_stored(appliance: EmbeddedAppliance, topic: str) -> None:
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
    for name, sentence in (("g" * 240, "shorter group_id"), ("über uns", "letters, digits")):
        with group(appliance, topic, name) as consumer, pytest.raises(InvalidTopicNameError, match=sentence):
            consumer.retry_later(record, 1)
    typed = f"{topic}-typed"
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(typed, 1, schema=pa.schema([("n", pa.int64())])))
    with Producer(appliance.address) as producer:
        producer.send(typed, {"n": 1})
    with group(appliance, typed) as consumer:
        (record,) = take(consumer, 1)
        with pytest.raises(NotSupportedError, match="schema of its own"):
            consumer.retry_later(record, 1)


def test_a_record_that_its_headers_make_too_large_is_refused_and_can_be_committed(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 1, {"max.message.bytes": 4_096}))
    with Producer(appliance.address) as producer:
        assert any(fits(producer, topic, size) for size in range(4_000, 0, -10))
    with group(appliance, topic) as consumer:
        (record,) = take(consumer, 1)
        with pytest.raises(RecordTooLargeError):
            consumer.retry_later(record, 0)
        consumer.commit()
        assert consumer.poll(100) == []


def test_an_async_consumer_retries_alike(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 2)

    async def main() -> None:
        async with AsyncConsumer(
            topic, bootstrap=appliance.address, group_id="g", auto_offset_reset="earliest", value_deserializer=json.loads
        ) as consumer:
            records: list[Record] = []
            while len(records) < 2:
                records += await consumer.poll(LONG_MS)
            assert await consumer.retry_later(records[1], 0.1) == 1
            (again,) = await consumer.poll(LONG_MS)
            assert (again.topic, again.value, dict(again.headers)["retry.offset"]) == (f"{topic}.g.retry", 1, b"1")
            await consumer.commit()

    asyncio.run(main())


def test_members_that_make_the_retry_topic_at_once_both_retry(appliance: EmbeddedAppliance, topic: str) -> None:
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

        os.kill(flusher, signal.SIGSTOP)
        try:
            one = pool.submit(first.retry_later, records[0], 0)
            wait_until(is_decided, "the topic is decided")
            other = pool.submit(second.retry_later, records[1], 0)
            wait([other], timeout=0.5)  # so long it may go wrong
            assert not one.done()
            assert not other.done(), other.exception()
        finally:
            os.kill(flusher, signal.SIGCONT)
        assert one.result() == other.result() == 1


def test_patterns_read_no_retries_of_other_groups_and_no_dead_letters(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 2)
    with group(appliance, topic, "mails", retry_attempts_max=1) as mails:
        first, second = take(mails, 2)
        assert mails.retry_later(first, "1ms") == 1
        (again,) = take(mails, 1)
        assert mails.retry_later(again, "1ms") == 0  # a dead letter
        assert mails.retry_later(second, "1ms") == 1
        assert take(mails, 1)[0].topic == f"{topic}.mails.retry"
    machinery = {f"{topic}.mails.retry", f"{topic}.dlq"}
    with Consumer(bootstrap=appliance.address, group_id="billing", auto_offset_reset="earliest") as billing:
        assert machinery < set(billing.topics()), "and no delay log is a topic"
        assert not [name for name in billing.topics() if "@" in name]
        billing.subscribe(pattern=f"{topic}.*")
        records = take(billing, 2)
        assert billing.subscription() == {topic}
        assert {record.topic for record in records} == {topic}
        billing.retry_later(records[0], "1ms")
        assert take(billing, 1)[0].topic == f"{topic}.billing.retry", "its own retries are read all the same"
        assert billing.subscription() == {topic}
        billing.subscribe(pattern=rf"{topic}.*\.dlq")
        assert dict(take(billing, 1)[0].headers)["dlq.topic"] == topic.encode()
        assert billing.subscription() == {f"{topic}.dlq"}
