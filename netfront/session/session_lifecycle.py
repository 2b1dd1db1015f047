"""Session lifecycle: a handshake opens a session. Its connection's end, a long silence or another
handshake drops it.

Owner: one front.

Invariants:
- `drop` is the only place where a session ends. It notifies every component that knows the session.
- A silent connection holds no credit.
- With users a session ends with its connection. Another connection with its identity gets its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from netfront.session.disconnect_detector import DisconnectDetector
from netfront.session.responses import Responses
from netfront.session.sessions import Session, Sessions
from netfront.socket.flow_control import CreditLedger, Gate
from netfront.socket.transport import Transport
from shm.memory.layout import ProcessWord
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.timing_wheel import TimingWheel
from shm.tables.control import ProcessSlot
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import handshake_messages
from tailrace.protocol.frame import RequestHeader

if TYPE_CHECKING:
    from shm.rights.authorizer import Principal

logger = logging.getLogger(__name__)

SESSION_IDLE_NS = 600_000_000_000
CREDIT_IDLE_NS = 60_000_000_000


class ConnectionQuotas(Protocol):
    """The quotas that a new connection may have."""

    def admit(self, client: str, principal: Principal | None) -> Gate | None:
        """The gate of the bytes that a new connection of this client id and user produces. Raises
        WireError if the connection is beyond its quota.
        """

    def attach(self, session: Session) -> None:
        """Give a session its quotas."""


class SessionLifecycle:
    """Opens and drops the sessions of a front."""

    def __init__(
        self,
        *,
        transport: Transport,
        sessions: Sessions,
        ledger: CreditLedger,
        responses: Responses,
        slot: ProcessSlot,
        error_handler: CountedErrorHandler,
        described: dict[str, Any],
        forget: Sequence[Callable[[Session], None]],
        start_ns: int,
        has_users: bool = False,
    ) -> None:
        """`described` is the appliance's part of every handshake response. Each of `forget` is
        called once with a session that has ended.
        `has_users`: a session ends with its connection, and is not probed.
        """
        self._transport = transport
        self._sessions = sessions
        self._ledger = ledger
        self._responses = responses
        self._slot = slot
        self._error_handler = error_handler
        self._described = described
        self.server_keys: Callable[[], list[str]] = list
        """Public keys of the server, where the appliance has users."""
        self.admit: Callable[[bytes], Principal | None] = lambda _identity: None
        """Returns the principal of a connection that opens a session, or raises WireError."""
        self.note: Callable[[Session], None] = lambda _session: None
        """Called with each session that is open."""
        self._forget = forget
        self._has_users = has_users
        self._disconnects = DisconnectDetector()
        self._silences: TimingWheel[Session] = TimingWheel(start_ns, tick_ns=1_000_000_000)
        """Timers of the next check for silence."""
        self.on_opened: Callable[[Session], None] | None = None
        """Gets each new session, where sign-ins are audited."""
        self.quotas: ConnectionQuotas | None = None
        """None: there are none."""

    def next_deadline_ns(self) -> int:
        """Return the time when `step` next has work."""
        return min(
            self._silences.quiet_until_ns,
            self._transport.watch_at_ns,
            self._disconnects.probe_at_ns,
        )

    def step(self, now_ns: int) -> int:
        """Check for connections that have ended or been silent. Return how many have ended."""
        work = 0
        if now_ns >= self._silences.quiet_until_ns:
            self._check_silent_sessions(now_ns)
        if now_ns >= self._transport.watch_at_ns:
            work += self._watch(now_ns)
        if now_ns >= self._disconnects.probe_at_ns:
            self._end_sessions(now_ns)
        return work

    def open(self, identity: bytes, header: RequestHeader, body: bytes, now_ns: int) -> None:
        """Serve HANDSHAKE: drop the connection's earlier session and open a new one.

        Raises WireError.
        """
        request = handshake_messages.decode_handshake(body)
        principal = self.admit(identity)
        old = self._sessions.by_identity(identity)
        if old is not None:
            self.drop(old)
        gate = None
        if self.quotas is not None:
            gate = self.quotas.admit(request.client_id, principal)
        session = self._sessions.open(identity, request.client_id, self._ledger.open(gate), now_ns)
        session.principal = principal
        if request.acting_for and principal is not None and principal.is_appliance:
            session.acting_for = handshake_messages.decode_acting_for(request.acting_for)
        self.note(session)
        if self.quotas is not None:
            self.quotas.attach(session)
        if self.on_opened is not None:
            self.on_opened(session)
        session.timer = self._silences.add(now_ns + CREDIT_IDLE_NS, session)
        self._transport.shaken(identity, session.credit)
        self._slot.store(ProcessWord.SESSIONS, len(self._sessions))
        versions = {str(api): version for api, version in request.versions.items()}
        answer = {
            "versions": versions,
            "generation": self._sessions.generation,
            "session": session.number,
            **self._described,
        }
        if principal is not None:
            answer["user"] = principal.user
            answer["server_keys"] = self.server_keys()
        self._responses.send(
            session,
            header.api,
            header.version,
            header.correlation_id,
            ErrorCode.OK,
            [orjson.dumps(answer)],
        )

    def drop(self, session: Session) -> None:
        """End a session and notify every component that knows it.

        The connection has ended, its queue is full, or its client has sent another handshake.
        """
        if self._sessions.by_word(session.word) is None:
            return
        self._sessions.close(session)
        if session.timer is not None:
            self._silences.cancel(session.timer)
            session.timer = None
        self._transport.shaken(session.identity, None)
        for forget in self._forget:
            forget(session)
        self._slot.store(ProcessWord.SESSIONS, len(self._sessions))
        self._responses.send_credit(self._ledger.close(session.credit))

    # ---- connections that end --------------------------------------------------------------------

    def _watch(self, now_ns: int) -> int:
        try:
            watched = self._transport.watch(now_ns)
        except Exception as error:
            self._error_handler.on_error("watch", error)
            return 0
        if watched.closed_count:
            self._slot.store(
                ProcessWord.REFUSED_COUNT,
                self._slot.load(ProcessWord.REFUSED_COUNT) + watched.closed_count,
            )
        if watched.ended and self._has_users:
            # Another client may have the identity by now: a probe would reach that one.
            for identity in watched.ended:
                if self._transport.claim(identity) is None:
                    self.drop_identity(identity)
        elif watched.ended:
            self._disconnects.suspect(watched.ended, now_ns)
        return len(watched.ended)

    def _end_sessions(self, now_ns: int) -> None:
        """Drop the sessions whose connections are gone."""
        for identity in self._disconnects.take(self._is_reachable, now_ns):
            self.drop_identity(identity)

    def drop_identity(self, identity: bytes) -> None:
        """End the session of an identity, if it has one."""
        session = self._sessions.by_identity(identity)
        if session is not None:
            try:
                self.drop(session)
            except Exception as error:
                self._error_handler.on_error(f"end_of_session session={session.number}", error)

    def _is_reachable(self, identity: bytes) -> bool:
        """True if libzmq still has the client's connection.

        The probe is a credit push without a change.
        """
        session = self._sessions.by_identity(identity)
        return session is not None and self._responses.push(session)

    # ---- silence ---------------------------------------------------------------------------------

    def _check_silent_sessions(self, now_ns: int) -> None:
        """Take back the credit of silent connections. Drop those silent for SESSION_IDLE_NS."""
        for session in self._silences.advance(now_ns):
            try:
                self._check_silent_session(session, now_ns)
            except Exception as error:
                self._error_handler.on_error(f"silence session={session.number}", error)

    def _check_silent_session(self, session: Session, now_ns: int) -> None:
        silent_ns = now_ns - session.last_seen_ns
        if silent_ns >= SESSION_IDLE_NS:
            logger.info("session_idle client=%s action=DROP", session.client_id)
            session.timer = None
            self.drop(session)
            return
        if silent_ns >= CREDIT_IDLE_NS:
            self._responses.send_credit(self._ledger.lapse(session.credit))
            silent_ns = 0
        session.timer = self._silences.add(now_ns + CREDIT_IDLE_NS - silent_ns, session)
