"""`tailrace doctor`: problems of this host and of the running appliance, each with its remedy; and
the support archive.
"""

from __future__ import annotations

import os
from typing import Any

import click

from appliance.cli.options.config_sources import config_path, file_options
from appliance.cli.options.found_settings import FoundSettings
from appliance.cli.options.shared import (
    STATE_OF_SETTINGS,
    bootstrap_option,
    connect,
    json_option,
    unless_refused,
)
from appliance.cli.output import counted, echo, print_json, print_table
from appliance.config.settings import definitions
from appliance.observe.checks.doctor_checks import (
    Check,
    Level,
    appliance_checks,
    groups_error,
    host_checks,
    settings_state,
)
from appliance.observe.checks.host_tuning import tuning_checks
from tailrace.core.errors import NotReachableError


@click.command()
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    type=click.Path(),
    help="Data directory to check when no appliance runs; repeatable.",
)
@click.option(
    "--bundle",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Also write a support archive (.tar.gz or .tar.zst): settings, status, metrics, versions, "
    "the end of the log, facts of the host; no payloads, keys or secrets.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    help="File with the log, for --bundle; repeatable. Without: the journal of tailrace's units.",
)
@file_options
@bootstrap_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    data_dirs: tuple[str, ...],
    bundle: str | None,
    logs: tuple[str, ...],
    config: str | None,
    instance: str | None,
    no_config: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Find problems: cores, shared memory, limits, kernel settings, disks, damage, offline
    partitions.

    Exit status 1 if there is one.

    \b
    Example:
      tailrace doctor
      tailrace doctor --bundle /tmp/support.tar.gz
    """
    if bundle is not None and not bundle.endswith((".tar.gz", ".tgz", ".tar.zst")):
        raise click.UsageError(f"--bundle is {bundle!r}; the name ends with .tar.gz or .tar.zst")
    if bundle is not None and os.path.lexists(bundle):
        raise click.UsageError(f"--bundle is {bundle!r}, which exists; choose another name")
    checks: list[Check] = []
    directories = list(data_dirs)
    cluster: dict[str, Any] | None = None
    try:
        with connect(bootstrap) as admin:
            cluster = admin.describe_cluster()
            cluster["groups_error"] = groups_error(admin)
            cluster["settings"] = unless_refused(lambda: settings_state(admin), STATE_OF_SETTINGS)
        checks += appliance_checks(cluster)
        directories += [d["path"] for d in cluster["data_dirs"] if d["path"] not in directories]
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
    checks += tuning_checks(directories, _local_supervisor(cluster))
    if as_json:
        print_json([{"check": c.name, "level": c.level.value, "detail": c.detail} for c in checks])
    else:
        print_table(
            ["CHECK", "LEVEL", "DETAIL"],
            [[c.name, c.level.value, c.detail] for c in checks],
            wrap=["DETAIL"],
        )
    if bundle is not None:
        _write_bundle(
            bundle, checks, config_path(config, instance, no_config), cluster, bootstrap,
            directories, logs,
        )  # fmt: skip
    ctx.exit(1 if any(c.level is Level.PROBLEM for c in checks) else 0)


def _local_supervisor(cluster: dict[str, Any] | None) -> int | None:
    """The supervisor's pid, if it runs on this host."""
    if cluster is None:
        return None
    pid = next((p["pid"] for p in cluster["processes"] if p["name"] == "supervisor"), 0)
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            return int(pid) if file.read().startswith("tr-supervisor") else None
    except OSError:
        return None


def _write_bundle(
    path: str,
    checks: list[Check],
    file: str | None,
    cluster: dict[str, Any] | None,
    bootstrap: str,
    directories: list[str],
    logs: tuple[str, ...],
) -> None:
    from appliance.observe.support.bundle import collect
    from appliance.observe.support.redaction import sentence

    def settings() -> list[dict[str, Any]]:
        found = FoundSettings(file, dict(os.environ), ())
        rows = [found.row(definition) for definition in definitions().values()]
        return [*rows, *({"problem": sentence(str(problem))} for problem in found.problems)]

    bundle = collect(checks, settings, cluster, bootstrap, directories, logs)
    bundle.write(path)
    echo(f"{path} has {counted(len(bundle.files), 'file')}: look at it, then send it")
