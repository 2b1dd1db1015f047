"""One connection: a DEALER to one front that reopens itself. Its caller drives it.

It has no thread and does not block. `process()` handles received messages, `wait()` sleeps until
something may have come. ZeroMQ's own reconnection replays some messages and loses others. So the
socket is closed (linger 0) and another one opened when its connection ends, and when the front
shows another generation, does not know the session, or stays silent. The callback of each pending
request is then called with `None`, and its owner sends the request again, in order.

A response that cannot be parsed ends the connection, with a line in the log. It never raises in the
user of the connection.

A signal handler may raise between any two instructions, even after a message was received and
before its callback was called. So `request`, `process` and `tick` note their beginning and end. If
one was interrupted, the next use of the connection gives the socket up as if it were lost. No owner
then waits for a discarded response. ZeroMQ itself drops a message whose receiving was interrupted.

Owner: its user's lock. Two threads never call methods at a time. `wait` is the exception.
Invariants:
- After `close`, or in a child process, it uses no socket, and calls raise the reason.
- The callback of a request is called once: with the response, or with None by the next use of the
  connection after a loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from tailrace.client.connections.reachability import Reachability
from tailrace.client.connections.refused_handshakes import RefusedHandshakes
from tailrace.client.connections.runtime import (
    NEVER_NS,
    SYSTEM,
    ClientSocket,
    Runtime,
    check_bootstrap,
)
from tailrace.core import fork
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import ClientClosedError, TailraceError, error_for
from tailrace.core.log import logger
from tailrace.format.crc32c import Readable
from tailrace.protocol.credit_messages import throttled_ms
from tailrace.protocol.frame import PUSH_CORRELATION_ID, Api, WireError
from tailrace.protocol.session import ClientSession, Response, State

PING_AFTER_NS = 250_000_000
"""Silence with a pending request after which the front is pinged."""
DEAD_AFTER_NS = 5_000_000_000
"""Silence with a pending request after which the socket is given up."""
HANDSHAKE_RETRY_NS = 1_000_000_000
HANDSHAKE_BACKOFF_DOUBLINGS = 2
"""A handshake without a response is repeated over a new socket after HANDSHAKE_RETRY_NS, then after
twice and four times that. Hundreds of clients may start at once on a host without a free core. With
shorter intervals it would handle abandoned handshakes only.
"""
REOPEN_FIRST_NS = 20_000_000
REOPEN_MAX_NS = 1_000_000_000
COPY_BELOW_BYTES = 64 << 10
SHARED_WAIT_NS = 20_000_000
"""Longest sleep at a time on a shared connection. Another thread may receive the response."""

T = TypeVar("T")

_READY, _LOST = State.READY, State.LOST

OnResponse = Callable[[Response | None], None]
"""Called with the response, or with None if the connection was lost before it."""


class Connection:
    """A connection. Call `process` often, and `tick` when `next_tick_ns` has come."""

    def __init__(
        self, address: str, client_id: str, runtime: Runtime = SYSTEM, owner: str = "client"
    ) -> None:
        """`owner`: the client's name in messages."""
        self._refused = RefusedHandshakes(check_bootstrap(address), runtime.has_probes)
        self.address = self._refused.address
        self._owner = owner
        self._refusal: ClientClosedError | None = None
        """The reason why it is not usable."""
        self._client_id = client_id
        self._runtime = runtime
        self.now_ns = runtime.monotonic_ns
        self._socket: ClientSocket | None = None
        self.session = self._new_session()
        self._pending: dict[int, OnResponse] = {}
        self.on_push: Callable[[Response], None] | None = None
        """Called with messages that are neither responses nor credit."""
        self.opened_count = 0
        """Number of opened sockets. A new one may have the descriptor number of the old one."""
        self.received_count = 0
        """Number of received messages, over all sockets."""
        self.throttled_count = self.throttled_ms = 0
        """Waits for quotas, and their time in all, as the appliance has reported them."""
        self._opened_ns = 0
        self._unanswered = 0
        """Consecutive handshakes without a response."""
        self._last_received_ns = 0
        self._pinged_ns = 0
        self._reopen_at_ns = 0
        self._is_in_use = False
        """True while the socket is used further up in the same thread. A callback may send a
        request.
        """
        self._is_torn = False
        """True while the socket is used, or after a use of it was interrupted."""
        self._is_process_due = False
        """True if `tick` has received something, or the socket has taken no request, since the last
        `process`. The descriptor does not report that (again): its user would sleep until a
        timeout.
        """
        self._failures = 0
        self.reachability = Reachability(self.address, owner, self.now_ns())
        self.fatal: TailraceError | None = None
        """A refusal that a retry cannot change: no common version, no permission for the socket."""
        self._open()
        fork.add(self)

    # ---- state -----------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """True if requests can be sent: the handshake has its response."""
        return self._socket is not None and self.session.state is _READY

    @property
    def is_usable(self) -> bool:
        """True if it is neither closed nor from before a fork."""
        return self._refusal is None

    def check_usable(self) -> None:
        """Raise ClientClosedError if it is closed or from before a fork."""
        if self._refusal is not None:
            raise self._refusal

    def check_reachable(self, now_ns: int) -> None:
        """Raise NotReachableError if polls find no appliance for long (`Reachability.check`), or
        the fatal error of the connection. Each poll calls it after `tick`.
        """
        if self.fatal is not None:
            raise self.fatal
        if self.is_ready:
            self.reachability.away_since_ns = 0
        else:
            self.reachability.check(now_ns)

    def peer_error_suffix(self) -> str:
        """See `Reachability`."""
        return self.reachability.peer_error_suffix()

    def fileno(self) -> int:
        """The descriptor to poll, which is readable when something *may* have come. -1: there is no
        socket.
        """
        return -1 if self._socket is None else self._socket.fileno()

    # ---- sending ---------------------------------------------------------------------------------

    def version(self, api: Api) -> int:
        """The version of an API in this session. 0: unknown API, or not connected."""
        return self.session.version(api) if self.session.state is _READY else 0

    def request(self, api: Api, body: Sequence[Readable], on_response: OnResponse | None) -> bool:
        """Send a request. `on_response` None: no response is expected. Returns False while the
        connection is not ready. Raises TailraceError if the appliance does not know the API.
        """
        is_nested = self._is_in_use
        if self._is_torn and not is_nested:
            self._mend()
        socket, session = self._socket, self.session
        if socket is None or session.state is not _READY:
            return False
        try:
            correlation_id, frames = session.request(api, body)
        except WireError as error:
            raise error_for(error.code, error.detail) from None
        if not self._pending:
            self._last_received_ns = self.now_ns()
        copy = sum(map(len, body)) < COPY_BELOW_BYTES
        self._is_torn = True
        if on_response is not None:
            self._pending[correlation_id] = on_response
        is_sent = socket.try_send(frames, copy=copy)
        if not is_sent:
            self._is_process_due = True  # which finds that the connection has ended
            if on_response is not None:
                del self._pending[correlation_id]
        self._is_torn = is_nested
        return is_sent

    # ---- receiving -------------------------------------------------------------------------------

    def process(self) -> int:
        """Receive all messages and call the requests' callbacks. Returns the number of messages,
        and one more if the connection has ended.

        Call it after any use of the socket, since its descriptor reports changes only.
        """
        is_nested = self._is_in_use
        if self._is_torn and not is_nested:
            self._mend()
        self._is_in_use = self._is_torn = True
        try:
            count = 0
            self._is_process_due = False
            while (socket := self._socket) is not None:
                frames = socket.try_receive()
                if frames is None:
                    if socket.is_lost:
                        self._lose(ErrorCode.SESSION_UNKNOWN, "the connection has ended")
                        count += 1
                    break
                count += 1
                self.received_count += 1
                if not self._on_message(frames):
                    break
            self._is_torn = is_nested
            return count
        finally:
            self._is_in_use = is_nested

    def _on_message(self, frames: Sequence[Readable]) -> bool:
        """Handle a message. False: the connection is lost."""
        self._last_received_ns = self.now_ns()
        session = self.session
        was_ready = session.state is _READY
        try:
            response = session.receive(frames)
        except Exception as error:
            self._on_protocol_error(error)
            return False
        if session.state is _LOST:
            if session.lost_code is ErrorCode.QUOTA_EXCEEDED:
                self.reachability.on_quota_refusal(session.lost_reason)
            self._lose(session.lost_code, session.lost_reason)
            return False
        if not was_ready and session.state is _READY:
            self._failures = self._unanswered = 0
            self._refused.on_accepted(session.server_keys)
            self.reachability.on_ready()
        if response is None:
            return True
        if response.correlation_id == PUSH_CORRELATION_ID:
            return self._deliver(self._on_push, response)
        on_response = self._pending.get(response.correlation_id)
        if on_response is None:
            return True
        is_delivered = self._deliver(on_response, response)
        # Removed last: until then a loss of the connection calls it.
        self._pending.pop(response.correlation_id, None)
        return is_delivered

    def give_up_socket(self) -> None:
        """Open another socket at once, and call all pending callbacks with None. The user was
        interrupted and does not know its state.
        """
        self._is_torn = True
        self._mend()

    def _mend(self) -> None:
        """Give the socket up after an interrupted use; see the module's docstring. If this is
        interrupted, the next use repeats it.
        """
        self._is_in_use = True
        try:
            if self._refusal is None:
                self._lose(
                    ErrorCode.SESSION_UNKNOWN,
                    "a signal handler interrupted the use of its socket",
                )
                self._reopen_at_ns = self.now_ns()
            self._is_torn = False
        finally:
            self._is_in_use = False

    def _on_push(self, response: Response | None) -> None:
        if response is not None and response.api == Api.CREDIT:
            self.throttled_count += 1
            self.throttled_ms += throttled_ms(response.body)
        elif response is not None and self.on_push is not None:
            self.on_push(response)

    def _deliver(self, on_response: OnResponse, response: Response) -> bool:
        """Call a callback. False: it raised, and the connection is lost."""
        try:
            on_response(response)
        except Exception as error:
            self._on_protocol_error(error)  # calls it again, with None
            return False
        return True

    def _on_protocol_error(self, error: Exception) -> None:
        """Lose the connection: a message is not of this protocol, or is inconsistent."""
        reason = (
            f"{type(error).__name__}: {error}" if not isinstance(error, WireError) else error.detail
        )
        self.reachability.on_protocol_error(reason)
        if not isinstance(error, WireError):
            logger.error("answer_not_understood address=%s", self.address, exc_info=error)
        self._lose(ErrorCode.MALFORMED_REQUEST, reason)

    # ---- time ------------------------------------------------------------------------------------

    def next_tick_ns(self) -> int | None:
        """The time when `tick` or `process` is due next, which may be in the past. None: never."""
        if self._is_process_due:
            return self._last_received_ns
        if not self.is_ready:
            retry_ns = (
                self._reopen_at_ns
                if self._socket is None
                else min(self._handshake_deadline_ns(), self._refused.probe_at_ns(self._opened_ns))
            )
            return min(retry_ns, self.reachability.warning_at_ns())
        return (
            max(self._last_received_ns, self._pinged_ns) + PING_AFTER_NS if self._pending else None
        )

    def tick(self, now_ns: int) -> None:
        """Reopen the socket, repeat the handshake, ping, or give up a silent front."""
        if self.fatal is not None or self._refusal is not None:
            return
        is_nested = self._is_in_use
        if self._is_torn and not is_nested:
            self._mend()
        self._is_in_use = self._is_torn = True
        try:
            self._run_timers(now_ns)
            self._is_torn = is_nested
        finally:
            self._is_in_use = is_nested

    def _run_timers(self, now_ns: int) -> None:
        if not self.is_ready:
            error = self.reachability.warn(now_ns)
            if error is not None:
                self.fatal = error
        if self._socket is None:
            if now_ns >= self._reopen_at_ns:
                self._reopen()
        elif not self.is_ready:
            if now_ns >= self._handshake_deadline_ns():
                self._unanswered += 1
                self._close_socket()
                self._reopen()
            elif now_ns >= self._refused.probe_at_ns(self._opened_ns):
                self._check_refusal(now_ns)
        elif self._pending:
            if now_ns - self._last_received_ns >= DEAD_AFTER_NS:
                self._lose(ErrorCode.TIMED_OUT, "the appliance does not answer")
            elif now_ns - max(self._last_received_ns, self._pinged_ns) >= PING_AFTER_NS:
                self._pinged_ns = now_ns
                _, frames = self.session.request(Api.PING)
                self._socket.try_send(frames)
                self._came_in_tick = self.process() > 0

    def _handshake_deadline_ns(self) -> int:
        """The time when the pending handshake is given up."""
        return self._opened_ns + (
            HANDSHAKE_RETRY_NS << min(self._unanswered, HANDSHAKE_BACKOFF_DOUBLINGS)
        )

    def _check_refusal(self, now_ns: int) -> None:
        """Act on what is known about a handshake without a response. A refusal is fatal."""
        reason = self._refused.refusal(now_ns)
        if reason is None:
            return
        if self._refused.tries_next_key(reason):
            self._close_socket()
            self._reopen()
        else:
            self._lose(ErrorCode.NOT_AUTHENTICATED, f"{reason} ({self.address})")

    # ---- waiting ---------------------------------------------------------------------------------

    def wait(self, timeout_ns: int, *wake_fds: int) -> Sequence[int] | None:
        """Sleep until something may have come, one of `wake_fds` is readable, or the timeout has
        passed.

        Returns the readable descriptors (None: perhaps all). It needs no lock, since it touches no
        socket state.
        """
        return self._runtime.sleep_on((self.fileno(), *wake_fds), timeout_ns)

    def sleep_until(self, until_ns: int | None) -> None:
        """Sleep until something may have come, or until that time (None: no limit)."""
        self.wait(NEVER_NS if until_ns is None else until_ns - self.now_ns())

    def sleep_unlocked(self, lock: threading.RLock, until_ns: int | None) -> None:
        """Release `lock`, which the owner holds once, during `sleep_until`. Others may acquire it
        and close the connection meanwhile.
        """
        wait_ns = (
            SHARED_WAIT_NS if until_ns is None else min(until_ns - self.now_ns(), SHARED_WAIT_NS)
        )
        lock.release()
        try:
            self.wait(wait_ns)
        finally:
            lock.acquire()

    # ---- opening and closing ---------------------------------------------------------------------

    def _new_session(self) -> ClientSession:
        """A session whose requests' ids begin at random: a line of the appliance's log names one
        request of all clients.
        """
        first = int(self._runtime.random() * (1 << 31)) + 1 << 16
        return ClientSession(self._client_id, first, self._refused.acting_for)

    def _open(self) -> None:
        self.opened_count += 1
        self._socket = (
            self._runtime.open_socket(self.address)
            if self._refused.credentials is None
            else self._runtime.open_socket(self.address, self._refused.credentials)
        )
        self.session = self._new_session()
        self._opened_ns = self._last_received_ns = self.now_ns()
        self._socket.try_send(self.session.start())

    def _reopen(self) -> None:
        self._open()
        # ZeroMQ signals the first message only after a poll that found none. Without one, the
        # handshake's response would be noticed a second late.
        self._is_process_due = self.process() > 0

    def _lose(self, code: ErrorCode, reason: str) -> None:
        """Give the socket up and call all pending callbacks with None."""
        self._close_socket()
        self.reachability.on_lost(self.now_ns())
        if code in (ErrorCode.UNSUPPORTED_VERSION, ErrorCode.NOT_AUTHENTICATED):
            self.fatal = error_for(code, reason)
        delay_ns = min(REOPEN_MAX_NS, REOPEN_FIRST_NS << min(self._failures, 10))
        self._failures += 1
        self._reopen_at_ns = self.now_ns() + int(delay_ns * (0.5 + self._runtime.random() / 2))
        for correlation_id, on_response in list(self._pending.items()):
            on_response(None)
            # Removed last: an interrupted callback is called again.
            self._pending.pop(correlation_id, None)

    def _close_socket(self) -> None:
        # Out of reach first: a signal handler may raise afterwards, and the socket ends by itself.
        self._refused.end_probe()
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    def close(self) -> None:
        """Close the connection. No callback is called, and queued messages are not sent."""
        if self._refusal is None:
            self._refusal = ClientClosedError(f"the {self._owner} is closed")
        self._pending.clear()
        self._close_socket()

    def after_fork(self) -> None:
        """Stop being usable, in a child process. The socket is the parent's and stays open."""
        self._refusal = fork.forked_error(self._owner)
        fork.keep_for_parent((self._socket, self._pending, self._refused.release_probe()))
        self._socket = None
        self._pending = {}
