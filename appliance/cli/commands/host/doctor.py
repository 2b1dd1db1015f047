"""`tailrace doctor`: problems of this host and of the running appliance, each with its remedy."""

from __future__ import annotations

import click

from appliance.cli.options import bootstrap_option, connect, json_option
from appliance.cli.output import print_json, print_table
from appliance.observe.doctor_checks import Check, Level, appliance_checks, host_checks
from tailrace.core.errors import NotReachableError


@click.command()
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(),
    help="Data directory to check when no appliance runs; repeatable.",
)
@bootstrap_option
@json_option
@click.pass_context
def command(ctx: click.Context, data_dirs: tuple[str, ...], bootstrap: str, as_json: bool) -> None:
    """Find problems: cores, shared memory, limits, disks, damage, offline partitions.

    Exit status 1 if there is one.

    \b
    Example:
      tailrace doctor
    """
    checks: list[Check] = []
    directories = list(data_dirs)
    try:
        with connect(bootstrap) as admin:
            state = admin.describe_cluster()
        checks += appliance_checks(state)
        directories += [d["path"] for d in state["data_dirs"] if d["path"] not in directories]
    except NotReachableError:
        level = Level.WARNING if data_dirs else Level.PROBLEM
        checks.append(
            Check(
                "appliance",
                level,
                f"no appliance answers at {bootstrap}; start one with `tailrace serve`, or name "
                "its directories with --data-dir",
            )
        )
    checks += host_checks(directories)
    if as_json:
        print_json([{"check": c.name, "level": c.level.value, "detail": c.detail} for c in checks])
    else:
        print_table(
            ["CHECK", "LEVEL", "DETAIL"],
            [[c.name, c.level.value, c.detail] for c in checks],
            wrap=["DETAIL"],
        )
    ctx.exit(1 if any(c.level is Level.PROBLEM for c in checks) else 0)
