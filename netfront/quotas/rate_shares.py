"""Rate shares: a rate divided among the fronts by the use that each makes of it. Pure.

A front that uses its share up gets as much as others leave. Each of the others keeps a quarter more
than it uses, and a SPARE_PARTS-th of its even share, so that it can begin. Fronts that would all
use more get equal shares (max-min fairness). Without use the shares are equal.

Invariants:
- The shares of fronts that see the same uses are at most the rate, or 1 each.
"""

from __future__ import annotations

from collections.abc import Sequence

from shm.tables.rate_uses import RateUse

SPARE_PARTS = 16


def share_of_rate(rate: int, own: RateUse, others: Sequence[RateUse]) -> int:
    """The share of one front."""
    fronts = len(others) + 1
    spare = rate // (SPARE_PARTS * fronts)
    needs = [
        rate if use.is_limited else min(rate, use.amount * 5 // 4 + spare)
        for use in (own, *others)
    ]  # fmt: skip
    left, given = rate, rate
    for place, need in enumerate(sorted(needs)):
        got = min(need, left // (fronts - place))
        left -= got
        if need == needs[0]:
            given = min(given, got)
    return max(1, given + left // fronts)
