"""`tailrace group`: list, delete, advise. Its other commands have a module each."""

from __future__ import annotations

import datetime as dt
import sys
import time

import click

from appliance.cli.commands.groups.advice import (
    Sample,
    advise,
    lag_text,
)
from appliance.cli.commands.groups.describe import describe
from appliance.cli.commands.groups.reset_offsets import reset_offsets
from appliance.cli.main import EXIT_FAILED
from appliance.cli.options.shared import (
    Duration,
    bootstrap_option,
    complete_groups,
    connect,
    json_option,
)
from appliance.cli.output import complain, counted, echo, one_line, print_json, print_table
from tailrace.core.errors import GroupNotEmptyError, InvalidGroupError, UnknownGroupError

ADVISE_EVERY_S = 1.0


@click.group()
def command() -> None:
    """List, describe, reset, delete and advise consumer groups.

    \b
    Example:
      tailrace group describe billing
      tailrace group reset-offsets billing --to-datetime 2h --dry-run
    """


@command.command(name="list")
@bootstrap_option
@json_option
def list_(bootstrap: str, as_json: bool) -> None:
    """List groups.

    \b
    Example:
      tailrace group list --json
    """
    with connect(bootstrap) as admin:
        rows = list(admin.list_groups().values())
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["GROUP", "KIND", "STATE", "MEMBERS", "ASSIGNOR"],
            [
                [row["group"], row["kind"], row["state"], row["members"], row["assignor"] or ""]
                for row in rows
            ],
        )
    else:
        echo(
            "no groups yet; a consumer with a group_id makes one, or `tailrace consume TOPIC "
            "--group NAME`"
        )


@command.command()
@click.argument(
    "groups", nargs=-1, required=True, metavar="GROUP...", shell_complete=complete_groups
)
@click.option("--if-exists", is_flag=True, help="Do not fail if the group does not exist.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask on a terminal.")
@bootstrap_option
@json_option
def delete(
    groups: tuple[str, ...], if_exists: bool, yes: bool, bootstrap: str, as_json: bool
) -> int:
    """Delete groups with their committed offsets, after a confirmation on a terminal. If a group
    cannot be deleted, the others are, and the exit status is 1.

    \b
    Example:
      tailrace group delete billing --yes
    """
    deleted, refused = [], []
    with connect(bootstrap) as admin:
        for group in groups:
            try:
                if not yes and sys.stdin.isatty():
                    offsets = len(admin.list_group_offsets(group))
                    click.confirm(
                        f"Delete {group} with its {counted(offsets, 'committed offset')}?",
                        abort=True,
                        err=True,
                    )
                admin.delete_groups(group)
            except (
                UnknownGroupError,
                GroupNotEmptyError,
                InvalidGroupError,
            ) as error:  # the others are deleted all the same, as by rm
                if if_exists and isinstance(error, UnknownGroupError):
                    echo(f"there is no group {group!r}")
                else:
                    complain(str(error))
                    refused.append(group)
                continue
            deleted.append(group)
            if not as_json:
                echo(f"deleted {group}")
    if as_json:
        print_json({"deleted": deleted, "refused": refused})
    return EXIT_FAILED if refused else 0


@command.command(name="advise")
@click.argument("group", shell_complete=complete_groups)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    default=10,
    show_default=True,
    help="How long to measure.",
)
@click.option(
    "--by",
    type=Duration(),
    default="10m",
    show_default=True,
    help="Time in which to drain the lag: 90s, 10m, 1h.",
)
@bootstrap_option
@json_option
def advise_(group: str, seconds: float, by: dt.timedelta, bootstrap: str, as_json: bool) -> None:
    """Measure the arrival and consumption of records for some seconds, and recommend numbers of
    consumers and partitions to drain the lag.

    \b
    Example:
      tailrace group advise billing --by 10m
      tailrace group advise billing --seconds 30 --json
    """
    if by.total_seconds() <= 0:
        raise click.UsageError("--by must be more than 0: write 90s, 10m, 1h")
    samples: list[Sample] = []
    with connect(bootstrap) as admin:
        end_s = time.monotonic() + seconds
        while True:
            is_last = time.monotonic() >= end_s
            described = admin.describe_groups(group, lag_seconds=is_last)[group]
            samples.append(Sample(time.time(), described))
            if is_last:
                break
            time.sleep(min(ADVISE_EVERY_S, max(0.05, end_s - time.monotonic())))
    advice = advise(samples, by.total_seconds())
    if as_json:
        print_json(advice)
        return
    click.echo(
        f"records arrive     {advice.arrival_per_s:,.1f}/s\nrecords drained    "
        f"{advice.drain_per_s:,.1f}/s"
    )
    click.echo(f"lag                {lag_text(described, advice.lag_seconds)}")
    click.echo(
        f"consumers          {advice.consumers} on {counted(advice.partitions, 'partition')}\n"
    )
    for sentence in advice.sentences:
        click.echo(one_line(sentence))


command.add_command(describe)
command.add_command(reset_offsets)
