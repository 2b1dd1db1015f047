"""The controller's sender to one other process: partition updates, the catalog as a feed, and
answers, in order.

Owner: the controller; in shared memory the lane's producer position, and the word that its reader
has been fed.
Invariants:
- Of the updates of one partition that wait for room in the lane, only the newest is kept.
- An assignment is encoded when it goes into the lane, so that a schema waits once for all
  partitions of a topic.
- At most UPDATES_AT_ONCE partitions are being made, changed or deleted behind a worker.
Crash: nothing is kept. FED_GENERATION is stored when the whole feed is in the lane, so a successor
feeds every process that lacks it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from shm.memory.layout import ProcessWord, Role
from shm.messages.lane_messages import REPLAY, Assignment, LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneWriter
from shm.queues.outbox import Outbox
from shm.tables.control import ProcessSlot

UPDATES_AT_ONCE = 4
"""Most partitions that a flusher makes, changes or deletes at a time. Each takes some milliseconds
of syncs, and other batches wait behind it in the ring.
"""
UPDATES_TIMEOUT_NS = 1_000_000_000
"""Longest time that an update which is not carried out (a failing disk, a dead process) holds
others back.
"""


@dataclass(slots=True)
class Waiting:
    """A message that is not in its lane yet."""

    kind: LaneKind
    slot: int
    flags: int
    session: int
    correlation_id: int
    content: bytes | Assignment


class LaneSender:
    """See the module's docstring."""

    def __init__(
        self, role: Role, index: int, lane: LaneWriter, bell: Doorbell, slot: ProcessSlot
    ) -> None:
        self.role = role
        self.index = index
        self.slot = slot
        self.feeding = 0
        """Generation of the reader whose feed is not complete; 0: none."""
        self.is_applied: Callable[[Assignment], bool] | None = None
        """True if a worker has carried an assignment out; None for processes that nothing waits
        for.
        """
        self._outbox: Outbox[Waiting] = Outbox(lane, bell, self._write)
        self._updates: dict[tuple[bytes, int], Waiting] = {}
        """Waiting updates, by partition."""
        self._under_way: list[tuple[int, Assignment]] = []
        """Updates that are not carried out: (time of sending, update)."""
        self._now_ns = 0

    @property
    def lane(self) -> LaneWriter:
        """The lane's writer, for its largest payload."""
        return self._outbox.lane

    @property
    def queue(self) -> deque[Waiting]:
        """Messages that are not in the lane yet."""
        return self._outbox.waiting

    def put(
        self,
        kind: LaneKind,
        content: bytes | Assignment = b"",
        *,
        slot: int = 0,
        flags: int = 0,
        session: int = 0,
        correlation_id: int = 0,
    ) -> None:
        """Queue a message; `send` moves it into the lane."""
        self.queue.append(Waiting(kind, slot, flags, session, correlation_id, content))

    def queue_update(self, assignment: Assignment) -> None:
        """Queue an update of a partition, in place of an older one that waits."""
        key = (assignment.topic_id, assignment.partition)
        waiting = self._updates.get(key)
        if waiting is None:
            waiting = self._updates[key] = Waiting(LaneKind.ASSIGN, 0, 0, 0, 0, assignment)
            self.queue.append(waiting)
        else:
            revive = assignment.revive or (
                isinstance(waiting.content, Assignment) and waiting.content.revive
            )
            waiting.content = replace(assignment, revive=revive)

    def send(self, now_ns: int) -> int:
        """Move waiting messages into the lane, as far as they fit."""
        self._now_ns = now_ns
        count = self._outbox.flush()
        if self.feeding and not self.queue:
            # Stored last: if this controller is killed before, its successor feeds it again.
            self.slot.store(ProcessWord.FED_GENERATION, self.feeding)
            self.feeding = 0
        return count

    def _write(self, waiting: Waiting) -> bool:
        content = waiting.content
        update = content if isinstance(content, Assignment) and not waiting.flags & REPLAY else None
        if update is not None and not self._may_send_updates():
            return False
        payload = content if isinstance(content, bytes) else content.encode()
        if not self.lane.try_write(
            waiting.kind,
            waiting.slot,
            waiting.flags,
            waiting.session,
            waiting.correlation_id,
            self._now_ns,
            (payload,),
        ):
            return False
        if update is not None:
            self._updates.pop((update.topic_id, update.partition), None)
            if self.is_applied is not None:
                self._under_way.append((self._now_ns, update))
        return True

    def _may_send_updates(self) -> bool:
        """True if fewer than UPDATES_AT_ONCE partitions are being made, changed or deleted behind
        this worker.
        """
        if len(self._under_way) >= UPDATES_AT_ONCE and self.is_applied is not None:
            self._under_way = [
                (sent_ns, update)
                for sent_ns, update in self._under_way
                if self._now_ns - sent_ns < UPDATES_TIMEOUT_NS and not self.is_applied(update)
            ]
        return len(self._under_way) < UPDATES_AT_ONCE
