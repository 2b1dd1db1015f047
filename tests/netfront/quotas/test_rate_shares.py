"""Shares of a rate: what one front leaves the others get, and all together have no more than it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netfront.quotas.rate_shares import share_of_rate
from shm.tables.rate_uses import UNUSED, RateUse

FULL = RateUse(500, True)


def shares(rate: int, *uses: RateUse) -> list[int]:
    return [
        share_of_rate(rate, use, [*uses[:place], *uses[place + 1 :]])
        for place, use in enumerate(uses)
    ]


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ([FULL], [1_000]),
        ([UNUSED, UNUSED], [500, 500]),
        ([FULL, UNUSED], [969, 31]),
        ([FULL, FULL], [500, 500]),
        ([FULL, RateUse(200, False)], [719, 281]),
        ([RateUse(100, False), RateUse(200, False)], [437, 562]),
        ([FULL, FULL, UNUSED, UNUSED], [485, 485, 15, 15]),
    ],
)
def test_a_share_follows_the_use(uses: list[RateUse], expected: list[int]) -> None:
    assert shares(1_000, *uses) == expected


@given(
    st.integers(1, 1 << 50),
    st.lists(st.builds(RateUse, st.integers(0, 1 << 55), st.booleans()), min_size=1, max_size=16),
)
def test_all_shares_together_are_no_more_than_the_rate(rate: int, uses: list[RateUse]) -> None:
    found = shares(rate, *uses)
    assert min(found) >= 1
    assert sum(found) <= max(rate, len(uses))
    limited = [share for share, use in zip(found, uses, strict=True) if use.is_limited]
    assert max(limited, default=0) - min(limited, default=0) <= 1, "who asks for more gets alike"
    if limited and rate > 1_000 * len(uses):
        assert min(limited) >= max(found) - 1
        assert sum(found) >= rate - 2 * len(uses), "nothing is left while somebody waits"
