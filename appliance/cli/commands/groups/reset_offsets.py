"""`tailrace group reset-offsets`: the new offsets are shown, confirmed and set."""

from __future__ import annotations

import datetime as dt
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from appliance.cli.commands.groups.advice import member_name
from appliance.cli.commands.groups.new_offsets import Found, Reset, Selection, new_offsets
from appliance.cli.options.shared import (
    SINCE_HELP,
    PastMoment,
    bootstrap_option,
    complete_groups,
    complete_topics,
    connect,
    json_option,
)
from appliance.cli.output import UNKNOWN, complain, counted, echo, one_line, print_json, print_table
from tailrace.core.errors import UnknownGroupError

MEMBERS_SHOWN_MAX = 3


@click.command(name="reset-offsets")
@click.argument("group", shell_complete=complete_groups)
@click.option("--to-earliest", is_flag=True, help="To the first record.")
@click.option("--to-latest", is_flag=True, help="To the end, so that only new records are read.")
@click.option(
    "--to-datetime",
    type=PastMoment(),
    help=f"To the first record of this time or later: {SINCE_HELP}",
)
@click.option(
    "--shift-by", type=int, metavar="N", help="By this many records, back when it is negative."
)
@click.option("--to-offset", type=click.IntRange(0), metavar="OFFSET", help="To this offset.")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    metavar="TOPIC[:0,1]",
    shell_complete=complete_topics,
    help="Only this topic, or these partitions of it; repeatable. Default: all that the group "
    "has committed offsets for.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be set.")
@click.option(
    "--yes", "--execute", "-y", is_flag=True, help="Do not ask on a terminal."
)  # --execute and --all-topics are kafka-consumer-groups.sh's
@click.option("--all-topics", is_flag=True, hidden=True)
@bootstrap_option
@json_option
def reset_offsets(
    group: str,
    to_earliest: bool,
    to_latest: bool,
    to_datetime: dt.datetime | None,
    shift_by: int | None,
    to_offset: int | None,
    topics: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    all_topics: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Set the committed offsets of a group while none of its consumers run. The new offsets are
    shown first, and on a terminal confirmed.

    \b
    Example:
      tailrace group reset-offsets billing --to-earliest --topic orders --yes
      tailrace group reset-offsets billing --to-datetime 2027-01-31T08:00:00Z --dry-run
      tailrace group reset-offsets billing --shift-by -100 --topic orders:0,1
    """
    if all_topics and topics:
        raise click.UsageError("--all-topics and --topic exclude each other: leave one of them out")
    reset = Reset.chosen(to_earliest, to_latest, to_datetime, shift_by, to_offset)
    selection = Selection.parsed(topics)
    with connect(bootstrap) as admin:
        try:
            members = admin.describe_groups(group, lag_seconds=False)[group]["members"]
            committed = admin.list_group_offsets(group)
        except UnknownGroupError:
            if not topics:
                raise
            members, committed = [], {}  # setting offsets creates it
        found = new_offsets(admin, committed, selection, reset)
        rows = _rows(found)
        asks = not yes and not dry_run and sys.stdin.isatty()
        if rows and not as_json and (dry_run or asks or not members):
            _print_changes(rows)
        for sentence in found.notes:
            complain(sentence)
        if members and (dry_run or asks):  # otherwise the refusal names them
            _warn_of(members)
        if asks:
            click.confirm(f"Set {counted(len(rows), 'offset')} of {group}?", abort=True, err=True)
        if not dry_run:
            admin.alter_group_offsets(
                group, {key: change.offset for key, change in found.changes.items()}
            )
    if as_json:
        print_json({"group": group, "dry_run": dry_run, "offsets": rows, "notes": found.notes})
    else:
        echo(f"{'would set' if dry_run else 'set'} {counted(len(rows), 'offset')} of {group}")


def _rows(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "topic": key.topic,
            "partition": key.partition,
            "committed": change.committed,
            "new": change.offset,
            "end": change.end,
        }
        for key, change in found.changes.items()
    ]


def _print_changes(rows: Sequence[Mapping[str, Any]]) -> None:
    print_table(
        ["TOPIC", "PARTITION", "COMMITTED", "NEW", "END"],
        [
            [
                row["topic"],
                row["partition"],
                UNKNOWN if row["committed"] is None else row["committed"],
                row["new"],
                row["end"],
            ]
            for row in rows
        ],
    )


def _warn_of(members: Sequence[Mapping[str, Any]]) -> None:
    names = ", ".join(member_name(member) for member in members[:MEMBERS_SHOWN_MAX])
    complain(
        one_line(
            f"the group has {counted(len(members), 'member')}: {names}; "
            "offsets can be reset once they have stopped"
        )
    )
