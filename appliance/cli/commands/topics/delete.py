"""`tailrace topic delete` and `delete-records`: confirmed first, then deleted."""

from __future__ import annotations

import shlex
import sys

import click

from appliance.cli.commands.topics.deleted_topics import deletions_kept_ms, shown_duration
from appliance.cli.commands.topics.describe import record_count
from appliance.cli.options.shared import (
    bootstrap_option,
    complete_topics,
    connect,
    json_option,
    unless_refused,
)
from appliance.cli.output import counted, echo, print_json
from tailrace.core.errors import UnknownTopicError
from tailrace.core.topic_partition import TopicPartition


@click.command()
@click.argument("name", shell_complete=complete_topics)
@click.option("--if-exists", is_flag=True, help="Do not fail if the topic does not exist.")
@click.option(
    "--with-derived",
    is_flag=True,
    help="Delete the topic's retry topics and its dead-letter topic, too.",
)
@click.option("--now", is_flag=True, help="Free the space at once: it cannot come back.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needed without a terminal.")
@bootstrap_option
@json_option
def delete(
    name: str,
    if_exists: bool,
    with_derived: bool,
    now: bool,
    yes: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Delete a topic with everything in it. It asks first; without a terminal it takes --yes.

    With topic.delete.retention.ms in the appliance's settings it can be undone for that time:
    `tailrace topic undelete`.

    \b
    Example:
      tailrace topic delete orders --yes
      tailrace topic delete orders --with-derived --yes
      tailrace topic delete orders --now --yes
    """
    kept_ms: int | None = 0
    derived: list[str] = []
    with connect(bootstrap) as admin:
        try:
            if with_derived:
                derived = admin.derived_topics(name)
            names = [name, *derived]
            if not now:
                kept_ms = unless_refused(
                    lambda: deletions_kept_ms(admin), "the time in which it can be undone"
                )
            if not yes:
                described = admin.describe_topics(names)
                records = sum(
                    record_count(p) for topic in described.values() for p in topic["partitions"]
                )
                shown = f"{', '.join(names)} with their" if derived else f"{name} with its"
                _confirm(f"{shown} {counted(records, 'record')}", kept_ms)
            admin.delete_topics(names, now=now)
        except UnknownTopicError:
            if not if_exists:
                raise
            if as_json:
                print_json({"deleted": None})
            else:
                echo(f"there is no topic {name}")
            return
    if as_json:
        found = {"deleted": name, **({"derived": derived} if with_derived else {})}
        print_json({**found, **({"kept_ms": kept_ms} if kept_ms else {})})
        return
    echo(f"deleted {', '.join(names)}")
    if kept_ms:
        echo(
            f"to bring it back within {shown_duration(kept_ms)}: tailrace topic undelete "
            f"{shlex.quote(name)}"
        )


@click.command(name="delete-records")
@click.argument("name", shell_complete=complete_topics)
@click.option("--partition", type=int, required=True, help="Of this partition.")
@click.option(
    "--before",
    type=int,
    required=True,
    metavar="OFFSET",
    help="Everything below this offset; -1: everything.",
)
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needed without a terminal.")
@bootstrap_option
@json_option
def delete_records(
    name: str, partition: int, before: int, yes: bool, bootstrap: str, as_json: bool
) -> None:
    """Delete the oldest records of a partition. It asks first; without a terminal it takes --yes.

    \b
    Example:
      tailrace topic delete-records orders --partition 0 --before 1000 --yes
    """
    key = TopicPartition(name, partition)
    with connect(bootstrap) as admin:
        if not yes:
            found = admin.describe_topics([name])[name]["partitions"]
            if partition in range(len(found)):  # otherwise the request is refused
                begin, end = (
                    found[partition]["beginning_offset"] or 0,
                    found[partition]["end_offset"] or 0,
                )
                records = max(0, (end if before < 0 else min(before, end)) - begin)
                _confirm(f"the oldest {counted(records, 'record')} of {name}-{partition}")
        start = admin.delete_records({key: before})[key]
    if as_json:
        print_json({"topic": name, "partition": partition, "log_start_offset": start})
    else:
        echo(f"{name}-{partition} begins at offset {start}")


def _confirm(deleted: str, kept_ms: int | None = 0) -> None:
    """Ask on a terminal. `kept_ms`: time in which it can be undone, None: unknown.
    Raises Abort for no, UsageError without a terminal.
    """
    until = f" (it can be undone for {shown_duration(kept_ms)})" if kept_ms else " for good"
    if kept_ms is None:
        until = ""
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"nothing is deleted: this would delete {deleted}{until}, and there is no terminal "
            "to ask on; confirm with --yes"
        )
    click.confirm(f"Delete {deleted}{until if kept_ms else ''}?", abort=True, err=True)
