"""Writers of `tailrace sql`: an aligned table or one JSON array, streamed for any number of
rows.
"""

from __future__ import annotations

import decimal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from appliance.cli.output import one_line
from appliance.cli.records.writers import text_of

Pieces = Iterator[list[list[Any]]]
"""Rows, some at a time."""
MARGIN = "  "


def write_json(columns: Sequence[str], pieces: Pieces) -> None:
    """One array of objects, a row a line."""
    out = sys.stdout.buffer
    names = _each_once(columns)
    separator = b"[\n"
    for rows in pieces:
        for row in rows:
            out.write(separator + orjson.dumps(dict(zip(names, row, strict=True)), default=_plain))
            separator = b",\n"
    out.write(b"\n]\n" if separator == b",\n" else b"[]\n")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return text_of(value)
    if isinstance(value, decimal.Decimal):
        return orjson.Fragment(
            format(value, "f")
        )  # a number of JSON has as many digits as it takes
    return str(value)


def _each_once(names: Sequence[str]) -> list[str]:
    """Names for an object's keys: `a, a` as `a, a_1`, as DuckDB itself calls them where it must."""
    found: list[str] = []
    for name in names:
        new, number = name, 0
        while new in found or (number and new in names):
            number += 1
            new = f"{name}_{number}"
        found.append(new)
    return found


def write_table(columns: Sequence[str], pieces: Pieces) -> None:
    """Write a table aligned by its first rows; a wider cell that comes later shifts its line."""
    from rich.cells import cell_len

    widths: list[int] = []
    numeric: list[bool] = []
    for rows in pieces:
        texts = [[_cell(value) for value in row] for row in rows]
        if not widths:
            widths = [
                max(cell_len(text) for text in column)
                for column in zip(columns, *texts, strict=True)
            ]
            numeric = [
                all(_is_number(value) for value in column if value is not None)
                for column in zip(*rows, strict=True)
            ]
            numeric = numeric or [False] * len(columns)
            texts.insert(0, list(columns))
        for row in texts:
            padded = (
                " " * (width - cell_len(text)) + text
                if right
                else text + " " * (width - cell_len(text))
                for text, width, right in zip(row, widths, numeric, strict=True)
            )
            sys.stdout.write(MARGIN.join(padded).rstrip() + "\n")
    if not widths:
        sys.stdout.write(MARGIN.join(columns) + "\n")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    return one_line(value)
