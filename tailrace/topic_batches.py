"""Making a TopicBatch of what was fetched."""

from __future__ import annotations

import pyarrow as pa

from tailrace.formats import arrow_batch
from tailrace.formats.batch_header import BatchHeader
from tailrace.records import TopicBatch, TopicPartition


def topic_batch(key: TopicPartition, header: BatchHeader, rows: pa.RecordBatch, first_offset: int) -> TopicBatch:
    """The rows of a batch from `first_offset` on."""
    kind = arrow_batch.timestamp_type_of(header)
    stamp_us = header.append_time_us if kind else header.max_timestamp_us
    return TopicBatch(key.topic, key.partition, first_offset, rows, None, stamp_us, kind)


def consecutive(start: int, count: int) -> pa.Array:
    """`count` offsets from `start` on, int64."""
    if count < 64:
        return pa.array(range(start, start + count), pa.int64())
    import numpy as np

    return pa.array(np.arange(start, start + count, dtype=np.int64))
