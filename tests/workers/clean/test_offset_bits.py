"""Offset bits against a set."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.clean.offset_bits import OffsetBits

END = 140


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.sets(st.integers(0, END - 1)),
    st.lists(st.tuples(st.integers(0, END), st.integers(0, END)), max_size=20),
    st.booleans(),
)
def test_bits_are_those_of_a_set(
    base: int, more: int, members: set[int], ranges: list[tuple[int, int]], reaches: bool
) -> None:
    start = base + more
    bits = OffsetBits(base, start, END)
    members = {offset for offset in members if offset >= start}
    bits.set(np.array(sorted(members), np.int64))
    if reaches:
        bits.reach_down(base)
        start = base
    for first, last in [*ranges, (start, END), *((n, n + 8) for n in range(start, END - 8))]:
        if first < last:
            expected = first >= start and members.issuperset(range(first, last))
            assert bits.are_set(first, last) == expected, (first, last)
    for step in (1, 3):
        offsets = np.arange(start, END, step)
        assert bits.unset(offsets).tolist() == [int(n not in members) for n in offsets.tolist()]


def test_a_range_is_set_if_each_of_its_bits_is() -> None:
    for first in range(20):
        for last in range(first + 1, 40):
            bits = OffsetBits(0, 0, 48)
            bits.set(np.arange(first, last))
            assert bits.are_set(first, last)
            assert not bits.are_set(first, last + 1)
            assert not bits.are_set(first - 1, last)


@given(
    st.integers(0, 40),
    st.integers(0, 40),
    st.sets(st.integers(0, END - 1)),
    st.integers(0, END),
    st.integers(0, END),
)
def test_the_count_of_a_range_leaves_out_its_edges_at_most(
    base: int, more: int, members: set[int], first: int, last: int
) -> None:
    start = base + more
    bits = OffsetBits(base, start, END)
    members = {offset for offset in members if offset >= start}
    bits.set(np.array(sorted(members), np.int64))
    expected = len(members.intersection(range(first, last))) if first >= start else 0
    assert max(0, expected - 14) <= bits.set_count(first, last) <= expected
