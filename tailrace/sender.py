"""What drives a producer: its callers, and a helper thread.

The caller's own thread encodes and sends when a batch is full; the helper thread only looks after linger, retries and silence, so that the caller's loop
does not fight another Python thread for the interpreter. A caller that waits for an answer drives the connection itself; others wait for it. One lock guards
everything, the socket included; callbacks are made without it.

A user's callback that raises is logged and costs nobody else anything; the helper thread logs what it did not expect and goes on, and when it cannot, every
handle ends with the error.

Owner: one Producer; every method but `wait_for`, `when_ended`, `make_callbacks`, `stop` and those marked so is called with `lock` held.
Invariants: at most one thread at a time sleeps for an answer; nothing is sent and nothing settled without the lock; once it is closed, has failed, or is in a
    child of the process that made it, it uses no socket again, and every batch has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from tailrace import kernel, live_clients
from tailrace.accumulator import NS_PER_MS, Accumulator
from tailrace.callbacks import Callbacks
from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.delivery import Delivery
from tailrace.environment import REAL, Environment, sleep_on
from tailrace.errors import BufferExhaustedError, ClientClosedError, RecordTooLargeError, TailraceError
from tailrace.handles import Handle
from tailrace.partition_queue import PartitionQueue
from tailrace.producer_batch import BATCH_OVERHEAD_BYTES, BatchState, OnDelivery, ProducerBatch
from tailrace.settings import ProducerSettings
from tailrace.topics import TopicInfo

NEVER_NS = 2**63 - 1
HELPER_FAILURES_MAX = 10
"""So often in a row the helper thread may fail in what nobody expected; then the producer fails."""
HELPER_PAUSE_NS = 100 * NS_PER_MS
CALLER_IS_ACTIVE_NS = 3 * NS_PER_MS
"""So long after a caller looked at the socket the helper thread leaves it to callers."""
OTHERS_LOOK_NS = 20 * NS_PER_MS
"""How long a thread sleeps at a time when another may take the answer that it waits for."""


class Sender:
    """See the module's docstring."""

    def __init__(self, settings: ProducerSettings, on_keyless_batch: Callable[[TopicInfo], None], environment: Environment = REAL) -> None:
        """`on_keyless_batch`: told when a batch that ended with a record without a key takes no more."""
        self._settings = settings
        self._environment = environment
        self.now_ns = environment.monotonic_ns
        self.lock = kernel.new_lock()
        self.connection = Connection(settings.bootstrap, settings.client_id, environment, "producer")
        self.callbacks = Callbacks(self.lock, self._wake_helper)
        self.accumulator = Accumulator(settings, self.now_ns, self, self.callbacks, on_keyless_batch)
        self.delivery = Delivery(settings, environment, self.connection, self.accumulator)
        self._last_io_ns = 0
        self.closed = False
        self.forked = False
        self.failure: TailraceError | None = None
        """What stopped the helper thread for good: nothing can be sent any more."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._helper_wakes_ns = 0
        self._driving = threading.Lock()
        self._driver = 0
        """The thread that sleeps for an answer, 0: none. Another that looks at the socket wakes it: the answer may have come to that one."""
        self._driver_is_rung = False
        self._driver_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        _load_what_exit_cannot()
        self._helper = threading.Thread(target=self._help, name="tailrace-producer", daemon=True)
        if environment.has_threads:
            self._helper.start()

    def check_usable(self) -> None:
        """Raise ClientClosedError when closed, or made before a fork; or what it failed of."""
        if self.forked:
            raise live_clients.forked_error("producer")
        if self.closed:
            raise _closed_error()
        if self.failure is not None:
            raise self.failure

    def after_fork(self) -> None:
        """In a child: nothing can be sent. What the parent's threads held is free; the eventfds are shared with the parent, so they are not rung here."""
        self.forked = True
        live_clients.free_in_child(self.lock)
        self._wake_fd = self._driver_fd = -1

    def stop(self) -> None:
        """End everything: what has not ended, ends with ClientClosedError; the helper thread and the socket go. Called without the lock."""
        with self.lock:
            if self.closed or self.forked:
                self.closed = True
                return
            self.closed = True
            self.accumulator.end_all(_closed_error())
            self.connection.process()
            self.connection.close()
            self._wake_helper()
        try:
            self.make_callbacks()
        finally:
            if self._helper.is_alive() and threading.current_thread() is not self._helper:
                self._helper.join()
            with self.lock:
                fds, self._wake_fd, self._driver_fd = (self._wake_fd, self._driver_fd), -1, -1
            for fd in fds:
                os.close(fd)

    def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and under way now."""
        accumulator = self.accumulator
        return {
            **self.delivery.counters(),
            "buffered_bytes": accumulator.buffered_bytes,
            "batches_in_flight": accumulator.in_flight_count,
        }

    # ---- what callers have to do -----------------------------------------------------------------------------------------------------

    def see_to(self, queue: PartitionQueue) -> None:
        """A batch was opened: without linger send it at once, if it may be; else have the helper look at it in time."""
        if self.accumulator.leaves_at_once(queue):
            self.accumulator.close_batch(queue)
            self.pump()
        elif (ends_ns := self.accumulator.first_linger_ns()) is not None and ends_ns < self._helper_wakes_ns:
            self._wake_helper()

    def close_all(self) -> None:
        """Send everything that is there now."""
        self.accumulator.close_all()
        self.pump()

    def pump(self) -> None:
        """Everything that can be done now: take in answers, send what is ready."""
        now_ns = self._last_io_ns = self.now_ns()
        self.delivery.turn(now_ns)
        if self._driver and self._driver != threading.get_ident():
            self._driver_is_rung = True
            _ring(self._driver_fd)

    def block_for_memory(self, size: int) -> None:
        """Wait, sending and receiving, until `size` bytes fit. The lock is held once. Raises BufferExhaustedError, RecordTooLargeError."""
        accumulator, memory = self.accumulator, self._settings.buffer_memory
        if size + BATCH_OVERHEAD_BYTES > memory:
            raise RecordTooLargeError(f"{size} bytes can never fit buffer_memory ({memory})")
        deadline_ns = self.now_ns() + self._settings.max_block_ms * NS_PER_MS
        self.close_all()
        while accumulator.buffered_bytes + size + BATCH_OVERHEAD_BYTES > memory:
            now_ns = self.now_ns()
            if now_ns >= deadline_ns:
                raise BufferExhaustedError(f"buffer_memory ({memory} bytes) stayed full for {self._settings.max_block_ms} ms")
            self.lock.release()
            try:
                self.connection.wait(min(deadline_ns - now_ns, OTHERS_LOOK_NS))
                self.make_callbacks()
            finally:
                self.lock.acquire()
            self.check_usable()
            self.pump()

    # ---- waiting ---------------------------------------------------------------------------------------------------------------------

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Until `batch` has ended (or split). The thread that comes first drives the connection, others wait on the batch. False: time is up."""
        deadline_ns = None if timeout is None else self.now_ns() + int(timeout * 1e9)
        with self.lock:
            if batch.has_ended():
                return True
            self.check_usable()
            queue = self.accumulator.queue_of_open(batch)
            if queue is not None:
                self.accumulator.close_batch(queue)  # a caller that waits has nothing to add
            self.pump()
        self.make_callbacks()
        while not batch.has_ended():
            now_ns = self.now_ns()
            if deadline_ns is not None and now_ns >= deadline_ns:
                return False
            if self.forked or self.failure is not None:
                self.check_usable()
            if self._driving.acquire(blocking=False):
                try:
                    self._drive_once(batch, now_ns, deadline_ns)
                finally:
                    self._driving.release()
            else:
                with self.lock:
                    if batch.waiter is None:
                        batch.waiter = threading.Event()
                    waiter = batch.waiter
                waiter.wait(0.02 if deadline_ns is None else min(0.02, (deadline_ns - now_ns) / 1e9))
            self.make_callbacks()
        return True

    def close_awaited(self, batch: ProducerBatch) -> bool:
        """A coroutine awaits the batch: it takes no more records, if it would be sent at once. False: it goes on filling, and is to be asked for again
        when an answer has come.
        """
        queue = self.accumulator.queue_of_open(batch)
        if queue is None:
            return True
        if not self.accumulator.may_take_one_more(queue):
            return False
        self.accumulator.close_batch(queue)
        return True

    def when_ended(self, handle: Handle, callback: OnDelivery) -> None:
        """Have `callback(metadata, error)` called once the record has ended: now if it has, else in whatever thread finds out."""
        with self.lock:
            batch, row = handle.resolve()
            if batch.state is not BatchState.ENDED:
                self.check_usable()  # in a child: no answer comes here
                batch.add_callback(row, callback)
                self._wake_helper()  # the thread that asks for this waits elsewhere
                return
        callback(None if batch.error else batch.metadata(row), batch.error)

    def wait_until_received(self, timeout_s: float | None) -> None:
        """With acks=0, until the front has read all that was sent. Without the lock. Raises RequestTimeoutError, NotReachableError."""
        with self.lock:
            if not self.closed:
                self.delivery.wait_until_received(timeout_s, self.lock)

    def _drive_once(self, batch: ProducerBatch, now_ns: int, deadline_ns: int | None) -> None:
        """Sleep until something may have come, then see to it. The caller has pumped before; or another thread has, and the answer came to that one."""
        with self.lock:
            if batch.has_ended():
                return
            wake_ns = self.next_wake_ns(now_ns)
            self._driver = threading.get_ident()
        if deadline_ns is not None:
            wake_ns = min(wake_ns, deadline_ns)
        if self.delivery.waits_for_answers:
            self.connection.wait(min(wake_ns - self.now_ns(), 50 * NS_PER_MS), self._driver_fd)
        elif self.accumulator.unended_count:
            self.connection.wait(min(wake_ns - self.now_ns(), 5 * NS_PER_MS), self._driver_fd)
        with self.lock:
            self._driver = 0
            if self._driver_is_rung:
                self._driver_is_rung = False
                _hush(self._driver_fd)
            if not self.closed:
                self.pump()

    def next_wake_ns(self, now_ns: int) -> int:
        """When there is something to do without an answer."""
        accumulator = self.accumulator
        times = [now_ns + 1_000 * NS_PER_MS]
        for time_ns in (self.connection.next_tick_ns(), accumulator.next_look_ns()):
            if time_ns is not None:
                times.append(time_ns)
        times += accumulator.muted_until_ns(now_ns)
        if accumulator.has_listed and self.connection.is_ready:
            times.append(now_ns + 20 * NS_PER_MS)  # waiting for credit
        if accumulator.unended_count:
            times.append(now_ns + 100 * NS_PER_MS)
        return min(times)

    def make_callbacks(self) -> None:
        """Make the calls that are due. Without the lock."""
        if self.callbacks.due:
            self.callbacks.make()

    # ---- helper ----------------------------------------------------------------------------------------------------------------------

    def _wake_helper(self) -> None:
        _ring(self._wake_fd)

    @property
    def wake_fd(self) -> int:
        """Readable when the helper, or the event loop in its place, has to look sooner than it meant to."""
        return self._wake_fd

    def look_after(self) -> int | None:
        """What the helper thread does between two sleeps, for an event loop that does it instead (`Environment.has_threads` is False). Called without the lock.

        Returns when to look again at the latest, by the monotonic clock in ns; None: only when `wake_fd` or the connection's descriptor is readable.
        """
        with self.lock:
            if self.closed or self.forked:
                return None
            _hush(self._wake_fd)
            self.pump()
            wake_ns: int | None = self.next_wake_ns(self.now_ns())
            if not self.accumulator.unended_count and (self.connection.fatal is not None or self.connection.next_tick_ns() is None):
                wake_ns = None
            self._helper_wakes_ns = NEVER_NS if wake_ns is None else wake_ns
        self.make_callbacks()
        return wake_ns

    def _help(self) -> None:
        """The helper thread: linger, retries, silence; answers only while no caller looks after them."""
        failures = 0
        while True:
            try:
                if not self._help_once():
                    return
                failures = 0
            except BaseException as error:  # also what a callback raises to end a thread: this one is not its own
                failures += 1
                logger.error("the producer's helper thread failed, %d times in a row", failures, exc_info=error)
                if failures >= HELPER_FAILURES_MAX:
                    self._fail(error)
                    return
                self._environment.sleep_on((), HELPER_PAUSE_NS)

    def _help_once(self) -> bool:
        """See to what is due, then sleep until something is; False: the producer has ended."""
        with self.lock:
            if self.closed or self.forked:
                return False
            _hush(self._wake_fd)
            now_ns = self.now_ns()
            caller_is_active = now_ns - self._last_io_ns < CALLER_IS_ACTIVE_NS
            linger_ends_ns = self.accumulator.first_linger_ns()
            linger_due = linger_ends_ns is not None and linger_ends_ns <= now_ns
            if not caller_is_active or linger_due:
                last_io_ns = self._last_io_ns
                self.pump()
                self._last_io_ns = last_io_ns if caller_is_active else self._last_io_ns
            wake_ns = self.next_wake_ns(now_ns)
            waits_for_answers = self.delivery.waits_for_answers
            if caller_is_active:
                wake_ns = min(wake_ns, now_ns + 5 * NS_PER_MS) if self.accumulator.unended_count else wake_ns
            self._helper_wakes_ns = wake_ns
        self.make_callbacks()
        if self._wake_fd < 0:
            return False  # a callback has closed the producer
        remaining_ns = max(NS_PER_MS, wake_ns - self.now_ns())
        if waits_for_answers and not caller_is_active and not self._driving.locked():
            self.connection.wait(remaining_ns, self._wake_fd)
        else:
            sleep_on((self._wake_fd,), remaining_ns)
        return True

    def _fail(self, error: BaseException) -> None:
        """Nothing looks after linger and retries any more: say so on every handle, and to every caller."""
        with self.lock:
            self.failure = TailraceError(f"the producer failed in a way that it should not ({type(error).__name__}: {error})")
            self.accumulator.end_all(self.failure)
        self.make_callbacks()


def _ring(fd: int) -> None:
    try:
        os.eventfd_write(fd, 1)
    except OSError:
        pass  # it is ringing, or closed


def _hush(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except OSError:
        pass  # it does not ring, or is closed


def _closed_error() -> ClientClosedError:
    return ClientClosedError("the producer is closed")


def _load_what_exit_cannot() -> None:
    """pyarrow loads pandas, where there is one, with the first array it makes; a program's exit is too late for that, and a producer that was not
    closed may encode its first batch there. pandas needs only this to be loaded in time.
    """
    import concurrent.futures.thread  # noqa: F401
