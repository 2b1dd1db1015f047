"""Rows of fetched batches, as the store of a table takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.batch.topic_batch import TopicBatch
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.consumer.table.chunk import HEADERS, VALUE
from tailrace.consumer.table.latest_store import Rows

TIME = "timestamp"
TIME_TYPE = pa.timestamp("us", "UTC")


def rows_of(info: TopicInfo, key: str, partition: int, parts: list[TopicBatch]) -> Rows:
    """The rows of one partition's batches. `key` is the column with the keys."""
    if info.typed:
        table = pa.Table.from_batches(
            [info.history.convert(part.batch, part.schema_id) for part in parts]
        )
        values = table
    else:
        table = pa.Table.from_batches([part.batch for part in parts])
        has_headers = table.column(HEADERS).null_count < table.num_rows
        values = table.select([VALUE, HEADERS] if has_headers else [VALUE])
    keys = table.column(key).combine_chunks()
    return Rows(
        partition,
        keys.chunk(0) if isinstance(keys, pa.ChunkedArray) else keys,
        values.combine_chunks().to_batches()[0],
        np.concatenate([part.offsets.to_numpy() for part in parts]),
        np.concatenate([_times_us(part) for part in parts]),
        np.ones(table.num_rows, bool)
        if info.typed or not table.column(VALUE).null_count
        else table.column(VALUE).is_valid().to_numpy(),
    )


def _times_us(part: TopicBatch) -> Any:
    """The time of each row."""
    names = part.batch.schema.names
    if part.has_one_time or TIME not in names or part.batch.column(TIME).type != TIME_TYPE:
        return np.full(len(part), part.timestamp_us, np.int64)
    return part.batch.column(TIME).cast(pa.int64()).fill_null(part.timestamp_us).to_numpy()
