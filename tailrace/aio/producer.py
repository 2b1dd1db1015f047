"""Sending from a coroutine: `tailrace.Producer`, its methods awaited, driven by the event loop in
the place of the sender's thread.

A batch is sent when it is full, when its linger is over, or, if a coroutine awaits one of its
records, with the loop's next turn: what the other tasks send in this turn goes with it. While a
request with such batches is under way it fills until the answer has come, so that many tasks that
await each record of theirs share batches (see `tailrace.producer.sending.in_flight_requests`).

Owner: one event loop's thread. (At the program's exit, a producer that was not closed is, in the
    main thread, without the loop.)
Invariants: as those of `tailrace.producer.producer`; a `send` that is cancelled while it waits has
sent nothing; sends to one topic that wait go on in their order.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from tailrace.aio.client import AsyncClient
from tailrace.aio.event_loop import LOOP_RUNTIME, LoopConnection, is_running_here
from tailrace.client.kafka_names import RenamedProducerMethods, UnsupportedTransactions
from tailrace.client.settings import ProducerOptions
from tailrace.client.steps import PAUSE, Steps, steps_of
from tailrace.core.errors import TailraceError
from tailrace.core.records import BatchMetadata, RecordMetadata
from tailrace.core.validation import timeout_s_of
from tailrace.kernel import fast_send
from tailrace.producer.futures import FrameFuture, RecordFuture
from tailrace.producer.producer import Producer
from tailrace.producer.record_appender import Outgoing
from tailrace.producer.sending.sender_thread import SenderThread

YIELD_AFTER_SENDS = 256
"""After so many sends in a row that waited for nothing, the loop's other tasks have their turn."""
EXIT_AFTER_ERROR_S = 5.0
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
_open_producers: set[LoopProducer] = set()
"""Kept until they are closed: what was sent is delivered at exit at the latest, also when the
program has forgotten its producer.
"""


class LoopProducer(Producer):
    """A Producer that an event loop drives."""

    @property
    def sender_thread(self) -> SenderThread:
        return self._sender_thread

    @fast_send(RecordFuture)
    def begin_send(self, *args: Any, **kwargs: Any) -> RecordFuture | Outgoing:
        """`send` as far as it goes without waiting, with the same arguments; an Outgoing is to be
        given to `send_when_possible`.
        """
        return self._begin_send(*args, **kwargs)

    def send_in_order(
        self, begin: Callable[[], RecordFuture | Outgoing], start_ns: int, *, pauses: bool
    ) -> Steps[RecordFuture]:
        """A whole `send`. `pauses`: after the loop's other tasks have run."""
        if pauses:
            yield PAUSE
        begun = begin()
        return (
            (yield from self._records.finish(begun, start_ns))
            if isinstance(begun, Outgoing)
            else begun
        )

    def send_when_possible(self, outgoing: Outgoing, start_ns: int) -> Steps[RecordFuture]:
        """The rest of a `send` that has to wait, for max_block_ms since `start_ns`."""
        return self._records.finish(outgoing, start_ns)


class Gate:
    """Order of what is sent to one topic while something waits: first come, first served.

    Callers are numbered as they arrive. While one waits for room or metadata, it holds the gate and
    the others queue. When it has sent, all of them are woken at once, in order, so that what they
    send shares batches; one that has to wait holds the gate again, and those behind it queue again.

    Owner: the loop's thread.

    Invariants:
    - At most one caller holds the gate.
    - A caller sends after every caller that arrived before it has sent, failed or been cancelled.
    """

    __slots__ = ("_is_locked", "_last_arrival", "_waiters", "_woken", "user_count")

    def __init__(self) -> None:
        self._is_locked = False
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        """Heap of those that wait, by arrival number."""
        self._woken: set[int] = set()
        """Arrival numbers of those that were woken and have not run yet."""
        self._last_arrival = 0
        self.user_count = 0
        """Callers inside. The gate stands for as long as there are any."""

    async def acquire(self) -> None:
        """Wait for the turn, then hold the gate. Cancelled, it holds nothing."""
        arrival = self._last_arrival = self._last_arrival + 1
        must_wait = self._is_locked or bool(self._woken) or bool(self._waiters)
        while must_wait:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (arrival, waiter)
            heapq.heappush(self._waiters, entry)
            try:
                await waiter
            except BaseException:
                if entry in self._waiters:
                    self._waiters.remove(entry)
                    heapq.heapify(self._waiters)
                self._woken.discard(arrival)
                self._wake()
                raise
            self._woken.discard(arrival)
            must_wait = self._is_locked
        self._is_locked = True

    def release(self) -> None:
        """Let the others go on."""
        self._is_locked = False
        self._wake()

    def _wake(self) -> None:
        if self._is_locked or self._woken:
            return  # whoever holds it, or the last of those that run now, wakes the rest
        while self._waiters:
            arrival, waiter = heapq.heappop(self._waiters)
            if not waiter.done():
                self._woken.add(arrival)
                waiter.set_result(None)


def _like(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a coroutine function the arguments of another method, for type checkers and for
    `inspect.signature`.
    """

    def decorate(function: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        given = inspect.signature(method)
        returned = function.__annotations__["return"]
        function.__signature__ = given.replace(return_annotation=returned)  # type: ignore[attr-defined]
        function.__annotations__ = {
            **{name: each.annotation for name, each in given.parameters.items() if name != "self"},
            "return": returned,
        }
        return function

    return decorate


class ProducerLoopConnection(LoopConnection):
    """A producer's connection, and what its helper thread would do."""

    def __init__(self, kind: str, producer: LoopProducer) -> None:
        super().__init__(kind, producer.sender_thread.connection)
        self._sender_thread = producer.sender_thread
        self._due_ns: int | None = None
        self._last_received_count = 0
        """How many messages had come when everything was looked after."""
        self._is_run_scheduled = False

    @property
    def has_started(self) -> bool:
        """Whether an event loop has met the producer."""
        return self._loop is not None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._begin(loop)
        loop.add_reader(self._sender_thread.wake_fd, self.run_once)
        self._is_run_scheduled = False
        self.run_soon()

    def detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and not self._is_closed:
            self._loop.remove_reader(self._sender_thread.wake_fd)
        super().detach()

    def after_send(self) -> None:
        """Something was sent beside the turns: have everything looked after again if that may have
        changed what is due.
        """
        if (
            self._due_ns is None
            or self.connection.received_count != self._last_received_count
            or self._sender_thread.callbacks.due
        ):
            self.run_soon()

    def run_soon(self) -> None:
        """A turn, when the tasks that are ready now have had theirs."""
        if not self._is_run_scheduled and not self._is_closed:
            self._is_run_scheduled = True
            self.loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        if self._is_run_scheduled:  # else there has been one since, for what came
            self.run_once()

    def run_timers(self) -> None:
        self._is_run_scheduled = False
        self._due_ns = self._sender_thread.run_timers()
        self._last_received_count = self.connection.received_count
        self.wake_watchers()

    def settle(self) -> None:
        if self._is_closed or self._loop is None:
            return
        self._sender_thread.use_connection(super().settle)
        self.after_send()

    def due_ns(self) -> int | None:
        return self._due_ns

    def forget(self) -> None:
        """What was sent is delivered all the same: by the loop while it runs, else at the program's
        exit.
        """

    def fail(self) -> None:
        self.detach()
        self._sender_thread.stop()

    def ended(self, handle: RecordFuture) -> asyncio.Future[None]:
        """A future that is done when the record has ended. Its batch is sent with the next turn, if
        it may be.
        """
        self.enter()
        future: asyncio.Future[None] = self.loop.create_future()
        self._sender_thread.do(self._sender_thread.accumulator.flush_batch, handle.resolve()[0])
        self._sender_thread.add_done_callback(handle, partial(self._on_end, future))
        return future

    def _on_end(
        self,
        future: asyncio.Future[None],
        _metadata: RecordMetadata | None,
        _error: TailraceError | None,
    ) -> None:
        loop = future.get_loop()
        if loop.is_closed():
            return  # at the program's exit, when nobody waits any more
        if is_running_here(loop):
            _set(future)
        else:
            loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncRecordFuture:
    """The fate of a record that is being sent. `await` it for its RecordMetadata, or its error.
    Awaited, it is not cancelled: the record is under way.

    As of an `asyncio.Future`: `done()`; `result()` and `exception()` once it is done, before that
    they raise asyncio.InvalidStateError.
    """

    __slots__ = ("_handle", "_loop_connection")

    def __init__(self, handle: RecordFuture, loop_connection: ProducerLoopConnection) -> None:
        self._handle = handle
        self._loop_connection = loop_connection

    def __repr__(self) -> str:
        return f"<Async{repr(self._handle)[1:]}"

    def done(self) -> bool:
        return self._handle.done()

    def exception(self) -> TailraceError | None:
        """The error that the record ended with, or None."""
        if not self._handle.done():
            raise asyncio.InvalidStateError("the record has not ended; await its handle")
        return self._handle.exception(0)

    def result(self) -> RecordMetadata:
        """Where the record went. Raises its error."""
        error = self.exception()
        if error is not None:
            raise error
        return self._handle.result(0)

    def add_done_callback(self, callback: Callable[[AsyncRecordFuture], None]) -> None:
        """Have the loop call `callback(handle)` once the record has ended."""
        self._loop_connection.ended(self._handle).add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        while not self._handle.done():
            yield from self._loop_connection.ended(self._handle)
        return self.result()


class AsyncFrameFuture:
    """The fate of a frame that is being sent. `await` it for the BatchMetadata of its batches, or
    the first error.
    """

    __slots__ = ("_handle", "_loop_connection")

    def __init__(self, handle: FrameFuture, loop_connection: ProducerLoopConnection) -> None:
        self._handle = handle
        self._loop_connection = loop_connection

    def done(self) -> bool:
        return self._handle.done()

    def exception(self) -> TailraceError | None:
        """The first error among the batches, or None. Raises asyncio.InvalidStateError when not all
        have ended.
        """
        if not self._handle.done():
            raise asyncio.InvalidStateError("not everything has ended; await the handle")
        return self._handle.exception(0)

    def result(self) -> list[BatchMetadata]:
        """Where each batch went, in the order of the rows within each partition. Raises the first
        error.
        """
        error = self.exception()
        if error is not None:
            raise error
        return self._handle.result(0)

    def __await__(self) -> Generator[Any, None, list[BatchMetadata]]:
        for handle in self._handle.incomplete():
            yield from self._loop_connection.ended(handle)
        return self.result()


class AsyncProducer(AsyncClient, UnsupportedTransactions, RenamedProducerMethods):
    """`tailrace.Producer` for coroutines: the same settings, methods and errors; each method is
    awaited.

        async with AsyncProducer("tcp://127.0.0.1:7420") as producer:
            handle = await producer.send("orders", b"...", key=b"u1")    # it is in the buffer: waits for room, at first for the topic's metadata
            metadata = await handle                                        # it is acknowledged: RecordMetadata, or its error
            metadata = await producer.send_and_wait("orders", b"...")      # both

    Any number of tasks may use it. `on_delivery` is called by the event loop. Neither it nor
    `start()` waits for the appliance; the first `send` does.
    """  # noqa: E501

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """As `Producer`. Raises InvalidSettingError."""
        self._producer = LoopProducer(bootstrap, runtime=LOOP_RUNTIME, **settings)
        self._loop_connection: ProducerLoopConnection = ProducerLoopConnection(
            type(self).__name__, self._producer
        )
        self._gates: dict[str, Gate] = {}
        """topic -> through which what is sent to it goes one by one, while something of it
        waits.
        """
        self._send_count = 0

    # ---- sending ---------------------------------------------------------------------------------

    @_like(Producer.send)
    async def send(self, topic: str, *args: Any, **kwargs: Any) -> AsyncRecordFuture:
        """Add one record to its partition's batch, as `Producer.send` with the same arguments and
        errors. What is awaited: room in the buffer (`buffer_memory`) and, the first time, the
        topic's metadata, for at most `max_block_ms`. Await the handle for the acknowledgement.
        Records go to each partition in the order of the calls. Cancelled while it waits, it has
        sent nothing.
        """
        loop_connection, producer = self._loop_connection, self._producer
        loop_connection.enter()
        self._send_count += 1
        is_gated = bool(self._gates) and topic in self._gates
        if is_gated or not self._send_count % YIELD_AFTER_SENDS:
            # Each YIELD_AFTER_SENDS-th lets the loop's other tasks have their turn before it.
            now_ns = loop_connection.connection.now_ns()
            begin = partial(producer.begin_send, topic, *args, **kwargs)
            return AsyncRecordFuture(
                await self._in_order(
                    topic, producer.send_in_order(begin, now_ns, pauses=not is_gated)
                ),
                loop_connection,
            )
        begun = producer.begin_send(topic, *args, **kwargs)
        if isinstance(begun, Outgoing):
            begun = await self._in_order(
                topic, producer.send_when_possible(begun, loop_connection.connection.now_ns())
            )
        else:
            loop_connection.after_send()
        return AsyncRecordFuture(begun, loop_connection)

    async def _in_order(self, topic: Any, steps: Steps[T]) -> T:
        """Take the steps of what sends to a topic, after those that have come before."""
        _open_producers.add(self._producer)
        if not isinstance(topic, str):
            return await self._run(steps)  # which says what a topic is
        gate = self._gates.get(topic)
        if gate is None:
            gate = self._gates[topic] = Gate()
        gate.user_count += 1
        try:
            await gate.acquire()
            try:
                return await self._run(steps)
            finally:
                gate.release()
        finally:
            steps.close()
            gate.user_count -= 1
            if not gate.user_count:
                del self._gates[topic]

    @_like(Producer.send)
    async def send_and_wait(self, *args: Any, **kwargs: Any) -> RecordMetadata:
        """`send`, and await its acknowledgement. Raises the record's error."""
        return await (await self.send(*args, **kwargs))

    @_like(Producer.send_arrow)
    async def send_arrow(self, topic: str, *args: Any, **kwargs: Any) -> AsyncFrameFuture:
        """Send the rows of a frame, as `Producer.send_arrow` with the same arguments and errors.
        What is awaited: room in the buffer, batch by batch; when this is cancelled, batches at the
        frame's beginning may be under way. Await the handle for the acknowledgements.
        """
        steps = steps_of(Producer.send_arrow)(self._producer, topic, *args, **kwargs)
        return AsyncFrameFuture(await self._in_order(topic, steps), self._loop_connection)

    # ---- the rest --------------------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until every record sent before this call has ended. Raises
        RequestTimeoutError after `timeout` seconds; errors of records are on their handles.
        """
        await self._run(steps_of(Producer.flush)(self._producer, timeout))

    async def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers. Raises UnknownTopicError."""
        return await self._run(steps_of(Producer.partitions_for)(self._producer, topic))

    async def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and under way now."""
        self._loop_connection.enter()
        return self._producer.metrics()

    async def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds (None: as long as delivery_timeout_ms lets records
        live), then end; what is left ends with ClientClosedError.
        """
        timeout_s = timeout_s_of(timeout)
        if self._is_closed:
            return
        self._loop_connection.enter_to_close()
        try:
            if self._loop_connection.has_started:
                await self.flush(timeout_s)
        except TailraceError:
            pass  # what was not delivered ends below, on its handle
        finally:
            self._end(self._producer.sender_thread.stop)
            _open_producers.discard(self._producer)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # After an exception there is no reason to wait for long: what is under way may still
        # arrive.
        await self.close(timeout=None if kind is None else EXIT_AFTER_ERROR_S)
