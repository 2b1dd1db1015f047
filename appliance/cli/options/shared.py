"""Options that several commands share."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from appliance.cli.main import CONNECT_TIMEOUT_MS
from appliance.cli.options.contexts import CONTEXT_VARIABLE, chosen_bootstrap, load
from appliance.cli.output import echo
from tailrace.client.config.settings import DEFAULT_BOOTSTRAP
from tailrace.core.errors import NotAuthorizedError, TailraceError
from tailrace.core.units import duration_ms

if TYPE_CHECKING:
    from tailrace.admin.admin import Admin

TIME_HELP = "2027-01-31T08:00:00Z (or another offset from UTC), or from now: 90s, 1h30m, 3d."
BOOTSTRAP_VARIABLE = "TAILRACE_BOOTSTRAP"
COMPLETION_TIMEOUT_MS = 500
STATE_OF_SETTINGS = "settings that wait or are not in force"
Function = TypeVar("Function", bound=Callable[..., Any])
Answer = TypeVar("Answer")


class Moment(click.ParamType[dt.datetime]):
    """A point in time; a duration says how far ahead."""

    name = "time"
    help = TIME_HELP
    sign = 1

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dt.datetime:
        if isinstance(value, dt.datetime):
            return value
        text = str(value)
        try:
            duration = duration_ms(text)
            if duration is not None:
                return dt.datetime.now(dt.UTC) + self.sign * dt.timedelta(milliseconds=duration)
            moment = dt.datetime.fromisoformat(text)
        except (ValueError, OverflowError):
            self.fail(f"{text!r} is not a time; write {self.help}", param, ctx)
        if moment.tzinfo is None:
            whole = moment.isoformat()
            self.fail(
                f"{text!r} has no offset from UTC; write {whole}Z or {whole}+02:00", param, ctx
            )
        return moment


SINCE_HELP = "2027-01-31T08:00:00Z (or another offset from UTC), or that long ago: 90s, 1h30m, 3d."


class PastMoment(Moment):
    """A point in time; a duration says how long ago."""

    help = SINCE_HELP
    sign = -1


class Duration(click.ParamType[dt.timedelta]):
    """A length of time."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dt.timedelta:
        if isinstance(value, dt.timedelta):
            return value
        duration = duration_ms(str(value))
        if duration is None:
            self.fail(
                f"{str(value)!r} is not a duration; write 500ms, 10s, 15m, 1h30m or 1d", param, ctx
            )
        return dt.timedelta(milliseconds=duration)


def _default_bootstrap() -> str | None:
    """The default context's address; None while a shell asks for completions, which a damaged file
    of contexts must not disturb.
    """
    ctx = click.get_current_context(silent=True)
    return None if ctx is not None and ctx.resilient_parsing else chosen_bootstrap()


def bootstrap_option(function: Function) -> Function:
    """Add the option --bootstrap, the appliance's address."""
    option = click.option(
        "--bootstrap",
        metavar="ADDRESS",
        envvar=BOOTSTRAP_VARIABLE,
        default=_default_bootstrap,
        show_default=f"the context's, else {DEFAULT_BOOTSTRAP}",
        help=f"Address of the appliance (environment: {BOOTSTRAP_VARIABLE}, or {CONTEXT_VARIABLE} "
        "for a context's).",
    )
    return option(function)


def connect(bootstrap: str) -> Admin:
    """An Admin client that fails after CONNECT_TIMEOUT_MS if no appliance answers."""
    from tailrace.admin.admin import Admin

    return Admin(bootstrap, connect_timeout_ms=CONNECT_TIMEOUT_MS)


def unless_refused(ask: Callable[[], Answer], subject: str) -> Answer | None:
    """The answer to a question that a command can do without. None if the user may not ask it: a
    sentence on standard error says that the subject is left out, and why.
    """
    try:
        return ask()
    except NotAuthorizedError as error:
        echo(f"left out: {subject} ({error.detail})")
        return None


def complete_topics(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a topic's name."""
    del param
    return _completions(ctx, incomplete, lambda admin: admin.list_topics())


def complete_groups(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a group's name."""
    del param
    return _completions(ctx, incomplete, lambda admin: admin.list_groups())


def complete_transactional_ids(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str]:
    """Complete a transactional id."""
    del param
    return _completions(ctx, incomplete, lambda admin: admin.list_transactions())


def _completions(
    ctx: click.Context, incomplete: str, ask: Callable[[Admin], Iterable[str]]
) -> list[str]:
    """An Admin client; None if no appliance answers at once. A completion must neither hang nor
    print an error.
    """
    from tailrace.admin.admin import Admin

    try:
        address = ctx.params.get("bootstrap") or chosen_bootstrap()
        with Admin(
            address,
            connect_timeout_ms=COMPLETION_TIMEOUT_MS,
            request_timeout_ms=COMPLETION_TIMEOUT_MS,
        ) as admin:
            return [name for name in ask(admin) if name.startswith(incomplete)]
    except (TailraceError, click.ClickException, OSError):
        return []


def complete_contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete a context's name."""
    del ctx, param
    try:
        return [name for name in sorted(load().by_name) if name.startswith(incomplete)]
    except (click.ClickException, OSError):
        return []


def json_option(function: Function) -> Function:
    """Add the option --json."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def parse_pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    """`k=v` texts as a dict; a usage error names what is not one."""
    pairs = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} is {value!r}; write name=value")
        pairs[name] = text
    return pairs
