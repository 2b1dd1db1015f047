"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from tailrace.settings import DEFAULT_BOOTSTRAP

Function = TypeVar("Function", bound=Callable[..., Any])


def bootstrap_option(function: Function) -> Function:
    """--bootstrap: which appliance."""
    option = click.option(
        "--bootstrap",
        envvar="TAILRACE_BOOTSTRAP",
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        help="Address of the appliance (environment: TAILRACE_BOOTSTRAP).",
    )
    return option(function)


def json_option(function: Function) -> Function:
    """--json: for programs."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def parse_pairs(values: tuple[str, ...], option: str) -> dict[str, str]:
    """`k=v` texts as a dict; a usage error names what is not one."""
    pairs = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise click.UsageError(f"{option} {value!r} is not of the form name=value")
        pairs[name] = text
    return pairs
