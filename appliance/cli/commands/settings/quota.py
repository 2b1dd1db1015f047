"""`tailrace quota`: list, set and remove quotas of users, client ids and topics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from appliance.cli.options.shared import bootstrap_option, connect, json_option, parse_pairs
from appliance.cli.output import complain, echo, print_json, print_table
from tailrace.admin.quotas import QuotaEntity

F = TypeVar("F", bound=Callable[..., Any])


def _entity_options(function: F) -> F:
    for name, text in (
        ("--prefix", "Prefix of topic names; * for all topics."),
        ("--client", "Client id; * for the default."),
        ("--user", "User; * for the default."),
    ):
        function = click.option(name, help=text)(function)
    return function


@click.group()
def command() -> None:
    """Limit what users, client ids and topics take of the appliance.

    \b
    Example:
      tailrace quota set --user alice producer_byte_rate=10MiB consumer_byte_rate=50MiB
      tailrace quota set --prefix alice. stored_bytes_max=100GiB partitions_max=200
      tailrace quota list
    """


@command.command("list")
@click.option("--usage", is_flag=True, help="Show what is used, and who waits.")
@bootstrap_option
@json_option
def list_(usage: bool, bootstrap: str, as_json: bool) -> None:
    """List quotas, or what is used of them.

    \b
    Example:
      tailrace quota list --usage
    """
    with connect(bootstrap) as admin:
        if usage:
            _show_usage(admin.quota_usage(), as_json)
            return
        rules = admin.describe_quotas()
    rows = [
        {**_named(entity), "quota": quota, "value": value}
        for entity, values in sorted(rules.items(), key=lambda item: _text(item[0]))
        for quota, value in values.items()
    ]
    if as_json:
        print_json(rows)
    elif rows:
        print_table(
            ["ENTITY", "QUOTA", "VALUE"],
            [
                [_text(entity), quota, f"{value:,}"]
                for entity, values in sorted(rules.items(), key=lambda item: _text(item[0]))
                for quota, value in values.items()
            ],
        )
    else:
        echo("no quotas")


@command.command("set")
@click.argument("values", nargs=-1, required=True, metavar="QUOTA=VALUE...")
@_entity_options
@click.option("--validate", is_flag=True, help="Only check, and change nothing.")
@bootstrap_option
def set_(
    values: tuple[str, ...],
    user: str | None,
    client: str | None,
    prefix: str | None,
    validate: bool,
    bootstrap: str,
) -> None:
    """Set quotas of an entity, for good. Its others stay.

    Of users and clients: producer_byte_rate, consumer_byte_rate, request_rate,
    controller_mutation_rate, connections_max, transactions_max. Of prefixes: stored_bytes_max,
    topics_max, partitions_max, delayed_records_max.

    \b
    Example:
      tailrace quota set --user '*' --client '*' producer_byte_rate=5MiB
    """
    entity = _entity(user, client, prefix)
    pairs = parse_pairs(values, "QUOTA=VALUE")
    with connect(bootstrap) as admin:
        admin.alter_quotas({entity: dict(pairs)}, validate_only=validate)
    names = ", ".join(pairs)
    click.echo(
        f"right: {names}; nothing was changed" if validate else f"{_text(entity)}: set {names}"
    )


@command.command("remove")
@click.argument("quotas", nargs=-1, metavar="[QUOTA]...")
@_entity_options
@bootstrap_option
def remove(
    quotas: tuple[str, ...],
    user: str | None,
    client: str | None,
    prefix: str | None,
    bootstrap: str,
) -> None:
    """Remove quotas of an entity; without names all of them.

    \b
    Example:
      tailrace quota remove --user alice producer_byte_rate
    """
    entity = _entity(user, client, prefix)
    with connect(bootstrap) as admin:
        known = admin.describe_quotas().get(entity, {})
        missing = [name for name in quotas if name not in known]
        if missing or not known:
            complain(
                f"{_text(entity)} has no {', '.join(missing) or 'quotas'}; nothing was removed. "
                "See tailrace quota list"
            )
            sys.exit(1)
        admin.alter_quotas({entity: dict.fromkeys(quotas) if quotas else None})
    click.echo(f"{_text(entity)}: removed {', '.join(quotas) or 'all quotas'}")


def _entity(user: str | None, client: str | None, prefix: str | None) -> QuotaEntity:
    if user is None and client is None and prefix is None:
        raise click.UsageError("name the entity: --user, --client or --prefix")
    return QuotaEntity(user, client, prefix)


def _named(entity: QuotaEntity) -> dict[str, str]:
    return {name: value for name, value in entity._asdict().items() if value is not None}


def _text(entity: QuotaEntity) -> str:
    return " ".join(f"{name}={value}" for name, value in _named(entity).items())


def _show_usage(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo("nothing is counted: no quotas, or no connection that they concern")
        return
    shown = []
    for row in rows:
        names = (row.get(name) for name in QuotaEntity._fields)
        waited = row.get("throttled_ms")
        shown.append(
            [
                _text(QuotaEntity(*names)), row["quota"], f"{row['used']:,}",
                f"{row['limit']:,}" if "limit" in row else "", str(row.get("waiting", "")),
                "" if waited is None else f"{waited / 1000:.1f} s",
            ]
        )  # fmt: skip
    print_table(["ENTITY", "QUOTA", "USED", "LIMIT", "WAITING", "THROTTLED"], shown)
