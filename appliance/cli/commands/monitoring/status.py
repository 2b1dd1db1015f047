"""`tailrace status`: state of the running appliance."""

from __future__ import annotations

import time
from typing import Any

import click

from appliance.cli.options.shared import (
    STATE_OF_SETTINGS,
    bootstrap_option,
    connect,
    json_option,
    unless_refused,
)
from appliance.cli.output import counted, human_bytes, one_line, print_json, print_table, utc_time
from appliance.observe.checks.doctor_checks import PARTITION_OFFLINE, groups_error, settings_state
from appliance.observe.overview.problems import problems_of
from tailrace.admin.admin import Admin
from tailrace.core.errors import NotAuthorizedError, TailraceError

LONG_MS = 60_000
"""Age from which an open transaction is shown, also if its timeout is longer."""


@click.command()
@bootstrap_option
@json_option
def command(bootstrap: str, as_json: bool) -> None:
    """Show what is wrong, what to do about it, then processes, directories and delayed records.
    Exit status 3 when no appliance answers.

    \b
    Example:
      tailrace status --json
    """
    with connect(bootstrap) as admin:
        state = admin.describe_cluster()
        state["delays"] = admin.describe_delays()
        state["long_transactions"] = _long_transactions(admin)
        state["groups_error"] = groups_error(admin)
        state["settings"] = unless_refused(lambda: settings_state(admin), STATE_OF_SETTINGS)
        state["quotas"] = unless_refused(lambda: _quotas_reached(admin), "quotas that are reached")
    if as_json:
        print_json(state)
        return
    totals = (
        f"{counted(state['topics'], 'topic')}, {counted(state['partitions'], 'partition')}, "
        f"{human_bytes(state['bytes'])}"
    )
    click.echo(
        f"appliance {state['cluster_id']} at {bootstrap}: {totals}"
        + (f"\nconsole {state['console']}" if state.get("console") else "")
    )
    _print_problems(state)
    kept = state.get("bin")  # None: an appliance that has none, before its upgrade
    if kept and kept["topics"]:
        click.echo(
            f"{counted(kept['topics'], 'deleted topic')} kept, {human_bytes(kept['bytes'])}, the "
            f"oldest is {kept['oldest']}; to see them: tailrace topic list --deleted\n"
        )
    for line in _settings_lines(state["settings"] or {}):
        click.echo(line)
    if state["quotas"]:
        names = ", ".join(state["quotas"])
        click.echo(f"quotas reached: {names}; to see them: tailrace quota list --usage\n")
    _print_tables(state)


def _print_tables(state: dict[str, Any]) -> None:
    """Print processes, directories, and the delayed records where there are any."""
    print_table(
        ["PROCESS", "PID", "STATE", "RESTARTS", "ERRORS"],
        [
            [
                p["name"],
                p["pid"],
                "live" if p["live"] else "down",
                max(0, p["restarts"]),
                p["internal_errors"],
            ]
            for p in state["processes"]
        ],
    )
    click.echo()
    print_table(
        ["DATA DIRECTORY", "FREE", "SIZE", "STATE"],
        [
            [d["path"], human_bytes(d["free_bytes"]), human_bytes(d["total_bytes"]), d["state"]]
            for d in state["data_dirs"]
        ],
    )
    moving = [m for m in state.get("moves", ()) if m["state"] != "failed"]  # that is a problem
    if moving:
        click.echo()
        print_table(
            ["MOVING", "PARTITION", "STATE", "FROM", "TO", "WAITS FOR"],
            [[m[key] for key in ("topic", "partition", "state", "from", "to", "reason")]
             for m in moving],
            wrap=["WAITS FOR"],
        )  # fmt: skip
    if state["delays"]:
        click.echo()
        print_table(
            ["DELAYED IN", "PARTITION", "WAIT", "1 MINUTE", "1 HOUR", "1 DAY", "LATER", "RECUR",
            "NEXT DUE", "DELIVERED", "LATE", "LOST"],
            [
                [d["topic"], d["partition"], d["pending"], *d["due_within"].values(),
                d["recurring"], _moment(d["next_due_us"]), d["delivered"],
                 f"{d['lateness_us'] / 1000:.0f} ms", d["lost_rows"]]
                for d in state["delays"]
            ],
        )  # fmt: skip


def _print_problems(state: dict[str, Any]) -> None:
    """Print the problems, the worst first, each with its advice."""
    found = problems_of(state, state["delays"], now_us=time.time_ns() // 1000)
    many = [check for check in found if check.name == PARTITION_OFFLINE]
    for check in found:
        if check not in many:
            click.echo(one_line(f"{check.level.value}: {check.detail}"))
    if state["offline"]:
        count = state["offline_count"]
        click.echo(f"problem: {counted(count, 'partition')} refuse writes")
        print_table(
            ["TAKES NO WRITES", "PARTITION", "REASON"],
            [[o["topic"], o["partition"], o["reason"]] for o in state["offline"]],
            wrap=["REASON"],
        )
        click.echo("When the disk is repaired, run: tailrace topic online TOPIC\n")
    if state["long_transactions"]:
        click.echo("warning: open transactions hold readers back")
        print_table(
            ["HOLDS READERS BACK", "STATE", "OPEN FOR", "TIMEOUT", "CLIENT"],
            [
                [t["transactional_id"], t["state"], f"{t['open_ms'] / 1000:,.0f} s",
                 f"{t['timeout_ms'] / 1000:,.0f} s", t["client_id"]]
                for t in state["long_transactions"]
            ],
        )  # fmt: skip
        click.echo("To abort one: tailrace transaction abort TRANSACTIONAL_ID")
        if any(t["state"] == "prepared" for t in state["long_transactions"]):
            click.echo("A prepared one waits for that, or for: tailrace transaction commit ID")
        click.echo()
    is_wrong = found or state["long_transactions"]
    click.echo("" if is_wrong else "nothing is wrong\n")


def _quotas_reached(admin: Admin) -> list[str]:
    """Quotas that something waits for now, and sums that are used up."""
    try:
        usage = admin.quota_usage()
    except NotAuthorizedError:
        raise
    except TailraceError:  # an appliance that has none, before its upgrade
        return []
    return sorted(
        " ".join(str(row[name]) for name in ("user", "client", "prefix", "quota") if name in row)
        for row in usage
        if row.get("waiting") or ("waiting" not in row and row["used"] >= row.get("limit", 1 << 60))
    )


def _settings_lines(settings: dict[str, Any]) -> list[str]:
    lines = []
    if settings.get("restart"):
        lines.append(f"needs a restart: {', '.join(settings['restart'])}")
    if settings.get("not_applied"):
        lines.append(f"settings not applied yet by {', '.join(settings['not_applied'])}")
    return [*lines, ""] if lines else []


def _long_transactions(admin: Admin) -> list[dict[str, Any]]:
    """Transactions that hold readers of committed records back for longer than they may: their
    timeout, at most LONG_MS.
    """
    try:
        rows = admin.list_transactions(["ongoing", "prepared"]).values()
    except TailraceError:
        return []  # the process of groups is being restarted
    return [row for row in rows if (row["open_ms"] or 0) > min(row["timeout_ms"], LONG_MS)]


def _moment(us: int | None) -> str:
    return "" if us is None else utc_time(us / 1e6)
