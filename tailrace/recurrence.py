"""When a recurring record is due again: every so often, or by a cron expression in a time zone. Pure; the parsing is cronsim's.

Invariants: occurrences ascend; the same description and the same start give the same ones, whenever they are computed.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import orjson

from tailrace.delays import HORIZON_US, tick_of

MISSED = ("all", "last", "none")
INTERVAL_MIN_US = 10_000
ON_TIME_TICKS = 5_000
"""With missed="none" an occurrence is delivered if it is at most so late."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class RecurrenceError(ValueError):
    """No such recurrence; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Make one with `every` or `cron`. `missed`: what becomes of occurrences that passed while the appliance was down, or the record was not there yet:
    "all" are delivered, the "last", or "none".
    """

    every_us: int = 0
    expression: str = ""
    zone: str = "UTC"
    missed: str = "all"

    @classmethod
    def every(cls, interval: dt.timedelta, *, missed: str = "all") -> Recurrence:
        """Again and again, `interval` apart. Raises RecurrenceError."""
        if not isinstance(interval, dt.timedelta):
            raise RecurrenceError(f"the interval is a {type(interval).__name__}; it must be a timedelta")
        return cls(every_us=interval // dt.timedelta(microseconds=1), missed=missed).checked()

    @classmethod
    def cron(cls, expression: str, *, zone: str = "UTC", missed: str = "all") -> Recurrence:
        """By a cron expression of five fields (six: with seconds), in a time zone such as "Europe/Berlin". Raises RecurrenceError."""
        return cls(expression=str(expression), zone=zone, missed=missed).checked()

    @classmethod
    def from_json(cls, text: str) -> Recurrence:
        """Raises RecurrenceError."""
        try:
            fields: dict[str, Any] = orjson.loads(text)
            found = cls(**fields)
        except (orjson.JSONDecodeError, TypeError):
            raise RecurrenceError(f"{text[:80]!r} describes no recurrence") from None
        return found.checked()

    def to_json(self) -> str:
        return orjson.dumps({"every_us": self.every_us, "expression": self.expression, "zone": self.zone, "missed": self.missed}).decode()

    def describe(self) -> str:
        """For people."""
        how = f"every {dt.timedelta(microseconds=self.every_us)}" if self.every_us else f"{self.expression} ({self.zone})"
        return how if self.missed == "all" else f"{how}, missed: {self.missed}"

    def checked(self) -> Recurrence:
        """Itself. Raises RecurrenceError."""
        if self.missed not in MISSED:
            raise RecurrenceError(f"missed is {self.missed!r}; it takes {', '.join(MISSED)}")
        if bool(self.every_us) == bool(self.expression):
            raise RecurrenceError("a recurring record has either an interval or a cron expression")
        if self.every_us and (
            not isinstance(self.every_us, int) or isinstance(self.every_us, bool) or not INTERVAL_MIN_US <= self.every_us <= HORIZON_US
        ):
            raise RecurrenceError(f"an interval of {self.every_us} us is not between 10 ms and 20 years")
        if self.expression:
            self.after(0)
        return self

    def after(self, due_us: int) -> int | None:
        """The occurrence behind this one, microseconds since 1970; None: there is none."""
        if self.every_us:
            return due_us + self.every_us
        import cronsim

        try:
            moment = (_EPOCH + dt.timedelta(microseconds=due_us)).astimezone(ZoneInfo(self.zone))
            following = next(cronsim.CronSim(self.expression, moment))
        except (cronsim.CronSimError, StopIteration) as error:
            if isinstance(error, StopIteration):
                return None
            raise RecurrenceError(f"{self.expression!r} is no cron expression: {error}") from None
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise RecurrenceError(f"there is no time zone {self.zone!r}") from None
        return (following.astimezone(dt.UTC) - _EPOCH) // dt.timedelta(microseconds=1)

    def due_until(self, due_us: int, tick: int) -> tuple[list[int], int | None]:
        """What is delivered when everything up to `tick` is, from the occurrence `due_us` on, and the occurrence behind."""
        occurrences: list[int] = []
        upcoming: int | None = due_us
        while upcoming is not None and tick_of(upcoming) <= tick:
            occurrences.append(upcoming)
            upcoming = self.after(upcoming)
        if self.missed == "last":
            occurrences = occurrences[-1:]
        elif self.missed == "none":
            occurrences = [due for due in occurrences if tick - tick_of(due) <= ON_TIME_TICKS]
        return occurrences, upcoming
