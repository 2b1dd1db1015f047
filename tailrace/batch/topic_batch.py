"""TopicBatch: a fetched batch as users see it, its columns unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from tailrace.batch import arrow_codec
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.record_batch.batch_header import BatchHeader

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl


class TopicBatch:
    """A fetched batch. `.batch` is a pyarrow.RecordBatch with the topic's schema."""

    __slots__ = (
        "_offsets",
        "base_offset",
        "batch",
        "has_one_time",
        "partition",
        "schema_id",
        "timestamp_type",
        "timestamp_us",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        base_offset: int,
        batch: pa.RecordBatch,
        offsets: pa.Array | None,
        timestamp_us: int,
        timestamp_type: int,
        *,
        has_one_time: bool | None = None,
        schema_id: int = -1,
    ) -> None:
        """`offsets` is the offset of each row (int64), or None if they are consecutive.
        `has_one_time`: None: as `timestamp_type` says.
        """
        self.topic = topic
        self.partition = partition
        self.base_offset = base_offset
        """The offset of the first row."""
        self.batch = batch
        self._offsets = offsets
        self.timestamp_us = timestamp_us
        """The largest timestamp of the stored batch, in microseconds."""
        self.timestamp_type = timestamp_type
        self.has_one_time = bool(timestamp_type) if has_one_time is None else has_one_time
        """True if `timestamp_us` is the time of every row, whatever its column says."""
        self.schema_id = schema_id
        """The version of a typed topic's schema that the rows have, -1: unknown."""

    @property
    def offsets(self) -> pa.Array:
        """The offset of each row (int64). Trimmed or compacted rows leave gaps."""
        if self._offsets is None:  # made on demand, because it is as large as a column
            self._offsets = consecutive(self.base_offset, self.batch.num_rows)
        return self._offsets

    @property
    def next_offset(self) -> int:
        """The offset after the last row."""
        if self._offsets is None or not len(self._offsets):
            return self.base_offset + len(self)
        return int(self._offsets[-1].as_py()) + 1

    def rows_below(self, offset: int) -> int:
        """The number of rows with an offset below this one."""
        if offset >= self.next_offset:
            return len(self)
        if self._offsets is None:
            return max(0, offset - self.base_offset)
        return int(arrow_codec.numbers_in(self._offsets).searchsorted(offset))

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Arrow's PyCapsule interface, by which duckdb, polars and pandas accept a TopicBatch."""
        capsules: tuple[object, object] = self.batch.__arrow_c_array__(requested_schema)
        return capsules

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a pandas frame. Needs pandas."""
        return self.batch.to_pandas()

    def to_polars(self) -> pl.DataFrame:
        """The rows as a polars frame, without a copy where polars allows it. Needs polars."""
        import polars

        return polars.DataFrame(polars.from_arrow(self.batch))

    def __repr__(self) -> str:
        return (
            f"TopicBatch(topic={self.topic!r}, partition={self.partition}, "
            f"base_offset={self.base_offset}, rows={len(self)})"
        )


def topic_batch(
    key: TopicPartition,
    header: BatchHeader,
    rows: pa.RecordBatch,
    first_offset: int,
    offsets: pa.Array | None = None,
    *,
    is_typed: bool = False,
    schema_id: int = -1,
) -> TopicBatch:
    """The rows of a batch from `first_offset` on. `offsets` and `schema_id` as for TopicBatch,
    `is_typed` of the topic.
    """
    kind = arrow_codec.timestamp_type_of(header)
    stamp_us = header.append_time_us if kind else header.max_timestamp_us
    return TopicBatch(
        key.topic, key.partition, first_offset, rows, offsets, stamp_us, kind,
        has_one_time=bool(kind) and header.has_one_time(is_typed=is_typed),
        schema_id=schema_id,
    )  # fmt: skip


def consecutive(start: int, count: int) -> pa.Array:
    """`count` offsets from `start` on, int64."""
    if count < 64:
        return pa.array(range(start, start + count), pa.int64())
    import numpy as np

    return pa.array(np.arange(start, start + count, dtype=np.int64))
