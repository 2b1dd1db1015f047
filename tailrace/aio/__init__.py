"""The clients of `tailrace` for asyncio: the same names and settings, methods awaited, `async
with`, `async for record in consumer`.

    async with AsyncProducer("localhost:7420") as producer, AsyncConsumer("orders", bootstrap="localhost:7420") as consumer:
        handle = await producer.send("orders", b"...", key=b"u1")   # waits while the buffer is full
        metadata = await handle                                      # waits until it is acknowledged
        async for record in consumer:
            ...

The event loop watches the clients' descriptors; there are no threads. Imported only when it is
asked for: asyncio takes its time to load.
"""  # noqa: E501

import pyarrow as pa

from tailrace.aio.admin import AsyncAdmin, PendingDelays
from tailrace.aio.consumer import AsyncConsumer
from tailrace.aio.producer import AsyncFrameFuture, AsyncProducer, AsyncRecordFuture
from tailrace.aio.share_consumer import AsyncShareConsumer

pa.array(
    [0]
)  # the first one makes pyarrow load pandas, where there is one: half a second that an event loop must not be held for  # noqa: E501

__all__ = [
    "AsyncAdmin",
    "AsyncConsumer",
    "AsyncFrameFuture",
    "AsyncProducer",
    "AsyncRecordFuture",
    "AsyncShareConsumer",
    "PendingDelays",
]
