"""Recurrence: the due times of a recurring record, by an interval or a cron expression in a zone.
Pure; the parsing is cronsim's.

Invariants: occurrences ascend; the same description and the same start give the same ones, whenever
    they are computed.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import orjson

from tailrace.core.schedule.delays import HORIZON_US, TICK_US, tick_of
from tailrace.core.units import shown_duration

MISSED = ("all", "last", "none")
INTERVAL_MIN_US = 10_000
CRON_MIN_US = 1_000_000
MISSED_AT_ONCE = 1_000
"""The most occurrences of a record in one step, and the most missed ones of an interval that are
delivered at all.
"""
MISSED_CRON_US = 86_400_000_000
"""The oldest missed occurrences of a cron expression that are delivered, by their age in us."""
TEXT_MAX, EXPRESSION_MAX, ZONE_MAX = 1_024, 256, 100
"""Characters."""
ON_TIME_TICKS = 5_000
"""With missed="none" an occurrence is delivered if it is at most so late: up to 500 at once, of an
interval of 10 ms.
"""
_WINDOWS_US = [
    seconds * 1_000_000 for seconds in (2, 120, 7_200, 2 * 86_400, 32 * 86_400, 400 * 86_400)
]
"""In which the last occurrence before a time is looked for: two seconds, minutes, hours, days; a
month, a year. A few dozen are in each.
"""


class RecurrenceError(ValueError):
    """No such recurrence; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Make one with `every` or `cron`. `missed`: what becomes of occurrences that passed while the
    appliance was down, or the record was not there yet: "all" are delivered, the "last", or "none".
    """

    every_us: int = 0
    expression: str = ""
    zone: str = "UTC"
    missed: str = "all"

    @classmethod
    def every(cls, interval: dt.timedelta, *, missed: str = "all") -> Recurrence:
        """Again and again, `interval` apart. Raises RecurrenceError."""
        if not isinstance(interval, dt.timedelta):
            raise RecurrenceError(
                f"the interval is of type {type(interval).__name__}; it must be a timedelta"
            )
        return cls(every_us=interval // dt.timedelta(microseconds=1), missed=missed).checked()

    @classmethod
    def cron(cls, expression: str, *, zone: str = "UTC", missed: str = "all") -> Recurrence:
        """By a cron expression of five fields (six: with seconds), in a time zone such as
        "Europe/Berlin". Raises RecurrenceError.
        """
        return cls(expression=str(expression), zone=zone, missed=missed).checked()

    @classmethod
    def from_json(cls, text: str) -> Recurrence:
        """Raises RecurrenceError."""
        if len(text) > TEXT_MAX:
            raise RecurrenceError(
                f"{len(text)} characters describe a recurrence; {TEXT_MAX} are allowed"
            )
        try:
            fields: dict[str, Any] = orjson.loads(text)
            found = cls(**fields)
        except (orjson.JSONDecodeError, TypeError):
            raise RecurrenceError(f"{text[:80]!r} describes no recurrence") from None
        return found.checked()

    def to_json(self) -> str:
        """Text that `from_json` takes: how a delay log stores it."""
        return orjson.dumps(
            {
                "every_us": self.every_us,
                "expression": self.expression,
                "zone": self.zone,
                "missed": self.missed,
            }
        ).decode()

    def describe(self) -> str:
        """For people."""
        how = (
            f"every {shown_duration(self.every_us)}"
            if self.every_us
            else f"{self.expression} ({self.zone})"
        )
        return how if self.missed == "all" else f"{how}, missed: {self.missed}"

    def checked(self) -> Recurrence:
        """Itself. Raises RecurrenceError."""
        if self.missed not in MISSED:
            raise RecurrenceError(f"missed is {_shown(self.missed)}; it takes {', '.join(MISSED)}")
        for name, text, most in (
            ("expression", self.expression, EXPRESSION_MAX),
            ("zone", self.zone, ZONE_MAX),
        ):
            if not isinstance(text, str) or len(text) > most:
                raise RecurrenceError(
                    f"{name} is {_shown(text)}; it takes text of at most {most} characters"
                )
        if bool(self.every_us) == bool(self.expression):
            raise RecurrenceError("a recurring record has either an interval or a cron expression")
        if self.every_us and (
            not isinstance(self.every_us, int)
            or isinstance(self.every_us, bool)
            or not INTERVAL_MIN_US <= self.every_us <= HORIZON_US
        ):
            raise RecurrenceError(
                f"an interval of {_shown(self.every_us)} us is not between 10 ms and 20 years"
            )
        if self.expression:
            self.after(0)
        return self

    def after(self, due_us: int) -> int | None:
        """The occurrence behind this one, microseconds since 1970; None: there is none."""
        return next(self._following(due_us), None)

    def _following(self, due_us: int) -> Iterator[int]:
        """The occurrences behind this one, in order; without end, or until the calendar ends.
        Raises RecurrenceError.
        """
        if self.every_us:
            while True:
                due_us += self.every_us
                yield due_us
        import cronsim

        from tailrace.core.schedule.cron_times import occurrences

        try:
            zone = ZoneInfo(self.zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise RecurrenceError(f"there is no time zone {self.zone!r}") from None
        try:
            yield from occurrences(self.expression, zone, due_us)
        except OverflowError:
            return  # beyond the calendar's last year
        except (cronsim.CronSimError, ValueError, LookupError, AssertionError) as error:
            raise RecurrenceError(f"{self.expression!r} is no cron expression: {error}") from None

    def first_from(self, due_us: int, there_us: int) -> int | None:
        """The occurrence that a record begins with which was there from `there_us` on: `due_us`, or
        a later one when that had passed so often before that everything else would wait for it.
        None: there is none. Raises RecurrenceError.
        """
        if self.every_us:
            return (
                due_us
                + max(0, -((due_us - (there_us - MISSED_AT_ONCE * self.every_us)) // self.every_us))
                * self.every_us
            )
        floor_us = there_us - MISSED_CRON_US
        return due_us if due_us >= floor_us else self.after(floor_us)

    def due_until(self, due_us: int, tick: int) -> tuple[list[int], int | None]:
        """Return the occurrences due up to `tick`, from `due_us` on, and the next one after
        them. With missed="all" that may be many: see `reach`. Raises
        RecurrenceError.
        """
        occurrences: list[int] = []
        upcoming: int | None = due_us if self.missed == "all" else self._skipped(due_us, tick)
        if upcoming is not None and tick_of(upcoming) <= tick:
            following = self._following(upcoming)
            occurrences = [upcoming, *takewhile(lambda each: tick_of(each) <= tick, following)]
            upcoming = self.after(occurrences[-1])
        return occurrences[-1:] if self.missed == "last" else occurrences, upcoming

    def reach(self, due_us: int, at_once: int = MISSED_AT_ONCE) -> int | None:
        """Up to which tick at most to go from the occurrence `due_us` in one step, so that there
        are not more than `at_once`, nor MISSED_AT_ONCE; None: as far as wanted.
        """
        count = max(1, min(at_once, MISSED_AT_ONCE))
        return (
            tick_of(due_us) + count * max(1, tick_of(self.every_us or CRON_MIN_US))
            if self.missed == "all"
            else None
        )

    def occurrence_at(self, tick: int, later_us: int) -> int:
        """The due time of the occurrence that is due at `tick`, from that of a later one."""
        if not self.every_us:
            return tick * TICK_US  # whole seconds
        return later_us - -(-(later_us - tick * TICK_US) // self.every_us) * self.every_us

    def _skipped(self, due_us: int, tick: int) -> int | None:
        """From the occurrence `due_us` on, the first that may still be delivered at `tick`: for
        "last" the last one that is due, for "none" the first that is not too late. A long time is
        not gone through one by one.
        """
        until_us = tick * TICK_US
        if self.missed == "none":
            floor_us = (tick - ON_TIME_TICKS - 1) * TICK_US
            if due_us > floor_us:
                return due_us
            if self.every_us:
                return due_us + ((floor_us - due_us) // self.every_us + 1) * self.every_us
            return self.after(floor_us)
        if self.every_us:
            return due_us + max(0, until_us - due_us) // self.every_us * self.every_us
        for window_us in _WINDOWS_US:
            start_us = until_us - window_us
            if start_us <= due_us:
                break
            found = self.after(start_us)
            if found is not None and found <= until_us:
                return found
        return due_us


def _shown(value: object) -> str:
    return repr(value)[:80]
