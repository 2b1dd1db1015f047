"""One connection: a DEALER to one front, reopened by itself, driven by its caller.

There is no thread here and nothing blocks: `process()` takes in what has come, `wait()` sleeps until something may have. ZeroMQ's own reconnection
replays some messages and loses others (tried: 65 of 400), so when the front shows another generation, does not know us, or stays silent, the socket
is closed (linger 0) and another opened; every request that was under way is told `None`, and its owner sends it again, in order.

What an answer's bytes can cause ends the connection, never its user: an answer that does not parse is told as None, with a line in the log.

Owner: its user's lock: no method may be called by two threads at a time.
Invariants: closed, or in a child of the process that made it, it uses no socket again, and says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from tailrace import live_clients
from tailrace.client_log import logger
from tailrace.environment import REAL, ClientSocket, Environment
from tailrace.errors import ClientClosedError, InvalidSettingError, NotReachableError, TailraceError, error_for
from tailrace.formats.checksum import Readable
from tailrace.pending_call import PendingCall
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.session import CLIENT_JSON_MAX_BYTES, ClientSession, Response, State
from tailrace.protocol.wire import PUSH_CORRELATION_ID, Api, WireError

PING_AFTER_NS = 250_000_000
"""Silence while something is under way, after which the front is asked whether it still knows us."""
DEAD_AFTER_NS = 5_000_000_000
"""Silence after which the socket is given up."""
HANDSHAKE_RETRY_NS = 1_000_000_000
HANDSHAKE_RETRY_DOUBLINGS = 2
"""A handshake that is not answered is made again, over a new socket, after HANDSHAKE_RETRY_NS, then after twice and four times that: hundreds of clients that
come at once to a host without a free core would otherwise spend it on handshakes that nobody waits for any more, and none would get through."""
SAID_AFTER_NS = 1_000_000_000
"""Without an appliance for so long, the log says what is waited for: a program that blocks in silence looks hung."""
REOPEN_FIRST_NS = 20_000_000
REOPEN_MAX_NS = 1_000_000_000
COPY_BELOW_BYTES = 64 << 10
UNREACHABLE_AFTER_NS = 60_000_000_000
"""A poll complains when the appliance has been away for so long."""
SHARED_WAIT_NS = 20_000_000
"""How long `call` sleeps at a time while others may use the connection: the answer may come to them."""

_READY, _LOST = State.READY, State.LOST

OnResponse = Callable[[Response | None], None]
"""Called with the answer, or with None when the connection was lost before one came."""


def check_bootstrap(address: object) -> str:
    """The address as ZeroMQ takes it. Kafka's spellings are taken too: `host:port`, and a list of one. Raises InvalidSettingError."""
    if isinstance(address, str) and "," in address:
        address = [part.strip() for part in address.split(",") if part.strip()]
    if isinstance(address, (list, tuple)):
        if len(address) > 1:
            raise InvalidSettingError(f"bootstrap names {len(address)} addresses; an appliance is one host: give one")
        address = address[0] if address else ""
    if isinstance(address, str):
        if address.startswith(("tcp://", "ipc://")):
            return address
        host, _, port = address.rpartition(":")
        if host and port.isdecimal() and "/" not in address:
            return f"tcp://{address}"
    raise InvalidSettingError(
        f"bootstrap is {address!r}; it takes an address such as tcp://127.0.0.1:7420, localhost:7420 or ipc:///run/tailrace/tailrace.sock"
    )


class Connection:
    """See the module's docstring. Call `process` often, and `tick` when `next_tick_ns` has come."""

    def __init__(self, address: str, client_id: str, environment: Environment = REAL, owner: str = "client") -> None:
        """`owner`: what it is a part of, for sentences."""
        self.address = check_bootstrap(address)
        self._owner = owner
        self._refusal: ClientClosedError | None = None
        """Why it is not used any more."""
        self._client_id = client_id
        self._environment = environment
        self.now_ns = environment.monotonic_ns
        self._socket: ClientSocket | None = None
        self.session = ClientSession(client_id)
        self._pending: dict[int, OnResponse] = {}
        self.on_push: Callable[[Response], None] | None = None
        """Called with what comes that answers no request and is not about credit."""
        self.opened_count = 0
        """How many sockets it has opened: a new one may have the descriptor number of the one before."""
        self.received_count = 0
        """How many messages have come, over all sockets."""
        self._opened_ns = 0
        self._unanswered = 0
        """How many handshakes in a row were given up."""
        self._heard_ns = 0
        self._pinged_ns = 0
        self._reopen_at_ns = 0
        self._came_in_tick = False
        """Whether `tick` has taken in something since `process` was called: perhaps what its user waits for before it sends."""
        self._failures = 0
        self._waited_since_ns = 0
        """Since when its user has waited for an appliance in vain; 0: there is one, or nothing has been wanted of it since."""
        self._has_said_so = False
        self._away_since_ns = 0
        """Since when its user's polls have found no appliance; 0: the last one found it."""
        self.fatal: TailraceError | None = None
        """A refusal that no retry mends (no common protocol version)."""
        self._oddity = ""
        """What was met at the address that is not an appliance."""
        self._open()
        live_clients.add(self)

    # ---- state -----------------------------------------------------------------------------------------------------------------------

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
        """In each poll, after `tick`. Raises NotReachableError when polls have found the appliance away for UNREACHABLE_AFTER_NS, or why the connection is of
        no use any more.
        """
        if self.fatal is not None:
            raise self.fatal
        if self.is_ready:
            self._away_since_ns = 0
        elif not self._away_since_ns:
            self._away_since_ns = now_ns
        elif now_ns - self._away_since_ns > UNREACHABLE_AFTER_NS:
            raise NotReachableError(f"no appliance answers at {self.address}{self.met()}")

    def fileno(self) -> int:
        """The descriptor to poll: readable when something *may* have come; -1 while there is no socket."""
        return -1 if self._socket is None else self._socket.fileno()

    # ---- sending ---------------------------------------------------------------------------------------------------------------------

    def request(self, api: Api, body: Sequence[Readable], on_response: OnResponse | None) -> bool:
        """Send a request; False while the connection is not ready. None: no answer is expected. Raises TailraceError when the appliance
        does not know the API.
        """
        socket, session = self._socket, self.session
        if socket is None or session.state is not _READY:
            return False
        try:
            correlation_id, frames = session.request(api, body)
        except WireError as error:
            raise error_for(error.code, error.detail) from None
        if not self._pending:
            self._heard_ns = self.now_ns()
        if not socket.try_send(frames, copy=sum(map(len, body)) < COPY_BELOW_BYTES):
            return False
        if on_response is not None:
            self._pending[correlation_id] = on_response
        return True

    # ---- receiving -------------------------------------------------------------------------------------------------------------------

    def process(self) -> int:
        """Take in everything that has come and call the owners of the requests that it answers. Returns how many messages came. To be called
        after any use of the socket: its descriptor tells of changes only.
        """
        count = 0
        self._came_in_tick = False
        while (socket := self._socket) is not None:
            frames = socket.try_receive()
            if frames is None:
                break
            count += 1
            self.received_count += 1
            self._heard_ns = self.now_ns()
            session = self.session
            was_ready = session.state is _READY
            try:
                response = session.receive(frames)
            except Exception as error:
                self._meet_oddity(error)
                break
            if session.state is _LOST:
                self._lose(session.lost_code, session.lost_reason)
                break
            if not was_ready and session.state is _READY:
                self._failures = self._waited_since_ns = self._unanswered = 0
                self._has_said_so = False
                self._oddity = ""
            if response is not None:
                on_response = self._pending.pop(response.correlation_id, None)
                if response.correlation_id == PUSH_CORRELATION_ID:
                    on_response = self._take_push
                if on_response is not None and not self._take(on_response, response):
                    break
        return count

    def _take_push(self, response: Response | None) -> None:
        if response is not None and self.on_push is not None:
            self.on_push(response)

    def _take(self, on_response: OnResponse, response: Response) -> bool:
        """Give an answer to its owner; False: its owner could make nothing of it, and the connection is lost."""
        try:
            on_response(response)
        except Exception as error:
            on_response(None)
            self._meet_oddity(error)
            return False
        return True

    def _meet_oddity(self, error: Exception) -> None:
        """What came is not of this protocol, or contradicts itself."""
        self._oddity = f"{type(error).__name__}: {error}" if not isinstance(error, WireError) else error.detail
        if not isinstance(error, WireError):
            logger.error("answer_not_understood address=%s", self.address, exc_info=error)
        self._lose(ErrorCode.MALFORMED_REQUEST, self._oddity)

    # ---- time ------------------------------------------------------------------------------------------------------------------------

    def next_tick_ns(self) -> int | None:
        """When `tick`, or its user, next has something to do; not in the future: now."""
        if self._came_in_tick:
            return self._heard_ns
        if not self.is_ready:
            again_ns = self._reopen_at_ns if self._socket is None else self._shake_again_ns()
            return min(again_ns, self._waited_since_ns + SAID_AFTER_NS) if self._waited_since_ns and not self._has_said_so else again_ns
        return max(self._heard_ns, self._pinged_ns) + PING_AFTER_NS if self._pending else None

    def tick(self, now_ns: int) -> None:
        """Reopen, repeat the handshake, ping, or give up on a silent front."""
        if self.fatal is not None or self._refusal is not None:
            return
        if not self.is_ready:
            self._say_what_is_waited_for(now_ns)
        if self._socket is None:
            if now_ns >= self._reopen_at_ns:
                self._reopen()
        elif not self.is_ready:
            if now_ns >= self._shake_again_ns():
                self._unanswered += 1
                self._close_socket()
                self._reopen()
        elif self._pending:
            if now_ns - self._heard_ns >= DEAD_AFTER_NS:
                self._lose(ErrorCode.TIMED_OUT, "the appliance does not answer")
            elif now_ns - max(self._heard_ns, self._pinged_ns) >= PING_AFTER_NS:
                self._pinged_ns = now_ns
                _, frames = self.session.request(Api.PING)
                self._socket.try_send(frames)

    def _shake_again_ns(self) -> int:
        """When the handshake that is under way is given up."""
        return self._opened_ns + (HANDSHAKE_RETRY_NS << min(self._unanswered, HANDSHAKE_RETRY_DOUBLINGS))

    def _say_what_is_waited_for(self, now_ns: int) -> None:
        """Once, when an appliance has been waited for long enough. The time in which nothing was wanted of it does not count: it may be there by now."""
        if not self._waited_since_ns:
            self._waited_since_ns = now_ns
        elif not self._has_said_so and now_ns - self._waited_since_ns >= SAID_AFTER_NS:
            self._has_said_so = True
            logger.warning("the %s gets no answer at %s%s; it goes on trying", self._owner, self.address, self.met())

    # ---- waiting -----------------------------------------------------------------------------------------------------------------------

    def wait(self, timeout_ns: int, wake_fd: int = -1) -> Sequence[int] | None:
        """Sleep until something may have come, `wake_fd` is readable, or the time is up; returns what is readable (None: perhaps both). Safe beside a holder of
        the lock: it touches no socket state.
        """
        return self._environment.sleep_on((self.fileno(), wake_fd), timeout_ns)

    def call(
        self,
        api: Api,
        body: Sequence[Readable],
        timeout_ms: int,
        connect_timeout_ms: int | None = None,
        lock: threading.RLock | None = None,
    ) -> Response:
        """Send a request and wait for its answer, driving the connection; repeats it when the connection is lost, or the appliance cannot take it now.
        `lock`: the owner's, held once; others may have it, and close the connection, while this sleeps.

        Raises NotReachableError when no connection came about within `connect_timeout_ms` (None: `timeout_ms`), RequestTimeoutError, ClientClosedError, or
        what the answer says.
        """
        pending = PendingCall(self, api, body, timeout_ms, connect_timeout_ms, self.now_ns())
        while (answer := pending.step()) is None:
            wait_ns = pending.step_again_ns - self.now_ns()
            if lock is None:
                self.wait(wait_ns)
            else:
                self._wait_unlocked(lock, wait_ns)
        return answer

    def call_json(
        self, api: Api, request: dict[str, Any], timeout_ms: int, connect_timeout_ms: int | None = None, lock: threading.RLock | None = None
    ) -> dict[str, Any]:
        """`call` with JSON both ways. Raises what it does, and MalformedRequestError for an answer that is not JSON."""
        return decode_answer(api, self.call(api, [requests.encode_json(request)], timeout_ms, connect_timeout_ms, lock))

    def _wait_unlocked(self, lock: threading.RLock, wait_ns: int) -> None:
        lock.release()
        try:
            self.wait(min(wait_ns, SHARED_WAIT_NS))
        finally:
            lock.acquire()

    def met(self) -> str:
        """For a sentence: what was found at the address instead of an appliance, if that is known."""
        return f"; what was met there does not speak Tailrace's protocol ({self._oddity[:200]})" if self._oddity else ""

    # ---- opening and closing -----------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        self.opened_count += 1
        self._socket = self._environment.open_socket(self.address)
        self.session = ClientSession(self._client_id)
        self._opened_ns = self._heard_ns = self.now_ns()
        self._socket.try_send(self.session.start())

    def _reopen(self) -> None:
        self._open()
        # ZeroMQ signals the first message only to one who has looked and found none: the handshake's answer would be seen a second late.
        self._came_in_tick = self.process() > 0

    def _lose(self, code: ErrorCode, reason: str) -> None:
        """Give the socket up and tell every owner of a request."""
        self._close_socket()
        if code is ErrorCode.UNSUPPORTED_VERSION:
            self.fatal = error_for(code, reason)
        delay_ns = min(REOPEN_MAX_NS, REOPEN_FIRST_NS << min(self._failures, 10))
        self._failures += 1
        self._reopen_at_ns = self.now_ns() + int(delay_ns * (0.5 + self._environment.random() / 2))
        pending, self._pending = self._pending, {}
        for on_response in pending.values():
            on_response(None)

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
        self._refusal = live_clients.forked_error(self._owner)
        live_clients.keep_for_parent((self._socket, self._pending))
        self._socket = None
        self._pending = {}


def decode_answer(api: Api, response: Response) -> dict[str, Any]:
    """The JSON of an answer. Raises MalformedRequestError when it is none."""
    try:
        return requests.decode_json(response.body[0] if response.body else b"", CLIENT_JSON_MAX_BYTES)
    except WireError as error:
        raise error_for(error.code, f"the answer to {api.name}: {error.detail}") from None
