"""Array timing wheel: rows by the thousand in numpy arrays (see `shm.runtime.timing_wheel` for the
algorithm).

A row is (tick, offset, reference), 64 bits each. Rows that are added together stay together: a
bucket holds pieces of arrays. Moving a bucket down a level, or releasing it, is a few array
operations for any number of rows.

Owner: one process. Pure: time is passed in, as ticks.

Invariants:
- `advance(tick)` returns every row with a tick at or below, and no other, ordered by (tick,
  offset).
- Time that does not advance moves nothing.
- Rows may be added for past ticks. The next `advance` returns them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Rows = np.ndarray[Any, np.dtype[np.int64]]
"""Array of shape (n, 3): tick, offset, reference."""

_BITS = 6
_BUCKETS = 1 << _BITS
LEVELS = 8
"""64 ** 8 ticks: longer than any delay."""
NEVER = 1 << 62


def no_rows() -> Rows:
    return np.empty((0, 3), np.int64)


def rows_of(
    ticks: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any], references: np.ndarray[Any, Any]
) -> Rows:
    return np.stack((ticks, offsets, references), axis=1).astype(np.int64, copy=False)


def split(rows: Rows, labels: np.ndarray[Any, Any]) -> list[tuple[int, Rows]]:
    """Return rows by label, in their original order."""
    if not len(rows):
        return []
    if (labels == labels[0]).all():
        return [(int(labels[0]), rows)]
    order = np.argsort(labels, kind="stable")
    found, starts = np.unique(labels[order], return_index=True)
    ends = [*starts[1:], len(rows)]
    return [
        (int(label), rows[order[start:end]])
        for label, start, end in zip(found, starts, ends, strict=True)
    ]


def levels_of(ticks: np.ndarray[Any, Any], current: int) -> np.ndarray[Any, Any]:
    """Return the lowest level whose 64 buckets reach each tick, for ticks after `current`."""
    levels = np.zeros(len(ticks), np.int64)
    for level in range(1, LEVELS):
        levels += (ticks >> (_BITS * (level - 1))) - (current >> (_BITS * (level - 1))) >= _BUCKETS
    return levels


class ArrayWheel:
    """Rows waiting for their ticks."""

    def __init__(self, current: int = 0) -> None:
        self.current = current
        self._due: list[Rows] = []
        self._levels: list[dict[int, list[Rows]]] = [{} for _ in range(LEVELS)]
        """Pieces by level and bucket (first tick >> bits of the level)."""
        self._count = 0
        self._earliest: int | None = None

    def __len__(self) -> int:
        return self._count

    def add(self, rows: Rows) -> None:
        """Add rows in a few array operations."""
        if not len(rows):
            return
        self._count += len(rows)
        ticks = rows[:, 0]
        if self._earliest is not None:
            self._earliest = min(self._earliest, int(ticks.min()))
        self._place(rows, self.current)

    def _place(self, rows: Rows, current: int) -> None:
        late = rows[:, 0] <= current
        if late.any():
            self._due.append(rows[late])
            rows = rows[~late]
        if not len(rows):
            return
        for level, of_level in split(rows, levels_of(rows[:, 0], current)):
            for bucket, piece in split(of_level, of_level[:, 0] >> (_BITS * level)):
                self._levels[level].setdefault(bucket, []).append(piece)

    def earliest(self) -> int:
        """Return the tick of the earliest row, or NEVER."""
        if self._earliest is None:
            pieces = list(self._due)
            for buckets in self._levels:
                if buckets:
                    pieces += buckets[min(buckets)]
            self._earliest = min((int(piece[:, 0].min()) for piece in pieces), default=NEVER)
        return self._earliest

    def advance(self, tick: int) -> Rows:
        """Move time to `tick` and take out due rows, in order of (tick, offset)."""
        pieces, self._due = self._due, []
        taken = [piece[piece[:, 0] <= tick] for piece in pieces]
        self._due = [piece[piece[:, 0] > tick] for piece in pieces if (piece[:, 0] > tick).any()]
        self.current = max(self.current, tick)
        for level in range(LEVELS - 1, -1, -1):
            shift = _BITS * level
            reached = [bucket for bucket in self._levels[level] if bucket << shift <= tick]
            for bucket in reached:
                for piece in self._levels[level].pop(bucket):
                    due = piece[:, 0] <= tick
                    taken.append(piece[due])
                    self._place(piece[~due], self.current)
        self._earliest = None
        if not taken:
            return no_rows()
        rows = np.concatenate(taken)
        self._count -= len(rows)
        return rows[np.lexsort((rows[:, 1], rows[:, 0]))]

    def acquire_all(self) -> Rows:
        """Take out every row, unordered."""
        pieces = [
            *self._due,
            *(piece for buckets in self._levels for found in buckets.values() for piece in found),
        ]
        self._due, self._levels, self._count, self._earliest = (
            [],
            [{} for _ in range(LEVELS)],
            0,
            NEVER,
        )
        return np.concatenate(pieces) if pieces else no_rows()

    def select(self, requested: Callable[[Rows], np.ndarray[Any, Any]]) -> Rows:
        """Return the rows that `requested` selects.

        It is called with each piece and returns a mask.
        """
        pieces = [
            *self._due,
            *(piece for buckets in self._levels for found in buckets.values() for piece in found),
        ]
        found = [piece[requested(piece)] for piece in pieces]
        return np.concatenate(found) if found else no_rows()

    def set_back(self, tick: int) -> None:
        """Place all rows again as of `tick`, after the clock was set back."""
        rows = self.acquire_all()
        self.current = tick
        self.add(rows)
