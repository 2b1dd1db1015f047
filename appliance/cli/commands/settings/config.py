"""`tailrace config`: settings shown with their origin, checked, compared with those that run, and
changed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from appliance.cli.options.config_sources import config_path, file_options, set_option
from appliance.cli.options.found_settings import FoundSettings
from appliance.cli.options.shared import bootstrap_option, connect, json_option, parse_pairs
from appliance.cli.output import complain, counted, print_json, print_table
from appliance.config.files.locations import DIRECTORY
from appliance.config.setting_definition import Definition
from appliance.config.settings import definitions
from appliance.config.settings_sources import (
    DEFAULT_SOURCE,
    Problem,
    unknown_setting,
)
from tailrace.admin.configs import ConfigEntry, ConfigResource

BROKER = ConfigResource("broker")
EXIT_WRONG = 2
"""Exit status for wrong settings, as of `tailrace serve`."""
EXIT_DIFFERENT = 1


@click.group()
def command() -> None:
    """Show, check, compare and change the settings of the appliance.

    \b
    Example:
      tailrace config check /etc/tailrace/tailrace.toml
      tailrace config show --origin
      tailrace config set log_level=debug
    """


@command.command("show")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@file_options
@set_option
@click.option("--origin", is_flag=True, help="Show also the origin: file and line, or variable.")
@click.option("--changed", is_flag=True, help="Only settings that are given somewhere.")
@click.option(
    "--running", is_flag=True, help="Ask the appliance that runs, with what its `serve` was given."
)
@bootstrap_option
@json_option
def show(
    names: tuple[str, ...],
    config: str | None,
    instance: str | None,
    no_config: bool,
    assignments: tuple[str, ...],
    origin: bool,
    changed: bool,
    running: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Show the settings that a start would use. Secrets are not shown.

    A start with these options: what `tailrace serve --set` or its environment have given to an
    appliance that runs is shown with --running.

    \b
    Example:
      tailrace config show --origin --changed
      tailrace config show ring_bytes lane_bytes
      tailrace config show kafka.listen --running --origin
    """
    chosen = _definitions(names)
    if running:
        if config or instance or no_config or assignments:
            raise click.UsageError("--running asks the appliance; leave files and --set out")
        rows, problems = _running_rows(chosen, bootstrap), []
    else:
        path = config_path(config, instance, no_config)
        found = FoundSettings(path, dict(os.environ), assignments)
        rows, problems = [found.row(definition) for definition in chosen], found.problems
        _report(problems)
    if changed:
        rows = [row for row in rows if row["source"] != DEFAULT_SOURCE]
    if as_json:
        print_json(rows)
    elif origin:
        print_table(
            ["SETTING", "VALUE", "FROM"],
            [[row["name"], text_of(row["value"]), _origin(row)] for row in rows],
        )
    else:
        print_table(["SETTING", "VALUE"], [[r["name"], text_of(r["value"])] for r in rows])
    if problems:
        sys.exit(EXIT_WRONG)


def _running_rows(chosen: list[Definition], bootstrap: str) -> list[dict[str, Any]]:
    """Rows of the settings that are in force, as of `FoundSettings.row`."""
    with connect(bootstrap) as admin:
        running = admin.describe_configs(BROKER)[BROKER]
    return [
        {
            "name": entry.name,
            "value": entry.value,
            "default": entry.default,
            "source": entry.source,
            "line": entry.line or None,
            "unit": definition.unit,
            "reload": entry.reload,
        }
        for definition in chosen
        if (entry := running.get(definition.name)) is not None
    ]


@command.command("check")
@click.argument("file", required=False)
@file_options
@set_option
@json_option
def check(
    file: str | None,
    config: str | None,
    instance: str | None,
    no_config: bool,
    assignments: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check the settings, and report all that is wrong, with file and line.

    With FILE: that file and the drop-ins beside it. Without: all that `tailrace serve` with these
    options would read. Exit status 2 if something is wrong.

    \b
    Example:
      tailrace config check /etc/tailrace/tailrace.toml
    """
    if file is not None:
        if config or instance or no_config:
            raise click.UsageError("give FILE or one of --config, --instance and --no-config")
        found = FoundSettings(file, {}, assignments)
    else:
        found = FoundSettings(
            config_path(config, instance, no_config), dict(os.environ), assignments
        )
    if as_json:
        print_json({"file": found.path, "errors": [p._asdict() for p in found.problems]})
    else:
        _report(found.problems)
    if found.problems:
        sys.exit(EXIT_WRONG)
    if not as_json:
        given = sum(one.source != DEFAULT_SOURCE for one in found.given.values())
        where = found.path or "no file"
        click.echo(f"{where}: right; {counted(given, 'setting')} given")


@command.command("default")
def default() -> None:
    """Print a configuration file with every setting as a comment.

    \b
    Example:
      tailrace config default > tailrace.toml
    """
    from appliance.config.files.default_file import default_file

    click.echo(default_file(), nl=False)


@command.command("diff")
@click.argument("file", required=False)
@file_options
@bootstrap_option
@json_option
def diff(
    file: str | None,
    config: str | None,
    instance: str | None,
    no_config: bool,
    bootstrap: str,
    as_json: bool,
) -> None:
    """Compare a file, with its drop-ins, with the settings that run.

    WITH says how the file's value would come into force: by a reload, by a restart, or not at all,
    because the environment, a flag or `config set` wins over the file. Exit status 1 if something
    differs, 2 if the file is wrong, or none is named and the appliance has one from another place.

    \b
    Example:
      tailrace config diff /etc/tailrace/tailrace.toml
    """
    path = file or config_path(config, instance, no_config)
    found = FoundSettings(path, {}, ())
    if found.problems:
        _report(found.problems)
        sys.exit(EXIT_WRONG)
    with connect(bootstrap) as admin:
        running = admin.describe_configs(BROKER)[BROKER]
    if path is None and not no_config:
        _check_runs_without_file(running)
    rows = []
    for definition in definitions().values():
        entry, configured = running.get(definition.name), found.row(definition)
        if entry is not None and entry.value != configured["value"]:
            is_given = configured["source"] != DEFAULT_SOURCE
            rows.append(
                {
                    "name": definition.name,
                    "running": entry.value,
                    "source": entry.source,
                    "file": configured["value"],
                    "file_source": _origin(configured),
                    "with": _way(definition, entry, is_given=is_given),
                }
            )
    if as_json:
        print_json(rows)
    else:
        print_table(
            ["SETTING", "RUNS", "FROM", "FILE", "FROM", "WITH"],
            [
                [r["name"], text_of(r["running"]), r["source"], text_of(r["file"]),
                 r["file_source"], r["with"]]
                for r in rows
            ],
        )  # fmt: skip
    if rows:
        sys.exit(EXIT_DIFFERENT)


@command.command("set")
@click.argument("assignments", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--validate", is_flag=True, help="Only check, and change nothing.")
@bootstrap_option
@json_option
def set_values(assignments: tuple[str, ...], validate: bool, bootstrap: str, as_json: bool) -> None:
    """Change settings of the running appliance, for good.

    They are kept in its catalog, and win over files, environment and flags until `config unset`.
    Settings that need a restart are refused. The command returns when every process uses them.

    \b
    Example:
      tailrace config set log_level=debug transaction.max.timeout.ms=30m
    """
    changes = parse_pairs(assignments, "NAME=VALUE")
    with connect(bootstrap) as admin:
        admin.alter_configs({BROKER: changes}, validate_only=validate)
        entries = admin.describe_configs(BROKER)[BROKER]
    rows = [entries[name]._asdict() for name in changes]
    if as_json:
        print_json(rows)
    elif validate:
        click.echo(f"right: {', '.join(changes)}; nothing was changed")
    else:
        print_table(["SETTING", "VALUE"], [[r["name"], text_of(r["value"])] for r in rows])


@command.command("unset")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@bootstrap_option
def unset(names: tuple[str, ...], bootstrap: str) -> None:
    """Remove settings of `config set`: what files, environment and flags give is in force again.

    \b
    Example:
      tailrace config unset log_level
    """
    with connect(bootstrap) as admin:
        admin.alter_configs({BROKER: dict.fromkeys(names)})
        entries = admin.describe_configs(BROKER)[BROKER]
    print_table(
        ["SETTING", "VALUE", "FROM"],
        [[name, text_of(entries[name].value), entries[name].source] for name in names],
    )


def _check_runs_without_file(running: Mapping[str, ConfigEntry]) -> None:
    """Without a file here the appliance would be compared with the defaults. Raises UsageError if
    it has settings from a file.
    """
    files = sorted({entry.source for entry in running.values() if _is_file(entry.source)})
    if files:
        raise click.UsageError(
            f"there is no {DIRECTORY}/tailrace.toml, and the appliance was started with "
            f"{', '.join(files)}: name that file"
        )


def _is_file(source: str) -> bool:
    return "/" in source or ".toml" in source


def _way(definition: Definition, entry: ConfigEntry, *, is_given: bool) -> str:
    """The way by which the file's value comes into force."""
    from_file = entry.source == DEFAULT_SOURCE or _is_file(entry.source)
    if not from_file:
        return f"not: {entry.source} wins" if is_given else f"not: {entry.source} sets it"
    return "a reload" if definition.is_live else "a restart"


def _definitions(names: tuple[str, ...]) -> list[Definition]:
    known = definitions()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError("; ".join(unknown_setting(name) for name in unknown))
    return [known[name] for name in names] or list(known.values())


def _report(problems: list[Problem]) -> None:
    for problem in problems:
        complain(str(problem))


def _origin(row: dict[str, Any]) -> str:
    return f"{row['source']}:{row['line']}" if row["line"] else str(row["source"])


def text_of(value: Any) -> str:
    """A setting's value for people."""
    if value in ("", []):
        return "(empty)"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
