"""`tailrace context`: names for addresses of appliances: add, use, list, show, remove."""

from __future__ import annotations

import os
from typing import Any

import click

from appliance.cli.contexts import (
    CONTEXT_VARIABLE,
    changing,
    check_address,
    check_name,
    contexts_path,
    load,
)
from appliance.cli.options import BOOTSTRAP_VARIABLE, complete_contexts, json_option
from appliance.cli.output import echo, print_json, print_table
from tailrace.client.config.settings import DEFAULT_BOOTSTRAP


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
@click.option(
    "--bootstrap",
    required=True,
    metavar="ADDRESS",
    help="tcp://HOST:PORT, HOST:PORT or ipc://PATH.",
)
@click.option("--use", is_flag=True, help="Use it from now on; the first one is used anyway.")
def add(name: str, bootstrap: str, use: bool) -> None:
    """Add a context, or change its address.

    \b
    Example:
      tailrace context add prod --bootstrap tcp://10.0.0.5:7420 --use
    """
    check_name(name)
    check_address(bootstrap)
    with changing() as contexts:
        is_new = name not in contexts.by_name
        contexts.by_name.setdefault(name, {})["bootstrap"] = bootstrap
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
        {"name": name, "bootstrap": found["bootstrap"], "current": name == chosen}
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
        ["", "NAME", "ADDRESS"],
        [["*" if row["current"] else "", row["name"], row["bootstrap"]] for row in rows],
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
    shown: dict[str, Any] = {
        "name": requested,
        "bootstrap": contexts.get(requested)["bootstrap"],
        "file": contexts_path(),
    }
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
