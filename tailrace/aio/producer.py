"""Sending from a coroutine: `tailrace.Producer`, its methods awaited, driven by the event loop in the place of the sender's thread.

A batch is sent when it is full, when its linger is over, or, if a coroutine awaits one of its records, with the loop's next turn: what the other tasks send
in this turn goes with it. While a request with such batches is under way it fills until the answer has come, so that many tasks that await each record of
theirs share batches (see `tailrace.produce_request`).

Owner: one event loop's thread. (At the program's exit, a producer that was not closed is, in the main thread, without the loop.)
Invariants: as those of `tailrace.producer`; a `send` that is cancelled while it waits has sent nothing; sends to one topic that wait go on in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from tailrace.aio.client import AsyncClient
from tailrace.aio.driver import IN_A_LOOP, Answers, Driver, Question, WouldWait, is_running_here
from tailrace.arguments import timeout_s_of
from tailrace.delivery import RECEIVED_TIMEOUT_MS
from tailrace.errors import BufferExhaustedError, RequestTimeoutError, TailraceError
from tailrace.formats.arrow_batch import Headers
from tailrace.handles import BatchesHandle, Handle
from tailrace.other_names import OtherProducerNames, TransactionsLater
from tailrace.pending_call import PendingCall
from tailrace.producer import Producer
from tailrace.producer_batch import OnDelivery
from tailrace.producer_topics import Route
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api
from tailrace.record_checks import Delay
from tailrace.records import BatchMetadata, RecordMetadata
from tailrace.recurrence import Recurrence
from tailrace.sender import Sender
from tailrace.settings import ProducerOptions

if TYPE_CHECKING:
    from tailrace.arrow_frames import Frame, Piece

NS_PER_MS = 1_000_000
TURN_AFTER_SENDS = 256
"""After so many sends in a row that waited for nothing, the loop's other tasks have their turn."""
EXIT_AFTER_ERROR_S = 5.0
T = TypeVar("T")
_open_producers: set[LoopProducer] = set()
"""Kept until they are closed: what was sent is delivered at exit at the latest, also when the program has forgotten its producer."""


class LoopProducer(Producer):
    """A Producer that an event loop drives."""

    answers = Answers()

    @property
    def sender(self) -> Sender:
        return self._sender

    def _call(self, api: Api, request: dict[str, Any], timeout_ms: int) -> dict[str, Any]:
        return self.answers.take(Question(api, request, timeout_ms, None))

    def cut(
        self,
        topic: str,
        frame: Frame,
        key_column: str | None,
        partition: int | None,
        timestamp: datetime | int | None,
        delay: Delay,
        delay_column: str | None,
    ) -> tuple[Route, Iterator[Piece]]:
        """The batches of a frame, and where they go."""
        return self._pieces(topic, frame, key_column, partition, timestamp, delay, delay_column)

    def send_piece(self, route: Route, piece: Piece) -> Handle:
        """One of those batches."""
        return self._send_piece(route, piece)


class ProducerDriver(Driver):
    """A producer's connection, and what its helper thread would do."""

    def __init__(self, kind: str, producer: LoopProducer) -> None:
        super().__init__(kind, producer, producer.sender.connection)
        self._sender = producer.sender
        self._due_ns: int | None = None
        self._looked_at = 0
        """How many messages had come when everything was looked after."""
        self._turn_is_coming = False

    @property
    def has_begun(self) -> bool:
        """Whether an event loop has met the producer."""
        return self._loop is not None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._begin(loop)
        loop.add_reader(self._sender.wake_fd, self.turn)
        self._turn_is_coming = False
        self.turn_soon()

    def detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and not self._is_closed:
            self._loop.remove_reader(self._sender.wake_fd)
        super().detach()

    def after_send(self) -> None:
        """Something was sent beside the turns: have everything looked after again if that may have changed what is due."""
        if self._due_ns is None or self.connection.received_count != self._looked_at or self._sender.callbacks.due:
            self.turn_soon()

    def turn_soon(self) -> None:
        """A turn, when the tasks that are ready now have had theirs."""
        if not self._turn_is_coming and not self._is_closed:
            self._turn_is_coming = True
            self.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        if self._turn_is_coming:  # else there has been one since, for what came
            self.turn()

    def look_after(self) -> None:
        self._turn_is_coming = False
        self._due_ns = self._sender.look_after()
        self._looked_at = self.connection.received_count
        self.wake_watchers()

    def settle(self) -> None:
        if self._is_closed or self._loop is None:
            return
        with self._sender.lock:
            super().settle()
        self.after_send()

    def due_ns(self) -> int | None:
        return self._due_ns

    def forget(self) -> None:
        """What was sent is delivered all the same: by the loop while it runs, else at the program's exit."""

    def fail(self) -> None:
        self.detach()
        self._sender.stop()

    def _step(self, pending: PendingCall) -> Response | None:
        try:
            with self._sender.lock:
                return pending.step()
        finally:
            self.settle()

    def ended(self, handle: Handle) -> asyncio.Future[None]:
        """A future that is done when the record has ended. Its batch is sent with the next turn, if it may be."""
        self.enter()
        future: asyncio.Future[None] = self.loop.create_future()
        with self._sender.lock:
            self._sender.accumulator.hurry(handle.resolve()[0])
        self._sender.when_ended(handle, partial(self._on_end, future))
        return future

    def _on_end(self, future: asyncio.Future[None], _metadata: RecordMetadata | None, _error: TailraceError | None) -> None:
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


class AsyncHandle:
    """The fate of a record that is being sent. `await` it for its RecordMetadata, or its error. Awaited, it is not cancelled: the record is under way.

    As of an `asyncio.Future`: `done()`; `result()` and `exception()` once it is done, before that they raise asyncio.InvalidStateError.
    """

    __slots__ = ("_driver", "_handle")

    def __init__(self, handle: Handle, driver: ProducerDriver) -> None:
        self._handle = handle
        self._driver = driver

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

    def add_done_callback(self, callback: Callable[[AsyncHandle], None]) -> None:
        """Have the loop call `callback(handle)` once the record has ended."""
        self._driver.ended(self._handle).add_done_callback(lambda _: callback(self))

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        while not self._handle.done():
            yield from self._driver.ended(self._handle)
        return self.result()


class AsyncBatchesHandle:
    """The fate of a frame that is being sent. `await` it for the BatchMetadata of its batches, or the first error."""

    __slots__ = ("_driver", "_handle")

    def __init__(self, handle: BatchesHandle, driver: ProducerDriver) -> None:
        self._handle = handle
        self._driver = driver

    def done(self) -> bool:
        return self._handle.done()

    def exception(self) -> TailraceError | None:
        """The first error among the batches, or None. Raises asyncio.InvalidStateError when not all have ended."""
        if not self._handle.done():
            raise asyncio.InvalidStateError("not everything has ended; await the handle")
        return self._handle.exception(0)

    def result(self) -> list[BatchMetadata]:
        """Where each batch went, in the order of the rows within each partition. Raises the first error."""
        error = self.exception()
        if error is not None:
            raise error
        return self._handle.result(0)

    def __await__(self) -> Generator[Any, None, list[BatchMetadata]]:
        for handle in self._handle.unended():
            yield from self._driver.ended(handle)
        return self.result()


class AsyncProducer(AsyncClient, TransactionsLater, OtherProducerNames):
    """`tailrace.Producer` for coroutines: the same settings, methods and errors; each method is awaited.

        async with AsyncProducer("tcp://127.0.0.1:7420") as producer:
            handle = await producer.send("orders", b"...", key=b"u1")    # it is in the buffer: waits for room, at first for the topic's metadata
            metadata = await handle                                        # it is acknowledged: RecordMetadata, or its error
            metadata = await producer.send_and_wait("orders", b"...")      # both

    Any number of tasks may use it. `on_delivery` is called by the event loop. Neither it nor `start()` waits for the appliance; the first `send` does.
    """

    def __init__(self, bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None, **settings: Unpack[ProducerOptions]) -> None:
        """As `Producer`. Raises InvalidSettingError."""
        self._producer = LoopProducer(bootstrap, environment=IN_A_LOOP, **settings)
        self._driver: ProducerDriver = ProducerDriver(type(self).__name__, self._producer)
        self._gates: dict[str, asyncio.Lock] = {}
        """topic -> through which its sends go one by one while one of them waits."""
        self._room_gate = asyncio.Lock()
        """Held by the one send that is the next to find room in the buffer."""
        self._send_count = 0

    # ---- sending -----------------------------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        repeat: Recurrence | None = None,
    ) -> AsyncHandle:
        """Add one record to its partition's batch, as `Producer.send` with the same arguments and errors. What is awaited: room in the buffer
        (`buffer_memory`) and, the first time, the topic's metadata, for at most `max_block_ms`. Await the handle for the acknowledgement.
        """
        attempt = partial(
            self._producer.send, topic, value, key, headers, partition, timestamp, on_delivery=on_delivery, deliver_at=deliver_at,
            deliver_after=deliver_after, repeat=repeat,
        )  # fmt: skip
        self._send_count += 1
        return AsyncHandle(await self._send(topic, attempt, self._send_count % TURN_AFTER_SENDS == 0), self._driver)

    async def send_and_wait(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        repeat: Recurrence | None = None,
    ) -> RecordMetadata:
        """`send`, and await its acknowledgement. Raises the record's error."""
        handle = await self.send(
            topic, value, key, headers, partition, timestamp, on_delivery=on_delivery, deliver_at=deliver_at, deliver_after=deliver_after,
            repeat=repeat,
        )  # fmt: skip
        return await handle

    async def send_arrow(
        self,
        topic: str,
        frame: Frame,
        *,
        key_column: str | None = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        delay_column: str | None = None,
    ) -> AsyncBatchesHandle:
        """Send the rows of a frame, as `Producer.send_arrow` with the same arguments and errors. What is awaited: room in the buffer, batch by batch; when this
        is cancelled, batches at the frame's beginning may be under way. Await the handle for the acknowledgements.
        """
        delay = Delay(deliver_at, deliver_after, None)
        cut = partial(self._producer.cut, topic, frame, key_column, partition, timestamp, delay, delay_column)
        self._driver.enter()
        route, pieces = await self._when_possible(topic, cut)
        handles = [await self._send(topic, partial(self._producer.send_piece, route, piece), True) for piece in pieces]
        return AsyncBatchesHandle(BatchesHandle(handles), self._driver)

    async def _send(self, topic: str, attempt: Callable[[], Handle], yields: bool) -> Handle:
        """`yields`: let the loop's other tasks have their turn first."""
        self._driver.enter()
        if yields:
            await asyncio.sleep(0)
        if topic in self._gates or self._room_gate.locked():
            return await self._when_possible(topic, attempt)
        try:
            handle = attempt()
        except WouldWait:
            return await self._when_possible(topic, attempt)
        self._driver.after_send()
        return handle

    async def _when_possible(self, topic: str, attempt: Callable[[], T]) -> T:
        """What an attempt returns when its topic is known and there is room. Those that wait go on in their order."""
        start_ns = self._driver.connection.now_ns()
        _open_producers.add(self._producer)
        gate = self._gates.setdefault(topic, asyncio.Lock())
        try:
            async with gate:
                if not self._room_gate.locked():
                    try:
                        return await self._driver.run(attempt, start_ns)
                    except WouldWait:
                        pass
                async with self._room_gate:
                    return await self._when_there_is_room(attempt, start_ns)
        finally:
            if not gate.locked() and self._gates.get(topic) is gate:
                del self._gates[topic]

    async def _when_there_is_room(self, attempt: Callable[[], T], start_ns: int) -> T:
        settings = self._producer.settings
        deadline_ns = start_ns + settings.max_block_ms * NS_PER_MS
        while True:
            self._driver.enter()
            with self._driver.watching() as wait:
                try:
                    return await self._driver.run(attempt, start_ns)
                except WouldWait:
                    pass
                if self._driver.connection.now_ns() >= deadline_ns:
                    raise BufferExhaustedError(f"buffer_memory ({settings.buffer_memory} bytes) stayed full for {settings.max_block_ms} ms")
                await wait(deadline_ns)

    # ---- the rest ------------------------------------------------------------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until every record sent before this call has ended. Raises RequestTimeoutError after `timeout` seconds; errors of
        records are on their handles.
        """
        timeout_s = timeout_s_of(timeout)
        self._driver.enter()
        try:
            async with asyncio.timeout(timeout_s):
                await self._flush()
        except TimeoutError:
            raise RequestTimeoutError(f"not everything was acknowledged within {timeout} s") from None

    async def _flush(self) -> None:
        sender = self._producer.sender
        with sender.lock:
            sender.check_usable()
            batches = [Handle((batch, 0)) for queue in sender.accumulator.queues.values() for batch in queue.batches()]
            sender.close_all()
        self._driver.turn_soon()
        for handle in BatchesHandle(batches).unended():
            await self._driver.ended(handle)
        if self._producer.settings.acks == 0 and sender.metrics()["batches_sent"]:
            # What is still in a socket when that is closed may be lost with it: the front answers a ping when it has read what came before.
            await self._driver.call(Api.PING, [], RECEIVED_TIMEOUT_MS)

    async def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers. Raises UnknownTopicError."""
        return await self._operate(self._producer.partitions_for, topic)

    async def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and under way now."""
        self._driver.enter()
        return self._producer.metrics()

    async def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds (None: as long as delivery_timeout_ms lets records live), then end; what is left ends with ClientClosedError."""
        timeout_s = timeout_s_of(timeout)
        if self._is_closed:
            return
        self._driver.enter_to_close()
        try:
            if self._driver.has_begun:
                await self.flush(timeout_s)
        except TailraceError:
            pass  # what was not delivered ends below, on its handle
        finally:
            self._end(self._producer.sender.stop)
            _open_producers.discard(self._producer)

    async def __aexit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        # After an exception there is no reason to wait for long: what is under way may still arrive.
        await self.close(timeout=None if kind is None else EXIT_AFTER_ERROR_S)
