"""Runs a client's operations on an event loop, which watches the client's connection.

The operations of plain clients are steps (`tailrace.client.connections.steps`). The loop awaits
their waits. It watches the connection's descriptor as `zmq.asyncio` does. Nothing here blocks or
uses a thread.

ZeroMQ's descriptor reports changes only, and not messages that came while one was sent. So
`settle()` follows every use of the connection. It receives messages, wakes the waits, and watches
the descriptor of the open socket.

Owner: one event loop's thread.
Invariants:
- The loop watches the descriptor of the open socket, or none without a socket.
- Waits are woken when something came, when the connection's state changed, at their own time, and
  at `close()`.
- A client that was used in one loop refuses any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import SYSTEM, sleep_on
from tailrace.client.connections.steps import Invoke, Progress, Steps, Wait, Wakeup, call
from tailrace.core import fork
from tailrace.core.errors import ClientClosedError, InvalidRequestError
from tailrace.core.log import logger
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

FAILURES_MAX = 10
"""Consecutive unexpected errors of `run_once` after which the client is closed."""
PAUSE_NS = 100_000_000
SOONEST_NS = 1_000_000
T = TypeVar("T")


class Waiter(Protocol):
    """Waits until something has come (with a Wakeup: until it was rung), or until that time, by the
    connection's clock.
    """

    def __call__(self, until_ns: int | None, wakeup: Wakeup | None = None) -> Awaitable[None]: ...


def is_running_here(loop: asyncio.AbstractEventLoop | None = None) -> bool:
    """True if `loop`, or any event loop if None, runs in this thread."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return loop is None or running is loop


async def _result_of(returned: Any) -> Any:
    """The result of the user's code, awaited if it can be."""
    return await returned if inspect.isawaitable(returned) else returned


def _never_sleep(fds: Sequence[int], timeout_ns: int) -> None:
    """Raise in an event loop, where operations wait by their steps. At a program's exit, without a
    loop, a producer is closed by sleeping.
    """
    if is_running_here():
        raise RuntimeError("internal error: a client of an event loop was about to block it")
    sleep_on(fds, timeout_ns)


LOOP_RUNTIME = replace(SYSTEM, sleep_on=_never_sleep, has_threads=False)
"""The runtime of clients that an event loop drives."""


class LoopConnection:
    """A connection and the loop that watches it."""

    def __init__(self, kind: str, connection: Connection) -> None:
        """`kind`: the client's name in messages."""
        self.kind = kind
        self.connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched = -1, 0
        """The descriptor that the loop watches (-1: none), and the number of its socket."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._state: tuple[int, bool, bool] = (0, False, False)
        self._received_count = 0
        self._callers: set[asyncio.Future[None]] = set()
        """Waits for a response, or for the connection's state."""
        self._watchers: set[asyncio.Future[None]] = set()
        """Waits for anything that comes."""
        self._failures = 0
        self._is_closed = False
        fork.add(self)

    # ---- the loop --------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the client, known from its first use on."""
        assert self._loop is not None
        return self._loop

    def enter(self) -> None:
        """Begin a use of the client. Raises ClientClosedError if the client or its loop is closed,
        InvalidRequestError in another loop than its own.
        """
        self.connection.check_usable()
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        if self._loop is None:
            self._begin(loop)
        elif self._loop.is_closed():
            raise ClientClosedError(
                f"the event loop that this {self.kind} worked in has closed; close clients before "
                "their loop ends"
            )
        else:
            raise self._foreign_loop_error()

    def _foreign_loop_error(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"this {self.kind} works in another event loop; make one in each loop (and so in each "
            "thread) that uses one"
        )

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.settle()

    def enter_to_close(self) -> None:
        """Begin the close of the client. If its own loop is closed, it goes on in this one. Raises
        InvalidRequestError.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop is loop or self._is_closed:
            return
        if not self._loop.is_closed():
            raise self._foreign_loop_error()
        self._watched, self._timer = (-1, 0), None
        self._callers.clear()
        self._watchers.clear()
        self._begin(loop)

    def after_fork(self) -> None:
        """Stop being usable, in a child process. The loop's descriptors are the parent's."""
        self._is_closed = True
        self._loop = None

    def detach(self) -> None:
        """Watch nothing any more, and wake all waits: the client is being closed."""
        self._is_closed = True
        if self._loop is None or self._loop.is_closed():
            return
        if self._watched[0] >= 0:
            self._loop.remove_reader(self._watched[0])
            self._watched = -1, 0
        if self._timer is not None:
            self._timer.cancel()
        self._wake(self._callers)
        self._wake(self._watchers)

    def forget(self) -> None:
        """Close the connection of a client that is garbage, unless another thread's loop may be
        using it.
        """
        if self._loop is None or self._loop.is_closed() or is_running_here(self._loop):
            self.detach()
            self.connection.close()

    # ---- runs ------------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Handle what has come and what is due. Called by the loop."""
        if self._is_closed:
            return
        self._timer = None
        try:
            self.run_timers()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            logger.error(
                "the %s failed to handle its connection, %d times in a row",
                self.kind,
                self._failures,
                exc_info=error,
            )
            if self._failures >= FAILURES_MAX:
                self.fail()
                return
            self._set_timer(self.connection.now_ns() + PAUSE_NS)
            return
        self.settle()

    def run_timers(self) -> None:
        """Receive messages, and do what is due by time."""
        self.connection.process()
        self.connection.tick(self.connection.now_ns())

    def fail(self) -> None:
        """Close the client after FAILURES_MAX errors."""
        self.connection.close()
        self.detach()

    def settle(self) -> None:
        """Follow up on a use of the connection; see the module's docstring."""
        if self._is_closed or self._loop is None or self._loop.is_closed():
            return
        connection = self.connection
        connection.process()
        state = connection.opened_count, connection.is_ready, connection.fatal is not None
        if state != self._state:
            self._state = state
            self._wake(self._callers)
            self._wake(self._watchers)
        elif connection.received_count != self._received_count:
            self._wake(self._watchers)
        self._received_count = connection.received_count
        self._watch_descriptor()
        self._set_timer(self.due_ns())

    def due_ns(self) -> int | None:
        """The time of the next run if nothing comes. None: never."""
        return None if self.connection.fatal is not None else self.connection.next_tick_ns()

    def _watch_descriptor(self) -> None:
        fd, opened_count = self.connection.fileno(), self.connection.opened_count
        if (fd, opened_count) == self._watched:
            return
        if self._watched[0] >= 0:
            self.loop.remove_reader(self._watched[0])
        if fd >= 0:
            self.loop.add_reader(fd, self.run_once)
        self._watched = fd, opened_count

    def _set_timer(self, due_ns: int | None) -> None:
        if self._timer is not None:
            if due_ns == self._timer_ns:
                return
            self._timer.cancel()
            self._timer = None
        if due_ns is not None:
            self._timer_ns = due_ns
            self._timer = self.loop.call_later(self._seconds_until(due_ns), self.run_once)

    def _seconds_until(self, when_ns: int) -> float:
        return max(SOONEST_NS, when_ns - self.connection.now_ns()) / 1e9

    # ---- waiting ---------------------------------------------------------------------------------

    @staticmethod
    def _wake(waiting: set[asyncio.Future[None]]) -> None:
        for future in waiting:
            if not future.done():
                future.set_result(None)
        waiting.clear()

    def wake_watchers(self) -> None:
        self._wake(self._watchers)

    @contextlib.contextmanager
    def watching(self) -> Iterator[Waiter]:
        """Give a function that waits until something has come since the block began.

        `with loop_connection.watching() as wait:` check a condition, then `await wait(until_ns)`.
        """
        with self._waiting(self._watchers) as wait:
            yield wait

    @contextlib.contextmanager
    def _waiting(self, *among: set[asyncio.Future[None]]) -> Iterator[Waiter]:
        future: asyncio.Future[None] = self.loop.create_future()
        for waiting in among:
            waiting.add(future)

        async def wait(until_ns: int | None, wakeup: Wakeup | None = None) -> None:
            if wakeup is not None:  # messages for other waits do not end this one
                self._watchers.discard(future)
                wakeup.on_ring = partial(self._wake, {future})
                if wakeup.is_set:
                    wakeup.is_set = False
                    return
            if until_ns == 0:  # PAUSE
                await asyncio.sleep(0)
                return
            timer = None
            if until_ns is not None:
                timer = self.loop.call_later(self._seconds_until(until_ns), self._wake, {future})
            try:
                await future
            finally:
                if timer is not None:
                    timer.cancel()
            if wakeup is not None:
                wakeup.is_set = False

        try:
            yield wait
        finally:
            for waiting in among:
                waiting.discard(future)

    # ---- requests and operations -----------------------------------------------------------------

    async def call(
        self,
        api: Api,
        body: Sequence[bytes],
        timeout_ms: int,
        connect_timeout_ms: int | None = None,
        start_ns: int | None = None,
    ) -> Response:
        """Send a request and await its response. Any number may be pending at a time. `start_ns`:
        start of the timeouts, None for now. Raises as `tailrace.client.connections.steps.call`
        does.
        """
        return await self.run_steps(
            call(self.connection, api, body, timeout_ms, connect_timeout_ms, start_ns)
        )

    async def run_steps(self, steps: Steps[T]) -> T:
        """Run an operation in the loop, and await its waits (see
        `tailrace.client.connections.steps`). Raises what the operation raises.
        """
        progress = Progress(steps)
        try:
            while True:
                with self._waiting(self._callers, self._watchers) as wait:
                    requested = self.advance(progress)
                    if requested is None:
                        break
                    try:
                        if type(requested) is Wait:
                            await wait(requested.until_ns, requested.wakeup)
                        else:
                            assert type(requested) is Invoke
                            progress.answer(await _result_of(requested.function(*requested.args)))
                    except BaseException as error:
                        progress.fail(error)
            result: T = progress.result
            return result
        finally:
            steps.close()

    def advance(self, progress: Progress) -> Wait | Invoke | None:
        """Resume an operation, and settle its use of the connection."""
        try:
            return progress.advance()
        finally:
            self.settle()
