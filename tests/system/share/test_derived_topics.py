"""Retry topics and dead-letter topics against a real appliance: made as their origin is made, and
deleted with it when that is asked for.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tailrace import Admin, Consumer, InvalidSettingError, NewTopic, Producer
from tailrace.aio import AsyncAdmin
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.cli import run
from tests.kit.members.queues import LONG_MS


def derive(appliance: EmbeddedAppliance, topic: str, **configs: Any) -> None:
    """A topic with a record that went to its retry topic and then to its dead-letter topic."""
    with Admin(appliance.address) as admin:
        admin.create_topics(
            NewTopic(topic, 2, {name.replace("_", "."): value for name, value in configs.items()})
        )
    with Producer(appliance.address) as producer:
        producer.send(topic, b"1", partition=1).result(60)
    with Consumer(
        topic,
        bootstrap=appliance.address,
        group_id="g",
        auto_offset_reset="earliest",
        max_retry_attempts=1,
    ) as consumer:
        (record,) = consumer.poll(LONG_MS)
        assert consumer.retry_later(record, 0) == 1
        (again,) = consumer.poll(LONG_MS)
        assert consumer.retry_later(again, 0) == 0


def test_derived_topics_take_their_settings_from_their_origin(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    """They had seven days and a megabyte, whatever their topic had."""
    own = {
        "retention.ms": -1,
        "retention.bytes": 1 << 30,
        "segment.bytes": 1 << 20,
        "segment.ms": 60_000,
        "compression.type": "zstd",
    }
    derive(
        appliance,
        topic,
        **{name.replace(".", "_"): value for name, value in own.items()},
        max_message_bytes=100_000,
    )
    with Admin(appliance.address) as admin:
        infos = admin.topic_info([topic, f"{topic}.g.retry", f"{topic}.dlq"])
        for name in (f"{topic}.g.retry", f"{topic}.dlq"):
            settings = infos[name].settings
            assert {key: settings[key] for key in own} == own
            assert settings["max.message.bytes"] == 100_000 + (16 << 10)
            assert settings["derived.from"] == infos[topic].topic_id.hex()
            assert (settings["durability"], len(infos[name].partitions)) == ("disk", 2)


def test_a_topic_at_the_appliances_ceiling_has_derived_topics_as_large_as_can_be(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        largest = next(size for size in range(2_097_152, 0, -1) if is_allowed(admin, topic, size))
    derive(appliance, topic, max_message_bytes=largest)
    with Admin(appliance.address) as admin:
        for info in admin.topic_info([f"{topic}.g.retry", f"{topic}.dlq"]).values():
            assert info.settings["max.message.bytes"] == largest


def is_allowed(admin: Admin, topic: str, size: int) -> bool:
    try:
        admin.create_topics(NewTopic(topic, 1, {"max.message.bytes": size}), validate_only=True)
    except InvalidSettingError:
        return False
    return True


def test_what_an_operator_has_set_otherwise_stays(appliance: EmbeddedAppliance, topic: str) -> None:
    derive(appliance, topic)
    retry = f"{topic}.g.retry"
    with Admin(appliance.address) as admin:
        admin.alter_topics({retry: {"retention.ms": 1_000_000, "max.message.bytes": 1_500_000}})
        before = admin.topic_info(retry)[retry].settings
    with Producer(appliance.address) as producer:
        producer.send(topic, b"2", partition=1).result(60)
    with Consumer(topic, bootstrap=appliance.address, group_id="g") as consumer:
        records = consumer.poll(LONG_MS)
        assert consumer.retry_later(records[-1], 0) >= 1
    with Admin(appliance.address) as admin:
        assert admin.topic_info(retry)[retry].settings == before


def test_a_topic_is_deleted_with_its_derived_topics_when_that_is_asked_for(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    derive(appliance, topic)
    derive(appliance, f"{topic}.other", dead_letter_topic=f"{topic}.dlq")
    mine, shared, others = f"{topic}.g.retry", f"{topic}.dlq", f"{topic}.other.g.retry"
    with Admin(appliance.address) as admin:
        admin.create_topics(
            NewTopic(f"{topic}.x.retry", 1)
        )  # a user's own, of a name that could be one
        assert admin.derived_topics(topic) == [mine], (
            "another topic writes its dead letters to the other"
        )
        admin.alter_topics({f"{topic}.other": {"dead.letter.topic": ""}})
        assert admin.derived_topics(topic) == [shared, mine]
        admin.delete_topics(topic)
        assert {mine, shared} <= set(admin.list_topics()), "not asked for"
        assert admin.derived_topics(f"{topic}.other") == [others]

    async def main() -> None:
        async with AsyncAdmin(appliance.address) as admin:
            await admin.delete_topics(f"{topic}.other", with_derived=True)
            assert {f"{topic}.other", others}.isdisjoint(await admin.list_topics())

    asyncio.run(main())


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_the_command_deletes_what_is_derived_when_that_is_asked_for(
    appliance: EmbeddedAppliance, topic: str, is_asked_for: bool
) -> None:
    derive(appliance, topic)
    derived = [f"{topic}.dlq", f"{topic}.g.retry"]
    flags = ["--with-derived"] if is_asked_for else []
    assert json.loads(
        run(appliance, "topic", "delete", topic, *flags, "--yes", "--json").stdout
    ) == ({"deleted": topic, "derived": derived} if is_asked_for else {"deleted": topic})
    with Admin(appliance.address) as admin:
        assert set(derived).isdisjoint(admin.list_topics()) is is_asked_for
