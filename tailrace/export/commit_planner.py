"""Which offsets the next commit takes. Pure decisions.

Invariants: a step takes at most `rows_max` offsets, of each partition a range that begins where the one before ended; every partition that lags gets its share,
    so that one with a long backlog holds no other up.
"""

from __future__ import annotations

from collections.abc import Mapping

Ranges = list[tuple[int, int, int]]


def lag(positions: Mapping[int, int], ends: Mapping[int, int]) -> int:
    """How many offsets are to be read."""
    return sum(max(0, end - positions[partition]) for partition, end in ends.items())


def next_ranges(positions: Mapping[int, int], ends: Mapping[int, int], rows_max: int, turn: int) -> Ranges:
    """(partition, start, end) of the next step. `turn` says which partition is first: a step may end before its last, by its bytes."""
    behind = sorted((ends[p] - start, p) for p, start in positions.items() if p in ends and ends[p] > start)
    room, chosen = rows_max, []
    for number, (missing, partition) in enumerate(behind):
        share = min(missing, max(1, room // (len(behind) - number)), room)  # those that lag least leave the rest to the others
        if share > 0:
            chosen.append((partition, positions[partition], positions[partition] + share))
            room -= share
    chosen.sort()
    first = turn % len(chosen) if chosen else 0
    return chosen[first:] + chosen[:first]


def due_ends(
    positions: Mapping[int, int], settled: Mapping[int, int], sealed: Mapping[int, int], rows_max: int, *, is_time: bool
) -> dict[int, int]:
    """Up to where a continuous export goes now: sealed segments at once, the settled rest when it makes a whole commit, or has waited long enough."""
    if is_time or lag(positions, settled) >= rows_max:
        return dict(settled)
    return {partition: max(positions[partition], min(end, sealed.get(partition, 0))) for partition, end in settled.items()}
