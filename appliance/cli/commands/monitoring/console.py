"""`tailrace console`: the address of the console, with the token that allows changes."""

from __future__ import annotations

import urllib.request

import click

from appliance.cli.options.shared import bootstrap_option, connect, json_option
from appliance.cli.output import print_json

TIMEOUT_S = 20.0


@click.command()
@bootstrap_option
@json_option
def command(bootstrap: str, as_json: bool) -> None:
    """Print the address of the console for a browser on this host.

    The address has the token that allows changes if you may read the data directory; without it
    the console is read only. The token stays in the browser's tab and is never sent with a page.

    \b
    Example:
      tailrace console
    """
    from appliance.observe.console.access.token import read_token

    with connect(bootstrap) as admin:
        state = admin.describe_cluster()
    address = state.get("console")
    if not address:
        raise click.ClickException(
            "this appliance has no console; set http.listen, for example to 127.0.0.1:7400"
        )
    try:
        with urllib.request.urlopen(f"{address}/", timeout=TIMEOUT_S):
            pass  # the console makes the token with its first request
        token = read_token(state["data_dirs"][0]["path"])
    except OSError:
        token = None
    if as_json:
        print_json({"console": address, "token": token})
        return
    click.echo(f"{address}/#token={token}" if token else address)
    if token is None:
        click.echo(
            "read only: run this on the appliance's host, as a user who may read its data "
            "directory, for an address that allows changes; or append #token= and the token that "
            "was given to the service as a credential",
            err=True,
        )
