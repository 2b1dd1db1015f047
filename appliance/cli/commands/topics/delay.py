"""`tailrace delay`: pending delayed records: list, cancel, reschedule."""

from __future__ import annotations

import datetime as dt
import re
import sys
from itertools import islice
from typing import Any

import click

from appliance.cli.main import EXIT_FAILED
from appliance.cli.options.shared import (
    TIME_HELP,
    Moment,
    bootstrap_option,
    complete_topics,
    connect,
    json_option,
)
from appliance.cli.output import complain, echo, print_json, print_table
from tailrace.admin.admin import Admin
from tailrace.admin.delays import PendingDelay
from tailrace.core.errors import TailraceError

_DASHED_ID = re.compile(r"-[A-Za-z0-9_=-]{47}")
"""Pattern of a delay id: 36 bytes as `tailrace.core.schedule.delays.delay_id` writes them."""


class TakesDelayIds(click.Command):
    """A command whose last arguments are delay ids, which may begin with "-" (one in 64 does)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move ids that look like options behind "--"."""
        end = args.index("--") if "--" in args else len(args)
        ids = [arg for arg in args[:end] if _DASHED_ID.fullmatch(arg)]
        others = [arg for arg in args[:end] if not _DASHED_ID.fullmatch(arg)]
        return super().parse_args(ctx, [*others, "--", *ids, *args[end + 1 :]] if ids else args)


@click.group()
def command() -> None:
    """List, cancel and reschedule delayed records.

    \b
    Example:
      tailrace delay list orders
      tailrace delay cancel orders --key u1
    """


def selection(function: Any) -> Any:
    """Add the options that select delayed records."""
    for option in (
        click.option("--to", "due_to", type=Moment(), help="Due before this time."),
        click.option(
            "--from", "due_from", type=Moment(), help=f"Due at or after this time: {TIME_HELP}"
        ),
        click.option("--key", help="Only records with this key."),
        click.option("--partition", type=int, help="Only this partition."),
    ):
        function = option(function)
    return function


def _found(
    admin: Admin, topic: str, partition: int | None, key: str | None, due_from: Any, due_to: Any
) -> Any:
    return admin.list_delays(
        topic,
        partition=partition,
        key=None if key is None else key.encode(),
        due_from=due_from,
        due_to=due_to,
    )


def _shown(delay: PendingDelay) -> dict[str, Any]:
    return {
        "delay_id": delay.delay_id, "topic": delay.topic, "partition": delay.partition,
        "due": delay.due.isoformat(),
        "key": None if delay.key is None else delay.key.decode(errors="backslashreplace"),
        "repeat": None if delay.repeat is None else delay.repeat.describe(),
    }  # fmt: skip


@command.command(name="list")
@click.argument("topic", shell_complete=complete_topics)
@selection
@click.option(
    "--max",
    "limit",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Most records to show.",
)
@bootstrap_option
@json_option
def list_(
    topic: str,
    partition: int | None,
    key: str | None,
    due_from: Any,
    due_to: Any,
    limit: int,
    bootstrap: str,
    as_json: bool,
) -> None:
    """List pending delayed records of a topic, by partition and due time.

    \b
    Example:
      tailrace delay list orders --to 1h --max 20
    """
    with connect(bootstrap) as admin:
        found = [
            _shown(delay)
            for delay in islice(_found(admin, topic, partition, key, due_from, due_to), limit + 1)
        ]
    rows = found[:limit]
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo(f"no delayed record is pending in {topic}")
        return
    print_table(
        ["DUE", "PARTITION", "KEY", "REPEATS", "DELAY ID"],
        [
            [
                row["due"].replace("+00:00", "Z"),
                row["partition"],
                row["key"] or "",
                row["repeat"] or "",
                row["delay_id"],
            ]
            for row in rows
        ],
        shorten=["KEY"],
    )
    if len(found) > limit:
        echo(f"and more; raise --max {limit}, or narrow it down with --from and --to")


@command.command(cls=TakesDelayIds)
@click.argument("topic", shell_complete=complete_topics)
@click.argument("delay_ids", nargs=-1)
@selection
@bootstrap_option
@json_option
def cancel(
    topic: str,
    delay_ids: tuple[str, ...],
    partition: int | None,
    key: str | None,
    due_from: Any,
    due_to: Any,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Cancel delayed records: those with these ids, or all that the options select. Exit status 1
    when it was too late for one.

    \b
    Example:
      tailrace delay cancel orders --key u1
      tailrace delay cancel orders DELAY_ID
    """
    with connect(bootstrap) as admin:
        names = list(delay_ids)
        if not names:
            if partition is None and key is None and due_from is None and due_to is None:
                raise click.UsageError(
                    "no delayed record is selected: give delay ids, or --key, --partition, "
                    "--from, --to"
                )
            names = [
                delay.delay_id for delay in _found(admin, topic, partition, key, due_from, due_to)
            ]
        results: dict[str, TailraceError | None] = admin.cancel_delays(names, topic=topic)
    _report(
        "cancelled",
        {name: error for name, error in results.items() if error is not None},
        len(results),
        as_json,
        {},
    )


@command.command(cls=TakesDelayIds)
@click.argument("topic", shell_complete=complete_topics)
@click.argument("due", type=Moment())
@click.argument("delay_ids", nargs=-1, required=True)
@bootstrap_option
@json_option
def reschedule(
    topic: str, due: dt.datetime, delay_ids: tuple[str, ...], bootstrap: str, as_json: bool
) -> None:
    """Change the due time of delayed records. Each gets a new id, which is printed.

    \b
    Example:
      tailrace delay reschedule orders 2027-01-31T08:00:00Z DELAY_ID
      tailrace delay reschedule orders 15m DELAY_ID
    """
    with connect(bootstrap) as admin:
        results = admin.reschedule_delays(dict.fromkeys(delay_ids, due), topic=topic)
    moved = {name: found for name, found in results.items() if isinstance(found, str)}
    _report(
        "rescheduled",
        {name: e for name, e in results.items() if isinstance(e, TailraceError)},
        len(results),
        as_json,
        moved,
    )


def _report(
    done: str, refused: dict[str, TailraceError], count: int, as_json: bool, new_ids: dict[str, str]
) -> None:
    if as_json:
        print_json(
            {
                done: count - len(refused),
                "refused": {name: str(error) for name, error in refused.items()},
                "new_ids": new_ids,
            }
        )
    else:
        for name in new_ids.values():
            click.echo(name)
        echo(f"{done} {count - len(refused)} of {count}")
        for name, error in refused.items():
            complain(f"{name}: {error}")
    if refused:
        sys.exit(EXIT_FAILED)
