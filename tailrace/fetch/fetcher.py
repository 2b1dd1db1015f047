"""Fetching: at most one request under way for each partition, answers kept as bytes until they are read.

Partitions that want more are asked for together; those that wait at the end of their log do not hold back those that have something to give. One that cannot
be read now (its log is being recovered, or its disk is broken) is asked for again after a pause, which grows.

Owner: one Consumer, one thread.
Invariants: a partition's buffered batches are consecutive and begin with the one that holds its position; a seek throws away what was buffered and ignores
    what was under way; a batch is decoded (and proven) once, when it is taken; none is asked for while fetch_max_bytes or more are
    buffered of partitions that are not paused; those that are asked for and get nothing come before the others in the next request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

import pyarrow as pa

from tailrace.connection import Connection
from tailrace.errors import CorruptBatchError, LogTruncatedError, OffsetOutOfRangeError, RecordTooLargeError, TailraceError, error_for
from tailrace.formats import arrow_batch
from tailrace.formats.batch_header import ATTRIBUTE_CONTROL, BatchFormatError, BatchHeader, frame_at, header_is_intact, leader_epoch_at
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode, code_of
from tailrace.protocol.requests import FetchedEntry, FetchEntry, FetchRequest
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api, WireError
from tailrace.records import TopicPartition
from tailrace.settings import ConsumerSettings
from tailrace.topics import TopicInfo

RETRIABLE = frozenset({ErrorCode.NOT_READY, ErrorCode.SHUTTING_DOWN, ErrorCode.TOO_MANY_REQUESTS})
"""Not worth telling."""
RETRY_BACKOFF_MAX_MS = 1_000


class PartitionCursor:
    """One assigned partition: where it stands and what is buffered."""

    def __init__(self, key: TopicPartition, info: TopicInfo) -> None:
        self.key = key
        self.info = info
        self.position: int | None = None
        """The next offset to hand out; None: not decided yet (see auto_offset_reset)."""
        self.is_paused = False
        """Hand out and ask for nothing of it: it was paused by the consumer, its topic's delivery is, or other partitions are to be read before it."""
        self.is_paused_by_user = False
        self.is_delivery_paused = False
        self.waits_for_others = False
        """See `tailrace.held_back`."""
        self.from_committed = False
        """Of a group: its position is to be the committed offset, which is not known yet."""
        self.begins_at_earliest = False
        """Without a position it begins at the first record, whatever auto_offset_reset says."""
        self.high_watermark: int | None = None
        self.leader_epoch = -1
        self.taken_epoch = -1
        """The leader epoch of the batch that was taken last; -1: none since the last seek."""
        self.version = 0
        """Grows with each seek: an answer to an older one is not for us."""
        self.buffered: deque[tuple[memoryview, int]] = deque()
        """(batch, next offset behind it)."""
        self.buffered_bytes = 0
        self.fed_number = 0
        """Grows with each answer that has something for it, over all partitions."""
        self.fetch_max_bytes = 0
        """Most bytes that one fetch is to bring of it (one batch always comes); 0: as the settings say."""
        self.error: TailraceError | None = None
        self.refusals = 0
        """How often in a row it could not be read."""
        self.retry_at_ns = 0

    @property
    def fetch_offset(self) -> int | None:
        """The offset to ask for next: behind what is buffered."""
        return self.buffered[-1][1] if self.buffered else self.position

    def seek(self, offset: int | None) -> None:
        """Go on at `offset`; None: where auto_offset_reset says. What is buffered or under way is forgotten."""
        self.position = offset
        self.from_committed = False
        self.leader_epoch = self.taken_epoch = -1
        self.version += 1
        self.buffered.clear()
        self.buffered_bytes = 0
        self.error = None
        self.refusals = self.retry_at_ns = 0

    def pause(self, *, by_user: bool | None = None, delivery: bool | None = None, hand_over: bool | None = None) -> None:
        """Pause it for one of the three reasons, or take that back."""
        if by_user is not None:
            self.is_paused_by_user = by_user
        if delivery is not None:
            self.is_delivery_paused = delivery
        if hand_over is not None:
            self.waits_for_others = hand_over
        self.is_paused = self.is_paused_by_user or self.is_delivery_paused or self.waits_for_others

    def refuse(self, now_ns: int, backoff_ms: int) -> None:
        """It cannot be read now, here; after a pause it may be, or after a seek at once."""
        self.retry_at_ns = now_ns + min(RETRY_BACKOFF_MAX_MS, backoff_ms << min(self.refusals, 10)) * 1_000_000
        self.refusals += 1

    def drop_buffered(self, error: TailraceError) -> None:
        """What is buffered begins with something that cannot be read; what was asked for behind it is not wanted any more."""
        self.version += 1
        self.buffered.clear()
        self.buffered_bytes = 0
        self.error = error

    def take(self, settings: ConsumerSettings) -> tuple[BatchHeader, pa.RecordBatch, int] | None:
        """The next batch, decoded, cut to begin at `position`: (header, rows, offset of the first row). Moves the position behind it.
        Raises CorruptBatchError, RecordTooLargeError.
        """
        while self.buffered:
            data, next_offset = self.buffered[0]
            try:
                header, rows = arrow_batch.decode(
                    data, self.info.schema, self.info.seeds[self.key.partition], trust=not settings.check_batches,
                    unpacked_max_bytes=settings.max_unpacked_batch_bytes,
                )  # fmt: skip
            except RecordTooLargeError as error:
                raise too_large_error(self.key, self.position, next_offset, error.detail) from None
            except TailraceError as error:
                # What the header says of its length in offsets counts only if the header itself is intact.
                intact = header_is_intact(data, self.info.seeds[self.key.partition])
                raise corrupt_error(self.key, self.position, next_offset if intact else None, error.detail) from None
            if self.position is not None and header.base_offset > self.position:
                raise corrupt_error(self.key, self.position, header.base_offset, "the batch that holds it did not come")
            self.buffered.popleft()
            self.buffered_bytes -= len(data)
            position = header.base_offset if self.position is None else self.position
            self.position = next_offset
            self.taken_epoch = header.leader_epoch
            if header.attributes & ATTRIBUTE_CONTROL or next_offset <= position:
                continue
            skipped = max(0, position - header.base_offset)
            return header, rows.slice(skipped) if skipped else rows, header.base_offset + skipped
        return None

    def take_plain(self) -> tuple[arrow_batch.Rows, int, int] | None:
        """The next batch, if its records can be had without Arrow: (rows from the position on, the offset behind them, the batch's bytes), and the position
        is behind it. None: nothing has changed; see `take`.
        """
        if self.info.typed or not self.buffered:
            return None
        data, next_offset = self.buffered[0]
        found = arrow_batch.plain_rows(data, self.info.seeds[self.key.partition], self.key.topic, self.key.partition, self.position)
        if found is None or found[1] != next_offset:
            return None
        self.buffered.popleft()
        self.buffered_bytes -= len(data)
        rows, self.position, self.taken_epoch = found
        return rows, next_offset, len(data)


def _last_fed(cursor: PartitionCursor) -> int:
    return cursor.fed_number


class Fetcher:
    """Fetches for all cursors of a consumer."""

    def __init__(self, connection: Connection, settings: ConsumerSettings, now_ns: Callable[[], int]) -> None:
        self._connection = connection
        self._settings = settings
        self._now_ns = now_ns
        self._under_way: dict[tuple[bytes, int], int] = {}
        """(topic id, partition) -> version of the cursor that was asked for. A cursor that has been moved since may be asked for again."""
        self._received_bytes = 0
        self._fed_count = 0
        self._connection_generation = 0
        self.fetch_count = 0

    @property
    def is_waiting(self) -> bool:
        """Whether a fetch is under way."""
        return bool(self._under_way)

    def begin(self, cursors: Iterable[PartitionCursor]) -> bool:
        """Ask for more for every cursor that has little buffered and is not being asked for."""
        if not self._connection.is_ready:
            return False
        s, now_ns = self._settings, self._now_ns()
        hungry: list[PartitionCursor] = []
        buffered_bytes = 0
        for cursor in cursors:
            if cursor.is_paused:
                continue
            buffered_bytes += cursor.buffered_bytes
            if cursor.position is None or cursor.error is not None or cursor.buffered_bytes >= s.max_partition_fetch_bytes:
                continue
            if cursor.refusals and now_ns < cursor.retry_at_ns:
                continue
            if self._under_way.get((cursor.info.topic_id, cursor.key.partition)) != cursor.version:
                hungry.append(cursor)
        if not hungry or buffered_bytes >= s.fetch_max_bytes:
            return False
        # An answer has room for a few: those first that were given something longest ago.
        hungry.sort(key=_last_fed)
        wanted = {}
        entries: list[FetchEntry] = []
        for cursor in hungry[: requests.FETCH_PARTITIONS_MAX]:
            key = (cursor.info.topic_id, cursor.key.partition)
            offset = cursor.fetch_offset
            assert offset is not None
            wanted[key] = (cursor, cursor.version)
            entries.append(FetchEntry(*key, cursor.leader_epoch, offset, cursor.fetch_max_bytes or s.max_partition_fetch_bytes))
        if self._connection.session.generation != self._connection_generation:
            self._connection_generation = self._connection.session.generation
            self._received_bytes = 0
        request = FetchRequest(s.fetch_max_wait_ms, s.fetch_min_bytes, s.fetch_max_bytes, self._received_bytes, entries)
        if self._connection.request(Api.FETCH, [requests.encode_fetch(request)], partial(self._on_answer, wanted)):
            self._under_way.update({key: version for key, (_, version) in wanted.items()})
            self.fetch_count += 1
            return True
        return False

    def _on_answer(self, wanted: dict[tuple[bytes, int], tuple[PartitionCursor, int]], response: Response | None) -> None:
        for key, (_, version) in wanted.items():
            if self._under_way.get(key) == version:
                del self._under_way[key]
        if response is None:
            return
        if response.code is not ErrorCode.OK:
            for cursor, _ in wanted.values():
                cursor.refuse(self._now_ns(), self._settings.retry_backoff_ms)
                if response.code not in RETRIABLE:
                    cursor.error = error_for(response.code, response.detail())
            return
        for entry, data in requests.decode_fetched(response.body):
            self._received_bytes += len(data)
            if (entry.topic_id, entry.partition) not in wanted:
                raise WireError(ErrorCode.MALFORMED_REQUEST, "a fetch response for a partition that was not asked for")
            cursor, version = wanted[(entry.topic_id, entry.partition)]
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
                self._buffer(cursor, data)

    @staticmethod
    def _error_of(cursor: PartitionCursor, code: ErrorCode, entry: FetchedEntry) -> TailraceError:
        where = f"{cursor.key.topic}-{cursor.key.partition}"
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            return OffsetOutOfRangeError(
                f"{where} holds offsets {entry.log_start_offset} to {entry.high_watermark}, not {cursor.fetch_offset}"
            )
        if code is ErrorCode.CORRUPT_BATCH:
            return corrupt_error(
                cursor.key, cursor.fetch_offset, entry.resume_offset if entry.resume_offset >= 0 else None, "it cannot be read"
            )
        if code is ErrorCode.LOG_TRUNCATED:
            error = LogTruncatedError(
                f"{where} lost what followed offset {entry.resume_offset} in a crash, and this consumer had read up to {cursor.fetch_offset}; "
                f"records from {entry.resume_offset} on may be others now"
            )
            error.offset = entry.resume_offset
            return error
        return error_for(code, f"{where} at offset {cursor.fetch_offset}")

    @staticmethod
    def _buffer(cursor: PartitionCursor, data: memoryview) -> None:
        at = 0
        try:
            while at < len(data):
                frame = frame_at(data, at, len(data))
                if frame is None or not frame[0] or at + frame[0] > len(data):
                    if not at:
                        raise BatchFormatError("cut off")
                    break
                length, _, next_offset = frame
                if next_offset <= (cursor.fetch_offset or 0):
                    raise BatchFormatError(f"a batch that ends before offset {next_offset}")
                cursor.buffered.append((data[at : at + length], next_offset))
                cursor.buffered_bytes += length
                cursor.leader_epoch = leader_epoch_at(data, at)
                at += length
        except BatchFormatError as error:
            cursor.error = corrupt_error(cursor.key, cursor.fetch_offset, None, error.reason)


def corrupt_error(key: TopicPartition, first: int | None, following: int | None, reason: str) -> CorruptBatchError:
    """The error for what is damaged from offset `first` on; `following` None: where the next batch begins is to be asked."""
    where = f"{key.topic}-{key.partition}"
    if following is None:
        error = CorruptBatchError(f"{where}: the batch at offset {first} is damaged ({reason})")
    else:
        error = CorruptBatchError(f"{where}: offsets {first} to {following - 1} are damaged ({reason}); seek to {following} to skip them")
    error.key, error.first_offset, error.next_offset = key, first, following
    return error


def too_large_error(key: TopicPartition, first: int | None, following: int, reason: str) -> RecordTooLargeError:
    """The error for a sound batch that would take too much memory once it is unpacked."""
    error = RecordTooLargeError(
        f"{key.topic}-{key.partition}: the batch of offsets {first} to {following - 1} is not read: its {reason}. "
        f"Read it with a larger max_unpacked_batch_bytes, or seek to {following} to go on behind it"
    )
    error.key, error.first_offset, error.next_offset = key, first, following
    return error
