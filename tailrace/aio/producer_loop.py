"""A producer that an event loop drives, in the place of the sender's helper thread.

Owner: one event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace.aio.event_loop import LoopConnection, is_running_here
from tailrace.client.connections.steps import Steps
from tailrace.core.errors import TailraceError
from tailrace.core.records import RecordMetadata
from tailrace.kernel import fast_send
from tailrace.producer.futures import RecordFuture
from tailrace.producer.producer import Producer
from tailrace.producer.record_appender import Outgoing
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.producer.transactions.operations import Transactions


class LoopProducer(Producer):
    """A Producer without a helper thread, and its sends as steps."""

    @property
    def sender_thread(self) -> SenderThread:
        return self._sender_thread

    @property
    def transactions(self) -> Transactions:
        """Its transactions. Raises InvalidTransactionError without transactional_id."""
        return self._transactional()

    def last_steps(self, timeout_s: float | None) -> Steps[None]:
        """The steps of `close` before the producer ends."""
        return self._last_steps(timeout_s)

    @fast_send(RecordFuture)
    def begin_send(self, *args: Any, **kwargs: Any) -> RecordFuture | Outgoing:
        """Do what `send` can do without waiting, with the same arguments. An Outgoing is for
        `send_when_possible`.
        """
        return self._begin_send(*args, **kwargs)

    def send_in_order(
        self, begin: Callable[[], RecordFuture | Outgoing], start_ns: int
    ) -> Steps[RecordFuture]:
        """A whole `send`."""
        begun = begin()
        return (
            (yield from self._finish_send(begun, start_ns))
            if isinstance(begun, Outgoing)
            else begun
        )

    def send_when_possible(self, outgoing: Outgoing, start_ns: int) -> Steps[RecordFuture]:
        """The rest of a `send` that has to wait, for max_block_ms since `start_ns`."""
        return self._finish_send(outgoing, start_ns)


class ProducerLoopConnection(LoopConnection):
    """A producer's connection, and the work of its helper thread."""

    def __init__(self, kind: str, producer: LoopProducer) -> None:
        super().__init__(kind, producer.sender_thread.connection)
        self._sender_thread = producer.sender_thread
        self._due_ns: int | None = None
        self._last_received_count = 0
        """Number of received messages at the last run."""
        self._is_run_scheduled = False

    @property
    def has_started(self) -> bool:
        """True once the producer was used in an event loop."""
        return self._loop is not None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        super()._begin(loop)
        loop.add_reader(self._sender_thread.helper.wake_fd, self.run_once)
        self._is_run_scheduled = False
        self.run_soon()

    def detach(self) -> None:
        if self._loop is not None and not self._loop.is_closed() and not self._is_closed:
            self._loop.remove_reader(self._sender_thread.helper.wake_fd)
        super().detach()

    def after_send(self) -> None:
        """Schedule a run after a send, if that may have changed the next due time."""
        if (
            self._due_ns is None
            or self.connection.received_count != self._last_received_count
            or self._sender_thread.callbacks.due
        ):
            self.run_soon()

    def run_soon(self) -> None:
        """Schedule a run after the tasks that are ready now."""
        if not self._is_run_scheduled and not self._is_closed:
            self._is_run_scheduled = True
            self.loop.call_soon(self._run_scheduled)

    def _run_scheduled(self) -> None:
        if self._is_run_scheduled:  # else a received message has caused a run since
            self.run_once()

    def run_timers(self) -> None:
        self._is_run_scheduled = False
        self._due_ns = self._sender_thread.helper.run_timers()
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
        """Keep the connection of a producer that is garbage. Its records are still delivered, by
        the loop while it runs, else at the program's exit.
        """

    def fail(self) -> None:
        self.detach()
        self._sender_thread.stop()

    def ended(self, handle: RecordFuture) -> asyncio.Future[None]:
        """A future that is done when the record is completed. Its batch is sent with the next run,
        if it may be.
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
            return  # at the program's exit there are no waits
        if is_running_here(loop):
            _set(future)
        else:
            loop.call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
