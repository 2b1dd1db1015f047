"""Acquired ranges of one partition, read with ordinary fetches at their offsets.

Owner: one ShareConsumer, one thread.

Invariants:
- Each offset of a range is returned once, in order: with its record, without one, or as unreadable.
  It has none in a control batch or an aborted one, and after compaction or retention.
- Records outside of the ranges are not returned.
- A part of a range is read once it is stored: the statement that stores it also moves the range's
  `first` behind it. No signal handler runs between two plain stores, so an interrupted call neither
  loses nor repeats a part.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tailrace.batch import arrow_codec
from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import (
    CorruptBatchError,
    RecordTooLargeError,
    TailraceError,
    UnsupportedBatchError,
)
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.partition_position import PartitionPosition, TakenBatch
from tailrace.fetch.read_errors import UnknownSchemaError


@dataclass(slots=True)
class AcquiredRange:
    """The offsets `first` to `last`, acquired and not read yet."""

    first: int
    last: int
    delivery_count: int
    is_dead: bool
    """True if the delivery count limit is reached: the records go to the dead-letter topic."""
    locked_until_ns: int


class FetchedRange(NamedTuple):
    """The first part of a range, to be stored. `records` are those with offsets `first` to `last`;
    it is empty if there are none, or if they are unreadable.
    """

    run: AcquiredRange
    first: int
    last: int
    records: list[Record]
    unreadable: TailraceError | None = None


class AcquiredRanges:
    """The acquired ranges of one partition, and the cursor that fetches them."""

    def __init__(self, key: TopicPartition, info: TopicInfo) -> None:
        self.info = info
        self.cursor = PartitionPosition(key, info)
        self.runs: deque[AcquiredRange] = deque()
        self._aimed_at = 0
        self._is_scattered = False
        """True if other members acquire records in between. A fetch then asks for no more than was
        acquired.
        """
        self._record_bytes = 0.0
        """The average size of a record in the last batch."""
        self._passed_over: tuple[int, TailraceError | None] | None = None
        """(offset, error): offsets below have no record, or an unreadable one if there is an error.
        """
        self._decoded: TakenBatch | None = None
        """The last batch. The next range may begin in it."""

    @property
    def key(self) -> TopicPartition:
        return self.cursor.key

    @property
    def has_answer(self) -> bool:
        """True if the offset that was aimed at is fetched, has no record, or cannot be read."""
        cursor = self.cursor
        return cursor.has_batch or cursor.error is not None or self._is_left_out(self._aimed_at)

    @property
    def is_broken(self) -> bool:
        """True if the next offset cannot be read."""
        cursor = self.cursor
        return (
            cursor.error is not None
            and not cursor.buffered
            and not (self.runs and self._is_left_out(self.runs[0].first))
        )

    def _is_left_out(self, offset: int) -> bool:
        first, behind = self.cursor.left_out
        return first <= offset < behind

    def aim(self, offset: int) -> None:
        """Make the next batch the one with `offset`. Keep the buffered batches if they serve."""
        cursor = self.cursor
        self._aimed_at = offset
        if self._is_left_out(offset):
            return
        while cursor.buffered and cursor.buffered[0][1] <= offset:
            data, cursor.position = cursor.buffered.popleft()
            cursor.buffered_bytes -= len(data)
        at = cursor.position
        # An error lies after the buffered batches.
        is_sound = cursor.error is None or bool(cursor.buffered)
        if at is not None and is_sound and (at == offset or (cursor.buffered and at < offset)):
            self._is_scattered = self._is_scattered and at != offset
            cursor.position = offset
        else:
            self._is_scattered = at is not None
            cursor.seek(offset)

    def limit_fetch(self, max_bytes: int) -> None:
        """Limit the next fetch to the acquired records if others acquire records in between."""
        requested = sum(run.last - run.first + 1 for run in self.runs)
        self.cursor.fetch_max_bytes = (
            min(max_bytes, int(requested * self._record_bytes) + 1) if self._is_scattered else 0
        )

    def next_piece(self, settings: ConsumerSettings) -> FetchedRange | None:
        """Return the next part of the acquired ranges, the same until it is stored. Returns None if
        it must be fetched first (the cursor is at it), or if `cursor.error` prevents that.
        Unreadable records are returned as a part, not raised.
        """
        self.drop_read()
        if self.is_broken:
            return None
        while self.runs:
            run = self.runs[0]
            if self._passed_over is not None:
                passed, why = self._passed_over
                if run.first < passed:
                    return FetchedRange(run, run.first, min(run.last, passed - 1), [], why)
                self._passed_over = None
            if self._decoded is not None and self._decoded.offsets is not None:
                part_of_sparse = self._sparse_part(run, self._decoded, self._decoded.offsets)
                if part_of_sparse is not None:
                    return part_of_sparse
            elif self._decoded is not None:
                header, rows, start, _ = self._decoded
                if start <= run.first < start + rows.num_rows:
                    last = min(run.last, start + rows.num_rows - 1)
                    part = rows.slice(run.first - start, last - run.first + 1)
                    topic, partition = self.key
                    records = arrow_codec.to_records(
                        topic, partition, run.first, part, header, self.info.typed
                    )
                    return FetchedRange(run, run.first, last, records)
            self.aim(run.first)
            if self._is_left_out(run.first):
                end = self.cursor.left_out[1]
                return FetchedRange(run, run.first, min(run.last, end - 1), [])
            if not self.cursor.buffered:
                return None
            try:
                taken = self.cursor.take(settings)
            except UnknownSchemaError:
                return None
            except (CorruptBatchError, RecordTooLargeError, UnsupportedBatchError) as error:
                self.cursor.drop_buffered(error)
                return None
            if taken is None:
                behind = self.cursor.position
                assert behind is not None
                return FetchedRange(run, run.first, min(run.last, behind - 1), [])
            self._decoded = taken
            header = taken.header
            self._record_bytes = header.batch_length / (header.last_offset_delta + 1)
            if taken.first_offset > run.first:
                return FetchedRange(run, run.first, min(run.last, taken.first_offset - 1), [])
        return None

    def _sparse_part(
        self, run: AcquiredRange, batch: TakenBatch, offsets: pa.Array
    ) -> FetchedRange | None:
        """The part of a range that a sparse batch decides: its next records with consecutive
        offsets, or the next offsets without a record. None: the range does not begin in the batch.
        """
        numbers = arrow_codec.numbers_in(offsets)
        if not batch.first_offset <= run.first < batch.header.next_offset:
            return None
        row = int(numbers.searchsorted(run.first))
        if row == len(numbers) or numbers[row] != run.first:
            behind = batch.header.next_offset if row == len(numbers) else int(numbers[row])
            return FetchedRange(run, run.first, min(run.last, behind - 1), [])
        in_range = numbers[row : row + run.last - run.first + 1]
        count = int((in_range == np.arange(run.first, run.first + len(in_range))).argmin())
        if count == 0:  # all of them are consecutive
            count = len(in_range)
        topic, partition = self.key
        records = arrow_codec.to_records(
            topic, partition, run.first, batch.rows.slice(row, count), batch.header, self.info.typed
        )
        return FetchedRange(run, run.first, run.first + count - 1, records)

    def pass_over(self, behind: int, error: TailraceError | None) -> None:
        """Skip the offsets below `behind`. They have no record, or an unreadable one (`error`)."""
        self.cursor.error = None
        self._passed_over = behind, error

    def drop_read(self) -> None:
        """Remove the ranges that are read to their ends."""
        while self.runs and self.runs[0].first > self.runs[0].last:
            self.runs.popleft()

    def drop_expired(self, now_ns: int) -> list[AcquiredRange]:
        """Remove and return the ranges whose locks expired before they were read. They are
        delivered again.
        """
        expired: list[AcquiredRange] = []
        while self.runs and self.runs[0].locked_until_ns <= now_ns:
            expired.append(self.runs.popleft())
        return expired

    def drop_living(self) -> list[AcquiredRange]:
        """Remove and return the ranges that are not for the dead-letter topic."""
        living = [run for run in self.runs if not run.is_dead]
        if living:
            self.runs = deque(run for run in self.runs if run.is_dead)
        return living
