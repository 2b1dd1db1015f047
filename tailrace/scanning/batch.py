"""A batch as a scan meets it, and what is said where there is none: the same words whether it comes from a file or over ZeroMQ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import pyarrow as pa

from tailrace.errors import CorruptBatchError
from tailrace.formats.batch_header import BatchHeader
from tailrace.records import TopicPartition


class Frame(NamedTuple):
    """A batch whose header is proven, and whose body is where there is `data`."""

    header: BatchHeader
    data: pa.Buffer | memoryview | None
    """The whole batch; None: only its header was read, for nothing else was asked for."""
    schema: pa.Schema
    """What it was written with."""


class Source(Protocol):
    """Where the batches of one partition come from."""

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """The batches that hold offsets `start` to `end - 1`, in order. Raises CorruptBatchError with the range where one is missing: go on behind it."""
        ...

    def close(self) -> None: ...


def damage_error(key: TopicPartition, first: int, following: int, reason: str) -> CorruptBatchError:
    """For offsets `first` to `following - 1`, which cannot be read."""
    error = CorruptBatchError(
        f"{key.topic}-{key.partition}: offsets {first} to {following - 1} are damaged ({reason}); skip_damaged=True goes on behind them"
    )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error
