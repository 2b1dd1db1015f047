"""A consumer of a group in an event loop: the same as the plain one, without a thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

from tailrace import Admin, Producer, RebalanceListener, Record, TopicPartition
from tailrace.aio import AsyncConsumer
from tailrace.core.errors import (
    ClientClosedError,
    CommitFailedError,
    InvalidRequestError,
    OffsetOutOfRangeError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.appliances.topics import create
from tests.kit.members.groups import heartbeats
from tests.kit.processes import HANG_LIMIT_S, wait_until
from tests.kit.runs.aio import run

PARTITIONS = 4
RECORDS = 200


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of 4 partitions with 50 records each."""
    create(appliance, topic, PARTITIONS)
    with Producer(appliance.address) as producer:
        for number in range(RECORDS):
            producer.send(topic, b"%d" % number, partition=number % PARTITIONS)
        producer.flush(60)
    return topic


def member(
    appliance: EmbeddedAppliance, group: str, *topics: str, **settings: Any
) -> AsyncConsumer:
    return AsyncConsumer(
        *topics,
        bootstrap=appliance.address,
        group_id=group,
        **{"auto_offset_reset": "earliest", **settings},
    )


async def read_until(consumers: list[AsyncConsumer], count: int) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            for some in await asyncio.gather(*(consumer.poll(10) for consumer in consumers)):
                found += some
    return found


async def poll_until_shared(*consumers: AsyncConsumer) -> list[Record]:
    found: list[Record] = []
    async with asyncio.timeout(60):
        while True:
            owned = [await consumer.assignment() for consumer in consumers]
            if (
                sum(map(len, owned)) == PARTITIONS
                and max(map(len, owned)) - min(map(len, owned)) <= 1
            ):
                return found
            for some in await asyncio.gather(*(consumer.poll(10) for consumer in consumers)):
                found += some


class Remembers(RebalanceListener):
    """Its methods are coroutines."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[TopicPartition]]] = []

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        await asyncio.sleep(0)
        self.calls.append(("revoked", revoked))

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        await asyncio.sleep(0)
        self.calls.append(("assigned", assigned))


@pytest.mark.parametrize("kind", ["assigned", "revoked"])
@pytest.mark.parametrize("asked", ["unsubscribe", "close"])
def test_a_listener_may_unsubscribe_and_close_inside_of_a_step(
    appliance: EmbeddedAppliance, filled: str, asked: str, kind: str
) -> None:
    calls: list[tuple[str, int]] = []

    class Leaves(Remembers):
        async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
            await self.told("revoked", revoked)

        async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
            await self.told("assigned", assigned)

        async def told(self, said: str, partitions: list[TopicPartition]) -> None:
            calls.append((said, len(partitions)))
            if said == kind:
                await getattr(consumer, asked)()

    consumer: AsyncConsumer

    async def main() -> None:
        nonlocal consumer
        consumer = member(appliance, f"{filled}-{asked}-{kind}")
        await consumer.subscribe([filled], listener=Leaves())
        async with asyncio.timeout(60):
            with suppress(ClientClosedError, InvalidRequestError):
                while not calls:
                    await consumer.poll(10)
                await consumer.unsubscribe()
            await consumer.close()

    run(main())
    assert calls == [("assigned", PARTITIONS), ("revoked", PARTITIONS)]


def test_consumers_of_a_loop_share_commit_and_go_on(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    keys = [TopicPartition(filled, number) for number in range(PARTITIONS)]

    async def main() -> None:
        told = Remembers()
        threads = threading.active_count()
        async with member(appliance, filled) as one, member(appliance, filled, filled) as two:
            await one.subscribe([filled], listener=told)
            assert await one.subscription() == {filled}
            read = await read_until([one], RECORDS)
            assert told.calls == [("assigned", keys)]
            read += await poll_until_shared(one, two)
            given = sorted(await two.assignment())
            assert told.calls[1:] == [("revoked", given)]
            assert threading.active_count() == threads, "no thread"
            await two.close()
            read += await poll_until_shared(one)
            assert told.calls[2:] == [("assigned", given)]
            assert len(read) == RECORDS, "each once"
            await one.commit()
            assert await one.committed(keys) == dict.fromkeys(keys, RECORDS // PARTITIONS)
            called: list[Any] = []
            await one.commit_async(
                {keys[0]: 7}, lambda offsets, error: called.append((offsets, error))
            )
            await one.commit_async(
                {keys[0]: 9_999}, lambda offsets, error: called.append(type(error))
            )
            await one.commit({keys[1]: 8})
            assert called == [({keys[0]: 7}, None), OffsetOutOfRangeError]
            assert (await one.consumer_group_metadata()).member_id == await one.memberid()
            await one.unsubscribe()
            assert await one.assignment() == []
            with pytest.raises(InvalidRequestError, match="nothing is assigned"):
                await one.poll(0)
            assert await one.committed(keys[1]) == 50, "auto commit"
            await one.commit({keys[0]: 7, keys[1]: 8})  # the group has no member now
        async with member(appliance, filled, filled, enable_auto_commit=False) as again:
            offsets = sorted(record.offset for record in await read_until([again], 43 + 42))
            assert offsets == sorted([*range(7, 50), *range(8, 50)])

    run(main())


def test_an_async_for_commits_what_it_has_handed_out(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    key = TopicPartition(filled, 0)

    async def fail_at(offset: int) -> None:
        async with member(appliance, filled) as consumer:
            await consumer.assign([key])
            async for record in consumer:
                assert 1 / (record.offset - offset)

    async def main() -> None:
        async with member(appliance, filled) as one:
            await one.assign([key])
            async for record in one:
                if record.offset == 20:
                    await one.commit()
                    assert await one.committed(key) == 21
                if record.offset == 30:
                    break
        async with member(appliance, filled) as two:
            await two.assign([key])
            assert await two.position(key) == 31
            with pytest.raises(ZeroDivisionError):
                await fail_at(41)
            assert await two.committed(key) == 41, "what failed is read again"

    run(main())


def test_heartbeats_go_on_while_the_program_awaits_and_a_loop_that_is_held_costs_the_membership(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    async def main() -> None:
        settings = {"session_timeout_ms": 5_000, "heartbeat_interval_ms": 200}
        async with member(appliance, filled, filled, **settings) as one:
            await read_until([one], RECORDS)
            sent = heartbeats(one._consumer)
            async with asyncio.timeout(HANG_LIMIT_S):
                while heartbeats(one._consumer) < sent + 10:
                    await asyncio.sleep(0.05)
            await one.commit()
            assert len(await one.assignment()) == PARTITIONS
            async with member(appliance, filled, filled, max_poll_interval_ms=400) as slow:
                await poll_until_shared(one, slow)
                async with asyncio.timeout(60):
                    while len(await one.assignment()) != PARTITIONS:
                        await one.poll(10)
                with pytest.raises(CommitFailedError):
                    await slow.commit()
                await poll_until_shared(one, slow)
            with Admin(appliance.address) as admin:  # holds the loop
                wait_until(
                    lambda: not admin.describe_groups(filled)[filled]["members"],
                    "its session has ended",
                )
            with pytest.raises(CommitFailedError):
                await one.commit({TopicPartition(filled, 0): 1})
            await poll_until_shared(one)

    run(main())


def test_a_task_that_waits_for_long_is_a_task_that_polls(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    async def main() -> None:
        async with member(appliance, filled, filled, max_poll_interval_ms=4_000) as one:
            await read_until([one], RECORDS)
            waiting = asyncio.create_task(one.getone())
            await asyncio.sleep(4.5)
            assert len(await one.assignment()) == PARTITIONS
            with Producer(appliance.address) as producer:
                producer.send(filled, b"late").result(60)
            assert (await waiting).value == b"late"
            await one.commit()

    run(main())


def test_a_listener_whose_poll_is_cancelled_is_called_once_more_before_anything_is_read(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    """Its seeks were lost: the records before them were delivered, or those behind were not."""

    async def main() -> list[Record]:
        begun = asyncio.Event()

        class Seeks(Remembers):
            async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
                await super().on_partitions_assigned(assigned)
                if len(self.calls) == 1:
                    begun.set()
                    await asyncio.Event().wait()
                for key in assigned:
                    await consumer.seek(key, 45)

        told = Seeks()
        async with member(appliance, filled) as consumer:
            await consumer.subscribe([filled], listener=told)
            reading = asyncio.create_task(consumer.getone())
            await begun.wait()
            reading.cancel()
            await asyncio.wait([reading])
            assert reading.cancelled()
            assert await consumer.assignment() == []
            found = await read_until([consumer], 20)
        assert [kind for kind, _ in told.calls] == ["assigned", "assigned", "revoked"]
        return found

    assert {record.offset for record in run(main())} == set(range(45, 50))
