"""Table of what the contenders of `bench.members.rebalance` did, and its rows for a results file.

Owner: pure.
Invariants: rows stand in the order in which their figures were added.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

RETRY_TIMEOUT_S = 60.0
"""For so long after a death the bench waits until the dead member's partitions are read from
again.
"""


@dataclass(slots=True)
class Column:
    """Figures of a contender: row -> (unit, the figure of each repetition), in the order of the
    table.
    """

    figures: dict[str, tuple[str, list[float]]] = field(default_factory=dict)

    def add(self, row: str, unit: str, value: float) -> None:
        """One more repetition."""
        self.figures.setdefault(row, (unit, []))[1].append(value)


def cell(values: list[float]) -> str:
    """The median, and the least and the most where they differ."""

    def text(value: float) -> str:
        if math.isinf(value):
            return f"not in {RETRY_TIMEOUT_S:.0f} s"
        return f"{value:,.1f}" if value < 100 and value != int(value) else f"{value:,.0f}"

    if min(values) == max(values):
        return text(values[0])
    return f"{text(statistics.median(values))} ({text(min(values))} .. {text(max(values))})"


def table(columns: dict[str, Column]) -> str:
    """A row for each figure, a column for each contender."""
    units = {row: unit for column in columns.values() for row, (unit, _) in column.figures.items()}
    rows = [["", *columns, ""]]
    for row, unit in units.items():
        rows.append(
            [
                row,
                *(
                    cell(column.figures[row][1]) if row in column.figures else ""
                    for column in columns.values()
                ),
                unit,
            ]
        )
    widths = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
    lines = []
    for first, *cells, last in rows:
        lines.append(
            "   ".join(
                [first.ljust(widths[0]), *map(str.rjust, cells, widths[1:-1]), last]
            ).rstrip()
        )
    return "\n".join(lines)


def as_rows(columns: dict[str, Column]) -> list[dict[str, Any]]:
    """For a results file; a time that was not reached is null."""

    def finite(value: float) -> float | None:
        return None if math.isinf(value) else value

    return [
        {
            "contender": name,
            "name": row,
            "unit": unit,
            "value": finite(statistics.median(values)),
            "values": list(map(finite, values)),
        }
        for name, column in columns.items()
        for row, (unit, values) in column.figures.items()
    ]
