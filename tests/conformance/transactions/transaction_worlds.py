"""A transactional producer of each kind over a front in memory: of threads, and of an event loop.

@SCRIPTED
def test_something(world: ScriptedWorld) -> None:
    async def body(made: Made) -> None:
        async with made.producer.transaction():
            await made.producer.send("t", b"x")
    world.run(body)

Owner: one test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import pytest

import tailrace.aio.producer
from tailrace.aio import AsyncProducer
from tailrace.aio.event_loop import LOOP_RUNTIME
from tailrace.client.connections.runtime import Runtime
from tests.conformance.logging_front import DrivenProducer
from tests.conformance.transactions.transaction_front import TransactionFront
from tests.conformance.worlds import ENOUGH_S, Awaited

SETTINGS: dict[str, Any] = {"transactional_id": "billing-1", "linger_ms": 5}
CLOSE_S = 0.05
"""A timeout that has to pass."""


class Made:
    """A producer and its front."""

    def __init__(self, front: TransactionFront, producer: Any, plain: Any) -> None:
        self.front = front
        self.producer = producer
        self.plain = plain
        """The Producer of threads within."""

    @property
    def state(self) -> Any:
        """The producer's state machine."""
        return self.plain._transactions._state

    def be_idle(self) -> None:
        """The producer has had no answer of the coordinator for as long as its INIT says."""
        self.state.answered_ns -= self.state.idle_ns

    async def send(self, *values: bytes, **more: Any) -> list[Any]:
        """Send values to partition 0."""
        more.setdefault("partition", 0)
        return [await self.producer.send("t", value, **more) for value in values]


Body = Callable[[Made], Awaitable[None]]


class ScriptedWorld:
    """Maker of a producer and runner of a body."""

    name: str

    def run(self, body: Body, front: TransactionFront | None = None, **settings: Any) -> None:
        """Run a test's body."""
        raise NotImplementedError


class AwaitedBlock:
    """A plain `with` block, in a body with `async with`."""

    def __init__(self, block: Any) -> None:
        self._block = block

    async def __aenter__(self) -> Any:
        return self._block.__enter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._block.__exit__(kind, error, trace)


class AwaitedProducer(Awaited):
    """A Producer, in a body with `await`."""

    def transaction(self) -> AwaitedBlock:
        """Its block."""
        return AwaitedBlock(self.client.transaction())


class ThreadScripted(ScriptedWorld):
    """A Producer of one thread on a clock of the test's own."""

    name = "thread"

    def run(self, body: Body, front: TransactionFront | None = None, **settings: Any) -> None:
        front = front or TransactionFront()
        driven = DrivenProducer(front, **{**SETTINGS, **settings})
        made = Made(front, AwaitedProducer(driven.producer), driven.producer)
        coroutine: Any = body(made)
        try:
            coroutine.send(None)
        except StopIteration:
            return
        finally:
            coroutine.close()
            driven.producer.close(0)
        raise AssertionError("the body of a test awaits what is no client's")


class LoopScripted(ScriptedWorld):
    """An AsyncProducer. The front's socket has no descriptor: a task says when something came."""

    name = "loop"

    def run(self, body: Body, front: TransactionFront | None = None, **settings: Any) -> None:
        asyncio.run(
            asyncio.wait_for(
                self._run(body, front or TransactionFront(), {**SETTINGS, **settings}), ENOUGH_S
            ),
            debug=True,
        )

    async def _run(self, body: Body, front: TransactionFront, settings: dict[str, Any]) -> None:
        runtime = Runtime(
            LOOP_RUNTIME.monotonic_ns,
            lambda _: front.connect(),
            LOOP_RUNTIME.sleep_on,
            lambda: 0.5,
            has_threads=False,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tailrace.aio.producer, "LOOP_RUNTIME", runtime)
            producer = AsyncProducer("tcp://127.0.0.1:1", **settings)

        async def drive() -> None:
            while True:
                await asyncio.sleep(0.001)
                front.deliver()
                if front._answers and not producer._is_closed:
                    producer._loop_connection.run_once()

        driving = asyncio.create_task(drive())
        try:
            await body(Made(front, producer, producer._producer))
        finally:
            await producer.close(timeout=0)
            driving.cancel()


SCRIPTED = pytest.mark.parametrize(
    "world", [ThreadScripted(), LoopScripted()], ids=lambda world: world.name
)
