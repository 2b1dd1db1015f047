"""The fetcher: fetch requests for a consumer's partitions, and the buffered batches.

Each partition has at most one fetch in flight. Responses stay bytes until they are read. Partitions
that need data are fetched together, and those at the end of their log do not delay the others. A
partition that cannot be read (its log is in recovery, or its disk failed) is fetched again after a
growing pause.

Owner: one Consumer, one thread.

Invariants:
- A partition's buffered batches are consecutive and begin with the one that contains its position.
  Offsets without a record (aborted ones, markers of transactions, batches without rows) count to
  the batch before them; before the first batch the position passes over them.
- A seek discards the buffer and ignores the fetch in flight.
- A batch is decoded and verified once, when it is taken.
- No fetch starts while fetch_max_bytes or more of unpaused partitions are buffered.
- Partitions that got nothing in a fetch come first in the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from tailrace.batch import arrow_codec
from tailrace.client.config.settings import LATEST_SCHEMA, ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import (
    CorruptBatchError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    RecordTooLargeError,
    TailraceError,
    UnsupportedBatchError,
    error_for,
)
from tailrace.core.records import Record, TopicName
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    BatchFormatError,
    BatchHeader,
)
from tailrace.format.record_batch.header_peek import (
    frame_at,
    has_no_rows_at,
    header_is_intact,
    leader_epoch_at,
    schema_id_at,
)
from tailrace.protocol import fetch_messages
from tailrace.protocol.fetch_messages import (
    FETCH_UNCOMMITTED,
    FETCHED_GAPS,
    READ_UNCOMMITTED,
    FetchedEntry,
    FetchEntry,
    FetchRequest,
)
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.session import Response

RETRIABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.SHUTTING_DOWN, ErrorCode.TOO_MANY_REQUESTS})
"""Codes that are retried without an error to the user."""
RETRY_BACKOFF_MAX_MS = 1_000


class UnknownSchemaError(UnsupportedBatchError):
    """The batch has a version of its topic's schema that the reader has not looked up yet. Readers
    look it up: a program does not see this error.
    """


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
                    raise _unconvertible(
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


def _last_fed(cursor: PartitionPosition) -> int:
    return cursor.fed_number


class Fetcher:
    """Fetches for all partitions of a consumer."""

    def __init__(
        self, connection: Connection, settings: ConsumerSettings, now_ns: Callable[[], int]
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._now_ns = now_ns
        self._in_flight: dict[tuple[bytes, int], int] = {}
        """(topic id, partition) -> version of the PartitionPosition in that fetch. After a seek it
        may be fetched again.
        """
        self._received_bytes = 0
        self._fed_count = 0
        self._connection_generation = 0
        self.fetch_count = 0
        self._flags = FETCH_UNCOMMITTED if settings.isolation_level == READ_UNCOMMITTED else 0

    @property
    def is_waiting(self) -> bool:
        """True while a fetch is in flight."""
        return bool(self._in_flight)

    def begin(self, cursors: Iterable[PartitionPosition]) -> bool:
        """Fetch every partition that has little buffered and no fetch in flight."""
        if not self._connection.is_ready:
            return False
        s, now_ns = self._settings, self._now_ns()
        hungry: list[PartitionPosition] = []
        buffered_bytes = 0
        for cursor in cursors:
            if cursor.is_paused:
                continue
            buffered_bytes += cursor.buffered_bytes
            if (
                cursor.position is None
                or cursor.error is not None
                or cursor.buffered_bytes >= s.max_partition_fetch_bytes
            ):
                continue
            if cursor.refusals and now_ns < cursor.retry_at_ns:
                continue
            if self._in_flight.get((cursor.info.topic_id, cursor.key.partition)) != cursor.version:
                hungry.append(cursor)
        if not hungry or buffered_bytes >= s.fetch_max_bytes:
            return False
        # A response has room for a few partitions. Those served longest ago come first.
        hungry.sort(key=_last_fed)
        requested = {}
        entries: list[FetchEntry] = []
        for cursor in hungry[: fetch_messages.FETCH_PARTITIONS_MAX]:
            key = (cursor.info.topic_id, cursor.key.partition)
            offset = cursor.fetch_offset
            assert offset is not None
            requested[key] = (cursor, cursor.version)
            entries.append(
                FetchEntry(
                    *key,
                    cursor.leader_epoch,
                    offset,
                    cursor.fetch_max_bytes or s.max_partition_fetch_bytes,
                    self._flags,
                )
            )
        if self._connection.session.generation != self._connection_generation:
            self._connection_generation = self._connection.session.generation
            self._received_bytes = 0
        request = FetchRequest(
            s.fetch_max_wait_ms, s.fetch_min_bytes, s.fetch_max_bytes, self._received_bytes, entries
        )
        if self._connection.request(
            Api.FETCH,
            [fetch_messages.encode_fetch(request)],
            partial(self._on_response, requested, self._connection.version(Api.FETCH)),
        ):
            self._in_flight.update({key: version for key, (_, version) in requested.items()})
            self.fetch_count += 1
            return True
        return False

    def _on_response(
        self,
        requested: dict[tuple[bytes, int], tuple[PartitionPosition, int]],
        api_version: int,
        response: Response | None,
    ) -> None:
        for key, (_, version) in requested.items():
            if self._in_flight.get(key) == version:
                del self._in_flight[key]
        if response is None:
            return
        if response.code is not ErrorCode.OK:
            for cursor, _ in requested.values():
                cursor.refuse(self._now_ns(), self._settings.retry_backoff_ms)
                if response.code not in RETRIABLE:
                    cursor.error = error_for(
                        response.code, response.detail(), response.correlation_id
                    )
            return
        for entry, data in fetch_messages.decode_fetched(response.body, api_version):
            self._received_bytes += len(data)
            if (entry.topic_id, entry.partition) not in requested:
                raise WireError(
                    ErrorCode.MALFORMED_REQUEST,
                    "the fetch response has a partition that the request did not",
                )
            cursor, version = requested[(entry.topic_id, entry.partition)]
            if cursor.version != version:
                continue
            code = code_of(entry.error)
            if entry.high_watermark >= 0:
                cursor.high_watermark = entry.high_watermark
            if code is not ErrorCode.OK:
                cursor.refuse(self._now_ns(), self._settings.retry_backoff_ms)
                if code not in RETRIABLE:
                    cursor.error = self._error_of(cursor, code, entry)
                continue
            cursor.refusals = 0
            if len(data):
                self._fed_count += 1
                cursor.fed_number = self._fed_count
                self._buffer(cursor, data, has_gaps=bool(entry.flags & FETCHED_GAPS))
            following = cursor.fetch_offset
            if following is not None and entry.resume_offset > following and not cursor.error:
                cursor.pass_over(entry.resume_offset, entry.leader_epoch)

    @staticmethod
    def _error_of(cursor: PartitionPosition, code: ErrorCode, entry: FetchedEntry) -> TailraceError:
        where = f"{cursor.key.topic}-{cursor.key.partition}"
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            return OffsetOutOfRangeError(
                f"{where} has offsets {entry.log_start_offset} to {entry.high_watermark}; the "
                f"position is {cursor.fetch_offset}"
            )
        if code is ErrorCode.CORRUPT_BATCH:
            return corrupt_error(
                cursor.key,
                cursor.fetch_offset,
                entry.resume_offset if entry.resume_offset >= 0 else None,
                "it cannot be read",
            )
        if code is ErrorCode.LOG_TRUNCATED:
            error = LogTruncatedError(
                f"{where} lost its records from offset {entry.resume_offset} on in a crash, and "
                f"this consumer had read up to {cursor.fetch_offset}; other records may have "
                "these offsets now"
            )
            error.offset = entry.resume_offset
            return error
        return error_for(code, f"{where} at offset {cursor.fetch_offset}")

    @staticmethod
    def _buffer(cursor: PartitionPosition, data: memoryview, *, has_gaps: bool) -> None:
        """Buffer the batches of a response. `has_gaps`: batches were left out in between."""
        at = 0
        seed = cursor.info.seeds[cursor.key.partition]
        try:
            while at < len(data):
                frame = frame_at(data, at, len(data))
                if frame is None or not frame[0] or at + frame[0] > len(data):
                    if not at:
                        raise BatchFormatError("cut off")
                    break
                length, base_offset, next_offset = frame
                following = cursor.fetch_offset or 0
                if next_offset <= following:
                    raise BatchFormatError(f"the response repeats offsets below {next_offset}")
                leader_epoch = leader_epoch_at(data, at)
                if has_gaps and base_offset > following:
                    cursor.pass_over(base_offset, leader_epoch)
                batch = data[at : at + length]
                if has_no_rows_at(batch, seed):
                    cursor.pass_over(next_offset, leader_epoch)
                else:
                    cursor.buffered.append((batch, next_offset))
                    cursor.buffered_bytes += length
                cursor.leader_epoch = leader_epoch
                at += length
        except BatchFormatError as error:
            cursor.error = corrupt_error(cursor.key, cursor.fetch_offset, None, error.reason)


def corrupt_error(
    key: TopicPartition, first: int | None, following: int | None, reason: str
) -> CorruptBatchError:
    """The error for damage from offset `first` on.

    `following` is the next readable offset, None if it is unknown.
    """
    where = f"{key.topic}-{key.partition}"
    if following is None:
        error = CorruptBatchError(f"{where}: the batch at offset {first} is damaged ({reason})")
    else:
        error = CorruptBatchError(
            f"{where}: offsets {first} to {following - 1} are damaged ({reason}); seek to "
            f"{following} to skip them"
        )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error


def _unconvertible(
    key: TopicPartition, first: int, following: int, reason: str
) -> UnsupportedBatchError:
    """The error for a batch with a value that the newest version of the schema cannot hold."""
    error = UnsupportedBatchError(
        f"{key.topic}-{key.partition}: offsets {first} to {following - 1} do not fit the topic's "
        f'schema: {reason}; read them with reader_schema="batch", or seek to {following} to skip '
        "them"
    )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error


def too_large_error(
    key: TopicPartition, first: int | None, following: int, reason: str
) -> RecordTooLargeError:
    """The error for an intact batch that is too large after decompression."""
    error = RecordTooLargeError(
        f"{key.topic}-{key.partition}: the batch of offsets {first} to {following - 1} is not "
        f"read: its {reason}. "
        f"Raise max_decompressed_batch_bytes, or seek to {following} to skip it"
    )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error
