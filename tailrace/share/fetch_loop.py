"""What a share consumer fetches: the records that it has acquired, and, while there are none, the
ends of partitions, to learn of new ones.

Owner: one ShareConsumer, one thread.
Invariants: fetches are made only where something was acquired, or, while nothing is, where the
    appliance said that there is nothing yet. Only `lookup`, `learn_topics`, `fresh_info` and
    `repair` ask questions, as steps (`tailrace.client.steps`); when one fails, nothing has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tailrace.client.connection import Connection
from tailrace.client.list_offsets import At, list_offsets, offset_in
from tailrace.client.settings import ConsumerSettings
from tailrace.client.steps import Call, Steps
from tailrace.client.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetcher import Fetcher
from tailrace.protocol.frame import Api
from tailrace.share.acquired_ranges import AcquiredRange, AcquiredRanges, FetchedRange
from tailrace.share.record_buffer import HandedOut
from tailrace.share.requests import Acquired

Found = tuple[TopicPartition, TopicInfo, FetchedRange]


class ShareFetchLoop:
    """See the module's docstring."""

    def __init__(self, connection: Connection, settings: ConsumerSettings, call: Call) -> None:
        self._connection = connection
        self._settings = settings
        self._call = call
        self._fetcher = Fetcher(connection, settings, connection.now_ns)
        self._names: list[str] = []
        self._infos: dict[str, TopicInfo] = {}
        """By name."""
        self._acquired: dict[tuple[str, int], AcquiredRanges] = {}
        """By topic id and partition."""
        self._unknown: list[Acquired] = []
        """Of topics or partitions that are not known yet."""
        self._ends: list[tuple[str, int, int]] = []
        self._is_stale = False
        """Whether one of `_ends` is of such a one."""
        self._expired: list[HandedOut] = []
        self._waiting: list[AcquiredRanges] = []
        """At the ends of their logs."""

    # ---- topics ----------------------------------------------------------------------------------

    def lookup(self, names: list[str]) -> Steps[list[str]]:
        """Know these topics. Returns those that were made anew since they were looked up last.
        Raises UnknownTopicError.
        """
        found = topics_from_metadata(
            (yield from self._call(Api.METADATA, {"topics": names})), *names
        )
        self._names = names
        return self._know(found)

    def _know(self, found: dict[str, TopicInfo]) -> list[str]:
        recreated = [
            name
            for name, info in found.items()
            if name in self._infos and self._infos[name].topic_id != info.topic_id
        ]
        self._infos.update(found)
        for acquired_ranges in [
            acquired_ranges
            for acquired_ranges in self._acquired.values()
            if acquired_ranges.key.topic in recreated
        ]:
            self._drop(acquired_ranges)
        return recreated

    def topic_id(self, name: str) -> str | None:
        """The id of the topic that records are handed out under as `name`."""
        info = self._infos.get(name)
        return None if info is None else info.topic_id.hex()

    def info(self, name: str) -> TopicInfo:
        """Raises InvalidRequestError."""
        info = self._infos.get(name)
        if info is None:
            raise InvalidRequestError(
                f"topic {name!r} is none of those that records were handed out of"
            )
        return info

    def _acquired_ranges(self, topic_id: str, partition: int) -> AcquiredRanges | None:
        """The partition; None: it is not known."""
        acquired_ranges = self._acquired.get((topic_id, partition))
        if acquired_ranges is None:
            for info in self._infos.values():
                if info.topic_id.hex() == topic_id and partition < len(info.partitions):
                    acquired_ranges = self._acquired[topic_id, partition] = AcquiredRanges(
                        TopicPartition(info.name, partition), info
                    )
        return acquired_ranges

    @property
    def needs_topics(self) -> bool:
        """Whether something is said of topics or partitions that are not known: `learn_topics` is
        due.
        """
        return bool(self._unknown) or self._is_stale

    def learn_topics(self) -> Steps[list[str]]:
        """Look the topics up anew, and take in what was acquired of them. Returns those that were
        made anew. Nothing has changed when it raises.
        """
        found: dict[str, TopicInfo] = {}
        for name in self._names:
            try:
                found.update(
                    topics_from_metadata(
                        (yield from self._call(Api.METADATA, {"topics": [name]})), name
                    )
                )
            except UnknownTopicError:
                continue
        recreated = self._know(found)
        unknown, self._unknown, ends = self._unknown, [], self._ends
        self.acquired(unknown)
        self.wait_at(ends)
        self._unknown, self._is_stale = [], False  # what is still not known is gone: its locks pass
        return recreated

    def fresh_info(self, name: str) -> Steps[TopicInfo | None]:
        """The topic with its settings as they are now; None: it is gone, or another one."""
        known = self._infos.get(name)
        try:
            found = topics_from_metadata(
                (yield from self._call(Api.METADATA, {"topics": [name]})), name
            )[name]
        except UnknownTopicError:
            return None
        return found if known is None or found.topic_id == known.topic_id else None

    # ---- what was acquired -----------------------------------------------------------------------

    @property
    def has_ranges(self) -> bool:
        """Whether something is acquired that was not read yet."""
        return bool(self._unknown) or any(
            acquired_ranges.runs for acquired_ranges in self._acquired.values()
        )

    @property
    def fetch_count(self) -> int:
        """Fetches since construction."""
        return self._fetcher.fetch_count

    def acquired(self, runs: Iterable[Acquired]) -> None:
        """These are to be read."""
        for acquired in runs:
            topic_id, partition, first, last, delivery_count, is_dead, locked_until_ns = acquired
            acquired_ranges = self._acquired_ranges(topic_id, partition)
            if acquired_ranges is not None:
                acquired_ranges.runs.append(
                    AcquiredRange(first, last, delivery_count, is_dead, locked_until_ns)
                )
            else:
                self._unknown.append(acquired)
        self._waiting, self._ends = [], []

    def forget_ranges(self) -> list[HandedOut]:
        """Read nothing more of what was acquired. Returns what was not read; what is to be
        dead-lettered is left out.
        """
        forgotten = [
            _as_run(acquired_ranges, run)
            for acquired_ranges in self._acquired.values()
            for run in acquired_ranges.runs
            if not run.is_dead
        ]
        self._unknown = []
        for acquired_ranges in self._acquired.values():
            acquired_ranges.runs.clear()
        return forgotten

    def take_expired(self) -> list[HandedOut]:
        """What was acquired and not read before its lock passed, since this was last asked."""
        expired, self._expired = self._expired, []
        return expired

    def pieces(self, limit: int) -> Iterator[Found]:
        """What has come of what was acquired, up to so many records. A partition that cannot be
        read gives nothing until `repair`.
        """
        count = 0
        now_ns = self._connection.now_ns()
        for acquired_ranges in list(self._acquired.values()):
            if not acquired_ranges.runs:
                continue
            expired = acquired_ranges.drop_expired(now_ns)
            if expired:
                count_expired = sum(run.last - run.first + 1 for run in expired)
                logger.warning(
                    "share_locks_passed partition=%s-%d records=%d: they were not read in time",
                    *acquired_ranges.key,
                    count_expired,
                )
                self._expired += [
                    _as_run(acquired_ranges, run) for run in expired if not run.is_dead
                ]
            while acquired_ranges.runs:
                if count >= limit:
                    return
                piece = acquired_ranges.next_piece(self._settings)
                if piece is None:
                    break
                count += len(piece.records)
                yield acquired_ranges.key, acquired_ranges.info, piece

    # ---- what cannot be read ---------------------------------------------------------------------

    def broken(self) -> list[AcquiredRanges]:
        """Partitions of which something is to be read and nothing can be: each is to be
        repaired.
        """
        return [
            acquired_ranges
            for acquired_ranges in self._acquired.values()
            if acquired_ranges.runs
            and acquired_ranges.cursor.error is not None
            and not acquired_ranges.cursor.buffered
        ]

    def repair(self, acquired_ranges: AcquiredRanges) -> Steps[None]:
        """Pass over what cannot be read. Raises what the partition cannot be read for, if it is to
        be tried again; when a question of its own fails, nothing has changed.
        """
        cursor, error = acquired_ranges.cursor, acquired_ranges.cursor.error
        if error is None or not acquired_ranges.runs:
            return
        first = acquired_ranges.runs[0].first
        if isinstance(error, OffsetOutOfRangeError):
            beginning = yield from self._offset(acquired_ranges.key, "earliest")
            end = yield from self._offset(acquired_ranges.key, "latest")
            if first >= end:  # its log lost them in a crash
                cursor.error = None
                acquired_ranges.runs.clear()
            else:
                acquired_ranges.pass_over(beginning, None)
        elif isinstance(error, (CorruptBatchError, RecordTooLargeError)):
            behind = error.next_offset
            acquired_ranges.pass_over(
                (yield from self._offset(acquired_ranges.key, {"behind": first}))
                if behind is None
                else behind,
                error,
            )
        elif isinstance(error, LogTruncatedError):
            cursor.seek(first)
        elif isinstance(error, (UnknownTopicError, PartitionOutOfRangeError)):
            self._drop(acquired_ranges)
        else:
            cursor.error = None
            raise error

    def _offset(self, key: TopicPartition, at: At) -> Steps[int]:
        return offset_in((yield from list_offsets(self._call, [(key, at)]))[key])

    def _drop(self, acquired_ranges: AcquiredRanges) -> None:
        """The topic was deleted."""
        acquired_ranges.runs.clear()
        self._acquired = {
            key: other for key, other in self._acquired.items() if other is not acquired_ranges
        }

    # ---- fetching --------------------------------------------------------------------------------

    def wait_at(self, ends: Iterable[tuple[str, int, int]]) -> None:
        """Nothing is there: learn of records from these offsets on."""
        self._waiting, self._ends = [], list(ends)
        for topic_id, partition, offset in self._ends:
            acquired_ranges = self._acquired_ranges(topic_id, partition)
            if acquired_ranges is not None:
                acquired_ranges.aim(offset)
                self._waiting.append(acquired_ranges)
            else:
                self._is_stale = True

    def fetch(self) -> bool:
        """Ask for what is wanted and is not being asked for; returns whether some of what was
        acquired can be read now.
        """
        requested = [
            acquired_ranges for acquired_ranges in self._acquired.values() if acquired_ranges.runs
        ]
        for acquired_ranges in requested:
            if acquired_ranges.cursor.error is None:
                acquired_ranges.aim(acquired_ranges.runs[0].first)
        self._connection.process()
        asked = [
            acquired_ranges
            for acquired_ranges in requested or self._waiting
            if not acquired_ranges.cursor.buffered
        ]
        for acquired_ranges in asked:
            acquired_ranges.limit_fetch(self._settings.max_partition_fetch_bytes)
        self._fetcher.begin([acquired_ranges.cursor for acquired_ranges in asked])
        self._connection.process()
        return any(
            acquired_ranges.cursor.buffered or acquired_ranges.cursor.error is not None
            for acquired_ranges in requested
        )

    def apply_topic_changes(self) -> TailraceError | bool:
        """Whether a partition at whose end this consumer waits has records now; an error: it cannot
        be read there. Each news once.
        """
        for acquired_ranges in self._waiting:
            if acquired_ranges.cursor.buffered or acquired_ranges.cursor.error is not None:
                self._waiting = []
                return acquired_ranges.cursor.error or True
        return False

    def retry_at_ns(self, now_ns: int) -> int | None:
        """When a partition may be asked for again that could not be read; None: nothing waits for
        that.
        """
        cursors: list[Any] = [
            acquired_ranges.cursor
            for acquired_ranges in self._acquired.values()
            if acquired_ranges.runs
        ] or [acquired_ranges.cursor for acquired_ranges in self._waiting]
        return min(
            (max(cursor.retry_at_ns, now_ns + 1) for cursor in cursors if cursor.refusals),
            default=None,
        )


def _as_run(acquired_ranges: AcquiredRanges, run: AcquiredRange) -> HandedOut:
    return HandedOut(acquired_ranges.key, run.first, run.last, run.locked_until_ns)
