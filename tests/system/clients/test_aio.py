"""The clients for asyncio against a real appliance: records there and back, administration, and a
loop that is never held.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import threading
from typing import Any

import pyarrow as pa
import pytest

from tailrace import Admin, NewTopic, TopicPartition
from tailrace.aio import AsyncAdmin, AsyncConsumer, AsyncProducer
from tailrace.aio.producer import YIELD_AFTER_SENDS
from tailrace.core.errors import (
    InvalidRequestError,
    OffsetOutOfRangeError,
)
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.kit.processes import children, stopped
from tests.kit.runs.aio import run, stored, ticking


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of three partitions."""
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 3))
    return topic


def test_records_and_frames_there_and_back_without_a_thread(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    async def main() -> None:
        threads = threading.active_count()
        async with (
            AsyncAdmin(appliance.address) as admin,
            AsyncProducer({"bootstrap.servers": appliance.address, "linger.ms": 1}) as producer,
        ):
            await admin.create_topics([NewTopic(topic, 3)])
            handle = await producer.send(
                topic, b"one", b"k", [("h", b"v")], partition=1, timestamp=1_000
            )
            metadata = await handle
            assert (metadata.topic, metadata.partition, metadata.offset, metadata.timestamp) == (
                topic,
                1,
                0,
                1_000,
            )
            assert handle.done()
            assert handle.result() == metadata == await handle
            assert (await producer.send_and_wait(topic, b"two", partition=1)).offset == 1
            batches = await (
                await producer.send_arrow(
                    topic, pa.table({"value": [b"three", b"four"]}), partition=2
                )
            )
            assert [
                (batch.partition, batch.base_offset, batch.record_count) for batch in batches
            ] == [(2, 0, 2)]
            async with AsyncConsumer(
                topic, bootstrap=appliance.address, auto_offset_reset="earliest"
            ) as consumer:
                assert await consumer.assignment() == [
                    TopicPartition(topic, number) for number in range(3)
                ]
                first = await consumer.getone(TopicPartition(topic, 1))
                assert (first.value, first.key, first.headers) == (b"one", b"k", [("h", b"v")])
                rest = [await consumer.getone() for _ in range(3)]
                assert sorted(record.value for record in rest) == [b"four", b"three", b"two"]
                assert await consumer.poll(timeout_ms=10) == []
                assert await consumer.getmany(timeout_ms=10) == {}
                await consumer.seek_to_beginning()
                found = await consumer.poll_arrow(timeout_ms=20_000)
                while sum(map(len, found)) < 4:
                    found += await consumer.poll_arrow(timeout_ms=20_000)
                assert sorted((batch.partition, *batch.offsets.to_pylist()) for batch in found) == [
                    (1, 0),
                    (1, 1),
                    (2, 0, 1),
                ]
            assert threading.active_count() == threads
            assert (await producer.metrics())["records_sent"] == 4

    run(main())


def test_a_thousand_sends_of_a_hundred_tasks_share_batches_and_keep_the_order_of_each(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> int:
        async with AsyncProducer(appliance.address) as producer:

            async def send(task: int) -> list[int | None]:
                return [
                    (
                        await producer.send_and_wait(made, b"%d %d" % (task, number), partition=0)
                    ).offset
                    for number in range(10)
                ]

            offsets = await asyncio.gather(*(send(task) for task in range(100)))
            assert sorted(
                offset for found in offsets for offset in found if offset is not None
            ) == list(range(1_000))
            return (await producer.metrics())["batches_sent"]

    assert run(main()) < 500
    values = [tuple(map(int, value.split())) for value in stored(appliance, made, 1_000)]
    for task in range(100):
        assert [number for sender, number in values if sender == task] == list(range(10))


def test_handles_are_gathered_told_back_and_asked(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        told: list[object] = []
        async with AsyncProducer(appliance.address, linger_ms=60_000) as producer:
            handles = [
                await producer.send(made, b"%d" % number, partition=0) for number in range(600)
            ]
            with pytest.raises(asyncio.InvalidStateError, match="await its future"):
                handles[0].result()
            handles[5].add_done_callback(told.append)
            handle = await producer.send(
                made,
                b"x",
                partition=0,
                on_delivery=lambda metadata, error: told.append((metadata, error)),
            )
            assert [metadata.offset for metadata in await asyncio.gather(*handles)] == list(
                range(600)
            )
            assert (await handle).offset == 600
            await asyncio.sleep(0)
            assert told == [handles[5], (handle.result(), None)] or told == [
                (handle.result(), None),
                handles[5],
            ]

    run(main())


def test_every_record_is_read_once_over_cancelled_waits_and_loops_that_are_left(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        found: list[bytes] = []
        one = TopicPartition(made, 1)

        async def read(count: int) -> None:
            async for record in consumer:
                found.append(record.value)
                if len(found) == count:
                    break

        async with (
            AsyncProducer(appliance.address, acks=1) as producer,
            AsyncConsumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
        ):
            await consumer.assign([one])
            for turn in range(
                20
            ):  # a reader that is cancelled while it waits, with records on their way
                reader = asyncio.create_task(read(1_000))
                for number in range(50):
                    await producer.send(made, b"%d" % (50 * turn + number), partition=1)
                await producer.flush()
                await asyncio.sleep(0)
                reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reader
            await read(700) if len(
                found
            ) < 700 else None  # one that leaves in the middle of what was taken ahead
            assert await consumer.position(one) == len(found)
            if len(found) < 990:
                found += [record.value for record in await consumer.poll(20_000, max_records=5)]
                found.append((await consumer.getone()).value)
                found += [record.value for record in await consumer.consume(3)]
            if len(found) < 1_000:
                await read(1_000)
            assert found == [b"%d" % number for number in range(1_000)]
            waiting = asyncio.create_task(consumer.consume(2))
            await producer.send_and_wait(made, b"last", partition=1)
            while (await consumer.metrics())[
                "records_consumed"
            ] < 1_001:  # it has come to the one that waits for two
                await asyncio.sleep(0.001)
            assert await consumer.lag(one) == 1, "what waits for a second record is not delivered"
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            assert (await consumer.getone()).value == b"last", (
                "what came before the cancellation is handed out"
            )

    run(main())


def test_positions_pauses_and_partitions_are_kept_as_by_the_plain_consumer(
    appliance: EmbeddedAppliance, made: str
) -> None:
    zero, one, two = (TopicPartition(made, number) for number in range(3))

    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            for number in range(30):
                await producer.send(
                    made, b"%d" % number, partition=number % 3, timestamp=1_000 * number
                )
        async with AsyncConsumer(
            made, bootstrap=appliance.address, auto_offset_reset="earliest"
        ) as consumer:
            assert await consumer.end_offsets(iter([zero, one])) == {zero: 10, one: 10}
            assert await consumer.beginning_offsets([two]) == {two: 0}
            await consumer.pause(zero, one)
            assert await consumer.paused() == [zero, one]
            assert [record.partition for record in await consumer.consume(10)] == [2] * 10
            waiting = asyncio.create_task(consumer.getone())
            await asyncio.sleep(0)
            await consumer.resume(one)
            assert (await waiting).partition == 1, "who waits hears of the partition that goes on"
            assert await consumer.position(one) == 1
            assert await consumer.lag(one) == 9
            await consumer.seek(one, 8)
            assert [record.offset for record in await consumer.consume(2)] == [8, 9]
            found = await consumer.offsets_for_times({zero: 8_500, one: 0, two: 10**9})
            assert (found[zero], found[one], found[two]) == ((3, 9_000), (0, 1_000), None)
            await consumer.seek_to_end(two)
            assert await consumer.position(two) == await consumer.highwater(two) == 10
            assert made in await consumer.topics()
            assert await consumer.partitions_for(made) == [0, 1, 2]
            await consumer.resume(zero)
            await consumer.seek_to_beginning()
            many = await consumer.getmany(zero, timeout_ms=20_000, max_records=4)
            assert [record.offset for record in many.pop(zero)] == [0, 1, 2, 3]
            assert not many, "of the named partition only"
            with pytest.raises(InvalidRequestError, match="not assigned"):
                await consumer.seek(TopicPartition(made, 7), 0)
            with pytest.raises(InvalidRequestError, match="whole number"):
                await consumer.seek(zero, -1)
            assert (await consumer.metrics())["records_consumed"] >= 17

    run(main())


def test_records_are_shared_by_tasks_that_wait_together(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        async with (
            AsyncProducer(appliance.address) as producer,
            AsyncConsumer(made, bootstrap=appliance.address) as consumer,
        ):
            for partition in await consumer.assignment():
                await consumer.position(partition)
            waiting = [asyncio.create_task(consumer.getone()) for _ in range(20)]
            await asyncio.sleep(0)
            for number in range(20):
                await producer.send(made, b"%d" % number, partition=0)
            await producer.flush()
            assert sorted([int((await task).value) for task in waiting]) == list(range(20))

    run(main())


def test_a_reader_below_the_logs_begin_goes_on_where_it_is_told(
    appliance: EmbeddedAppliance, made: str
) -> None:
    zero = TopicPartition(made, 0)

    async def main() -> None:
        async with (
            AsyncProducer(appliance.address) as producer,
            AsyncAdmin(appliance.address) as admin,
        ):
            for number in range(10):
                await producer.send(made, b"%d" % number, partition=0)
            await producer.flush()
            assert await admin.delete_records({zero: 6}) == {zero: 6}
        async with AsyncConsumer(
            bootstrap=appliance.address, auto_offset_reset="earliest"
        ) as consumer:
            await consumer.assign([zero])
            await consumer.seek(zero, 2)
            assert [record.offset for record in await consumer.consume(4)] == [6, 7, 8, 9]
        async with AsyncConsumer(bootstrap=appliance.address, auto_offset_reset="none") as consumer:
            await consumer.assign([zero])
            await consumer.seek(zero, 2)
            with pytest.raises(
                OffsetOutOfRangeError, match="has offsets 6 to 10; the position is 2"
            ):
                await consumer.getone()
            await consumer.seek(zero, 7)
            assert (await consumer.getone()).offset == 7

    run(main())


def test_many_first_uses_at_once_are_one(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address, acks=0) as producer:
            await asyncio.gather(*(producer.send(made, b"%d" % number) for number in range(100)))
            await producer.flush()
        consumer = AsyncConsumer(made, bootstrap=appliance.address, auto_offset_reset="earliest")
        found = await asyncio.gather(*(consumer.getone() for _ in range(100)))
        assert sorted(int(record.value) for record in found) == list(range(100))
        await consumer.close()

    run(main())


def test_a_full_buffer_is_awaited_while_the_loop_goes_on(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        worker = children(appliance)["tr-worker-0"]
        async with (
            ticking() as ticks,
            AsyncProducer(appliance.address, buffer_memory=65_536, batch_size=8_192) as producer,
        ):
            await producer.send_and_wait(made, b"first", partition=0)
            with stopped(worker):

                async def send(number: int) -> None:
                    await producer.send(made, b"%d" % number + bytes(4_000), partition=0)

                sends = [asyncio.create_task(send(number)) for number in range(200)]
                await ticks(100)
                done = sum(task.done() for task in sends)
                assert 0 < done < 30, "the buffer holds sixteen at most"
                sends[100].cancel()
                sends[101].cancel()
                await ticks(100)
                assert sum(task.done() for task in sends) == done + 2
            await asyncio.wait(sends)
            assert (await producer.metrics())["buffered_bytes"] <= 65_536

    run(main())
    values = [int(value.rstrip(b"\0")) for value in stored(appliance, made, 199)[1:]]
    assert values == [number for number in range(200) if number not in (100, 101)], (
        "in their order, without those that were cancelled"
    )


def test_a_frame_larger_than_the_buffer_goes_out_piece_by_piece(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        frame = pa.table({"value": [b"%07d" % number for number in range(40_000)]})
        async with (
            ticking() as ticks,
            AsyncProducer(appliance.address, buffer_memory=131_072, batch_size=16_384) as producer,
        ):
            sending = asyncio.create_task(producer.send_arrow(made, frame, partition=0))
            await ticks(1)
            sent = await (await sending)
            assert sum(batch.record_count for batch in sent) == 40_000
            assert len(sent) > 10

    run(main())
    assert stored(appliance, made, 40_000) == [b"%07d" % number for number in range(40_000)]


def test_who_never_waits_leaves_turns_to_others(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        async with (
            AsyncProducer(appliance.address) as producer,
            AsyncConsumer(
                made, bootstrap=appliance.address, auto_offset_reset="earliest"
            ) as consumer,
        ):
            await producer.send_and_wait(made, b"0", partition=0)
            other = asyncio.create_task(take_turns())
            for number in range(1, 5_120):
                await producer.send(made, b"%d" % number, partition=0)
            assert turns >= 5_119 // YIELD_AFTER_SENDS
            await producer.flush()
            turns, count = 0, 0
            async for _ in consumer:
                count += 1
                if count == 5_120:
                    break
            assert turns >= 10
            other.cancel()

    run(main())


def test_silence_is_awaited_and_not_polled(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        async with (
            AsyncConsumer(made, bootstrap=appliance.address) as consumer,
            AsyncProducer(appliance.address) as producer,
        ):
            await producer.send_and_wait(made, b"x")
            looks = 0
            poll = consumer._consumer.poll

            def counted(*arguments: Any) -> Any:
                nonlocal looks
                looks += 1
                return poll(*arguments)

            consumer._consumer.poll = counted  # type: ignore[assignment, method-assign]
            found = await consumer.poll(timeout_ms=2_000)
            assert len(found) <= 1
            assert looks < 60, "once for what comes, and for the pings of a quiet connection"
            assert producer._loop_connection._timer is None, (
                "a producer that has nothing to do asks for no time"
            )

    run(main())


def test_administration_is_awaited_many_calls_at_a_time(
    appliance: EmbeddedAppliance, topic: str
) -> None:
    names = [f"{topic}-{number}" for number in range(20)]

    async def main() -> None:
        async with AsyncAdmin(appliance.address) as admin:
            await asyncio.gather(*(admin.create_topics(NewTopic(name, 2)) for name in names))
            assert set(names) <= set(await admin.list_topics())
            described = await asyncio.gather(
                *(admin.describe_topics(name) for name in names for _ in range(10))
            )
            assert [list(found) for found in described] == [
                [name] for name in names for _ in range(10)
            ]
            waiting = asyncio.create_task(admin.describe_topics())
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            await admin.alter_topics({names[0]: {"retention.ms": 60_000, "delay.enabled": True}})
            assert (await admin.describe_configs(name for name in names[:1]))[names[0]][
                "retention.ms"
            ] == 60_000
            await admin.delete_topics(iter(names[1:]))
            assert not set(names[1:]) & set(await admin.list_topics())
            async with AsyncProducer(appliance.address) as producer:
                due = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
                sent = [
                    await (await producer.send(names[0], b"%d" % n, b"k", deliver_at=due))
                    for n in range(3)
                ]
            listed = [delay async for delay in admin.list_delays(names[0])]
            assert {delay.delay_id for delay in listed} == {metadata.delay_id for metadata in sent}
            assert await admin.list_delays(names[0], key=b"k") == listed
            ids = [delay.delay_id for delay in listed]
            assert await admin.cancel_delays(ids) == dict.fromkeys(ids)

    run(main())
