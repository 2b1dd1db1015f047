"""`tailrace serve`: becomes the supervisor. With --check it only reports what a start would do."""

from __future__ import annotations

import os
import sys

import click

from appliance.cli.options.config_sources import config_path, file_options, set_option
from tailrace import launcher


@click.command()
@file_options
@click.option(
    "--data-dir",
    help="Where the log and the catalog live (setting data_dirs; default ./tailrace-data).",
)
@click.option(
    "--listen",
    multiple=True,
    help="Where clients connect, repeatable: tcp://HOST:PORT or ipc://PATH (default "
    "tcp://127.0.0.1:7420).",
)
@set_option
@click.option(
    "--check",
    "is_check",
    is_flag=True,
    help="Show the settings and what a start would do, or why it would be refused; start and "
    "write nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="With --check: print JSON.")
def command(
    config: str | None,
    instance: str | None,
    no_config: bool,
    data_dir: str | None,
    listen: tuple[str, ...],
    assignments: tuple[str, ...],
    is_check: bool,
    as_json: bool,
) -> None:
    """Run the appliance in the foreground until SIGTERM or Ctrl-C.

    A setting comes from --set and the other options, else the environment (TAILRACE_RING_BYTES for
    ring_bytes), else a drop-in conf.d/*.toml beside the file, else the file, else its default.
    Settings of `tailrace config set` are applied over these. A variable TAILRACE_... that names
    none is refused, as a name in the file is. SIGHUP, or `tailrace reload`, reads them again.

    \b
    Example:
      tailrace serve --data-dir /var/lib/tailrace --listen tcp://127.0.0.1:7420
      tailrace serve --config tailrace.toml --check

    \b
    Exit status (with --check: the one that serving would end with, or 0):
       0  stopped cleanly: everything drained, flushed and synced
       1  stopped, but something had to be killed; the next start puts it right
       2  a setting is wrong
      72  the address is in use
      73  the data directory cannot be used (in use, not writable, damaged)
      74  the machine or the configuration cannot be used (too few open files,
          not x86-64, a data directory that is missing)
      75  /dev/shm, memory or the cgroup has no room; the sum is shown line by line
    """
    arguments: list[str] = []
    path = config_path(config, instance, no_config)
    for name, value in (("--config", path), ("--data-dir", data_dir)):
        if value is not None:
            arguments += [name, value]
    for address in listen:
        arguments += ["--listen", address]
    for assignment in assignments:
        arguments += ["--set", assignment]
    if is_check:
        sys.exit(_check(arguments, as_json))
    if as_json:
        raise click.UsageError("--json needs --check")
    sys.stdout.flush()
    # A fresh interpreter, so that the supervisor has neither this command line nor its imports.
    arguments = launcher.command("appliance.supervise.supervisor", *arguments)
    os.execv(arguments[0], arguments)


def _check(arguments: list[str], as_json: bool) -> int:
    """Print what is found; the exit status."""
    from appliance.cli.output import print_json, print_table
    from appliance.config.settings_sources import given_flags, parse_flags
    from appliance.observe.checks.serve_dry_run import check_start

    flags = parse_flags(arguments)
    report = check_start(flags.config, os.environ, lambda: given_flags(flags))
    if as_json:
        checks = [
            {"check": c.name, "level": c.level.value, "detail": c.detail} for c in report.checks
        ]
        print_json(
            {"exit_status": int(report.exit_status), "settings": report.settings, "checks": checks}
        )
        return report.exit_status
    if report.settings:
        print_table(
            ["SETTING", "VALUE", "FROM"],
            [[row["name"], _shown(row["value"]), row["source"]] for row in report.settings],
        )
        click.echo()
    print_table(
        ["CHECK", "LEVEL", "DETAIL"],
        [[c.name, c.level.value, c.detail] for c in report.checks],
        wrap=["DETAIL"],
    )
    verdict = (
        "it would serve"
        if report.exit_status == 0
        else f"it would be refused, with exit status {report.exit_status}"
    )
    click.echo(f"\n{verdict}; nothing was started or written")
    return report.exit_status


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
