"""`tailrace context`: names for addresses of appliances: add, use, list, show, remove."""

from __future__ import annotations

import os
from typing import Any

import click

from appliance.cli.options.contexts import (
    CONTEXT_VARIABLE,
    changing,
    check_address,
    check_name,
    is_file,
    load,
)
from appliance.cli.options.shared import BOOTSTRAP_VARIABLE, complete_contexts, json_option
from appliance.cli.output import echo, print_json, print_table
from tailrace.client.config.settings import DEFAULT_BOOTSTRAP
from tailrace.client.connections.credentials import SCHEME, contexts_path, resolve


@click.group()
def command() -> None:
    """Keep the addresses of appliances under names, and say which one commands speak to.

    An address comes from --bootstrap, else TAILRACE_BOOTSTRAP, else the context that
    TAILRACE_CONTEXT names, else the context in use, else the default. The contexts are in
    $XDG_CONFIG_HOME/tailrace/contexts.json (~/.config), which its user alone can read.

    \b
    Example:
      tailrace context add prod --bootstrap tcp://10.0.0.5:7420
      tailrace context use prod
      TAILRACE_CONTEXT=test tailrace topic list
    """


@command.command()
@click.argument("name")
@click.argument("file", required=False, type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--bootstrap",
    metavar="ADDRESS",
    help="tcp://HOST:PORT, HOST:PORT or ipc://PATH.",
)
@click.option("--use", is_flag=True, help="Use it from now on; the first one is used anyway.")
def add(name: str, file: str | None, bootstrap: str | None, use: bool) -> None:
    """Add a context, or change its address. FILE is one that `tailrace user add --out` has made:
    its keys are copied.

    \b
    Example:
      tailrace context add prod --bootstrap tcp://10.0.0.5:7420 --use
      tailrace context add prod shop.context
    """
    check_name(name)
    content: dict[str, Any] = {}
    if file is not None:
        target = resolve(f"{SCHEME}{os.path.abspath(file)}")
        content = {"bootstrap": target.address}
        if target.credentials is not None:
            content |= target.credentials._asdict()
            content["server_keys"] = list(target.credentials.server_keys)
    if bootstrap is not None:
        content["bootstrap"] = bootstrap
    if not content:
        raise click.UsageError("give FILE or --bootstrap ADDRESS")
    bootstrap = str(content["bootstrap"])
    check_address(bootstrap)
    with changing() as contexts:
        is_new = name not in contexts.by_name
        contexts.by_name.setdefault(name, {}).update(content)
        if use or len(contexts.by_name) == 1:
            contexts.current = name
        is_used = contexts.current == name
    echo(
        f"{'added' if is_new else 'changed'} {name}, "
        f"{bootstrap}{', and it is in use' if is_used else ''}"
    )


@command.command()
@click.argument("name", shell_complete=complete_contexts)
def use(name: str) -> None:
    """Use this context's appliance from now on.

    \b
    Example:
      tailrace context use prod
    """
    with changing() as contexts:
        address = contexts.get(name)["bootstrap"]
        contexts.current = name
    echo(f"using {name}, {address}")
    _warn_overridden()


@command.command(name="list")
@json_option
def list_(as_json: bool) -> None:
    """List contexts; * marks the one that commands use.

    \b
    Example:
      tailrace context list --json
    """
    contexts = load()
    chosen = contexts.chosen()
    rows = [
        {
            "name": name,
            "bootstrap": found["bootstrap"],
            "user": found.get("user"),
            "current": name == chosen,
        }
        for name, found in sorted(contexts.by_name.items())
    ]
    if as_json:
        print_json(rows)
        return
    if not rows:
        echo(
            f"no contexts yet; commands use {DEFAULT_BOOTSTRAP}. Make one with `tailrace context "
            "add NAME --bootstrap ADDRESS`"
        )
        return
    print_table(
        ["", "NAME", "ADDRESS", "USER"],
        [
            ["*" if row["current"] else "", row["name"], row["bootstrap"], row["user"] or ""]
            for row in rows
        ],
    )
    _warn_overridden()


@command.command()
@click.argument("name", required=False, shell_complete=complete_contexts)
@json_option
def show(name: str | None, as_json: bool) -> None:
    """Show a context: the one that commands use, or another.

    \b
    Example:
      tailrace context show
    """
    contexts = load()
    requested = contexts.chosen() if name is None else name
    if requested is None:
        raise click.UsageError(f"no context is in use; commands use {DEFAULT_BOOTSTRAP}")
    if is_file(requested):
        bootstrap, path = resolve(f"{SCHEME}{requested}").address, requested
    else:
        bootstrap, path = contexts.get(requested)["bootstrap"], contexts_path()
    shown: dict[str, Any] = {"name": requested, "bootstrap": bootstrap, "file": path}
    if as_json:
        print_json(shown)
        return
    for title, value in shown.items():
        click.echo(f"{title:<10} {value}")
    _warn_overridden()


@command.command()
@click.argument("name", shell_complete=complete_contexts)
def remove(name: str) -> None:
    """Remove a context.

    \b
    Example:
      tailrace context remove prod
    """
    with changing() as contexts:
        contexts.get(name)
        del contexts.by_name[name]
        was_used = contexts.current == name
        if was_used:
            contexts.current = None
    note = f"; no context is in use now, commands use {DEFAULT_BOOTSTRAP}" if was_used else ""
    echo(f"removed {name}{note}")


def _warn_overridden() -> None:
    """Warn if an environment variable overrides the context in use."""
    for variable in (BOOTSTRAP_VARIABLE, CONTEXT_VARIABLE):
        if os.environ.get(variable):
            echo(f"{variable}={os.environ[variable]} is set and wins over the context in use")
            return
