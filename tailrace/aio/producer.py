"""`tailrace.Producer` for asyncio, driven by the event loop.

A batch is sent when it is full, when its linger is over, or with the loop's next run if a coroutine
awaits one of its records. Records that other tasks send in that run go with it. While a request
with such batches is in flight, open batches fill until its response. Tasks that await each of their
records thus share batches (see `tailrace.producer.sending.in_flight_requests`).

Owner: one event loop's thread. At the program's exit the main thread closes producers that were not
    closed, without the loop.
Invariants: those of `tailrace.producer.producer`, and
- A `send` that is cancelled while it waits has sent nothing.
- Sends to one topic that wait go on in their order.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from tailrace.aio.client import AsyncClient
from tailrace.aio.event_loop import LOOP_RUNTIME
from tailrace.aio.futures import AsyncFrameFuture, AsyncRecordFuture
from tailrace.aio.producer_loop import LoopProducer, ProducerLoopConnection
from tailrace.aio.send_gate import SendGate
from tailrace.aio.transaction_block import AsyncTransactionBlock
from tailrace.client.config.kafka_names import RenamedProducerMethods
from tailrace.client.config.settings import ProducerOptions
from tailrace.client.connections.steps import Steps, steps_of
from tailrace.client.records.attached_records import AttachesRecords
from tailrace.core.errors import TailraceError
from tailrace.core.records import (
    ConsumerGroupMetadata,
    OffsetAndMetadata,
    Record,
    RecordMetadata,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.transaction_branches import (
    FinishedBranch,
    PreparedTransaction,
    TransactionBranch,
)
from tailrace.core.validation import timeout_s_of
from tailrace.kernel import LoopSender
from tailrace.producer.futures import RecordFuture
from tailrace.producer.producer import Producer
from tailrace.producer.record_appender import Outgoing

YIELD_AFTER_SENDS = 1024
"""Consecutive sends without a wait after which the loop's other tasks run: about 0.3 ms."""
EXIT_AFTER_ERROR_S = 5.0
T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")
_open_producers: set[LoopProducer] = set()
"""Producers that sends have waited for, kept until they are closed. Their records are delivered at
exit at the latest, even if the program drops its producer.
"""


def _like(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a coroutine function another method's arguments, for type checkers and
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


class AsyncProducer(LoopSender, AsyncClient, RenamedProducerMethods):
    """`tailrace.Producer` for coroutines: the same settings, methods and errors. Each method is
    awaited.

        async with AsyncProducer("tcp://127.0.0.1:7420") as producer:
            future = await producer.send("orders", b"...", key=b"u1")    # buffered: waits for room, at first for the topic's metadata
            metadata = await future                                        # acknowledged: RecordMetadata, or its error
            metadata = await producer.send_and_wait("orders", b"...")      # both

    Any number of tasks may use it. `on_delivery` is called by the event loop. The first `send`
    waits for the appliance; the constructor and `start()` do not.
    """  # noqa: E501

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """Take the settings of `Producer`. Raises InvalidSettingError."""
        self._producer = LoopProducer(bootstrap, runtime=LOOP_RUNTIME, **settings)
        self._loop_connection: ProducerLoopConnection = ProducerLoopConnection(
            type(self).__name__, self._producer
        )
        self._gates: dict[str, SendGate] = {}
        """topic -> the gate of its sends, while one of them waits."""
        self._begin_loop_sends(
            self._producer, self._loop_connection, self._gates, asyncio._get_running_loop,
            AsyncRecordFuture, YIELD_AFTER_SENDS,
        )  # fmt: skip

    # ---- sending ---------------------------------------------------------------------------------

    @_like(Producer.send)
    async def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Any = None,
        partition: Any = None,
        timestamp: Any = None,
        _keywords_from_here: None = None,
        on_delivery: Any = None,
        deliver_at: Any = None,
        deliver_after: Any = None,
        repeat: Any = None,
    ) -> AsyncRecordFuture:
        """Add one record to its partition's batch, with the arguments and errors of
        `Producer.send`. It waits for room in the buffer (`buffer_memory`) and, the first time, for
        the topic's metadata, for at most `max_block_ms`. Await the future for the acknowledgement.
        Records go to each partition in the order of the calls. Cancelled while it waits, it has
        sent nothing.
        """
        # For most records the call of a coroutine costs more than the record. CPython calls
        # functions without keyword-only parameters faster, and copies their frame: it is small.
        future: AsyncRecordFuture | None = self._sent_now(
            topic, value, key, headers, partition, timestamp, _keywords_from_here, on_delivery,
            deliver_at, deliver_after, repeat,
        )  # fmt: skip
        if future is not None:
            return future
        if _keywords_from_here is not None:
            raise TypeError("send() takes from 2 to 7 positional arguments but more were given")
        return await self._send_slowly(
            topic,
            partial(
                self._producer.begin_send, topic, value, key, headers, partition, timestamp,
                on_delivery=on_delivery, deliver_at=deliver_at, deliver_after=deliver_after,
                repeat=repeat,
            ),
        )  # fmt: skip

    async def _send_slowly(
        self, topic: Any, begin: Callable[[], RecordFuture | Outgoing]
    ) -> AsyncRecordFuture:
        """A whole `send` that may have to wait. `begin` does what can be done without waiting."""
        loop_connection, producer = self._loop_connection, self._producer
        loop_connection.enter()
        self._send_in(loop_connection.loop)
        self.send_count += 1
        now_ns = loop_connection.connection.now_ns
        if bool(self._gates) and topic in self._gates:
            future = await self._in_order(topic, producer.send_in_order(begin, now_ns()))
            return AsyncRecordFuture(future, loop_connection)
        if isinstance(topic, str) and not self.send_count % YIELD_AFTER_SENDS:
            # The loop's other tasks run before it. Steps for it would cost as much as 200 records.
            _open_producers.add(producer)
            start_ns = now_ns()
            async with self._gated(topic):
                await asyncio.sleep(0)
                loop_connection.enter()
                begun = begin()
                if isinstance(begun, Outgoing):
                    begun = await self._run(producer.send_when_possible(begun, start_ns))
                else:
                    loop_connection.after_send()
            return AsyncRecordFuture(begun, loop_connection)
        begun = begin()
        if isinstance(begun, Outgoing):
            begun = await self._in_order(topic, producer.send_when_possible(begun, now_ns()))
        else:
            loop_connection.after_send()
        return AsyncRecordFuture(begun, loop_connection)

    async def _in_order(self, topic: Any, steps: Steps[T]) -> T:
        """Run a send to a topic, after those that came before."""
        _open_producers.add(self._producer)
        if not isinstance(topic, str):
            return await self._run(steps)  # raises the error of a topic that is no text
        try:
            async with self._gated(topic):
                return await self._run(steps)
        finally:
            steps.close()

    @contextlib.asynccontextmanager
    async def _gated(self, topic: str) -> AsyncIterator[None]:
        """The time of one send to a topic, behind those that came before."""
        gate = self._gates.get(topic)
        if gate is None:
            gate = self._gates[topic] = SendGate()
        gate.user_count += 1
        try:
            await gate.acquire()
            try:
                yield
            finally:
                gate.release()
        finally:
            gate.user_count -= 1
            if not gate.user_count:
                del self._gates[topic]

    @_like(Producer.send)
    async def send_and_wait(self, *args: Any, **kwargs: Any) -> RecordMetadata:
        """Send a record and await its acknowledgement. Raises the record's error."""
        return await (await self.send(*args, **kwargs))

    @_like(Producer.send_arrow)
    async def send_arrow(self, topic: str, *args: Any, **kwargs: Any) -> AsyncFrameFuture:
        """Send the rows of a frame, with the arguments and errors of `Producer.send_arrow`. It
        waits for room in the buffer, batch by batch. Cancelled, it may have sent the first batches
        of the frame. Await the handle for the acknowledgements.
        """
        steps = steps_of(Producer.send_arrow)(self._producer, topic, *args, **kwargs)
        return AsyncFrameFuture(await self._in_order(topic, steps), self._loop_connection)

    # ---- transactions ----------------------------------------------------------------------------

    async def init_transactions(
        self, timeout: float | None = None, *, keep_prepared: bool = False
    ) -> PreparedTransaction | None:
        """`Producer.init_transactions`."""
        return await self._run(
            steps_of(Producer.init_transactions)(
                self._producer, timeout, keep_prepared=keep_prepared
            )
        )

    async def begin_transaction(self) -> None:
        """`Producer.begin_transaction`."""
        await self._run(steps_of(Producer.begin_transaction)(self._producer))

    async def send_offsets_to_transaction(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        group_metadata: ConsumerGroupMetadata | str,
    ) -> None:
        """`Producer.send_offsets_to_transaction`."""
        await self._run(
            steps_of(Producer.send_offsets_to_transaction)(self._producer, offsets, group_metadata)
        )

    async def send_acknowledgements_to_transaction(
        self,
        share_consumer: AttachesRecords,
        records: Record | Iterable[Record],
        outcome: str = "accept",
    ) -> None:
        """`Producer.send_acknowledgements_to_transaction`."""
        await self._run(
            steps_of(Producer.send_acknowledgements_to_transaction)(
                self._producer, share_consumer, records, outcome
            )
        )

    async def cancel_delays(
        self, delay_ids: str | Iterable[str], *, topic: str | None = None
    ) -> dict[str, TailraceError | None]:
        """`Producer.cancel_delays`. Cancelled, the transaction can only be aborted."""
        return await self._run(
            steps_of(Producer.cancel_delays)(self._producer, delay_ids, topic=topic)
        )

    async def reschedule_delays(
        self, dues: Mapping[str, datetime], *, topic: str | None = None
    ) -> dict[str, str | TailraceError]:
        """`Producer.reschedule_delays`. Cancelled, the transaction can only be aborted."""
        return await self._run(
            steps_of(Producer.reschedule_delays)(self._producer, dues, topic=topic)
        )

    async def create_transaction_branches(self, count: int) -> list[TransactionBranch]:
        """`Producer.create_transaction_branches`."""
        return await self._run(
            steps_of(Producer.create_transaction_branches)(self._producer, count)
        )

    async def finish_branch(self, timeout: float | None = None) -> FinishedBranch:
        """`Producer.finish_branch`."""
        return await self._run(steps_of(Producer.finish_branch)(self._producer, timeout))

    async def commit_transaction(
        self,
        timeout: float | None = None,
        *,
        branches: Iterable[FinishedBranch] | None = None,
    ) -> None:
        """`Producer.commit_transaction`. Cancelled, it may be called again, which finds out the
        outcome.
        """
        await self._run(
            steps_of(Producer.commit_transaction)(self._producer, timeout, branches=branches)
        )

    async def prepare_transaction(
        self,
        tag: str = "",
        timeout: float | None = None,
        *,
        branches: Iterable[FinishedBranch] | None = None,
    ) -> PreparedTransaction:
        """`Producer.prepare_transaction`. Cancelled, it may be called again."""
        return await self._run(
            steps_of(Producer.prepare_transaction)(self._producer, tag, timeout, branches=branches)
        )

    async def complete_transaction(
        self, prepared: PreparedTransaction | None, timeout: float | None = None
    ) -> bool:
        """`Producer.complete_transaction`."""
        return await self._run(
            steps_of(Producer.complete_transaction)(self._producer, prepared, timeout)
        )

    async def abort_transaction(self, timeout: float | None = None) -> None:
        """`Producer.abort_transaction`."""
        await self._run(steps_of(Producer.abort_transaction)(self._producer, timeout))

    def transaction(self) -> AsyncTransactionBlock:
        """`Producer.transaction`, as `async with producer.transaction():`."""
        return AsyncTransactionBlock(self._producer.transactions, self._run)

    # ---- the rest --------------------------------------------------------------------------------

    async def flush(self, timeout: float | None = None) -> None:
        """Send everything now, and wait until every record sent before has an outcome. The records'
        futures have their errors. Raises RequestTimeoutError after `timeout` seconds.
        """
        await self._run(steps_of(Producer.flush)(self._producer, timeout))

    async def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers. Raises UnknownTopicError."""
        return await self._run(steps_of(Producer.partitions_for)(self._producer, topic))

    async def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and in flight now."""
        self._loop_connection.enter()
        return self._producer.metrics()

    async def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (None: no limit but the records'
        delivery_timeout_ms), then end. Records without an outcome by then fail with
        ClientClosedError, which says if they may be stored. An open transaction is aborted.

        From its beginning on, `send` raises ClientClosedError in other tasks, and nothing of it is
        stored. Callbacks may send.
        """
        timeout_s = timeout_s_of(timeout)
        if self._is_closed:
            return
        self._loop_connection.enter_to_close()
        try:
            if self._loop_connection.has_started:
                await self._run(self._producer.last_steps(timeout_s))
        except TailraceError:
            pass  # `stop` fails the records that were not delivered
        finally:
            self._end(self._producer.sender_thread.stop)
            _open_producers.discard(self._producer)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # After an exception a long wait has no use. Sent records may still arrive.
        await self.close(timeout=None if kind is None else EXIT_AFTER_ERROR_S)
