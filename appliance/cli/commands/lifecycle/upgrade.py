"""`tailrace upgrade`: starts the version that is installed now in the place of the running one."""

from __future__ import annotations

import os
import time
from typing import Any

import click

from appliance.cli.options.appliance_control import ask, control_directory, data_dir_option
from appliance.cli.options.shared import bootstrap_option, json_option
from appliance.cli.output import print_json
from tailrace import __version__, launcher
from tailrace.core.errors import InvalidSettingError, NotReachableError

START_TIMEOUT_S = 300
POLL_S = 0.05


@click.command()
@click.option(
    "--check", "is_check", is_flag=True, help="Show what would be done; stop and start nothing."
)
@data_dir_option
@bootstrap_option
@json_option
def command(is_check: bool, data_dir: str | None, bootstrap: str, as_json: bool) -> None:
    """Start the version that is installed now in the place of the running one: the appliance stops
    cleanly and starts again under the same process id, with the same options. Install the new
    version first, where the running one is installed.

    The configuration and the formats of the data directory are checked before anything is stopped.
    Clients reconnect by themselves.

    \b
    Example:
      pip install --upgrade tailrace && tailrace upgrade
    """
    directory = control_directory(data_dir, bootstrap)
    running = _last(directory, {"command": "describe"})
    _refuse_another_place(running)
    formats = _check(running)
    found = {"from": running["version"], "to": __version__, "formats": formats}
    if not as_json:
        click.echo(f"{running['version']} -> {__version__}")
        for change in formats:
            click.echo(
                f"{change['name']}: format {change['from']} -> {change['to']}; "
                f"{running['version']} cannot read it afterwards"
            )
    if is_check:
        if as_json:
            print_json(found)
        return
    begun = time.monotonic()
    _last(directory, {"command": "replace"})
    await_serving(directory, int(running["pid"]))
    seconds = time.monotonic() - begun
    if as_json:
        print_json({**found, "seconds": round(seconds, 3)})
    else:
        click.echo(f"serves again after {seconds:.2f} s")


def _last(directory: str, request: dict[str, Any]) -> dict[str, Any]:
    """The last event of a command."""
    *_, event = ask(directory, request)
    return event


def _refuse_another_place(running: dict[str, Any]) -> None:
    """The supervisor starts what is installed where it was started from."""
    here = os.path.dirname(os.path.abspath(launcher.__file__))
    if here != running["program"]:
        raise click.ClickException(
            f"the appliance runs from {running['program']}, this command from {here}. Install the "
            f"new version there, and run its command: {running['python']} -m tailrace upgrade"
        )


def _check(running: dict[str, Any]) -> list[dict[str, Any]]:
    """Check that this version takes the configuration and the data directories; the formats that
    it would write anew.
    """
    from appliance.config.settings_sources import (
        checked_settings,
        environment_settings,
        given_flags,
        parse_flags,
    )
    from appliance.config.topology import read_topology
    from appliance.data.directory_errors import DataDirectoryError
    from appliance.data.format_versions import changes

    os.environ.update(running["environment"])
    try:
        flags = parse_flags(running["flags"])
        config = flags.config and os.path.join(running["working_directory"], flags.config)
        checked_settings(config, environment_settings(), given_flags(flags), read_topology())
        found = [change for path in running["data_dirs"] for change in changes(path)]
    except (InvalidSettingError, DataDirectoryError) as error:
        raise click.ClickException(
            f"version {__version__} would refuse to start, so nothing was stopped: "
            f"{getattr(error, 'detail', error)}"
        ) from None
    return [{"name": name, "from": old, "to": new} for name, old, new in dict.fromkeys(found)]


def await_serving(directory: str, pid: int) -> None:
    """Wait until the appliance of this process id serves again.

    Raises NotReachableError if its process has ended.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        try:
            if _last(directory, {"command": "describe"})["serves"]:
                return
        except NotReachableError:
            if not os.path.exists(f"/proc/{pid}"):
                raise NotReachableError(
                    "the new version did not start; its log says why. Start the old one again: "
                    "its formats are unchanged unless the log names a change"
                ) from None
    raise NotReachableError(f"the new version does not serve after {START_TIMEOUT_S} s")
