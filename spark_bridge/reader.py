"""One Spark task: reads one range of one partition and returns its batches as Arrow.

Batches of a typed topic are passed on unchanged. Those of a topic with the default schema get the columns of Spark's Kafka source, around the same key and
value buffers.
Invariants: every offset of the range is returned once, in order, and no other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from spark_bridge.planner import LEASE_MS
from tailrace.admin import Admin
from tailrace.consumer import Consumer
from tailrace.errors import TailraceError
from tailrace.records import TopicBatch, TopicPartition
from tailrace.settings import ConsumerSettings

HEADER_SPARK_TYPE = pa.list_(pa.struct([pa.field("key", pa.utf8()), pa.field("value", pa.binary())]))
POLL_MS = 5_000
STALLED_POLLS_MAX = 12
_TIMESTAMP = pa.timestamp("us", "UTC")


def kafka_schema(include_headers: bool) -> pa.Schema:
    """Columns of a default-schema topic, as Spark's Kafka source names them."""
    fields = [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.utf8()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", _TIMESTAMP),
        pa.field("timestampType", pa.int32()),
    ]
    if include_headers:
        fields.append(pa.field("headers", HEADER_SPARK_TYPE))
    return pa.schema(fields)


def read_range(
    bootstrap: str,
    topic: str,
    partition: int,
    start: int,
    end: int,
    typed: bool,
    columns: list[str],
    lease: str = "",
    max_unpacked_batch_bytes: int = ConsumerSettings().max_unpacked_batch_bytes,
) -> Iterator[pa.RecordBatch]:
    """The rows of offsets `start` to `end - 1`, with the given columns in that order; renews `lease` while it reads. Raises TailraceError."""
    key = TopicPartition(topic, partition)
    renewed_s = time.monotonic()
    position = start
    stalled = 0
    if start >= end:
        return
    with Consumer(
        bootstrap=bootstrap, auto_offset_reset="none", client_id="spark", max_unpacked_batch_bytes=max_unpacked_batch_bytes
    ) as consumer:
        consumer.assign([key])
        consumer.seek(key, start)
        while position < end:
            taken = consumer.poll_arrow(POLL_MS)
            stalled = 0 if taken else stalled + 1
            if lease and time.monotonic() - renewed_s > LEASE_MS / 3000:
                renewed_s = time.monotonic()
                with Admin(bootstrap) as admin:
                    admin.lease_offsets(lease, {key: start}, LEASE_MS)
            if stalled > STALLED_POLLS_MAX:
                raise TailraceError(f"{topic}-{partition} gave nothing at offset {position} of a range that ends at {end}")
            for item in taken:
                rows = min(item.batch.num_rows, end - item.base_offset)
                if rows <= 0:
                    return
                batch = item.batch if rows == item.batch.num_rows else item.batch.slice(0, rows)
                position = item.base_offset + rows
                yield batch.select(columns) if typed else _kafka_columns(item, batch, columns)


def _kafka_columns(item: TopicBatch, batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    count = batch.num_rows
    arrays = []
    for name in columns:
        if name == "topic":
            arrays.append(pa.repeat(pa.scalar(item.topic, pa.utf8()), count))
        elif name == "partition":
            arrays.append(pa.repeat(pa.scalar(item.partition, pa.int32()), count))
        elif name == "offset":
            arrays.append(item.offsets.slice(0, count))
        elif name == "timestampType":
            arrays.append(pa.repeat(pa.scalar(item.timestamp_type, pa.int32()), count))
        elif name == "timestamp" and item.timestamp_type:
            arrays.append(pa.repeat(pa.scalar(item.timestamp_us, pa.int64()), count).cast(_TIMESTAMP))
        else:
            arrays.append(batch.column(batch.schema.get_field_index(name)))
    full = kafka_schema(include_headers=True)
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([full.field(name) for name in columns]))
