"""`tailrace reload`: the running appliance reads its configuration again."""

from __future__ import annotations

import sys

import click

from appliance.cli.options.shared import bootstrap_option, connect, json_option
from appliance.cli.output import complain, print_json

EXIT_WRONG = 2
"""Exit status for a wrong configuration, as of `tailrace serve`."""
EXIT_NOT_APPLIED = 1


@click.command()
@bootstrap_option
@json_option
def command(bootstrap: str, as_json: bool) -> None:
    """Have the appliance read its files again, as SIGHUP does, and apply what may change while it
    runs.

    With an error in them nothing changes, and the exit status is 2.

    \b
    Example:
      tailrace config check /etc/tailrace/tailrace.toml && tailrace reload
    """
    with connect(bootstrap) as admin:
        report = admin.reload_config()
    if as_json:
        print_json(report)
    else:
        for error in report["errors"]:
            complain(error)
        if report["errors"]:
            complain("nothing was changed")
        else:
            click.echo(f"changed: {', '.join(report['changed']) or 'nothing'}")
        if report["restart"]:
            click.echo(f"needs a restart: {', '.join(report['restart'])}")
        if report.get("overridden"):  # an older appliance does not say it
            names = report["overridden"]
            click.echo(
                f"overridden by `config set`: {', '.join(names)}; to use the configuration's: "
                f"tailrace config unset {' '.join(names)}"
            )
        if report["not_applied"]:
            complain(f"not applied yet by {', '.join(report['not_applied'])}")
    if report["errors"]:
        sys.exit(EXIT_WRONG)
    if report["not_applied"]:
        sys.exit(EXIT_NOT_APPLIED)
