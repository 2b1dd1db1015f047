"""`tailrace group describe`: a group's members, and the lag of each partition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from appliance.cli.commands.groups.advice import (
    SHARE,
    idle_members,
    lag_of,
    lag_text,
    member_name,
    partition_count,
    without_commit,
)
from appliance.cli.options.shared import bootstrap_option, complete_groups, connect, json_option
from appliance.cli.output import UNKNOWN, counted, echo, one_line, print_json, print_table, utc_time
from tailrace.admin.admin import Admin
from tailrace.admin.groups import NO_OFFSET, first_unread


@click.command()
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
    is_share = found["kind"] == SHARE
    _print_summary(found, is_share=is_share)
    click.echo()
    if found["members"]:
        _print_members(found["members"], is_share=is_share)
    else:
        click.echo("no members: nobody consumes")
    if found["partitions"]:
        click.echo()
        _print_partitions(found["partitions"], is_share=is_share)
    _print_notes(found)


def _print_summary(found: Mapping[str, Any], *, is_share: bool) -> None:
    since = f", created {utc_time(found['created_ms'] / 1000)}" if found.get("created_ms") else ""
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


def _print_members(members: Sequence[Mapping[str, Any]], *, is_share: bool) -> None:
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


def _print_partitions(rows: Sequence[Mapping[str, Any]], *, is_share: bool) -> None:
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


def _print_notes(found: Mapping[str, Any]) -> None:
    """A sentence for each partition and member that needs attention."""
    members, rows = found["members"], found["partitions"]
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
