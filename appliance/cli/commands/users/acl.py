"""`tailrace acl`: what users may do."""

from __future__ import annotations

from typing import Any

import click

from appliance.cli.commands.users.common import place_options, users_at
from appliance.cli.options.shared import json_option
from appliance.cli.output import complain, counted, echo, print_json, print_table
from shm.rights.acl import OPERATIONS, RESOURCE_TYPES, THE_CLUSTER
from shm.rights.roles import consumer_acls, producer_acls

_RESOURCES = tuple(kind for kind in RESOURCE_TYPES if kind != "cluster")
FAILED = 1


@click.group()
def command() -> None:
    """Rules of access (ACLs): add, list, remove, test.

    A rule allows or denies a principal (User:NAME, Group:NAME of users, User:* for everybody) an
    operation on a resource. A denial wins; without a rule the answer is no. Administrators need no
    rules.

    \b
    Example:
      tailrace acl add --principal User:shop --producer --topic orders
      tailrace acl test User:shop write topic:orders
    """


def resource_options(function: Any) -> Any:
    """Add an option for each type of resource."""
    for kind in reversed(_RESOURCES):
        function = click.option(
            f"--{kind}", metavar="NAME", multiple=kind != "console", is_flag=kind == "console",
            help=f"The {kind}{', repeatable; * for every one' if kind != 'console' else ''}.",
        )(function)  # fmt: skip
    return click.option("--cluster", is_flag=True, help="The appliance itself.")(function)


def _resources(given: dict[str, Any]) -> list[tuple[str, str]]:
    found = [
        (kind, name)
        for kind in _RESOURCES
        if kind != "console"
        for name in given[kind.replace("-", "_")]
    ]
    return found + [(kind, THE_CLUSTER) for kind in ("cluster", "console") if given[kind]]


@command.command()
@click.option("--principal", required=True, help="User:NAME, Group:NAME or User:*.")
@click.option("--producer", is_flag=True, help="All that a producer of --topic needs.")
@click.option("--consumer", is_flag=True, help="All that a consumer of --topic in --group needs.")
@click.option("--retries", is_flag=True, help="With --consumer: its retry and dead-letter topics.")
@click.option(
    "--operation", "operations", multiple=True, type=click.Choice(OPERATIONS),
    help="Operation, repeatable.",
)  # fmt: skip
@click.option("--prefix", "is_prefix", is_flag=True, help="Names are beginnings of names.")
@click.option("--deny", is_flag=True, help="Deny instead of allowing.")
@click.option("--host", default="*", show_default=True, help="Address that clients come from.")
@resource_options
@place_options
@json_option
def add(
    principal: str, producer: bool, consumer: bool, retries: bool, operations: tuple[str, ...],
    is_prefix: bool, deny: bool, host: str, bootstrap: str, data_dir: str | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Add rules.

    \b
    Example:
      tailrace acl add --principal User:shop --producer --topic orders
      tailrace acl add --principal Group:audit --operation read --topic '*'
      tailrace acl add --principal User:guest --operation all --topic secret. --prefix --deny
    """
    pattern = "prefixed" if is_prefix else "literal"
    acls: list[dict[str, Any]] = []
    if producer or consumer:
        acls = _role(principal, producer, consumer, retries, pattern, given)
    elif not operations:
        raise click.UsageError("say what is allowed: --operation, --producer or --consumer")
    for kind, name in _resources(given) if operations else ():
        for operation in operations:
            is_single = kind in ("cluster", "console")
            acls.append(
                {
                    "principal": principal, "resource_type": kind, "name": name,
                    "pattern": "literal" if is_single or name == "*" else pattern,
                    "operation": operation,
                }
            )  # fmt: skip
    if not acls:
        raise click.UsageError("name a resource: --topic, --group, --cluster, ...")
    for acl in acls:
        acl |= {"permission": "deny" if deny else "allow", "host": host}
    with users_at(bootstrap, data_dir) as users:
        added = users.add_acls(acls)
    if as_json:
        print_json(added)
    else:
        _print(added)


def _role(
    principal: str, producer: bool, consumer: bool, retries: bool, pattern: str,
    given: dict[str, Any],
) -> list[dict[str, Any]]:  # fmt: skip
    if not given["topic"] or (consumer and not given["group"]):
        raise click.UsageError("--producer needs --topic, and --consumer --topic and --group")
    acls: list[dict[str, Any]] = []
    for topic in given["topic"]:
        if producer:
            ids = given["transactional_id"] or (None,)
            for transactional_id in ids:
                acls += producer_acls(
                    principal, topic, pattern=pattern, transactional_id=transactional_id
                )
        for group in given["group"] if consumer else ():
            acls += consumer_acls(principal, topic, group, pattern=pattern, retries=retries)
    return acls


def filter_options(function: Any) -> Any:
    """Add options that choose rules."""
    function = click.option(
        "--resource-type", type=click.Choice(RESOURCE_TYPES), help="Rules with it."
    )(function)
    function = click.option("--name", help="Rules of this name or prefix.")(function)
    return click.option("--principal", help="Rules of this principal.")(function)


def _filter(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


@command.command(name="list")
@filter_options
@click.option("--operation", type=click.Choice(OPERATIONS), help="Rules with it.")
@place_options
@json_option
def list_(bootstrap: str, data_dir: str | None, as_json: bool, **given: Any) -> None:
    """List rules.

    \b
    Example:
      tailrace acl list --principal User:shop
    """
    with users_at(bootstrap, data_dir) as users:
        found = users.list_acls(_filter(given))
    if as_json:
        print_json(found)
    else:
        _print(found)


@command.command()
@click.option("--number", type=int, help="The rule of this number.")
@filter_options
@click.option(
    "--operation", "operations", multiple=True, type=click.Choice(OPERATIONS),
    help="Rules with it, repeatable.",
)  # fmt: skip
@click.option("--producer", is_flag=True, help="The rules of `acl add --producer`.")
@click.option("--consumer", is_flag=True, help="The rules of `acl add --consumer`.")
@click.option("--retries", is_flag=True, help="With --consumer: those of its retry topics too.")
@click.option("--prefix", "is_prefix", is_flag=True, help="Rules of prefixes.")
@click.option("--deny", is_flag=True, help="Rules that deny.")
@click.option("--host", help="Rules for this address.")
@resource_options
@place_options
@json_option
def remove(
    number: int | None, operations: tuple[str, ...], producer: bool, consumer: bool, retries: bool,
    is_prefix: bool, deny: bool, host: str | None, bootstrap: str, data_dir: str | None,
    as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """Remove rules: every one with all that is given. It takes the options of `acl add`. Exit
    status 1: no rule is such a one.

    \b
    Example:
      tailrace acl remove --number 7
      tailrace acl remove --principal User:shop
      tailrace acl remove --principal User:shop --producer --topic orders
    """
    chosen = _filter(
        {
            "number": number, "host": host, "pattern": "prefixed" if is_prefix else None,
            "permission": "deny" if deny else None,
            **{name: given[name] for name in ("principal", "resource_type", "name")},
        }
    )  # fmt: skip
    resources = _resources(given)
    filters = [{**chosen, "resource_type": kind, "name": name} for kind, name in resources]
    if producer or consumer:
        if given["principal"] is None:
            raise click.UsageError("--producer and --consumer need --principal")
        if operations:
            raise click.UsageError("--producer and --consumer name the operations themselves")
        pattern = "prefixed" if is_prefix else "literal"
        rules = _role(given["principal"], producer, consumer, retries, pattern, given)
        others: dict[str, Any] = {
            field: chosen[field] for field in ("host", "permission") if field in chosen
        }
        filters = [{"permission": "allow", **rule, **others} for rule in rules]
    elif resources and (given["name"] is not None or given["resource_type"] is not None):
        raise click.UsageError("--topic and the like give the type and the name: leave --name out")
    filters = filters or ([chosen] if chosen or operations else [])
    if operations:
        filters = [{**each, "operation": one} for each in filters for one in operations]
    if not filters:
        raise click.UsageError("say which rules: --number, --principal, ...")
    with users_at(bootstrap, data_dir) as users:
        removed = users.remove_acls(filters)
    if as_json:
        print_json(removed)
    else:
        _print(removed)
    if not removed:
        complain("no rule has all of that, and none was removed; see tailrace acl list")
        raise click.exceptions.Exit(FAILED)
    if not as_json:
        echo(f"removed {counted(len(removed), 'rule')}")


@command.command()
@click.argument("principal")
@click.argument("operation", type=click.Choice(OPERATIONS))
@click.argument("resource", metavar="TYPE:NAME")
@click.option("--host", default="*", help="Address that the client comes from.")
@place_options
@json_option
def test(
    principal: str, operation: str, resource: str, host: str, bootstrap: str,
    data_dir: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Say whether a user may do something, and by which rule. Exit status 0: yes, 1: no.

    \b
    Example:
      tailrace acl test User:shop write topic:orders
    """
    kind, separator, name = resource.partition(":")
    if kind in ("cluster", "console"):
        name = THE_CLUSTER
    elif not separator or kind not in RESOURCE_TYPES or not name:
        raise click.UsageError(f"{resource!r} is no resource; write topic:orders, or cluster")
    with users_at(bootstrap, data_dir) as users:
        found = users.test_acl(principal, operation, kind, name, host)
    if as_json:
        print_json(found)
    else:
        echo(f"{'yes' if found['allowed'] else 'no'}: {found['reason']}")
    if not found["allowed"]:
        raise click.exceptions.Exit(FAILED)


def _print(acls: list[dict[str, Any]]) -> None:
    print_table(
        ["NUMBER", "PRINCIPAL", "PERMISSION", "OPERATION", "RESOURCE", "NAME", "PATTERN", "HOST"],
        [
            [
                acl["number"], acl["principal"], acl["permission"], acl["operation"],
                acl["resource_type"], acl["name"], acl["pattern"], acl["host"],
            ]
            for acl in acls
        ],
    )  # fmt: skip
