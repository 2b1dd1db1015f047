"""`AsyncProducer.send` is a coroutine function, whichever way its records take: nothing happens
before its call is awaited, and a call is awaited once.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic
from tailrace.aio import AsyncProducer
from tailrace.core.errors import ClientClosedError, InvalidRequestError
from tailrace.embedded_appliance import EmbeddedAppliance


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
    return topic


def drop(call: object) -> None:
    """Let the only reference go."""
    del call
    gc.collect()


def values(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found = [record.value for record in consumer.consume(count, timeout=60)]
        assert not consumer.poll(0)
    return found


def test_send_is_a_coroutine_function() -> None:
    assert inspect.iscoroutinefunction(AsyncProducer.send)


def test_calls_are_coroutines_that_run_when_they_are_awaited(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            await producer.send(made, b"0")  # from here on, a batch is open
            later = producer.send(made, b"3")
            assert inspect.iscoroutine(later)
            assert isinstance(later, Coroutine)
            assert inspect.isawaitable(later)
            task = asyncio.create_task(producer.send(made, b"2"))
            await producer.send(made, b"1")
            await task
            await later
            await asyncio.gather(producer.send(made, b"4"), producer.send(made, b"5"))

    asyncio.run(main())
    assert values(appliance, made, 6) == [b"%d" % number for number in range(6)]


def test_a_call_that_is_never_awaited_sends_nothing_and_warns(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            await producer.send(made, b"0")
            with pytest.warns(RuntimeWarning, match=r"AsyncProducer\.send' was never awaited"):
                drop(producer.send(made, b"not sent"))

    asyncio.run(main())
    assert values(appliance, made, 1) == [b"0"]


def test_a_task_that_is_cancelled_before_it_begins_has_sent_nothing(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            await producer.send(made, b"0")
            task = asyncio.create_task(producer.send(made, b"not sent"))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            closed = producer.send(made, b"not sent")
            closed.close()
            thrown = producer.send(made, b"not sent")
            with pytest.raises(KeyError):
                thrown.throw(KeyError("of the test"))

    asyncio.run(main())
    assert values(appliance, made, 1) == [b"0"]


def test_a_call_is_awaited_once(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            for _ in range(2):  # the first waits for the topic's metadata
                call: Any = producer.send(made, b"0")
                await (await call)
                with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
                    await call

    asyncio.run(main())
    assert values(appliance, made, 2) == [b"0", b"0"]


def test_a_producer_works_in_its_loop_alone_and_in_each_of_its_runs(
    appliance: EmbeddedAppliance, made: str
) -> None:
    own, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    producer = AsyncProducer(appliance.address)
    try:
        for number in range(3):
            for _ in range(2):
                own.run_until_complete(producer.send(made, b"%d" % number))
            with pytest.raises(InvalidRequestError, match="another event loop"):
                other.run_until_complete(producer.send(made, b"not sent"))
        own.run_until_complete(producer.close())
        with pytest.raises(ClientClosedError):
            own.run_until_complete(producer.send(made, b"not sent"))
    finally:
        own.close()
        other.close()
    assert values(appliance, made, 6) == [b"0", b"0", b"1", b"1", b"2", b"2"]


def test_what_follows_the_timestamp_is_named(appliance: EmbeddedAppliance, made: str) -> None:
    """As in `Producer.send`."""

    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            send: Any = producer.send
            for _ in range(2):  # the first waits for the topic's metadata
                with pytest.raises(TypeError, match="positional arguments"):
                    await send(made, b"no", None, None, None, None, print)
                await producer.send(made, b"0", on_delivery=lambda *_: None)

    asyncio.run(main())
    assert values(appliance, made, 2) == [b"0", b"0"]


class HashingTopic(str):
    """A topic's name whose hash runs code of the program."""

    during_hash: Callable[[], object]

    def __hash__(self) -> int:
        self.during_hash()
        return super().__hash__()


def test_a_call_that_the_program_s_code_has_failed_is_over(
    appliance: EmbeddedAppliance, made: str
) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            await producer.send(made, b"0")
            topic = HashingTopic(made)
            topic.during_hash = fail
            call: Any = producer.send(topic, b"not sent")
            with pytest.raises(ZeroDivisionError):
                await call
            with pytest.raises(RuntimeError, match="cannot reuse already awaited coroutine"):
                await call
            await producer.send(made, b"1")

    asyncio.run(main())
    assert values(appliance, made, 2) == [b"0", b"1"]


def test_a_call_that_one_task_awaits_is_refused_to_another(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address) as producer:
            call: Any = producer.send(made, b"0")  # waits for the topic's metadata

            async def wait() -> object:
                return await call

            one, other = asyncio.create_task(wait()), asyncio.create_task(wait())
            with pytest.raises(RuntimeError, match="already"):
                await other
            sent: Any = await one
            await sent

    asyncio.run(main())
    assert values(appliance, made, 1) == [b"0"]
