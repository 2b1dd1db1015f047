"""Cron expressions over changes of the clock, both ways, in 40 zones, against a calculation of its
own: every minute is looked at, with zoneinfo alone. `make test` takes one zone of each kind of
change.
"""

from __future__ import annotations

import datetime as dt
from bisect import bisect_right
from functools import cache
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest

from tailrace.core.schedule.delays import TICK_US
from tailrace.core.schedule.recurrence import ON_TIME_TICKS, Recurrence

ZONES = [
    "Africa/Cairo", "Africa/Casablanca", "America/Asuncion", "America/Chicago", "America/Godthab",
    "America/Havana", "America/Los_Angeles", "America/Mexico_City", "America/New_York",
    "America/Sao_Paulo", "America/Scoresbysund", "America/St_Johns", "Antarctica/Macquarie",
    "Antarctica/Troll", "Asia/Amman", "Asia/Beirut", "Asia/Gaza", "Asia/Jerusalem", "Asia/Tehran",
    "Atlantic/Azores", "Atlantic/Bermuda", "Atlantic/Canary", "Australia/Adelaide",
    "Australia/Lord_Howe", "Australia/Sydney", "Europe/Athens", "Europe/Berlin", "Europe/Chisinau",
    "Europe/Dublin", "Europe/Helsinki", "Europe/Istanbul", "Europe/Lisbon", "Europe/London",
    "Europe/Moscow", "Europe/Warsaw", "Pacific/Auckland", "Pacific/Chatham", "Pacific/Easter",
    "Pacific/Fiji", "Pacific/Norfolk",
]  # fmt: skip
OTHERS = ["Pacific/Apia", "Asia/Pyongyang", "America/Caracas"]
"""A day was left out; half hours that were no summer time."""
KINDS = {
    "Africa/Cairo",  # at midnight, and in the hour before it
    "Africa/Casablanca",  # around Ramadan
    "America/Godthab",  # the change of the name's own offset
    "America/Havana",  # at 0:00 and at 1:00
    "America/New_York", "America/Sao_Paulo",  # west; at midnight, south
    "Antarctica/Troll",  # two hours
    "Asia/Tehran", "Australia/Lord_Howe",  # behind a half hour; by a half hour
    "Europe/Berlin", "Europe/Dublin",  # east; summer is the standard time
    "Pacific/Chatham",  # behind three quarters, at 2:45
}  # fmt: skip
EVERY_ZONE = [
    pytest.param(name, marks=() if name in KINDS or name in OTHERS else pytest.mark.long)
    for name in (*ZONES, *OTHERS)
]
MINUTE, HOUR, STRIDE = dt.timedelta(minutes=1), dt.timedelta(hours=1), dt.timedelta(hours=12)
TIMES_OF_DAY = {  # expression -> minutes, hours
    "30 2 * * *": ({30}, {2}), "0 0 * * *": ({0}, {0}), "15,45 0-3 * * *": ({15, 45}, {0, 1, 2, 3}),
    "0 3 * * *": ({0}, {3}), "59 23 * * *": ({59}, {23}),
    "0-59 1 * * *": (set(range(60)), {1}),
}  # fmt: skip
BY_THE_CLOCK = {
    "*/30 * * * *": ({0, 30}, set(range(24))), "*/20 2 * * *": ({0, 20, 40}, {2}),
    "5 * * * *": ({5}, set(range(24))), "* 0 * * *": (set(range(60)), {0}),
    "0 30 1 * * *": ({30}, {1}),
}  # fmt: skip


def us(instant: dt.datetime) -> int:
    return int(instant.timestamp()) * 1_000_000


@cache
def changes(name: str) -> list[dt.datetime]:
    """The last change of each direction before 2026."""
    zone, found = ZoneInfo(name), dict[bool, dt.datetime]()

    def offset(instant: dt.datetime) -> dt.timedelta:
        return instant.replace(tzinfo=None) - instant.astimezone(zone).replace(tzinfo=None)

    at = dt.datetime(2010, 1, 1, tzinfo=dt.UTC)
    while at.year < 2026:
        before, after = offset(at), offset(at + STRIDE)
        if after != before:
            hour = at + HOUR
            while offset(hour) == before:
                hour += HOUR
            found[after < before] = hour
        at += STRIDE
    return list(found.values())


def readings(zone: ZoneInfo, change: dt.datetime) -> list[tuple[dt.datetime, dt.datetime]]:
    """(instant, what the clock shows) of each minute in some days around a change."""
    begin = change - dt.timedelta(hours=40)
    instants = [begin + number * MINUTE for number in range(110 * 60)]
    return [(instant, instant.astimezone(zone).replace(tzinfo=None)) for instant in instants]


def expected(
    clock: list[tuple[dt.datetime, dt.datetime]],
    minutes: set[int],
    hours: set[int],
    *,
    names_times: bool,
) -> list[int]:
    if not names_times:
        return [
            us(instant)
            for instant, shown in clock
            if shown.minute in minutes and shown.hour in hours
        ]
    first: dict[dt.datetime, dt.datetime] = {}
    for instant, shown in clock:
        first.setdefault(shown, instant)
    found = {
        instant
        for shown, instant in first.items()
        if shown.minute in minutes and shown.hour in hours
    }
    for (_, before), (instant, shown) in pairwise(clock):
        left_out = before + MINUTE
        while left_out < shown:
            if left_out.minute in minutes and left_out.hour in hours:
                found.add(instant)
                break
            left_out += MINUTE
    return sorted(us(instant) for instant in found)


@pytest.mark.parametrize("name", EVERY_ZONE)
def test_occurrences_around_a_change_of_the_clock_are_as_the_clock_shows(name: str) -> None:
    zone = ZoneInfo(name)
    assert changes(name), "the zone has changed its clocks"
    for change in changes(name):
        clock = readings(zone, change)
        for expression, (minutes, hours) in {**TIMES_OF_DAY, **BY_THE_CLOCK}.items():
            requested = expected(clock, minutes, hours, names_times=expression in TIMES_OF_DAY)
            recurrence = Recurrence.cron(expression, zone=name)
            begin, end = us(clock[30 * 60][0]), us(clock[60 * 60][0])
            found = [begin]
            while found[-1] <= end:
                following = recurrence.after(found[-1])
                assert following is not None
                found.append(following)
            at = bisect_right(requested, begin)
            assert found[1:] == requested[at : at + len(found) - 1], (expression, change)
            some = requested[:: 1 + len(requested) // 24]
            for start in [
                *range(begin, end, 97 * 60_000_000),
                *(each + delta for each in some for delta in (-1, 0, 1) if begin < each < end),
            ]:
                assert recurrence.after(start) == requested[bisect_right(requested, start)], (
                    expression,
                    change,
                    start,
                )


def test_there_are_forty_zones() -> None:
    assert len(set(ZONES)) == 40


@pytest.mark.parametrize(
    "name", ["Europe/Berlin", "America/Havana", "Australia/Lord_Howe", "America/New_York"]
)
@pytest.mark.parametrize("missed", ["none", "last", "all"])
def test_no_occurrence_is_late_or_comes_again_in_the_hour_that_comes_twice(
    name: str, missed: str
) -> None:
    zone = ZoneInfo(name)
    for change in changes(name):
        clock = readings(zone, change)
        for expression, (minutes, hours) in TIMES_OF_DAY.items():
            requested = expected(clock, minutes, hours, names_times=True)
            recurrence = Recurrence.cron(expression, zone=name, missed=missed)
            for away_from, back_at in [
                (-90, 10),
                (-40, 40),
                (-10, 70),
                (-200, 200),
                (-1, 1),
                (-1_400, 50),
            ]:
                down_us, up_us = (
                    us(change) + away_from * 60_000_000,
                    us(change) + back_at * 60_000_000,
                )
                due_us = next(each for each in requested if each > down_us)
                due, upcoming = recurrence.due_until(due_us, up_us // TICK_US)
                passed = [each for each in requested if down_us < each <= up_us]
                if missed == "none":
                    passed = [each for each in passed if up_us - each <= ON_TIME_TICKS * TICK_US]
                assert due == (passed[-1:] if missed == "last" else passed)
                assert upcoming == next(each for each in requested if each > up_us)
