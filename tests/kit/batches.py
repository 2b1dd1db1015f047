"""Batches made for tests: good ones, and good ones bent in one place with their checksums made
right again.
"""

from __future__ import annotations

import struct

import pyarrow as pa

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.format.record_batch.batch_header import (
    PREFIX_BYTES,
    checksum_seed,
    compute_body_crc,
    header_position,
    verify_batch,
)
from tailrace.format.record_batch.header_stamps import seal_header, stamp_appended, stamp_producer
from tailrace.format.schema import DEFAULT_SCHEMA
from tailrace.kernel.reference_arrow import default_rows

TOPIC_ID = bytes(range(16))
SEED = checksum_seed(TOPIC_ID, 0)
TIME_US = 1_700_000_000_000_000


def rows(count: int, start: int = 0) -> pa.RecordBatch:
    numbers = range(start, start + count)
    return default_rows(
        [TIME_US + n for n in numbers],
        [b"k%d" % (n % 3) for n in numbers],
        [b"value-%d" % n for n in numbers],
        None,
    )


def make_batch(
    count: int = 3,
    *,
    compression: str = "none",
    seed: int = SEED,
    schema_id: int = 1,
    producer_id: int = -1,
    epoch: int = 0,
    sequence: int = 0,
) -> bytearray:
    """A batch as a producer sends it."""
    batch = rows(count)
    data = arrow_batch.encode(
        batch,
        schema_id=schema_id,
        seed=seed,
        compression=compression,
        first_timestamp_us=TIME_US,
        max_timestamp_us=TIME_US + count - 1,
    )
    if producer_id >= 0:
        with memoryview(data) as view:
            stamp_producer(
                view,
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=sequence,
                seed=seed,
            )
    return data


def stamped(
    data: bytearray,
    base_offset: int,
    *,
    durable_offset: int = 0,
    append_time_us: int = TIME_US,
    leader_epoch: int = 0,
) -> bytearray:
    """A batch as a worker puts it into its ring."""
    with memoryview(data) as view:
        position = header_position(view)
        stamp_appended(
            view, position, verify_batch(view, SEED), base_offset=base_offset,
            append_time_us=append_time_us, leader_epoch=leader_epoch,
            durable_offset=durable_offset, seed=SEED,
        )  # fmt: skip
    return data


def reseal(data: bytearray, seed: int = SEED) -> bytearray:
    """Make both checksums right for whatever the bytes now say."""
    with memoryview(data) as view:
        position = header_position(view)
        struct.pack_into("<I", view, position + 8, compute_body_crc(view, position, 0))
        seal_header(view, position, 0, seed)
    return data


def with_wild_buffer(data: bytearray, seed: int = SEED) -> bytearray:
    """A batch whose checksums are right but one buffer of which points far outside the body: what
    crashes a reader that trusts it.
    """
    message = pa.ipc.read_message(pa.py_buffer(bytes(data)))
    body_length = len(message.body)
    needle = None
    # The value column's data is the largest buffer: find its (offset, length) pair in the
    # flatbuffer.
    batch = pa.ipc.read_record_batch(message, DEFAULT_SCHEMA)
    length = len(b"".join(batch.column(2).to_pylist()))
    with memoryview(data) as view:
        end = header_position(view)
        for at in range(PREFIX_BYTES, end - 16, 4):
            offset, size = struct.unpack_from("<qq", view, at)
            if size == length and 0 < offset < body_length:
                needle = at
    assert needle is not None
    struct.pack_into("<q", data, needle, 1 << 40)
    return reseal(data, seed)
