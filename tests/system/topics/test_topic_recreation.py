"""A topic is deleted and made again under a producer that knows it: what it sends goes to the new
one, in order, as with Kafka.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import pathlib
import sqlite3
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, ShareConsumer, embedded
from tailrace.aio import AsyncConsumer, AsyncProducer
from tailrace.core.errors import SchemaMismatchError, UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.idempotent import DedupTable, SqlSink
from tests.kit.appliances.topics import read_all

PATIENT: dict[str, Any] = {"delivery_timeout_ms": 60_000, "retry_backoff_ms": 10}


def make_again(admin: Admin, topic: str, partitions: int = 1, **configs: str) -> None:
    admin.delete_topics([topic])
    admin.create_topics([NewTopic(topic, partitions, configs)])


@pytest.fixture
def admin(appliance: EmbeddedAppliance) -> Any:
    with Admin(appliance.address) as it:
        yield it


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_idempotence": False, "max_in_flight_requests_per_connection": 1},
        {"acks": 1, "batch_size": 1024, "compression_type": "lz4"},
    ],
    ids=str,
)
def test_records_sent_after_a_topic_was_made_again_go_to_the_new_one_in_order(
    appliance: EmbeddedAppliance, admin: Admin, topic: str, settings: dict[str, Any]
) -> None:
    admin.create_topics([NewTopic(topic, 2)])
    with Producer(appliance.address, linger_ms=1, **PATIENT, **settings) as producer:
        for partition in range(2):
            producer.send(topic, b"old", partition=partition).result(60)
        for turn in range(3):
            make_again(admin, topic, 2)
            handles = [
                producer.send(topic, b"%d" % number, b"k%d" % (number % 2)) for number in range(300)
            ]
            assert [handle.exception(60) for handle in handles] == [None] * 300, turn
            assert producer.metrics()["buffered_bytes"] == 0
            per_partition: dict[int, list[int]] = {}
            for record in read_all(appliance, topic, 300):
                assert record.offset == len(per_partition.setdefault(record.partition, []))
                per_partition[record.partition].append(int(record.value or b""))
            assert sorted(chain(*per_partition.values())) == list(range(300))
            assert all(numbers == sorted(numbers) for numbers in per_partition.values())


def test_records_that_the_deleted_topic_refused_wait_until_it_is_there_again(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics([NewTopic(topic, 2)])
    called: list[Any] = []
    with Producer(appliance.address, **PATIENT) as producer:
        for partition in range(2):
            producer.send(topic, b"old", partition=partition).result(60)
        admin.delete_topics([topic])
        waiting = producer.send(
            topic,
            b"first",
            partition=0,
            headers=[("h", b"1")],
            on_delivery=lambda metadata, _: called.append(metadata),
        )
        elsewhere = producer.send(topic, b"second", partition=1)
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        with pytest.raises(UnknownTopicError):  # a new record asks, and is told
            producer.send(topic, b"none")
        admin.create_topics([NewTopic(topic, 1)])
        assert waiting.result(60).offset == 0
        assert [metadata.offset for metadata in called] == [0]
        assert producer.send(topic, b"third").result(60).offset == 1
        assert not elsewhere.done(), "the new topic has no such partition yet"
        admin.create_partitions({topic: 2})
        assert elsewhere.result(60).partition == 1
    found = {record.value: record for record in read_all(appliance, topic, 3)}
    assert set(found) == {b"first", b"second", b"third"}
    assert found[b"first"].headers == [("h", b"1")]


def test_records_of_a_topic_that_is_not_made_again_end_in_time_and_others_go_on(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    other = f"{topic}-other"
    admin.create_topics([NewTopic(topic), NewTopic(other)])
    with Producer(
        appliance.address,
        delivery_timeout_ms=3_000,
        request_timeout_ms=500,
        linger_ms=0,
        retry_backoff_ms=10,
    ) as producer:
        producer.send(topic, b"old").result(60)
        admin.delete_topics([topic])
        waiting = producer.send(topic, b"x")
        assert [
            producer.send(other, b"%d" % number).result(60).offset for number in range(20)
        ] == list(range(20))
        with pytest.raises(UnknownTopicError, match="was deleted, and not created again"):
            waiting.result(60)
        assert producer.metrics()["buffered_bytes"] == 0
        with pytest.raises(UnknownTopicError):
            producer.send_arrow(topic, pa.table({"value": [b"x"]})).result(60)  # at once, or there
        admin.create_topics([NewTopic(topic)])
        assert producer.send(topic, b"new").result(60).offset == 0
    with Producer(appliance.address, retries=0) as producer:
        producer.send(topic, b"x").result(60)
        admin.delete_topics([topic])
        with pytest.raises(UnknownTopicError):
            producer.send(topic, b"y").result(60)


def test_a_deleted_topic_is_created_again_for_records_where_the_appliance_allows_it(
    topic: str,
) -> None:
    """The first record that finds it deleted creates it, not only the one behind that."""
    frame = pa.table({"number": pa.array([1, 2], pa.int64())})
    with embedded() as allowing, Admin(allowing.address) as admin:
        admin.create_topics([NewTopic(topic, 3), NewTopic("typed", schema=frame.schema)])
        with Producer(allowing.address, **PATIENT) as producer:
            producer.send(topic, b"old", partition=2).result(60)
            producer.send_arrow("typed", frame).result(60)
            for turn in range(2):
                admin.delete_topics([topic, "typed"])
                sent = producer.send(topic, b"%d" % turn, partition=2)
                rows = producer.send_arrow("typed", frame)
                assert (sent.result(60).partition, sent.result(60).offset) == (2, 0)
                rows.result(60)
                assert producer.send(topic, b"later", partition=2).result(60).offset == 1
        assert len(admin.topic_info([topic])[topic].partitions) == 3
        assert admin.topic_info(["typed"])["typed"].schema.names == ["number"]


def test_frames_and_delayed_records_go_to_the_topic_that_was_made_again(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    soon = dt.timedelta(milliseconds=1)
    admin.create_topics([NewTopic(topic, 1, {"delay.enabled": "true"})])
    with Producer(appliance.address, **PATIENT) as producer:
        frame = pa.table({"value": [b"a", b"b"]})
        producer.send_arrow(topic, frame).result(60)
        assert producer.send(topic, b"late", deliver_after=soon).result(60).delay_id
        make_again(admin, topic, 1, **{"delay.enabled": "true"})
        sent = [producer.send_arrow(topic, frame) for _ in range(3)]
        late = producer.send(topic, b"late", deliver_after=soon)
        for handle in sent:
            handle.result(60)
        assert late.result(60).delay_id
        assert producer.send_arrow(topic, frame).result(60)
    assert sorted(record.value or b"" for record in read_all(appliance, topic, 9)) == [
        *[b"a"] * 4,
        *[b"b"] * 4,
        b"late",
    ]


def test_records_for_a_topic_made_again_with_another_schema_end_with_what_happened(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics([NewTopic(topic)])
    with Producer(appliance.address, **PATIENT) as producer:
        producer.send(topic, b"old").result(60)
        admin.delete_topics([topic])
        admin.create_topics([NewTopic(topic, schema=pa.schema([("number", pa.int64())]))])
        with pytest.raises((UnknownTopicError, SchemaMismatchError), match="another schema"):
            producer.send(topic, b"x").result(60)
        assert producer.send(topic, {"number": 1}).result(60).offset == 0


def test_a_coroutine_sends_on_to_a_topic_that_was_made_again(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics([NewTopic(topic)])

    async def main() -> list[int | None]:
        async with AsyncProducer(appliance.address, **PATIENT) as producer:
            await (await producer.send(topic, b"old"))
            await asyncio.to_thread(make_again, admin, topic)
            handles = [await producer.send(topic, b"%d" % number) for number in range(100)]
            offsets = [(await handle).offset for handle in handles]
            await asyncio.to_thread(make_again, admin, topic)
            return [*offsets, (await (await producer.send(topic, b"x"))).offset]

    assert asyncio.run(main()) == [*range(100), 0]


@pytest.mark.parametrize("kind", ["poll", "poll_arrow", "queue", "event loop"])
def test_effects_of_a_topic_that_was_made_again_are_applied(
    appliance: EmbeddedAppliance, admin: Admin, topic: str, kind: str, tmp_path: pathlib.Path
) -> None:
    """The dedup table and the offsets of a sink knew the topic by its name: none of 10 new records
    was applied.
    """
    with contextlib.closing(sqlite3.connect(tmp_path / "results")) as database:
        seen, sink = DedupTable(database), SqlSink(database, "billing")
        for turn in range(2):
            admin.create_topics(NewTopic(topic, 1))
            with Producer(appliance.address) as producer:
                for number in range(10):
                    producer.send(topic, b"%d" % number)
            for expected in (10, 0):  # the second time they are known
                assert (
                    len(
                        read_again(kind, appliance, topic, seen, sink, f"g{turn}{expected}-{topic}")
                    )
                    == expected
                )
                database.commit()
            admin.delete_topics(topic)


def read_again(
    kind: str, appliance: EmbeddedAppliance, topic: str, seen: DedupTable, sink: SqlSink, group: str
) -> list[Any]:
    """Read ten records; those that are to be applied."""
    applied: list[Any] = []
    found = 0
    if kind == "event loop":

        async def main() -> None:
            async with AsyncConsumer(
                topic, bootstrap=appliance.address, auto_offset_reset="earliest"
            ) as consumer:
                records = [await consumer.getone() for _ in range(10)]
                applied.extend(record for record in records if seen.first_time(record))

        asyncio.run(main())
        return applied
    if kind == "queue":
        with ShareConsumer(
            topic, bootstrap=appliance.address, group_id=group, auto_offset_reset="earliest"
        ) as queue:
            while found < 10:
                for item in queue.poll(60_000):
                    found += 1
                    queue.acknowledge(item, "release")
                    applied += [item] if seen.first_time(item) else []
        return applied
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        while found < 10:
            batches = consumer.poll(60_000) if kind == "poll" else consumer.poll_arrow(60_000)
            found += sum(len(one) if kind == "poll_arrow" else 1 for one in batches)
            with sink.transaction(batches) as tx:
                applied += [
                    n
                    for one in tx.records
                    for n in (range(len(one)) if kind == "poll_arrow" else [one])
                ]
    return applied
