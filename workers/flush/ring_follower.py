"""Where the flusher stands in one ring, and the group of descriptors that it has under way there.

Owner: the flusher.
Invariants: settled <= cursor <= head; a group's entries are the descriptors from the cursor up to `end`, in order; of `placed`, each slot's are in the
    order of its log's group.
Crash: a successor begins at the ring's `settled`; below `replay_below` its predecessor may have placed descriptors already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shm.layout import Verdict
from shm.partition_table import PartitionTable
from shm.ring import Ring
from workers.leases import Task
from workers.partition_log import PartitionLog
from workers.timing_wheel import Timer, TimingWheel

GROUP_DESCRIPTORS_MAX = 1024
GROUP_BYTES_MAX = 16 << 20


@dataclass(slots=True)
class Group:
    """Descriptors taken from a ring and placed, on their way to their verdicts."""

    end: int
    entries: list[tuple[int, PartitionLog | None, Verdict]] = field(default_factory=list)
    """(number of the descriptor, its log, its verdict if all goes well)"""
    touched: dict[int, PartitionLog] = field(default_factory=dict)
    placed: dict[int, list[int]] = field(default_factory=dict)
    """slot -> numbers of the descriptors whose batches are in the log's group, in order."""
    byte_count: int = 0


class Stage:
    """Where the flusher stands in one ring."""

    def __init__(self, ring: Ring, worker: int, translate: Callable[[int], tuple[bytes, int]] | None = None) -> None:
        """`worker`: whose ring it is; -1: of an earlier run."""
        self.ring = ring
        self.worker = worker
        self.cursor = ring.settled.load()
        self.replay_below = ring.head.load()
        """Descriptors below this may have been placed by a predecessor."""
        self.translate = translate
        """For a ring of an earlier run: slot -> (topic id, partition) as that run's table had it."""
        self.group: Group | None = None
        self._linger: Timer[Task] | None = None
        """Runs while more is waited for than the ring holds."""
        self._has_lingered = False
        self.given_up = {Verdict.DELETED: 0, Verdict.FAILED: 0}
        """Batches that were not written: of topics that are gone, of logs whose disk had refused what came before."""

    @property
    def has_input(self) -> bool:
        return self.group is not None or self.cursor != self.ring.head.load()

    @property
    def is_lingering(self) -> bool:
        return self._linger is not None

    def lingers(self, head: int, wheel: TimingWheel[Task], now_ns: int, linger_ns: int, batch_bytes: int) -> bool:
        """Whether to wait for a larger group: less than `batch_bytes` is there, for less than `linger_ns`."""
        if self._linger is None:
            self._linger = wheel.add(now_ns + linger_ns, self._end_linger)
        first, last = self.ring.descriptor(self.cursor), self.ring.descriptor(head - 1)
        gathered = last.position + last.length - first.position
        if gathered < batch_bytes and not self._has_lingered:
            return True
        wheel.cancel(self._linger)
        self._linger, self._has_lingered = None, False
        return False

    def _end_linger(self) -> int:
        """The timer's task."""
        self._has_lingered = True
        return 1


def translator(table: PartitionTable) -> Callable[[int], tuple[bytes, int]]:
    """slot -> (topic id, partition), as a partition table shows it."""

    def translate(slot: int) -> tuple[bytes, int]:
        state = table.read(slot)
        return state.topic_id, state.partition

    return translate
