"""`tailrace token`: tokens by which scrapers read the metrics."""

from __future__ import annotations

import datetime as dt
import os
import time

import click

from appliance.cli.options.shared import json_option
from appliance.cli.output import counted, echo, print_json, print_table
from appliance.data.directory_errors import DataDirectoryError, refuse_without_catalog
from appliance.observe.console.access.scraper_tokens import (
    SCOPES,
    add_token,
    read_tokens,
    remove_token,
)
from tailrace.core.errors import InvalidSettingError
from tailrace.core.units import duration_ms


def _existing(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    if not os.path.isdir(value):
        raise click.BadParameter(
            f"there is no directory {value}: name the data directory of the appliance"
        )
    try:
        refuse_without_catalog(value)
    except DataDirectoryError as error:
        raise click.BadParameter(str(error)) from None
    return value


data_dir_option = click.option(
    "--data-dir", metavar="DIR", required=True, callback=_existing,
    help="Data directory of the appliance.",
)  # fmt: skip
US_PER_MS = 1_000


@click.group()
def command() -> None:
    """Tokens of scrapers, which read /metrics of an appliance that requires users.

    They are made on the host of the appliance, by the account that owns its data directory, which
    keeps their hashes.

    \b
    Example:
      tailrace token add prometheus --data-dir /var/lib/tailrace
      tailrace token list --data-dir /var/lib/tailrace
    """


@command.command()
@click.argument("name")
@data_dir_option
@click.option("--scope", type=click.Choice(SCOPES), default=SCOPES[0], help="What it may read.")
@click.option(
    "--expires", metavar="TIME", help="Time until it expires, such as 90d. Default: never."
)
@json_option
def add(name: str, data_dir: str, scope: str, expires: str | None, as_json: bool) -> None:
    """Make the token NAME, and print it once.

    \b
    Example:
      tailrace token add prometheus --data-dir /var/lib/tailrace --expires 365d
    """
    now_us = time.time_ns() // 1_000
    expires_us = 0
    if expires is not None:
        lasts_ms = duration_ms(expires)
        if not lasts_ms:
            raise InvalidSettingError(f"--expires is {expires!r}; write a time such as 90d or 12h")
        expires_us = now_us + lasts_ms * US_PER_MS
    try:
        text = add_token(data_dir, name, scope, expires_us, now_us)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json({"name": name, "scope": scope, "expires_us": expires_us, "token": text})
    else:
        click.echo(text)


@command.command("list")
@data_dir_option
@json_option
def show(data_dir: str, as_json: bool) -> None:
    """List the tokens, without their text, which is not kept.

    \b
    Example:
      tailrace token list --data-dir /var/lib/tailrace
    """
    try:
        tokens = read_tokens(data_dir)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json({"tokens": [token._asdict() for token in tokens]})
        return
    now_us = time.time_ns() // 1_000
    print_table(
        ["name", "scope", "created", "expires"],
        [
            [
                token.name, token.scope, _moment(token.created_us),
                "never" if not token.expires_us
                else "expired" if token.has_expired(now_us) else _moment(token.expires_us),
            ]
            for token in tokens
        ],
    )  # fmt: skip
    echo(counted(len(tokens), "token"))


@command.command()
@click.argument("name")
@data_dir_option
def remove(name: str, data_dir: str) -> None:
    """Remove the token NAME. It is refused from the next request on.

    \b
    Example:
      tailrace token remove prometheus --data-dir /var/lib/tailrace
    """
    try:
        was_there = remove_token(data_dir, name)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if not was_there:
        raise click.ClickException(
            f"there is no token {name!r}; `tailrace token list --data-dir {data_dir}` shows them"
        )
    echo(f"token {name} removed")


def _moment(time_us: int) -> str:
    return f"{dt.datetime.fromtimestamp(time_us // 1_000_000, dt.UTC):%Y-%m-%dT%H:%M:%SZ}"
