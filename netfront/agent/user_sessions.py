"""User sessions: which users a front lets in, and the end of their sessions when they are not let
in any more.

Owner: one front, where the appliance has users.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from netfront.session.session_lifecycle import SessionLifecycle
from netfront.session.sessions import Session
from netfront.socket.transport import Transport
from tailrace.protocol.frame import WireError

if TYPE_CHECKING:
    from netfront.access.gate import Gate
    from shm.rights.authorizer import Principal

logger = logging.getLogger(__name__)


class UserSessions:
    """The connections of users and their sessions."""

    def __init__(self, gate: Gate, transport: Transport) -> None:
        self.gate = gate
        self._transport = transport

    def admit(self, identity: bytes) -> Principal | None:
        """The principal of a connection that opens a session. Raises WireError."""
        try:
            return self.gate.admit(self._transport.claim(identity))
        except WireError as error:
            self._transport.close_peer(identity, error.detail)
            raise

    def note(self, session: Session) -> None:
        """Remember a session, which ends with its user's rights to have it."""
        self.gate.note(session, self._transport.claim(session.identity))

    def end_refused(
        self, lifecycle: SessionLifecycle, now_ns: int, *, answers_connections: bool
    ) -> int:
        """End the sessions of users that are not let in any more. Return the work done."""
        answered = self.gate.answer_connections() if answers_connections else 0
        ended = self.gate.take_ended(now_ns)
        for session, reason in ended:
            logger.info("session_ended client=%s reason=%r", session.client_id, reason)
            self._transport.close_peer(session.identity, reason)
            lifecycle.drop(session)
        return answered + len(ended)
