"""Places where a program may call `send`: in a callback, in another client's hooks, in a signal's
handler, in a destructor, at exit.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tailrace import Admin, Consumer, NewTopic, Producer
from tailrace.aio import AsyncProducer
from tailrace.core.errors import TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.conformance.interrupts import at
from tests.conformance.logging_front import DrivenProducer, LoggingFront

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""
ENOUGH_S = 60


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
    return topic


def stored(appliance: EmbeddedAppliance, topic: str, count: int) -> list[bytes]:
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        return [record.value for record in consumer.consume(count, timeout=ENOUGH_S)]


def test_on_delivery_may_send_wait_and_flush(appliance: EmbeddedAppliance, made: str) -> None:
    with Producer(appliance.address, linger_ms=0) as producer:

        def again(_metadata: Any, _error: Any) -> None:
            producer.send(made, b"2").result(ENOUGH_S)
            producer.send(made, b"3")
            producer.flush(ENOUGH_S)

        producer.send(made, b"1", on_delivery=again)
    assert stored(appliance, made, 3) == [b"1", b"2", b"3"]


def test_on_delivery_of_a_loop_sends_with_a_task(appliance: EmbeddedAppliance, made: str) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address, linger_ms=0) as producer:
            tasks: list[asyncio.Task[Any]] = []
            await producer.send_and_wait(
                made,
                b"1",
                on_delivery=lambda *_: tasks.append(
                    asyncio.ensure_future(producer.send_and_wait(made, b"2"))
                ),
            )
            while not tasks:
                await asyncio.sleep(0)
            await tasks[0]

    asyncio.run(asyncio.wait_for(main(), ENOUGH_S))
    assert stored(appliance, made, 2) == [b"1", b"2"]


def test_serializers_and_deserializers_may_send_with_other_producers(
    appliance: EmbeddedAppliance, made: str
) -> None:
    other = f"{made}-other"
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(other))
    with Producer(appliance.address, linger_ms=0) as audit:

        def noted(value: bytes) -> bytes:
            audit.send(other, value)
            return value

        with Producer(appliance.address, value_serializer=noted) as producer:
            producer.send(made, b"1")
        with Consumer(
            made,
            bootstrap=appliance.address,
            auto_offset_reset="earliest",
            value_deserializer=noted,
        ) as consumer:
            assert [record.value for record in consumer.consume(1, timeout=ENOUGH_S)] == [b"1"]
    assert stored(appliance, other, 2) == [b"1", b"1"]


def test_what_would_have_to_wait_in_the_midst_of_the_producers_own_work_is_refused_with_a_sentence() -> (  # noqa: E501
    None
):
    """In a destructor or a signal's handler: what was interrupted goes on only when they return, so
    no answer would come.
    """
    refusals: list[str] = []
    for point in range(0, 400, 7):
        front = LoggingFront()
        driven = DrivenProducer(front, linger_ms=0)
        producer = driven.producer
        producer.send("t", b"first").result()
        front.is_holding = True
        handle = producer.send("t", b"waits")

        def waits(producer: Producer = producer, handle: Any = handle) -> None:
            try:
                handle.result(1)
            except TailraceError as error:
                refusals.append(str(error))

        with at(point, waits):
            driven.turn(6)
        front.is_holding = False
        producer.flush()
        assert sorted(value for log in front.logs.values() for value in log) == [b"first", b"waits"]
        assert handle.done()
        producer.close()
    assert any(
        "send there, and call result() or flush() outside" in refusal for refusal in refusals
    )


def test_at_exit_send_is_allowed_until_the_producer_is_closed_there(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """Functions that were registered with atexit after the import run first; destructors of what is
    left run after it.
    """
    program = f"""
        import atexit, sys
        import tailrace
        producer = tailrace.Producer({appliance.address!r})
        atexit.register(lambda: producer.send({made!r}, b"2"))
        class Late:
            def __del__(self):
                try:
                    producer.send({made!r}, b"3")
                except tailrace.core.errors.ClientClosedError as error:
                    print(error)
        late = Late()
        producer.send({made!r}, b"1")
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=True,
        timeout=ENOUGH_S,
    )
    assert "the producer is closed" in done.stdout + done.stderr
    assert stored(appliance, made, 2) == [b"1", b"2"]
