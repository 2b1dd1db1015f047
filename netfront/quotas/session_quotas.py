"""Quotas of one session: its gates, its use of sums, and its parked messages."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from netfront.quotas.quota_gate import QuotaGate
from netfront.session.sessions import Session
from shm.quotas.quota_rules import Entity


class ParkedMessage(NamedTuple):
    """A message that waits for the rate of requests."""

    frames: list[bytes]
    byte_count: int


class Usage:
    """Use that an entity makes of a sum."""

    __slots__ = ("ids", "limit", "sessions")

    def __init__(self) -> None:
        self.limit = 0
        self.sessions: set[int] = set()
        """Words of open sessions."""
        self.ids: dict[str, tuple[int, int]] = {}
        """Transactional id -> (session word, its transaction timeout); after the session's end
        (0, time when its transaction has ended at the latest).
        """


class SessionQuotas:
    """The quotas of one session."""

    __slots__ = (
        "connections",
        "fetch_gate",
        "mutation_gate",
        "parked",
        "produce_gate",
        "request_gate",
        "session",
        "transactions",
    )

    def __init__(self, session: Session) -> None:
        self.session = session
        self.produce_gate: QuotaGate | None = None
        self.fetch_gate: QuotaGate | None = None
        self.request_gate: QuotaGate | None = None
        self.mutation_gate: QuotaGate | None = None
        self.connections: Usage | None = None
        self.transactions: tuple[Usage, int, Entity] | None = None
        self.parked: deque[ParkedMessage] = deque()

    def gates(self) -> list[QuotaGate]:
        found = (self.produce_gate, self.fetch_gate, self.request_gate, self.mutation_gate)
        return [gate for gate in found if gate is not None]

    @property
    def is_empty(self) -> bool:
        """True if no quota concerns the session."""
        return not self.gates() and self.connections is None and self.transactions is None
