"""Records on their way: rows of one partition as columns, and runs of their offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tailrace.core.topic_partition import TopicPartition

HEADER_BYTES = 16
"""Bytes of a header beside its name and value, at most."""


class Run(NamedTuple):
    """`length` records with consecutive offsets on both sides."""

    source: int
    target: int
    length: int


class LastRow(NamedTuple):
    """The last record of a partition in the target."""

    stamp_ms: int
    key: bytes | None
    value: bytes | None

    def is_first_of(self, rows: Rows) -> bool:
        """True if it is the first one of `rows`, which come from the source."""
        stamp_ms = rows.stamps_ms[0]
        return (
            (stamp_ms < 0 or stamp_ms == self.stamp_ms)
            and rows.keys[0] == self.key
            and rows.values[0] == self.value
        )


class Rows(NamedTuple):
    """Records of one partition of the source, their offsets ascending."""

    partition: TopicPartition
    offsets: Sequence[int]
    stamps_ms: Sequence[int]
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    headers: Sequence[Sequence[tuple[str, bytes | None]] | None] | None
    """None: no record has headers."""
    byte_count: int

    def __len__(self) -> int:
        return len(self.offsets)

    def part(self, start: int, end: int) -> Rows:
        """The rows from `start` to before `end`."""
        headers = None if self.headers is None else self.headers[start:end]
        keys, values = self.keys[start:end], self.values[start:end]
        return Rows(
            self.partition, self.offsets[start:end], self.stamps_ms[start:end], keys, values,
            headers, size_of(keys, values),
        )  # fmt: skip

    def first_over(self, limit: int) -> tuple[int, int, int] | None:
        """(row, bytes, limit) of the first record with more bytes than `limit`, or None."""
        of_headers = sum(
            len(name) + len(content or b"") + HEADER_BYTES
            for some in self.headers or ()
            if some
            for name, content in some
        )
        if longest(self.keys) + longest(self.values) + of_headers <= limit:
            return None  # nearly always: records are looked at one by one only near the limit
        for row, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            size = len(key or b"") + len(value or b"")
            if self.headers is not None:
                size += sum(
                    len(name) + len(each or b"") + HEADER_BYTES
                    for name, each in self.headers[row] or ()
                )
            if size > limit:
                return row, size, limit
        return None

    def consecutive_count(self, offset: int) -> int:
        """The number of leading rows with the offsets `offset`, `offset` + 1, ..."""
        offsets = self.offsets
        if not offsets or offsets[0] != offset:
            return 0
        if offsets[-1] == offset + len(offsets) - 1:
            return len(offsets)
        return next(row for row, each in enumerate(offsets) if each != offset + row)


def longest(cells: Iterable[Any]) -> int:
    """Bytes of the longest cell; 0: there is none."""
    return max(map(len, filter(None, cells)), default=0)


def size_of(keys: Iterable[Any], values: Iterable[Any]) -> int:
    """Bytes of keys and values."""
    return sum(map(len, filter(None, keys))) + sum(map(len, filter(None, values)))


def runs_of(offsets: Iterable[int]) -> list[list[int]]:
    """Ascending offsets as [first, count] of consecutive ones."""
    found: list[list[int]] = []
    for offset in offsets:
        if found and offset == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([offset, 1])
    return found


def paired(source: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> list[Run]:
    """The runs of the same records in source and target as runs that are consecutive in both."""
    found: list[Run] = []
    left, right = [list(run) for run in source], [list(run) for run in target]
    at = 0
    for first, count in left:
        while count:
            there = right[at]
            size = min(count, there[1])
            found.append(Run(first, there[0], size))
            first, count = first + size, count - size
            there[0], there[1] = there[0] + size, there[1] - size
            at += not there[1]
    return found
