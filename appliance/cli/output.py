"""Output of the command line: tables, errors, progress bars. Coloured on terminals, plain in pipes.

rich is imported only by the functions that draw.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

BYTES = "bytes"
ITEMS = "items"
UNKNOWN = "-"
SHORT_MAX = 24
WRAPPED_MIN = 30
"""Characters."""
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def counted(count: int, noun: str) -> str:
    """ "1 record", "2 records"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def utc_time(seconds: float, timespec: str = "seconds") -> str:
    """A moment in seconds since 1970 as text: 2026-01-02T03:04:05Z."""
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def print_json(value: Any) -> None:
    """Print a JSON document to standard output."""
    sys.stdout.buffer.write(
        orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    )


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    shorten: Sequence[str] = (),
    wrap: Sequence[str] = (),
) -> None:
    """Print an aligned table, numbers to the right. Cells are not cut. A line wider than the
    terminal continues on the next one and can be copied whole.

    `shorten`: columns whose cells lose their middle on a terminal; never ids that users copy.
    `wrap`: columns of sentences, which are wrapped to the terminal's width.
    """
    is_terminal = sys.stdout.isatty()
    texts = [[one_line(cell) for cell in row] for row in rows]
    if is_terminal:
        texts = [
            [
                shortened(cell) if name in shorten else cell
                for name, cell in zip(columns, row, strict=True)
            ]
            for row in texts
        ]
    numeric = [_is_numeric([row[index] for row in rows]) for index in range(len(columns))]
    wrapped = [is_terminal and name in wrap for name in columns]
    lines = (
        _wrapped_lines(columns, texts, numeric, wrapped)
        if any(wrapped)
        else _lines(columns, texts, numeric, is_terminal)
    )
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of an aligned table without colours, its head first."""
    texts = [[one_line(cell) for cell in row] for row in rows]
    numeric = [_is_numeric([row[index] for row in rows]) for index in range(len(columns))]
    return _lines(columns, texts, numeric, is_terminal=False)


def _lines(
    columns: Sequence[str], texts: list[list[str]], numeric: list[bool], is_terminal: bool
) -> list[str]:
    """The lines of `_wrapped_lines` without rich's layout, for tables of thousands of rows."""
    from rich.cells import cell_len

    every = [list(columns), *texts]
    for index, is_numeric in enumerate(numeric):
        width = max(cell_len(row[index]) for row in every)
        for row in every:
            space = " " * (width - cell_len(row[index]))
            row[index] = space + row[index] if is_numeric else row[index] + space
    head, *lines = ["  ".join(row).rstrip() for row in every]
    return [
        f"\x1b[1m{head}\x1b[0m"
        if is_terminal and os.environ.get("TERM", "dumb") != "dumb"
        else head,
        *lines,
    ]


def _wrapped_lines(
    columns: Sequence[str], texts: list[list[str]], numeric: list[bool], wrapped: list[bool]
) -> list[str]:
    """The lines of a table on a terminal, some of whose columns are wrapped."""
    from rich.cells import cell_len
    from rich.console import Console, ConsoleDimensions
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    width = 2 * len(columns)
    for index, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if numeric[index] else "left",
            no_wrap=not wrapped[index],
            overflow="fold",
        )
        longest = max(cell_len(text) for text in [name, *(row[index] for row in texts)])
        width += min(longest, WRAPPED_MIN) if wrapped[index] else longest
    for row in texts:
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    console.size = ConsoleDimensions(
        max(console.width, width), console.height
    )  # both, for rich ignores a width alone where TERM is dumb
    with console.capture() as capture:
        console.print(table)
    return [line.rstrip() for line in capture.get().splitlines()]


def _is_numeric(cells: Sequence[Any]) -> bool:
    """True if all cells are numbers; "-" and empty cells stand for unknown ones."""
    known = [cell for cell in cells if cell is not None and cell != UNKNOWN]
    return all(isinstance(cell, int | float) for cell in known) and bool(known or UNKNOWN in cells)


def one_line(cell: Any) -> str:
    """A cell's text with control characters escaped, so that keys and names cannot begin a line or
    control the terminal.
    """
    return "" if cell is None else str(cell).translate(_ESCAPES)


def shortened(text: str) -> str:
    """Leave out the middle of a long text."""
    return (
        text
        if len(text) <= SHORT_MAX
        else f"{text[: SHORT_MAX // 2 - 1]}..{text[1 - SHORT_MAX // 2 :]}"
    )


def complain(sentence: str) -> None:
    """Print an error to standard error."""
    red, plain = ("\x1b[31m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}tailrace: {sentence}{plain}", file=sys.stderr)


def echo(sentence: str) -> None:
    """Print a note to standard error, beside the output for the pipe."""
    print(sentence, file=sys.stderr)


class Progress:
    """Advances a bar, if there is one."""

    def __init__(self, bar: Any = None, task: Any = None) -> None:
        self._bar = bar
        self._task = task

    def advance(self, amount: int) -> None:
        """Move the bar by `amount` units."""
        if self._bar is not None:
            self._bar.advance(self._task, amount)


@contextmanager
def progress(description: str, total: int | None, unit: str = ITEMS) -> Iterator[Progress]:
    """Show a progress bar on standard error during the block, if the length is known and standard
    error is a terminal.
    """
    if total is None or not sys.stderr.isatty():
        yield Progress()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    with Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        *(
            (DownloadColumn(binary_units=True), TransferSpeedColumn())
            if unit == BYTES
            else (MofNCompleteColumn(),)
        ),
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
