"""A member of a share group: what it subscribes to, when it was heard last, and the last request of
it that changed something.

Owner: its ShareGroup.
Invariants: `sequence` never goes back while the member's epoch lasts; `last_answer` is the answer
    to the request of that number: a request that comes again, because its answer was lost on the
    way, is not carried out again.
Crash: the row is written in the transaction of the request; a session's time begins anew after a
    start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from appliance.groups.base.limits import CLOSED_GRACE_NS, FRONT_GRACE_NS, SHARE_ACQUIRED_MAX
from appliance.groups.base.messages import Partition, SessionKey
from appliance.groups.base.store import MemberRow


@dataclass(slots=True, eq=False)
class ShareMember:
    """See the module's docstring."""

    member_id: str
    epoch: int
    topics: tuple[str, ...]
    client_id: str
    session_timeout_ms: int
    heartbeat_interval_ms: int
    resets_to_earliest: bool
    """Where the group begins on partitions that it sees for the first time: at their beginning, or
    at their end.
    """
    last_request_ns: int
    session: SessionKey | None = None
    """The connection that its heartbeats come over."""
    acquires_over: SessionKey | None = None
    """The connection that it acquires over: where pushes go."""
    closed_ns: int | None = None
    """Since when that connection is gone, and the client may know it."""
    sequence: int = 0
    last_answer: dict[str, Any] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    """Of its topics, as they are now."""
    acquired_at_most: int = 0
    """It has no more records than this: what it has acquired less what it has acknowledged,
    whatever time has freed since.
    """
    rotation: int = 0
    """Which of them it is to be given records of next."""

    def touch(self, session: SessionKey, now_ns: int) -> None:
        """It has sent a heartbeat."""
        self.session = session
        self.last_request_ns = now_ns
        self.closed_ns = None

    def closed(self, now_ns: int, *, with_front: bool) -> None:
        """That connection is gone. `with_front`: with its front, which the client learns by its
        next heartbeat only.
        """
        self.session = None
        self.closed_ns = now_ns + (
            FRONT_GRACE_NS + self.heartbeat_interval_ms * 1_000_000 if with_front else 0
        )

    def deadline_ns(self) -> int:
        """When it is to be removed, unless it is heard before."""
        timeout_ns = self.last_request_ns + self.session_timeout_ms * 1_000_000
        return (
            timeout_ns
            if self.closed_ns is None
            else min(timeout_ns, self.closed_ns + CLOSED_GRACE_NS)
        )

    def row(self, group_id: int) -> MemberRow:
        """As the store keeps it."""
        settings = {
            "topics": self.topics, "client_id": self.client_id,
            "session_timeout_ms": self.session_timeout_ms,
            "heartbeat_interval_ms": self.heartbeat_interval_ms,
            "earliest": self.resets_to_earliest,
            "session": None if self.session is None else list(self.session),
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
        """A member that was there before the start."""
        settings, last = orjson.loads(row.settings), orjson.loads(row.assignment)
        return cls(
            row.member_id, row.epoch, tuple(settings["topics"]), settings["client_id"],
            settings["session_timeout_ms"],
            settings["heartbeat_interval_ms"], settings["earliest"], now_ns,
            session=None if settings["session"] is None else SessionKey(*settings["session"]),
            sequence=last["sequence"], last_answer=last["answer"],
            acquired_at_most=SHARE_ACQUIRED_MAX,
        )  # fmt: skip
