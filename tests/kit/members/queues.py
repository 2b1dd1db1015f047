"""A share group's topics and consumers, for tests with a real appliance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tailrace import (
    Admin,
    Consumer,
    NewTopic,
    Producer,
    Record,
    RecordTooLargeError,
    ShareConsumer,
)
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.protocol.frame import Api
from tailrace.share.record import ShareRecord

LONG_MS = 60_000


def make(
    appliance: EmbeddedAppliance, topic: str, count: int = 0, partitions: int = 1, **configs: Any
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(
            NewTopic(
                topic,
                partitions,
                {name.replace("_", "."): value for name, value in configs.items()},
            )
        )
    fill(appliance, topic, count)


def fill(appliance: EmbeddedAppliance, topic: str, count: int, start: int = 0) -> None:
    with Producer(appliance.address) as producer:
        for number in range(start, start + count):
            producer.send(topic, b"%d" % number, key=b"k%d" % number, headers=[("h", b"x")])


def keep_locks(appliance: EmbeddedAppliance, topic: str) -> None:
    """Records that are acquired from now on stay locked. What a test has taken before loses its
    short lock; what it takes then is its own, however slow the machine is.
    """
    with Admin(appliance.address) as admin:
        admin.alter_topics({topic: {"group.share.record.lock.duration.ms": 60_000}})


def share(
    appliance: EmbeddedAppliance, topic: str, group: str = "g", **settings: Any
) -> ShareConsumer:
    settings.setdefault("auto_offset_reset", "earliest")
    return ShareConsumer(
        topic, bootstrap=appliance.address, group_id=f"{group}-{topic}", **settings
    )


def take(consumer: ShareConsumer, count: int) -> list[ShareRecord]:
    """So many records, however many polls that takes; the consumer is in explicit mode, or this is
    one poll.
    """
    found: list[ShareRecord] = []
    while len(found) < count:
        records = consumer.poll(LONG_MS, count - len(found))
        assert records, f"{len(found)} of {count} records came"
        found += records
    return found


def poll_until(
    consumer: ShareConsumer, condition: Callable[[list[ShareRecord]], bool]
) -> list[ShareRecord]:
    """Poll until what came satisfies a condition."""
    found: list[ShareRecord] = []
    for _ in range(600):
        found += consumer.poll(200)
        if condition(found):
            return found
    raise AssertionError(f"never came: {len(found)} records did")


def read(appliance: EmbeddedAppliance, topic: str, count: int) -> list[Record]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found: list[Record] = []
        while len(found) < count:
            records = consumer.poll(LONG_MS)
            assert records, f"{len(found)} of {count} records came"
            found += records
        return found


def describe(appliance: EmbeddedAppliance, group: str, part: str) -> list[dict[str, Any]]:
    connection = Connection(appliance.address, "test")
    try:
        rows: list[dict[str, Any]] = call_json_now(
            connection, Api.DESCRIBE_GROUP, {"group": group, "part": part}, LONG_MS
        )[part]
        return rows
    finally:
        connection.close()


def start_offset(appliance: EmbeddedAppliance, group: str) -> int:
    return int(describe(appliance, group, "partitions")[0]["start_offset"])


def fits(producer: Producer, topic: str, size: int) -> bool:
    try:
        producer.send(topic, b"x" * size, partition=0).result(60)
    except RecordTooLargeError:
        return False
    return True
