"""Many tasks that share an AsyncProducer: order, cancellation at each wait, interrupts of the
loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pyarrow as pa
import pytest

import tailrace.aio.producer
from tailrace import Admin, Consumer, NewTopic
from tailrace.aio import AsyncProducer
from tailrace.aio.event_loop import LOOP_RUNTIME
from tailrace.client.connections.runtime import Runtime
from tailrace.embedded_appliance import EmbeddedAppliance
from tests.conformance.interrupts import at, points
from tests.conformance.logging_front import LoggingFront
from tests.kit.processes import HANG_LIMIT_S
from tests.kit.runs.cancellation import CancelledAt

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
"""Python throws away the exceptions of a handler that runs while an object is destroyed."""
LARGE = 19_000
ENOUGH_S = 60


@pytest.fixture
def made(appliance: EmbeddedAppliance, topic: str) -> str:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic))
    return topic


def test_four_hundred_tasks_send_in_the_order_in_which_they_began(
    appliance: EmbeddedAppliance, made: str
) -> None:
    """51 to 89 of them lay before earlier ones that had waited for room: the gate was removed while
    others queued for it.
    """

    async def main() -> None:
        async with AsyncProducer(appliance.address, buffer_memory=65536, linger_ms=0) as producer:
            await asyncio.gather(
                *(
                    producer.send(made, (b"%05d" % number).ljust(3_000), partition=0)
                    for number in range(400)
                )
            )

    asyncio.run(asyncio.wait_for(main(), ENOUGH_S))
    with Consumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found = [int(record.value) for record in consumer.consume(400, timeout=ENOUGH_S)]
    assert found == list(range(400))


def test_frames_and_records_of_tasks_keep_the_order_of_the_calls(
    appliance: EmbeddedAppliance, made: str
) -> None:
    async def main() -> None:
        async with AsyncProducer(appliance.address, buffer_memory=65536, linger_ms=0) as producer:
            calls: list[Awaitable[Any]] = []
            for number in range(0, 120, 3):
                calls.append(producer.send(made, (b"%05d" % number).ljust(3_000)))
                rows = [(b"%05d" % row).ljust(3_000) for row in (number + 1, number + 2)]
                calls.append(
                    producer.send_arrow(
                        made, pa.table({"value": pa.array(rows, pa.binary())}), partition=0
                    )
                )
            await asyncio.gather(*calls)

    asyncio.run(asyncio.wait_for(main(), ENOUGH_S))
    with Consumer(made, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        found = [int(record.value) for record in consumer.consume(120, timeout=ENOUGH_S)]
    assert found == list(range(120))


class Program:
    """Tasks that send numbered records to a front in memory, which answers when it is told to."""

    def __init__(self) -> None:
        self.front = LoggingFront(partitions=2)
        self.producer = AsyncProducer("tcp://127.0.0.1:1", buffer_memory=65536, linger_ms=0)
        self.count = 0
        self.accepted: list[bytes] = []
        self.handles: list[Any] = []

    def number(self) -> bytes:
        self.count += 1
        return b"%05d" % self.count

    async def send(self, size: int = 0, number: bytes | None = None) -> None:
        number = number or self.number()
        once: Any = iter([("n", number)])
        handle = await self.producer.send("t", number.ljust(size, b"."), partition=0, headers=once)
        self.accepted.append(number)
        self.handles.append(handle)

    async def filled(self) -> None:
        await self.send()
        await self.producer.flush()
        self.front.is_holding = True
        for _ in range(3):
            await self.send(LARGE)

    async def answer(self) -> None:
        """The front answers, and goes on answering."""
        self.front.is_holding = False
        self.front.answer_all()
        self.producer._loop_connection.run_once()

    async def check(self, where: object) -> None:
        await self.answer()
        await self.send()
        await self.send(LARGE)
        await self.producer.flush(HANG_LIMIT_S)
        found = [value[:5] for value in self.front.logs[0]]
        assert found == sorted(set(found)), f"twice, or out of order: {found} at {where}"
        assert set(self.accepted) <= set(found), where
        assert [(await handle).offset for handle in self.handles] == [
            found.index(number) for number in self.accepted
        ], where
        accumulator = self.producer._producer.sender_thread.accumulator
        assert (
            accumulator.buffered_bytes,
            accumulator.incomplete_count,
            accumulator.in_flight_count,
        ) == (0, 0, 0), where
        assert not self.producer._gates, where
        assert not self.producer._producer.sender_thread.buffer.waiters, where


@asynccontextmanager
async def program(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Program]:
    """The front's socket has no descriptor: the loop looks when it is told to."""
    holder: list[Program] = []
    runtime = LOOP_RUNTIME
    scripted = Runtime(
        runtime.monotonic_ns,
        lambda _: (holder[0].front if holder else front).connect(),
        runtime.sleep_on,
        lambda: 0.5,
        has_threads=False,
    )
    monkeypatch.setattr(tailrace.aio.producer, "LOOP_RUNTIME", scripted)
    front = LoggingFront(partitions=2)
    made = Program()
    made.front = front
    holder.append(made)
    monkeypatch.undo()

    async def drive() -> None:
        """Answer in place of the event loop, which watches no descriptor of a scripted front."""
        while True:
            await asyncio.sleep(0.001)
            if made.front._answers:
                made.producer._loop_connection.run_once()

    driving = asyncio.create_task(drive())
    try:
        yield made
    finally:
        driving.cancel()
        await made.producer.close(timeout=0)


async def _send(program: Program) -> None:
    await program.send(LARGE)


async def _send_arrow(program: Program) -> None:
    rows = [program.number().ljust(2_000, b".") for _ in range(20)]
    await program.producer.send_arrow(
        "t", pa.table({"value": pa.array(rows, pa.binary())}), partition=0
    )


async def _flush(program: Program) -> None:
    await program.producer.flush()


async def _await_a_handle(program: Program) -> None:
    await program.handles[-1]


async def _send_and_wait(program: Program) -> None:
    number = program.number()
    await program.producer.send_and_wait("t", number.ljust(LARGE, b"."), partition=0)


CALLS = [_send, _send_arrow, _flush, _await_a_handle, _send_and_wait]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__.strip("_"))
def test_a_call_that_is_cancelled_at_any_wait_costs_nothing_and_holds_nobody_up(
    call: Callable[[Program], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(number: int) -> bool:
        async with program(monkeypatch) as made:
            await made.filled()
            cancelling = CancelledAt(call(made), number)  # type: ignore[arg-type]

            async def victim() -> None:
                await cancelling

            before = asyncio.create_task(made.send(LARGE))
            await asyncio.sleep(0)
            task = asyncio.create_task(victim())
            await asyncio.sleep(0)
            behind = [asyncio.create_task(made.send(LARGE)) for _ in range(3)]
            await asyncio.sleep(0.002)
            await made.answer()
            await asyncio.wait_for(asyncio.gather(before, *behind), ENOUGH_S)
            await asyncio.wait_for(asyncio.wait([task]), ENOUGH_S)
            if not task.cancelled():
                task.result()
            await made.check(number)
            if call is _send and cancelling.was_made:
                assert len(made.accepted) == len(made.front.logs[0]), (
                    "a send that was cancelled has sent"
                )
            return cancelling.was_made

    for number in points():
        if not asyncio.run(cancelled(number)):
            assert number > 0
            return


@pytest.mark.parametrize("call", [_send, _flush], ids=lambda call: call.__name__.strip("_"))
def test_a_signal_at_any_point_of_a_call_in_a_loop_costs_nothing(
    call: Callable[[Program], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler raises in the task that calls; the loop, and the other tasks, go on."""

    async def interrupted(point: int) -> bool:
        async with program(monkeypatch) as made:
            await made.filled()
            coroutine = call(made).__await__()
            with at(point) as interruption:
                next(coroutine)  # the first stretch of the call, to its first wait
            coroutine.close()
            await made.check(interruption.where)
            return interruption.was_made

    for point in points(step=3):
        if not asyncio.run(interrupted(point)):
            return
