"""Rows that a consumer has decoded and not yet handed out.

They stay as columns until they are handed out: a Record takes many times what a short row does, and is made where it is used, in a warm cache.

Owner: one Consumer, one thread.
Invariants: no partition is kept without a row; its rows are consecutive, and end where its cursor goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import pyarrow as pa

from tailrace.fetcher import PartitionCursor, corrupt_error
from tailrace.formats import arrow_batch
from tailrace.formats.batch_header import BatchHeader
from tailrace.records import Record, TopicPartition


class _Decoded(NamedTuple):
    end: int
    """The offset behind its batch."""
    rows: arrow_batch.Rows


class DecodedRecords:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._decoded: dict[TopicPartition, _Decoded] = {}

    def __bool__(self) -> bool:
        return bool(self._decoded)

    def decode(self, cursor: PartitionCursor, header: BatchHeader, batch: pa.RecordBatch, first_offset: int) -> None:
        """Take the rows of a batch, the first of which has the offset `first_offset`. The partition has nothing left here. A batch that was trusted may turn
        out to contradict itself, here or in `hand_out`: that is the cursor's error then, and its position is before what cannot be read.
        """
        key = cursor.key
        try:
            rows = arrow_batch.to_rows(key.topic, key.partition, first_offset, batch, header, cursor.info.typed)
        except ValueError as error:
            _stop_at(cursor, first_offset, header.next_offset, error)
        else:
            self._decoded[key] = _Decoded(header.next_offset, rows)

    def put(self, key: TopicPartition, rows: arrow_batch.Rows, end: int) -> None:
        """Take rows that were decoded already, of a batch that ends before offset `end`. The partition has nothing left here."""
        self._decoded[key] = _Decoded(end, rows)

    def hand_out(self, result: list[Record], limit: int, cursors: Mapping[TopicPartition, PartitionCursor]) -> bool:
        """Append records to `result` until it has `limit`; none of a partition whose cursor is paused. Returns whether there were any."""
        before = len(result)
        for key in list(self._decoded):
            if cursors[key].is_paused or len(result) >= limit:
                continue
            end, rows = self._decoded[key]
            try:
                rows.take(result, limit - len(result))
            except ValueError as error:
                del self._decoded[key]
                _stop_at(cursors[key], rows.next_offset, end, error)
                continue
            if not len(rows):
                del self._decoded[key]
        return len(result) > before

    def first_offset(self, key: TopicPartition) -> int | None:
        """The offset of the partition's next record here; None: there is none."""
        decoded = self._decoded.get(key)
        return None if decoded is None else decoded.rows.next_offset

    def drop(self, key: TopicPartition) -> None:
        """Forget what is here of a partition."""
        self._decoded.pop(key, None)

    def keep_only(self, keys: Collection[TopicPartition]) -> None:
        """Forget every partition that is not among `keys`."""
        for key in [key for key in self._decoded if key not in keys]:
            self.drop(key)

    def give_back(self) -> dict[TopicPartition, int]:
        """Forget everything; returns where each partition has to be read again from."""
        starts = {key: decoded.rows.next_offset for key, decoded in self._decoded.items()}
        self._decoded.clear()
        return starts


def _stop_at(cursor: PartitionCursor, offset: int, end: int, error: ValueError) -> None:
    cursor.seek(offset)
    cursor.error = corrupt_error(cursor.key, offset, end, f"it contradicts itself: {error}")
