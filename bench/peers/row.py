"""A row of `make bench-peers`, and its contenders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MEMORY, BEHIND, DISK = "page cache", "disk behind", "fdatasync"
"""The place that an acknowledged record has reached: the page cache, a ring whose records are
synced a moment later, or the disk.
"""
Result = float | dict[str, float]


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender in a row."""

    key: str
    """Name of the row in goals.py."""
    name: str
    durability: str
    once: Callable[[], Result]


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of all contenders. The first entry is ours, which the ratios are to."""

    key: str
    name: str
    unit: str
    entries: list[Entry]
