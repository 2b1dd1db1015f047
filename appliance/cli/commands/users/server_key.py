"""`tailrace server-key`: the key that proves the appliance to its clients."""

from __future__ import annotations

import click

from appliance.cli.commands.users.common import place_options, server_of
from appliance.cli.options.shared import json_option
from appliance.cli.output import echo, print_json


@click.group()
def command() -> None:
    """The public half of the appliance's key, which every context has.

    The first start with users makes it: DATA_DIR/server.key, for its owner alone.

    \b
    Example:
      tailrace server-key show --data-dir /var/lib/tailrace
    """


@command.command()
@place_options
@json_option
def show(bootstrap: str, data_dir: str | None, as_json: bool) -> None:
    """Show the public server key: of a data directory, or the one that a context expects.

    \b
    Example:
      tailrace server-key show --data-dir /var/lib/tailrace
    """
    _, keys = server_of(bootstrap, data_dir, makes=False)
    if as_json:
        print_json({"server_keys": keys})
    else:
        echo("\n".join(keys))
