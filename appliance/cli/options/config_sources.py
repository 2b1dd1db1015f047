"""Options that choose the sources of settings, for `serve` and `config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from appliance.config.files.locations import DIRECTORY, default_path, instance_path
from appliance.config.files.toml_file import FileProblem

Function = TypeVar("Function", bound=Callable[..., Any])


def file_options(function: Function) -> Function:
    """Add --config, --instance and --no-config."""
    for option in (
        click.option(
            "--no-config", is_flag=True, help=f"Read no file, not even {DIRECTORY}/tailrace.toml."
        ),
        click.option(
            "--instance", metavar="NAME", help=f"Settings of an instance: {DIRECTORY}/NAME.toml."
        ),
        click.option(
            "--config",
            metavar="FILE",
            help=f"Settings as TOML (default {DIRECTORY}/tailrace.toml, if it exists).",
        ),
    ):
        function = option(function)
    return function


def set_option(function: Function) -> Function:
    """Add --set NAME=VALUE."""
    return click.option(
        "--set",
        "assignments",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any setting, repeatable: --set flush.linger_ms=2.",
    )(function)


def config_path(config: str | None, instance: str | None, no_config: bool) -> str | None:
    """The file that the options choose; None: no file. Raises UsageError."""
    if (config is not None) + (instance is not None) + no_config > 1:
        raise click.UsageError("give one of --config, --instance and --no-config")
    if no_config:
        return None
    if config == "":
        raise click.UsageError("--config is empty; write --no-config to read no file")
    try:
        return config or (instance_path(instance) if instance is not None else default_path())
    except FileProblem as error:
        raise click.UsageError(f"{error.path} {error.sentence}") from None
