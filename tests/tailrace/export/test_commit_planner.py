"""Offsets of a commit: each once, in order, and no partition waits for another's backlog."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tailrace.export.commit_planner import due_ends, lag, next_ranges

LAGS = st.dictionaries(
    st.integers(0, 9), st.tuples(st.integers(0, 50), st.integers(0, 300)), max_size=8
)


@given(LAGS, st.integers(1, 120))
def test_steps_bring_every_offset_once_within_their_bounds(
    lags: dict[int, tuple[int, int]], rows_max: int
) -> None:
    positions = {p: start for p, (start, _) in lags.items()}
    ends = {p: start + missing for p, (start, missing) in lags.items()}
    total, count = lag(positions, ends), 0
    while ranges := next_ranges(positions, ends, rows_max, count):
        taken = sum(end - start for _, start, end in ranges)
        assert taken == min(rows_max, lag(positions, ends))
        assert len({partition for partition, _, _ in ranges}) == len(ranges)
        for partition, start, end in ranges:
            assert start == positions[partition] < end <= ends[partition]
            positions[partition] = end
        count += 1
    assert positions == ends
    assert count == -(-total // rows_max)


def test_a_long_backlog_holds_no_other_partition_up_and_the_first_one_changes() -> None:
    assert next_ranges({0: 0, 1: 5}, {0: 10**9, 1: 6}, 100, 0) == [(0, 0, 99), (1, 5, 6)]
    assert next_ranges({0: 0, 1: 5}, {0: 10**9, 1: 6}, 100, 1) == [(1, 5, 6), (0, 0, 99)]


def test_the_settled_rest_waits_for_its_time_or_for_enough_rows() -> None:
    positions, settled, sealed = {0: 4, 1: 0}, {0: 9, 1: 7}, {0: 6}
    assert due_ends(positions, settled, sealed, 100, is_time=False) == {0: 6, 1: 0}
    assert due_ends(positions, settled, {0: 2}, 100, is_time=False) == {0: 4, 1: 0}
    assert due_ends(positions, settled, sealed, 100, is_time=True) == settled
    assert due_ends(positions, settled, sealed, 12, is_time=False) == settled
