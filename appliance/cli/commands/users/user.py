"""`tailrace user`: who may connect, and with which keys."""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from appliance.cli.commands.users.common import (
    given_password,
    new_key_pair,
    password_fields,
    password_options,
    place_options,
    server_of,
    users_at,
    write_new_context,
)
from appliance.cli.options.shared import Duration, json_option
from appliance.cli.output import echo, print_json, print_table
from shm.rights.roles import CONSUMER, PRODUCER, consumer_acls, producer_acls
from tailrace.admin.users import UserAdmin
from tailrace.client.connections.credentials import SCHEME, resolve
from tailrace.core.errors import NotAuthenticatedError, NotAuthorizedError
from tailrace.core.units import shown_duration

T = TypeVar("T")

ROLES = ("admin", PRODUCER, CONSUMER)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


@click.group()
def command() -> None:
    """Users: add, list, set, disable, enable, delete, their keys and passwords.

    An appliance requires users when security.enabled says so, which it does by itself when other
    hosts reach it. The first start makes the administrator's context DATA_DIR/admin.context.

    \b
    Example:
      tailrace user add billing --role consumer --topic orders --group billing --out billing.context
      TAILRACE_CONTEXT=./billing.context tailrace consume orders --group billing
    """


@command.command()
@click.argument("name")
@click.option("--out", metavar="FILE", help="Make a key, and write a context with it (mode 0600).")
@click.option("--public-key", metavar="KEY", help="A key that was made elsewhere.")
@click.option("--key-name", default="first", show_default=True, help="Name of the key.")
@click.option("--expires", type=Duration(), help="The key expires after this time, such as 90d.")
@click.option("--role", type=click.Choice(ROLES), help="What the user may do.")
@click.option("--topic", "topics", multiple=True, help="Topic of the role, repeatable.")
@click.option("--group", "group", help="Consumer group of the role.")
@click.option("--prefix", "is_prefix", is_flag=True, help="The names are prefixes.")
@click.option("--member-of", multiple=True, metavar="GROUP", help="Group of users, repeatable.")
@click.option("--account", multiple=True, help="Account of the appliance's host, repeatable.")
@click.option(
    "--external",
    is_flag=True,
    help="A certificate or a token of another authority says who it is (Kafka clients).",
)
@click.option("--address", help="Address in the context; that of this command if not given.")
@password_options
@place_options
@json_option
def add(
    name: str, out: str | None, public_key: str | None, key_name: str, expires: dt.timedelta | None,
    role: str | None, topics: tuple[str, ...], group: str | None, is_prefix: bool,
    member_of: tuple[str, ...], account: tuple[str, ...], external: bool, address: str | None,
    asks_password: bool, password_file: str | None, password_stdin: bool, bootstrap: str,
    data_dir: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Add a user. The secret key of its context is made here and never sent. A password is for
    Kafka clients and the console; what is sent proves it without telling it.

    \b
    Example:
      tailrace user add shop --role producer --topic orders --out shop.context
      tailrace user add legacy --password --role consumer --topic orders --group legacy
      tailrace user add backup --account backup --role admin
      tailrace user add robot --external --role producer --topic orders
    """
    password = given_password(asks_password, password_file, password_stdin)
    has_key = out is not None or public_key is not None
    if not (has_key or account or external or password is not None):
        raise click.UsageError(
            "a user without a key cannot connect: give --out FILE, --public-key KEY, --account, "
            "--password (for Kafka clients and the console), or --external (for Kafka clients with "
            "a certificate or a token)"
        )
    if out is not None and public_key is not None:
        raise click.UsageError("--out makes a key, so leave --public-key out")
    acls = _acls_of(f"User:{name}", role, topics, group, is_prefix)
    secret = ""
    server = ("", [""])
    credentials = {} if password is None else password_fields(password)
    if out is not None:
        server = server_of(bootstrap, data_dir)
        if os.path.lexists(out):
            raise click.ClickException(f"{out} exists already: name another file")
        public_key, secret = new_key_pair()
    with users_at(bootstrap, data_dir) as users:
        found = users.add_user(
            name, public_key=public_key, key_name=key_name, expires=_at(expires),
            admin=role == "admin", groups=member_of, accounts=account,
            **credentials,
        )  # fmt: skip
        if acls:
            users.add_acls(acls)
        inherited = _rules_of(users, name) if role is None else []
    if out is not None:
        write_new_context(out, _context(name, address or server[0], server[1], public_key, secret))
    if as_json:
        print_json({**found, "context": out})
        return
    echo(f"added {name}{f', whose context is {out}' if out else ''}")
    if inherited:
        rules = "1 ACL that names" if len(inherited) == 1 else f"{len(inherited)} ACLs that name"
        echo(f"{name} has {rules} it already: `tailrace acl list --principal User:{name}`")
    elif role is None:
        echo(f"{name} may do nothing yet: `tailrace acl add --principal User:{name} ...` allows it")


def _context(
    name: str, address: str, server_keys: Sequence[str], public: str | None, secret: str
) -> dict[str, Any]:
    return {
        "user": name, "bootstrap": address, "server_keys": list(server_keys),
        "public_key": public, "secret_key": secret,
    }  # fmt: skip


def _acls_of(
    principal: str, role: str | None, topics: Sequence[str], group: str | None, is_prefix: bool
) -> list[dict[str, Any]]:
    if role in (PRODUCER, CONSUMER) and not topics:
        raise click.UsageError(f"--role {role} needs --topic")
    if role == CONSUMER and group is None:
        raise click.UsageError("--role consumer needs --group")
    if role in (None, "admin") and (topics or group):
        raise click.UsageError("--topic and --group belong to --role producer and consumer")
    pattern = "prefixed" if is_prefix else "literal"
    acls: list[dict[str, Any]] = []
    for topic in topics:
        if role == PRODUCER:
            acls += producer_acls(principal, topic, pattern=pattern)
        else:
            acls += consumer_acls(principal, topic, group or "", pattern=pattern)
    return acls


def _at(after: dt.timedelta | None) -> dt.datetime | None:
    return None if after is None else dt.datetime.now(dt.UTC) + after


@command.command(name="list")
@click.argument("name", required=False)
@place_options
@json_option
def list_(name: str | None, bootstrap: str, data_dir: str | None, as_json: bool) -> None:
    """List users, or one with its keys.

    \b
    Example:
      tailrace user list
    """
    with users_at(bootstrap, data_dir) as users:
        found = users.list_users(name)
    if as_json:
        print_json(found)
        return
    now = dt.datetime.now(dt.UTC)
    print_table(
        ["USER", "STATE", "ROLE", "GROUPS", "ACCOUNTS", "PASSWORD", "KEYS"],
        [
            [
                user["name"], "disabled" if user["disabled"] else "enabled",
                "admin" if user["admin"] else "", ", ".join(user["groups"]),
                ", ".join(map(str, user["accounts"])),
                "yes" if user["has_password"] else ", ".join(user["scram"]),
                ", ".join(_shown_key(key, now) for key in user["keys"]),
            ]
            for user in found
        ],
    )  # fmt: skip


def _shown_key(key: dict[str, Any], now: dt.datetime) -> str:
    if not key["expires_us"]:
        return str(key["name"])
    end = _EPOCH + dt.timedelta(microseconds=key["expires_us"])
    word = "expired" if end <= now else "until"
    return f"{key['name']} ({word} {end:%Y-%m-%d %H:%M}Z)"


@command.command(name="set")
@click.argument("name")
@click.option("--admin/--no-admin", default=None, help="Whether it may do everything.")
@click.option("--member-of", multiple=True, metavar="GROUP", help="Its groups of users.")
@click.option("--account", multiple=True, help="Its accounts of the appliance's host.")
@click.option("--force", is_flag=True, help="Even for the last administrator.")
@place_options
@json_option
def set_(
    name: str, admin: bool | None, member_of: tuple[str, ...], account: tuple[str, ...],
    force: bool, bootstrap: str, data_dir: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Change a user. What is not given stays.

    \b
    Example:
      tailrace user set billing --member-of finance --account 1001
    """
    with users_at(bootstrap, data_dir) as users:
        found = _or_own_end(
            lambda: users.alter_user(
                name, admin=admin, groups=member_of or None, accounts=account or None, force=force
            ), name, bootstrap, data_dir,
        )  # fmt: skip
    _report(found, f"changed {name}", as_json)


@command.command()
@click.argument("name")
@click.option("--remove", is_flag=True, help="The user has no password from now on.")
@password_options
@click.option("--force", is_flag=True, help="Even for the last administrator.")
@place_options
@json_option
def passwd(
    name: str, remove: bool, asks_password: bool, password_file: str | None, password_stdin: bool,
    force: bool, bootstrap: str, data_dir: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Set the password of a user, for Kafka clients and the console. Connections that were let in
    with the former one end within a second.

    \b
    Example:
      tailrace user passwd billing
      tailrace user passwd billing --password-file /run/secrets/billing
    """
    if remove and (asks_password or password_file or password_stdin):
        raise click.UsageError("--remove takes no password")
    fields: dict[str, Any] = {"password_hash": "", "scram_credentials": []}
    if not remove:
        asks = asks_password or not (password_file or password_stdin)
        fields = password_fields(given_password(asks, password_file, password_stdin) or "")
    with users_at(bootstrap, data_dir) as users:
        found = users.alter_user(name, **fields, force=force)
    _report(found, f"{name} has {'no' if remove else 'a new'} password", as_json)


@command.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Even for the last administrator.")
@place_options
@json_option
def disable(name: str, force: bool, bootstrap: str, data_dir: str | None, as_json: bool) -> None:
    """Refuse a user, and end its connections, within a second.

    \b
    Example:
      tailrace user disable billing
    """
    with users_at(bootstrap, data_dir) as users:
        found = _or_own_end(
            lambda: users.disable_user(name, force=force), name, bootstrap, data_dir
        )
    _report(found, f"disabled {name}", as_json)


@command.command()
@click.argument("name")
@place_options
@json_option
def enable(name: str, bootstrap: str, data_dir: str | None, as_json: bool) -> None:
    """Accept a user again that was disabled.

    \b
    Example:
      tailrace user enable billing
    """
    with users_at(bootstrap, data_dir) as users:
        found = users.enable_user(name)
    _report(found, f"enabled {name}", as_json)


@command.command()
@click.argument("name")
@click.option("--acls", "with_acls", is_flag=True, help="Remove the ACLs that name it, too.")
@click.option("--force", is_flag=True, help="Even for the last administrator.")
@place_options
@json_option
def delete(
    name: str, with_acls: bool, force: bool, bootstrap: str, data_dir: str | None, as_json: bool
) -> None:
    """Delete a user, and end its connections. A user of the same name has its ACLs, unless they are
    removed.

    \b
    Example:
      tailrace user delete billing --acls
    """
    with users_at(bootstrap, data_dir) as users:
        named = {"principal": f"User:{name}"}
        kept = _rules_of(users, name)
        is_over = _or_own_end(
            lambda: users.delete_user(name, force=force), name, bootstrap, data_dir
        )  # fmt: skip
        removed = users.remove_acls([named]) if with_acls and is_over is None else []
    if as_json:
        print_json({"deleted": name, "removed_acls": removed})
        return
    echo(f"deleted {name}" + (f" and {len(removed)} ACLs" if removed or with_acls else ""))
    left = len(kept) - len(removed)
    if left:
        stays = "ACL that names it stays" if left == 1 else "ACLs that name it stay"
        echo(
            f"{left} {stays}, for a user of the same name: --acls removes them, or "
            f"`tailrace acl remove --principal User:{name}`"
        )


@command.command()
@click.argument("name")
@click.option("--out", required=True, metavar="FILE", help="The new context.")
@click.option("--key-name", metavar="KEY", help="Name of the new key; the time if not given.")
@click.option("--expires", type=Duration(), help="The new key expires after this time.")
@click.option(
    "--overlap", type=Duration(), default="1d", show_default=True,
    help="The other keys are accepted for this time.",
)  # fmt: skip
@click.option("--address", help="Address in the context; that of this command if not given.")
@place_options
@json_option
def rotate(
    name: str, out: str, key_name: str | None, expires: dt.timedelta | None,
    overlap: dt.timedelta, address: str | None, bootstrap: str, data_dir: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Give a user a new key. Its other keys expire after the overlap.

    \b
    Example:
      tailrace user rotate billing --out billing-2.context --overlap 7d
    """
    server = server_of(bootstrap, data_dir)
    if os.path.lexists(out):
        raise click.ClickException(f"{out} exists already: name another file")
    public, secret = new_key_pair()
    now = dt.datetime.now(dt.UTC)
    with users_at(bootstrap, data_dir) as users:
        found = users.add_user_key(
            name, key_name or f"{now:%Y%m%dT%H%M%S}", public, expires=_at(expires),
            others_expire=now + overlap,
        )  # fmt: skip
    write_new_context(out, _context(name, address or server[0], server[1], public, secret))
    shown = shown_duration(overlap // dt.timedelta(microseconds=1))
    _report(found, f"{name} has a new key, in {out}; the others expire in {shown}", as_json)


@command.command(name="remove-key")
@click.argument("name")
@click.argument("key")
@click.option("--force", is_flag=True, help="Even for the last administrator.")
@place_options
@json_option
def remove_key(
    name: str, key: str, force: bool, bootstrap: str, data_dir: str | None, as_json: bool
) -> None:
    """Remove a key, and end the connections that use it.

    \b
    Example:
      tailrace user remove-key billing first
    """
    with users_at(bootstrap, data_dir) as users:
        found = users.remove_user_key(name, key, force=force)
    _report(found, f"removed the key {key} of {name}", as_json)


def _rules_of(users: UserAdmin, name: str) -> list[dict[str, Any]]:
    """The rules that name the user; none if who asks may not see them."""
    try:
        return users.list_acls({"principal": f"User:{name}"})
    except NotAuthorizedError:
        return []


def _or_own_end(
    change: Callable[[], T], name: str, bootstrap: str, data_dir: str | None
) -> T | dict[str, Any]:
    """Make a change. One that ends the user who makes it ends its connection before the answer:
    the refusal that follows says that it is done.
    """
    try:
        return change()
    except NotAuthenticatedError:
        if data_dir is not None or not bootstrap.startswith(SCHEME):
            raise
        own = resolve(bootstrap).credentials
        if own is None or own.user != name:
            raise
    echo(
        f"you were {name}: the way back is the appliance's host, as its account, "
        "`tailrace user add NAME --role admin --out FILE --data-dir DIR` (or user enable, user set)"
    )
    return {"user": name, "ended": True}


def _report(found: dict[str, Any], sentence: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        echo(sentence)
