"""The way from one front to the process of groups, and back, with the sessions of that front that
may have members.

Owner: the process of groups; in shared memory the tail of its lane to the front.
Invariants: `sessions` are of one front process: when another generation of it shows, those of the
    one before have ended.
Crash: a successor knows no sessions; it hears of them with their next heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shm.crash_points import crash_point
from shm.doorbell import Doorbell
from shm.lane import LaneReader, LaneWriter
from shm.lane_messages import LaneKind
from shm.outbox import Outbox


class Outgoing(NamedTuple):
    """A message to a front: an answer or a push."""

    kind: LaneKind
    slot: int
    flags: int
    session: int
    correlation_id: int
    body: bytes


@dataclass(slots=True)
class FrontLink:
    """The way from one front, and back, and which sessions of it may have members."""

    index: int
    requests: LaneReader
    answers: LaneWriter
    bell: Doorbell
    process_generation: Callable[[], int]
    """Of the process that serves there, or did last: one that is being started is not known yet,
    for until it serves no member can come again.
    """
    outbox: Outbox[Outgoing] = field(init=False)
    sessions: set[int] = field(default_factory=set)
    """Words of the sessions that have sent something and have not ended."""
    generation: int = 0
    """Of the front, as the words of its sessions have it."""
    known_process: int = field(init=False)
    is_replaced: bool = False
    """The process that has these sessions is gone; what it left in the lane is being read."""

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.answers, self.bell, self._write)
        self.known_process = self.process_generation()

    def _write(self, item: Outgoing) -> bool:
        if not self.answers.try_write(
            item.kind, item.slot, item.flags, item.session, item.correlation_id, 0, (item.body,)
        ):
            return False
        crash_point("groups.after_answer")
        return True
