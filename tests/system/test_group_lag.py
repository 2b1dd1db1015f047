"""What operators see of groups on a running appliance: lag in records and in seconds, metrics, a topic whose delivery is paused."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Iterator

import pytest

from tailrace import Admin, NewTopic, Producer, TopicPartition
from tailrace.errors import OffsetOutOfRangeError, UnknownGroupError, UnknownTopicError
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children
from tests.system.test_console import console_of, metrics


@pytest.fixture(scope="module")
def appliance() -> Iterator[EmbeddedAppliance]:
    running = start_embedded(settings={"http.listen": "127.0.0.1:0"}, auto_create_topics=False)
    yield running
    assert running.stop() == 0, "the appliance did not stop cleanly"


@pytest.fixture
def admin(appliance: EmbeddedAppliance) -> Iterator[Admin]:
    with Admin(appliance.address) as made:
        yield made


def send_hourly(appliance: EmbeddedAppliance, topic: str, count: int, compression: str = "none") -> list[int]:
    """Records in partition 0, an hour apart up to an hour ago; returns their times in milliseconds."""
    now = dt.datetime.now(dt.UTC)
    times = [now - dt.timedelta(hours=count - n) for n in range(count)]
    with Producer(appliance.address, linger_ms=5_000, compression_type=compression) as producer:
        sent = [producer.send(topic, b"x", partition=0, timestamp=time) for time in times]
        producer.flush()
        return [handle.result(60).timestamp for handle in sent]


def test_an_appliance_without_groups_shows_none_and_a_scrape_starts_nothing(appliance: EmbeddedAppliance) -> None:
    assert not [name for name, _ in metrics(console_of(appliance)) if "group" in name]
    assert "tr-groups-0" not in children(appliance)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_lag_is_said_in_records_and_in_seconds(appliance: EmbeddedAppliance, admin: Admin, topic: str, compression: str) -> None:
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
            assert before_s - 1 <= rows[0]["lag_seconds"] + times_ms[offset] / 1000 <= time.time() + 1
    assert admin.describe_groups(f"{topic}-g", lag_seconds=False)[f"{topic}-g"]["partitions"][0].get("lag_seconds") is None


def test_offsets_are_set_shown_and_forgotten_from_outside(appliance: EmbeddedAppliance, admin: Admin, topic: str) -> None:
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
    assert admin.list_group_offsets(group, [TopicPartition(topic, 1)]) == {TopicPartition(topic, 1): None}
    admin.alter_group_offsets(group, {first: None})
    assert admin.list_group_offsets(group) == {}
    admin.alter_group_offsets(group, {first: 1})
    admin.delete_groups(group)
    assert group not in admin.list_groups()
    with pytest.raises(UnknownGroupError):
        admin.delete_groups(group)


def test_metrics_of_groups_are_there_once_there_is_one(appliance: EmbeddedAppliance, admin: Admin, topic: str) -> None:
    admin.create_topics(NewTopic(topic, 1))
    send_hourly(appliance, topic, 5)
    admin.alter_group_offsets(topic, {TopicPartition(topic, 0): 2})
    found = metrics(console_of(appliance))
    labels = {("group", topic), ("topic", topic), ("partition", "0")}
    assert found["tailrace_group_lag_records", frozenset(labels)] == 3
    assert found["tailrace_group_members", frozenset({("group", topic)})] == 0
    assert found["tailrace_groups", frozenset({("kind", "consumer"), ("state", "EMPTY")})] >= 1
    assert found["tailrace_groups_not_shown", frozenset()] == 0
