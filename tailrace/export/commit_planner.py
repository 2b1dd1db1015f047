"""Commit planning: the offsets of the next commit, as pure decisions.

Invariants:
- A step has at most `rows_max` offsets, and for each partition a range that begins at the end of
  the previous one.
- Every partition with a lag gets its share, so a long backlog in one does not delay the others.
"""

from __future__ import annotations

from collections.abc import Mapping

Ranges = list[tuple[int, int, int]]


def lag(positions: Mapping[int, int], ends: Mapping[int, int]) -> int:
    """The number of offsets to read."""
    return sum(max(0, end - positions[partition]) for partition, end in ends.items())


def next_ranges(
    positions: Mapping[int, int], ends: Mapping[int, int], rows_max: int, round: int
) -> Ranges:
    """(partition, start, end) of the next step.

    `round` rotates the first partition, because a step may end early by its bytes.
    """
    behind = sorted(
        (ends[p] - start, p) for p, start in positions.items() if p in ends and ends[p] > start
    )
    room, chosen = rows_max, []
    for number, (missing, partition) in enumerate(behind):
        # Partitions with the smallest lag leave the rest of their share to the others.
        share = min(missing, max(1, room // (len(behind) - number)), room)
        if share > 0:
            chosen.append((partition, positions[partition], positions[partition] + share))
            room -= share
    chosen.sort()
    first = round % len(chosen) if chosen else 0
    return chosen[first:] + chosen[:first]


def due_ends(
    positions: Mapping[int, int],
    settled: Mapping[int, int],
    sealed: Mapping[int, int],
    rows_max: int,
    *,
    is_time: bool,
) -> dict[int, int]:
    """The ends of a continuous export's next commit.

    Sealed segments are exported at once, settled offsets after them when they fill a commit or have
    waited long enough.
    """
    if is_time or lag(positions, settled) >= rows_max:
        return dict(settled)
    return {
        partition: max(positions[partition], min(end, sealed.get(partition, 0)))
        for partition, end in settled.items()
    }
