"""The map of a partition: which offset of the source is which one of the target.

It is the sum of the partition's entries in the journal (`appliance.migrate.journal`), in order:

    begin     the copy begins at (source, target). Records are appended with consecutive offsets
    open      from here on records are written in transactions
    runs      a transaction has written these runs; the source goes on at `next`

Owner: pure.
Invariants:
- Runs ascend in both offsets and do not overlap.
- While the mode is PLAIN, every offset of the target from the last run on is that of the source
  plus a constant. So the end of the target's log says where the source goes on. An offset of the
  source that is further needs an `open` entry first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum

from appliance.migrate.rows import Run


class Mode(Enum):
    """The way in which records of a partition are written."""

    NEW = "new"
    PLAIN = "plain"
    """One after another, with consecutive offsets."""
    OPEN = "open"
    """In transactions, none of which is committed yet."""
    RUNS = "runs"
    """In transactions."""


class OffsetMap:
    """The map of one partition."""

    def __init__(self) -> None:
        self.mode = Mode.NEW
        self.source_next = 0
        """The source's offset behind the last record of a run."""
        self.target_next = 0
        """The target's offset there."""
        self._runs: list[Run] = []
        self._sources: list[int] = []
        self._plain = (0, 0)
        self.plain_next = 0
        """In OPEN, the source's offset of a record that was written plainly at `target_next`."""

    def begin(self, source: int, target: int) -> None:
        """The copy begins: `source` becomes `target`."""
        self.mode, self._plain = Mode.PLAIN, (source, target)
        self.source_next, self.target_next = source, target

    def grow(self, target_end: int) -> None:
        """The target's log ends here, and everything before it was written without transactions."""
        if self.mode is Mode.PLAIN and target_end > self.target_next:
            self._append(Run(self.source_next, self.target_next, target_end - self.target_next))

    def open(self, source: int, target: int) -> None:
        """Transactions begin at `source`, which is `target`. What lies before is copied, or was
        deleted in the source.
        """
        self.grow(target)
        self.mode, self.plain_next = Mode.OPEN, self.source_next
        self.source_next, self.target_next = max(self.source_next, source), target

    def append_runs(self, runs: Sequence[Run], source_next: int) -> None:
        """A transaction has written `runs`."""
        self.mode = Mode.RUNS
        for run in runs:
            self._append(run)
        self.source_next = max(self.source_next, source_next)

    def _append(self, run: Run) -> None:
        last = self._runs[-1] if self._runs else None
        if (
            last is not None
            and last.source + last.length == run.source
            and last.target + last.length == run.target
        ):
            self._runs[-1] = Run(last.source, last.target, last.length + run.length)
        else:
            self._runs.append(run)
            self._sources.append(run.source)
        self.source_next = run.source + run.length
        self.target_next = run.target + run.length

    @property
    def record_count(self) -> int:
        """The number of copied records."""
        return sum(run.length for run in self._runs)

    @property
    def is_kept(self) -> bool:
        """True if every record has the offset that it had."""
        return self.mode is Mode.PLAIN and self._plain[0] == self._plain[1]

    def target_of(self, source: int) -> int:
        """The offset of the first record that is at or behind `source` in the source; behind the
        last one, where the next record will be.
        """
        at = bisect_right(self._sources, source) - 1
        if at < 0:
            return self._runs[0].target if self._runs else self.target_next
        run = self._runs[at]
        if source < run.source + run.length:
            return run.target + source - run.source
        return self._runs[at + 1].target if at + 1 < len(self._runs) else self.target_next
