"""How the command line speaks: tables, errors, progress. Coloured on terminals, plain in pipes.

rich is loaded only by what draws.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

BYTES = "bytes"
ITEMS = "items"


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.buffer.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, title: str | None = None) -> None:
    """An aligned table; numbers to the right."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    console = Console()
    if not sys.stdout.isatty():
        console = Console(width=240, color_system=None)
    console.print(table)


def complain(sentence: str) -> None:
    """An error on standard error."""
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}tailrace: {sentence}{plain}", file=sys.stderr)


def say(sentence: str) -> None:
    """Something for the person, not for the pipe."""
    print(sentence, file=sys.stderr)


class Progress:
    """Advances a bar, if there is one."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task

    def advance(self, amount: int) -> None:
        if self._bar is not None:
            self._bar.advance(self._task, amount)


@contextmanager
def progress(description: str, total: int | None, unit: str = ITEMS) -> Iterator[Progress]:
    """A bar on standard error while the block runs, when the length is known and someone is looking."""
    if total is None or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        *((DownloadColumn(binary_units=True), TransferSpeedColumn()) if unit == BYTES else (MofNCompleteColumn(),)),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        yield Progress(bar, bar.add_task(description, total=total))


def human_bytes(count: int) -> str:
    """1536 -> "1.5 KiB"."""
    from rich.filesize import pick_unit_and_suffix

    unit, suffix = pick_unit_and_suffix(count, ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{count} B" if unit == 1 else f"{count / unit:,.1f} {suffix}"
