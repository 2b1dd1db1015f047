"""The lanes between one front and the process of groups, with the front's sessions that may have
members.

Owner: the process of groups; in shared memory the producer position of its lane to the front.
Invariants: `sessions` belong to one process of the front. When a later generation appears, the
    sessions of the earlier one have ended.
Crash: a successor knows no sessions. It adds them with their next requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shm.crash_points import crash_point
from shm.messages.lane_messages import LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneReader, LaneWriter
from shm.queues.outbox import Outbox


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
    """The lanes from and to one front, and its sessions."""

    index: int
    requests: LaneReader
    answers: LaneWriter
    bell: Doorbell
    process_generation: Callable[[], int]
    """Returns the generation of the front's process that is, or was last, ready. A starting process
    does not count, since it serves no member yet.
    """
    outbox: Outbox[Outgoing] = field(init=False)
    sessions: set[int] = field(default_factory=set)
    """Words of the open sessions that have sent a request."""
    generation: int = 0
    """Generation of the front, from the words of its sessions."""
    known_process: int = field(init=False)
    is_replaced: bool = False
    """The process of these sessions has died; its last messages in the lane are being read."""

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
