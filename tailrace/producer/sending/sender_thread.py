"""Drives the sender: by a helper thread, and by callers that wait or append.

One lock guards everything, the socket included. Callbacks run without it. `helper_thread` has the
thread, `caller_polling` says which thread handles responses, `critical_section` how state survives
a signal handler.

Owner: one Producer. All methods are called with `lock` held. The exceptions are `do`, `stop`,
    `wait_for`, `add_done_callback`, `make_callbacks`, `sleep_until` and operations (`Steps`).
Invariants:
- At most one thread at a time sleeps for a response.
- Nothing is sent and no batch is completed without the lock.
- Once it is closed, has failed, or is in a child process, it uses no socket, and every batch is
  completed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TypeVar

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import SYSTEM, Runtime
from tailrace.client.connections.steps import Steps, Wait
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core import fork
from tailrace.core.errors import ClientClosedError, InvalidTransactionError, TailraceError
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.batches.callbacks import Callbacks
from tailrace.producer.batches.producer_batch import (
    COMPLETED,
    IN_FLIGHT,
    OnDelivery,
    ProducerBatch,
    Resolves,
)
from tailrace.producer.futures import FrameFuture, RecordFuture
from tailrace.producer.sending.buffer_pool import BufferPool
from tailrace.producer.sending.caller_polling import CALLER_IS_ACTIVE_NS, CallerPolling
from tailrace.producer.sending.critical_section import CriticalSection
from tailrace.producer.sending.helper_thread import HelperThread, clear_wakeup, wakeup
from tailrace.producer.sending.producer_id import MakeIdentity
from tailrace.producer.sending.sender import Sender

T = TypeVar("T")
WAIT_SLICE_NS = 20 * NS_PER_MS
"""Longest sleep of a thread at a time while another thread may receive its response."""
CALLBACKS_WAIT_NS = 5_000 * NS_PER_MS
"""The longest time that a close waits for the callbacks of other threads."""


class SenderThread:
    """The runs of the sender, and the waits of callers."""

    def __init__(
        self,
        settings: ProducerSettings,
        on_keyless_batch: Callable[[TopicInfo], None],
        runtime: Runtime = SYSTEM,
        make_identity: MakeIdentity | None = None,
    ) -> None:
        """`on_keyless_batch` is called when a batch closes whose last record has no key.
        `make_identity`: see `Sender`.
        """
        self._runtime = runtime
        self.now_ns = runtime.monotonic_ns
        self.section = CriticalSection(self._repair)
        self.lock = self.section.lock
        self.do = self.section.run
        self.connection = Connection(
            settings.bootstrap_servers, settings.client_id, runtime, "producer"
        )
        self.helper = HelperThread(self, runtime)
        self.callbacks = Callbacks(self.lock, self.helper.wake)
        self.accumulator = RecordAccumulator(
            settings, self.now_ns, self, self.callbacks, on_keyless_batch
        )
        self.sender = Sender(settings, runtime, self.connection, self.accumulator, make_identity)
        self.polling = CallerPolling(
            self.now_ns, self.accumulator, self.sender, self.run_once, self.helper.wake_at
        )
        self.buffer = BufferPool(
            settings, self.now_ns, self.accumulator,
            self._flush_all, self._poll_for_room, self.helper.wake,
        )  # fmt: skip
        self.is_closing = False
        """`close` has begun: records are taken from callbacks alone, whose outcome it awaits."""
        self.is_sealed = False
        """`close` awaits the last outcomes: no more records are taken."""
        self.closed = False
        self.is_stopped = False
        """True once every batch is completed, the thread has ended, and descriptors are closed."""
        self.forked = False
        self.failure: TailraceError | None = None
        """The error that ended the helper thread. Nothing can be sent any more."""
        self._driver = 0
        """The thread that sleeps for a response, 0 if there is none. Another thread that receives
        something wakes it.
        """
        self._driver_is_woken = False
        self._seen = 0, 0
        """(thread that used the connection last, number of messages received by then)."""
        self._driver_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_running_once = False
        if runtime.has_threads:
            self.helper.start()

    def check_usable(self) -> None:
        """Raise ClientClosedError if it is closed or from before a fork, or the error that it
        failed with.
        """
        if self.forked:
            raise fork.forked_error("producer")
        if self.closed:
            raise _closed_error()
        if self.failure is not None:
            raise self.failure

    def check_may_add(self) -> None:
        """Raise as `check_usable` does, while it is closing, or since no transaction is open."""
        self._check_takes_records()
        self.sender.check_may_add()

    def _check_takes_records(self) -> None:
        self.check_usable()
        if self.is_closing and (self.is_sealed or not self.callbacks.is_called_here()):
            raise ClientClosedError(
                "the producer is closed: its close() has begun and takes no more records, so this "
                "one was not sent; end the threads and tasks that send before you close it"
            )

    def check_transaction(self, number: int) -> None:
        """Raise InvalidTransactionError unless this transaction is still the last one."""
        if number != self.sender.transaction:
            raise InvalidTransactionError(
                "the transaction ended while send() waited for room or metadata; nothing was sent: "
                "await each send before the commit"
            )

    def after_fork(self) -> None:
        """Stop being usable, in a child process. The eventfds are the parent's too, so nothing is
        written to them.
        """
        self.forked = True
        fork.free_in_child(self.lock)
        self._driver_fd = -1
        self.helper.detach()

    def begin_closing(self) -> None:
        """Take no more records, except from callbacks. Batches that are open take some until they
        close.
        """
        self.is_closing = True

    def seal(self) -> None:
        """Take no more records from callbacks either."""
        self.is_closing = self.is_sealed = True

    def seal_if_done(self) -> bool:
        """`seal`, unless a record has no outcome or a callback is due."""
        if self.accumulator.incomplete_count or self.callbacks:
            return False
        self.seal()
        return True

    def stop(self) -> None:
        """Fail incomplete records with ClientClosedError, and end the thread and the socket."""
        if self.forked:
            self.closed = True
        if self.is_stopped or self.forked:
            return
        self.do(self._stop)
        try:
            self.make_callbacks()
        finally:
            # `called_back` has waited for callbacks, as long as the close may
            is_in_callback = self.callbacks.is_called_by(self.helper.thread.ident)
            self.helper.join(0.0 if is_in_callback else CALLBACKS_WAIT_NS / 1e9)
            with self.lock:
                self.is_stopped = True
                fds, self._driver_fd = [self._driver_fd, *self.helper.detach()], -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)

    def _stop(self) -> None:
        self.closed = True
        self.accumulator.end_each(_closed_error_of)
        self.connection.process()
        self.connection.close()
        self.helper.wake()
        self._wake_driver()

    def _repair(self, connection_is_torn: bool) -> None:
        """Repair the state after an interrupted section."""
        if self.closed or self.forked or self.failure is not None:
            self.accumulator.rebuild(keeps_flight=True)
            if self.failure is not None:
                self.accumulator.end_all(self.failure)
            else:
                self.accumulator.end_each(_closed_error_of)
        elif connection_is_torn:
            self.sender.restart()
        else:
            self.accumulator.rebuild(keeps_flight=True)

    def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and in flight now."""
        accumulator = self.accumulator
        return {
            **self.sender.counters(),
            "buffered_bytes": accumulator.buffered_bytes,
            "batches_in_flight": accumulator.in_flight_count,
            "throttled": self.connection.throttled_count,
            "throttled_ms": self.connection.throttled_ms,
        }

    # ---- runs of the sender ----------------------------------------------------------------------

    def close_all(self) -> None:
        """Send everything now."""
        self.accumulator.close_all()
        self.accumulator.expire_linger(self.now_ns())  # else a wait ends with that of a closed one
        self.helper.cancel_alarm()
        self.run_once(sends_first=True)

    def use_connection(self, function: Callable[[], T]) -> T:
        """Run a section that uses the connection outside of the sender's runs."""
        with self.lock:
            received = self.connection.received_count
            try:
                return self.section.use_connection(function)
            finally:
                self._note_used(received)

    def run_once(self, *, sends_first: bool = False) -> None:
        """Run the sender once: handle responses, send what is due. `sends_first`: in the other
        order.

        Within a run of the same thread, in a signal handler or a destructor, it only wakes the
        helper thread. A nested run could number or send a batch twice.
        """
        if self.section.is_inside:
            self._pump(sends_first)
        else:
            self.do(self._pump, sends_first)

    def _pump(self, sends_first: bool) -> None:
        if self._is_running_once:
            self.helper.wake()
            return
        section = self.section
        now_ns = self.polling.polled_ns = self.now_ns()
        received = self.connection.received_count
        self._is_running_once = section.connection_is_torn = True
        try:
            self.sender.run_once(now_ns, sends_first=sends_first)
            section.connection_is_torn = False
        finally:
            self._is_running_once = False
        self._note_used(received)

    def _note_used(self, received: int) -> None:
        """This thread has used the connection, which had received so many messages before. What has
        come may be what the driver waits for.
        """
        connection, me = self.connection, get_ident()
        self._seen = me, connection.received_count
        if self._driver not in (0, me) and (
            connection.received_count != received or not connection.is_ready
        ):
            self._wake_driver()

    def _wake_driver(self) -> None:
        self._driver_is_woken = True
        wakeup(self._driver_fd)

    def next_wake_ns(self, now_ns: int) -> int:
        """The time of the next run that is due without a response."""
        accumulator = self.accumulator
        wake_ns = now_ns + (100 if accumulator.incomplete_count else 1_000) * NS_PER_MS
        if self.sender.waits_for_credit:
            wake_ns = min(wake_ns, now_ns + 50 * NS_PER_MS)
        tick_ns, linger_ns = self.connection.next_tick_ns(), accumulator.first_linger_ns()
        if tick_ns is not None and tick_ns < wake_ns:
            wake_ns = tick_ns
        if linger_ns is not None and linger_ns < wake_ns:
            wake_ns = linger_ns
        return accumulator.first_retry_ns(now_ns, wake_ns)

    def make_callbacks(self) -> None:
        """Call the callbacks that are due. Called without the lock."""
        if self.callbacks.due:
            self.callbacks.make()

    # ---- waits of callers ------------------------------------------------------------------------

    def room(self, size: int, start_ns: int) -> Steps[None]:
        """Wait for `size` bytes of buffer memory, for max_block_ms since `start_ns`. Raises
        BufferExhaustedError, RecordTooLargeError.
        """
        self.check_may_wait()
        yield from self.buffer.wait(size, start_ns)

    def _flush_all(self) -> None:
        self.do(self.close_all)

    def _poll_for_room(self) -> None:
        self._check_takes_records()
        self.do(self._pump, False)

    def ended(self, batches: Sequence[ProducerBatch], deadline_ns: int | None) -> Steps[bool]:
        """Wait until these batches, and the parts of split ones, are completed. False: it is past
        `deadline_ns`.
        """
        for handle in FrameFuture([RecordFuture((batch, 0)) for batch in batches]).incomplete():
            while not handle[0].is_done():
                if deadline_ns is not None and self.now_ns() >= deadline_ns:
                    return False
                yield Wait(deadline_ns)
                if self.failure is not None or self.forked:
                    self.check_usable()
                self.do(self._pump, False)
        return True

    def settled(self, is_settled: Callable[[], bool], deadline_ns: int | None) -> Steps[bool]:
        """Wait until `is_settled`, called in a section, returns True. False: it is past
        `deadline_ns`. Raises what `is_settled` does.
        """
        while not self.do(is_settled):
            if deadline_ns is not None and self.now_ns() >= deadline_ns:
                return False
            yield Wait(deadline_ns)
            self.do(self._pump, False)
        return True

    def called_back(self, deadline_ns: int | None) -> Steps[None]:
        """Make the callbacks that are due, and wait until other threads have returned from theirs,
        for at most CALLBACKS_WAIT_NS.
        """
        self.make_callbacks()
        end_ns = self.now_ns() + CALLBACKS_WAIT_NS
        if deadline_ns is not None:
            end_ns = min(end_ns, deadline_ns)
        while self.callbacks.is_called_elsewhere() and (now_ns := self.now_ns()) < end_ns:
            yield Wait(min(end_ns, now_ns + WAIT_SLICE_NS))

    def received(self, timeout_s: float | None) -> Steps[None]:
        """With acks=0, wait until the front has read everything that was sent. Raises
        RequestTimeoutError, NotReachableError.
        """
        if not self.closed:
            yield from self.sender.wait_until_received(timeout_s, self.use_connection)

    def sleep_until(self, until_ns: int | None) -> None:
        """Sleep until something may have come, or until that time. Called without the lock."""
        now_ns, me = self.now_ns(), get_ident()
        with self.lock:
            wake_ns = self.next_wake_ns(now_ns)
            # Else another thread may have received the response since this one looked for it.
            drives = (
                self._driver in (0, me)
                and self._seen == (me, self.connection.received_count)
                and self.connection.is_ready  # else another thread may open another socket
            )
            if drives:
                self._driver = me
            else:
                wake_ns = min(wake_ns, now_ns + WAIT_SLICE_NS)
            if until_ns is not None:
                wake_ns = min(wake_ns, until_ns)
            self.polling.until_ns = wake_ns + CALLER_IS_ACTIVE_NS
        try:
            if wake_ns > now_ns:
                self.connection.wait(wake_ns - now_ns, self._driver_fd if drives else -1)
        finally:
            if drives:
                self._driver = 0
        with self.lock:
            self._stop_driving()
        self.make_callbacks()

    def _stop_driving(self) -> None:
        """After a sleep for a response. A wake-up may be that of another driver by now."""
        if self._driver_is_woken and not self._driver:
            self._driver_is_woken = False
            clear_wakeup(self._driver_fd)
        self.polling.until_ns = self.now_ns() + CALLER_IS_ACTIVE_NS

    def end_wait(self) -> None:
        """An operation has ended, perhaps before its response. Called without the lock."""
        if not self.polling.helper_listens and self.accumulator.incomplete_count:
            with self.lock:
                self.polling.leave_responses()

    def check_may_wait(self) -> None:
        """Raise TailraceError within a run of the sender in this thread. That run has the socket,
        and goes on only when this returns.
        """
        with self.lock:  # a run of another thread ends before
            is_within_run = self._is_running_once
        if is_within_run:
            raise TailraceError(
                "cannot wait for the producer inside a signal handler or destructor that "
                "interrupted the producer itself; send there, and call result() or flush() outside "
                "of it"
            )

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Wait until `batch` is completed. False: `timeout` seconds have passed.

        The first thread drives the connection, others wait on the batch.
        """
        deadline_ns = None if timeout is None else self.now_ns() + int(timeout * 1e9)
        if batch.state is not IN_FLIGHT or self._is_running_once:
            self.do(self._flush_now, batch)
        self.make_callbacks()
        try:
            return self._wait_for(batch, deadline_ns)
        finally:
            self.end_wait()

    def _wait_for(self, batch: ProducerBatch, deadline_ns: int | None) -> bool:
        while not batch.is_done():
            now_ns = self.now_ns()
            if deadline_ns is not None and now_ns >= deadline_ns:
                return False
            if self.forked or self.failure is not None:
                self.check_usable()
            if not self._drive_once(batch, now_ns, deadline_ns):
                with self.lock:
                    if batch.waiter is None:
                        batch.waiter = threading.Event()
                    waiter = batch.waiter
                if not batch.is_done():
                    waiter.wait(
                        0.02 if deadline_ns is None else min(0.02, (deadline_ns - now_ns) / 1e9)
                    )
            self.make_callbacks()
        return True

    def _flush_now(self, batch: ProducerBatch) -> None:
        """Send the batch without linger: the caller waits for it."""
        if not batch.is_done():
            self.check_usable()
            self.check_may_wait()
            if batch.state is not IN_FLIGHT:
                self.accumulator.flush_batch(batch)
                self.run_once()

    def _drive_once(self, batch: ProducerBatch, now_ns: int, deadline_ns: int | None) -> bool:
        """Sleep until something may have come, then run the sender. False: another thread sleeps.

        The caller has run the sender before, or another thread has received its response.
        """
        me = get_ident()
        with self.lock:
            if batch.is_done():
                return True
            # This thread itself may be noted: a signal handler waits within, or interrupted, its
            # wait.
            if self._driver not in (0, me):
                return False
            wake_ns = self.next_wake_ns(now_ns)
            self._driver = me
            self.polling.until_ns = min(wake_ns, now_ns + 50 * NS_PER_MS) + CALLER_IS_ACTIVE_NS
        try:
            if deadline_ns is not None:
                wake_ns = min(wake_ns, deadline_ns)
            if self.sender.waits_for_answers or self.sender.waits_for_credit:
                self.connection.wait(min(wake_ns - self.now_ns(), 50 * NS_PER_MS), self._driver_fd)
            elif self.accumulator.incomplete_count:
                self.connection.wait(min(wake_ns - self.now_ns(), 5 * NS_PER_MS), self._driver_fd)
        finally:
            self._driver = 0
        with self.lock:
            self._stop_driving()
            if not self.closed:
                self.run_once()
        return True

    def add_done_callback(self, record: Resolves, callback: OnDelivery) -> None:
        """Call `callback(metadata, error)` once the record is completed, or now if it is."""
        if not self.do(self._call_when_ended, record, callback):
            batch, row = record.resolve()
            callback(None if batch.error else batch.metadata(row), batch.error)

    def _call_when_ended(self, record: Resolves, callback: OnDelivery) -> bool:
        batch, row = record.resolve()
        if batch.state is COMPLETED:
            return False
        self.check_usable()  # in a child process no response comes
        batch.add_callback(row, callback)
        self.helper.wake()  # the calling thread waits elsewhere
        return True

    def fail(self, error: BaseException) -> None:
        """Fail every record and every later call: no thread handles linger and retries any more."""
        self.failure = TailraceError(
            f"internal error in the producer: {type(error).__name__}: {error}; please report it"
        )
        self.do(self.accumulator.end_all, self.failure)
        self._wake_driver()
        self.make_callbacks()


def _closed_error() -> ClientClosedError:
    return ClientClosedError("the producer is closed")


def _closed_error_of(batch: ProducerBatch) -> ClientClosedError:
    """The error of a batch without an outcome. One that was sent twice may be stored even if it was
    refused the second time.
    """
    if batch.was_sent or batch.attempts > 1:
        return ClientClosedError(
            "the producer was closed before this record was acknowledged: it may be stored, or not"
        )
    return ClientClosedError(
        "the producer was closed before this record was sent: it is not stored"
    )
