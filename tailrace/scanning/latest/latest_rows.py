"""The reader of a plan's latest rows: those whose offsets are the latest of their keys.

Invariants:
- Rows come as in a scan of all rows: partition by partition, in offset order.
- A record without a value (a tombstone) is no row: its key was deleted. The rows of a typed topic
  have no value, and each one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.scanning.batch_decoder import BATCH_BYTES, BATCH_ROWS
from tailrace.scanning.columns import KAFKA_COLUMNS, Column, Origin, with_origin
from tailrace.scanning.latest.latest_offsets import LatestOffsets, Read, find_latest
from tailrace.scanning.scan_plan import ScanPlan

_VALUE = next(column for column in KAFKA_COLUMNS if column.name == "value")


def read_latest(
    made: ScanPlan, read: Read, after_batch: Callable[[], None] = lambda: None
) -> Iterator[pa.RecordBatch]:
    """Yield the latest row of each key of a plan. Nothing is read before the first is taken.

    `after_batch` is called after each batch of keys. Raises what `read` raises.
    """
    yield from latest_rows(made, find_latest(made, read, after_batch), read)


def latest_rows(made: ScanPlan, latest: LatestOffsets, read: Read) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a plan, or of a part of it, whose offsets are in `latest`."""
    columns, offset_at = with_origin(made.columns, Origin.OFFSET)
    columns, value_at = (columns, -1) if made.typed else _with_value(columns)
    for r in made.ranges:
        pieces: list[pa.RecordBatch] = []
        row_count = byte_count = 0
        for batch in read(replace(made, columns=columns, ranges=(r,))):
            column = batch.column(offset_at)
            offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset :][: len(column)]
            rows = latest.rows(r.key, offsets)
            if not len(rows):
                continue
            if len(rows) < len(offsets):
                batch = batch.take(_indices(rows))
            if value_at >= 0 and batch.column(value_at).null_count:
                batch = batch.filter(pc.is_valid(batch.column(value_at)))
            pieces.append(batch.select(range(len(made.columns))))
            row_count += batch.num_rows
            byte_count += batch.get_total_buffer_size() if len(rows) < len(offsets) else BATCH_BYTES
            if row_count >= BATCH_ROWS or byte_count >= BATCH_BYTES:
                yield from _joined(pieces)
                pieces, row_count, byte_count = [], 0, 0
        yield from _joined(pieces)


def _with_value(columns: tuple[Column, ...]) -> tuple[tuple[Column, ...], int]:
    return (
        (columns, columns.index(_VALUE))
        if _VALUE in columns
        else ((*columns, _VALUE), len(columns))
    )


def _indices(rows: Any) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])


def _joined(pieces: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    rows = [piece for piece in pieces if piece.num_rows]
    if rows:
        yield rows[0] if len(rows) == 1 else pa.concat_batches(rows)
