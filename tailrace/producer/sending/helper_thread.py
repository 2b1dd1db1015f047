"""Helper thread of a producer: handles linger, retries and silence, and responses that no caller
polls for.

It logs an unexpected error and goes on. When it fails repeatedly, every record fails with the
error. In an event loop there is no thread: the loop calls `run_timers` in its place.

Owner: one SenderThread. Everything but `join` and `run_timers` is called with the producer's lock.
Invariants:
- It sleeps without the lock, until its eventfd, its alarm or the next due time.
- A time that is earlier than its next wake-up reaches it: by the alarm, or by the eventfd.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from tailrace import kernel
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import NEVER_NS, Runtime, sleep_on
from tailrace.core.log import logger
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.sending.caller_polling import CallerPolling

FAILURES_MAX = 10
"""Consecutive unexpected errors after which the producer fails."""
PAUSE_NS = 100 * NS_PER_MS
SLEEP_MIN_NS = 100_000


class Driven(Protocol):
    """The producer's side of the thread: `SenderThread`."""

    lock: threading.RLock
    closed: bool
    forked: bool
    connection: Connection
    accumulator: RecordAccumulator
    polling: CallerPolling
    now_ns: Callable[[], int]

    def run_once(self) -> None:
        """Run the sender once."""

    def next_wake_ns(self, now_ns: int) -> int:
        """The time of the next run that is due without a response."""

    def make_callbacks(self) -> None:
        """Call the callbacks that are due. Called without the lock."""

    def fail(self, error: BaseException) -> None:
        """Fail every record and every later call. Called without the lock."""


class HelperThread:
    """The thread, and what wakes it."""

    def __init__(self, producer: Driven, runtime: Runtime) -> None:
        self._producer = producer
        self._runtime = runtime
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when the thread, or the event loop in its place, must run earlier."""
        self._alarm = kernel.new_alarm() if runtime.has_threads else None
        """Wakes the thread at `_alarm_ns`."""
        self._alarm_ns = 0
        """0: it is not set."""
        self._may_be_woken = True
        """True if the last sleep was ended by the eventfd. Reading that in vain costs an exception
        for every response.
        """
        _preload_for_exit()
        self.thread = threading.Thread(target=self._run, name="tailrace-producer", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, unless it is this one, for at most `timeout_s`. Called
        without the lock. A thread that is in a callback ends behind it.
        """
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join(timeout_s)
            if self.thread.is_alive():
                logger.warning(
                    "a producer was closed while one of its callbacks had not returned; its thread "
                    "ends when that does"
                )

    def detach(self) -> list[int]:
        """Stop using the descriptors. Returns them, to be closed by the process that owns them."""
        fds, self.wake_fd = [self.wake_fd], -1
        if self._alarm is not None:
            fds.append(self._alarm.fd)
            self._alarm.fd = -1
        return fds

    def wake(self) -> None:
        """Have it run once more."""
        wakeup(self.wake_fd)

    def wake_at(self, wake_ns: int) -> None:
        """Have it wake up at that time at the latest."""
        polling = self._producer.polling
        if wake_ns >= polling.helper_wakes_ns or (self._alarm_ns and wake_ns >= self._alarm_ns):
            return
        if self._alarm is None:
            # Wakes it once, however long it waits for the interpreter's lock.
            polling.helper_wakes_ns = wake_ns
            self.wake()
        else:
            self._alarm.set(wake_ns - self._producer.now_ns())
            self._alarm_ns = wake_ns

    def cancel_alarm(self) -> None:
        """Nothing is due at the time of the alarm any more."""
        if self._alarm_ns and self._alarm is not None:
            self._alarm_ns = 0
            self._alarm.cancel()

    def run_timers(self) -> int | None:
        """Do the thread's work between two sleeps, in an event loop (`Runtime.has_threads` is
        False). Called without the lock.

        Returns the time of the next call, by the monotonic clock in ns. None: when `wake_fd` or the
        connection's descriptor is readable.
        """
        producer = self._producer
        with producer.lock:
            if producer.closed or producer.forked:
                return None
            clear_wakeup(self.wake_fd)
            producer.run_once()
            wake_ns: int | None = producer.next_wake_ns(producer.now_ns())
            if not producer.accumulator.incomplete_count and (
                producer.connection.fatal is not None or producer.connection.next_tick_ns() is None
            ):
                wake_ns = None
            producer.polling.helper_wakes_ns = NEVER_NS if wake_ns is None else wake_ns
        producer.make_callbacks()
        return wake_ns

    def _run(self) -> None:
        """Run until the producer has ended, or has failed."""
        failures = 0
        while True:
            try:
                if not self._run_once():
                    return
                failures = 0
            # BaseException: a callback may raise SystemExit to end a thread, but not this one.
            except BaseException as error:
                failures += 1
                logger.error(
                    "the producer's helper thread failed, %d times in a row",
                    failures,
                    exc_info=error,
                )
                if failures >= FAILURES_MAX:
                    self._producer.fail(error)
                    return
                self._runtime.sleep_on((), PAUSE_NS)

    def _run_once(self) -> bool:
        """Run the sender if it is due, then sleep until it is. False: the producer has ended."""
        producer = self._producer
        with producer.lock:
            if producer.closed or producer.forked:
                return False
            if self._may_be_woken:
                clear_wakeup(self.wake_fd)
            self.cancel_alarm()
            polling, now_ns = producer.polling, producer.now_ns()
            linger_ends_ns = producer.accumulator.first_linger_ns()
            if now_ns >= polling.until_ns or (
                linger_ends_ns is not None and linger_ends_ns <= now_ns
            ):
                producer.run_once()
            wake_ns = producer.next_wake_ns(now_ns)
            callers_poll = now_ns < polling.until_ns
            if callers_poll and producer.accumulator.incomplete_count:
                wake_ns = min(wake_ns, polling.until_ns)
            polling.helper_wakes_ns = wake_ns
            polling.helper_listens = not callers_poll
            alarm_fd = -1 if self._alarm is None else self._alarm.fd
        producer.make_callbacks()
        if self.wake_fd < 0:
            return False  # a callback has closed the producer
        remaining_ns = max(SLEEP_MIN_NS, wake_ns - producer.now_ns())
        readable: Sequence[int] | None
        if callers_poll:
            readable = sleep_on((self.wake_fd, alarm_fd), remaining_ns)
        else:
            readable = producer.connection.wait(remaining_ns, self.wake_fd, alarm_fd)
        self._may_be_woken = readable is None or self.wake_fd in readable
        return True


def wakeup(fd: int) -> None:
    """Make an eventfd readable."""
    try:
        os.eventfd_write(fd, 1)
    except (OSError, ValueError):
        pass  # it is readable already, or closed (-1)


def clear_wakeup(fd: int) -> None:
    """Make an eventfd unreadable until the next `wakeup`."""
    try:
        os.eventfd_read(fd)
    except (OSError, ValueError):
        pass  # it is not readable, or closed (-1)


def _preload_for_exit() -> None:
    """Import a module that pandas needs, before the program's exit.

    pyarrow imports pandas, if installed, with its first array. A producer that was not closed may
    encode its first batch at exit, too late for that import.
    """
    import concurrent.futures.thread  # noqa: F401
