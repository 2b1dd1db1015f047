"""Options that several commands share."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tailrace.settings import DEFAULT_BOOTSTRAP
from tailrace.units import duration_ms

TIME_HELP = "2027-01-31T08:00:00Z (or another offset from UTC), or from now: 90s, 15m, 1h30m, 3d."
SINCE_HELP = "2027-01-31T08:00:00Z (or another offset from UTC), or that long ago: 90s, 15m, 1h30m, 3d."
Function = TypeVar("Function", bound=Callable[..., Any])


class Moment(click.ParamType[dt.datetime]):
    """A point in time; a duration is counted from now."""

    name = "time"
    _sign, _help = 1, TIME_HELP

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dt.datetime:
        if isinstance(value, dt.datetime):
            return value
        text = str(value)
        try:
            duration = duration_ms(text)
            if duration is not None:
                return dt.datetime.now(dt.UTC) + dt.timedelta(milliseconds=duration) * self._sign
            moment = dt.datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is no time; write {self._help}", param, ctx)
        if moment.tzinfo is None:
            whole = moment.isoformat()
            self.fail(f"{text!r} has no offset from UTC; write {whole}Z or {whole}+02:00", param, ctx)
        return moment


class PastMoment(Moment):
    """A point in time; a duration says how long ago."""

    _sign, _help = -1, SINCE_HELP


def bootstrap_option(function: Function) -> Function:
    """--bootstrap: which appliance."""
    option = click.option(
        "--bootstrap",
        envvar="TAILRACE_BOOTSTRAP",
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        help="Address of the appliance (environment: TAILRACE_BOOTSTRAP).",
    )
    return option(function)


def json_option(function: Function) -> Function:
    """--json: for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def parse_pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    """`k=v` texts as a dict; a usage error names what is not one."""
    pairs = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} {value!r} is not of the form name=value")
        pairs[name] = text
    return pairs
