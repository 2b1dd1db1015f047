"""StoredBatch and Source: the interface between a scan and its files or its appliance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import pyarrow as pa

from tailrace.core.errors import CorruptBatchError
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.record_batch.batch_header import BatchHeader


class StoredBatch(NamedTuple):
    """A batch with a verified header, and a verified body if `data` is present."""

    header: BatchHeader
    data: pa.Buffer | memoryview | None
    """The whole batch; None: only the header was read, because only headers are needed."""
    schema: pa.Schema
    """The schema that it was written with."""


class Source(Protocol):
    """The source of one partition's batches."""

    def frames(self, start: int, end: int) -> Iterator[StoredBatch]:
        """Yield the batches with offsets `start` to `end - 1`, in order.

        Raises CorruptBatchError with the range if one is damaged; continue after it.
        """
        ...

    def close(self) -> None: ...


def damage_error(key: TopicPartition, first: int, following: int, reason: str) -> CorruptBatchError:
    """The error for offsets `first` to `following - 1`, which cannot be read."""
    error = CorruptBatchError(
        f"{key.topic}-{key.partition}: offsets {first} to {following - 1} are damaged ({reason}); "
        "skip_damaged=True skips them"
    )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error
