"""The clients for asyncio under kills, forks, closes and closed loops: nothing is lost, nobody
waits for ever.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pathlib
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from typing import Any

import pytest

import tailrace
from tailrace import Admin, NewTopic, TopicPartition
from tailrace.aio import AsyncAdmin, AsyncConsumer, AsyncProducer, AsyncShareConsumer
from tailrace.core.errors import (
    ClientClosedError,
    InvalidRequestError,
)
from tailrace.embedded_appliance import EmbeddedAppliance, start_embedded
from tests.kit.hosts.forks import REFUSED, USED, in_child
from tests.kit.members.queues import LONG_MS
from tests.kit.processes import HANG_LIMIT_S, children, stopped
from tests.kit.runs.aio import NOWHERE, failure, run, stored


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    """A topic of three partitions."""
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, 3))
    return topic


def test_an_appliance_killed_and_restarted_under_the_clients_costs_nothing(
    tmp_path: pathlib.Path, topic: str
) -> None:
    address = f"ipc://{tmp_path}/front"

    def start() -> EmbeddedAppliance:
        return start_embedded(
            data_dir=str(tmp_path / "data"), listen=address, auto_create_topics=False
        )

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
    """Records of the consumer until it is closed, which is soon."""
    asyncio.get_running_loop().call_later(0.01, lambda: asyncio.ensure_future(consumer.close()))
    async for record in consumer:
        yield record


def test_what_cannot_be_sent_ends_with_its_producer(
    topic: str, appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        worker = children(appliance)["tr-worker-0"]
        producer = AsyncProducer(appliance.address)
        await producer.send_and_wait(made, b"first")
        with stopped(worker):
            handle = await producer.send(made, b"x")
            waiting = asyncio.ensure_future(handle)
            await asyncio.sleep(0)
            await producer.close(timeout=0.01)
        with pytest.raises(ClientClosedError, match="closed"):
            await waiting

    run(main())


def test_another_loop_and_another_thread_are_refused_with_a_sentence(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def use(producer: AsyncProducer) -> BaseException | None:
        return await failure(producer.send_and_wait(made, b"x"))

    async def use_all(
        *clients: AsyncProducer | AsyncConsumer | AsyncAdmin,
    ) -> list[BaseException | None]:
        return [await failure(client.start()) for client in clients] + [
            await failure(client.close()) for client in clients
        ]

    async def main() -> AsyncProducer:
        async with (
            AsyncConsumer(bootstrap=appliance.address) as consumer,
            AsyncAdmin(appliance.address) as admin,
        ):
            producer = AsyncProducer(appliance.address)
            assert await use(producer) is None
            found = await asyncio.to_thread(lambda: asyncio.run(use_all(producer, consumer, admin)))
            assert [type(error) for error in found] == [InvalidRequestError] * 6
            assert "this AsyncConsumer works in another event loop; make one in each loop" in str(
                found[1]
            )
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
        async with (
            AsyncProducer(appliance.address) as producer,
            AsyncConsumer(made, bootstrap=appliance.address) as consumer,
        ):
            await producer.send_and_wait(made, b"x")
            assert in_child(lambda: asyncio.run(consumer.poll())) == REFUSED
            assert in_child(lambda: asyncio.run(producer.send_and_wait(made, b"y"))) == REFUSED
            assert in_child(lambda: asyncio.run(producer.close())) == USED, (
                "a close in the child touches nothing of the parent's"
            )
            assert (await producer.send_and_wait(made, b"z", partition=0)).partition == 0

    run(main())


def test_a_closed_loop_is_left_behind_and_what_was_sent_is_delivered_by_a_close_in_another(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def begin() -> AsyncProducer:
        producer = AsyncProducer(appliance.address, linger_ms=60_000)
        await producer.send(made, b"left behind", partition=0)
        return producer

    producer = asyncio.run(begin())
    asyncio.run(producer.close())
    assert stored(appliance, made, 1) == [b"left behind"]


def test_a_program_that_ends_without_a_close_has_sent_and_is_told(
    appliance: EmbeddedAppliance, made: str
) -> None:
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
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
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
    assert "unclosed AsyncAdmin; use `async with`, or await its close()" in [
        str(warning.message) for warning in caught
    ]


def test_asyncio_is_loaded_by_nobody_who_does_not_ask() -> None:
    program = (
        "import sys, tailrace; tailrace.Producer; assert 'asyncio' not in sys.modules; "
        "tailrace.aio.AsyncProducer; assert 'aio' in dir(tailrace)"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", program],
        timeout=HANG_LIMIT_S,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert tailrace.aio.AsyncProducer is AsyncProducer


def test_records_are_sent_and_read_without_pandas_being_loaded(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """Its import would block the event loop for half a second, at the first record."""
    with tailrace.Admin(appliance.address) as admin:
        admin.create_topics([tailrace.NewTopic(f"{made}-delayed", 1, {"delay.enabled": True})])
    program = """
import asyncio, datetime, importlib.util, sys
assert importlib.util.find_spec("pandas")
from tailrace.aio import AsyncConsumer, AsyncProducer, AsyncShareConsumer
address, topic, delayed = sys.argv[1:]
async def main():
    assert "pandas" not in sys.modules, "the import"
    async with AsyncProducer(address) as producer:
        await producer.send_and_wait(topic, b"v", b"k", headers=[("h", b"x")])
        await producer.send_and_wait(topic, b"v")
        await producer.send_and_wait(delayed, b"v", deliver_after=datetime.timedelta(hours=1))
    assert "pandas" not in sys.modules, "the producer"
    for client in (AsyncConsumer, AsyncShareConsumer):
        async with client(
            topic, bootstrap=address, group_id=client.__name__, auto_offset_reset="earliest"
        ) as consumer:
            while not await consumer.poll(1000): pass
        assert "pandas" not in sys.modules, client.__name__
asyncio.run(main())
"""
    subprocess.run(
        [sys.executable, "-P", "-c", program, appliance.address, made, f"{made}-delayed"],
        timeout=HANG_LIMIT_S,
        check=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


@pytest.mark.parametrize("kind", ["queue", "group", "plain"])
def test_a_close_ends_loops_and_fails_polls_that_wait(
    appliance: EmbeddedAppliance, made: str, kind: str
) -> None:
    def consumer() -> Any:
        if kind == "queue":
            return AsyncShareConsumer(made, bootstrap=appliance.address, group_id=f"q-{made}")
        group_id = f"g-{made}" if kind == "group" else None
        return AsyncConsumer(made, bootstrap=appliance.address, group_id=group_id)

    async def main() -> None:
        closed = consumer()

        async def loop() -> str:
            async for _ in closed:
                pass
            return "ended"

        await closed.poll(1)
        waits = [asyncio.create_task(loop()), asyncio.create_task(closed.poll(LONG_MS))]
        await asyncio.sleep(0)
        await closed.close()
        ended, error = await asyncio.gather(*waits, return_exceptions=True)
        assert (ended, type(error)) == ("ended", ClientClosedError)

    run(main())
    gc.collect()  # what is left of the loops is dropped without an error


def test_a_loop_that_is_dropped_at_the_programs_exit_says_nothing(
    appliance: EmbeddedAppliance, made: str
) -> None:
    program = f"""
import asyncio
from tailrace.aio import AsyncShareConsumer

async def main():
    consumer = AsyncShareConsumer({made!r}, bootstrap={appliance.address!r}, group_id="q-{made}")
    await consumer.start()
    kept = aiter(consumer)
    kept.itself = kept  # a cycle, which the interpreter's end collects
    ended = asyncio.create_task(anext(kept))
    await asyncio.sleep(0)
    await consumer.close()
    assert isinstance((await asyncio.gather(ended, return_exceptions=True))[0], StopAsyncIteration)

import gc
gc.disable()
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_LIMIT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
