"""Position of an assigned partition: the next offset, and the batches that were fetched for it.

Owner: the fetcher of one reader, one thread.

Invariants:
- The buffered batches are consecutive and begin with the one that contains the position. Offsets
  without a record (aborted ones, markers of transactions, batches without rows) count to the batch
  before them; before the first batch the position passes over them.
- A seek discards the buffer and ignores the fetch in flight (`version`).
- A batch is decoded and verified once, when it is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pyarrow as pa

from tailrace.batch import arrow_codec
from tailrace.client.config.settings import LATEST_SCHEMA, ConsumerSettings
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import RecordTooLargeError, TailraceError, UnsupportedBatchError
from tailrace.core.records import Record, TopicName
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.read_errors import (
    UnknownSchemaError,
    corrupt_error,
    too_large_error,
    unconvertible_error,
)
from tailrace.format.record_batch.batch_header import ATTRIBUTE_CONTROL, BatchHeader
from tailrace.format.record_batch.header_peek import header_is_intact, schema_id_at

RETRY_BACKOFF_MAX_MS = 1_000


class TakenBatch(NamedTuple):
    """A decoded batch, from the position on. It has at least one row."""

    header: BatchHeader
    rows: pa.RecordBatch
    first_offset: int
    """The offset of the first row."""
    offsets: pa.Array | None
    """The offset of each row (int64); None: they are consecutive."""


class PartitionPosition:
    """An assigned partition with its position and buffered batches. Variables call it a cursor.

    `position` is where decoding goes on. The program's position may be before it, at the first
    record in the record buffer (`tailrace.fetch.record_buffer`).
    """

    def __init__(self, key: TopicPartition, info: TopicInfo) -> None:
        self.key = TopicPartition(
            TopicName(key.topic, info.topic_id, getattr(info, "created_us", 0)), key.partition
        )
        self.info = info
        self.position: int | None = None
        """The next offset to return; None: not decided yet (see auto_offset_reset)."""
        self.is_paused = False
        """True if nothing of it is fetched or returned: the user paused it, its topic's delivery is
        paused, or the hash slot barrier holds it back.
        """
        self.is_paused_by_user = False
        self.is_delivery_paused = False
        self.waits_for_others = False
        """True while the hash slot barrier holds it back (`tailrace.fetch.hash_slot_barrier`)."""
        self.from_committed = False
        """True while its committed offset, the position to be, is unknown. Only in a group."""
        self.begins_at_earliest = False
        """True if it begins at the first record without a position,
        regardless of auto_offset_reset.
        """
        self.is_requested: Callable[[Record], bool] | None = None
        """True for the records to return; None: all."""
        self.high_watermark: int | None = None
        self.leader_epoch = -1
        self.taken_epoch = -1
        """The leader epoch of the batch taken last, or in which the offsets without a record behind
        it were read; -1: none since the last seek.
        """
        self._passed_epochs: deque[tuple[int, int]] = deque()
        """(offset, leader epoch): up to there the buffer has offsets without a record, which may be
        of a later epoch than the batch before them.
        """
        self.version = 0
        """Counts seeks. A response to a fetch of an older version is ignored."""
        self.buffered: deque[tuple[memoryview, int]] = deque()
        """(batch, next offset after it and the offsets without a record behind it)."""
        self.left_out: tuple[int, int] = (0, 0)
        """The last range of offsets without a record that the position has passed over: (first, the
        one behind it).
        """
        self.buffered_bytes = 0
        self.fed_number = 0
        """The number of the last response with data for it, counted over all partitions."""
        self.fetch_max_bytes = 0
        """Most bytes of it in one fetch (one batch always fits); 0: max_partition_fetch_bytes."""
        self.error: TailraceError | None = None
        self.unknown_schema = -1
        """The schema id of the first buffered batch while its version has to be looked up."""
        self.unknown_since_ns = self.learn_at_ns = 0
        self.refusals = 0
        """Consecutive failed fetches."""
        self.retry_at_ns = 0

    @property
    def has_batch(self) -> bool:
        """True if a batch is buffered and can be decoded."""
        return bool(self.buffered) and self.unknown_schema < 0

    @property
    def fetch_offset(self) -> int | None:
        """The offset of the next fetch, after the buffered batches."""
        return self.buffered[-1][1] if self.buffered else self.position

    def seek(self, offset: int | None) -> None:
        """Move to `offset`, or with None as auto_offset_reset says. Discards the buffer and the
        fetch in flight.
        """
        self.position = offset
        self.from_committed = False
        self.leader_epoch = self.taken_epoch = -1
        self._passed_epochs.clear()
        self.left_out = (0, 0)
        self.version += 1
        self.buffered.clear()
        self.buffered_bytes = 0
        self.error = None
        self.unknown_schema = -1
        self.refusals = self.retry_at_ns = 0

    def pause(
        self,
        *,
        by_user: bool | None = None,
        delivery: bool | None = None,
        hand_over: bool | None = None,
    ) -> None:
        """Set or clear one of the three reasons for a pause."""
        if by_user is not None:
            self.is_paused_by_user = by_user
        if delivery is not None:
            self.is_delivery_paused = delivery
        if hand_over is not None:
            self.waits_for_others = hand_over
        self.is_paused = self.is_paused_by_user or self.is_delivery_paused or self.waits_for_others

    def refuse(self, now_ns: int, backoff_ms: int) -> None:
        """Note a failed fetch: the next one waits for a growing pause, or for a seek."""
        self.retry_at_ns = (
            now_ns + min(RETRY_BACKOFF_MAX_MS, backoff_ms << min(self.refusals, 10)) * 1_000_000
        )
        self.refusals += 1

    def pass_over(self, offset: int, leader_epoch: int) -> None:
        """Note that what follows the buffered batches has no record up to `offset`, in a log that
        had this leader epoch there.
        """
        self.leader_epoch = max(self.leader_epoch, leader_epoch)
        if self.buffered:
            self.buffered[-1] = self.buffered[-1][0], offset
            while self._passed_epochs and self._passed_epochs[0][0] < (self.position or 0):
                self._passed_epochs.popleft()
            self._passed_epochs.append((offset, leader_epoch))
        elif self.position is not None:
            self._leave_out(self.position, offset)
            self.position = offset
            self.taken_epoch = max(self.taken_epoch, leader_epoch)

    def _leave_out(self, first: int, behind: int) -> None:
        if self.left_out[1] == first:
            first = self.left_out[0]
        self.left_out = first, behind
        while self._passed_epochs and self._passed_epochs[0][0] <= behind:
            self.taken_epoch = max(self.taken_epoch, self._passed_epochs.popleft()[1])

    def drop_buffered(self, error: TailraceError) -> None:
        """Discard the buffer, which begins with an unreadable batch,
        and keep `error` for the user.
        """
        self.version += 1
        self.buffered.clear()
        self._passed_epochs.clear()
        self.buffered_bytes = 0
        self.error = error

    def take(self, settings: ConsumerSettings) -> TakenBatch | None:
        """Decode the next batch with rows from `position` on.

        Moves the position after it. Raises CorruptBatchError, RecordTooLargeError,
        UnsupportedBatchError for a value that the newest version of the schema cannot hold, and
        UnknownSchemaError, which changes nothing but `unknown_schema`.
        """
        while self.buffered:
            data, next_offset = self.buffered[0]
            schema = self._schema_of(data)
            try:
                header, rows, offsets = arrow_codec.decode_with_offsets(
                    data, schema, self.info.seeds[self.key.partition],
                    trust=not settings.validate_batches,
                    unpacked_max_bytes=settings.max_decompressed_batch_bytes,
                )  # fmt: skip
            except RecordTooLargeError as error:
                raise too_large_error(self.key, self.position, next_offset, error.detail) from None
            except TailraceError as error:
                # The length in offsets counts only if the header is intact.
                intact = header_is_intact(data, self.info.seeds[self.key.partition])
                raise corrupt_error(
                    self.key, self.position, next_offset if intact else None, error.detail
                ) from None
            if self.position is not None and header.base_offset > self.position:
                raise corrupt_error(
                    self.key,
                    self.position,
                    header.base_offset,
                    "the batch with this offset is missing in the response",
                )
            if schema is not self.info.schema and settings.reader_schema == LATEST_SCHEMA:
                try:
                    rows = self.info.history.convert(rows, header.schema_id)
                except UnsupportedBatchError as error:
                    raise unconvertible_error(
                        self.key, header.base_offset, next_offset, error.detail
                    ) from None
            self.buffered.popleft()
            self.buffered_bytes -= len(data)
            position = header.base_offset if self.position is None else self.position
            self.position = next_offset
            self.taken_epoch = header.leader_epoch
            if offsets is not None:
                rows, offsets = arrow_codec.rows_from(position, rows, offsets)
                count = len(offsets)
                self._leave_out(offsets[count - 1].as_py() + 1 if count else position, next_offset)
                if count:
                    return TakenBatch(header, rows, offsets[0].as_py(), offsets)
                continue
            if next_offset > header.next_offset:
                self._leave_out(header.next_offset, next_offset)
            if header.attributes & ATTRIBUTE_CONTROL or header.next_offset <= position:
                continue
            skipped = max(0, position - header.base_offset)
            if skipped:
                rows = rows.slice(skipped)
            return TakenBatch(header, rows, header.base_offset + skipped, None)
        return None

    def _schema_of(self, data: memoryview) -> pa.Schema:
        """The schema that a batch was written with. Raises UnknownSchemaError."""
        info = self.info
        if not info.typed:
            return info.schema
        schema_id = schema_id_at(data, 0)
        if schema_id == info.schema_id:
            return info.schema
        if schema_id not in info.history:
            if not header_is_intact(data, info.seeds[self.key.partition]):
                return info.schema  # decoding it says what is wrong
            self.unknown_schema = schema_id
            raise UnknownSchemaError(
                f"{self.key.topic}-{self.key.partition} has a batch of schema {schema_id}, which "
                "the appliance does not describe"
            )
        return info.history.schema(schema_id)

    def schema_id_of(self, taken: TakenBatch, settings: ConsumerSettings) -> int:
        """The version of the schema that the rows of a batch of `take` have."""
        is_latest = settings.reader_schema == LATEST_SCHEMA
        return self.info.schema_id if is_latest else taken.header.schema_id

    def receive_plain(self) -> tuple[arrow_codec.Rows, int, int] | None:
        """Decode the next batch without Arrow: (rows from the position on, next offset, batch
        bytes).

        Moves the position after it. None if the batch needs Arrow: nothing has changed, use `take`.
        """
        if self.info.typed or not self.buffered:
            return None
        data, next_offset = self.buffered[0]
        found = arrow_codec.plain_rows(
            data,
            self.info.seeds[self.key.partition],
            self.key.topic,
            self.key.partition,
            self.position,
        )
        if found is None or found[1] > next_offset:
            return None
        self.buffered.popleft()
        self.buffered_bytes -= len(data)
        rows, end, self.taken_epoch = found
        self.position = next_offset
        if end != next_offset:
            self._leave_out(end, next_offset)
        return rows, end, len(data)
