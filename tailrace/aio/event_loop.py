"""One client's connection in one event loop: the loop watches its descriptor, in the way of
`zmq.asyncio`, and nothing here blocks or is a thread.

How the clients of `tailrace` are used without their blocking: their operations are steps
(`tailrace.client.steps`), which are taken here; where one waits, the loop awaits that.

ZeroMQ's descriptor tells of changes only: what has come while a message was sent is not announced
again. Therefore `settle()` follows every use of the connection: it takes in what is there, wakes
who waits for it, and watches the descriptor of the socket that is open now.

Owner: one event loop's thread.
Invariants: the loop watches the descriptor of the open socket, or none while there is none; whoever
    waits is woken when something came, when the connection's state changed, at its own time, and at
    `close()`; a client that has met one loop refuses any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from tailrace.client.connection import Connection
from tailrace.client.runtime import SYSTEM, sleep_on
from tailrace.client.steps import Invoke, Progress, Steps, Wait, Wakeup, call
from tailrace.core import fork
from tailrace.core.errors import ClientClosedError, InvalidRequestError
from tailrace.core.log import logger
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

FAILURES_MAX = 10
"""So often in a row looking after the connection may fail in what nobody expected; then the client
is closed.
"""
PAUSE_NS = 100_000_000
SOONEST_NS = 1_000_000
T = TypeVar("T")


class Waiter(Protocol):
    """Await until something has come (with a bell: until it has rung), or until that time, by the
    connection's clock.
    """

    def __call__(self, until_ns: int | None, wakeup: Wakeup | None = None) -> Awaitable[None]: ...


def is_running_here(loop: asyncio.AbstractEventLoop | None = None) -> bool:
    """Whether this is called by an event loop: by `loop`, or by any."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return loop is None or running is loop


async def _result_of(returned: Any) -> Any:
    """What a call of the user's code returned, awaited if it can be."""
    return await returned if inspect.isawaitable(returned) else returned


def _never_sleep(fds: Sequence[int], timeout_ns: int) -> None:
    """In an event loop nobody sleeps: an operation waits by its steps. At a program's exit, when
    there is no loop any more, a producer is closed as others are.
    """
    if is_running_here():
        raise RuntimeError("a client of an event loop was about to block it")
    sleep_on(fds, timeout_ns)


LOOP_RUNTIME = replace(SYSTEM, sleep_on=_never_sleep, has_threads=False)
"""The environment of clients that an event loop drives."""


class LoopConnection:
    """See the module's docstring. `kind` is the client's name for sentences; `client` is whose
    operations `run` makes, where they are begun again.
    """

    def __init__(self, kind: str, connection: Connection) -> None:
        self.kind = kind
        self.connection = connection
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched = -1, 0
        """The descriptor that the loop watches, -1: none, and which of the connection's sockets it
        is of.
        """
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._state: tuple[int, bool, bool] = (0, False, False)
        self._received_count = 0
        self._callers: set[asyncio.Future[None]] = set()
        """Who waits for an answer, or for the connection."""
        self._watchers: set[asyncio.Future[None]] = set()
        """Who waits for anything that comes."""
        self._failures = 0
        self._is_closed = False
        fork.add(self)

    # ---- the loop --------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the client works in, known from its first use on."""
        assert self._loop is not None
        return self._loop

    def enter(self) -> None:
        """Every use begins here. Raises ClientClosedError when the client is closed, or its loop,
        and InvalidRequestError in another loop than its own.
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
        """A client may be closed in another loop when its own has closed: what is under way goes on
        there. Raises InvalidRequestError.
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
        """In a child: what the loop watches is the parent's."""
        self._is_closed = True
        self._loop = None

    def detach(self) -> None:
        """Watch nothing any more, and wake whoever waits: the client is being closed, and says so
        to them.
        """
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
        """The program has lost its client without closing it: nobody will use the connection, if
        nobody can be using it now.
        """
        if self._loop is None or self._loop.is_closed() or is_running_here(self._loop):
            self.detach()
            self.connection.close()

    # ---- turns -----------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Something may have come, or something is due. Called by the loop."""
        if self._is_closed:
            return
        self._timer = None
        try:
            self.run_timers()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            logger.error(
                "the %s could not look after its connection, %d times in a row",
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
        """Take in what has come and do what is due."""
        self.connection.process()
        self.connection.tick(self.connection.now_ns())

    def fail(self) -> None:
        """Nobody can look after the connection any more."""
        self.connection.close()
        self.detach()

    def settle(self) -> None:
        """After any use of the connection: see the module's docstring."""
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
        """When a turn is due though nothing comes; None: never."""
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
        """`with loop_connection.watching() as wait:` look, then `await wait(until_ns)`: returns
        when something has come since the block began, or at that time.
        """
        with self._waiting(self._watchers) as wait:
            yield wait

    @contextlib.contextmanager
    def _waiting(self, *among: set[asyncio.Future[None]]) -> Iterator[Waiter]:
        future: asyncio.Future[None] = self.loop.create_future()
        for waiting in among:
            waiting.add(future)

        async def wait(until_ns: int | None, wakeup: Wakeup | None = None) -> None:
            if (
                wakeup is not None
            ):  # the answer is one of many: what comes for others wakes nobody here
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
        """`Connection.call`, awaited; any number at a time, answered in any order. `start_ns`:
        since when the timeouts run, None: since now. Raises what it does.
        """
        return await self.run_steps(
            call(self.connection, api, body, timeout_ms, connect_timeout_ms, start_ns)
        )

    async def run_steps(self, steps: Steps[T]) -> T:
        """Take the steps of an operation in the loop, awaiting where it waits; see
        `tailrace.client.steps`. Raises what the operation raises.
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
        """Resume an operation, which uses the connection."""
        try:
            return progress.advance()
        finally:
            self.settle()
