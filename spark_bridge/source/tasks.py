"""Division of a plan into tasks, as many as there are cores.

Invariants:
- Pure. The tasks together read the plan's rows, each row once.
- A task's ranges are parts of the plan's, in order. No task has more than its share and one range's
  rounding.
- Several small partitions go to one task, a large one to several tasks.
"""

from __future__ import annotations

from dataclasses import replace

from tailrace.scanning.scan_plan import PartitionRange, ScanPlan

ROWS_MIN = 50_000
"""Fewest offsets of a task: a wave of Python tasks costs 26 ms, in which a core reads more than
this.
"""


def divided(made: ScanPlan, requested: int, rows_min: int = ROWS_MIN) -> list[ScanPlan]:
    """Plans of about equal numbers of offsets, `requested` of them unless there is less to read; at
    least one, which may be of nothing.
    """
    total = sum(r.end - r.start for r in made.ranges)
    count = max(1, min(requested, -(-total // max(rows_min, 1))))
    shares: list[list[PartitionRange]] = [[]]
    room = _share(total, count, 0)
    for whole in made.ranges:
        start = whole.start
        while start < whole.end:
            if not room:
                shares.append([])
                room = _share(total, count, len(shares) - 1)
            end = min(whole.end, start + room)
            shares[-1].append(replace(whole, start=start, end=end))
            room -= end - start
            start = end
    return [replace(made, ranges=tuple(share)) for share in shares]


def _share(total: int, count: int, number: int) -> int:
    """Number of offsets in the share of this number."""
    return total * (number + 1) // count - total * number // count
