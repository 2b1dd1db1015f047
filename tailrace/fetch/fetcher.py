"""The fetcher: fetch requests for a consumer's partitions, and the buffered batches.

Each partition has at most one fetch in flight. Responses stay bytes until they are read. Partitions
that need data are fetched together, and those at the end of their log do not delay the others. A
partition that cannot be read (its log is in recovery, or its disk failed) is fetched again after a
growing pause.

Owner: one Consumer, one thread.

Invariants:
- No fetch starts while fetch_max_bytes or more of unpaused partitions are buffered.
- Partitions that got nothing in a fetch come first in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.core.error_codes import ErrorCode, code_of
from tailrace.core.errors import LogTruncatedError, OffsetOutOfRangeError, TailraceError, error_for
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.read_errors import corrupt_error
from tailrace.format.record_batch.batch_header import BatchFormatError
from tailrace.format.record_batch.header_peek import frame_at, has_no_rows_at, leader_epoch_at
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
        if code is ErrorCode.NOT_AUTHORIZED:
            return error_for(
                code, f"the user of this client may not read topic {cursor.key.topic!r}"
            )
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
