"""Consumers of an event loop: a task that is cancelled at each of its waits costs no record, and
each record is delivered once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.aio import AsyncConsumer, AsyncShareConsumer
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.runs.aio import run
from tests.kit.runs.cancellation import CancelledAt

COUNT = 60
LONG_MS = 60_000
NUMBERS = 12
"""Waits of one call that are cancelled at most."""


@pytest.fixture
def filled(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin, Producer(appliance.address) as producer:
        admin.create_topics(NewTopic(topic))
        for number in range(COUNT):
            producer.send(topic, b"%d" % number)
            if number % 7 == 6:
                producer.flush()
    return topic


async def _poll(consumer: Any) -> list[int]:
    return [record.offset for record in await consumer.poll(LONG_MS, 3)]


async def _consume(consumer: Any) -> list[int]:
    return [record.offset for record in await consumer.consume(4)]


async def _getone(consumer: Any) -> list[int]:
    return [(await consumer.getone()).offset]


async def _loop(consumer: Any) -> list[int]:
    return [(await anext(aiter(consumer))).offset]


async def _poll_arrow(consumer: Any) -> list[int]:
    return [
        offset
        for batch in await consumer.poll_arrow(LONG_MS)
        for offset in batch.offsets.to_pylist()
    ]


async def cancelled_at_each_wait(call: Callable[[], Any], given: list[int], requested: int) -> None:
    """Make the call again and again, each time cancelled at another of its waits, until so many
    offsets were given.
    """
    for number in itertools.cycle(range(NUMBERS)):
        if len(given) >= requested:
            return
        task = asyncio.create_task(_attempt(call(), number))
        try:
            given += await task
        except asyncio.CancelledError:
            assert task.cancelled()


async def _attempt(coroutine: Any, number: int) -> list[int]:
    found: list[int] = await CancelledAt(coroutine, number)
    return found


@pytest.mark.parametrize(
    "read",
    [_poll, _consume, _getone, _loop, _poll_arrow],
    ids=lambda read: read.__name__.strip("_"),
)
def test_a_call_that_is_cancelled_at_any_wait_loses_no_record_and_commits_none(
    appliance: EmbeddedAppliance, filled: str, read: Callable[[Any], Awaitable[list[int]]]
) -> None:
    key, given = TopicPartition(filled, 0), list[int]()

    async def main() -> None:
        consumer = AsyncConsumer(
            bootstrap=appliance.address,
            group_id=filled,
            auto_offset_reset="earliest",
            auto_commit_interval_ms=0,
            max_poll_records=5,
        )
        async with consumer:
            await consumer.assign([key])
            await cancelled_at_each_wait(lambda: read(consumer), given, COUNT // 2)
            assert await consumer.positions() == {key: len(given)}
            committing = [
                asyncio.create_task(_attempt(consumer.commit(), number)) for number in range(4)
            ]
            await asyncio.gather(*committing, return_exceptions=True)
            await cancelled_at_each_wait(lambda: read(consumer), given, COUNT)

    run(main())
    assert given == list(range(COUNT))
    with Consumer(bootstrap=appliance.address, group_id=filled) as successor:
        assert successor.committed(key) == COUNT


@pytest.mark.parametrize("read", [_poll, _loop], ids=lambda read: read.__name__.strip("_"))
def test_a_queue_whose_calls_are_cancelled_at_any_wait_delivers_each_record_once(
    appliance: EmbeddedAppliance, filled: str, read: Callable[[Any], Awaitable[list[int]]]
) -> None:
    given: list[int] = []

    async def main() -> None:
        async with AsyncShareConsumer(
            filled, bootstrap=appliance.address, group_id=filled, auto_offset_reset="earliest"
        ) as consumer:
            await cancelled_at_each_wait(lambda: read(consumer), given, COUNT)
            await consumer.commit()

    run(main())
    assert sorted(given) == list(range(COUNT))


def test_records_are_shared_by_tasks_that_read_in_different_ways(
    appliance: EmbeddedAppliance, filled: str
) -> None:
    given: list[int] = []

    async def main() -> None:
        async with AsyncConsumer(
            filled, bootstrap=appliance.address, auto_offset_reset="earliest", max_poll_records=5
        ) as consumer:

            async def keep_reading(read: Callable[[Any], Awaitable[list[int]]]) -> None:
                while len(given) < COUNT:
                    given.extend(await asyncio.wait_for(read(consumer), 60))

            tasks = [asyncio.create_task(keep_reading(read)) for read in (_poll, _getone, _loop)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(main())
    assert sorted(given) == list(range(COUNT))
