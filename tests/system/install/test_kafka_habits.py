"""Calls that somebody makes who knows Kafka's clients: they do what they do there, or say what to
write instead.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.core.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    InvalidRequestError,
    NotReachableError,
    PartitionOutOfRangeError,
    SchemaMismatchError,
    UnknownTopicError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import HANG_LIMIT_S


def test_a_name_deletes_one_topic_and_not_those_named_like_its_letters(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    letters = sorted(set(topic))
    with Admin(appliance.address) as admin:
        admin.create_topics(
            [NewTopic(name) for name in [topic, *letters] if name not in admin.list_topics()]
        )
        assert list(admin.describe_topics(topic)) == [topic]
        admin.delete_topics(topic)
        left = admin.list_topics()
        assert topic not in left
        assert set(letters) <= set(left)
        admin.delete_topics(letters)


def test_arguments_that_are_none_say_what_to_write(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, num_partitions=2))
        with pytest.raises(InvalidRequestError, match="NewTopic"):
            admin.create_topics([topic])  # type: ignore[list-item]
        with pytest.raises(InvalidRequestError, match="TopicPartition"):
            admin.delete_records({topic: 3})  # type: ignore[dict-item]
        with pytest.raises(DelayNotEnabledError, match=r"delay\.enabled"):
            list(admin.list_delays(topic))
        with pytest.raises(UnknownTopicError):
            list(admin.list_delays("not-" + topic))
    with Consumer([topic], bootstrap=appliance.address.removeprefix("tcp://")) as consumer:
        assert len(consumer.assignment()) == 2
        assert topic in consumer.topics()
        assert consumer.highwater(TopicPartition(topic, 0)) == 0
        with pytest.raises(InvalidRequestError, match="TopicPartition"):
            consumer.assign(topic)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="TopicPartition"):
            consumer.seek(topic, 0)  # type: ignore[arg-type]


def test_serializers_there_and_back(appliance: EmbeddedAppliance, topic: str) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Producer(
        {"bootstrap.servers": appliance.address},
        key_serializer=lambda key: b"%d" % key,
        value_serializer=lambda value: json.dumps(value).encode(),
    ) as producer:
        for number in range(100):
            producer.send(topic, {"n": number}, key=number)
        with pytest.raises(InvalidRecordError, match="value_serializer failed: TypeError"):
            producer.send(topic, object())
        producer.send(topic, None, key=100).result(60)
    with Consumer(
        topic,
        bootstrap_servers=appliance.address,
        auto_offset_reset="earliest",
        key_deserializer=int,
        value_deserializer=json.loads,
    ) as consumer:
        records = consumer.consume(101, timeout=60)
    assert [(record.key, record.value) for record in records] == [
        *((n, {"n": n}) for n in range(100)),
        (100, None),
    ]


def test_a_deserializer_that_fails_hands_out_what_came_before_and_names_the_record(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics([NewTopic(topic)])
    with Producer(appliance.address) as producer:
        for value in (b"0", b"1", b"two", b"3"):
            producer.send(topic, value)
    with Consumer(
        topic, bootstrap=appliance.address, auto_offset_reset="earliest", value_deserializer=int
    ) as consumer:
        assert [record.value for record in consumer.consume(4, timeout=60)] == [0, 1]
        with pytest.raises(InvalidRecordError, match=r"offset 2 of .*: ValueError") as caught:
            consumer.poll(60_000)
        assert caught.value.key is not None
        assert caught.value.next_offset is not None
        consumer.seek(caught.value.key, caught.value.next_offset)
        assert [record.value for record in consumer.poll(60_000)] == [3]


def test_a_private_appliance_is_started_and_closed_without_a_block() -> None:
    private = tailrace.embedded()
    private.close()
    with pytest.raises(NotReachableError, match="call start"):
        _ = private.address
    first = private.start()
    assert private.start() is first
    assert private.address == first.address
    with Producer(first.address) as producer:
        producer.send("t", b"x").result(60)
    private.close()
    private.close()
    assert not os.path.exists(first.data_dir)
    second = tailrace.embedded(settings={"ring_bytes": "32MiB"}).start()
    second.close()
    second.close()
    assert not os.path.exists(second.data_dir)


def test_who_waits_for_an_appliance_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "tailrace"),
        Producer("localhost:1", max_block_ms=2_500) as producer,
        pytest.raises(NotReachableError),
    ):
        producer.send("t", b"x")
    assert [record.message for record in caplog.records] == [
        "the producer gets no answer at tcp://localhost:1; it goes on trying"
    ]


def test_a_client_that_was_there_first_is_served_as_soon_as_the_appliance_is(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    address = f"ipc://{tmp_path_factory.mktemp('s')}/front"
    done = threading.Event()
    with Producer(address) as producer:

        def send() -> None:
            producer.send("t", b"x").result(HANG_LIMIT_S)
            done.set()

        waiting = threading.Thread(target=send)
        waiting.start()
        running = start_embedded(listen=[address])
        try:
            assert done.wait(HANG_LIMIT_S)
        finally:
            waiting.join()
            assert running.stop() == 0


def test_what_cannot_be_sent_is_refused_by_send_and_names_what_is_wrong(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    calls: list[tuple[dict[str, Any], str]] = [
        ({"value": 3}, "value is of type int"), ({"value": {"a": 1}}, "value is of type dict"),
        ({"value": b"x", "key": 3}, "key is of type int"),
        ({"value": b"x", "partition": "0"}, "partition is '0'"),
        ({"value": b"x", "partition": 1.0}, "partition is 1.0"),
        ({"value": b"x", "partition": True}, "partition is True"),
        ({"value": b"x", "on_delivery": 3}, "on_delivery is 3"),
        ({"value": b"x", "headers": {"a": b"b"}}, "list of"),
        ({"value": b"x", "headers": [("\ud800", b"b")]}, "UTF-8"), ({"value": "\ud800"}, "UTF-8"),
        ({"value": b"x", "timestamp": 1.5}, "milliseconds"),
        ({"value": b"x", "deliver_after": 5}, "timedelta"),
        ({"value": b"x", "deliver_at": 5}, "datetime"),
        ({"value": b"x", "repeat": "hourly"}, "Recurrence"),
        ({"value": b"x", "key": b"known", "deliver_at": "noon"}, "datetime"),
    ]  # fmt: skip
    table = pa.table({"value": [b"x"]})
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic, 2, {"delay.enabled": "true"}))
        producer.send(topic, b"x", key=b"known").result(HANG_LIMIT_S)
        for arguments, sentence in calls:
            with pytest.raises(InvalidRecordError, match=sentence):
                producer.send(topic, **arguments)
        for partition in (7, -1):
            with pytest.raises(PartitionOutOfRangeError, match="0 to 1"):
                producer.send(topic, b"x", partition=partition)
            with pytest.raises(PartitionOutOfRangeError, match="0 to 1"):
                producer.send_arrow(topic, table, partition=partition)
        with pytest.raises(InvalidRecordError, match="partition is 'a'"):
            producer.send_arrow(topic, table, partition="a")  # type: ignore[arg-type]
        for frame in (None, 3, [1, 2], {"value": [b"x"]}):
            with pytest.raises(SchemaMismatchError, match="pass a pyarrow table"):
                producer.send_arrow(topic, frame)
        assert producer.send(topic, b"x", partition=np.int64(1)).result(HANG_LIMIT_S).partition == 1  # type: ignore[arg-type]
        assert producer.metrics()["errors"] == 0, "what is refused never was a record"
    with (
        Producer(appliance.address, partitioner=lambda _topic, _key, _count: "first") as odd,
        pytest.raises(InvalidRecordError, match="partitioner"),
    ):
        odd.send(topic, b"x")


def test_what_needs_an_assignment_says_when_a_member_has_one(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    key = TopicPartition(topic, 0)
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic))
        producer.send(topic, b"x").result(HANG_LIMIT_S)
    with Consumer(
        topic, bootstrap=appliance.address, group_id=topic, auto_offset_reset="earliest"
    ) as consumer:
        calls: list[Callable[[], None]] = [
            lambda: consumer.seek(key, 0), consumer.seek_to_beginning, consumer.seek_to_end,
            lambda: consumer.pause(key),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(
                InvalidRequestError,
                match=r"assigned to this consumer: .* while poll\(\) runs.* on_partitions_assigned",
            ):
                call()
        assert re.fullmatch(
            rf"<Consumer of group '{topic}', member [0-9a-f]{{32}}, 0 partitions>", repr(consumer)
        )
        assert len(consumer.poll(20_000)) == 1
        assert repr(consumer).endswith(", 1 partition>")
        with pytest.raises(InvalidRequestError, match=r"not assigned to this consumer\. "):
            consumer.seek((topic, 7), 0)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="give a record that poll"):
            consumer.commit([1])  # type: ignore[arg-type]
        consumer.commit()
        assert consumer.committed((topic, 0)) == consumer.committed(key) == 1  # type: ignore[arg-type]
        assert consumer.committed([(topic, 0)]) == consumer.committed([key]) == {key: 1}  # type: ignore[list-item]
        consumer.seek_to_beginning()
        assert consumer.position(key) == 0
    assert "of group" in repr(consumer), "closed"
    with Consumer(topic, bootstrap=appliance.address) as plain:
        assert repr(plain) == "<Consumer without a group, 1 partition>"
    assert "0 partitions" in repr(Consumer.__new__(Consumer))


def test_partitions_are_paused_by_themselves_or_in_a_list_and_positions_follow(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with Admin(appliance.address) as admin, Producer(appliance.address, acks="1") as producer:
        admin.create_topics(NewTopic(topic, num_partitions=2))
        for partition in (0, 1):
            producer.send(topic, b"%d" % partition, partition=partition)
    with Consumer(
        [topic],
        bootstrap_servers=[appliance.address],
        auto_offset_reset="earliest",
        enable_auto_commit=False,
    ) as consumer:
        consumer.pause([first])
        assert consumer.paused() == [first]
        assert [record.partition for record in consumer.consume(1, timeout=60)] == [1]
        assert consumer.consume(1, timeout=0.1) == [], "the other one is paused"
        consumer.resume(first)
        assert [record.partition for record in consumer.consume(1, timeout=60)] == [0]
        consumer.seek_to_beginning([second])
        assert (consumer.position(first), consumer.position(second)) == (1, 0)
        assert consumer.offsets_for_times({first: 0, second: 2**50}) == {
            first: consumer.offsets_for_times({(topic, 0): 0})[first],  # type: ignore[dict-item]
            second: None,
        }
