"""Ring follower: the flusher's position in one ring, and its current flush group.

Owner: the flusher.

Invariants:
- settled <= cursor <= producer_position.
- A group's entries are the descriptors from the cursor to `end`, in order.
- Each slot's `placed` is in the order of its log's group.

Crash: a successor begins at the ring's `settled`. Below `replay_below` its predecessor may have
placed descriptors already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shm.memory.layout import Verdict
from shm.queues.ring import Ring
from shm.runtime.timing_wheel import Timer, TimingWheel
from shm.tables.partition_table import PartitionTable
from workers.log.partition_log import PartitionLog
from workers.log.retention.leases import Task

GROUP_DESCRIPTORS_MAX = 1024
GROUP_BYTES_MAX = 16 << 20


@dataclass(slots=True)
class FlushGroup:
    """Descriptors taken from a ring and placed, until their verdicts are stored."""

    end: int
    entries: list[tuple[int, PartitionLog | None, Verdict]] = field(default_factory=list)
    """(descriptor number, its log, its verdict if the commit succeeds)"""
    touched: dict[int, PartitionLog] = field(default_factory=dict)
    placed: dict[int, list[int]] = field(default_factory=dict)
    """Numbers of the descriptors with batches in the log's group, in order, by slot."""
    byte_count: int = 0
    has_markers: bool = False
    """True if a transaction ends here: the worker waits for the verdict."""


class RingFollower:
    """Position of the flusher in one ring."""

    def __init__(
        self, ring: Ring, worker: int, translate: Callable[[int], tuple[bytes, int]] | None = None
    ) -> None:
        """`worker` is the ring's worker, -1 for a ring of an earlier run."""
        self.ring = ring
        self.worker = worker
        self.cursor = ring.settled.load()
        self.replay_below = ring.producer_position.load()
        """Descriptors below this may have been placed by a predecessor."""
        self.translate = translate
        """Ring of an earlier run: slot -> (topic id, partition) by that run's table."""
        self.group: FlushGroup | None = None
        self._linger: Timer[Task] | None = None
        """Timer that runs while a larger group is awaited."""
        self._has_lingered = False
        self.given_up = {Verdict.DELETED: 0, Verdict.FAILED: 0}
        """Batches that were not written, because their topic was deleted or their
        log's disk had failed.
        """

    @property
    def has_input(self) -> bool:
        return self.group is not None or self.cursor != self.ring.producer_position.load()

    @property
    def is_lingering(self) -> bool:
        return self._linger is not None

    def lingers(
        self,
        producer_position: int,
        wheel: TimingWheel[Task],
        now_ns: int,
        linger_ns: int,
        batch_bytes: int,
    ) -> bool:
        """True while a larger group is awaited: fewer than `batch_bytes` are
        there, for less than `linger_ns`.
        """
        if self._linger is None:
            self._linger = wheel.add(now_ns + linger_ns, self._end_linger)
        first, last = self.ring.descriptor(self.cursor), self.ring.descriptor(producer_position - 1)
        gathered = last.position + last.length - first.position
        if gathered < batch_bytes and not self._has_lingered:
            return True
        wheel.cancel(self._linger)
        self._linger, self._has_lingered = None, False
        return False

    def _end_linger(self) -> int:
        """Mark the linger time as over. Task of the timer."""
        self._has_lingered = True
        return 1


def translator(table: PartitionTable) -> Callable[[int], tuple[bytes, int]]:
    """Return a function slot -> (topic id, partition) that reads a partition table."""

    def translate(slot: int) -> tuple[bytes, int]:
        state = table.read(slot)
        return state.topic_id, state.partition

    return translate
