"""Every public behaviour of Admin and AsyncAdmin, over a real appliance: one body for both."""

from __future__ import annotations

import asyncio
import datetime as dt
import inspect

import pytest

from tailrace import Admin, ConfigResource, NewTopic, Producer, TopicPartition
from tailrace.aio import AsyncAdmin
from tailrace.core.errors import (
    ClientClosedError,
    InvalidRequestError,
    InvalidSettingError,
    OffsetOutOfRangeError,
    TopicExistsError,
    UnknownGroupError,
    UnknownTopicError,
    UnknownTransactionalIdError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.conformance.interrupts import at, points
from tests.conformance.worlds import WORLDS, World
from tests.kit.runs.cancellation import CancelledAt

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""


def test_both_have_the_same_methods_with_the_same_arguments() -> None:
    for name, method in inspect.getmembers(Admin, inspect.isfunction):
        if not name.startswith("_") and inspect.signature(method).return_annotation != "NoReturn":
            requested, found = (
                inspect.signature(method),
                inspect.signature(getattr(AsyncAdmin, name)),
            )
            assert [*found.parameters] == [*requested.parameters], name
            if name not in ("close", "list_delays"):
                assert found.return_annotation == requested.return_annotation, name
                assert "Steps" not in str(found.return_annotation), name


@WORLDS
def test_topics_are_made_changed_described_and_deleted(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    async def body() -> None:
        async with world.admin(appliance.address) as admin:
            await admin.create_topics(NewTopic(topic, 2), validate_only=True)
            assert topic not in await admin.list_topics()
            await admin.create_topics(iter([NewTopic(topic, 2)]))
            with pytest.raises(TopicExistsError):
                await admin.create_topics(NewTopic(topic))
            await admin.alter_topics({topic: {"retention.ms": "7d"}})
            await admin.create_partitions({topic: 3})
            assert (await admin.partition_counts())[topic] == 3
            with pytest.raises(InvalidRequestError, match="no data directory of this appliance"):
                await admin.move_partition(topic, 0, "/elsewhere")
            described = (await admin.describe_topics(iter([topic])))[topic]
            assert described["configs"]["retention.ms"] == 7 * 86_400_000
            assert len(described["partitions"]) == 3
            assert (await admin.topic_info(topic))[topic].topic_id.hex() == described["topic_id"]
            assert (await admin.describe_configs(topic))[topic] == described["configs"]
            with pytest.raises(InvalidSettingError):
                await admin.alter_topics({topic: {"no.such": 1}})
            of_topic, broker = ConfigResource("topic", topic), ConfigResource("broker")
            await admin.alter_configs({of_topic: {"retention.ms": "5d"}})
            both = await admin.describe_configs([of_topic, broker])
            assert both[of_topic]["retention.ms"] == 5 * 86_400_000
            assert both[broker]["http.listen"].source == "command line"
            await admin.alter_configs({broker: {"groups.max": 99_999}})
            assert (await admin.describe_configs(broker))[broker]["groups.max"].value == 99_999
            await admin.alter_configs({broker: {"groups.max": None}})
            with pytest.raises(InvalidSettingError):
                await admin.alter_configs({broker: {"groups.max": 0}}, validate_only=True)
            with pytest.raises(InvalidRequestError):
                await admin.describe_configs(ConfigResource("cluster"))
            report = await admin.reload_config()
            assert (report["errors"], report["not_applied"]) == ([], [])
            assert (await admin.config_state())["reload"]["number"] >= 1
            await admin.bring_online(topic)
            await admin.delete_topics(topic)
            with pytest.raises(UnknownTopicError):
                await admin.describe_topics(topic)
            with pytest.raises(InvalidRequestError):
                await admin.create_topics("a name")

    world.run(body())


@WORLDS
def test_offsets_leases_and_groups(world: World, appliance: EmbeddedAppliance, topic: str) -> None:
    key = TopicPartition(topic, 0)

    async def body() -> None:
        async with world.admin(appliance.address) as admin:
            await admin.create_topics(NewTopic(topic))
            with Producer(appliance.address) as producer:
                for _ in range(5):
                    producer.send(topic, b"x")
            assert (await admin.offsets({key: "latest"}))[key]["offset"] == 5
            await admin.lease_offsets("l", {key: 2}, 60_000)
            await admin.lease_offsets("l", {key: 2}, 0)
            assert await admin.delete_records({key: 3}) == {key: 3}
            with pytest.raises(OffsetOutOfRangeError):
                await admin.lease_offsets("l", {key: 0}, 60_000)
            group = f"g-{topic}"
            await admin.alter_group_offsets(group, {key: 4})
            found = await admin.list_group_offsets(group)
            assert found[key].offset == 4
            assert group in await admin.list_groups()
            assert (await admin.describe_groups(group))[group]["partitions"][0]["lag"] == 1
            await admin.delete_groups(group)
            with pytest.raises(UnknownGroupError):
                await admin.describe_groups(group)
            assert (await admin.describe_cluster())["processes"]

    world.run(body())


@WORLDS
def test_transactions_of_which_there_are_none(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    async def body() -> None:
        async with world.admin(appliance.address) as admin:
            assert await admin.list_transactions("prepared") == {}
            assert await admin.find_hanging_transactions() == []
            with pytest.raises(UnknownTransactionalIdError):
                await admin.describe_transactions("no-such")
            with pytest.raises(UnknownTransactionalIdError):
                await admin.abort_transaction("no-such")
            assert (await admin.transaction_totals())["open"] == 0
            with pytest.raises(InvalidRequestError):
                await admin.abort_transaction()
            with pytest.raises(InvalidRequestError, match="with its epoch"):
                await admin.abort_transaction("no-such", producer_epoch=0)
            await admin.abort_transaction(producer_id=(1 << 62) + 99, producer_epoch=0)

    world.run(body())


@WORLDS
def test_delayed_records_are_listed_rescheduled_and_cancelled(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    async def body() -> None:
        async with world.admin(appliance.address) as admin:
            await admin.create_topics(NewTopic(topic, configs={"delay.enabled": True}))
            with Producer(appliance.address) as producer:
                ids = [
                    producer.send(topic, b"x", deliver_after=dt.timedelta(hours=1))
                    .result()
                    .delay_id
                    for _ in range(3)
                ]
            assert len(await admin.list_delays(topic)) == 3
            assert len([delay async for delay in admin.list_delays(topic)]) == 3
            moved = await admin.reschedule_delays(
                {ids[0]: dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)}
            )
            assert await admin.cancel_delays(iter([moved[ids[0]], ids[1]])) == {
                moved[ids[0]]: None,
                ids[1]: None,
            }
            assert [delay.delay_id async for delay in admin.list_delays(topic)] == [ids[2]]
            assert any(row["topic"] == topic for row in await admin.describe_delays())

    world.run(body())


@WORLDS
def test_a_closed_admin_says_so(world: World, appliance: EmbeddedAppliance) -> None:
    async def body() -> None:
        admin = world.admin(appliance.address)
        await admin.list_topics()
        await admin.close()
        await admin.close()
        with pytest.raises(ClientClosedError):
            await admin.list_topics()

    world.run(body())


def test_a_call_that_is_cancelled_at_any_wait_leaves_the_client_to_the_others(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    async def cancelled(number: int) -> bool:
        async with AsyncAdmin(appliance.address) as admin:
            cancelling = CancelledAt(admin.describe_topics(), number)

            async def victim() -> None:
                await cancelling

            task = asyncio.create_task(victim())
            others = [admin.list_topics(), admin.describe_cluster(), admin.list_groups()]
            names, *_ = await asyncio.gather(*others)
            assert topic in names
            await asyncio.wait([task])
            assert task.cancelled() == cancelling.was_made
            assert topic in await admin.list_topics()
            return cancelling.was_made

    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
    for number in points():
        if not asyncio.run(cancelled(number)):
            assert number > 0
            return


def test_a_signal_at_any_point_of_a_call_leaves_the_client_usable(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
        for point in points(step=5):
            with at(point) as interruption:
                admin.partition_counts()
            assert admin.partition_counts()[topic] == 1, interruption.where
            if not interruption.was_made:
                return


@WORLDS
def test_a_compacted_topic_is_cleaned_and_its_progress_told(
    world: World, appliance: EmbeddedAppliance, topic: str
) -> None:
    async def body() -> None:
        looks: list[bool] = []
        async with world.admin(appliance.address) as admin:
            await admin.create_topics(NewTopic(topic, 2, {"cleanup.policy": "compact"}))
            with Producer(appliance.address) as producer:
                for number in range(100):
                    producer.send(topic, b"%d" % number, b"k%d" % (number % 4))
            found = await admin.compact_topic(
                topic, on_progress=lambda rows: looks.append(all(row["is_done"] for row in rows))
            )
            assert [row["partition"] for row in found] == [0, 1]
            assert all(row["cleaned_below"] == row["log_end_offset"] for row in found)
            assert looks[-1]
            assert not any(looks[:-1])
            with pytest.raises(UnknownTopicError):
                await admin.compact_topic("nosuch")
            with pytest.raises(InvalidRequestError):
                await admin.compact_topic(topic, timeout_ms=-1)

    world.run(body())
