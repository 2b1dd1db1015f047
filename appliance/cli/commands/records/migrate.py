"""`tailrace migrate`: moves topics, records and groups from Kafka here, and back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from appliance.cli.migrate.clusters import journal_values, make_migration, session_of
from appliance.cli.migrate.plan_table import show_plan
from appliance.cli.migrate.progress import Progress
from appliance.cli.migrate.running import ending_at_signals, sentences
from appliance.cli.options.default_command import DefaultGroup
from appliance.cli.options.shared import bootstrap_option, json_option
from appliance.cli.output import counted, echo, print_json, utc_time
from appliance.migrate.errors import MigrationError
from shm.crash_points import arm_from_environment
from tailrace.core.units import whole_number

if TYPE_CHECKING:
    from appliance.migrate.journal import Journal
    from appliance.migrate.migration import Migration

SILENT_S = 30.0
"""A run that writes nothing to its journal for this long is dead, or has lost a side."""
Function = TypeVar("Function", bound=Callable[..., Any])


class Rate(click.ParamType[int]):
    """Bytes a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        size = whole_number("rate_bytes", str(value).removesuffix("/s"))
        if size is None or size < 1:
            self.fail(f"{str(value)!r} is not a rate; write 50MB or 64MiB", param, ctx)
        return size


@click.group(
    cls=DefaultGroup,
    subcommand_metavar="--from CLUSTER | COMMAND [ARGS]...",
    epilog="`tailrace migrate run --help` has the options of a copy: --topics, --follow, --plan.",
)
def command() -> None:
    """Move topics from Kafka here, or back: settings, records, and the offsets of groups. A run
    that was killed goes on where it was; every record arrives once, in order.

    \b
    Example:
      tailrace migrate --from kafka:broker:9092 --topics 'shop.*' --plan
      tailrace migrate --from kafka:broker:9092 --topics 'shop.*' --follow
      tailrace migrate switch
    """


def name_option(function: Function) -> Function:
    """Add the option --name."""
    return click.option(
        "--name",
        default="default",
        show_default=True,
        help="Name of the migration: a run goes on with what an earlier one of its name has done.",
    )(function)


def config_option(function: Function) -> Function:
    """Add the option --kafka-config."""
    return click.option(
        "--kafka-config",
        "config_file",
        type=click.Path(exists=True, dir_okay=False),
        help="File of librdkafka's properties for the cluster, such as SASL and TLS.",
    )(function)


def to_option(function: Function) -> Function:
    """Add the option --to, of a migration that is found by its name."""
    return click.option(
        "--to",
        "kafka",
        metavar="kafka:HOST:PORT",
        help="The Kafka cluster of a migration on the way back, which has its journal.",
    )(function)


@command.command()
@click.option("--from", "source", metavar="kafka:HOST:PORT", help="The Kafka cluster to read.")
@click.option(
    "--to", "target", metavar="kafka:HOST:PORT", help="The Kafka cluster to write: the way back."
)
@click.option(
    "--topics",
    multiple=True,
    metavar="NAMES",
    help="Topics: names, or patterns such as 'shop.*', with commas between them. Default: those of "
    "the earlier run.",
)
@click.option(
    "--groups",
    multiple=True,
    metavar="NAMES",
    help="Groups whose offsets are moved: names or patterns; `none`. Default: all with offsets of "
    "these topics.",
)
@config_option
@name_option
@click.option("--plan", "only_plans", is_flag=True, help="Show what would be done; change nothing.")
@click.option("--follow", is_flag=True, help="Go on at the end of the source, until the switch.")
@click.option("--rate", type=Rate(), help="Copy at most so many bytes a second: 50MB.")
@click.option(
    "--isolation",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    default="read_committed",
    show_default=True,
    help="read_committed leaves the records of aborted transactions out.",
)
@click.option(
    "--append",
    "appends",
    is_flag=True,
    help="Also write to topics of the target that have records; their offsets are mapped.",
)
@click.option(
    "--leave-out",
    multiple=True,
    metavar="SETTING",
    help="A topic setting that is not moved. Can be repeated.",
)
@bootstrap_option
@json_option
@click.pass_context
def run(
    ctx: click.Context,
    source: str | None,
    target: str | None,
    topics: tuple[str, ...],
    groups: tuple[str, ...],
    config_file: str | None,
    name: str,
    only_plans: bool,
    follow: bool,
    rate: int | None,
    isolation: str,
    appends: bool,
    leave_out: tuple[str, ...],
    bootstrap: str,
    as_json: bool,
) -> None:
    """Copy topics up to their ends, with --follow further.

    \b
    Example:
      tailrace migrate --from kafka:broker:9092 --topics orders,payments --follow --rate 50MB
      tailrace migrate --to kafka:broker:9092 --topics orders
    """
    if bool(source) == bool(target):
        raise click.UsageError(
            "give --from kafka:HOST:PORT, or --to kafka:HOST:PORT for the way back"
        )
    arm_from_environment()
    with sentences():
        migration, printed = make_migration(
            bool(source), str(source or target), name, topics, groups, config_file, bootstrap,
            as_json, rate=rate or 0, isolation=isolation, appends=appends, left_out=leave_out,
        )  # fmt: skip
        with ending_at_signals(migration, printed):
            if only_plans:
                ctx.exit(show_plan(migration.plan(), as_json))
            is_complete = migration.run(follow=follow)
        _conclude(migration, printed, is_complete, as_json)
        ctx.exit(0 if is_complete or migration.is_stopped else 1)


@command.command()
@name_option
@config_option
@to_option
@click.option(
    "--force",
    is_flag=True,
    help="Switch although producers, consumers or transactions of the source still run.",
)
@bootstrap_option
@json_option
@click.pass_context
def switch(
    ctx: click.Context,
    name: str,
    config_file: str | None,
    kafka: str | None,
    force: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Copy what is left, wait until the lag is zero, set the offsets of groups a last time, and end
    the migration. A run with --follow ends by itself, with status 1. Stop the source's producers
    and consumers before.

    \b
    Example:
      tailrace migrate switch --name default
    """
    arm_from_environment()
    with sentences():
        session = session_of(name, bootstrap, kafka, config_file)
        migration, printed = make_migration(
            session["direction"] == "from", session["server"], name, (),
            tuple(session["groups"]) or ("none",), config_file or session["config_file"],
            bootstrap, as_json,
            isolation=session["isolation"], appends=session["appends"],
            left_out=tuple(session["left_out"]),
        )  # fmt: skip
        with ending_at_signals(migration, printed):
            is_complete = migration.run(switches=True, is_forced=force)
        _conclude(migration, printed, is_complete, as_json)
        ctx.exit(0 if is_complete else 1)


@command.command()
@name_option
@config_option
@to_option
@bootstrap_option
@json_option
def status(
    name: str, config_file: str | None, kafka: str | None, bootstrap: str, as_json: bool
) -> None:
    """Show how far a migration is, by what its journal has.

    \b
    Example:
      tailrace migrate status --json
    """
    from appliance.migrate.journal import Journal

    with sentences():
        journal = Journal(journal_values(name, bootstrap, kafka, config_file))
        if not journal.session:
            raise MigrationError(f"there is no migration {name}.")
    progress, session = journal.progress, journal.session
    at_ms = int(journal.ended_ms or max(progress.get("at_ms", 0), session["at_ms"]))
    state = state_of(journal, at_ms)
    is_known = state in ("copying", "switched")
    row = {
        "name": name,
        "direction": session["direction"],
        "server": session["server"],
        "topics": sorted({partition.topic for partition in journal.maps}),
        "partitions": len(journal.maps),
        "state": state,
        "records": progress.get("records", 0),
        "lag": progress.get("lag") if is_known else None,
        "at": utc_time(at_ms / 1000),
    }
    if as_json:
        print_json(row)
        return
    lag = "unknown" if row["lag"] is None else f"{row['lag']:,}"
    echo(
        f"migration {name} {row['direction']} kafka:{row['server']}: {row['state']}; "
        f"{counted(row['records'], 'record')} in {counted(row['partitions'], 'partition')}, lag "
        f"{lag}, at {row['at']}"
    )
    if not is_known:
        echo(
            "no run copies now: start it again with the same command"
            if state == "stopped"
            else f"no run has written to the journal for {SILENT_S:.0f} s: it has ended, or has "
            "lost a side"
        )


def state_of(journal: Journal, at_ms: int) -> str:
    """The state of a migration. `at_ms`: its last sign of life."""
    if journal.switched_ms is not None:
        return "switched"
    if journal.ended_ms is not None:
        return "stopped"
    return "copying" if time.time() * 1_000 - at_ms < SILENT_S * 1_000 else "silent"


def _conclude(migration: Migration, printed: Progress, is_complete: bool, as_json: bool) -> None:
    if migration.is_stopped and not as_json:
        printed.note("stopped; the same command goes on where it was")
    elif not is_complete and not as_json and not migration.is_taken_over:
        printed.note("not everything is copied: see the sentences above")
