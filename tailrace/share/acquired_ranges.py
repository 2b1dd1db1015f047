"""Reading acquired records: ordinary fetches at the offsets that were acquired, cut to these.

Owner: one ShareConsumer, one thread.
Invariants: every offset of a run comes out once, in order: with its record, or as one that has none
    (a control batch, or removed by retention), or as one that cannot be read; nothing else comes
    out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.client.settings import ConsumerSettings
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.errors import CorruptBatchError, RecordTooLargeError, TailraceError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetcher import PartitionPosition
from tailrace.format.batch_header import BatchHeader


@dataclass(slots=True)
class AcquiredRange:
    """Offsets `first` to `last` that this consumer has acquired and not read yet."""

    first: int
    last: int
    delivery_count: int
    is_dead: bool
    """They were delivered as often as they may be: to be dead-lettered."""
    locked_until_ns: int


class FetchedRange(NamedTuple):
    """The first part of a run, read. `records` are of offsets `first` to `last`; none where there
    is none, or none that can be read.
    """

    run: AcquiredRange
    first: int
    last: int
    records: list[Record]
    unreadable: TailraceError | None = None


class AcquiredRanges:
    """One partition: see the module's docstring."""

    def __init__(self, key: TopicPartition, info: TopicInfo) -> None:
        self.info = info
        self.cursor = PartitionPosition(key, info)
        self.runs: deque[AcquiredRange] = deque()
        self._is_scattered = False
        """Whether others take records in between: what lies behind those that are wanted is not
        worth fetching then.
        """
        self._record_bytes = 0.0
        """About how many a record takes in its batch."""
        self._passed_over: tuple[int, TailraceError | None] | None = None
        """Offsets below this have no record, or one that cannot be read for this reason."""
        self._decoded: tuple[BatchHeader, pa.RecordBatch, int] | None = None
        """The batch that was taken last, and the offset of its first row here: the next run may
        begin in it.
        """

    @property
    def key(self) -> TopicPartition:
        return self.cursor.key

    def aim(self, offset: int) -> None:
        """Have the next batch be the one that holds `offset`; what is buffered is kept if it can
        be.
        """
        cursor = self.cursor
        while cursor.buffered and cursor.buffered[0][1] <= offset:
            data, cursor.position = cursor.buffered.popleft()
            cursor.buffered_bytes -= len(data)
        at = cursor.position
        is_sound = cursor.error is None or bool(
            cursor.buffered
        )  # an error lies behind what is buffered
        if at is not None and is_sound and (at == offset or (cursor.buffered and at < offset)):
            self._is_scattered = self._is_scattered and at != offset
            cursor.position = offset
        else:
            self._is_scattered = at is not None
            cursor.seek(offset)

    def limit_fetch(self, max_bytes: int) -> None:
        """Have the next fetch bring what was acquired, and what follows, up to `max_bytes`, only
        where no other consumer takes records in between.
        """
        requested = sum(run.last - run.first + 1 for run in self.runs)
        self.cursor.fetch_max_bytes = (
            min(max_bytes, int(requested * self._record_bytes) + 1) if self._is_scattered else 0
        )

    def next_piece(self, settings: ConsumerSettings) -> FetchedRange | None:
        """The next part of what was acquired; None: it is to be fetched first (then the cursor is
        there), or `cursor.error` says why it cannot be. Raises nothing: what cannot be read is a
        piece, too.
        """
        if self.cursor.error is not None and not self.cursor.buffered:
            return None
        while self.runs:
            run = self.runs[0]
            if self._passed_over is not None:
                passed, why = self._passed_over
                if run.first < passed:
                    return self._piece(run, min(run.last, passed - 1), [], why)
                self._passed_over = None
            if self._decoded is not None:
                header, rows, start = self._decoded
                if start <= run.first < start + rows.num_rows:
                    last = min(run.last, start + rows.num_rows - 1)
                    part = rows.slice(run.first - start, last - run.first + 1)
                    topic, partition = self.key
                    records = arrow_batch.to_records(
                        topic, partition, run.first, part, header, self.info.typed
                    )
                    return self._piece(run, last, records)
            self.aim(run.first)
            if not self.cursor.buffered:
                return None
            try:
                taken = self.cursor.take(settings)
            except (CorruptBatchError, RecordTooLargeError) as error:
                self.cursor.drop_buffered(error)
                return None
            if taken is None:
                behind = self.cursor.position
                assert behind is not None
                return self._piece(run, min(run.last, behind - 1), [])
            self._decoded = taken
            self._record_bytes = taken[0].batch_length / max(1, taken[0].record_count)
            if taken[2] > run.first:
                return self._piece(run, min(run.last, taken[2] - 1), [])
        return None

    def pass_over(self, behind: int, error: TailraceError | None) -> None:
        """Offsets below `behind` have no record, or none that can be read."""
        self.cursor.error = None
        self._passed_over = behind, error

    def _piece(
        self,
        run: AcquiredRange,
        last: int,
        records: list[Record],
        unreadable: TailraceError | None = None,
    ) -> FetchedRange:
        piece = FetchedRange(run, run.first, last, records, unreadable)
        run.first = last + 1
        if run.first > run.last:
            self.runs.popleft()
        return piece

    def drop_expired(self, now_ns: int) -> list[AcquiredRange]:
        """Forget runs whose locks have passed before they were read: they come again. Returns
        them.
        """
        expired: list[AcquiredRange] = []
        while self.runs and self.runs[0].locked_until_ns <= now_ns:
            expired.append(self.runs.popleft())
        return expired
