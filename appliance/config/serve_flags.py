"""Flags of `tailrace serve`."""

from __future__ import annotations

import argparse
from typing import Any

from tailrace.core.errors import InvalidSettingError


def parse_flags(arguments: list[str]) -> argparse.Namespace:
    """The flags of `tailrace serve`, which documents them."""
    parser = argparse.ArgumentParser(prog="tailrace serve", allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--data-dir")
    parser.add_argument("--listen", action="append", default=[])
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def given_flags(flags: argparse.Namespace) -> list[tuple[str, Any]]:
    """(setting, value) of all flags; later ones win.

    Raises: InvalidSettingError.
    """
    given: list[tuple[str, Any]] = []
    for item in flags.set:
        name, separator, value = item.partition("=")
        if not separator:
            raise InvalidSettingError(f"--set {item!r} has no value; write --set name=value")
        given.append((name, value))
    if flags.data_dir:
        given.append(("data_dirs", [flags.data_dir]))
    if flags.listen:
        given.append(("listen", flags.listen))
    return given
