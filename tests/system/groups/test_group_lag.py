"""Operators' view of groups on a running appliance: lag in records and in seconds, metrics, a topic
whose delivery is paused.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, OffsetAndMetadata, Producer, Record, TopicPartition
from tailrace.aio import AsyncAdmin
from tailrace.core.errors import OffsetOutOfRangeError, UnknownGroupError, UnknownTopicError
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.appliances.console import console_of, metrics
from tests.kit.cli import run
from tests.kit.processes import children, wait_until


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(settings={"http.listen": "127.0.0.1:0"}, auto_create_topics=False)
    yield running
    assert running.stop() == 0, "the appliance did not stop cleanly"


@pytest.fixture
def admin(appliance: EmbeddedAppliance) -> Iterator[Admin]:
    with Admin(appliance.address) as made:
        yield made


def send_hourly(
    appliance: EmbeddedAppliance, topic: str, count: int, compression: str = "none"
) -> list[int]:
    """Records in partition 0, an hour apart up to an hour ago; returns their times in
    milliseconds.
    """
    now = dt.datetime.now(dt.UTC)
    times = [now - dt.timedelta(hours=count - n) for n in range(count)]
    with Producer(appliance.address, linger_ms=5_000, compression_type=compression) as producer:
        sent = [producer.send(topic, b"x", partition=0, timestamp=time) for time in times]
        producer.flush()
        return [handle.result(60).timestamp for handle in sent]


def test_an_appliance_without_groups_shows_none_and_a_scrape_starts_nothing(
    appliance: EmbeddedAppliance,
) -> None:
    named = {name for name, _ in metrics(console_of(appliance)) if "group" in name}
    assert named == {"tailrace_groups_refused"}, "which says whether they could be served"
    assert "tr-groups-0" not in children(appliance)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_lag_is_said_in_records_and_in_seconds(
    appliance: EmbeddedAppliance, admin: Admin, topic: str, compression: str
) -> None:
    admin.create_topics(NewTopic(topic, 2, {"retention.ms": -1}))
    times_ms = send_hourly(appliance, topic, 50, compression)
    first, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
    for offset in (0, 17, 49, 50):
        admin.alter_group_offsets(f"{topic}-g", {first: offset, other: 0})
        before_s = time.time()
        rows = admin.describe_groups(f"{topic}-g")[f"{topic}-g"]["partitions"]
        assert [(row["partition"], row["committed"], row["end"], row["lag"]) for row in rows] == [
            (0, offset, 50, 50 - offset),
            (1, 0, 0, 0),
        ]
        assert rows[1]["lag_seconds"] == 0.0
        if offset == 50:
            assert rows[0]["lag_seconds"] == 0.0
        else:
            assert (
                before_s - 1 <= rows[0]["lag_seconds"] + times_ms[offset] / 1000 <= time.time() + 1
            )
    assert (
        admin.describe_groups(f"{topic}-g", lag_seconds=False)[f"{topic}-g"]["partitions"][0].get(
            "lag_seconds"
        )
        is None
    )


def test_offsets_are_set_shown_and_forgotten_from_outside(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics(NewTopic(topic, 2))
    send_hourly(appliance, topic, 4)
    first, group = TopicPartition(topic, 0), f"{topic}-g"
    with pytest.raises(UnknownGroupError):
        admin.describe_groups(group)
    assert admin.list_group_offsets(group) == {}
    with pytest.raises(OffsetOutOfRangeError):
        admin.alter_group_offsets(group, {first: 99})
    with pytest.raises(UnknownTopicError):
        admin.alter_group_offsets(group, {TopicPartition(f"no-{topic}", 0): 0})
    admin.alter_group_offsets(group, {first: 3})
    assert admin.list_groups()[group]["state"] == "EMPTY"
    assert list(admin.list_group_offsets(group)) == [first]
    assert admin.list_group_offsets(group, [TopicPartition(topic, 1)]) == {
        TopicPartition(topic, 1): None
    }
    admin.alter_group_offsets(group, {first: None})
    assert admin.list_group_offsets(group) == {}
    admin.alter_group_offsets(group, {first: 1})
    admin.delete_groups(group)
    assert group not in admin.list_groups()
    with pytest.raises(UnknownGroupError):
        admin.delete_groups(group)


def test_metrics_of_groups_are_there_once_there_is_one(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics(NewTopic(topic, 1))
    send_hourly(appliance, topic, 5)
    admin.alter_group_offsets(topic, {TopicPartition(topic, 0): 2})
    found = metrics(console_of(appliance))
    labels = {("group", topic), ("topic", topic), ("partition", "0")}
    assert found["tailrace_group_lag_records", frozenset(labels)] == 3
    assert found["tailrace_group_members", frozenset({("group", topic)})] == 0
    assert found["tailrace_groups", frozenset({("kind", "consumer"), ("state", "EMPTY")})] >= 1
    assert found["tailrace_groups_truncated", frozenset()] == 0


class TwoReaders:
    """Two consumers of a group over the same topics, and what they got."""

    def __init__(self, admin: Admin, group: str, topic: str, consumers: list[Consumer]) -> None:
        self._admin = admin
        self._group = group
        self._topic = topic
        self._consumers = consumers
        self.got: list[Record] = []

    def has(self, name: str, count: int) -> bool:
        """Poll; True if so many records of the topic have come."""
        for consumer in self._consumers:
            self.got.extend(consumer.poll(20))
        return sum(record.topic == name for record in self.got) >= count

    def owned(self) -> dict[str, list[int]]:
        """Member -> its partitions of the topic."""
        members = self._admin.describe_groups(self._group)[self._group]["members"]
        return {member["member_id"]: member["owned"].get(self._topic, []) for member in members}

    def are_paused(self, requested: bool) -> bool:
        self.has(self._topic, 0)
        mine = [
            cursor
            for consumer in self._consumers
            for key, cursor in consumer._fetch_loop.cursors.items()
            if key.topic == self._topic
        ]
        return len(mine) == 2 and all(cursor.is_paused == requested for cursor in mine)

    def are_shared(self) -> bool:
        self.has(self._topic, 0)
        return all(len(consumer.assignment()) == 2 for consumer in self._consumers)

    def numbers(self, partition: int) -> list[int]:
        place = self._topic, partition
        return [int(one.value) for one in self.got if (one.topic, one.partition) == place]


def test_a_topic_that_is_paused_gives_groups_nothing_and_goes_on_with_nothing_missed(
    appliance: EmbeddedAppliance, admin: Admin, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two consumers of a topic and of another, which shows that records come; a reader without a
    group is not held up. The program's log says why nothing comes.
    """
    other = f"{topic}-other"
    admin.create_topics([NewTopic(topic, 2), NewTopic(other, 2)])
    settings: dict[str, Any] = {
        "bootstrap": appliance.address,
        "group_id": topic,
        "auto_offset_reset": "earliest",
        "auto_commit_interval_ms": 50,
    }
    with (
        Producer(appliance.address) as producer,
        Consumer(topic, other, **settings) as first,
        Consumer(topic, other, **settings) as second,
    ):
        readers = TwoReaders(admin, topic, topic, [first, second])

        def send(name: str, numbers: range) -> None:
            for number in numbers:
                producer.send(name, b"%d" % number, partition=number % 2)
            producer.flush(60)

        wait_until(readers.are_shared, "both have their partitions")
        send(topic, range(4))
        wait_until(lambda: readers.has(topic, 4), "records come")
        owned = readers.owned()
        admin.alter_topics({topic: {"delivery.paused": True}})
        wait_until(lambda: readers.are_paused(True), "both know that it is paused")
        send(topic, range(4, 50))
        for count in range(2, 12, 2):
            send(other, range(count - 2, count))
            wait_until(partial(readers.has, other, count), "records of the other topic come")
        assert sum(map(len, map(readers.numbers, range(2)))) == 4, "records of a paused topic"
        with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as reader:
            free: list[Record] = []

            def has_all() -> bool:
                free.extend(reader.poll(20))
                return len(free) == 50

            wait_until(has_all, "a reader without a group gets them")
        assert readers.owned() == owned, "partitions changed hands"
        described = admin.describe_groups(topic)[topic]
        assert (
            described["state"],
            sum(row["lag"] or 0 for row in described["partitions"] if row["topic"] == topic),
        ) == ("STABLE", 46)
        admin.alter_topics({topic: {"delivery.paused": False}})
        wait_until(lambda: readers.has(topic, 50), "it goes on")
        for number in range(2):
            assert readers.numbers(number) == list(range(number, 50, 2)), "each once, in order"
        assert readers.owned() == owned
    for word in ("paused (delivery.paused=true)", "resumed"):
        said = [
            one.getMessage()
            for one in caplog.records
            if f"delivery of topic {topic} is {word}" in one.getMessage()
        ]
        assert len(said) == sum(bool(mine) for mine in owned.values()), (
            "each consumer that has some of it says so, once"
        )


def test_lag_of_consumers_falls_as_they_commit_and_surplus_ones_are_idle(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics(NewTopic(topic, 1))
    send_hourly(appliance, topic, 30)
    settings: dict[str, Any] = {
        "bootstrap": appliance.address,
        "group_id": topic,
        "auto_offset_reset": "earliest",
        "enable_auto_commit": False,
    }
    with (
        Consumer(topic, **settings, client_id="one") as first,
        Consumer(topic, **settings, client_id="two") as second,
    ):
        got: list[Record] = []

        def has_all() -> bool:
            for consumer in (first, second):
                got.extend(consumer.poll(20, 10))
            return len(got) >= 30 and len(admin.describe_groups(topic)[topic]["members"]) == 2

        wait_until(has_all, "everything is read, by one of two")
        assert admin.describe_groups(topic)[topic]["partitions"][0]["lag"] is None, (
            "nothing is committed"
        )
        reader = first if first.assignment() else second
        reader.commit({TopicPartition(topic, 0): 29})
        row = admin.describe_groups(topic)[topic]["partitions"][0]
        assert (row["lag"], row["lag_seconds"] > 3_000) == (1, True)
        reader.commit()
        row = admin.describe_groups(topic)[topic]["partitions"][0]
        assert (row["lag"], row["lag_seconds"]) == (0, 0.0)
        found = admin.describe_groups(topic)[topic]
        assert sorted(len(m["target"].get(topic, [])) for m in found["members"]) == [0, 1]
        shown = json.loads(run(appliance, "group", "describe", topic, "--json").stdout)
        idle = next(m for m in found["members"] if not m["target"])
        assert shown["idle_members"] == [idle["member_id"]]
        assert idle["member_id"].encode() in run(appliance, "group", "describe", topic).stderr
        advice = json.loads(
            run(appliance, "group", "advise", topic, "--seconds", "1", "--json").stdout
        )
        assert advice["idle"] == [f"{idle['client_id']} ({idle['member_id']})"]
        assert (
            b"GROUP_NOT_EMPTY"
            in run(appliance, "group", "reset-offsets", topic, "--to-earliest", status=1).stderr
        )
        assert b"GROUP_NOT_EMPTY" in run(appliance, "group", "delete", topic, status=1).stderr
        assert metrics(console_of(appliance))["tailrace_group_commits_total", frozenset()] >= 2


def test_a_member_that_holds_others_up_is_named(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    admin.create_topics(NewTopic(topic, 2))
    settings: dict[str, Any] = {
        "bootstrap": appliance.address,
        "group_id": topic,
        "heartbeat_interval_ms": 100,
    }
    with (
        Consumer(topic, **settings, client_id="sleeper") as first,
        Consumer(topic, **settings) as second,
    ):

        def has_both() -> bool:
            first.poll(20)
            return len(first.assignment()) == 2

        wait_until(has_both, "the first has both partitions")

        def stuck() -> dict[str, str]:
            second.poll(20)  # the first one polls no more, and its heartbeats go on
            return {
                m["client_id"]: m["stuck"]
                for m in admin.describe_groups(topic)[topic]["members"]
                if m["stuck"]
            }

        wait_until(lambda: "sleeper" in stuck(), "the first one is found")
        assert "does not call poll" in stuck()["sleeper"]
        shown = run(appliance, "group", "describe", topic).stderr.decode()
        assert "stuck: sleeper (" in shown
        assert "does not call poll" in shown

        def is_shared() -> bool:
            first.poll(20)
            return not stuck() and len(second.assignment()) == 1

        wait_until(is_shared, "it polls again, and gives one back")


def test_coroutines_administer_groups_too(
    appliance: EmbeddedAppliance, admin: Admin, topic: str
) -> None:
    async def look() -> None:
        key = TopicPartition(topic, 0)
        async with AsyncAdmin(appliance.address) as other:
            await other.create_topics(NewTopic(topic, 1))
            await other.alter_group_offsets(topic, {key: 0})
            described, listed, offsets = await asyncio.gather(
                other.describe_groups(topic), other.list_groups(), other.list_group_offsets(topic)
            )
            assert (described[topic]["partitions"][0]["lag"], listed[topic]["state"], offsets) == (
                0,
                "EMPTY",
                {key: OffsetAndMetadata(0)},
            )
            await other.delete_groups([topic])
            with pytest.raises(UnknownGroupError):
                await other.describe_groups(topic)

    asyncio.run(look())
