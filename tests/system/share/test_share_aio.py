"""A queue in an event loop: what the plain ShareConsumer promises, without a thread and without
holding the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections import Counter
from typing import Any

import pytest

from tailrace import (
    AcknowledgeType,
    Admin,
    ClientClosedError,
    Consumer,
    InvalidRequestError,
    InvalidSettingError,
    LockLostError,
    RequestTimeoutError,
    TopicPartition,
    UnknownTopicError,
)
from tailrace.aio import AsyncShareConsumer
from tailrace.embedded_appliance import EmbeddedAppliance
from tailrace.share.record import ShareRecord
from tests.kit.members.queues import LONG_MS, fill, keep_locks, make, read, share, start_offset
from tests.kit.processes import children, kill_and_wait_for_successor, wait_until
from tests.kit.runs.aio import run, ticking
from tests.kit.runs.cancellation import CancelledAt

CANCELLED_WAITS = 10


def consumer_of(appliance: EmbeddedAppliance, topic: str, **settings: Any) -> AsyncShareConsumer:
    settings.setdefault("auto_offset_reset", "earliest")
    return AsyncShareConsumer(topic, bootstrap=appliance.address, group_id=f"g-{topic}", **settings)


async def take(consumer: AsyncShareConsumer, count: int) -> list[ShareRecord]:
    found: list[ShareRecord] = []
    while len(found) < count:
        records = await consumer.poll(LONG_MS, count - len(found))
        assert records, f"{len(found)} of {count} records came"
        found += records
    return found


def test_outcomes_and_dead_letters_without_a_thread(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 4)

    async def main() -> None:
        before = set(threading.enumerate())
        async with consumer_of(appliance, topic, share_acknowledgement_mode="explicit") as consumer:
            records = await take(consumer, 4)
            assert await consumer.acquisition_lock_timeout_ms() == 30_000
            assert await consumer.subscription() == {topic}
            for record, outcome in zip(records, AcknowledgeType, strict=True):
                await consumer.acknowledge(
                    record, outcome, reason="too old" if outcome == "reject" else None
                )
            await consumer.commit()
            with pytest.raises(
                InvalidRequestError, match=r"poll\(timeout_ms=\.\.\.\), in milliseconds"
            ):
                await consumer.poll(timeout=1.0)  # type: ignore[arg-type]
            (again,) = await take(consumer, 1)
            assert (again.offset, again.delivery_count) == (1, 2)
            await consumer.acknowledge(again)
            await consumer.acknowledge(records[3], "ACCEPT")  # renewed: still this consumer's
            await consumer.commit()
            with pytest.raises(InvalidRequestError, match="not this consumer's"):
                await consumer.acknowledge(records[0])
            assert await consumer.metrics() == {
                "records_consumed": 5, "acknowledgements_refused": 0, "locks_lost": 0,
                "dead_letters": 1, "dead_letters_failed": 0, "throttled": 0, "throttled_ms": 0,
                "fetches": (await consumer.metrics())["fetches"],
            }  # fmt: skip
            assert {
                thread
                for thread in set(threading.enumerate()) - before
                if "asyncio" not in thread.name
            } == set()

    run(main())
    (letter,) = read(appliance, f"{topic}.dlq", 1)
    assert dict(letter.headers)["dlq.reason"] == b"too old"
    assert start_offset(appliance, f"g-{topic}") == 4
    assert [letter.value for letter in read(appliance, f"{topic}.dlq", 1)] == [b"2"]


def test_a_write_of_dead_letters_that_is_cancelled_at_any_wait_writes_each_once(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    count = 2 * CANCELLED_WAITS
    make(appliance, topic, count)

    async def main() -> None:
        async with consumer_of(appliance, topic, share_acknowledgement_mode="explicit") as consumer:
            records = await take(consumer, count)
            for number in range(CANCELLED_WAITS):
                for record in records[2 * number : 2 * number + 2]:
                    await consumer.acknowledge(record, "reject")
                for at in (number, number // 2):  # the second is behind letters that are sent
                    with contextlib.suppress(asyncio.CancelledError):
                        await CancelledAt(consumer.commit(), at)
                await consumer.commit()

    run(main())
    letters = read(appliance, f"{topic}.dlq", count)
    assert Counter(letter.value for letter in letters) == {b"%d" % n: 1 for n in range(count)}
    with Consumer(bootstrap=appliance.address) as reader:
        assert reader.end_offsets([TopicPartition(f"{topic}.dlq", 0)]) == {
            (f"{topic}.dlq", 0): count
        }


def test_the_loop_goes_on_while_a_task_waits_and_another_commits(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 3)

    async def main() -> None:
        async with (
            ticking() as ticks,
            consumer_of(appliance, topic, share_acknowledgement_mode="explicit") as consumer,
            consumer_of(appliance, topic, share_acknowledgement_mode="explicit") as other,
        ):
            records = await take(consumer, 3)
            waits = asyncio.create_task(consumer.poll(LONG_MS))
            elsewhere = asyncio.create_task(other.poll(LONG_MS))
            await ticks(20)
            assert not waits.done()
            await consumer.acknowledge(records[0])
            await consumer.commit()
            assert start_offset(appliance, f"g-{topic}") == 1
            assert await consumer.poll(0) == []  # another task polls
            elsewhere.cancel()
            await asyncio.gather(elsewhere, return_exceptions=True)
            await asyncio.to_thread(fill, appliance, topic, 1)
            assert [record.offset for record in await waits] == [3]
            await consumer.acknowledge(records[1], "release")
            await consumer.commit()
            (again,) = await take(other, 1)
            assert (again.offset, again.delivery_count) == (1, 2)

    run(main())


def test_a_loop_left_early_and_awaits_that_are_cancelled_lose_nothing(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 60, partitions=2)
    seen: Counter[tuple[int, int]] = Counter()

    async def main() -> None:
        async with consumer_of(appliance, topic, max_poll_records=7) as consumer:
            while len(seen) < 60:
                polls = asyncio.create_task(consumer.poll(LONG_MS, 2))
                for _ in range(len(seen) % 5):
                    await asyncio.sleep(0)
                if not polls.done() and len(seen) % 2:
                    polls.cancel()
                found: list[ShareRecord] | BaseException = (
                    await asyncio.gather(polls, return_exceptions=True)
                )[0]
                if isinstance(found, list):
                    assert {record.delivery_count for record in found} == {1}
                    seen.update((record.partition, record.offset) for record in found)
                if len(seen) < 60:
                    async for record in consumer:
                        assert record.delivery_count == 1
                        seen[record.partition, record.offset] += 1
                        if len(seen) % 4 == 0 or len(seen) == 60:
                            break
            await consumer.commit()

    run(main())
    assert len(seen) == 60
    assert set(seen.values()) == {1}


def test_poison_and_kills_of_the_process_of_groups_and_of_a_front(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 40, group_share_delivery_count_limit=2)
    accepted: Counter[int] = Counter()

    async def work(consumer: AsyncShareConsumer) -> None:
        while len(accepted) < 39 or not sum(
            [(await one.metrics())["dead_letters"] for one in consumers]
        ):
            records = await consumer.poll(100, 5)
            for record in records:
                await consumer.acknowledge(record, "release" if record.value == b"7" else "accept")
            await committed(consumer)
            accepted.update(record.offset for record in records if record.value != b"7")

    async def committed(consumer: AsyncShareConsumer) -> None:
        try:
            await consumer.commit()
        except RequestTimeoutError as error:  # the process was killed with the request: what was said of records is kept, and sent again  # noqa: E501
            if "acknowledge them again" not in str(error):
                raise
            await committed(consumer)

    consumers: list[AsyncShareConsumer] = []

    async def main() -> None:
        async with consumer_of(appliance, topic) as one, consumer_of(appliance, topic) as two:
            consumers.extend((one, two))
            working = asyncio.gather(work(one), work(two))
            await asyncio.to_thread(
                wait_until,
                lambda: "tr-groups-0" in children(appliance),
                "the process of groups is started by the first request",
            )
            for name in ("tr-groups-0", "tr-front-0"):
                await asyncio.to_thread(kill_and_wait_for_successor, appliance, name)
            await working

    run(main())
    assert set(accepted.values()) == {1}
    assert [letter.value for letter in read(appliance, f"{topic}.dlq", 1)] == [b"7"]
    assert start_offset(appliance, f"g-{topic}") == 40


def test_locks_that_pass_ends_and_a_topic_made_anew(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 3, group_share_record_lock_duration_ms=300)

    async def main() -> None:
        consumer = consumer_of(appliance, topic, share_acknowledgement_mode="explicit")
        async with consumer:
            records = await take(consumer, 3)
            await asyncio.to_thread(keep_locks, appliance, topic)
            with share(appliance, topic) as other:
                again: list[ShareRecord] = []
                while len(again) < 3:
                    again += await asyncio.to_thread(other.poll, 200)
                for record in records:
                    await consumer.acknowledge(record)
                with pytest.raises(LockLostError, match="offsets 0 to 2"):
                    await consumer.commit()
                other.commit()
            with Admin(appliance.address) as admin:
                admin.delete_topics(topic)
            make(appliance, topic, 2)
            assert [
                (record.offset, record.delivery_count) for record in await take(consumer, 2)
            ] == [(0, 1), (1, 1)]
            await consumer.unsubscribe()
            with pytest.raises(InvalidRequestError, match="subscribe"):
                await consumer.poll()
            await consumer.subscribe(topic)
            assert [record.offset for record in await take(consumer, 1)] == [0]
            waits = asyncio.create_task(consumer.poll(LONG_MS))
            await asyncio.sleep(0)
        outcome: list[ShareRecord] | BaseException = (
            await asyncio.gather(waits, return_exceptions=True)
        )[0]
        assert isinstance(outcome, (ClientClosedError, list))
        with pytest.raises(ClientClosedError):
            await consumer.poll()
        await consumer.close()
        with pytest.raises(UnknownTopicError):
            await consumer_of(appliance, f"{topic}-not-there").start()
        unused = consumer_of(appliance, topic)
        with pytest.raises(AttributeError, match="async for"):
            unused.getone()
        await unused.close()

    run(main())


def test_it_works_in_one_loop_and_says_when_it_is_forgotten(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    make(appliance, topic, 1)
    consumer = consumer_of(appliance, topic)

    async def take_one() -> None:
        assert len(await take(consumer, 1)) == 1

    run(take_one())
    with pytest.raises(ClientClosedError, match="event loop"):
        run(take_one())
    run(consumer.close())
    with pytest.raises(InvalidSettingError, match="needs group_id"):
        AsyncShareConsumer(topic, bootstrap=appliance.address)

    async def forget() -> None:
        forgotten = consumer_of(appliance, topic)
        await forgotten.start()
        del forgotten
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed AsyncShareConsumer"):
        run(forget())
