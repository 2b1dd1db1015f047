"""A member of a share group: its subscription, its session, and its last request that changed
something.

Owner: its ShareGroup.
Invariants: `sequence` never decreases within a member epoch. `last_answer` is the answer to the
    request of that sequence, so that a resent request is not applied twice.
Crash: the row is written in the transaction of the request. Sessions restart with the process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from appliance.groups.base.limits import CLOSED_GRACE_NS, FRONT_GRACE_NS, SHARE_ACQUIRED_MAX
from appliance.groups.base.messages import Partition, SessionKey
from appliance.groups.store.schema import MemberRow


@dataclass(slots=True, eq=False)
class ShareMember:
    """A member and its row."""

    member_id: str
    epoch: int
    topics: tuple[str, ...]
    client_id: str
    session_timeout_ms: int
    heartbeat_interval_ms: int
    resets_to_earliest: bool
    """The group starts at the beginning of new partitions; False: at their end."""
    last_request_ns: int
    user: str = ""
    """User who may use it; empty: it has joined while the appliance had no users."""
    session: SessionKey | None = None
    """The connection of its heartbeats."""
    acquires_over: SessionKey | None = None
    """The connection of its SHARE_ACQUIRE requests, which gets the pushes."""
    closed_ns: int | None = None
    """Time from which the client knows that its heartbeat connection closed; None: open."""
    sequence: int = 0
    last_answer: dict[str, Any] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    """The partitions of its subscribed topics."""
    acquired_at_most: int = 0
    """Upper bound of its acquired records: acquisitions minus acknowledgements, without expired
    locks.
    """
    rotation: int = 0
    """Index in `partitions` from which the next acquisition starts."""

    def touch(self, session: SessionKey, now_ns: int) -> None:
        """Note a heartbeat over a connection."""
        self.session = session
        self.last_request_ns = now_ns
        self.closed_ns = None

    def closed(self, now_ns: int, *, with_front: bool) -> None:
        """Start the grace period after its connection closed. `with_front`: it closed with its
        front, which the client notices only at its next heartbeat.
        """
        self.session = None
        self.closed_ns = now_ns + (
            FRONT_GRACE_NS + self.heartbeat_interval_ms * 1_000_000 if with_front else 0
        )

    def deadline_ns(self) -> int:
        """Time at which the member is removed unless a heartbeat comes."""
        timeout_ns = self.last_request_ns + self.session_timeout_ms * 1_000_000
        return (
            timeout_ns
            if self.closed_ns is None
            else min(timeout_ns, self.closed_ns + CLOSED_GRACE_NS)
        )

    def row(self, group_id: int) -> MemberRow:
        """The member's row."""
        settings = {
            "topics": self.topics, "client_id": self.client_id,
            "session_timeout_ms": self.session_timeout_ms,
            "heartbeat_interval_ms": self.heartbeat_interval_ms,
            "earliest": self.resets_to_earliest,
            "session": None if self.session is None else list(self.session),
            **({"user": self.user} if self.user else {}),
        }  # fmt: skip
        last = {"sequence": self.sequence, "answer": self.last_answer}
        return MemberRow(
            group_id,
            self.member_id,
            self.epoch,
            orjson.dumps(settings).decode(),
            orjson.dumps(last).decode(),
            "{}",
        )

    @classmethod
    def from_row(cls, row: MemberRow, now_ns: int) -> ShareMember:
        """The member of a stored row, with a new session."""
        settings, last = orjson.loads(row.settings), orjson.loads(row.assignment)
        return cls(
            row.member_id, row.epoch, tuple(settings["topics"]), settings["client_id"],
            settings["session_timeout_ms"],
            settings["heartbeat_interval_ms"], settings["earliest"], now_ns,
            user=settings.get("user", ""),
            session=None if settings["session"] is None else SessionKey(*settings["session"]),
            sequence=last["sequence"], last_answer=last["answer"],
            acquired_at_most=SHARE_ACQUIRED_MAX,
        )  # fmt: skip
