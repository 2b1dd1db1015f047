"""The life of sessions: a handshake opens one, the end of its connection, a long silence or another handshake drops it.

Owner: one front. Invariants: whatever knows of a session is told of its end, here and nowhere else (`drop`); a silent connection holds no credit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from netfront.credits import CreditLedger
from netfront.endings import Endings
from netfront.replies import Replies
from netfront.sessions import Session, Sessions
from netfront.transport import Transport
from shm.control import ProcessSlot
from shm.layout import ProcessWord
from shm.runtime.boundary import Boundary
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import RequestHeader
from workers.timing_wheel import TimingWheel

logger = logging.getLogger(__name__)

SESSION_IDLE_NS = 600_000_000_000
CREDIT_IDLE_NS = 60_000_000_000


class SessionKeeper:
    """Opens and drops the sessions of a front."""

    def __init__(
        self,
        *,
        transport: Transport,
        sessions: Sessions,
        ledger: CreditLedger,
        replies: Replies,
        slot: ProcessSlot,
        boundary: Boundary,
        described: dict[str, Any],
        forget: Sequence[Callable[[Session], None]],
        start_ns: int,
    ) -> None:
        """`described`: what every handshake's answer says of the appliance; `forget`: each is called once with a session that has ended."""
        self._transport = transport
        self._sessions = sessions
        self._ledger = ledger
        self._replies = replies
        self._slot = slot
        self._boundary = boundary
        self._described = described
        self._forget = forget
        self._endings = Endings()
        self._silences: TimingWheel[Session] = TimingWheel(start_ns, tick_ns=1_000_000_000)
        """When to look whether a session has been silent."""

    def next_deadline_ns(self) -> int:
        """When `step` next has something to do."""
        return min(self._silences.quiet_until_ns, self._transport.watch_at_ns, self._endings.look_at_ns)

    def step(self, now_ns: int) -> int:
        """Look for connections that have ended or been silent; returns how many have ended."""
        work = 0
        if now_ns >= self._silences.quiet_until_ns:
            self._look_at_silent_sessions(now_ns)
        if now_ns >= self._transport.watch_at_ns:
            work += self._watch(now_ns)
        if now_ns >= self._endings.look_at_ns:
            self._end_sessions(now_ns)
        return work

    def open(self, identity: bytes, header: RequestHeader, body: bytes, now_ns: int) -> None:
        """HANDSHAKE: open a session, drop the one that the connection had. Raises WireError."""
        request = requests.decode_handshake(body)
        old = self._sessions.by_identity(identity)
        if old is not None:
            self.drop(old)
        session = self._sessions.open(identity, request.client_id, self._ledger.open(), now_ns)
        session.timer = self._silences.add(now_ns + CREDIT_IDLE_NS, session)
        self._transport.shaken(identity, session.credit)
        self._slot.store(ProcessWord.SESSIONS, len(self._sessions))
        versions = {str(api): version for api, version in request.versions.items()}
        answer = {"versions": versions, "generation": self._sessions.generation, "session": session.number, **self._described}
        self._replies.send(session, header.api, header.version, header.correlation_id, ErrorCode.OK, [orjson.dumps(answer)])

    def drop(self, session: Session) -> None:
        """A session has ended: its connection has, it takes nothing, or its client came anew. The one place that tells everything that knows of it."""
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
        self._replies.tell_credit(self._ledger.close(session.credit))

    # ---- connections that end --------------------------------------------------------------------------------------------------------

    def _watch(self, now_ns: int) -> int:
        try:
            watched = self._transport.watch(now_ns)
        except Exception as error:
            self._boundary.caught("watch", error)
            return 0
        if watched.closed_count:
            self._slot.store(ProcessWord.REFUSED_COUNT, self._slot.load(ProcessWord.REFUSED_COUNT) + watched.closed_count)
        if watched.ended:
            self._endings.doubt(watched.ended, now_ns)
        return len(watched.ended)

    def _end_sessions(self, now_ns: int) -> None:
        """Drop the sessions whose connections are gone."""
        for identity in self._endings.take(self._is_reachable, now_ns):
            session = self._sessions.by_identity(identity)
            if session is not None:
                try:
                    self.drop(session)
                except Exception as error:
                    self._boundary.caught(f"end_of_session session={session.number}", error)

    def _is_reachable(self, identity: bytes) -> bool:
        """Whether libzmq still has the connection of a client with a session. What is sent to find out tells the client nothing new."""
        session = self._sessions.by_identity(identity)
        return session is not None and self._replies.push(session)

    # ---- silence ---------------------------------------------------------------------------------------------------------------------

    def _look_at_silent_sessions(self, now_ns: int) -> None:
        """A silent connection gives its credit back, and is forgotten in the end."""
        for session in self._silences.advance(now_ns):
            try:
                self._look_at_silence(session, now_ns)
            except Exception as error:
                self._boundary.caught(f"silence session={session.number}", error)

    def _look_at_silence(self, session: Session, now_ns: int) -> None:
        silent_ns = now_ns - session.last_seen_ns
        if silent_ns >= SESSION_IDLE_NS:
            logger.info("session_idle client=%s dropped", session.client_id)
            session.timer = None
            self.drop(session)
            return
        if silent_ns >= CREDIT_IDLE_NS:
            self._replies.tell_credit(self._ledger.lapse(session.credit))
            silent_ns = 0
        session.timer = self._silences.add(now_ns + CREDIT_IDLE_NS - silent_ns, session)
