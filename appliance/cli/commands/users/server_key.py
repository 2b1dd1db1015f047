"""`tailrace server-key`: the key that proves the appliance to its clients."""

from __future__ import annotations

from collections.abc import Callable

import click

from appliance.cli.commands.users.common import place_options, server_of
from appliance.cli.options.shared import json_option
from appliance.cli.output import echo, print_json
from shm.rights.server_keys import (
    KeyPair,
    KeysUnusableError,
    begin_rotation,
    finish_rotation,
    forget_former,
)

data_dir_option = click.option(
    "--data-dir", metavar="DIR", required=True, help="Data directory of the appliance."
)


@click.group()
def command() -> None:
    """The appliance's key: show its public half, which every context has, and rotate it.

    The first start with users makes it: DATA_DIR/server.key, for its owner alone. A rotation has
    two steps, between which clients learn the next key.

    \b
    Example:
      tailrace server-key rotate --data-dir /var/lib/tailrace
      tailrace restart front --data-dir /var/lib/tailrace
      tailrace server-key finish --data-dir /var/lib/tailrace
      tailrace restart front --data-dir /var/lib/tailrace
    """


@command.command()
@place_options
@json_option
def show(bootstrap: str, data_dir: str | None, as_json: bool) -> None:
    """Show the public server key: of a data directory, or the one that a context expects. Behind it
    are the next key while a rotation lasts, and the former key after one.

    \b
    Example:
      tailrace server-key show --data-dir /var/lib/tailrace
    """
    _, keys = server_of(bootstrap, data_dir, makes=False)
    if as_json:
        print_json({"server_keys": keys})
    else:
        click.echo("\n".join(keys))


@command.command()
@data_dir_option
@json_option
def rotate(data_dir: str, as_json: bool) -> None:
    """Make the next key. Clients learn it when they connect, and keep it in their context.

    The present key stays in force until `finish`. `tailrace restart` makes all clients connect
    again. A client that does not connect before `finish` needs a new context then.

    \b
    Example:
      tailrace server-key rotate --data-dir /var/lib/tailrace
    """
    _changed(begin_rotation, data_dir, as_json, "clients learn the next key when they connect")


@command.command()
@data_dir_option
@json_option
def finish(data_dir: str, as_json: bool) -> None:
    """Put the next key into force. `tailrace restart` has the appliance use it; what is connected
    until then goes on. Clients know the former key until the next rotation ends, or `forget`.

    \b
    Example:
      tailrace server-key finish --data-dir /var/lib/tailrace
    """
    _changed(finish_rotation, data_dir, as_json, "the appliance uses it from its next start on")


@command.command()
@data_dir_option
@json_option
def forget(data_dir: str, as_json: bool) -> None:
    """Have clients forget the former key when they connect. All fronts must have been restarted
    since `finish`.

    \b
    Example:
      tailrace server-key forget --data-dir /var/lib/tailrace
    """
    _changed(forget_former, data_dir, as_json, "clients forget the former key when they connect")


def _changed(change: Callable[[str], KeyPair], data_dir: str, as_json: bool, outcome: str) -> None:
    try:
        pair = change(data_dir)
    except (KeysUnusableError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if as_json:
        print_json({"public": pair.public})
    else:
        click.echo(pair.public)
        echo(outcome)
