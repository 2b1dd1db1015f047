"""The way from the coordinator to one other process: news of partitions, the catalog as a feed, answers, in order, as far as its lane takes them.

Owner: the coordinator; in shared memory the lane's tail, and that its reader has been fed.
Invariants: of news about one partition that the lane does not take yet, only the newest waits; an assignment becomes bytes when it goes into the lane, so
    that a schema waits once for all of a topic's partitions; at most NEWS_AT_ONCE partitions are being made, changed or deleted behind a worker.
Crash: nothing is kept: FED_GENERATION is stored when the whole feed is in the lane, so a successor feeds anew what was not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from shm.catalog_messages import REPLAY, Assignment, LaneKind
from shm.control import ProcessSlot
from shm.doorbell import Doorbell
from shm.lane import LaneWriter
from shm.layout import ProcessWord, Role
from shm.outbox import Outbox

NEWS_AT_ONCE = 4
"""So many partitions a flusher makes, changes or deletes at a time: each costs some milliseconds of syncs, and batches of others lie behind it in the ring."""
NEWS_PATIENCE_NS = 1_000_000_000
"""News that is not carried out for so long (a disk that refuses, a process that is dead) holds back no other."""


@dataclass(slots=True)
class Waiting:
    """A message that is not in its lane yet."""

    kind: LaneKind
    slot: int
    flags: int
    session: int
    correlation_id: int
    content: bytes | Assignment


class Outgoing:
    """See the module's docstring."""

    def __init__(self, role: Role, index: int, lane: LaneWriter, bell: Doorbell, slot: ProcessSlot) -> None:
        self.role = role
        self.index = index
        self.slot = slot
        self.feeding = 0
        """The generation that asked for the whole catalog and has not got all of it; 0: none."""
        self.is_applied: Callable[[Assignment], bool] | None = None
        """Of a worker: whether what it was told of a partition has been carried out. None: nothing waits for that."""
        self._outbox: Outbox[Waiting] = Outbox(lane, bell, self._write)
        self._news: dict[tuple[bytes, int], Waiting] = {}
        """News in the queue, by partition."""
        self._under_way: list[tuple[int, Assignment]] = []
        """(when it was sent, news) that is not carried out yet."""
        self._now_ns = 0

    @property
    def lane(self) -> LaneWriter:
        """For the largest payload that it takes."""
        return self._outbox.lane

    @property
    def queue(self) -> deque[Waiting]:
        """What is not in the lane yet."""
        return self._outbox.waiting

    def put(
        self, kind: LaneKind, content: bytes | Assignment = b"", *, slot: int = 0, flags: int = 0, session: int = 0, correlation_id: int = 0
    ) -> None:
        """A message behind all before it; it goes with `send`."""
        self.queue.append(Waiting(kind, slot, flags, session, correlation_id, content))

    def tell(self, assignment: Assignment) -> None:
        """News of a partition; it takes the place of older news that wait."""
        key = (assignment.topic_id, assignment.partition)
        waiting = self._news.get(key)
        if waiting is None:
            waiting = self._news[key] = Waiting(LaneKind.ASSIGN, 0, 0, 0, 0, assignment)
            self.queue.append(waiting)
        else:
            revive = assignment.revive or (isinstance(waiting.content, Assignment) and waiting.content.revive)
            waiting.content = replace(assignment, revive=revive)

    def send(self, now_ns: int) -> int:
        """Move what waits into the lane, as far as it fits."""
        self._now_ns = now_ns
        count = self._outbox.flush()
        if self.feeding and not self.queue:
            # Only now: were this coordinator killed before, its successor must begin again.
            self.slot.store(ProcessWord.FED_GENERATION, self.feeding)
            self.feeding = 0
        return count

    def _write(self, waiting: Waiting) -> bool:
        content = waiting.content
        news = content if isinstance(content, Assignment) and not waiting.flags & REPLAY else None
        if news is not None and not self._may_tell_more():
            return False
        payload = content if isinstance(content, bytes) else content.encode()
        if not self.lane.try_write(
            waiting.kind, waiting.slot, waiting.flags, waiting.session, waiting.correlation_id, self._now_ns, (payload,)
        ):
            return False
        if news is not None:
            self._news.pop((news.topic_id, news.partition), None)
            if self.is_applied is not None:
                self._under_way.append((self._now_ns, news))
        return True

    def _may_tell_more(self) -> bool:
        """Whether few enough partitions are being made, changed or deleted behind this worker."""
        if len(self._under_way) >= NEWS_AT_ONCE and self.is_applied is not None:
            self._under_way = [
                (sent_ns, news)
                for sent_ns, news in self._under_way
                if self._now_ns - sent_ns < NEWS_PATIENCE_NS and not self.is_applied(news)
            ]
        return len(self._under_way) < NEWS_AT_ONCE
