"""Sessions: the clients of a front, each from its handshake to the end of its connection.

Owner: one front. Lanes and descriptors carry the session word (generation and number), so that an
ack finds its session.

Invariants:
- A ZeroMQ identity has at most one session.
- Numbers are never reused within a generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from netfront.socket.flow_control import Credit, Gate
from shm.runtime.timing_wheel import Timer

if TYPE_CHECKING:
    from shm.rights.authorizer import Principal
    from tailrace.protocol.handshake_messages import ActingFor


class SessionQuota(Protocol):
    """The quotas of a session (see `netfront.quotas`)."""

    @property
    def fetch_gate(self) -> Gate | None:
        """Gate of the bytes that it fetches."""


class Session:
    """One connected client."""

    __slots__ = (
        "acting_for",
        "client_id",
        "credit",
        "fetch_received",
        "fetch_sent",
        "identity",
        "last_seen_ns",
        "number",
        "principal",
        "quota",
        "timer",
        "word",
    )

    def __init__(
        self, number: int, word: int, identity: bytes, client_id: str, credit: Credit, now_ns: int
    ) -> None:
        self.number = number
        self.word = word
        """Front generation << 32 | number: carried by lanes and descriptors."""
        self.identity = identity
        self.client_id = client_id
        self.credit = credit
        self.last_seen_ns = now_ns
        self.quota: SessionQuota | None = None
        """None: no quota concerns it."""
        self.principal: Principal | None = None
        """User that it belongs to. None: the appliance has no users, and everything is allowed."""
        self.acting_for: ActingFor | None = None
        """The console's user, of a session of the appliance's own. None: it acts for itself."""
        self.timer: Timer[Session] | None = None
        """Timer of the next check for silence."""
        self.fetch_sent = 0
        self.fetch_received = 0
        """Bytes of batches sent to this client, and those it reports as consumed."""


class Sessions:
    """All sessions of one front generation."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._by_identity: dict[bytes, Session] = {}
        self._by_word: dict[int, Session] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._by_identity)

    def open(self, identity: bytes, client_id: str, credit: Credit, now_ns: int) -> Session:
        """Open a session for an identity that has none."""
        number = self._next_number
        self._next_number += 1
        credit.session_word = self.generation << 32 | number
        session = Session(
            number, self.generation << 32 | number, identity, client_id, credit, now_ns
        )
        self._by_identity[identity] = session
        self._by_word[session.word] = session
        return session

    def by_identity(self, identity: bytes) -> Session | None:
        return self._by_identity.get(identity)

    def by_word(self, word: int) -> Session | None:
        """Return the session of a lane message or descriptor, or None if it has ended."""
        return self._by_word.get(word)

    def by_credit(self, credit: Credit) -> Session | None:
        return self._by_word.get(credit.session_word)

    def close(self, session: Session) -> None:
        """Forget a session."""
        if self._by_identity.get(session.identity) is session:
            del self._by_identity[session.identity]
        self._by_word.pop(session.word, None)

    def all(self) -> list[Session]:
        return list(self._by_identity.values())
