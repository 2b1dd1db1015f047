"""The vectorised wheel against a sorted list, with time running forward, standing still, jumping
and running backwards.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.delays.store.array_wheel import NEVER, ArrayWheel, rows_of

ticks = st.integers(0, 1 << 40) | st.integers(0, 300) | st.integers(0, 70_000)
steps = st.lists(st.tuples(st.lists(ticks, max_size=20), ticks | st.none()), max_size=30)


@given(steps, st.integers(0, 1 << 40))
def test_rows_come_out_once_when_they_are_due_in_order(
    steps: list[tuple[list[int], int | None]], begin: int
) -> None:
    wheel, model, offset, now = ArrayWheel(begin), [], 0, begin
    for added, to in steps:
        rows = []
        for tick in added:
            rows.append((tick, offset))
            offset += 1
        model += rows
        if rows:
            of = np.array(rows, np.int64)
            wheel.add(rows_of(of[:, 0], of[:, 1], of[:, 1] + 7))
        assert wheel.earliest() == min((tick for tick, _ in model), default=NEVER)
        if to is None:
            continue
        due = sorted(row for row in model if row[0] <= to)
        model = [row for row in model if row[0] > to]
        found = wheel.advance(to)
        assert [(int(t), int(o)) for t, o, _ in found] == due
        assert (found[:, 2] == found[:, 1] + 7).all()
        now = max(now, to)
        assert wheel.current == now
        assert len(wheel) == len(model)


@given(st.lists(ticks, min_size=1, max_size=50), ticks, ticks)
def test_setting_the_clock_back_loses_nothing(added: list[int], first: int, back: int) -> None:
    wheel = ArrayWheel(0)
    of = np.array([(tick, number) for number, tick in enumerate(added)], np.int64)
    wheel.add(rows_of(of[:, 0], of[:, 1], of[:, 1]))
    out = wheel.advance(first)
    wheel.set_back(min(back, first))
    rest = wheel.advance(1 << 41)
    assert sorted([*out[:, 1].tolist(), *rest[:, 1].tolist()]) == list(range(len(added)))
    assert (np.diff(rest[:, 0]) >= 0).all()


def test_look_and_take_all_show_what_waits() -> None:
    wheel = ArrayWheel(0)
    wheel.add(rows_of(np.array([5, 5_000, 500_000]), np.arange(3), np.arange(3)))
    assert sorted(wheel.select(lambda rows: rows[:, 0] > 5)[:, 1].tolist()) == [1, 2]
    assert sorted(wheel.acquire_all()[:, 1].tolist()) == [0, 1, 2]
    assert len(wheel) == 0
    assert wheel.earliest() == NEVER
