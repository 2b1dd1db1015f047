"""`tailrace.Consumer` for asyncio: its methods awaited, and `async for record in consumer`.

The methods are steps of `tailrace.consumer.consumer`, run by the event loop. Fetches go on while
the program does other things. The loop receives their responses, at most one for each partition.

Owner: one event loop's thread.
Invariants: a cancelled await, or leaving an `async for`, loses no record. A record stays in the
    consumer's buffer until the call that delivers it returns, without an await in between.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Never, ParamSpec, TypeVar, Unpack

from tailrace.aio.client import AsyncClient
from tailrace.aio.event_loop import LOOP_RUNTIME, LoopConnection
from tailrace.aio.group import HeartbeatLoopConnection
from tailrace.batch.topic_batch import TopicBatch
from tailrace.client.config.kafka_names import RenamedMethods, refuse_keywords
from tailrace.client.config.settings import ConsumerOptions
from tailrace.client.connections.steps import Steps, steps_of
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import ClientClosedError
from tailrace.core.loop_end import program_frame
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import name_list, partitions_named
from tailrace.group.dead_letter_queue import Producers

if TYPE_CHECKING:
    from tailrace.client.tracing.read_spans import LoopSpan

T = TypeVar("T")
P = ParamSpec("P")
NO_SPAN: AbstractContextManager[None] = nullcontext()


class LoopProducers(Producers):
    """Producers of the consumer's event loop."""

    def make(self, **settings: Any) -> Any:
        """See `Producers`."""
        from tailrace.aio.producer import AsyncProducer

        return AsyncProducer(bootstrap=self._bootstrap, tracing=self._tracing, **settings)

    @staticmethod
    def outcome(handle: Any) -> Any:
        """See `Producers`. The result is awaited."""
        return handle


def _awaited(
    method: Callable[Concatenate[Consumer, P], T],
) -> Callable[Concatenate[AsyncConsumer, P], Coroutine[Any, Any, T]]:
    """Make a method of AsyncConsumer from one of Consumer, with the same arguments and errors."""
    steps = steps_of(method) if hasattr(method, "__wrapped__") else None

    @wraps(method)
    async def call(self: AsyncConsumer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        await self._ready()
        if steps is not None:
            return await self._run(steps(self._consumer, *args, **kwargs))
        try:
            return method(self._consumer, *args, **kwargs)
        finally:
            self._loop_connection.settle()
            self._loop_connection.wake_watchers()

    return call


def _awaited_instead(
    method: Callable[Concatenate[Consumer, P], T],
) -> Callable[Concatenate[AsyncConsumer, P], Coroutine[Any, Any, T]]:
    """Make a method as `_awaited` does, which replaces the topics named at construction."""
    steps = steps_of(method)

    @wraps(method)
    async def call(self: AsyncConsumer, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self._enter()
        self._topics = []
        try:
            return await self._run(steps(self._consumer, *args, **kwargs))
        finally:
            self._loop_connection.wake_watchers()

    return call


class _TracedLoop:
    """The iterator of one `async for` with spans."""

    def __init__(self, consumer: AsyncConsumer, loop_span: LoopSpan) -> None:
        self._client = consumer
        self._loop_span = loop_span

    def __aiter__(self) -> _TracedLoop:
        return self

    async def __anext__(self) -> Record:
        self._loop_span.end()
        try:
            return await self._client._next(self._loop_span)
        except ClientClosedError:
            if self._client._is_closing:
                raise StopAsyncIteration from None
            raise

    def __del__(self) -> None:
        self._loop_span.end_dropped(program_frame())


class AsyncConsumer(AsyncClient, RenamedMethods):
    """`tailrace.Consumer` for coroutines: the same arguments, settings, methods and errors. Each
    method is awaited.

        async with AsyncConsumer("orders", bootstrap="tcp://127.0.0.1:7420") as consumer:
            async for record in consumer:
                ...

    Several tasks may use it. Each record goes to one of them. It also has aiokafka's `getone` and
    `getmany`. A listener's methods may be coroutines.
    """

    _renamed = Consumer._renamed

    def __init__(
        self,
        *topics: str | Iterable[str] | Mapping[str, Any],
        bootstrap: str | None = None,
        **settings: Unpack[ConsumerOptions],
    ) -> None:
        """Take the arguments of `Consumer`. `start()` or the first use looks the topics up. Raises
        InvalidSettingError.
        """
        first = topics[:1] if topics and isinstance(topics[0], Mapping) else ()
        self._topics = [
            name for given in topics[len(first) :] for name in name_list("topics", given)
        ]
        self._consumer = Consumer(*first, bootstrap=bootstrap, runtime=LOOP_RUNTIME, **settings)
        self._consumer._public = weakref.ref(self)  # type: ignore[method-assign]
        self._consumer._producers = LoopProducers(
            self._consumer.settings.bootstrap_servers,
            LOOP_RUNTIME,
            self._consumer.settings.tracing,
        )
        kind = type(self).__name__
        self._loop_connection = LoopConnection(kind, self._consumer._connection)
        self._starting = asyncio.Lock()
        self._is_closing = False
        self._beats: HeartbeatLoopConnection | None = None
        group = self._consumer._group
        if group is not None:
            self._beats = HeartbeatLoopConnection(
                kind, group.beats, self._loop_connection.wake_watchers
            )
            group.step_lock.caller = asyncio.current_task
            group.step_lock.on_release = self._loop_connection.wake_watchers
            group.wakeup = self._beats.beat

    async def start(self) -> None:
        """Assign all partitions of the topics named at construction. Raises UnknownTopicError,
        NotReachableError. The consumer is closed then.
        """
        self._loop_connection.enter()
        try:
            await self._ready()
        except BaseException:
            await self.close()
            raise

    async def _ready(self) -> None:
        self._enter()
        if not self._topics:
            return
        async with self._starting:
            names = self._topics
            if names:  # else another task was the first
                await self._run(self._begin_with(names))

    def _begin_with(self, names: list[str]) -> Steps[None]:
        yield from self._consumer._begin_with(names)
        if self._topics is names:  # no assign() came meanwhile
            self._topics = []

    def _enter(self) -> None:
        self._loop_connection.enter()
        if self._beats is not None:
            self._beats.enter()

    async def _run(self, steps: Steps[T]) -> T:
        try:
            self._enter()
            return await self._loop_connection.run_steps(steps)
        finally:
            steps.close()

    # ---- the end -------------------------------------------------------------------------------

    async def close(self, autocommit: bool = True) -> None:
        """Close the consumer as `Consumer.close` does. Calls that wait for records raise
        ClientClosedError, and an `async for` ends.
        """
        await self._close(autocommit, True)

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self._close(True, error is None)

    async def _close(self, autocommit: bool, is_handled: bool) -> None:
        self._loop_connection.enter_to_close()
        if self._is_closing:
            return
        self._is_closing = self._consumer._closed = True
        try:
            if self._consumer._connection.is_usable:
                self._loop_connection.enter()
                if self._beats is not None:
                    self._beats.enter_to_close()
                    self._beats.enter()
                await self._loop_connection.run_steps(
                    self._consumer._closing(autocommit, is_handled)
                )
        finally:
            if self._beats is not None:
                self._beats.detach()
            self._end(self._consumer._end)

    def __del__(self) -> None:
        if getattr(self, "_beats", None) is not None and not self._is_closed:
            assert self._beats is not None
            self._beats.forget()
        super().__del__()

    # ---- reading -------------------------------------------------------------------------------

    async def _asking(self, gathering: Callable[..., Steps[None]], *args: Any) -> None:
        """Fill the buffer by these steps of the consumer."""
        consumer = self._consumer
        await asyncio.sleep(0)  # lets other tasks run even if the buffer has records
        consumer._check_may_ask()
        try:
            consumer._poll_loop.begin()
            await self._run(gathering(*args))
            consumer._fetch_loop.ask_ahead()
        finally:
            consumer._poll_loop.end()
            self._loop_connection.settle()

    async def poll(
        self, timeout_ms: float = 0, max_records: int | None = None, **others: Never
    ) -> list[Record]:
        """Up to `max_records` records (default max_poll_records). Waits at most `timeout_ms` for
        the first, and then returns an empty list. Raises as `Consumer.poll` does.
        """
        if others:
            refuse_keywords("poll", others)
        await self._ready()
        limit, deadline_ns = self._consumer._poll_arguments(timeout_ms, max_records, others)
        with self._receiving(limit):
            await self._asking(self._consumer._poll_loop.gather, 1, limit, deadline_ns)
        return self._consumer._buffer.deliver(limit)

    async def consume(self, num_messages: int = 1, timeout: float | None = -1.0) -> list[Record]:
        """Up to `num_messages` records. Waits for as many, for at most `timeout` seconds (-1 or
        None: no limit). Raises as `poll` does. Records before an error are delivered first, and
        those before a cancellation by the next call.
        """
        await self._ready()
        requested, deadline_ns = self._consumer._consume_arguments(num_messages, timeout)
        if requested:
            with self._receiving(requested):
                await self._asking(
                    self._consumer._poll_loop.gather, requested, requested, deadline_ns
                )
        return self._consumer._buffer.deliver(requested)

    async def poll_arrow(self, timeout_ms: float = 0) -> list[TopicBatch]:
        """Whole batches with their columns. Waits at most `timeout_ms` for the first. Raises as
        `poll` does.
        """
        await self._ready()
        consumer = self._consumer
        _, deadline_ns = consumer._poll_arguments(timeout_ms, None, {})
        gather, spans = consumer._poll_loop.gather_batches, consumer._spans
        if spans is None:
            await self._asking(gather, deadline_ns)
        else:
            found = consumer._buffer.first_batches
            await self._asking(lambda: spans.receiving_batches(gather(deadline_ns), found))
        return consumer._buffer.deliver_batches()

    async def getmany(
        self,
        *partitions: TopicPartition | list[TopicPartition],
        timeout_ms: float = 0,
        max_records: int | None = None,
    ) -> dict[TopicPartition, list[Record]]:
        """Poll as aiokafka does: records by partition, of `partitions` only if some are named."""
        found = await (
            self._poll_of(partitions, timeout_ms, max_records)
            if partitions
            else self.poll(timeout_ms, max_records)
        )
        result: dict[TopicPartition, list[Record]] = {}
        for record in found:
            result.setdefault(TopicPartition(record.topic, record.partition), []).append(record)
        return result

    async def getone(self, *partitions: TopicPartition | list[TopicPartition]) -> Record:
        """The next record, of `partitions` only if some are named. Waits without limit. Raises as
        `poll` does.
        """
        if partitions:
            return (await self._poll_of(partitions, None, 1))[0]
        if self._consumer._spans is None:
            return await self._next()
        await self._ready()
        self._consumer._check_open()
        with self._receiving(1):
            await self._asking(self._consumer._poll_loop.gather, 1, 1, None)
        return next(self._consumer._buffer.iterator)

    def _receiving(self, limit: int) -> AbstractContextManager[None]:
        """The span of a call that returns up to `limit` records."""
        spans = self._consumer._spans
        return (
            NO_SPAN
            if spans is None
            else spans.receiving(partial(self._consumer._buffer.first, limit))
        )

    async def _next(self, loop_span: LoopSpan | None = None) -> Record:
        await self._ready()
        consumer = self._consumer
        consumer._buffer.follow(consumer._fetch_loop.cursors)
        is_due = consumer._group is not None and consumer._group.is_loop_poll_due()
        while is_due or not len(consumer._buffer):
            poll_loop = consumer._poll_loop
            await self._asking(poll_loop.gather, 1, poll_loop.loop_limit, None)
            is_due = False
            if len(consumer._buffer) > 1:
                self._loop_connection.wake_watchers()  # other tasks may have waited for these
        if loop_span is not None:
            loop_span.begin(consumer._buffer.first(1)[0])
        return next(consumer._buffer.iterator)

    def __aiter__(self) -> AsyncIterator[Record]:
        """All records and new ones, until the consumer is closed."""
        spans = self._consumer._spans
        return self if spans is None else _TracedLoop(self, spans.loop())

    async def __anext__(self) -> Record:
        try:
            return await self._next()
        except ClientClosedError:
            if self._is_closing:
                raise StopAsyncIteration from None
            raise

    async def _poll_of(
        self, partitions: tuple[Any, ...], timeout_ms: float | None, max_records: int | None
    ) -> list[Record]:
        """Poll some partitions. `timeout_ms` None: no limit."""
        await self._ready()
        consumer = self._consumer
        limit, deadline_ns = consumer._poll_arguments(timeout_ms or 0, max_records, {})
        requested = {consumer._cursor(key).key for key in partitions_named(partitions)}
        with self._receiving(limit):
            await self._asking(
                consumer._poll_loop.gather_partitions,
                requested,
                limit,
                None if timeout_ms is None else deadline_ns,
            )
        return consumer._buffer.deliver(limit)

    # ---- as the plain consumer's ---------------------------------------------------------------

    assignment = _awaited(Consumer.assignment)
    partitions_for = _awaited(Consumer.partitions_for)
    topics = _awaited(Consumer.topics)
    pause = _awaited(Consumer.pause)
    resume = _awaited(Consumer.resume)
    paused = _awaited(Consumer.paused)
    seek = _awaited(Consumer.seek)
    seek_to_beginning = _awaited(Consumer.seek_to_beginning)
    seek_to_end = _awaited(Consumer.seek_to_end)
    position = _awaited(Consumer.position)
    positions = _awaited(Consumer.positions)
    lag = _awaited(Consumer.lag)
    beginning_offsets = _awaited(Consumer.beginning_offsets)
    end_offsets = _awaited(Consumer.end_offsets)
    highwater = _awaited(Consumer.highwater)
    offsets_for_times = _awaited(Consumer.offsets_for_times)
    metrics = _awaited(Consumer.metrics)
    retry_later = _awaited(Consumer.retry_later)
    group_metadata = _awaited(Consumer.group_metadata)
    consumer_group_metadata = _awaited(Consumer.consumer_group_metadata)
    memberid = _awaited(Consumer.memberid)
    commit = _awaited(Consumer.commit)
    commit_async = _awaited(Consumer.commit_async)
    committed = _awaited(Consumer.committed)
    assign = _awaited_instead(Consumer.assign)
    subscribe = _awaited_instead(Consumer.subscribe)
    unsubscribe = _awaited_instead(Consumer.unsubscribe)
    subscription = _awaited(Consumer.subscription)


Consumer._taking_steps |= {AsyncConsumer._run.__code__, AsyncConsumer._close.__code__}
