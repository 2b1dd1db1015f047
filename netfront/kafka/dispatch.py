"""Dispatch: requests of connections to the handlers of their APIs, and their responses back.

Owner: one gateway.

Invariants:
- A connection that has UNSENT_HIGH_BYTES of responses to send begins no request.
- A request is answered once, in the order of its connection, or its connection is closed.
- Of a connection one request is served at a time, as Kafka does. Only PRODUCE is served beside
  others of its kind: PIPELINED_MAX.
- With users a request is begun for the user who has logged in, as it is now. Before the login there
  are ApiVersions, SaslHandshake and SaslAuthenticate alone.
- A failing request affects no other one. An unexpected error is counted and logged. Where its
  request cannot be answered, its connection is closed.
- The size of a request is checked when it is begun: what it is depends on the one before it.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from netfront.kafka.apis.call import Call, DisconnectError, Handler, RefusedError, Services
from netfront.kafka.apis.table import (
    API_VERSIONS,
    APIS,
    PRODUCE,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    versions_response,
)
from netfront.kafka.exchange.peers import Peer, PeerTransport
from netfront.kafka.exchange.waiter import Steps, Task
from netfront.kafka.network.connection import (
    FRAME_MIN_BYTES,
    UNSENT_HIGH_BYTES,
    Connection,
    Exchange,
)
from netfront.kafka.network.listener import Listener
from netfront.kafka.wire.decoding import MalformedError, Reader, decode, request_reader
from netfront.kafka.wire.definitions import definition, is_flexible
from netfront.kafka.wire.encoding import response_writer, write_varint
from netfront.kafka.wire.errors import KafkaError
from netfront.socket.zap import CERTIFICATE, Claim
from shm.rights.authorizer import Principal
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.kafka_measurements import KafkaMeasurements
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import WireError

logger = logging.getLogger(__name__)

BEFORE_LOGIN = frozenset((API_VERSIONS, SASL_HANDSHAKE, SASL_AUTHENTICATE))
PIPELINED_MAX = 16
MS = 1_000_000
MUTED_MAX_NS = 1_000_000_000
THROTTLE_MAX_MS = 30_000
_REQUESTS = frozenset(("request_rate",))
_MUTATIONS = _REQUESTS | {"controller_mutation_rate"}
THROTTLED_BY = {
    PRODUCE: _REQUESTS | {"producer_byte_rate"},
    **dict.fromkeys((1, 78), _REQUESTS | {"consumer_byte_rate"}),
    **dict.fromkeys((19, 20, 37), _MUTATIONS),
}
"""API -> the quotas that its clients are told about, beside that of requests."""
CLIENT_ID_MAX = 200
CODE_FIELDS = ("error_code", "partition_error_code", "acknowledge_error_code")
PARTS_DEPTH = 2
PARTS_MAX = 64
"""Parts of each list of a response whose errors are counted."""
_HEADER = struct.Struct(">hhi")
_SIZE = struct.Struct(">i")
_SIZE_AND_ID = struct.Struct(">ii")


class Dispatcher:
    """Serves the requests of all connections."""

    def __init__(
        self,
        services: Services,
        transport: PeerTransport,
        error_handler: CountedErrorHandler,
        measurements: KafkaMeasurements,
    ) -> None:
        self._services = services
        self._transport = transport
        self._error_handler = error_handler
        self._measurements = measurements
        self.allowed: Callable[[Call, Handler], Steps] = lambda call, handler: handler(call)
        """Serves the part of a request that its user may make (`netfront.kafka.rights.table`)."""
        self.listener: Listener | None = None
        """Set once it exists."""
        self.waiting: deque[Connection] = deque()
        """Connections with requests that may begin now."""

    def on_error(self, context: str, error: Exception) -> str:
        """Log and count an unexpected error. Returns the sentence for the client."""
        return self._error_handler.on_error(context, error)

    def on_frames(self, connection: Connection) -> None:
        """Begin the requests of a connection that may begin."""
        try:
            self._services.front.catch_up()
            self._begin_all(connection)
        except Exception as error:
            self._give_up(connection, error)

    def _give_up(self, connection: Connection, error: Exception) -> None:
        """Close a connection that cannot be served for an unexpected error."""
        sentence = self.on_error(f"kafka_connection={connection.address}", error)
        if not connection.is_closed:
            self._refuse(connection, sentence)

    def _begin_all(self, connection: Connection) -> None:
        while (
            connection.frames
            and not (connection.is_closed or connection.is_leaving)
            and _may_begin(connection)
        ):
            if connection.login is not None and connection.login.is_raw:
                self._begin_token(connection, connection.take_frame())
            else:
                self._begin(connection, connection.take_frame())

    def step(self) -> int:
        """Begin requests behind those that were answered. Return how many connections had some."""
        count = 0
        while self.waiting:
            count += 1
            self.on_frames(self.waiting.popleft())
        return count

    def on_secure(self, connection: Connection, user: str | None, subject: str) -> None:
        """Let in the client of a connection whose certificate proves a user. None: none does."""
        gate = self._services.gate
        assert gate is not None
        host = connection.address.rpartition(":")[0]
        claim = Claim(b"", -1, host, user or "", CERTIFICATE)
        try:
            if not user:
                raise WireError(
                    ErrorCode.NOT_AUTHENTICATED,
                    "no rule of kafka.tls.principal.mapping.rules makes a user of "
                    f"{subject!r:.300}",
                )
            gate.admit(claim)
        except WireError as error:
            self._refuse(connection, error.detail)
            return
        connection.claim = claim

    def on_closed(self, connection: Connection) -> None:
        """End the client of a connection that was closed."""
        if connection.peer is not None:
            self._transport.close(connection.peer)
            connection.peer = None

    def _refuse(self, connection: Connection, reason: str) -> None:
        assert self.listener is not None
        self.listener.refuse(connection, reason)

    def _begin(self, connection: Connection, frame: bytes) -> None:
        if len(frame) < FRAME_MIN_BYTES:
            self._refuse(
                connection, f"a request of {len(frame)} bytes; the least are {FRAME_MIN_BYTES}"
            )
            return
        api, version, correlation_id = _HEADER.unpack_from(frame, 0)
        exchange = Exchange(api, version, correlation_id, self._services.now_ns)
        row = APIS.get(api)
        if row is None or definition(api) is None:
            self._refuse(connection, f"API {api} is unknown (UNSUPPORTED_VERSION)")
            return
        self._measurements.began(api, len(frame) + _SIZE.size)
        if not row.low <= version <= row.high:
            if api != API_VERSIONS:
                self._refuse(
                    connection,
                    f"version {version} of API {api} is not supported: use {row.low} to {row.high}",
                )
                return
            exchange.version = 0
            connection.exchanges.append(exchange)
            self._finish(connection, exchange, versions_response(KafkaError.UNSUPPORTED_VERSION, 0))
            return
        try:
            reader = Reader(frame, _HEADER.size)
            client_id = _read_client_id(reader, is_flexible(api, version))
            request = decode(request_reader(api, version), reader)
        except MalformedError as error:
            self._refuse(connection, f"version {version} of API {api}: {error}")
            return
        principal = None
        if self._services.gate is not None and api not in BEFORE_LOGIN:
            try:
                principal = self._principal(connection, api)
            except WireError as error:
                self._refuse(connection, error.detail)
                return
        peer = self._peer(connection, client_id, api)
        connection.exchanges.append(exchange)
        call = Call(self._services, connection, peer, api, version, client_id, request, principal)
        task = exchange.task = Task(
            row.handler(call) if principal is None else self.allowed(call, row.handler),
            self._guarded(
                connection, lambda response: self._finish(connection, exchange, response)
            ),
            self._guarded(connection, lambda error: self._fail(connection, exchange, error)),
        )
        task.resume()

    def _principal(self, connection: Connection, api: int) -> Principal:
        """The user of a request. Raises WireError."""
        gate, login = self._services.gate, connection.login
        assert gate is not None
        claim = connection.claim
        if login is not None:
            claim = login.claim
            if claim is not None and 0 < login.expires_at_ns <= self._services.now_ns:
                raise WireError(
                    ErrorCode.NOT_AUTHENTICATED, "the time of the login is over: log in again"
                )
        if claim is None:
            raise WireError(ErrorCode.NOT_AUTHENTICATED, f"a request of API {api} before the login")
        return gate.admit(claim)

    def _peer(self, connection: Connection, client_id: str, api: int) -> Peer:
        """The client of the front that a connection is. Before the login it is none."""
        login = connection.login
        claim = connection.claim if login is None else login.claim
        if self._services.gate is not None and (claim is None or api in BEFORE_LOGIN):
            return connection.peer or Peer(self._transport, 0, client_id)
        peer = connection.peer
        if peer is not None and peer.claim != claim:
            self._transport.close(peer)  # it has logged in with another credential
            peer = None
        if peer is None:
            peer = connection.peer = self._transport.open(client_id, claim, connection.address)
            peer.unsent_bytes = lambda: connection.unsent_bytes
            peer.on_refused = lambda reason: self._refuse(connection, reason)
        if claim is not None:
            peer.shake()  # the front ends the session with its user
        return peer

    def _begin_token(self, connection: Connection, token: bytes) -> None:
        """Take a token of SASL that has no frame of Kafka's around it."""
        exchange = Exchange(SASL_AUTHENTICATE, 0, 0, self._services.now_ns)
        self._measurements.began(SASL_AUTHENTICATE, len(token) + _SIZE.size)
        connection.exchanges.append(exchange)
        peer = self._peer(connection, "", SASL_AUTHENTICATE)
        request = {"auth_bytes": token}
        call = Call(self._services, connection, peer, SASL_AUTHENTICATE, 0, "", request)

        def finish(response: dict[str, Any]) -> None:
            if connection.is_closed:
                return
            if response["error_code"]:
                self._refuse(connection, response["error_message"])
                return
            answer = bytes(response["auth_bytes"])
            exchange.response = _SIZE.pack(len(answer)) + answer
            self._respond(connection, exchange)

        task = exchange.task = Task(
            APIS[SASL_AUTHENTICATE].handler(call),
            self._guarded(connection, finish),
            lambda error: self._give_up(connection, error),
        )
        task.resume()

    def _guarded(self, connection: Connection, end: Callable[[Any], None]) -> Callable[[Any], None]:
        """The end of a request: if it fails, the connection is closed. Others come to it, such as a
        timer, the front's answer or a check of a password, and they go on.
        """

        def guarded(value: Any) -> None:
            try:
                end(value)
            except Exception as error:
                self._give_up(connection, error)

        return guarded

    def _finish(
        self, connection: Connection, exchange: Exchange, response: dict[str, Any] | bytes | None
    ) -> None:
        if connection.is_closed:
            return
        if isinstance(response, dict):
            self._throttle(connection, exchange, response)
        try:
            exchange.response = _encode(exchange, response)
        except Exception as error:
            self._fail(connection, exchange, error)
            return
        if isinstance(response, dict):
            for code in error_codes(response):
                self._measurements.failed(exchange.api, code)
        self._respond(connection, exchange)

    def _throttle(
        self, connection: Connection, exchange: Exchange, response: dict[str, Any]
    ) -> None:
        """Tell a client beyond a rate how long to wait, and begin none of its requests meanwhile,
        for MUTED_MAX_NS at most: heartbeats may come behind them.
        """
        if connection.peer is None:
            return
        quotas = THROTTLED_BY.get(exchange.api, _REQUESTS)
        wait_ns = self._services.front.throttle_ns(connection.peer.identity, quotas)
        if wait_ns <= 0:
            return
        response["throttle_time_ms"] = min(-(-wait_ns // MS), THROTTLE_MAX_MS)
        if connection.is_muted:
            return
        connection.is_muted = True

        def go_on() -> None:
            connection.is_muted = False
            self.waiting.append(connection)

        self._services.timers.add(self._services.now_ns + min(wait_ns, MUTED_MAX_NS), go_on)

    def _respond(self, connection: Connection, exchange: Exchange) -> None:
        assert self.listener is not None
        duration_ns = self._services.monotonic_ns() - exchange.started_ns
        self._measurements.ended(exchange.api, duration_ns, len(exchange.response or b""))
        self.listener.respond(connection)
        if connection.frames:
            self.waiting.append(connection)

    def _fail(self, connection: Connection, exchange: Exchange, error: Exception) -> None:
        """Answer a request that was refused or failed, if its response has a place for an error."""
        if connection.is_closed:
            return
        code, sentence = KafkaError.UNKNOWN_SERVER_ERROR, ""
        if isinstance(error, DisconnectError):
            self._refuse(connection, str(error))
            return
        if isinstance(error, RefusedError):
            code, sentence = error.code, error.sentence
        else:
            sentence = self._error_handler.on_error(
                f"kafka_api={exchange.api} version={exchange.version}", error
            )
        self._measurements.failed(exchange.api, code)
        found = definition(exchange.api)
        assert found is not None
        if not any(
            field["name"] == "error_code" and field["low"] <= exchange.version <= field["high"]
            for field in found["response"]
        ):
            self._refuse(connection, sentence or code.name)
            return
        response = {"error_code": code, "error_message": sentence or None}
        try:
            exchange.response = _encode(exchange, response)
        except Exception as second:
            self._error_handler.on_error("kafka_error_response", second)
            self._refuse(connection, sentence or code.name)
            return
        self._respond(connection, exchange)


def error_codes(response: dict[str, Any], depth: int = PARTS_DEPTH) -> Iterator[int]:
    """The error codes in a response and its parts, without NONE. Of a list the first PARTS_MAX
    parts count.
    """
    for name, value in response.items():
        if name in CODE_FIELDS:
            if value:
                yield value
        elif depth and isinstance(value, list):
            for part in value[:PARTS_MAX]:
                if not isinstance(part, dict):
                    break
                yield from error_codes(part, depth - 1)


def _may_begin(connection: Connection) -> bool:
    under_way = connection.exchanges
    if connection.is_muted:
        return False
    if not under_way:
        return connection.unsent_bytes < UNSENT_HIGH_BYTES
    if connection.is_blocked or len(under_way) >= PIPELINED_MAX:
        return False
    if connection.login is not None and connection.login.is_raw:
        return False
    following = connection.frames[0]
    if len(following) < FRAME_MIN_BYTES:
        return False  # it is refused once those before it are answered
    return _HEADER.unpack_from(following, 0)[0] == PRODUCE and under_way[-1].api == PRODUCE


def _read_client_id(reader: Reader, flexible: bool) -> str:
    """Read the rest of the request's header. Raises MalformedError."""
    data = reader.data
    start = reader.take(2)
    length = int.from_bytes(data[start : start + 2], "big", signed=True)
    client_id = ""
    if length > 0:
        start = reader.take(length)
        client_id = data[start : start + length].decode("utf-8", "replace")[:CLIENT_ID_MAX]
    if flexible:
        for _ in range(reader.count(reader.varint())):
            reader.varint()
            reader.take(reader.varint())
    return client_id


def _encode(exchange: Exchange, response: dict[str, Any] | bytes | None) -> bytes | bytearray:
    if response is None:
        return b""
    if isinstance(response, (bytes, bytearray)):
        return _SIZE_AND_ID.pack(len(response) + 4, exchange.correlation_id) + response
    out = bytearray(_SIZE_AND_ID.size)
    if exchange.api != API_VERSIONS and is_flexible(exchange.api, exchange.version):
        write_varint(out, 0)
    response_writer(exchange.api, exchange.version)(out, response)
    _SIZE_AND_ID.pack_into(out, 0, len(out) - _SIZE.size, exchange.correlation_id)
    return out
