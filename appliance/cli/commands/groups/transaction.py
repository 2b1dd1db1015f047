"""`tailrace transaction`: list, describe, commit and abort transactions; find hanging ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from appliance.cli.options.shared import (
    bootstrap_option,
    complete_transactional_ids,
    connect,
    json_option,
)
from appliance.cli.output import UNKNOWN, echo, one_line, print_json, print_table, utc_time

BRANCHES_SHOWN = 8
STATES = ("empty", "ongoing", "committing", "aborting", "prepared")


@click.group()
def command() -> None:
    """List, describe, commit and abort transactions.

    \b
    Example:
      tailrace transaction list --state ongoing
      tailrace transaction abort billing-1
    """


@command.command(name="list")
@click.option(
    "--state", "states", type=click.Choice(STATES), multiple=True, help="Only ids in this state."
)
@bootstrap_option
@json_option
def list_(states: tuple[str, ...], bootstrap: str, as_json: bool) -> None:
    """List transactional ids.

    \b
    Example:
      tailrace transaction list --state ongoing --json
    """
    with connect(bootstrap) as admin:
        rows = list(admin.list_transactions(states or None).values())
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["TRANSACTIONAL ID", "STATE", "OPEN FOR", "TIMEOUT", "CLIENT", "PRODUCER ID", "EPOCH"],
            [
                [row["transactional_id"], row["state"], _seconds(row["open_ms"]),
                _seconds(row["timeout_ms"]), row["client_id"], row["producer_id"],
                row["producer_epoch"]]
                for row in rows
            ],
            shorten=["CLIENT"],
        )  # fmt: skip
    else:
        echo("no transactional ids" + (f" in state {', '.join(states)}" if states else " yet"))


@command.command()
@click.argument("transactional_id", shell_complete=complete_transactional_ids)
@bootstrap_option
@json_option
def describe(transactional_id: str, bootstrap: str, as_json: bool) -> None:
    """Show a transactional id: its producer, its open transaction, and how the last one ended.

    \b
    Example:
      tailrace transaction describe billing-1
    """
    with connect(bootstrap) as admin:
        found = admin.describe_transactions(transactional_id)[transactional_id]
    if as_json:
        print_json(found)
    else:
        _show(found)


def _show(found: Mapping[str, Any]) -> None:
    owner = found["client_id"] or UNKNOWN
    is_open = found["open_ms"] is not None
    lines = [
        ("id", found["transactional_id"]),
        ("state", found["state"] + (f", open for {_seconds(found['open_ms'])}" if is_open else "")),
        ("timeout", _seconds(found["timeout_ms"])),
        ("client", f"{owner}, since {utc_time(found['owned_ms'] / 1000)}"),
        ("producer", f"{found['producer_id']}, epoch {found['producer_epoch']}"),
    ]
    if prepared := found["prepared"]:
        tag = f", tag {prepared['tag']}" if prepared["tag"] else ""
        groups = ", ".join(prepared.get("groups", []))
        offsets = f", with offsets of {groups}" if groups else ""
        lines.append(("prepared", f"{utc_time(prepared['wall_ms'] / 1000)}{tag}{offsets}"))
    if branches := found.get("branches"):
        count = f"{len(branches)} {'branch' if len(branches) == 1 else 'branches'}"
        shown = ", ".join(f"{one}:{epoch}" for one, epoch in branches[:BRANCHES_SHOWN])
        more = ", ..." if len(branches) > BRANCHES_SHOWN else ""
        lines.append(("branches", f"{count} (producer id:epoch {shown}{more})"))
    if metadata := found.get("metadata"):
        lines.append(("metadata", metadata))
    if last := found["last"]:
        how = f"{last['outcome']} of epoch {last['producer_epoch']} by {last['by']}"
        lines.append(("last", f"{how}, {utc_time(last['wall_ms'] / 1000)}"))
    if found["workers_pending"]:
        lines.append(("pending", ", ".join(found["workers_pending"])))
    for name, text in lines:
        click.echo(f"{name:10}{one_line(text)}")


@command.command()
@click.argument("transactional_id", required=False, shell_complete=complete_transactional_ids)
@click.option("--producer-id", type=int, help="Of a hanging transaction without an id.")
@click.option("--producer-epoch", type=int, help="The epoch that belongs to --producer-id.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask on a terminal.")
@bootstrap_option
@json_option
def abort(
    transactional_id: str | None, producer_id: int | None, producer_epoch: int | None, yes: bool,
    bootstrap: str, as_json: bool,
) -> None:  # fmt: skip
    """Abort the open transaction of an id, after a confirmation on a terminal. Its producer is
    refused when it commits, and may begin another transaction.

    \b
    Example:
      tailrace transaction abort billing-1 --yes
      tailrace transaction abort --producer-id 4611686048492158976 --producer-epoch 7
    """
    if (transactional_id is None) == (producer_id is None) or (producer_id is None) != (
        producer_epoch is None
    ):
        raise click.UsageError(
            "give a transactional id, or both --producer-id and --producer-epoch"
        )
    name = transactional_id or f"producer id {producer_id}, epoch {producer_epoch}"
    if not yes and sys.stdin.isatty():
        click.confirm(f"Abort the transaction of {name}?", abort=True, err=True)
    with connect(bootstrap) as admin:
        admin.abort_transaction(
            transactional_id, producer_id=producer_id, producer_epoch=producer_epoch
        )
    if as_json:
        print_json({"aborted": name})
    else:
        echo(f"aborted the transaction of {one_line(name)}")


@command.command()
@click.argument("transactional_id", shell_complete=complete_transactional_ids)
@click.option("--yes", "-y", is_flag=True, help="Do not ask on a terminal.")
@bootstrap_option
@json_option
def commit(transactional_id: str, yes: bool, bootstrap: str, as_json: bool) -> None:
    """Commit the prepared transaction of an id, after a confirmation on a terminal. `tailrace
    transaction abort` aborts it.

    \b
    Example:
      tailrace transaction commit billing-1 --yes
    """
    if not yes and sys.stdin.isatty():
        click.confirm(
            f"Commit the prepared transaction of {transactional_id}?", abort=True, err=True
        )
    with connect(bootstrap) as admin:
        admin.commit_transaction(transactional_id)
    if as_json:
        print_json({"committed": transactional_id})
    else:
        echo(f"committed the transaction of {one_line(transactional_id)}")


@command.command(name="find-hanging")
@bootstrap_option
@json_option
def find_hanging(bootstrap: str, as_json: bool) -> None:
    """Find open transactions that nothing will end. There are none unless files were damaged or
    restored from a backup. `tailrace transaction abort` ends them.

    \b
    Example:
      tailrace transaction find-hanging --json
    """
    with connect(bootstrap) as admin:
        rows = admin.find_hanging_transactions()
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["TRANSACTIONAL ID", "PRODUCER ID", "EPOCH", "OPEN FOR", "WORKERS", "REASON"],
            [
                [row["transactional_id"] or UNKNOWN, row["producer_id"], row["producer_epoch"],
                _seconds(row["open_ms"]), ", ".join(row["workers"]), row["reason"]]
                for row in rows
            ],
            wrap=["REASON"],
        )  # fmt: skip
    else:
        echo("no transaction hangs")


def _seconds(ms: int | None) -> str:
    return "" if ms is None else f"{ms / 1000:,.1f} s"
