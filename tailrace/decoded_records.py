"""Records that a consumer has decoded and not yet handed out.

A batch is decoded piece by piece: a Record takes a hundred times what a short row does, so what follows a piece stays as columns until the piece is used up.

Owner: one Consumer, one thread.
Invariants: the records of a partition are consecutive, and no partition is kept without one; what follows them in their batch begins at the offset behind
    the last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pyarrow as pa

from tailrace.fetcher import PartitionCursor
from tailrace.formats import arrow_batch
from tailrace.formats.batch_header import BatchHeader
from tailrace.records import Record, TopicPartition

DECODED_RECORDS_MAX = 2_048
"""So many rows of a batch are made Records at a time."""


class DecodedRecords:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._records: dict[TopicPartition, list[Record]] = {}
        """The last first: records are taken from the end."""
        self._rest: dict[TopicPartition, tuple[PartitionCursor, BatchHeader, pa.RecordBatch, int]] = {}
        """What follows those in their batch: (its cursor, header, rows, first offset)."""

    def __bool__(self) -> bool:
        return bool(self._records)

    def decode(self, cursor: PartitionCursor, header: BatchHeader, rows: pa.RecordBatch, first_offset: int) -> None:
        """Take the rows of a batch, the first of which has the offset `first_offset`. The partition has nothing left here."""
        key = cursor.key
        if rows.num_rows > DECODED_RECORDS_MAX:
            self._rest[key] = cursor, header, rows.slice(DECODED_RECORDS_MAX), first_offset + DECODED_RECORDS_MAX
            rows = rows.slice(0, DECODED_RECORDS_MAX)
        records = arrow_batch.to_records(key.topic, key.partition, first_offset, rows, header, cursor.info.typed)
        records.reverse()
        self._records[key] = records

    def hand_out(self, result: list[Record], limit: int, cursors: Mapping[TopicPartition, PartitionCursor]) -> bool:
        """Move records into `result` until it has `limit`; none of a partition whose cursor is paused. Returns whether there were any."""
        before = len(result)
        for key in list(self._records):
            if cursors[key].is_paused:
                continue
            while len(result) < limit and key in self._records:
                records = self._records[key]
                count = min(limit - len(result), len(records))
                result += records[: -count - 1 : -1]
                del records[-count:]
                if not records:
                    del self._records[key]
                    if key in self._rest:
                        self.decode(*self._rest.pop(key))
        return len(result) > before

    def first_offset(self, key: TopicPartition) -> int | None:
        """The offset of the partition's next record here; None: there is none."""
        records = self._records.get(key)
        return records[-1].offset if records else None

    def drop(self, key: TopicPartition) -> None:
        """Forget what is here of a partition."""
        self._records.pop(key, None)
        self._rest.pop(key, None)

    def keep_only(self, keys: Collection[TopicPartition]) -> None:
        """Forget every partition that is not among `keys`."""
        for key in [key for key in self._records if key not in keys]:
            self.drop(key)

    def give_back(self) -> dict[TopicPartition, int]:
        """Forget everything; returns where each partition has to be read again from."""
        starts = {key: records[-1].offset for key, records in self._records.items()}
        self._records.clear()
        self._rest.clear()
        return starts
