"""Occurrences of a cron expression in a time zone, over changes of its offset. Pure; parsing and
calendar are cronsim's, the zone's rules zoneinfo's.

As Debian's cron has it, an expression of five fields whose minute and hour do not begin with `*`
names times of day; any other follows the clock:

                                a time that does not exist (summer time begins)     a time that comes twice (it ends)
    times of day: 30 2 * * *    once, when the clock goes on                        once, the first time
    the clock:    */30 * * * *  not at all                                          each time

Occurrences are found by the calendar of local times without a zone, and mapped to instants here.

Invariants: instants ascend, and lie behind the one that was asked for; which they are does not
    depend on that one.
"""  # noqa: E501

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from zoneinfo import ZoneInfo

import cronsim

_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_SECOND = dt.timedelta(seconds=1)
_DAY = dt.timedelta(days=1)
_SEARCH_BACK = dt.timedelta(hours=25)
"""No zone's clock was ever set by more: a day was left out or repeated at the date line."""
FIELDS_OF_TIMES_OF_DAY = 5


def occurrences(expression: str, zone: ZoneInfo, after_us: int) -> Iterator[int]:
    """The occurrences behind `after_us`, microseconds since 1970, in order; without end, or until
    the calendar ends. Raises cronsim.CronSimError, and OverflowError beyond the calendar's last
    year.
    """
    after = _EPOCH + dt.timedelta(microseconds=after_us)
    fields = expression.split()
    names_times = (
        len(fields) == FIELDS_OF_TIMES_OF_DAY
        and not fields[0].startswith("*")
        and not fields[1].startswith("*")
    )
    found = (
        _times_of_day(expression, zone, after)
        if names_times
        else _by_the_clock(expression, zone, after)
    )
    for instant in found:
        yield (instant - _EPOCH) // dt.timedelta(microseconds=1)


def _offset(instant: dt.datetime, zone: ZoneInfo) -> dt.timedelta:
    """Return the zone's offset from UTC at an instant."""
    found = instant.astimezone(zone).utcoffset()
    assert found is not None
    return found


def _local(instant: dt.datetime, offset: dt.timedelta) -> dt.datetime:
    return (instant + offset).replace(tzinfo=None)


def _times_of_day(expression: str, zone: ZoneInfo, after: dt.datetime) -> Iterator[dt.datetime]:
    offset = _offset(after, zone)
    start = _local(after, offset)
    if (
        _offset(after - _SEARCH_BACK, zone) != offset
    ):  # what is named in an hour that was left out, or comes twice, may lie behind all the same
        start -= _SEARCH_BACK
    last = after
    for local in cronsim.CronSim(expression, start):
        instant = _instant(local, zone)
        if instant > last:
            last = instant
            yield instant


def _instant(local: dt.datetime, zone: ZoneInfo) -> dt.datetime:
    """Return the first instant of a local time. A skipped one begins where the clock goes on."""
    first = local.replace(tzinfo=zone, fold=0).astimezone(dt.UTC)
    if first.astimezone(zone).replace(tzinfo=None) == local:
        return first
    return _change(local.replace(tzinfo=zone, fold=1).astimezone(dt.UTC), first, zone)


def _change(before: dt.datetime, behind: dt.datetime, zone: ZoneInfo) -> dt.datetime:
    """The first second of the offset that holds at `behind`; another holds at `before`."""
    offset = _offset(behind, zone)
    low, high = 0, int((behind - before) / _SECOND)
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(before + middle * _SECOND, zone) == offset:
            high = middle
        else:
            low = middle
    return before + high * _SECOND


def _by_the_clock(expression: str, zone: ZoneInfo, after: dt.datetime) -> Iterator[dt.datetime]:
    """In each stretch of time in which the offset stays, local times and instants follow each other
    alike.
    """
    position = after  # everything up to here is found
    while True:
        offset = _offset(position, zone)
        for local in cronsim.CronSim(expression, _local(position, offset)):
            instant = local.replace(tzinfo=dt.UTC) - offset
            changed = _next_change(position, instant, offset, zone)
            if changed is not None:
                break
            position = instant
            yield instant
        else:
            return
        position = changed
        reading = _local(position, _offset(position, zone))
        if (
            next(iter(cronsim.CronSim(expression, reading - _SECOND)), None) == reading
        ):  # the clock's first reading behind the change
            yield position


def _next_change(
    begin: dt.datetime, end: dt.datetime, offset: dt.timedelta, zone: ZoneInfo
) -> dt.datetime | None:
    """Return the first change of the offset after `begin`, up to `end`; None: there is none. It
    changes at most once a day.
    """
    before = begin
    while before < end:
        behind = min(end, before + _DAY)
        if _offset(behind, zone) != offset:
            whole = before.replace(microsecond=0)
            return _change(
                whole,
                behind.replace(microsecond=0) + (_SECOND if behind.microsecond else dt.timedelta()),
                zone,
            )
        before = behind
    return None
