"""`tailrace disk`: the data directories, and how one is emptied."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import click

from appliance.catalog.replaced_directory import replace_directory
from appliance.cli.commands.storage.partition import (
    PartitionGoneError,
    Place,
    known_directory,
    move_partition,
    places,
    rate_of,
    rate_option,
    remove_left_copies,
)
from appliance.cli.options.appliance_control import control_directory, data_dir_option
from appliance.cli.options.shared import bootstrap_option, connect, json_option
from appliance.cli.output import counted, echo, human_bytes, print_json, print_table
from appliance.data.directory_errors import DataDirectoryError, unusable
from appliance.data.partition_copy import Pace
from tailrace.admin.admin import Admin
from tailrace.admin.configs import BROKER, ConfigResource
from tailrace.core.errors import TailraceError

_DRAINED = "drained_dirs"
NAMES_MAX = 20


@click.group()
def command() -> None:
    """Show the data directories, empty one, and replace one whose disk is lost.

    \b
    Example:
      tailrace disk list
      tailrace disk drain /disk1/tailrace --rate 100MB
    """


@command.command(name="list")
@data_dir_option
@bootstrap_option
@json_option
def list_(data_dir: str | None, bootstrap: str, as_json: bool) -> None:
    """List the data directories with their partitions and space.

    \b
    Example:
      tailrace disk list
    """
    directory = control_directory(data_dir, bootstrap)
    with connect(bootstrap) as admin:
        rows = admin.describe_cluster()["data_dirs"]
    counts = Counter(os.path.realpath(place.data_dir) for place in places(directory))
    listed = [
        {
            "path": row["path"], "partitions": counts[os.path.realpath(row["path"])],
            "free_bytes": row["free_bytes"], "total_bytes": row["total_bytes"],
            "state": row["state"], "drained": row["drained"],
        }
        for row in rows
    ]  # fmt: skip
    if as_json:
        print_json(listed)
    else:
        print_table(
            ["DATA DIRECTORY", "PARTITIONS", "FREE", "SIZE", "STATE"],
            [
                [
                    row["path"],
                    row["partitions"],
                    human_bytes(row["free_bytes"]),
                    human_bytes(row["total_bytes"]),
                    f"{row['state']}, drained" if row["drained"] else row["state"],
                ]
                for row in listed
            ],
        )


@command.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--cancel", is_flag=True, help="Let DIRECTORY have new partitions again.")
@rate_option
@data_dir_option
@bootstrap_option
@json_option
@click.pass_context
def drain(
    ctx: click.Context,
    directory: str,
    cancel: bool,
    rate: str,
    data_dir: str | None,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Move all partitions of DIRECTORY to the others, each to that with the most free space. From
    the beginning on it gets no new partitions (setting drained_dirs). When it is empty, take it out
    of data_dirs and restart, or let it have partitions again with --cancel.

    \b
    Example:
      tailrace disk drain /disk1/tailrace
      tailrace disk drain /disk1/tailrace --cancel
    """
    pace = Pace(rate_of(rate))
    with connect(bootstrap) as admin:
        path = known_directory(admin, directory)
        if cancel:
            _set_drained(admin, path, is_drained=False)
            echo(f"{path} gets new partitions again")
            return
        first = control_directory(data_dir, bootstrap)
        _others(admin, directory)
        _set_drained(admin, path, is_drained=True)
        remove_left_copies(admin, places(first))
        moved, failed = [], []
        tried: set[str] = set()
        while left := [
            place
            for place in places(first)
            if os.path.realpath(place.data_dir) == os.path.realpath(directory)
            and place.name not in tried
        ]:
            place = left[0]
            tried.add(place.name)
            try:
                _move_to_emptiest(admin, place, directory, pace)
            except PartitionGoneError as error:
                echo(str(error))
            except (click.ClickException, TailraceError) as error:
                failed.append({"partition": place.name, "reason": str(error)})
            else:
                moved.append(place.name)
    if as_json:
        print_json({"moved": moved, "failed": failed})
    else:
        for each in failed:
            echo(f"{each['partition']} was not moved: {each['reason']}")
        echo(
            f"{counted(len(moved), 'partition')} moved from {directory}"
            + (f", {counted(len(failed), 'partition')} left" if failed else "")
            + "; it gets no new ones: take it out of data_dirs and restart, or use it again with "
            "--cancel"
        )
    ctx.exit(1 if failed else 0)


@command.command()
@click.argument("directory", type=click.Path(file_okay=False))
@click.option("--lost", help="The path that the lost directory had; default: DIRECTORY.")
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False),
    required=True,
    help="The appliance's first data directory, which has the catalog.",
)
@click.option("--yes", is_flag=True, help="Do it; without it, say what would be lost.")
def replace(directory: str, lost: str | None, data_dir: str, yes: bool) -> None:
    """Have DIRECTORY, which is empty, take the place of a data directory whose disk is lost for
    good. The appliance must be stopped; run this as its user. Its partitions begin empty there,
    unless the directories of those partitions are put into it before the next start, from a backup.

    \b
    Example:
      tailrace disk replace /disk2/tailrace --data-dir /var/lib/tailrace --yes
    """
    try:
        found = replace_directory(data_dir, directory, lost or directory, is_confirmed=yes)
    except DataDirectoryError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(unusable(directory, error))) from None
    names = [f"{topic}-{partition}" for topic, partition in found.partitions]
    more = f" and {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
    listed = f"{', '.join(names[:NAMES_MAX])}{more}"
    if not yes:
        raise click.UsageError(
            f"nothing is replaced: the records of {counted(len(names), 'partition')} that "
            f"{found.path} had would be given up: {listed}. Confirm with --yes"
        )
    echo(
        f"{directory} takes the place of {found.path} at the next start; these partitions are "
        f"empty there unless a backup's files are put into it before: {listed}"
    )


def _set_drained(admin: Admin, path: str, *, is_drained: bool) -> None:
    """Add a data directory to `drained_dirs`, or remove it. Raises TailraceError."""
    broker = ConfigResource(BROKER)
    known = [str(each) for each in admin.describe_configs(broker)[broker][_DRAINED].value]
    kept = [each for each in known if os.path.realpath(each) != os.path.realpath(path)]
    drained = [*kept, path] if is_drained else kept
    if len(drained) != len(known):
        admin.alter_configs({broker: {_DRAINED: drained}})


def _others(admin: Admin, directory: str) -> list[dict[str, Any]]:
    """The other data directories that take writes, without those that are drained. Raises
    ClickException if there is none.
    """
    others = [
        row
        for row in admin.describe_cluster()["data_dirs"]
        if os.path.realpath(row["path"]) != os.path.realpath(directory)
        and row["state"] == "OK"
        and not row["drained"]
    ]
    if not others:
        raise click.ClickException(
            "there is no other data directory that takes writes and is not drained: list one in "
            "data_dirs and restart"
        )
    return others


def _move_to_emptiest(admin: Admin, place: Place, directory: str, pace: Pace) -> None:
    """Raises ClickException, TailraceError."""
    target = max(_others(admin, directory), key=lambda row: int(row["free_bytes"]))
    move_partition(admin, place, str(target["path"]), pace)
