"""Recurrences: what is due until a tick, by whatever step one goes there, is what going through one
by one finds.
"""

from __future__ import annotations

import datetime as dt
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core.schedule.delays import TICK_US, tick_of
from tailrace.core.schedule.recurrence import MISSED, MISSED_AT_ONCE, ON_TIME_TICKS, Recurrence
from tests.kit.seeds import examples

BEGIN_US = 1_700_000_000_000_000
DAY_US = 86_400_000_000
intervals = st.integers(10_000, 100 * DAY_US).map(
    lambda us: Recurrence.every(dt.timedelta(microseconds=us))
)
crons = st.sampled_from(["*/5 * * * *", "30 2 * * *", "0 9 1 1 *", "15 4 29 2 *"]).map(
    lambda text: Recurrence.cron(text, zone="Europe/Berlin")
)


def one_by_one(recurrence: Recurrence, due_us: int, tick: int) -> tuple[list[int], int | None]:
    found, upcoming = [], due_us
    while tick_of(upcoming) <= tick:
        found.append(upcoming)
        following = recurrence.after(upcoming)
        assert following is not None
        upcoming = following
    if recurrence.missed == "last":
        found = found[-1:]
    elif recurrence.missed == "none":
        found = [due for due in found if tick - tick_of(due) <= ON_TIME_TICKS]
    return found, upcoming


@settings(max_examples=examples(300), deadline=None)
@given(
    intervals | crons,
    st.sampled_from(MISSED),
    st.integers(0, 400),
    st.integers(0, 3_000),
    st.integers(0, 300_000_000),
)
def test_jumping_finds_what_going_one_by_one_does(
    of: Recurrence, missed: str, occurrence: int, steps: int, ahead_us: int
) -> None:
    recurrence = Recurrence(of.every_us, of.expression, of.zone, missed)
    due_us = recurrence.after(BEGIN_US + occurrence * 3_600_000_000)
    assert due_us is not None
    span_us = (of.every_us or 300_000_000) * steps // 10 + ahead_us
    tick = (due_us + min(span_us, (of.every_us or DAY_US // 24) * 3_000)) // TICK_US
    assert recurrence.due_until(due_us, tick) == one_by_one(recurrence, due_us, tick)


@given(intervals, st.integers(0, 1_000))
def test_an_occurrence_is_known_by_its_tick(recurrence: Recurrence, back: int) -> None:
    due_us = BEGIN_US + 123
    later_us = due_us + back * recurrence.every_us
    assert recurrence.occurrence_at(tick_of(due_us), later_us) == due_us


@pytest.mark.parametrize("missed", ["last", "none"])
def test_a_year_of_missed_occurrences_is_jumped_over(missed: str) -> None:
    for recurrence in (
        Recurrence.every(dt.timedelta(milliseconds=10), missed=missed),
        Recurrence.cron("* * * * *", missed=missed),
    ):
        due, upcoming = recurrence.due_until(BEGIN_US, (BEGIN_US + 365 * DAY_US) // TICK_US)
        assert upcoming is not None
        assert upcoming > BEGIN_US + 365 * DAY_US
        assert len(due) <= (1 if missed == "last" else ON_TIME_TICKS // 10 + 1)


@pytest.mark.parametrize(
    "recurrence", [Recurrence.every(dt.timedelta(milliseconds=10)), Recurrence.cron("* * * * *")]
)
def test_a_year_of_occurrences_that_are_all_wanted_comes_in_pieces(recurrence: Recurrence) -> None:
    due_us, found = BEGIN_US // 60_000_000 * 60_000_000, []
    for _ in range(5):
        reach = recurrence.reach(due_us)
        assert reach is not None
        due, upcoming = recurrence.due_until(due_us, reach)
        assert 1 <= len(due) <= MISSED_AT_ONCE + 1
        assert upcoming is not None
        found += due
        due_us = upcoming
    assert len({later - earlier for earlier, later in pairwise(found)}) == 1, (
        "none is missing between the pieces"
    )
