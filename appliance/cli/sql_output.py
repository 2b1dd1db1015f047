"""How `tailrace sql` writes rows: as an aligned table, or as one JSON array; as they come, whatever their number."""

from __future__ import annotations

import decimal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from appliance.cli.output import one_line
from appliance.cli.record_output import text_of

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
        is_whole = value == value.to_integral_value()  # which any precision allows, as % does not
        return int(value) if is_whole and abs(value) < 1 << 63 else float(value)
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
    """Aligned by the first rows; a later cell that is wider shifts its line."""
    from rich.cells import cell_len

    widths: list[int] = []
    numeric: list[bool] = []
    for rows in pieces:
        texts = [[_cell(value) for value in row] for row in rows]
        if not widths:
            widths = [max(cell_len(text) for text in column) for column in zip(columns, *texts, strict=True)]
            numeric = [all(_is_number(value) for value in column if value is not None) for column in zip(*rows, strict=True)]
            numeric = numeric or [False] * len(columns)
            texts.insert(0, list(columns))
        for row in texts:
            padded = (
                " " * (width - cell_len(text)) + text if right else text + " " * (width - cell_len(text))
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
