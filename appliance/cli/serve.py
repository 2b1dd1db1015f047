"""`tailrace serve`: becomes the supervisor."""

from __future__ import annotations

import os
import sys

import click

from tailrace import launcher


@click.command()
@click.option("--config", type=click.Path(dir_okay=False), help="Settings as TOML.")
@click.option("--data-dir", help="Where the log and the catalog live (setting data_dirs; default ./tailrace-data).")
@click.option(
    "--listen", multiple=True, help="Where clients connect, repeatable: tcp://HOST:PORT or ipc://PATH (default tcp://127.0.0.1:7420)."
)
@click.option("--set", "assignments", multiple=True, metavar="NAME=VALUE", help="Any setting, repeatable: --set flush.linger_ms=2.")
def command(config: str | None, data_dir: str | None, listen: tuple[str, ...], assignments: tuple[str, ...]) -> None:
    """Run the appliance in the foreground until SIGTERM or Ctrl-C.

    \b
    Example:
      tailrace serve --data-dir /var/lib/tailrace --listen tcp://127.0.0.1:7420

    \b
    Exit status:
       0  stopped cleanly: everything drained, flushed and synced
       1  stopped, but something had to be killed; the next start puts it right
       2  a setting is wrong
      72  the address is in use
      73  the data directory cannot be used (in use, not writable, damaged)
      75  /dev/shm has no room for the rings
    """
    arguments = launcher.command("appliance.supervisor")
    for name, value in (("--config", config), ("--data-dir", data_dir)):
        if value is not None:
            arguments += [name, value]
    for address in listen:
        arguments += ["--listen", address]
    for assignment in assignments:
        arguments += ["--set", assignment]
    sys.stdout.flush()
    # A fresh interpreter: the supervisor carries neither this command line nor what it imports.
    os.execv(arguments[0], arguments)
