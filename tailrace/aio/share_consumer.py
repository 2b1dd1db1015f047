"""`tailrace.ShareConsumer` for asyncio: its methods awaited, and `async for record in consumer`.

The event loop watches the connections, sends the heartbeats and writes dead letters. There are no
threads. Code that blocks the loop for longer than session_timeout_ms loses the membership.

Owner: one event loop's thread.
Invariants: those of `tailrace.share.poll_loop`. A cancelled await loses nothing. The next call
    delivers the records and sends the acknowledgements.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, ClassVar, Concatenate, Never, ParamSpec, TypeVar, Unpack

from tailrace.aio.client import AsyncClient
from tailrace.aio.consumer import NO_SPAN, LoopProducers
from tailrace.aio.event_loop import LOOP_RUNTIME, LoopConnection
from tailrace.aio.group import HeartbeatLoopConnection
from tailrace.client.config.kafka_names import (
    RENAMED_SHARE_CONSUMER_METHODS,
    RenamedMethods,
    refuse_keywords,
)
from tailrace.client.connections.steps import Steps, steps_of
from tailrace.client.records.attached_records import AttachedRecords
from tailrace.core.errors import ClientClosedError
from tailrace.core.loop_end import is_broken_off, program_frame
from tailrace.core.records import Record
from tailrace.core.validation import timeout_ms_of
from tailrace.share.consumer import LOOP_POLL_MS, ShareConsumer, settings_of
from tailrace.share.delivery import NS_PER_MS
from tailrace.share.poll_loop import SharePollLoop
from tailrace.share.record import ShareRecord
from tailrace.share.settings import ShareConsumerOptions, ShareConsumerSettings

T = TypeVar("T")
P = ParamSpec("P")


class LoopShareConsumer(ShareConsumer):
    """A ShareConsumer without threads, whose steps an event loop runs."""

    def __init__(self, settings: ShareConsumerSettings) -> None:
        self.settings = settings
        self._begin(
            SharePollLoop(
                settings,
                LOOP_RUNTIME,
                LoopProducers(settings.bootstrap_servers, LOOP_RUNTIME, settings.tracing),
            )
        )
        self._abandon.detach()  # AsyncShareConsumer handles its own end


def _awaited(
    method: Callable[Concatenate[ShareConsumer, P], T],
) -> Callable[Concatenate[AsyncShareConsumer, P], Coroutine[Any, Any, T]]:
    """Make a method of AsyncShareConsumer from one of ShareConsumer, with the same arguments and
    errors.
    """
    steps = steps_of(method) if hasattr(method, "__wrapped__") else None

    @wraps(method)
    async def call(self: AsyncShareConsumer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        await self._ready()
        return (
            method(self._consumer, *args, **kwargs)
            if steps is None
            else await self._run(steps(self._consumer, *args, **kwargs))
        )

    return call


def _awaited_instead(
    method: Callable[Concatenate[ShareConsumer, P], T],
) -> Callable[Concatenate[AsyncShareConsumer, P], Coroutine[Any, Any, T]]:
    """Make a method as `_awaited` does, which replaces the topics named at construction."""
    steps = steps_of(method)

    @wraps(method)
    async def call(self: AsyncShareConsumer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._enter()
        self._names = []
        try:
            return await self._run(steps(self._consumer, *args, **kwargs))
        finally:
            self._loop_connection.wake_watchers()

    return call


class _Loop:
    """The iterator of one `async for`."""

    def __init__(self, consumer: AsyncShareConsumer) -> None:
        self._client = consumer
        spans = consumer._consumer._spans
        self._loop_span = None if spans is None else spans.loop()
        self._record: ShareRecord | None = None
        self._has_begun = False

    def __aiter__(self) -> _Loop:
        return self

    async def __anext__(self) -> ShareRecord:
        client = self._client
        poll_loop, delivery = client._poll_loop, client._poll_loop.delivery
        if self._loop_span is not None:
            self._loop_span.end()
        try:
            await client._ready()
            if not self._has_begun:
                self._has_begun = True
                delivery.settle_last()
            record, self._record = self._record, None
            if record is not None:
                poll_loop.next_requested(record)
            while not client._is_closing:
                async with client._polling:
                    if not delivery.has_next():
                        await asyncio.sleep(0)
                        await client._run(
                            poll_loop.fill(
                                delivery.loop_limit(),
                                poll_loop.now_ns() + LOOP_POLL_MS * NS_PER_MS,
                            )
                        )
                    if delivery.has_next():
                        self._record = self._deliver()
                        break
        except ClientClosedError:
            if not client._is_closing:
                raise
        if self._record is None:
            raise StopAsyncIteration
        return self._record

    def _deliver(self) -> ShareRecord:
        delivery = self._client._poll_loop.delivery
        if self._loop_span is None:
            return delivery.next_in_loop()
        self._loop_span.begin(delivery.first(1)[0])
        try:
            return delivery.next_in_loop()
        except BaseException:
            self._loop_span.end(has_failed=True)
            raise

    def __del__(self) -> None:
        frame = program_frame()
        if self._record is not None:
            self._client._poll_loop.delivery.on_loop_left(
                self._record, is_broken_off=is_broken_off(frame)
            )
        if self._loop_span is not None:
            self._loop_span.end_dropped(frame)


class AsyncShareConsumer(AsyncClient, RenamedMethods):
    """`tailrace.ShareConsumer` for coroutines: the same arguments, settings, methods and errors.
    Each method is awaited.

        async with AsyncShareConsumer("jobs", bootstrap="tcp://127.0.0.1:7420", group_id="workers")
            as consumer: async for record in consumer:
                await work(record.value)

    Several tasks may use it. Each record goes to one of them. Use share_acknowledgement_mode
    "explicit" then, and acknowledge each record. In the implicit mode a poll accepts the records of
    the poll before, even if another task made that.
    """

    _renamed: ClassVar[dict[str, str]] = {
        **RENAMED_SHARE_CONSUMER_METHODS,
        "getmany": "write poll(timeout_ms=..., max_records=...)",
        "getone": "write `async for record in consumer`, or poll(max_records=1)",
    }

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | Sequence[str] | None = None,
        **settings: Unpack[ShareConsumerOptions],
    ) -> None:
        """Take the arguments of `ShareConsumer`. `start()` or the first use looks the topics up.
        Raises InvalidSettingError.
        """
        self._names, self.settings = settings_of(topics, bootstrap, settings)
        kind = type(self).__name__
        self._consumer = LoopShareConsumer(self.settings)
        self._poll_loop = self._consumer._poll_loop
        self._loop_connection = LoopConnection(kind, self._poll_loop.connection)
        self._beats = HeartbeatLoopConnection(
            kind, self._poll_loop.member.thread.beats, self._loop_connection.wake_watchers
        )
        self._poll_loop.member.wakeup = self._beats.beat
        self._starting = asyncio.Lock()
        self._polling = asyncio.Lock()
        """Held by the task that acquires records."""
        self._is_closing = False

    async def start(self) -> None:
        """Subscribe to the topics named at construction. Raises UnknownTopicError,
        NotReachableError. The consumer is closed then.
        """
        self._loop_connection.enter()
        try:
            await self._ready()
        except BaseException:
            await self.close()
            raise

    def _attach(self, records: Iterable[Record], outcome: str) -> AttachedRecords:
        self._enter()
        return self._poll_loop.attach(records, outcome)

    async def _ready(self) -> None:
        self._enter()
        if not self._names:
            return
        async with self._starting:
            names = self._names
            if names:  # else another task was the first
                await self._run(self._poll_loop.subscribe(names))
                if self._names is names:
                    self._names = []
                self._loop_connection.wake_watchers()

    def _enter(self) -> None:
        self._loop_connection.enter()
        self._beats.enter()

    async def _run(self, steps: Steps[T]) -> T:
        try:
            self._enter()
            return await self._loop_connection.run_steps(steps)
        finally:
            steps.close()

    # ---- records ---------------------------------------------------------------------------------

    async def poll(
        self, timeout_ms: float = 0, max_records: int | None = None, **others: Never
    ) -> list[ShareRecord]:
        """Acquire up to `max_records` records (default max_poll_records). Waits at most
        `timeout_ms` for the first. Raises as `ShareConsumer.poll` does.
        """
        if others:
            refuse_keywords("poll", others)
        timeout_ms_of(timeout_ms)
        await self._ready()
        limit, deadline_ns = self._consumer._poll_arguments(timeout_ms, max_records)
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._polling.acquire()
        except TimeoutError:  # another task has polled for that time
            return []
        try:
            await asyncio.sleep(0)  # lets other tasks run even if the buffer has records
            delivery, spans = self._poll_loop.delivery, self._consumer._spans
            with NO_SPAN if spans is None else spans.receiving(partial(delivery.first, limit)):
                await self._run(self._poll_loop.fill(limit, deadline_ns))
            return delivery.collect(limit)
        finally:
            self._polling.release()

    def __aiter__(self) -> AsyncIterator[ShareRecord]:
        """All records and new ones, until the consumer is closed. Acknowledgement is as in
        `ShareConsumer.__iter__`.
        """
        return _Loop(self)

    # ---- the end ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the consumer as `ShareConsumer.close` does. Calls that wait for records raise
        ClientClosedError, and an `async for` ends.
        """
        self._loop_connection.enter_to_close()
        if self._is_closing:
            return
        self._is_closing = self._consumer._closed = True
        try:
            if self._poll_loop.connection.is_usable:
                self._loop_connection.enter()
                self._beats.enter_to_close()
                self._beats.enter()
                await self._loop_connection.run_steps(self._consumer._closing())
        finally:
            self._beats.detach()
            self._end(self._consumer._end)

    def __del__(self) -> None:
        if hasattr(self, "_beats") and not self._is_closed:
            self._beats.forget()
        super().__del__()

    # ---- as the plain consumer's ---------------------------------------------------------------

    subscribe = _awaited_instead(ShareConsumer.subscribe)
    unsubscribe = _awaited_instead(ShareConsumer.unsubscribe)
    subscription = _awaited(ShareConsumer.subscription)
    acquisition_lock_timeout_ms = _awaited(ShareConsumer.acquisition_lock_timeout_ms)
    acknowledge = _awaited(ShareConsumer.acknowledge)
    commit = _awaited(ShareConsumer.commit)
    metrics = _awaited(ShareConsumer.metrics)
