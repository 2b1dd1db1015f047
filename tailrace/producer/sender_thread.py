"""What drives a producer: its callers, and a helper thread.

Who looks after answers. Each answer may let the next request leave, so it is taken in as soon as it comes: by the helper thread, which sleeps on the socket, or
by a caller that waits for an answer and sleeps there in its place. But a caller that never sleeps keeps the interpreter's lock, and the helper thread would get
it only after `sys.getswitchinterval()`, 5 ms, and then take it from the caller for every answer. So a caller that adds records looks at the socket itself
every LOOK_EVERY_NS: an open batch is given memory in pieces that last about so long, and with each piece it looks. While callers that were running all the
time (by their CPU clock) look, the helper thread leaves answers to them. One lock guards everything, the socket included; callbacks are made without it.

A user's callback that raises is logged and costs nobody else anything; the helper thread logs what it did not expect and goes on, and when it cannot, every
handle ends with the error.

Owner: one Producer; every method but `wait_for`, `when_ended`, `make_callbacks`, `stop` and those marked so is called with `lock` held.
Invariants: at most one thread at a time sleeps for an answer; nothing is sent and nothing settled without the lock; once it is closed, has failed, or is in a
    child of the process that made it, it uses no socket again, and every batch has ended.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from time import thread_time_ns

from tailrace import kernel, live_clients
from tailrace.accumulator import NS_PER_MS, RESERVE_BYTES, Accumulator
from tailrace.callbacks import Callbacks
from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.delivery import Delivery
from tailrace.environment import REAL, Environment, sleep_on
from tailrace.errors import BufferExhaustedError, ClientClosedError, RecordTooLargeError, TailraceError
from tailrace.handles import Handle
from tailrace.partition_queue import PartitionQueue
from tailrace.producer_batch import BATCH_OVERHEAD_BYTES, ENDED, IN_FLIGHT, OnDelivery, ProducerBatch
from tailrace.settings import ProducerSettings
from tailrace.topics import TopicInfo

NEVER_NS = 2**63 - 1
HELPER_FAILURES_MAX = 10
"""So often in a row the helper thread may fail in what nobody expected; then the producer fails."""
HELPER_PAUSE_NS = 100 * NS_PER_MS
HELPER_SLEEP_MIN_NS = 100_000
CALLER_IS_ACTIVE_NS = 3 * NS_PER_MS
"""So long after a caller looked at the socket that sleeps on it, or does not sleep at all, the helper thread leaves it to callers."""
LOOK_EVERY_NS = 200_000
PIECE_MIN_BYTES = 512
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
        self._looked_ns = 0
        """When anybody last looked at the socket."""
        self._callers_look_until_ns = 0
        """Until then the helper thread leaves answers to callers."""
        self._piece_given_ns = 0
        self._running = 0, 0, 0
        """(thread, its CPU time, the time) of the caller that was last given a piece of memory."""
        self.closed = False
        self.forked = False
        self.failure: TailraceError | None = None
        """What stopped the helper thread for good: nothing can be sent any more."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._helper_may_be_rung = True
        """Whether its last sleep was ended by the descriptor that wakes it: to read that in vain costs an exception for every answer."""
        self._helper_wakes_ns = 0
        self._driving = threading.Lock()
        self._driver = 0
        """The thread that sleeps for an answer, 0: none. Another that looks at the socket wakes it: the answer may have come to that one."""
        self._driver_is_rung = False
        self._driver_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_pumping = False
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
        """A batch was opened: send it at once, if it may be; else have the helper look at it in time."""
        if queue.is_due:
            if self.delivery.may_send_unfilled:
                self.pump(sends_first=True)
        elif (ends_ns := self.accumulator.first_linger_ns()) is not None and ends_ns < self._helper_wakes_ns:
            self._helper_wakes_ns = ends_ns  # one ring is enough, however long it waits for the interpreter's lock
            self._wake_helper()

    def begin_piece(self) -> None:
        """A batch was opened, and gets its first piece of memory."""
        self._piece_given_ns = self.now_ns()

    def look_between(self) -> None:
        """A caller adds to a batch that takes another piece of memory: see the module's docstring."""
        now_ns = self.now_ns()
        accumulator = self.accumulator
        since_ns = now_ns - self._piece_given_ns
        self._piece_given_ns = now_ns
        if since_ns < LOOK_EVERY_NS // 2:
            accumulator.piece_bytes = min(RESERVE_BYTES, accumulator.piece_bytes * 2)
        elif since_ns > LOOK_EVERY_NS * 2:
            accumulator.piece_bytes = max(PIECE_MIN_BYTES, accumulator.piece_bytes // 2)
        if accumulator.in_flight_count and now_ns - self._looked_ns >= LOOK_EVERY_NS // 2:
            self._note_running(now_ns)
            self.pump()

    def pump_full(self, queue: PartitionQueue) -> None:
        """A caller has filled a batch: send it if it may be, else at least have its bytes ready, and look for answers now and then."""
        now_ns = self.now_ns()
        self._note_running(now_ns)
        if self.delivery.may_leave(queue) or now_ns - self._looked_ns >= LOOK_EVERY_NS // 2:
            self.pump()
        if queue.ready:
            self.delivery.encode_ahead(queue)

    def _note_running(self, now_ns: int) -> None:
        """Find out whether a caller does nothing but run: then it takes in the answers."""
        thread, then_cpu_ns, then_ns = self._running
        cpu_ns = thread_time_ns()
        self._running = get_ident(), cpu_ns, now_ns
        if thread == self._running[0] and (cpu_ns - then_cpu_ns) * 4 > (now_ns - then_ns) * 3:
            self._callers_look_until_ns = now_ns + CALLER_IS_ACTIVE_NS

    def close_all(self) -> None:
        """Send everything that is there now."""
        self.accumulator.close_all()
        self.pump()

    def pump(self, *, sends_first: bool = False) -> None:
        """Everything that can be done now: take in answers, send what is due (`sends_first`: the other way round). Begun by a signal's handler or a destructor
        in the midst of this thread's own turn, it is left to the helper: a turn within a turn could number or send a batch twice.
        """
        if self._is_pumping:
            self._wake_helper()
            return
        now_ns = self._looked_ns = self.now_ns()
        received = self.connection.received_count
        self._is_pumping = True
        try:
            self.delivery.turn(now_ns, sends_first=sends_first)
        finally:
            self._is_pumping = False
        if self._driver and self.connection.received_count != received and self._driver != get_ident():
            self._driver_is_rung = True
            _ring(self._driver_fd)

    def block_for_memory(self, size: int) -> None:
        """Wait, sending and receiving, until `size` bytes fit. The lock is held once. Raises BufferExhaustedError, RecordTooLargeError."""
        self._check_may_wait()
        accumulator, memory = self.accumulator, self._settings.buffer_memory
        if size + BATCH_OVERHEAD_BYTES > memory:
            raise RecordTooLargeError(f"{size} bytes can never fit buffer_memory ({memory})")
        deadline_ns = self.now_ns() + self._settings.max_block_ms * NS_PER_MS
        self.close_all()
        while accumulator.buffered_bytes + size + BATCH_OVERHEAD_BYTES > memory:
            now_ns = self.now_ns()
            if now_ns >= deadline_ns:
                raise BufferExhaustedError(f"buffer_memory ({memory} bytes) stayed full for {self._settings.max_block_ms} ms")
            self._callers_look_until_ns = now_ns + OTHERS_LOOK_NS + CALLER_IS_ACTIVE_NS
            self.lock.release()
            try:
                self.connection.wait(min(deadline_ns - now_ns, OTHERS_LOOK_NS))
                self.make_callbacks()
            finally:
                self.lock.acquire()
            self.check_usable()
            self.pump()

    # ---- waiting ---------------------------------------------------------------------------------------------------------------------

    def _check_may_wait(self) -> None:
        """Raise TailraceError where no answer could come: what was interrupted has the socket, and goes on only when this returns."""
        if self._is_pumping:
            raise TailraceError(
                "a signal's handler or a destructor waits for this producer, in the midst of its own work; let it send, and wait elsewhere"
            )

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Until `batch` has ended (or split). The thread that comes first drives the connection, others wait on the batch. False: time is up."""
        deadline_ns = None if timeout is None else self.now_ns() + int(timeout * 1e9)
        if batch.state is not IN_FLIGHT or self._is_pumping:
            with self.lock:
                if batch.has_ended():
                    return True
                self.check_usable()
                self._check_may_wait()
                if batch.state is not IN_FLIGHT:
                    self.accumulator.hurry(batch)  # a caller that waits has nothing to add
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

    def when_ended(self, handle: Handle, callback: OnDelivery) -> None:
        """Have `callback(metadata, error)` called once the record has ended: now if it has, else in whatever thread finds out."""
        with self.lock:
            batch, row = handle.resolve()
            if batch.state is not ENDED:
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
            self._driver = get_ident()
            self._callers_look_until_ns = min(wake_ns, now_ns + 50 * NS_PER_MS) + CALLER_IS_ACTIVE_NS
        if deadline_ns is not None:
            wake_ns = min(wake_ns, deadline_ns)
        if self.delivery.waits_for_answers or self.delivery.waits_for_credit:
            self.connection.wait(min(wake_ns - self.now_ns(), 50 * NS_PER_MS), self._driver_fd)
        elif self.accumulator.unended_count:
            self.connection.wait(min(wake_ns - self.now_ns(), 5 * NS_PER_MS), self._driver_fd)
        with self.lock:
            self._driver = 0
            if self._driver_is_rung:
                self._driver_is_rung = False
                _hush(self._driver_fd)
            self._callers_look_until_ns = self.now_ns() + CALLER_IS_ACTIVE_NS
            if not self.closed:
                self.pump()

    def next_wake_ns(self, now_ns: int) -> int:
        """When there is something to do without an answer."""
        accumulator = self.accumulator
        wake_ns = now_ns + (100 if accumulator.unended_count else 1_000) * NS_PER_MS
        if self.delivery.waits_for_credit:
            wake_ns = min(wake_ns, now_ns + 50 * NS_PER_MS)
        tick_ns, linger_ns = self.connection.next_tick_ns(), accumulator.first_linger_ns()
        if tick_ns is not None and tick_ns < wake_ns:
            wake_ns = tick_ns
        if linger_ns is not None and linger_ns < wake_ns:
            wake_ns = linger_ns
        return accumulator.first_retry_ns(now_ns, wake_ns)

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
        """The helper thread: linger, retries, silence; and answers, unless callers look after them."""
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
            if self._helper_may_be_rung:
                _hush(self._wake_fd)
            now_ns = self.now_ns()
            linger_ends_ns = self.accumulator.first_linger_ns()
            if now_ns >= self._callers_look_until_ns or (linger_ends_ns is not None and linger_ends_ns <= now_ns):
                self.pump()
            wake_ns = self.next_wake_ns(now_ns)
            leaves_answers = now_ns < self._callers_look_until_ns
            if leaves_answers and self.accumulator.unended_count:
                wake_ns = min(wake_ns, self._callers_look_until_ns)
            self._helper_wakes_ns = wake_ns
        self.make_callbacks()
        if self._wake_fd < 0:
            return False  # a callback has closed the producer
        remaining_ns = max(HELPER_SLEEP_MIN_NS, wake_ns - self.now_ns())
        readable: Sequence[int] | None
        if leaves_answers:
            readable = sleep_on((self._wake_fd,), remaining_ns)
        else:
            readable = self.connection.wait(remaining_ns, self._wake_fd)
        self._helper_may_be_rung = readable is None or self._wake_fd in readable
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
