"""Running the clients for asyncio in tests: a loop that complains, a task that shows whether the
loop is held, errors beside those of the plain clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tailrace import Consumer
from tailrace.core.errors import TailraceError
from tailrace.embedded_appliance import EmbeddedAppliance

T = TypeVar("T")
ENOUGH_S = 150
NOWHERE = "tcp://127.0.0.1:1"


def run(main: Coroutine[Any, Any, T]) -> T:
    """In a loop that complains of calls from a wrong thread."""
    return asyncio.run(asyncio.wait_for(main, ENOUGH_S), debug=True)


def stored(appliance: EmbeddedAppliance, topic: str, count: int) -> list[Any]:
    """The first `count` values in the topic, by a plain consumer."""
    with Consumer(topic, bootstrap=appliance.address, auto_offset_reset="earliest") as consumer:
        return [record.value for record in consumer.consume(count, timeout=ENOUGH_S)]


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """`await ticks(n)` returns when a task of its own has had its turn in the loop `n` times
    more.
    """
    count = 0

    async def tick() -> None:
        nonlocal count
        while True:
            await asyncio.sleep(0.001)
            count += 1

    async def ticks(more: int) -> None:
        requested = count + more
        while count < requested:
            await asyncio.sleep(0)

    task = asyncio.create_task(tick())
    try:
        yield ticks
    finally:
        task.cancel()


def sentence(error: BaseException | None) -> tuple[type[BaseException], str]:
    """The kind of an error, and what it says without the id of its request."""
    assert error is not None
    return type(error), re.sub(r", request [0-9a-f]+\]", "]", str(error))


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
