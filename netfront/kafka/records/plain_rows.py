"""Rows in the columns of the default schema, as the kernel takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.format.crc32c import Readable


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The columns of rows as the buffers and nodes of an uncompressed batch."""

    buffers: Sequence[Readable]
    nodes: Sequence[int]
    offsets: Readable | None
    """The int64 offset of each row; None: they are consecutive."""
