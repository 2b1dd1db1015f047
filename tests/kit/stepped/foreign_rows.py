"""Rows in a delay log that clients crafted by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.format.record_batch.batch_header import BatchHeader
from tailrace.kernel.reference_arrow import default_rows
from tests.kit.stepped.delays import LOG_SEED, DelayWorld

FOREIGN = b"foreign"


def foreign(count: int, value: bytes = b"") -> pa.RecordBatch:
    return default_rows(list(range(count)), [b"k"] * count, [FOREIGN + value] * count, None)


def put(world: DelayWorld, data: bytes | bytearray) -> int:
    """Into the delay log, as any client can; answers how many rows the worker took."""
    world.takes_foreign = True
    before = world.bench.table.read(1).high_watermark
    world.bench.send(data, slot=1)
    world.settle()
    world.settle()
    return int(world.bench.table.read(1).high_watermark - before)


def encoded(rows: pa.RecordBatch, codec: str = "none", **fields: Any) -> bytearray:
    header = BatchHeader(
        record_count=rows.num_rows, last_offset_delta=rows.num_rows - 1, schema_id=1
    )
    for name, value in fields.items():
        setattr(header, name, value)
    return arrow_batch.encode_as(rows, header, LOG_SEED, codec)
