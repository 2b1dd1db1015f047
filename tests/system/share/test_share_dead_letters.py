"""Records that a share group gives up, against a real appliance: poison, damage, deserializers that
fail, dead-letter topics that cannot be written.
"""

from __future__ import annotations

import pathlib
import re
from collections import Counter

import pytest

from tailrace import (
    Admin,
    Consumer,
    InvalidRecordError,
    Producer,
    ShareConsumer,
    TailraceError,
    TopicPartition,
)
from tailrace.core.topic_names import dead_letter_name
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit import cli
from tests.kit.appliances import damaged_topics
from tests.kit.members.queues import LONG_MS, fill, fits, make, read, share, start_offset, take


def test_poison_ends_in_the_dead_letter_topic_and_the_rest_goes_on(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(
        appliance,
        topic,
        10,
        partitions=2,
        group_share_delivery_count_limit=3,
        dead_letter_topic=f"{topic}-dead",
    )
    deliveries: Counter[bytes] = Counter()
    with share(appliance, topic) as consumer:
        while consumer.metrics()["dead_letters"] < 1:
            for record in consumer.poll(1_000):
                deliveries[record.value] += 1
                assert record.delivery_count == deliveries[record.value]
                consumer.acknowledge(record, "release" if record.value == b"7" else "accept")
            consumer.commit()
        assert deliveries == {b"%d" % number: 3 if number == 7 else 1 for number in range(10)}
    (letter,) = read(appliance, f"{topic}-dead", 1)
    headers = dict(letter.headers)
    assert (letter.key, letter.value) == (b"k7", b"7")
    assert headers["dlq.topic"] == topic.encode()
    assert int(headers["dlq.partition"]) == letter.partition
    assert headers["dlq.group"] == f"g-{topic}".encode()
    assert headers["dlq.delivery_count"] == b"3"
    assert b"delivered 3 times" in headers["dlq.reason"]
    with Consumer(bootstrap=appliance.address) as plain:
        key = TopicPartition(topic, letter.partition)
        plain.assign([key])
        plain.seek(key, int(headers["dlq.offset"]))
        (origin,) = plain.poll(LONG_MS, 1)
        assert (origin.value, origin.timestamp) == (b"7", int(headers["dlq.timestamp"]))


def test_a_dead_letter_says_why_it_was_rejected(appliance: EmbeddedAppliance, topic: str) -> None:
    make(appliance, topic, 3)
    with share(appliance, topic) as consumer:
        for record, reason in zip(
            take(consumer, 3), ("no customer 4711", "file \udc80", None), strict=True
        ):
            consumer.acknowledge(record, "reject", reason=reason)
        consumer.commit()
    reasons = {
        letter.value: dict(letter.headers)["dlq.reason"]
        for letter in read(appliance, f"{topic}.dlq", 3)
    }
    assert reasons == {
        b"0": b"no customer 4711",
        b"1": rb"file \udc80",
        b"2": b"rejected by the consumer",
    }


def test_a_dead_letter_that_cannot_be_written_is_not_given_up(
    appliance: EmbeddedAppliance, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(
        appliance,
        topic,
        1,
        group_share_record_lock_duration_ms=5_000,
        group_share_delivery_count_limit=1,
        dead_letter_topic=topic,
    )
    with share(appliance, topic) as consumer:
        (record,) = take(consumer, 1)
        consumer.acknowledge(record, "reject")
        with pytest.raises(TailraceError, match="its own dead-letter topic"):
            consumer.commit()
        consumer.acknowledge(record, "release")
        consumer.commit()
        assert consumer.poll(500) == []
        assert "share_dead_letter_not_written" in caplog.text
        with Admin(appliance.address) as admin:
            admin.alter_topics({topic: {"dead.letter.topic": ""}})
        assert start_offset(appliance, f"g-{topic}") == 0
    with share(appliance, topic) as consumer:
        while consumer.metrics()["dead_letters"] < 1:
            assert consumer.poll(200) == []
    assert read(appliance, f"{topic}.dlq", 1)[0].value == b"0"


def test_a_record_whose_deserializer_fails_is_released_and_dead_lettered_as_it_is_stored(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 6, group_share_delivery_count_limit=2)

    def strict(value: bytes) -> int:
        if value == b"3":
            raise ValueError("three")
        return int(value)

    values: list[int] = []
    failures: list[int | None] = []
    with share(appliance, topic, value_deserializer=strict) as consumer:
        while consumer.metrics()["dead_letters"] < 1 or len(values) < 5:
            try:
                records = consumer.poll(1_000)
            except InvalidRecordError as error:
                failures.append(error.first_offset)
                continue
            for record in records:
                assert record.delivery_count == 1
                values.append(record.value)
                consumer.acknowledge(record)
    assert values == [0, 1, 2, 4, 5]  # those behind it pay nothing for it
    assert failures == [3, 3]
    assert read(appliance, f"{topic}.dlq", 1)[0].value == b"3"


def test_damaged_records_are_told_in_the_dead_letter_topic_and_the_rest_goes_on(
    tmp_path: pathlib.Path, topic: str
) -> None:
    damaged_topics.fill(tmp_path, topic)
    damaged_topics.damage(tmp_path, topic, [3, 7], "body")
    damaged = {
        number * damaged_topics.PER_BATCH + row
        for number in (3, 7)
        for row in range(damaged_topics.PER_BATCH)
    }
    running = start_embedded(data_dir=str(tmp_path), auto_create_topics=False)
    try:
        with share(running, topic) as consumer:
            found: list[int] = []
            while (
                len(found) < damaged_topics.TOTAL - len(damaged)
                or consumer.metrics()["dead_letters"] < 2
            ):
                found += [record.offset for record in consumer.poll(1_000, 7)]
            consumer.commit()
        assert sorted(found) == [
            offset for offset in range(damaged_topics.TOTAL) if offset not in damaged
        ]
        assert start_offset(running, f"g-{topic}") == damaged_topics.TOTAL
        told: set[int] = set()
        for letter in read(running, f"{topic}.dlq", 2):
            assert (letter.key, letter.value) == (None, None)
            match = re.search(
                r"offsets (\d+) to (\d+) cannot be read",
                dict(letter.headers)["dlq.reason"].decode(),
            )
            assert match is not None
            told.update(range(int(match[1]), int(match[2]) + 1))
        assert told == damaged
    finally:
        assert running.stop() == 0


def test_a_record_as_large_as_its_topic_allows_is_dead_lettered_whole_and_the_topic_made_again(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, max_message_bytes=4_096)
    with Producer(appliance.address) as producer:
        size = next(size for size in range(4_000, 0, -10) if fits(producer, topic, size))
    with share(appliance, topic) as consumer, Admin(appliance.address) as admin:
        (record,) = take(consumer, 1)
        assert len(record.value) == size
        consumer.acknowledge(record, "reject", reason="\U0001f4a5" * 1_000)
        consumer.commit()
        (letter,) = read(appliance, f"{topic}.dlq", 1)
        headers = dict(letter.headers)
        assert (letter.key, letter.value, headers["dlq.offset"]) == (record.key, record.value, b"0")
        assert "dlq.is_cut" not in headers
        admin.delete_topics(f"{topic}.dlq")
        fill(appliance, topic, 1)
        for _ in range(600):
            for record in consumer.poll(100):
                consumer.acknowledge(record, "reject")
            try:
                consumer.commit()
            except TailraceError:
                continue  # the first attempt finds the topic gone; the record is still held
            if consumer.metrics()["dead_letters"] == 2:
                break
        assert [letter.value for letter in read(appliance, f"{topic}.dlq", 1)] == [b"0"]


@pytest.mark.parametrize("part", ["headers", "key"])
def test_poison_of_a_megabyte_ends_in_the_dead_letter_topic(
    appliance: EmbeddedAppliance, topic: str, part: str
) -> None:
    """It fitted no dead-letter topic with the headers that are added, and came again and again."""
    make(appliance, topic, group_share_delivery_count_limit=1)
    with Producer(appliance.address) as producer, Admin(appliance.address) as admin:
        largest = int(admin.topic_info(topic)[topic].settings["max.message.bytes"]) - 8_192
        poison = (
            {"key": b"x" * largest}
            if part == "key"
            else {"headers": [("dlq.reason", b"mine"), ("h", b"x" * largest)]}
        )
        producer.send(topic, b"v", **poison).result(60)
    with share(appliance, topic) as consumer:
        (record,) = take(consumer, 1)
        consumer.acknowledge(record, "reject")
        consumer.commit()
    (letter,) = read(appliance, f"{topic}.dlq", 1)
    assert (letter.key, letter.value) == (record.key, b"v")
    assert letter.headers[: len(record.headers)] == record.headers, (
        "the sender's own are kept, whatever they are called"
    )
    assert dict(letter.headers)["dlq.reason"] == b"rejected by the consumer"


@pytest.mark.parametrize("part", ["value", "key", "headers"])
def test_what_a_dead_letter_topic_of_the_operators_own_cannot_hold_is_cut(
    appliance: EmbeddedAppliance, topic: str, part: str
) -> None:
    make(appliance, topic, dead_letter_topic=f"{topic}-dead")
    make(appliance, f"{topic}-dead", max_message_bytes=4_096)
    parts = {
        "value": b"v",
        "key": b"k",
        "headers": [("h", b"x")],
        part: b"x" * 100_000 if part != "headers" else [("h", b"x" * 100_000)],
    }
    with Producer(appliance.address) as producer:
        producer.send(topic, **parts).result(60)  # type: ignore[arg-type]
    with share(appliance, topic) as consumer:
        (record,) = take(consumer, 1)
        consumer.acknowledge(record, "reject")
        consumer.commit()
    (letter,) = read(appliance, f"{topic}-dead", 1)
    headers = dict(letter.headers)
    assert (headers["dlq.is_cut"], headers["dlq.offset"], letter.value) == (b"true", b"0", None)
    assert (letter.key == b"k") is (part == "value")
    assert ("h" in headers) is (part != "headers")


def test_a_topic_whose_name_has_no_room_for_an_ending_has_a_dead_letter_topic(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    long = topic + "x" * (249 - len(topic))
    make(appliance, long, 1)
    with ShareConsumer(
        long, bootstrap=appliance.address, group_id=f"g-{topic}", auto_offset_reset="earliest"
    ) as consumer:
        (record,) = take(consumer, 1)
        consumer.acknowledge(record, "reject")
        consumer.commit()
    assert read(appliance, dead_letter_name(long), 1)[0].value == b"0"


def test_a_dead_letter_that_is_refused_is_counted_and_said_once(
    appliance: EmbeddedAppliance, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    make(appliance, topic, 3, dead_letter_topic=topic)
    with share(appliance, topic) as consumer:
        for record in take(consumer, 3):
            consumer.acknowledge(record, "reject")
        for _ in range(3):
            with pytest.raises(TailraceError, match="its own dead-letter topic"):
                consumer.commit()
        assert consumer.metrics()["dead_letters_failed"] == 9
    assert caplog.text.count("share_dead_letter_not_written") == 1
    assert "set dead.letter.topic to another one" in caplog.text


def test_a_redrive_of_the_topic_itself_names_the_topic_of_its_dead_letters(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 2)
    with share(appliance, topic) as consumer:
        for record in take(consumer, 2):
            consumer.acknowledge(record, "reject")
        consumer.commit()
    letters = dead_letter_name(topic)
    hint = f"the dead letters of {topic} are in {letters}"
    assert hint in cli.run(appliance, "topic", "redrive", topic).stderr.decode()
    answer = cli.run(appliance, "topic", "redrive", letters).stderr.decode()
    assert "2 records sent again" in answer
    assert "the dead letters of" not in answer
