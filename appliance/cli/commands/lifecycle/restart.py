"""`tailrace restart`: restarts the processes of an appliance on this host, one after the other."""

from __future__ import annotations

from typing import Any

import click

from appliance.cli.options.appliance_control import ask, control_directory, data_dir_option
from appliance.cli.options.shared import bootstrap_option, json_option
from appliance.cli.output import print_json


@click.command()
@click.argument("processes", nargs=-1, metavar="[PROCESS]...")
@data_dir_option
@bootstrap_option
@json_option
def command(
    processes: tuple[str, ...], data_dir: str | None, bootstrap: str, as_json: bool
) -> None:
    """Restart the processes of the appliance, one after the other, each when the one before serves
    again. PROCESS is a name of `tailrace status` (front-0) or a kind (front); default: all.

    Clients reconnect by themselves. A change of topics that is under way while the controller ends
    has an unknown outcome, and its client is told. The processes run the code that the
    appliance was started with; `tailrace upgrade` starts another version.

    \b
    Example:
      tailrace restart
      tailrace restart worker-0 flusher
    """
    directory = control_directory(data_dir, bootstrap)
    restarted: list[dict[str, Any]] = []
    total_ms, count = 0, 0
    for event in ask(directory, {"command": "restart", "processes": list(processes)}):
        total_ms, count = event.get("ms", total_ms), event.get("of", count)
        if event.get("state") == "serving":
            restarted.append({name: event[name] for name in ("process", "pid", "ms")})
            if not as_json:
                click.echo(
                    f"{len(restarted)}/{count}  {event['process']} serves after {event['ms']} ms"
                )
    if as_json:
        print_json({"restarted": restarted, "ms": total_ms})
    else:
        click.echo(f"restarted in {total_ms / 1000:.2f} s")
