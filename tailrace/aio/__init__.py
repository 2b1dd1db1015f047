"""The clients of `tailrace` for asyncio, with the same settings and awaitable methods.

    async with AsyncProducer("localhost:7420") as producer, AsyncConsumer("orders", bootstrap="localhost:7420") as consumer:
        future = await producer.send("orders", b"...", key=b"u1")   # waits while the buffer is full
        metadata = await future                                      # waits until it is acknowledged
        async for record in consumer:
            ...

The event loop watches the clients' descriptors. There are no threads, but that of an AsyncTable.
Names are loaded when they are first used: a program pays for the clients that it has.
"""  # noqa: E501

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.aio.admin import AsyncAdmin, PendingDelays
    from tailrace.aio.consumer import AsyncConsumer
    from tailrace.aio.futures import AsyncFrameFuture, AsyncRecordFuture
    from tailrace.aio.producer import AsyncProducer
    from tailrace.aio.share_consumer import AsyncShareConsumer
    from tailrace.aio.table import AsyncTable

_HOMES = {
    "AsyncAdmin": "admin",
    "AsyncConsumer": "consumer",
    "AsyncFrameFuture": "futures",
    "AsyncProducer": "producer",
    "AsyncRecordFuture": "futures",
    "AsyncShareConsumer": "share_consumer",
    "AsyncTable": "table",
    "PendingDelays": "admin",
}

__all__ = [
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncFrameFuture",
    "AsyncProducer",
    "AsyncRecordFuture",
    "AsyncShareConsumer",
    "AsyncTable",
    "PendingDelays",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'tailrace.aio' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tailrace.aio.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
