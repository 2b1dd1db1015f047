"""`tailrace group`: consumer groups and share groups: list, describe, reset their offsets, delete,
advise.
"""

from __future__ import annotations

import datetime as dt
import sys
import time
from collections.abc import Mapping
from typing import Any

import click

from appliance.cli.commands.groups.advice import (
    SHARE,
    Sample,
    advise,
    idle_members,
    lag_of,
    lag_text,
    member_name,
    partition_count,
    without_commit,
)
from appliance.cli.commands.groups.reset import Reset, Selection, new_offsets
from appliance.cli.main import EXIT_FAILED
from appliance.cli.options.shared import (
    SINCE_HELP,
    Duration,
    PastMoment,
    bootstrap_option,
    complete_groups,
    complete_topics,
    connect,
    json_option,
)
from appliance.cli.output import UNKNOWN, complain, counted, echo, one_line, print_json, print_table
from tailrace.admin.admin import Admin
from tailrace.admin.groups import NO_OFFSET, first_unread
from tailrace.core.errors import GroupNotEmptyError, InvalidGroupError, UnknownGroupError

MEMBERS_SHOWN_MAX = 3
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
@click.argument("group", shell_complete=complete_groups)
@bootstrap_option
@json_option
def describe(group: str, bootstrap: str, as_json: bool) -> None:
    """Show a group: its members, and the committed offset, the lag and the age of the lag of each
    partition.

    \b
    Example:
      tailrace group describe billing
      tailrace group describe billing --json | jq '.partitions[] | select(.lag > 1000)'
    """
    with connect(bootstrap) as admin:
        found = admin.describe_groups(group)[group]
        found["paused_topics"] = paused_topics(admin, found)
    found["lag"] = lag_of(found)
    found["partitions_without_commit"] = len(without_commit(found))
    found["lag_seconds"] = max(
        (row["lag_seconds"] for row in found["partitions"] if row["lag_seconds"] is not None),
        default=None,
    )
    found["idle_members"] = [member["member_id"] for member in idle_members(found)]
    found["stuck_members"] = [member["member_id"] for member in found["members"] if member["stuck"]]
    if as_json:
        print_json(found)
    else:
        _show(found)


def paused_topics(admin: Admin, described: Mapping[str, Any]) -> list[str]:
    """The topics of a group whose delivery is paused."""
    names = {row["topic"] for row in described["partitions"]}.union(
        *(member["topics"] or () for member in described["members"])
    )
    counts = admin.partition_counts() if names else {}
    known = [name for name in sorted(names) if name in counts]
    return [
        name
        for name, configs in admin.describe_configs(known).items()
        if configs.get("delivery.paused")
    ]


def _show(found: Mapping[str, Any]) -> None:
    members, rows = found["members"], found["partitions"]
    is_share = found["kind"] == SHARE
    since = f", created {_shown_ms(found['created_ms'])}" if found.get("created_ms") else ""
    click.echo(f"group    {one_line(found['group'])}\nkind     {found['kind']}{since}")
    how = "" if is_share or not found["assignor"] else f", assigned by {found['assignor']}"
    rebalances = "" if is_share else f", {counted(found['rebalances'], 'rebalance')}"
    click.echo(f"state    {found['state']}, epoch {found['epoch']}{how}{rebalances}")
    click.echo(f"lag      {lag_text(found, found['lag_seconds'])}")
    for name in found["paused_topics"]:
        click.echo(
            f"paused   {name}: no records are given out. To resume: tailrace topic alter {name} "
            "--config delivery.paused=false"
        )
    if found.get("trouble"):
        click.echo(f"trouble  {one_line(found['trouble'])}")
    click.echo()
    if members:
        print_table(
            ["MEMBER", "CLIENT", "INSTANCE", "STATE", "EPOCH",
            "TOPICS" if is_share else "PARTITIONS", "LAST HEARTBEAT"],
            [
                [m["member_id"], m["client_id"], m["instance_id"], m["state"], m["epoch"],
                 len(m["topics"]) if is_share else partition_count(m["owned"]),
                 _ago(m["last_heartbeat_ms_ago"])]
                for m in members
            ],
            shorten=["CLIENT", "INSTANCE"],
        )  # fmt: skip
    else:
        click.echo("no members: nobody consumes")
    if rows:
        click.echo()
        extra = ["IN FLIGHT"] if is_share else []
        open_too = ["WITH OPEN"] if any("high_watermark" in row for row in rows) else []
        print_table(
            ["TOPIC", "PARTITION", "START" if is_share else "COMMITTED", "END", *open_too, "LAG",
            "LAG SECONDS", *extra, "MEMBER"],
            [
                [row["topic"], row["partition"], _shown_offset(first_unread(row)),
                _shown_offset(row["end"]),
                *([_shown_offset(row.get("high_watermark", row["end"]))] if open_too else []),
                UNKNOWN if row["lag"] is None else row["lag"],
                 UNKNOWN if row["lag_seconds"] is None else round(row["lag_seconds"], 1),
                 *([row.get("in_flight")] if is_share else []), row.get("member_id")]
                for row in rows
            ],
        )  # fmt: skip
    for row in rows:
        if waits_for := row.get("waits_for"):
            first = ", ".join(
                f"{row['topic']}-{source} up to {offset}" for source, offset in waits_for.items()
            )
            echo(
                one_line(
                    f"waiting: {row['topic']}-{row['partition']} was added: it is read when the "
                    f"group has committed {first}, where its keys were before"
                )
            )
    for row in rows:
        if count := row.get("at_delivery_limit"):
            echo(
                one_line(
                    f"at the delivery limit: {counted(count, 'record')} of "
                    f"{row['topic']}-{row['partition']}, delivered as often as"
                    " group.share.delivery.count.limit allows and not done; if this stays, they "
                    "cannot be written to the dead-letter topic:"
                    " see dead.letter.topic, and the consumers' logs for "
                    "share_dead_letter_not_written"
                )
            )
    by_id = {member["member_id"]: member for member in members}
    for member_id in found["stuck_members"]:
        echo(one_line(f"stuck: {member_name(by_id[member_id])}: {by_id[member_id]['stuck']}"))
    if found["idle_members"]:
        names = ", ".join(member_name(by_id[member_id]) for member_id in found["idle_members"])
        echo(
            one_line(f"idle: {names}: more consumers than partitions; stop them, or add partitions")
        )


def _ago(ms: int | None) -> str:
    return "" if ms is None else f"{ms / 1000:.1f} s ago"


def _shown_offset(offset: int) -> Any:
    return UNKNOWN if offset == NO_OFFSET else offset


def _shown_ms(ms: int) -> str:
    return (
        dt.datetime.fromtimestamp(ms / 1000, dt.UTC)
        .isoformat(timespec="seconds")
        .replace("+00:00", "Z")
    )


@command.command(name="reset-offsets")
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
            described = admin.describe_groups(group, lag_seconds=False)[group]
            committed = admin.list_group_offsets(group)
        except UnknownGroupError:
            if not topics:
                raise
            described, committed = {"members": []}, {}  # setting offsets creates it
        found = new_offsets(admin, committed, selection, reset)
        rows = [
            {
                "topic": key.topic,
                "partition": key.partition,
                "committed": change.committed,
                "new": change.offset,
                "end": change.end,
            }
            for key, change in found.changes.items()
        ]
        asks = not yes and not dry_run and sys.stdin.isatty()
        if rows and not as_json and (dry_run or asks or not described["members"]):
            print_table(
                ["TOPIC", "PARTITION", "COMMITTED", "NEW", "END"],
                [
                    [
                        r["topic"],
                        r["partition"],
                        UNKNOWN if r["committed"] is None else r["committed"],
                        r["new"],
                        r["end"],
                    ]
                    for r in rows
                ],
            )
        for sentence in found.notes:
            complain(sentence)
        if described["members"] and (dry_run or asks):  # otherwise the refusal names them
            names = ", ".join(
                member_name(member) for member in described["members"][:MEMBERS_SHOWN_MAX]
            )
            complain(
                one_line(
                    f"the group has {counted(len(described['members']), 'member')}: {names}; "
                    "offsets can be reset once they have stopped"
                )
            )
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
