"""The clients for asyncio against a real appliance: the loop is never held, and nothing is lost by a cancellation, a kill or a close."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import gc
import inspect
import os
import pathlib
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import pyarrow as pa
import pytest

import tailrace
from tailrace import Admin, Consumer, NewTopic, Producer, TopicPartition
from tailrace.aio import AsyncAdmin, AsyncConsumer, AsyncProducer
from tailrace.errors import (
    BufferExhaustedError,
    ClientClosedError,
    DelayNotEnabledError,
    InvalidRequestError,
    InvalidSettingError,
    NotReachableError,
    NotSupportedError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    RequestTimeoutError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.private_appliance import EmbeddedAppliance, start_embedded
from tests.kit.processes import children
from tests.system.test_fork import REFUSED, USED, in_child

T = TypeVar("T")
ENOUGH_S = 60
NOWHERE = "tcp://127.0.0.1:1"


def run(main: Coroutine[Any, Any, T]) -> T:
    """In a loop that complains of calls from a wrong thread."""
    return asyncio.run(asyncio.wait_for(main, ENOUGH_S), debug=True)


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of three partitions."""
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 3))
    return topic


def stored(appliance: EmbeddedAppliance, topic: str, count: int) -> list[Any]:
    """The first `count` values in the topic, by a plain consumer."""
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        return [record.value for record in consumer.consume(count, timeout=ENOUGH_S)]


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """`await ticks(n)` returns when a task of its own has had its turn in the loop `n` times more."""
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0.001)
            count += 1

    async def ticks(more: int) -> None:
        wanted = count + more
        while count < wanted:
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()


# ---- sending and reading ---------------------------------------------------------------------------------------------------------------


def test_records_and_frames_there_and_back_without_a_thread(appliance: EmbeddedAppliance, topic: str) -> None:
    async def main() -> None:
        threads = threading.active_count()
        async with (
            AsyncAdmin(appliance.address) as admin,
            AsyncProducer({"bootstrap.servers": appliance.address, "linger.ms": 1}) as producer,
        ):
            await admin.create_topics([NewTopic(topic, 3)])
            handle = await producer.send(topic, b"one", b"k", [("h", b"v")], partition=1, timestamp=1_000)
            metadata = await handle
            assert (metadata.topic, metadata.partition, metadata.offset, metadata.timestamp) == (topic, 1, 0, 1_000)
            assert handle.done()
            assert handle.result() == metadata == await handle
            assert (await producer.send_and_wait(topic, b"two", partition=1)).offset == 1
            batches = await (await producer.send_arrow(topic, pa.table({"value": [b"three", b"four"]}), partition=2))
            assert [(batch.partition, batch.base_offset, batch.record_count) for batch in batches] == [(2, 0, 2)]
            async with AsyncConsumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
                assert await consumer.assignment() == [TopicPartition(topic, number) for number in range(3)]
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
                assert sorted((batch.partition, *batch.offsets.to_pylist()) for batch in found) == [(1, 0), (1, 1), (2, 0, 1)]
            assert threading.active_count() == threads
            assert (await producer.metrics())["records_sent"] == 4

    run(main())


def test_a_thousand_sends_of_a_hundred_tasks_share_batches_and_keep_the_order_of_each(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> int:
        async with AsyncProducer(appliance.address) as producer:

            async def send(task: int) -> list[int | None]:
                return [(await producer.send_and_wait(made, b"%d %d" % (task, number), partition=0)).offset for number in range(10)]

            offsets = await asyncio.gather(*(send(task) for task in range(100)))
            assert sorted(offset for found in offsets for offset in found if offset is not None) == list(range(1_000))
            return (await producer.metrics())["batches_sent"]

    assert run(main()) < 500
    values = [tuple(map(int, value.split())) for value in stored(appliance, made, 1_000)]
    for task in range(100):
        assert [number for sender, number in values if sender == task] == list(range(10))


def test_handles_are_gathered_told_back_and_asked(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        told: list[object] = []
        async with AsyncProducer(appliance.address, linger_ms=60_000) as producer:
            handles = [await producer.send(made, b"%d" % number, partition=0) for number in range(600)]
            with pytest.raises(asyncio.InvalidStateError, match="await its handle"):
                handles[0].result()
            handles[5].add_done_callback(told.append)
            handle = await producer.send(made, b"x", partition=0, on_delivery=lambda metadata, error: told.append((metadata, error)))
            assert [metadata.offset for metadata in await asyncio.gather(*handles)] == list(range(600))
            assert (await handle).offset == 600
            await asyncio.sleep(0)
            assert told == [handles[5], (handle.result(), None)] or told == [(handle.result(), None), handles[5]]

    run(main())


def test_every_record_is_read_once_over_cancelled_waits_and_loops_that_are_left(appliance: EmbeddedAppliance, made: str) -> None:
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
            for turn in range(20):  # a reader that is cancelled while it waits, with records on their way
                reader = asyncio.create_task(read(1_000))
                for number in range(50):
                    await producer.send(made, b"%d" % (50 * turn + number), partition=1)
                await producer.flush()
                await asyncio.sleep(0)
                reader.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await reader
            await read(700) if len(found) < 700 else None  # one that leaves in the middle of what was taken ahead
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
            while await consumer.lag(one):  # it has come to the one that waits for two
                await asyncio.sleep(0.001)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            assert (await consumer.getone()).value == b"last", "what came before the cancellation is handed out"

    run(main())


def test_positions_pauses_and_partitions_are_kept_as_by_the_plain_consumer(appliance: EmbeddedAppliance, made: str) -> None:
    zero, one, two = (TopicPartition(made, number) for number in range(3))

    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            for number in range(30):
                await producer.send(made, b"%d" % number, partition=number % 3, timestamp=1_000 * number)
        async with AsyncConsumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
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
            with pytest.raises(NotSupportedError, match="groups"):
                await consumer.commit()
            assert (await consumer.metrics())["records_consumed"] >= 17

    run(main())


def test_records_are_shared_by_tasks_that_wait_together(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer, AsyncConsumer(made, bootstrap=appliance.address) as consumer:
            for partition in await consumer.assignment():
                await consumer.position(partition)
            waiting = [asyncio.create_task(consumer.getone()) for _ in range(20)]
            await asyncio.sleep(0)
            for number in range(20):
                await producer.send(made, b"%d" % number, partition=0)
            await producer.flush()
            assert sorted([int((await task).value) for task in waiting]) == list(range(20))

    run(main())


def test_a_reader_below_the_logs_begin_goes_on_where_it_is_told(appliance: EmbeddedAppliance, made: str) -> None:
    zero = TopicPartition(made, 0)

    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer, AsyncAdmin(appliance.address) as admin:
            for number in range(10):
                await producer.send(made, b"%d" % number, partition=0)
            await producer.flush()
            assert await admin.delete_records({zero: 6}) == {zero: 6}
        async with AsyncConsumer(bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
            await consumer.assign([zero])
            await consumer.seek(zero, 2)
            assert [record.offset for record in await consumer.consume(4)] == [6, 7, 8, 9]
        async with AsyncConsumer(bootstrap=appliance.address, auto_offset_reset="none") as consumer:
            await consumer.assign([zero])
            await consumer.seek(zero, 2)
            with pytest.raises(OffsetOutOfRangeError, match="holds offsets 6 to 10, not 2"):
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


# ---- the loop is not held --------------------------------------------------------------------------------------------------------------


def test_a_full_buffer_is_awaited_while_the_loop_goes_on(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        worker = children(appliance)["tr-worker-0"]
        async with ticking() as ticks, AsyncProducer(appliance.address, buffer_memory=65_536, batch_size=8_192) as producer:
            await producer.send_and_wait(made, b"first", partition=0)
            os.kill(worker, signal.SIGSTOP)
            try:

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
            finally:
                os.kill(worker, signal.SIGCONT)
            await asyncio.wait(sends)
            assert (await producer.metrics())["buffered_bytes"] <= 65_536

    run(main())
    values = [int(value.rstrip(b"\0")) for value in stored(appliance, made, 199)[1:]]
    assert values == [number for number in range(200) if number not in (100, 101)], "in their order, without those that were cancelled"


def test_a_frame_larger_than_the_buffer_goes_out_piece_by_piece(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        frame = pa.table({"value": [b"%07d" % number for number in range(40_000)]})
        async with ticking() as ticks, AsyncProducer(appliance.address, buffer_memory=131_072, batch_size=16_384) as producer:
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
            AsyncConsumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer,
        ):
            await producer.send_and_wait(made, b"0", partition=0)
            other = asyncio.create_task(take_turns())
            for number in range(1, 5_120):
                await producer.send(made, b"%d" % number, partition=0)
            assert turns >= 19
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
        async with AsyncConsumer(made, bootstrap=appliance.address) as consumer, AsyncProducer(appliance.address) as producer:
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
            assert producer._driver._timer is None, "a producer that has nothing to do asks for no time"

    run(main())


# ---- errors ------------------------------------------------------------------------------------------------------------------------------


def sentence(error: BaseException | None) -> tuple[type[BaseException], str]:
    assert error is not None
    return type(error), str(error)


async def failure(awaitable: Awaitable[object]) -> BaseException | None:
    try:
        await awaitable
    except TailraceError as error:
        return error
    return None


def plain_failure(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except TailraceError as error:
        return error
    return None


def test_errors_have_the_sentences_of_the_plain_clients(appliance: EmbeddedAppliance, made: str) -> None:
    missing = "no-" + made

    async def main() -> None:
        async with AsyncAdmin(appliance.address) as admin, AsyncProducer(appliance.address, max_request_size=8_192) as producer:
            with Admin(appliance.address) as plain_admin, Producer(appliance.address, max_request_size=8_192) as plain_producer:
                pairs: list[tuple[Awaitable[object], Callable[[], object]]] = [
                    (producer.send(missing, b"x"), lambda: plain_producer.send(missing, b"x")),
                    (producer.send_arrow(missing, pa.table({"value": [b"x"]})), lambda: plain_producer.send_arrow(missing, pa.table({"value": [b"x"]}))),
                    (producer.send(made, b"x", partition=9), lambda: plain_producer.send(made, b"x", partition=9)),
                    (producer.send(made, bytes(20_000)), lambda: plain_producer.send(made, bytes(20_000))),
                    (producer.send(made, 3), lambda: plain_producer.send(made, 3)),
                    (
                        producer.send(made, b"x", deliver_after=dt.timedelta(1)),
                        lambda: plain_producer.send(made, b"x", deliver_after=dt.timedelta(1)),
                    ),
                    (producer.partitions_for(missing), lambda: plain_producer.partitions_for(missing)),
                    (AsyncConsumer(missing, bootstrap=appliance.address).start(), lambda: Consumer(missing, bootstrap=appliance.address)),
                    (admin.create_topics(NewTopic(made)), lambda: plain_admin.create_topics(NewTopic(made))),
                    (admin.delete_topics([missing]), lambda: plain_admin.delete_topics([missing])),
                    (admin.describe_topics(missing), lambda: plain_admin.describe_topics(missing)),
                    (admin.delete_topics(3), lambda: plain_admin.delete_topics(3)),  # type: ignore[arg-type]
                    (admin.list_delays(made), lambda: list(plain_admin.list_delays(made))),
                    (admin.alter_topics({made: {"retention": 1}}), lambda: plain_admin.alter_topics({made: {"retention": 1}})),
                ]  # fmt: skip
                for awaited, call in pairs:
                    assert sentence(await failure(awaited)) == sentence(plain_failure(call))
            assert isinstance(await failure(producer.send(missing, b"x")), UnknownTopicError)
            assert isinstance(await failure(producer.send(made, bytes(20_000))), RecordTooLargeError)
            assert isinstance(await failure(admin.list_delays(made)), DelayNotEnabledError)
            assert (await producer.send_and_wait(made, b"x")).topic == made, "it goes on after all these"

    run(main())


def test_settings_are_those_of_the_plain_clients_and_checked_as_they_are() -> None:
    # A type checker refuses these as it does for the plain clients: an ignored error that is none is an error.
    with pytest.raises(InvalidSettingError, match="did you mean linger_ms"):
        AsyncProducer(NOWHERE, lingr_ms=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="did you mean auto_offset_reset"):
        AsyncConsumer(bootstrap=NOWHERE, auto_ofset_reset="latest")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="request_timeout"):
        AsyncAdmin(NOWHERE, request_timeout=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="did you mean linger_ms"):
        Producer(NOWHERE, lingr_ms=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="did you mean auto_offset_reset"):
        Consumer(bootstrap=NOWHERE, auto_ofset_reset="latest")  # type: ignore[call-arg]
    with pytest.raises(InvalidSettingError, match="bootstrap"):
        AsyncProducer("nowhere")


@pytest.mark.parametrize(("kind", "plain"), [(AsyncProducer, Producer), (AsyncConsumer, Consumer), (AsyncAdmin, Admin)])
def test_each_method_of_a_plain_client_is_there_with_the_same_arguments(kind: type, plain: type) -> None:
    for name, method in inspect.getmembers(plain, inspect.isfunction):
        if name.startswith("_") or name == "after_fork":
            continue
        found = getattr(kind, name)
        if inspect.signature(method).return_annotation == "NoReturn":
            continue  # of a later version, or called otherwise: it says so when it is called
        assert inspect.iscoroutinefunction(found) or name == "list_delays", name
        wanted = inspect.signature(method).parameters
        assert [(p.name, p.kind, p.default) for p in inspect.signature(found).parameters.values()] == [
            (p.name, p.kind, p.default) for p in wanted.values()
        ], name
        assert found.__doc__, name


def test_an_appliance_that_is_not_there_is_told_in_time(topic: str) -> None:
    async def main() -> None:
        with pytest.raises(NotReachableError, match="no appliance answers"):
            async with AsyncProducer(NOWHERE, max_block_ms=100) as producer:
                await asyncio.gather(*(producer.send(topic, b"x") for _ in range(100)))
        with pytest.raises(NotReachableError, match="no appliance answers"):
            async with AsyncConsumer(topic, bootstrap=NOWHERE, request_timeout_ms=100):
                pass
        async with AsyncAdmin(NOWHERE, connect_timeout_ms=100) as admin:
            errors = await asyncio.gather(*(failure(admin.list_topics()) for _ in range(10)))
            assert {type(error) for error in errors} == {NotReachableError}

    run(main())


def test_a_buffer_that_stays_full_and_a_flush_that_takes_too_long_are_told(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        worker = children(appliance)["tr-worker-0"]
        async with AsyncProducer(appliance.address, buffer_memory=65_536, max_block_ms=100) as producer:
            await producer.send_and_wait(made, b"first")
            os.kill(worker, signal.SIGSTOP)
            try:
                sends = await asyncio.gather(*(failure(producer.send(made, bytes(4_000))) for _ in range(100)))
                assert {type(error) for error in sends if error is not None} == {BufferExhaustedError}
                assert "stayed full for 100 ms" in str(sends[-1])
                with pytest.raises(RequestTimeoutError, match=r"not everything was acknowledged within 0\.05 s"):
                    await producer.flush(timeout=0.05)
            finally:
                os.kill(worker, signal.SIGCONT)
            await producer.flush()
            assert (await producer.metrics())["buffered_bytes"] == 0

    run(main())


# ---- kills ---------------------------------------------------------------------------------------------------------------------------------


def test_an_appliance_killed_and_restarted_under_the_clients_costs_nothing(tmp_path: pathlib.Path, topic: str) -> None:
    address = f"ipc://{tmp_path}/front"

    def start() -> EmbeddedAppliance:
        return start_embedded(data_dir=str(tmp_path / "data"), listen=address, auto_create_topics=False)

    async def main() -> None:
        running = await asyncio.to_thread(start)
        try:
            async with (
                AsyncAdmin(address) as admin,
                AsyncProducer(address) as producer,
                AsyncConsumer(bootstrap=address, auto_offset_reset="earliest") as consumer,
            ):
                await admin.create_topics(NewTopic(topic))
                await consumer.assign([TopicPartition(topic, 0)])
                found: list[int] = []

                async def read() -> None:
                    async for record in consumer:
                        found.append(int(record.value))
                        if len(found) == 150:
                            break

                reader = asyncio.create_task(read())
                offsets = []
                for number in range(150):
                    if number in (50, 100):
                        os.kill(running.pid, signal.SIGKILL)
                        handle = await producer.send(topic, b"%d" % number)
                        asked = asyncio.create_task(admin.describe_cluster())
                        await asyncio.to_thread(running.stop)
                        running = await asyncio.to_thread(start)
                        offsets.append((await handle).offset)
                        assert (await asked)["processes"]
                    else:
                        offsets.append((await producer.send_and_wait(topic, b"%d" % number)).offset)
                assert offsets == list(range(150))
                await reader
                assert found == list(range(150))
        finally:
            await asyncio.to_thread(running.stop)

    run(main())


# ---- administration ------------------------------------------------------------------------------------------------------------------------


def test_administration_is_awaited_many_calls_at_a_time(appliance: EmbeddedAppliance, topic: str) -> None:
    names = [f"{topic}-{number}" for number in range(20)]

    async def main() -> None:
        async with AsyncAdmin(appliance.address) as admin:
            await asyncio.gather(*(admin.create_topics(NewTopic(name, 2)) for name in names))
            assert set(names) <= set(await admin.list_topics())
            described = await asyncio.gather(*(admin.describe_topics(name) for name in names for _ in range(10)))
            assert [list(found) for found in described] == [[name] for name in names for _ in range(10)]
            waiting = asyncio.create_task(admin.describe_topics())
            await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            await admin.alter_topics({names[0]: {"retention.ms": 60_000, "delay.enabled": True}})
            assert (await admin.describe_configs(name for name in names[:1]))[names[0]]["retention.ms"] == 60_000
            await admin.delete_topics(iter(names[1:]))
            assert not set(names[1:]) & set(await admin.list_topics())
            async with AsyncProducer(appliance.address) as producer:
                due = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
                sent = [await (await producer.send(names[0], b"%d" % n, b"k", deliver_at=due)) for n in range(3)]
            listed = [delay async for delay in admin.list_delays(names[0])]
            assert {delay.delay_id for delay in listed} == {metadata.delay_id for metadata in sent}
            assert await admin.list_delays(names[0], key=b"k") == listed
            ids = [delay.delay_id for delay in listed]
            assert await admin.cancel_delays(ids) == dict.fromkeys(ids)

    run(main())


# ---- ends ----------------------------------------------------------------------------------------------------------------------------------


def test_a_close_ends_whoever_waits(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        consumer = AsyncConsumer(made, bootstrap=appliance.address)
        await consumer.start()
        records = [record async for record in _closed_soon(consumer)]
        assert records == []
        with pytest.raises(ClientClosedError, match="the consumer is closed"):
            await consumer.poll()
        await consumer.stop()

        other = AsyncConsumer(made, bootstrap=appliance.address)
        waiting = asyncio.create_task(other.poll(60_000))
        await other.assignment()
        await asyncio.sleep(0)
        await other.close()
        with pytest.raises(ClientClosedError, match="the consumer is closed"):
            await waiting

        producer = AsyncProducer(appliance.address, linger_ms=60_000)
        handle = await producer.send(made, b"x")
        await producer.stop()
        assert (await handle).topic == made, "closing sends what is there"
        with pytest.raises(ClientClosedError, match="the producer is closed"):
            await producer.send(made, b"x")
        await producer.close()

        admin = AsyncAdmin(NOWHERE)
        asked = asyncio.create_task(admin.list_topics())
        await asyncio.sleep(0)
        await admin.close()
        with pytest.raises(ClientClosedError, match="closed"):
            await asked

    run(main())


async def _closed_soon(consumer: AsyncConsumer) -> AsyncIterator[Any]:
    """What the consumer gives until it is closed, which is soon."""
    asyncio.get_running_loop().call_later(0.01, lambda: asyncio.ensure_future(consumer.close()))
    async for record in consumer:
        yield record


def test_what_cannot_be_sent_ends_with_its_producer(topic: str, appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        worker = children(appliance)["tr-worker-0"]
        producer = AsyncProducer(appliance.address)
        await producer.send_and_wait(made, b"first")
        os.kill(worker, signal.SIGSTOP)
        try:
            handle = await producer.send(made, b"x")
            waiting = asyncio.ensure_future(handle)
            await asyncio.sleep(0)
            await producer.close(timeout=0.01)
        finally:
            os.kill(worker, signal.SIGCONT)
        with pytest.raises(ClientClosedError, match="closed"):
            await waiting

    run(main())


def test_another_loop_and_another_thread_are_refused_with_a_sentence(appliance: EmbeddedAppliance, made: str) -> None:
    async def use(producer: AsyncProducer) -> BaseException | None:
        return await failure(producer.send_and_wait(made, b"x"))

    async def use_all(*clients: AsyncProducer | AsyncConsumer | AsyncAdmin) -> list[BaseException | None]:
        return [await failure(client.start()) for client in clients] + [await failure(client.close()) for client in clients]

    async def main() -> AsyncProducer:
        async with AsyncConsumer(bootstrap=appliance.address) as consumer, AsyncAdmin(appliance.address) as admin:
            producer = AsyncProducer(appliance.address)
            assert await use(producer) is None
            found = await asyncio.to_thread(lambda: asyncio.run(use_all(producer, consumer, admin)))
            assert [type(error) for error in found] == [InvalidRequestError] * 6
            assert "this AsyncConsumer works in another event loop; make one in each loop" in str(found[1])
            assert await use(producer) is None, "it works on where it is"
            return producer

    producer = run(main())
    error = asyncio.run(use(producer))
    assert isinstance(error, ClientClosedError)
    assert "the event loop that this AsyncProducer worked in has closed" in str(error)
    asyncio.run(producer.close())
    assert "the producer is closed" in str(asyncio.run(use(producer)))


def test_a_child_refuses_the_clients_of_its_parent(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer, AsyncConsumer(made, bootstrap=appliance.address) as consumer:
            await producer.send_and_wait(made, b"x")
            assert in_child(lambda: asyncio.run(consumer.poll())) == REFUSED
            assert in_child(lambda: asyncio.run(producer.send_and_wait(made, b"y"))) == REFUSED
            assert in_child(lambda: asyncio.run(producer.close())) == USED, "a close in the child touches nothing of the parent's"
            assert (await producer.send_and_wait(made, b"z", partition=0)).partition == 0

    run(main())


def test_a_closed_loop_is_left_behind_and_what_was_sent_is_delivered_by_a_close_in_another(appliance: EmbeddedAppliance, made: str) -> None:
    async def begin() -> AsyncProducer:
        producer = AsyncProducer(appliance.address, linger_ms=60_000)
        await producer.send(made, b"left behind", partition=0)
        return producer

    producer = asyncio.run(begin())
    asyncio.run(producer.close())
    assert stored(appliance, made, 1) == [b"left behind"]


def test_a_program_that_ends_without_a_close_has_sent_and_is_told(appliance: EmbeddedAppliance, made: str) -> None:
    program = """
import asyncio, sys, tailrace
assert "asyncio" in sys.modules
async def main():
    producer = tailrace.aio.AsyncProducer(sys.argv[1], linger_ms=60_000)
    for number in range(100):
        await producer.send(sys.argv[2], b"%d" % number, partition=0)
asyncio.run(main())
"""
    command = [sys.executable, "-P", "-W", "always", "-c", program, appliance.address, made]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning: unclosed AsyncProducer; use `async with`" in done.stderr
    assert stored(appliance, made, 100) == [b"%d" % number for number in range(100)]


def test_a_client_that_is_forgotten_says_so(appliance: EmbeddedAppliance) -> None:
    async def main() -> None:
        admin = AsyncAdmin(appliance.address)
        await admin.list_topics()
        del admin
        gc.collect()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(main())
    assert "unclosed AsyncAdmin; use `async with`, or await its close()" in [str(warning.message) for warning in caught]


def test_asyncio_is_loaded_by_nobody_who_does_not_ask() -> None:
    program = "import sys, tailrace; tailrace.Producer; assert 'asyncio' not in sys.modules; tailrace.aio.AsyncProducer; assert 'aio' in dir(tailrace)"
    subprocess.run([sys.executable, "-P", "-c", program], timeout=60, check=True, env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert tailrace.aio.AsyncProducer is AsyncProducer
