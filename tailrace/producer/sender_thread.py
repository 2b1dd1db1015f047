"""What drives a producer: its callers, and a helper thread.

Who looks after answers. Each answer may let the next request leave, so it is taken in as soon as it
comes: by the helper thread, which sleeps on the socket, or by a caller that waits for an answer and
sleeps there in its place. But a caller that never sleeps keeps the interpreter's lock, and the
helper thread would get it only after `sys.getswitchinterval()`, 5 ms, and then take it from the
caller for every answer. So a caller that adds records looks at the socket itself every
POLL_INTERVAL_NS: an open batch is given memory in pieces that last about so long, and with each
piece it looks. While callers that were running all the time (by their CPU clock) look, the helper
thread leaves answers to them. One lock guards everything, the socket included; callbacks are made
without it.

A user's callback that raises is logged and costs nobody else anything; the helper thread logs what
it did not expect and goes on, and when it cannot, every handle ends with the error.

Sections. Whatever changes the producer's state does so in a section (`do`), under the lock. A
signal's handler (KeyboardInterrupt) may cut a section off between two instructions. A section that
has not come to its end is noticed by the next one, in whatever thread that is, which mends the
state before it does anything else: `RecordAccumulator.rebuild` makes the books anew from the
batches, and what a turn was doing is begun again as after a lost connection. So nothing else has to
think of handlers, but for the order in which a batch's own fields change (see
`tailrace.producer.accumulator`).

Owner: one Producer; every method but `wait_for`, `add_done_callback`, `make_callbacks`, `stop` and
    those marked so is called with `lock` held.
Invariants: at most one thread at a time sleeps for an answer; nothing is sent and nothing settled
    without the lock; once it is closed, has failed, or is in a child of the process that made it,
    it uses no socket again, and every batch has ended.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from time import thread_time_ns
from typing import Any, TypeVar

from tailrace import kernel
from tailrace.client.connection import Connection
from tailrace.client.runtime import SYSTEM, Runtime, sleep_on
from tailrace.client.settings import ProducerSettings
from tailrace.client.steps import Steps, Wait
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core import fork
from tailrace.core.errors import (
    BufferExhaustedError,
    ClientClosedError,
    RecordTooLargeError,
    TailraceError,
)
from tailrace.core.log import logger
from tailrace.producer.accumulator import NS_PER_MS, RESERVE_BYTES, RecordAccumulator
from tailrace.producer.callbacks import Callbacks
from tailrace.producer.futures import FrameFuture, RecordFuture
from tailrace.producer.partition_queue import PartitionQueue
from tailrace.producer.producer_batch import (
    BATCH_OVERHEAD_BYTES,
    COMPLETED,
    IN_FLIGHT,
    OnDelivery,
    ProducerBatch,
    Resolves,
)
from tailrace.producer.sender import Sender

T = TypeVar("T")
NEVER_NS = 2**63 - 1
HELPER_FAILURES_MAX = 10
"""So often in a row the helper thread may fail in what nobody expected; then the producer fails."""
HELPER_PAUSE_NS = 100 * NS_PER_MS
HELPER_SLEEP_MIN_NS = 100_000
CALLER_IS_ACTIVE_NS = 3 * NS_PER_MS
"""So long after a caller looked at the socket that sleeps on it, or does not sleep at all, the
helper thread leaves it to callers.
"""
POLL_INTERVAL_NS = 200_000
PIECE_MIN_BYTES = 512
WAIT_SLICE_NS = 20 * NS_PER_MS
"""How long a thread sleeps at a time when another may take the answer that it waits for."""


class SenderThread:
    """See the module's docstring."""

    def __init__(
        self,
        settings: ProducerSettings,
        on_keyless_batch: Callable[[TopicInfo], None],
        runtime: Runtime = SYSTEM,
    ) -> None:
        """`on_keyless_batch`: told when a batch that ended with a record without a key takes no
        more.
        """
        self._settings = settings
        self._runtime = runtime
        self.now_ns = runtime.monotonic_ns
        self.lock = kernel.new_lock()
        self.connection = Connection(
            settings.bootstrap_servers, settings.client_id, runtime, "producer"
        )
        self.callbacks = Callbacks(self.lock, self._wake_helper)
        self.accumulator = RecordAccumulator(
            settings, self.now_ns, self, self.callbacks, on_keyless_batch
        )
        self.sender = Sender(settings, runtime, self.connection, self.accumulator)
        self._polled_ns = 0
        """When anybody last looked at the socket."""
        self._callers_poll_until_ns = 0
        """Until then the helper thread leaves answers to callers."""
        self._piece_given_ns = 0
        self._running = 0, 0, 0
        """(thread, its CPU time, the time) of the caller that was last given a piece of memory."""
        self.closed = False
        self.is_stopped = False
        """Whether nothing is left to be ended: its thread has gone, its descriptors are closed."""
        self.forked = False
        self.failure: TailraceError | None = None
        """What stopped the helper thread for good: nothing can be sent any more."""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._helper_may_be_woken = True
        """Whether its last sleep was ended by the descriptor that wakes it: to read that in vain
        costs an exception for every answer.
        """
        self._helper_wakes_ns = 0
        self._driver = 0
        """The thread that sleeps for an answer, 0: none. Another that looks at the socket wakes it:
        the answer may have come to that one.
        """
        self._driver_is_woken = False
        self._driver_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_running_once = False
        self.is_inside = False
        """Whether a section is being run, further up in the thread that has the lock."""
        self.is_torn = False
        """Whether a section is being run, or was cut off."""
        self.run_was_interrupted = False
        """Whether the connection is being used, or a use of it was cut off."""
        self.nested_is_torn = False
        """The same of a section within a section."""
        self._room_queue: deque[object] = deque()
        """Who waits for room in the buffer, in their order."""
        _preload_for_exit()
        self._helper = threading.Thread(target=self._help, name="tailrace-producer", daemon=True)
        if runtime.has_threads:
            self._helper.start()

    def check_usable(self) -> None:
        """Raise ClientClosedError when closed, or made before a fork; or what it failed of."""
        if self.forked:
            raise fork.forked_error("producer")
        if self.closed:
            raise _closed_error()
        if self.failure is not None:
            raise self.failure

    def after_fork(self) -> None:
        """In a child: nothing can be sent. What the parent's threads held is free; the eventfds are
        shared with the parent, so they are not rung here.
        """
        self.forked = True
        fork.free_in_child(self.lock)
        self._wake_fd = self._driver_fd = -1

    def stop(self) -> None:
        """End everything: what has not ended, ends with ClientClosedError; the helper thread and
        the socket go. Called without the lock.
        """
        if self.forked:
            self.closed = True
        if self.is_stopped or self.forked:
            return
        self.do(self._stop)
        try:
            self.make_callbacks()
        finally:
            if self._helper.is_alive() and threading.current_thread() is not self._helper:
                self._helper.join()
            with self.lock:
                self.is_stopped = True
                fds, self._wake_fd, self._driver_fd = (self._wake_fd, self._driver_fd), -1, -1
            for fd in fds:
                if fd >= 0:
                    os.close(fd)

    def _stop(self) -> None:
        self.closed = True
        self.accumulator.end_all(_closed_error())
        self.connection.process()
        self.connection.close()
        self._wake_helper()

    # ---- sections --------------------------------------------------------------------------------

    def do(self, function: Callable[..., T], *args: Any) -> T:
        """Change the producer's state: see the module's docstring. Called without the lock, or with
        it. Raises what `function` does.
        """
        with self.lock:
            if self.is_inside:
                return self._do_within(function, *args)
            if self.is_torn:
                self._mend()
            self.is_inside = self.is_torn = True
            try:
                result = function(*args)
                self.is_torn = self.run_was_interrupted or self.nested_is_torn
                return result
            except TailraceError:  # said on purpose, where the state is right
                self.is_torn = self.run_was_interrupted or self.nested_is_torn
                raise
            finally:
                self.is_inside = False

    def _do_within(self, function: Callable[..., T], *args: Any) -> T:
        """A section within a section. One of a destructor, or of a signal's handler that sends, may
        be cut off although the outer one comes to its end.
        """
        was_torn, self.nested_is_torn = self.nested_is_torn, True
        try:
            result = function(*args)
            self.nested_is_torn = was_torn
            return result
        except TailraceError:
            self.nested_is_torn = was_torn
            raise

    def use_connection(self, function: Callable[[], T]) -> T:
        """A section that uses the connection beside the turns."""
        result: T = self.do(self._use_connection, function)
        return result

    def _use_connection(self, function: Callable[[], T]) -> T:
        was_torn, self.run_was_interrupted = self.run_was_interrupted, True
        try:
            result = function()
            self.run_was_interrupted = was_torn
            return result
        except TailraceError:
            self.run_was_interrupted = was_torn
            raise

    def _mend(self) -> None:
        """A section was cut off. With the lock held; what is cut off here is done again by the next
        section.
        """
        self.is_inside = True
        try:
            if self.closed or self.forked or self.failure is not None:
                self.accumulator.rebuild(keeps_flight=True)
                self.accumulator.end_all(self.failure or _closed_error())
            elif self.run_was_interrupted or self.nested_is_torn:
                self.sender.restart()
            else:
                self.accumulator.rebuild(keeps_flight=True)
            self.is_torn = self.run_was_interrupted = self.nested_is_torn = False
        finally:
            self.is_inside = False

    # ---- state -----------------------------------------------------------------------------------

    def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and under way now."""
        accumulator = self.accumulator
        return {
            **self.sender.counters(),
            "buffered_bytes": accumulator.buffered_bytes,
            "batches_in_flight": accumulator.in_flight_count,
        }

    # ---- what callers have to do -----------------------------------------------------------------

    def on_batch_opened(self, queue: PartitionQueue) -> None:
        """A batch was opened: send it at once, if it may be; else have the helper look at it in
        time.
        """
        if queue.is_due:
            if self.sender.may_send_unfilled:
                self.run_once(sends_first=True)
        elif (
            ends_ns := self.accumulator.first_linger_ns()
        ) is not None and ends_ns < self._helper_wakes_ns:
            self._helper_wakes_ns = (
                ends_ns  # one ring is enough, however long it waits for the interpreter's lock
            )
            self._wake_helper()

    def begin_piece(self) -> None:
        """A batch was opened, and gets its first piece of memory."""
        self._piece_given_ns = self.now_ns()

    def poll_while_appending(self) -> None:
        """A caller adds to a batch that takes another piece of memory: see the module's
        docstring.
        """
        now_ns = self.now_ns()
        accumulator = self.accumulator
        since_ns = now_ns - self._piece_given_ns
        self._piece_given_ns = now_ns
        if since_ns < POLL_INTERVAL_NS // 2:
            accumulator.piece_bytes = min(RESERVE_BYTES, accumulator.piece_bytes * 2)
        elif since_ns > POLL_INTERVAL_NS * 2:
            accumulator.piece_bytes = max(PIECE_MIN_BYTES, accumulator.piece_bytes // 2)
        if accumulator.in_flight_count and now_ns - self._polled_ns >= POLL_INTERVAL_NS // 2:
            self._note_running(now_ns)
            self.run_once()

    def on_batch_full(self, queue: PartitionQueue) -> None:
        """A caller has filled a batch: send it if it may be, else at least have its bytes ready,
        and look for answers now and then.
        """
        now_ns = self.now_ns()
        self._note_running(now_ns)
        if self.sender.may_leave(queue) or now_ns - self._polled_ns >= POLL_INTERVAL_NS // 2:
            self.run_once()
        if queue.ready:
            self.sender.encode_ahead(queue)

    def _note_running(self, now_ns: int) -> None:
        """Find out whether a caller does nothing but run: then it takes in the answers."""
        thread, then_cpu_ns, then_ns = self._running
        cpu_ns = thread_time_ns()
        self._running = get_ident(), cpu_ns, now_ns
        if thread == self._running[0] and (cpu_ns - then_cpu_ns) * 4 > (now_ns - then_ns) * 3:
            self._callers_poll_until_ns = now_ns + CALLER_IS_ACTIVE_NS

    def close_all(self) -> None:
        """Send everything that is there now."""
        self.accumulator.close_all()
        self.run_once()

    def run_once(self, *, sends_first: bool = False) -> None:
        """Everything that can be done now: take in answers, send what is due (`sends_first`: the
        other way round). Begun by a signal's handler or a destructor in the midst of this thread's
        own turn, it is left to the helper: a turn within a turn could number or send a batch twice.
        """
        if self.is_inside:
            self._pump(sends_first)
        else:
            self.do(self._pump, sends_first)

    def _pump(self, sends_first: bool) -> None:
        if self._is_running_once:
            self._wake_helper()
            return
        now_ns = self._polled_ns = self.now_ns()
        received = self.connection.received_count
        self._is_running_once = self.run_was_interrupted = True
        try:
            self.sender.run_once(now_ns, sends_first=sends_first)
            self.run_was_interrupted = False
        finally:
            self._is_running_once = False
        if (
            self._driver
            and self.connection.received_count != received
            and self._driver != get_ident()
        ):
            self._driver_is_woken = True
            _wakeup(self._driver_fd)

    def room(self, size: int, start_ns: int) -> Steps[None]:
        """Wait, sending and receiving, until `size` bytes fit and those who wait for longer have
        gone on, for max_block_ms since `start_ns`. Raises BufferExhaustedError,
        RecordTooLargeError.
        """
        self._check_may_wait()
        accumulator, memory = self.accumulator, self._settings.buffer_memory
        if size + BATCH_OVERHEAD_BYTES > memory:
            raise RecordTooLargeError(f"{size} bytes can never fit buffer_memory ({memory})")
        deadline_ns = start_ns + self._settings.max_block_ms * NS_PER_MS
        place = object()
        try:
            self._room_queue.append(place)
            self.do(self.close_all)
            while (
                self._room_queue[0] is not place
                or accumulator.buffered_bytes + size + BATCH_OVERHEAD_BYTES > memory
            ):
                if self.now_ns() >= deadline_ns:
                    raise BufferExhaustedError(
                        f"buffer_memory ({memory} bytes) stayed full for "
                        f"{self._settings.max_block_ms} ms"
                    )
                yield Wait(deadline_ns)
                self.check_usable()
                self.do(self._pump, False)
        finally:
            if place in self._room_queue:
                self._room_queue.remove(place)
            if self._room_queue:
                self._wake_helper()  # the next may go on

    def has_room(self, size: int) -> bool:
        """Whether `size` bytes fit, and nobody waits for as much."""
        return (
            not self._room_queue
            and self.accumulator.buffered_bytes + size + BATCH_OVERHEAD_BYTES
            <= self._settings.buffer_memory
        )

    def ended(self, batches: Sequence[ProducerBatch], deadline_ns: int | None) -> Steps[bool]:
        """Wait until all of these, and what they were split into, have ended. False: it is past
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

    def sleep_until(self, until_ns: int | None) -> None:
        """A thread that waits for this producer sleeps until something may have come, or until that
        time. Without the lock.
        """
        now_ns = self.now_ns()
        wake_ns = (
            now_ns + WAIT_SLICE_NS if until_ns is None else min(until_ns, now_ns + WAIT_SLICE_NS)
        )
        with self.lock:
            wake_ns = min(wake_ns, self.next_wake_ns(now_ns))
            self._callers_poll_until_ns = now_ns + WAIT_SLICE_NS + CALLER_IS_ACTIVE_NS
        if wake_ns > now_ns:
            self.connection.wait(wake_ns - now_ns)
        self.make_callbacks()

    # ---- waiting ---------------------------------------------------------------------------------

    def _check_may_wait(self) -> None:
        """Raise TailraceError where no answer could come: what was interrupted has the socket, and
        goes on only when this returns.
        """
        if self._is_running_once:
            raise TailraceError(
                "a signal's handler or a destructor waits for this producer, in the midst of its "
                "own work; let it send, and wait elsewhere"
            )

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Until `batch` has ended (or split). The thread that comes first drives the connection,
        others wait on the batch. False: time is up.
        """
        deadline_ns = None if timeout is None else self.now_ns() + int(timeout * 1e9)
        if batch.state is not IN_FLIGHT or self._is_running_once:
            self.do(self._flush_now, batch)
        self.make_callbacks()
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
        """A caller that waits has nothing to add."""
        if not batch.is_done():
            self.check_usable()
            self._check_may_wait()
            if batch.state is not IN_FLIGHT:
                self.accumulator.flush_batch(batch)
                self.run_once()

    def add_done_callback(self, record: Resolves, callback: OnDelivery) -> None:
        """Have `callback(metadata, error)` called once the record has ended: now if it has, else in
        whatever thread finds out.
        """
        if not self.do(self._call_when_ended, record, callback):
            batch, row = record.resolve()
            callback(None if batch.error else batch.metadata(row), batch.error)

    def _call_when_ended(self, record: Resolves, callback: OnDelivery) -> bool:
        batch, row = record.resolve()
        if batch.state is COMPLETED:
            return False
        self.check_usable()  # in a child: no answer comes here
        batch.add_callback(row, callback)
        self._wake_helper()  # the thread that asks for this waits elsewhere
        return True

    def received(self, timeout_s: float | None) -> Steps[None]:
        """With acks=0, wait until the front has read all that was sent. Raises RequestTimeoutError,
        NotReachableError.
        """
        if not self.closed:
            yield from self.sender.wait_until_received(timeout_s, self.use_connection)

    def _drive_once(self, batch: ProducerBatch, now_ns: int, deadline_ns: int | None) -> bool:
        """Sleep until something may have come, then see to it. The caller has pumped before; or
        another thread has, and the answer came to that one. False: another thread sleeps.
        """
        me = get_ident()
        with self.lock:
            if batch.is_done():
                return True
            if (
                self._driver not in (0, me)
            ):  # this one: a signal's handler waits in the midst of its thread's wait, or has cut it off  # noqa: E501
                return False
            wake_ns = self.next_wake_ns(now_ns)
            self._driver = me
            self._callers_poll_until_ns = (
                min(wake_ns, now_ns + 50 * NS_PER_MS) + CALLER_IS_ACTIVE_NS
            )
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
            if self._driver_is_woken:
                self._driver_is_woken = False
                _clear_wakeup(self._driver_fd)
            self._callers_poll_until_ns = self.now_ns() + CALLER_IS_ACTIVE_NS
            if not self.closed:
                self.run_once()
        return True

    def next_wake_ns(self, now_ns: int) -> int:
        """When there is something to do without an answer."""
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
        """Make the calls that are due. Without the lock."""
        if self.callbacks.due:
            self.callbacks.make()

    # ---- helper ----------------------------------------------------------------------------------

    def _wake_helper(self) -> None:
        _wakeup(self._wake_fd)

    @property
    def wake_fd(self) -> int:
        """Readable when the helper, or the event loop in its place, has to look sooner than it
        meant to.
        """
        return self._wake_fd

    def run_timers(self) -> int | None:
        """What the helper thread does between two sleeps, for an event loop that does it instead
        (`Runtime.has_threads` is False). Called without the lock.

        Returns when to look again at the latest, by the monotonic clock in ns; None: only when
        `wake_fd` or the connection's descriptor is readable.
        """
        with self.lock:
            if self.closed or self.forked:
                return None
            _clear_wakeup(self._wake_fd)
            self.run_once()
            wake_ns: int | None = self.next_wake_ns(self.now_ns())
            if not self.accumulator.incomplete_count and (
                self.connection.fatal is not None or self.connection.next_tick_ns() is None
            ):
                wake_ns = None
            self._helper_wakes_ns = NEVER_NS if wake_ns is None else wake_ns
        self.make_callbacks()
        return wake_ns

    def _help(self) -> None:
        """The helper thread: linger, retries, silence; and answers, unless callers look after
        them.
        """
        failures = 0
        while True:
            try:
                if not self._help_once():
                    return
                failures = 0
            except (
                BaseException
            ) as error:  # also what a callback raises to end a thread: this one is not its own
                failures += 1
                logger.error(
                    "the producer's helper thread failed, %d times in a row",
                    failures,
                    exc_info=error,
                )
                if failures >= HELPER_FAILURES_MAX:
                    self._fail(error)
                    return
                self._runtime.sleep_on((), HELPER_PAUSE_NS)

    def _help_once(self) -> bool:
        """See to what is due, then sleep until something is; False: the producer has ended."""
        with self.lock:
            if self.closed or self.forked:
                return False
            if self._helper_may_be_woken:
                _clear_wakeup(self._wake_fd)
            now_ns = self.now_ns()
            linger_ends_ns = self.accumulator.first_linger_ns()
            if now_ns >= self._callers_poll_until_ns or (
                linger_ends_ns is not None and linger_ends_ns <= now_ns
            ):
                self.run_once()
            wake_ns = self.next_wake_ns(now_ns)
            leaves_answers = now_ns < self._callers_poll_until_ns
            if leaves_answers and self.accumulator.incomplete_count:
                wake_ns = min(wake_ns, self._callers_poll_until_ns)
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
        self._helper_may_be_woken = readable is None or self._wake_fd in readable
        return True

    def _fail(self, error: BaseException) -> None:
        """Nothing looks after linger and retries any more: say so on every handle, and to every
        caller.
        """
        self.failure = TailraceError(
            f"the producer failed in a way that it should not ({type(error).__name__}: {error})"
        )
        self.do(self.accumulator.end_all, self.failure)
        self.make_callbacks()


def _wakeup(fd: int) -> None:
    try:
        os.eventfd_write(fd, 1)
    except OSError:
        pass  # it is ringing, or closed


def _clear_wakeup(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except OSError:
        pass  # it does not ring, or is closed


def _closed_error() -> ClientClosedError:
    return ClientClosedError("the producer is closed")


def _preload_for_exit() -> None:
    """pyarrow loads pandas, where there is one, with the first array it makes; a program's exit is
    too late for that, and a producer that was not closed may encode its first batch there. pandas
    needs only this to be loaded in time.
    """
    import concurrent.futures.thread  # noqa: F401
