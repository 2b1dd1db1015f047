"""One connection: a DEALER to one front, reopened by itself, driven by its caller.

There is no thread here and nothing blocks: `process()` takes in what has come, `wait()` sleeps
until something may have. ZeroMQ's own reconnection replays some messages and loses others (tried:
65 of 400), so when the front shows another generation, does not know us, or stays silent, the
socket is closed (linger 0) and another opened; every request that was under way is told `None`, and
its owner sends it again, in order.

What an answer's bytes can cause ends the connection, never its user: an answer that does not parse
is told as None, with a line in the log.

A signal's handler may raise between any two instructions, also between the taking of a message off
the socket and its way to its owner. So `request`, `process` and `tick` note that they have begun,
and that they have come to their end. When one was cut off, the next to use the connection gives the
socket up as if it had been lost (ZeroMQ itself drops a message whose receiving a handler cuts off):
nobody waits for an answer that was thrown away.

Owner: its user's lock: no method may be called by two threads at a time.
Invariants: closed, or in a child of the process that made it, it uses no socket again, and says
    why; an owner is told of its request once with an answer, or with None: at the latest when the
    connection is used next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from tailrace.client.runtime import SYSTEM, ClientSocket, Runtime
from tailrace.core import fork
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ClientClosedError,
    InvalidSettingError,
    NotReachableError,
    TailraceError,
    error_for,
)
from tailrace.core.log import logger
from tailrace.format.crc32c import Readable
from tailrace.protocol.frame import PUSH_CORRELATION_ID, Api, WireError
from tailrace.protocol.session import ClientSession, Response, State

PING_AFTER_NS = 250_000_000
"""Silence while something is under way, after which the front is asked whether it still knows
us.
"""
DEAD_AFTER_NS = 5_000_000_000
"""Silence after which the socket is given up."""
HANDSHAKE_RETRY_NS = 1_000_000_000
HANDSHAKE_BACKOFF_DOUBLINGS = 2
"""A handshake that is not answered is made again, over a new socket, after HANDSHAKE_RETRY_NS, then
after twice and four times that: hundreds of clients that come at once to a host without a free core
would otherwise spend it on handshakes that nobody waits for any more, and none would get through.
"""
WARN_AFTER_NS = 1_000_000_000
"""Without an appliance for so long, the log says what is waited for: a program that blocks in
silence looks hung.
"""
REOPEN_FIRST_NS = 20_000_000
REOPEN_MAX_NS = 1_000_000_000
COPY_BELOW_BYTES = 64 << 10
UNREACHABLE_AFTER_NS = 60_000_000_000
"""A poll complains when the appliance has been away for so long."""
SHARED_WAIT_NS = 20_000_000
"""How long `call` sleeps at a time while others may use the connection: the answer may come to
them.
"""

NEVER_NS = 2**62
T = TypeVar("T")

_READY, _LOST = State.READY, State.LOST

OnResponse = Callable[[Response | None], None]
"""Called with the answer, or with None when the connection was lost before one came."""


def check_bootstrap(address: object) -> str:
    """The address as ZeroMQ takes it. Kafka's spellings are taken too: `host:port`, and a list of
    one. Raises InvalidSettingError.
    """
    if isinstance(address, str) and "," in address:
        address = [part.strip() for part in address.split(",") if part.strip()]
    if isinstance(address, (list, tuple)):
        if len(address) > 1:
            raise InvalidSettingError(
                f"bootstrap_servers names {len(address)} addresses; an appliance is one host: "
                "give one"
            )
        address = address[0] if address else ""
    if isinstance(address, str):
        if address.startswith(("tcp://", "ipc://")):
            return address
        host, _, port = address.rpartition(":")
        if host and port.isdecimal() and "/" not in address:
            return f"tcp://{address}"
    raise InvalidSettingError(
        f"bootstrap_servers is {address!r}; it takes an address such as tcp://127.0.0.1:7420, "
        "localhost:7420 or ipc:///run/tailrace/tailrace.sock"
    )


class Connection:
    """See the module's docstring. Call `process` often, and `tick` when `next_tick_ns` has come."""

    def __init__(
        self, address: str, client_id: str, runtime: Runtime = SYSTEM, owner: str = "client"
    ) -> None:
        """`owner`: what it is a part of, for sentences."""
        self.address = check_bootstrap(address)
        self._owner = owner
        self._refusal: ClientClosedError | None = None
        """Why it is not used any more."""
        self._client_id = client_id
        self._runtime = runtime
        self.now_ns = runtime.monotonic_ns
        self._socket: ClientSocket | None = None
        self.session = ClientSession(client_id)
        self._pending: dict[int, OnResponse] = {}
        self.on_push: Callable[[Response], None] | None = None
        """Called with what comes that answers no request and is not about credit."""
        self.opened_count = 0
        """How many sockets it has opened: a new one may have the descriptor number of the one
        before.
        """
        self.received_count = 0
        """How many messages have come, over all sockets."""
        self._opened_ns = 0
        self._unanswered = 0
        """How many handshakes in a row were given up."""
        self._last_received_ns = 0
        self._pinged_ns = 0
        self._reopen_at_ns = 0
        self._is_in_use = False
        """Whether its socket is being used, further up in the same thread: an owner may send a
        request when it gets its answer.
        """
        self._is_cut_off = False
        """Whether its socket is being used, or a use of it was cut off."""
        self._came_in_tick = False
        """Whether `tick` has taken in something since `process` was called: perhaps what its user
        waits for before it sends.
        """
        self._failures = 0
        self._waited_since_ns = 0
        """Since when its user has waited for an appliance in vain; 0: there is one, or nothing has
        been wanted of it since.
        """
        self._has_warned = False
        self._away_since_ns = 0
        """Since when its user's polls have found no appliance; 0: the last one found it."""
        self.fatal: TailraceError | None = None
        """A refusal that no retry mends (no common protocol version)."""
        self._protocol_error = ""
        """What was met at the address that is not an appliance."""
        self._open()
        fork.add(self)

    # ---- state -----------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether requests can be sent now: there is a socket, and its handshake was answered."""
        return self._socket is not None and self.session.state is _READY

    @property
    def is_usable(self) -> bool:
        """Whether it is neither closed nor of another process."""
        return self._refusal is None

    def check_usable(self) -> None:
        """Raise ClientClosedError when it is closed, or was made before a fork."""
        if self._refusal is not None:
            raise self._refusal

    def check_reachable(self, now_ns: int) -> None:
        """In each poll, after `tick`. Raises NotReachableError when polls have found the appliance
        away for UNREACHABLE_AFTER_NS, or why the connection is of no use any more.
        """
        if self.fatal is not None:
            raise self.fatal
        if self.is_ready:
            self._away_since_ns = 0
        elif not self._away_since_ns:
            self._away_since_ns = now_ns
        elif now_ns - self._away_since_ns > UNREACHABLE_AFTER_NS:
            raise NotReachableError(
                f"no appliance answers at {self.address}{self.peer_error_suffix()}"
            )

    def fileno(self) -> int:
        """The descriptor to poll: readable when something *may* have come; -1 while there is no
        socket.
        """
        return -1 if self._socket is None else self._socket.fileno()

    # ---- sending ---------------------------------------------------------------------------------

    def version(self, api: Api) -> int:
        """The version of an API that is spoken now; 0: none, or no connection is ready."""
        return self.session.version(api) if self.session.state is _READY else 0

    def request(self, api: Api, body: Sequence[Readable], on_response: OnResponse | None) -> bool:
        """Send a request; False while the connection is not ready. None: no answer is expected.
        Raises TailraceError when the appliance does not know the API.
        """
        is_nested = self._is_in_use
        if self._is_cut_off and not is_nested:
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
        self._is_cut_off = True
        if on_response is not None:
            self._pending[correlation_id] = on_response
        is_sent = socket.try_send(frames, copy=copy)
        if not is_sent and on_response is not None:
            del self._pending[correlation_id]
        self._is_cut_off = is_nested
        return is_sent

    # ---- receiving -------------------------------------------------------------------------------

    def process(self) -> int:
        """Take in everything that has come and call the owners of the requests that it answers.
        Returns how many messages came. To be called after any use of the socket: its descriptor
        tells of changes only.
        """
        is_nested = self._is_in_use
        if self._is_cut_off and not is_nested:
            self._mend()
        self._is_in_use = self._is_cut_off = True
        try:
            count = 0
            self._came_in_tick = False
            while (socket := self._socket) is not None:
                frames = socket.try_receive()
                if frames is None:
                    break
                count += 1
                self.received_count += 1
                if not self._load_group(frames):
                    break
            self._is_cut_off = is_nested
            return count
        finally:
            self._is_in_use = is_nested

    def _load_group(self, frames: Sequence[Readable]) -> bool:
        """One message; False: it was the connection's last."""
        self._last_received_ns = self.now_ns()
        session = self.session
        was_ready = session.state is _READY
        try:
            response = session.receive(frames)
        except Exception as error:
            self._on_protocol_error(error)
            return False
        if session.state is _LOST:
            self._lose(session.lost_code, session.lost_reason)
            return False
        if not was_ready and session.state is _READY:
            self._failures = self._waited_since_ns = self._unanswered = 0
            self._has_warned = False
            self._protocol_error = ""
        if response is None:
            return True
        if response.correlation_id == PUSH_CORRELATION_ID:
            return self._take(self._on_push, response)
        on_response = self._pending.get(response.correlation_id)
        if on_response is None:
            return True
        is_taken = self._take(on_response, response)
        self._pending.pop(
            response.correlation_id, None
        )  # not before: until then it is told when the connection is lost
        return is_taken

    def give_up_socket(self) -> None:
        """Open another one at once, and tell every owner of a request that it is lost: its user was
        cut off in the midst of something and does not know how far it has come.
        """
        self._is_cut_off = True
        self._mend()

    def _mend(self) -> None:
        """A use of the socket was cut off: see the module's docstring. What is cut off here is
        mended at the next use.
        """
        self._is_in_use = True
        try:
            if self._refusal is None:
                self._lose(
                    ErrorCode.SESSION_UNKNOWN,
                    "a signal's handler has cut off the use of its socket",
                )
                self._reopen_at_ns = self.now_ns()
            self._is_cut_off = False
        finally:
            self._is_in_use = False

    def _on_push(self, response: Response | None) -> None:
        if response is not None and self.on_push is not None:
            self.on_push(response)

    def _take(self, on_response: OnResponse, response: Response) -> bool:
        """Give an answer to its owner; False: its owner could make nothing of it, and the
        connection is lost.
        """
        try:
            on_response(response)
        except Exception as error:
            self._on_protocol_error(error)  # which tells its owner that it is lost
            return False
        return True

    def _on_protocol_error(self, error: Exception) -> None:
        """What came is not of this protocol, or contradicts itself."""
        self._protocol_error = (
            f"{type(error).__name__}: {error}" if not isinstance(error, WireError) else error.detail
        )
        if not isinstance(error, WireError):
            logger.error("answer_not_understood address=%s", self.address, exc_info=error)
        self._lose(ErrorCode.MALFORMED_REQUEST, self._protocol_error)

    # ---- time ------------------------------------------------------------------------------------

    def next_tick_ns(self) -> int | None:
        """When `tick`, or its user, next has something to do; not in the future: now."""
        if self._came_in_tick:
            return self._last_received_ns
        if not self.is_ready:
            retry_ns = self._reopen_at_ns if self._socket is None else self._handshake_deadline_ns()
            return (
                min(retry_ns, self._waited_since_ns + WARN_AFTER_NS)
                if self._waited_since_ns and not self._has_warned
                else retry_ns
            )
        return (
            max(self._last_received_ns, self._pinged_ns) + PING_AFTER_NS if self._pending else None
        )

    def tick(self, now_ns: int) -> None:
        """Reopen, repeat the handshake, ping, or give up on a silent front."""
        if self.fatal is not None or self._refusal is not None:
            return
        is_nested = self._is_in_use
        if self._is_cut_off and not is_nested:
            self._mend()
        self._is_in_use = self._is_cut_off = True
        try:
            self._run_timers(now_ns)
            self._is_cut_off = is_nested
        finally:
            self._is_in_use = is_nested

    def _run_timers(self, now_ns: int) -> None:
        if not self.is_ready:
            self._warn_unreachable(now_ns)
        if self._socket is None:
            if now_ns >= self._reopen_at_ns:
                self._reopen()
        elif not self.is_ready:
            if now_ns >= self._handshake_deadline_ns():
                self._unanswered += 1
                self._close_socket()
                self._reopen()
        elif self._pending:
            if now_ns - self._last_received_ns >= DEAD_AFTER_NS:
                self._lose(ErrorCode.TIMED_OUT, "the appliance does not answer")
            elif now_ns - max(self._last_received_ns, self._pinged_ns) >= PING_AFTER_NS:
                self._pinged_ns = now_ns
                _, frames = self.session.request(Api.PING)
                self._socket.try_send(frames)

    def _handshake_deadline_ns(self) -> int:
        """When the handshake that is under way is given up."""
        return self._opened_ns + (
            HANDSHAKE_RETRY_NS << min(self._unanswered, HANDSHAKE_BACKOFF_DOUBLINGS)
        )

    def _warn_unreachable(self, now_ns: int) -> None:
        """Once, when an appliance has been waited for long enough. The time in which nothing was
        wanted of it does not count: it may be there by now.
        """
        if not self._waited_since_ns:
            self._waited_since_ns = now_ns
        elif not self._has_warned and now_ns - self._waited_since_ns >= WARN_AFTER_NS:
            self._has_warned = True
            logger.warning(
                "the %s gets no answer at %s%s; it goes on trying",
                self._owner,
                self.address,
                self.peer_error_suffix(),
            )

    # ---- waiting ---------------------------------------------------------------------------------

    def wait(self, timeout_ns: int, wake_fd: int = -1) -> Sequence[int] | None:
        """Sleep until something may have come, `wake_fd` is readable, or the time is up; returns
        what is readable (None: perhaps both). Safe beside a holder of the lock: it touches no
        socket state.
        """
        return self._runtime.sleep_on((self.fileno(), wake_fd), timeout_ns)

    def sleep_until(self, until_ns: int | None) -> None:
        """Sleep until something may have come, or until that time; None: without limit."""
        self.wait(NEVER_NS if until_ns is None else until_ns - self.now_ns())

    def sleep_unlocked(self, lock: threading.RLock, until_ns: int | None) -> None:
        """`sleep_until` without `lock`, the owner's, held once. Others may take it, and close the
        connection, meanwhile.
        """
        wait_ns = (
            SHARED_WAIT_NS if until_ns is None else min(until_ns - self.now_ns(), SHARED_WAIT_NS)
        )
        lock.release()
        try:
            self.wait(wait_ns)
        finally:
            lock.acquire()

    def peer_error_suffix(self) -> str:
        """For a sentence: what was found at the address instead of an appliance, if that is
        known.
        """
        return (
            "; what was met there does not speak Tailrace's protocol "
            f"({self._protocol_error[:200]})"
            if self._protocol_error
            else ""
        )

    # ---- opening and closing ---------------------------------------------------------------------

    def _open(self) -> None:
        self.opened_count += 1
        self._socket = self._runtime.open_socket(self.address)
        self.session = ClientSession(self._client_id)
        self._opened_ns = self._last_received_ns = self.now_ns()
        self._socket.try_send(self.session.start())

    def _reopen(self) -> None:
        self._open()
        # ZeroMQ signals the first message only to one who has looked and found none: the
        # handshake's answer would be seen a second late.
        self._came_in_tick = self.process() > 0

    def _lose(self, code: ErrorCode, reason: str) -> None:
        """Give the socket up and tell every owner of a request."""
        self._close_socket()
        if code is ErrorCode.UNSUPPORTED_VERSION:
            self.fatal = error_for(code, reason)
        delay_ns = min(REOPEN_MAX_NS, REOPEN_FIRST_NS << min(self._failures, 10))
        self._failures += 1
        self._reopen_at_ns = self.now_ns() + int(delay_ns * (0.5 + self._runtime.random() / 2))
        for correlation_id, on_response in list(self._pending.items()):
            on_response(None)
            self._pending.pop(
                correlation_id, None
            )  # not before: what is cut off here is told again

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """End the connection; nobody is told, and what is queued is not sent."""
        if self._refusal is None:
            self._refusal = ClientClosedError(f"the {self._owner} is closed")
        self._pending.clear()
        self._close_socket()

    def after_fork(self) -> None:
        """In a child: the socket is the parent's, and stays as it is."""
        self._refusal = fork.forked_error(self._owner)
        fork.keep_for_parent((self._socket, self._pending))
        self._socket = None
        self._pending = {}
