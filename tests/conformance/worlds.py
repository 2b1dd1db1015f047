"""One test body for every kind of client: it is written with `await`, over a client of an event
loop, or one of threads whose methods are called at once.

@WORLDS
def test_something(world: World, appliance: EmbeddedAppliance, topic: str) -> None:
    async def body() -> None:
        async with world.producer(appliance.address) as producer:
            metadata = await (await producer.send(topic, b"x"))
    world.run(body())
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import time
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from typing import Any, TypeVar

import pytest

from tailrace import Admin, Producer
from tailrace.aio import AsyncAdmin, AsyncProducer

T = TypeVar("T")
ENOUGH_S = 60
PAUSE_S = 0.01


class World:
    """Maker of clients and runner of bodies. The clients of a world are of one kind, and are used
    alike.
    """

    name: str

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """Run a test's body."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Let the clients work for a moment, between two looks at the outside world."""
        raise NotImplementedError

    def producer(self, address: str, **settings: Any) -> Any:
        """A Producer or an AsyncProducer."""
        raise NotImplementedError

    def admin(self, address: str, **settings: Any) -> Any:
        """An Admin or an AsyncAdmin."""
        raise NotImplementedError


class LoopWorld(World):
    """Clients of an event loop."""

    name = "loop"

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(asyncio.wait_for(body, ENOUGH_S), debug=True)

    async def pause(self) -> None:
        await asyncio.sleep(PAUSE_S)

    def producer(self, address: str, **settings: Any) -> Any:
        return AsyncProducer(address, **settings)

    def admin(self, address: str, **settings: Any) -> Any:
        return AsyncAdmin(address, **settings)


class ThreadWorld(World):
    """Clients of threads: each method blocks, and the body goes on with what it returned."""

    name = "thread"

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        try:
            body.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            body.close()
        raise AssertionError("the body of a test awaits what is no client's")

    async def pause(self) -> None:
        time.sleep(PAUSE_S)

    def producer(self, address: str, **settings: Any) -> Any:
        return Awaited(Producer(address, **settings))

    def admin(self, address: str, **settings: Any) -> Any:
        return Awaited(Admin(address, **settings))


class Awaited:
    """A client of threads, in a body with `await`."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)

        def call(*args: Any, **kwargs: Any) -> Result:
            return Result(method(*args, **kwargs))

        return call

    async def __aenter__(self) -> Awaited:
        self.client.__enter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self.client.__exit__(*error)


class Result:
    """Result of a method: `await` gives it, `async for` goes through it. A future is awaited again,
    for its result.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        value = self._value
        if isinstance(value, concurrent.futures.Future):
            return Fate(value)
        return list(value) if isinstance(value, Iterator) else value

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in self._value:
            yield each


class Fate:
    """A handle: `await` blocks until its result is there."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __await__(self) -> Generator[Any, None, Any]:
        yield from ()
        return self._handle.result(ENOUGH_S)

    def done(self) -> bool:
        is_done: bool = self._handle.done()
        return is_done

    def exception(self) -> Any:
        return self._handle.exception(0)


WORLDS = pytest.mark.parametrize(
    "world", [ThreadWorld(), LoopWorld()], ids=lambda world: world.name
)


def public_coroutines(kind: type) -> list[str]:
    """The methods of an asynchronous client that a program awaits."""
    return [
        name
        for name, member in inspect.getmembers(kind, inspect.iscoroutinefunction)
        if not name.startswith("_")
    ]
