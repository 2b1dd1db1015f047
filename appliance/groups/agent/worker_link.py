"""The lanes between the transaction coordinator and the workers. They are made when the first
transactional id is used.

A worker gets decisions only behind its feed, which has everything. It is fed when its lanes appear,
when a new process of it says so, and when more waits for it than FEED_AT messages.

Owner: the process of groups; in shared memory the producer positions of its lanes to the workers,
    and its word TRANSACTIONS_REQUESTED.
Invariants:
- Decisions reach a lane in the order of their ordinals, behind a feed for the worker's process.
- A worker counts as long as it may have a partition: those of the appliance's start always, a
  dedicated one while it is assigned or alive, and GONE_NS longer. It is released only when its
  partition is deleted: what it had not carried out is gone with the log.
- What a worker reports of its progress stays true when it is restarted: the markers are durable.
Crash: a successor knows no progress, and feeds every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shm.memory.layout import ProcessWord
from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import NO_PROGRESS, Settled, decode_settled
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneReader, LaneWriter
from shm.queues.outbox import Outbox
from shm.tables.control import ProcessSlot

FEED_AT = 4_096
"""Unsent messages of a worker at which they are dropped for a feed."""
GONE_NS = 60_000_000_000
"""Time in which a dedicated worker still counts after its end, in case its slot is assigned again
soon. Nothing depends on this time: its partition was deleted.
"""
REPORTS_AT_ONCE = 256


class WorkerMessage(NamedTuple):
    """A message to a worker."""

    kind: LaneKind
    generation: int = 0
    payload: bytes = b""


class Report(NamedTuple):
    """A message from a worker."""

    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class WorkerLanes:
    """The two lanes of a worker."""

    decisions: LaneWriter
    reports: LaneReader


class WorkerLink:
    """One worker."""

    def __init__(
        self,
        index: int,
        slot: ProcessSlot,
        bell: Doorbell,
        connect: Callable[[], WorkerLanes],
        *,
        is_dedicated: bool,
    ) -> None:
        """`connect`: attaches the lanes, once they exist."""
        self.index = index
        self.name = f"worker-{index}"
        self._slot = slot
        self._bell = bell
        self._connect = connect
        self._is_dedicated = is_dedicated
        self._reports: LaneReader | None = None
        self._decisions: LaneWriter | None = None
        self._outbox: Outbox[WorkerMessage] | None = None
        self._fed_generation = 0
        """The process that the last feed was for."""
        self._is_fed = False
        self._is_stalled = False
        """Too much waited for the worker. It is fed when its lane is empty, or to its successor."""
        self._gone_ns = 0
        """Time since which a dedicated worker does not exist."""
        self.settled: Settled = NO_PROGRESS

    @property
    def is_attached(self) -> bool:
        return self._outbox is not None

    def attach(self) -> bool:
        """Attach the lanes if they exist by now."""
        if self._outbox is not None or not self._slot.load(ProcessWord.TRANSACTION_LANES):
            return False
        lanes = self._connect()
        self._reports, self._decisions = lanes.reports, lanes.decisions
        self._outbox = Outbox(lanes.decisions, self._bell, self._write)
        return True

    def exists(self, now_ns: int) -> bool:
        """True if the worker may have partitions."""
        if (
            not self._is_dedicated
            or self._slot.load(ProcessWord.DEDICATED_TO)
            or self._slot.is_live()
        ):
            self._gone_ns = 0
            return True
        if not self.is_attached:
            return False
        self._gone_ns = self._gone_ns or now_ns
        return now_ns - self._gone_ns < GONE_NS

    def _write(self, message: WorkerMessage) -> bool:
        assert self._decisions is not None
        return self._decisions.try_write(
            message.kind, 0, 0, 0, message.generation, 0, (message.payload,)
        )

    # ---- decisions -------------------------------------------------------------------------------

    @property
    def is_feed_due(self) -> bool:
        outbox = self._outbox
        if outbox is None or self._is_fed:
            return False
        return not self._is_stalled or outbox.is_empty()

    def require_feed(self) -> None:
        """Feed the worker again."""
        self._is_fed = self._is_stalled = False

    def feed(self, payloads: Sequence[bytes]) -> None:
        """Send everything, for the worker's present process."""
        if self._outbox is None:
            return
        self._fed_generation = self._slot.load(ProcessWord.GENERATION)
        self._is_fed, self._is_stalled = True, False
        self._outbox.waiting.clear()
        self._outbox.put(WorkerMessage(LaneKind.TRANSACTIONS_FEED))
        for payload in payloads:
            self._outbox.put(WorkerMessage(LaneKind.DECISIONS, 0, payload))
        self._outbox.put(WorkerMessage(LaneKind.TRANSACTIONS_FED, self._fed_generation))

    def send(self, payloads: Sequence[bytes]) -> None:
        """Send decisions, if the worker was fed."""
        if self._outbox is None or not self._is_fed:
            return
        for payload in payloads:
            self._outbox.put(WorkerMessage(LaneKind.DECISIONS, 0, payload))
        if len(self._outbox.waiting) > FEED_AT:
            self._outbox.waiting.clear()
            self._is_fed, self._is_stalled = False, True

    def flush(self) -> int:
        return 0 if self._outbox is None else self._outbox.flush()

    @property
    def has_unsent(self) -> bool:
        return self._outbox is not None and (bool(self._outbox.waiting) or self._is_stalled)

    # ---- reports ---------------------------------------------------------------------------------

    def reports(self) -> Iterator[Report]:
        """Read what the worker has sent since, without what the link itself handles."""
        lane = self._reports
        if lane is None:
            return
        for _ in range(REPORTS_AT_ONCE):
            message = lane.peek()
            if message is None:
                return
            kind, generation, payload = (
                message.kind,
                message.correlation_id,
                bytes(message.payload),
            )
            lane.advance(message)
            lane.consume()
            if kind == LaneKind.TRANSACTIONS_CONNECTED:
                if generation != self._fed_generation or self._is_stalled:
                    self.require_feed()
            else:
                yield Report(kind, payload)

    def has_more(self) -> bool:
        return self._reports is not None and self._reports.has_more()

    def settle(self, payload: bytes) -> None:
        """Handle SETTLED. Raises struct.error, IndexError."""
        self.settled = decode_settled(payload)


class WorkerLinks:
    """All workers: `appliance.groups.transactions.decisions.workers.Workers`."""

    def __init__(
        self,
        links: Sequence[WorkerLink],
        request: Callable[[], None],
        show_progress: Callable[[int, int], None],
    ) -> None:
        """`request`: asks the supervisor for lanes and the controller for producer ids.
        `show_progress`: see `Workers`.
        """
        self._links = list(links)
        self._request = request
        self.show_progress = show_progress
        self._is_requested = False
        self._now_ns = 0
        self._counted: list[WorkerLink] = []
        """The workers that exist."""

    def __iter__(self) -> Iterator[WorkerLink]:
        return iter(self._links)

    def attach(self, now_ns: int) -> bool:
        """Attach lanes that exist by now. True if other workers exist than before."""
        self._now_ns = now_ns
        for link in self._links:
            link.attach()
        counted = [link for link in self._links if link.exists(now_ns)]
        is_changed = counted != self._counted
        self._counted = counted
        return is_changed

    def require_feed(self) -> None:
        """Feed all workers again."""
        for link in self._links:
            link.require_feed()

    def flush(self) -> int:
        return sum(link.flush() for link in self._links)

    @property
    def has_unsent(self) -> bool:
        return any(link.has_unsent for link in self._links)

    def has_more(self) -> bool:
        return any(link.has_more() for link in self._links)

    # ---- Workers ---------------------------------------------------------------------------------

    def request(self) -> None:
        if not self._is_requested:
            self._is_requested = True
            self._request()

    def send(self, payloads: Sequence[bytes]) -> None:
        for link in self._links:
            link.send(payloads)

    def is_feed_due(self) -> bool:
        return any(link.is_feed_due for link in self._links)

    def feed(self, payloads: Sequence[bytes]) -> None:
        for link in self._links:
            if link.is_feed_due:
                link.feed(payloads)

    def settled_through(self) -> int:
        return min((link.settled.ordinal for link in self._counted), default=0)

    def unfinished(self) -> Collection[int]:
        return {ordinal for link in self._counted for ordinal in link.settled.unfinished}

    def pending_on(self, ordinal: int) -> list[str]:
        return [
            link.name
            for link in self._counted
            if link.settled.ordinal < ordinal or ordinal in link.settled.unfinished
        ]
