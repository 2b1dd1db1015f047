"""Heartbeats of one member: their connection, and the thread that makes them while the program
runs.

The thread sleeps in poll(2) without the interpreter's lock. A due heartbeat, a response, a push or
`wakeup` wakes it. It never runs code of the program: events wait until the next `poll`. Under
gevent it is a thread of the operating system too, and uses nothing that gevent has patched. Where
threads are not allowed (asyncio, the simulation) the event loop calls `HeartbeatManager.step`.

Owner: `HeartbeatManager.lock` guards the membership and the connection. It is held for
microseconds, and never during a sleep.

Invariants:
- The thread has no reference to the consumer. When the consumer is garbage collected, the thread
  leaves the group and ends.
- In a forked child nothing is woken, sent or locked.

Crash: a thread that fails raises the error from the next poll, and tries again.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import NEVER_NS, POLL_MAX_MS, Runtime
from tailrace.core import fork
from tailrace.core.errors import TailraceError
from tailrace.group.membership import NS_PER_MS, Membership, Phase
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import CLIENT_JSON_MAX_BYTES, Response

FAILURES_MAX = 10
"""Consecutive unexpected failures after which the thread ends and poll raises the error."""
FAILURE_PAUSE_NS = 100 * NS_PER_MS
LEAVE_WAIT_NS = 5_000 * NS_PER_MS
"""The time that the end of a client waits until the appliance knows that its member leaves."""
LEAVE_STEP_NS = 500 * NS_PER_MS
"""The longest part of that wait: the connection may end in it."""
ABANDONED_NS = 1_000 * NS_PER_MS
"""The time that a member without a consumer tries to leave its group."""


def unpatched(module: str, name: str) -> Any:
    """A name of the standard library as it was before gevent patched it."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None:
        return monkey.get_original(module, name)
    return getattr(sys.modules[module], name)


class HeartbeatManager:
    """A membership and its connection."""

    def __init__(
        self,
        membership: Membership,
        bootstrap: str,
        client_id: str,
        runtime: Runtime,
        on_event: Callable[[], None],
    ) -> None:
        """`on_event` is called when `membership.has_events` becomes True, with the lock held."""
        self.membership = membership
        self.lock = unpatched("_thread", "allocate_lock")()
        self.now_ns = runtime.monotonic_ns
        self.connection = Connection(bootstrap, client_id, runtime, "consumer")
        self.connection.reachability.is_silent = True
        self.connection.on_push = self._pushed
        self._on_event = on_event
        self._opened_count = 0
        """The connection's `opened_count` at the member's last `reconnected`."""

    def step(self) -> int:
        """Do all that is due. Returns the time of the next step without input."""
        with self.lock:
            return self._step()

    def _step(self) -> int:
        connection, membership = self.connection, self.membership
        connection.process()
        now_ns = self.now_ns()
        connection.tick(now_ns)
        if connection.fatal is not None:
            if membership.phase is not Phase.REFUSED:
                membership.fail(connection.fatal)
        elif connection.is_ready:
            if connection.opened_count != self._opened_count:
                self._opened_count = connection.opened_count
                membership.reconnected(now_ns)
            self._send(now_ns)
        if membership.has_events:
            self._on_event()
        return self.next_ns()

    def _send(self, now_ns: int) -> None:
        due = self.membership.step(now_ns)
        if due is None:
            return
        token, request = due
        if self.connection.request(
            Api.GROUP_HEARTBEAT, [encode_json(request)], partial(self._answered, token)
        ):
            self.connection.process()  # ZeroMQ's descriptor signals changes only
        else:
            self.membership.not_answered(token, now_ns)

    def next_ns(self) -> int:
        """The time of the next step without input."""
        if self.connection.fatal is not None:
            return NEVER_NS
        times = [self.connection.next_tick_ns()]
        if self.connection.is_ready:
            times.append(self.membership.due_ns())
        return min((at_ns for at_ns in times if at_ns is not None), default=NEVER_NS)

    def leaves_until_ns(self, until_ns: int) -> int:
        """The time until which the end of a client waits for the appliance to confirm that the
        member leaves: `until_ns`, or less if the appliance is away. 0: the member has left.
        """
        if self.membership.phase is not Phase.LEAVING:
            return 0
        return min(until_ns, self.connection.reachability.away_at_ns())

    def _answered(self, token: int, response: Response | None) -> None:
        now_ns = self.now_ns()
        if response is None:
            self.membership.not_answered(token, now_ns)
            return
        answer = decode_json(response.body[0] if response.body else b"{}", CLIENT_JSON_MAX_BYTES)
        self.membership.answered(token, response.code, response.detail(), answer, now_ns)

    def _pushed(self, push: Response) -> None:
        if push.api == Api.GROUP_HEARTBEAT:
            self.membership.heartbeat_soon(self.now_ns())


class Wakeup:
    """An eventfd that is readable after `wakeup` until `clear`. It is closed with its last
    reference, so that no other file gets its number before.
    """

    _close = staticmethod(os.close)
    """Kept here: at the interpreter's end the module's names may be gone before the object."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wakeup(self) -> None:
        """Make it readable. Takes no lock, so a destructor may call it."""
        try:
            os.eventfd_write(self.fd, 1)
        except BlockingIOError:
            pass  # full: it is readable

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass

    def __del__(self) -> None:
        self._close(self.fd)


class HeartbeatThread:
    """The thread that makes one member's heartbeats. `events` is readable when the consumer is to
    process events.
    """

    def __init__(
        self, membership: Membership, bootstrap: str, client_id: str, runtime: Runtime
    ) -> None:
        self.events = Wakeup()
        self._wake = Wakeup()
        self.beats = HeartbeatManager(membership, bootstrap, client_id, runtime, self.events.wakeup)
        self._poll = unpatched("select", "poll")
        self._is_started = False
        self._is_stopped = False
        self._is_abandoned = False
        self._is_forked = False
        self.failure: TailraceError | None = None
        """The error that ended the thread."""
        fork.add(self)

    def after_fork(self) -> None:
        """Stop waking the thread: in a child it is the parent's."""
        self._is_forked = True

    def start(self) -> None:
        """Start the thread once."""
        if self._is_started:
            return
        self._is_started = True
        if "gevent.monkey" in sys.modules:
            unpatched("_thread", "start_new_thread")(self._run, ())
        else:
            threading.Thread(target=self._run, name="tailrace-heartbeats", daemon=True).start()

    def wakeup(self) -> None:
        """Wake the thread: a heartbeat may be due."""
        if not self._is_forked:
            self._wake.wakeup()

    def abandon(self) -> None:
        """The consumer is gone without `close`: leave the group and end. Called by the garbage
        collector in any thread.
        """
        self._is_abandoned = True
        self.wakeup()

    def stop(self) -> None:
        """End the thread, which closes its connection."""
        self._is_stopped = True
        self.wakeup()
        if not self._is_started and not self._is_forked:
            self.beats.connection.close()

    # ---- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        beats, failures, abandoned_until_ns = self.beats, 0, NEVER_NS
        while not self._is_stopped and failures < FAILURES_MAX:
            try:
                if self._is_abandoned and abandoned_until_ns == NEVER_NS:
                    abandoned_until_ns = self._leave_at_once()
                next_ns = beats.step()
                failures = 0
            except Exception as error:
                failures += 1
                self._failed(error, failures)
                next_ns = beats.now_ns() + FAILURE_PAUSE_NS
            now_ns = beats.now_ns()
            if self._is_abandoned and (
                beats.membership.phase is Phase.OUT or now_ns >= abandoned_until_ns
            ):
                break
            self._sleep(
                (beats.connection.fileno(), self._wake.fd),
                min(next_ns, abandoned_until_ns) - now_ns,
            )
            self._wake.clear()
        with beats.lock:
            beats.connection.close()

    def _leave_at_once(self) -> int:
        with self.beats.lock:
            now_ns = self.beats.now_ns()
            self.beats.membership.leave(now_ns)
        return now_ns + ABANDONED_NS

    def _failed(self, error: Exception, failures: int) -> None:
        failure = TailraceError(
            f"the consumer's heartbeats failed ({type(error).__name__}: {error})"
        )
        failure.__cause__ = error
        if failures == FAILURES_MAX:
            self.failure = failure
        if failures in (1, FAILURES_MAX):
            with self.beats.lock:
                self.beats.membership.fail(failure)
                self.events.wakeup()

    def _sleep(self, fds: Sequence[int], timeout_ns: int) -> None:
        poll = self._poll()
        for fd in fds:
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        poll.poll(min(max(0, -(-timeout_ns // NS_PER_MS)), POLL_MAX_MS))
