"""Request dispatcher: takes messages from the socket, decodes them, and calls their handlers.

Owner: one front.

Invariants:
- A message beyond its session's quota is parked, and handled later (`handle_now`).
- A request that fails is answered with its error. A sender that does not speak this protocol is
  answered, and its connection is closed.
- Only HANDSHAKE is handled without a session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from netfront.agent.request_body import one_frame
from netfront.produce.produce_service import ProduceService
from netfront.session.responses import Responses
from netfront.session.session_lifecycle import SessionLifecycle
from netfront.session.sessions import Session, Sessions
from netfront.session.time_slicing import TimeSlicer
from netfront.socket.transport import Transport
from shm.tables.measurements import Counters
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import json_messages
from tailrace.protocol.frame import (
    API_VERSIONS,
    FRAMES_MAX,
    Api,
    RequestHeader,
    WireError,
    check_body,
    decode_request_header,
    frames_max,
    undecodable_request,
)

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from netfront.audit.audit_trail import AuditTrail
    from netfront.quotas.quota_service import QuotaService

RECEIVE_LIMIT = 256
"""Messages received in one step before other work gets its turn."""
Handler = Callable[[Session, RequestHeader, list[bytes]], None]


class RequestDispatcher:
    """The way of a message from the socket to its handler."""

    def __init__(
        self,
        *,
        transport: Transport,
        sessions: Sessions,
        responses: Responses,
        session_lifecycle: SessionLifecycle,
        produce_service: ProduceService,
        time_slicer: TimeSlicer,
        requests: Counters,
        gate: Gate | None,
        catch_up: Callable[[], None],
        now_ns: int,
    ) -> None:
        """`requests` counts them by API. `gate` has the users and rights, None without users.
        `catch_up` is called before each message: `ForwardingService.catch_up`.
        """
        self._transport = transport
        self._sessions = sessions
        self._responses = responses
        self._session_lifecycle = session_lifecycle
        self._produce_service = produce_service
        self._time_slicer = time_slicer
        self._requests = requests
        self._gate = gate
        self._catch_up = catch_up
        self.handlers: dict[int, Handler] = {}
        """API -> its handler."""
        self.quotas: QuotaService | None = None
        """None: no quota was ever set."""
        self.audit: AuditTrail | None = None
        """None: there is no audit log."""
        self.now_ns = now_ns
        """Time of this step."""

    def receive(self) -> int:
        """Handle up to RECEIVE_LIMIT messages of the socket. Return their number."""
        count = 0
        while (
            count < RECEIVE_LIMIT
            and not self._time_slicer.is_spent
            and (frames := self._transport.try_receive()) is not None
        ):
            count += 1
            self._catch_up()
            self._handle(frames)
        return count

    def _handle(self, frames: list[bytes]) -> None:
        """Handle one message, or park it until its session's quota of requests allows it."""
        session = self._sessions.by_identity(frames[0])
        if session is not None and session.quota is not None and self._parks(session, frames):
            return
        self._handle_of(session, frames)

    def handle_now(self, frames: list[bytes]) -> None:
        """Handle one message whose quota was looked at."""
        self._handle_of(self._sessions.by_identity(frames[0]), frames)

    def _handle_of(self, session: Session | None, frames: list[bytes]) -> None:
        """Decode one message and call its handler. Errors are answered."""
        identity, *message = frames
        header: RequestHeader | None = None
        if session is not None and self._produce_service.receive_plain(session, frames):
            session.last_seen_ns = self.now_ns
            self._requests.add(Api.PRODUCE)
            return
        try:
            header = decode_request_header(message[0] if message else b"")
            if len(message) > FRAMES_MAX and len(message) > (
                most := frames_max(header.api, header.version)
            ):
                raise WireError(
                    ErrorCode.MALFORMED_REQUEST,
                    f"the request has {len(message)} frames; the limit is {most}",
                )
            body = message[1:]
            check_body(header.body_length, body)
            api = header.api
            self._requests.add(api)
            if api == Api.HANDSHAKE:
                self._session_lifecycle.open(
                    identity, header, one_frame(self._time_slicer, header, body), self.now_ns
                )
                return
            if session is None:
                raise WireError(
                    ErrorCode.SESSION_UNKNOWN,
                    "this connection has no session: send HANDSHAKE first",
                )
            session.last_seen_ns = self.now_ns
            handler = self.handlers.get(api)
            if handler is None:
                raise WireError(ErrorCode.UNKNOWN_API, f"API {api} is unknown")
            low, high = API_VERSIONS[api]
            if not low <= header.version <= high:
                raise WireError(
                    ErrorCode.UNSUPPORTED_VERSION,
                    f"version {header.version} of {Api(api).name} is not supported: use {low} to "
                    f"{high}",
                )
            if self.audit is not None and self.audit.concerns(api, body):
                if self._gate is not None and session.principal is not None:
                    request = json_messages.decode_request(
                        one_frame(self._time_slicer, header, body)
                    )
                    self._gate.check(session.principal, api, request, b"")
                self.audit.defer(session, header, body)
                return
            handler(session, header, body)
        except WireError as error:
            if header is None:
                self._refuse_undecodable(identity, session, message, error)
            else:
                self._responses.refuse(
                    identity, session, header.api, header.version, header.correlation_id, error
                )
        except Exception as error:
            api, version, correlation_id = (
                (header.api, header.version, header.correlation_id)
                if header is not None
                else (0, 1, 0)
            )
            if session is not None:
                self._produce_service.forget(session.word, correlation_id)
            self._responses.fail(identity, session, api, version, correlation_id, error)

    def _parks(self, session: Session, frames: list[bytes]) -> bool:
        """Park a message beyond a quota; at the bounds of what is parked it is refused."""
        assert self.quotas is not None
        try:
            is_parked = self.quotas.parks(session, frames)
        except WireError as error:
            try:
                header = decode_request_header(frames[1] if len(frames) > 1 else b"")
            except WireError as malformed:
                self._refuse_undecodable(frames[0], session, frames[1:], malformed)
                return True
            self._responses.refuse(
                frames[0], session, header.api, header.version, header.correlation_id, error
            )
            return True
        if is_parked:
            session.last_seen_ns = self.now_ns
        return is_parked

    def _refuse_undecodable(
        self, identity: bytes, session: Session | None, message: list[bytes], error: WireError
    ) -> None:
        """Refuse a message whose header cannot be decoded.

        A header of the right length is answered with the correlation id at its usual place. Any
        other sender does not speak this protocol and could not match a response to its request. It
        gets an error, and its connection is closed.
        """
        fields = undecodable_request(message[0]) if message else None
        if fields is not None:
            self._responses.refuse(
                identity, session, fields.api, fields.version, fields.correlation_id, error
            )
            return
        self._responses.refuse(identity, session, 0, 1, 0, error)
        self._transport.close_peer(identity, f"it does not speak this protocol: {error.detail}")
