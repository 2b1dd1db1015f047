"""The clients of `tailrace` for asyncio, with the same settings and awaitable methods.

    async with AsyncProducer("localhost:7420") as producer, AsyncConsumer("orders", bootstrap="localhost:7420") as consumer:
        future = await producer.send("orders", b"...", key=b"u1")   # waits while the buffer is full
        metadata = await future                                      # waits until it is acknowledged
        async for record in consumer:
            ...

The event loop watches the clients' descriptors. There are no threads, but that of an AsyncTable.
"""  # noqa: E501

from tailrace.aio.admin import AsyncAdmin, PendingDelays
from tailrace.aio.consumer import AsyncConsumer
from tailrace.aio.futures import AsyncFrameFuture, AsyncRecordFuture
from tailrace.aio.producer import AsyncProducer
from tailrace.aio.share_consumer import AsyncShareConsumer
from tailrace.aio.table import AsyncTable

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
