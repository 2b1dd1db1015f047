"""The fetch loop of a share consumer: fetches the acquired records. While nothing is acquired, it
waits at the ends of the partitions for new records.

Owner: one ShareConsumer, one thread.

Invariants:
- Fetches are made for acquired ranges. While there are none, they are made at the ends that the
  group coordinator has named.
- Ranges of topics that are not subscribed any more are given back unread, but for those of dead
  letters.
- Only `lookup`, `learn_topics`, `learn_schemas`, `fresh_info` and `repair` wait for a response.
  They are steps
  (`tailrace.client.connections.steps`), and change nothing when they fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Call, Steps
from tailrace.client.topics.list_offsets import At, list_offsets, offset_in
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    TailraceError,
    UnknownTopicError,
    UnsupportedBatchError,
)
from tailrace.core.log import logger
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import learn_schema
from tailrace.fetch.fetcher import Fetcher
from tailrace.protocol.frame import Api
from tailrace.share.acquired.buffer import LockedRange
from tailrace.share.acquired.ranges import AcquiredRange, AcquiredRanges, FetchedRange
from tailrace.share.requests import Acquired

Found = tuple[TopicPartition, TopicInfo, FetchedRange]
LEARN_INTERVAL_NS = 20_000_000


class ShareFetchLoop:
    """The fetch loop of one share consumer."""

    def __init__(self, connection: Connection, settings: ConsumerSettings, call: Call) -> None:
        self._connection = connection
        self._settings = settings
        self._call = call
        self._fetcher = Fetcher(connection, settings, connection.now_ns)
        self._names: list[str] = []
        self._infos: dict[str, TopicInfo] = {}
        """Topics by name."""
        self._acquired: dict[tuple[str, int], AcquiredRanges] = {}
        """Acquired ranges by topic id and partition."""
        self._unplaced: list[tuple[str, int, AcquiredRange]] = []
        """Acquired ranges that their partitions do not have yet: (topic id, partition, range).
        Those that `_place` leaves are of unknown topics or partitions.
        """
        self._learn_at_ns = 0
        """The time of the next `learn_topics` for them."""
        self._acquired_number = 0
        """The request whose ranges were added last."""
        self._ends: list[tuple[str, int, int]] = []
        self._is_stale = False
        """True if one of `_ends` has an unknown topic or partition."""
        self._unread: list[LockedRange] = []
        self._waiting: list[AcquiredRanges] = []
        """Partitions that are fetched at the ends of their logs."""

    # ---- topics ----------------------------------------------------------------------------------

    def lookup(self, names: list[str]) -> Steps[list[str]]:
        """Look up these topics, the subscription from now on. Returns those that were recreated
        since the last lookup. Raises UnknownTopicError.
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
        """The id of the known topic with this name, in hexadecimal."""
        info = self._infos.get(name)
        return None if info is None else info.topic_id.hex()

    def is_recreated(self, record: Record) -> bool:
        """True if the record's topic was deleted, and another topic has its name now."""
        info = self._infos.get(record.topic)
        return info is not None and record.topic_id not in (b"", info.topic_id)

    def info(self, name: str) -> TopicInfo:
        """The known topic with this name. Raises InvalidRequestError."""
        info = self._infos.get(name)
        if info is None:
            raise InvalidRequestError(
                f"this consumer has delivered no records of topic {name!r}; acknowledge "
                "records of its own polls"
            )
        return info

    def _acquired_ranges(self, topic_id: str, partition: int) -> AcquiredRanges | None:
        """The ranges of a partition; None: the topic or partition is unknown."""
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
        """True if `learn_topics` is due: a range or an end has an unknown topic or partition."""
        return self._is_stale or (
            bool(self._unplaced) and self._connection.now_ns() >= self._learn_at_ns
        )

    def learn_topics(self) -> Steps[list[str]]:
        """Look up the topics again, and assign the unknown ranges to them. Returns the recreated
        topics. Changes nothing when it raises.

        Topics of earlier subscriptions are among them: the response to an acquire request may come
        after the subscription has changed.
        """
        found: dict[str, TopicInfo] = {}
        for name in dict.fromkeys([*self._names, *self._infos]):
            try:
                found.update(
                    topics_from_metadata(
                        (yield from self._call(Api.METADATA, {"topics": [name]})), name
                    )
                )
            except UnknownTopicError:
                continue
        recreated = self._know(found)
        ends = self._ends
        self._place()
        self._waiting, self._ends = [], []
        self.wait_at(ends)
        # A front may know a new partition a moment after the groups process. All other ranges that
        # are still unknown are of deleted topics: their locks expire.
        now_ns, ids = self._connection.now_ns(), {one.topic_id.hex() for one in found.values()}
        self._learn_at_ns = now_ns + LEARN_INTERVAL_NS
        self._unplaced = [
            one for one in self._unplaced if one[0] in ids and one[2].locked_until_ns > now_ns
        ]
        self._is_stale = False
        return recreated

    def fresh_info(self, name: str) -> Steps[TopicInfo | None]:
        """The topic with its current settings; None: it was deleted or recreated."""
        known = self._infos.get(name)
        try:
            found = topics_from_metadata(
                (yield from self._call(Api.METADATA, {"topics": [name]})), name
            )[name]
        except UnknownTopicError:
            return None
        return found if known is None or found.topic_id == known.topic_id else None

    # ---- acquired ranges -------------------------------------------------------------------------

    @property
    def has_ranges(self) -> bool:
        """True if acquired records are not read yet."""
        return bool(self._unplaced) or any(
            acquired_ranges.runs for acquired_ranges in self._acquired.values()
        )

    @property
    def fetch_count(self) -> int:
        """Fetches since construction."""
        return self._fetcher.fetch_count

    def acquired(self, number: int, runs: Iterable[Acquired]) -> None:
        """Add the ranges of the response to request `number`. A repeated call adds nothing: after a
        signal the same response comes again.
        """
        if number != self._acquired_number:
            added = [
                (
                    run.topic_id,
                    run.partition,
                    AcquiredRange(
                        run.first, run.last, run.delivery_count, run.is_dead, run.locked_until_ns
                    ),
                )
                for run in runs
            ]
            # Two stores without a call in between: no signal handler runs there.
            self._unplaced, self._acquired_number = [*self._unplaced, *added], number
            self._learn_at_ns = 0
        self._place()
        self._waiting, self._ends = [], []

    def _place(self) -> None:
        """Give acquired ranges to their partitions, but for unknown ones. Called before ranges are
        read or removed, so that it continues where a signal interrupted it.
        """
        unplaced, index = self._unplaced, 0
        while index < len(unplaced):
            topic_id, partition, run = unplaced[index]
            acquired_ranges = self._acquired_ranges(topic_id, partition)
            if acquired_ranges is None:
                index += 1
                continue
            if not any(known is run for known in acquired_ranges.runs):
                acquired_ranges.runs.append(run)
            del unplaced[index]

    def forget_ranges(self) -> list[LockedRange]:
        """Forget all acquired ranges. Returns the unread ones, without those for the dead-letter
        topic.
        """
        self._place()
        forgotten = self.take_unread() + [
            _locked_range(acquired_ranges, run)
            for acquired_ranges in self._acquired.values()
            for run in acquired_ranges.runs
            if not run.is_dead
        ]
        self._unplaced = []
        for acquired_ranges in self._acquired.values():
            acquired_ranges.runs.clear()
        return forgotten

    def take_unread(self) -> list[LockedRange]:
        """Remove and return the ranges that are not read: their locks have expired, or their topic
        is not subscribed any more.
        """
        unread, self._unread = self._unread, []
        return unread

    def pieces(self, limit: int) -> Iterator[Found]:
        """The fetched parts of the acquired ranges, up to `limit` records; the caller stores each
        before it asks for the next. An unreadable partition returns nothing until `repair`.
        """
        if self._unplaced:
            self._place()
        count = 0
        now_ns = self._connection.now_ns()
        for acquired_ranges in list(self._acquired.values()):
            acquired_ranges.drop_read()
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
            unread = expired
            if acquired_ranges.key.topic not in self._names:
                unread = [*expired, *acquired_ranges.drop_living()]
            self._unread += [
                _locked_range(acquired_ranges, run) for run in unread if not run.is_dead
            ]
            while acquired_ranges.runs:
                if count >= limit:
                    return
                piece = acquired_ranges.next_piece(self._settings)
                if piece is None:
                    break
                count += len(piece.records)
                yield acquired_ranges.key, acquired_ranges.info, piece
                assert piece.run.first > piece.last, "a part that is read has to be stored"
                acquired_ranges.drop_read()

    def learn_schemas(self) -> Steps[None]:
        """Look up the versions of the schemas that fetched batches have. Raises
        UnsupportedBatchError.
        """
        now_ns = self._connection.now_ns()
        for acquired_ranges in list(self._acquired.values()):
            cursor = acquired_ranges.cursor
            if cursor.unknown_schema < 0 or now_ns < cursor.learn_at_ns:
                continue
            others = [other.cursor for other in self._acquired.values()]
            yield from learn_schema(cursor, self._connection, self._settings, others)
            if cursor.unknown_schema < 0:
                self._infos[cursor.info.name] = cursor.info

    # ---- unreadable partitions -------------------------------------------------------------------

    def broken(self) -> list[AcquiredRanges]:
        """Partitions with acquired records whose fetch failed."""
        return [
            acquired_ranges
            for acquired_ranges in self._acquired.values()
            if acquired_ranges.runs and acquired_ranges.is_broken
        ]

    def repair(self, acquired_ranges: AcquiredRanges) -> Steps[None]:
        """Skip what cannot be read in a partition. Raises the partition's error if the fetch is to
        be retried. Changes nothing when a request of its own fails.
        """
        cursor, error = acquired_ranges.cursor, acquired_ranges.cursor.error
        if error is None or not acquired_ranges.runs:
            return
        first = acquired_ranges.runs[0].first
        if isinstance(error, OffsetOutOfRangeError):
            beginning = yield from self._offset(acquired_ranges.key, "earliest")
            end = yield from self._offset(acquired_ranges.key, "latest")
            if first >= end:  # the log lost these records in a crash
                cursor.error = None
                acquired_ranges.runs.clear()
            else:
                acquired_ranges.pass_over(beginning, None)
        elif isinstance(error, (CorruptBatchError, RecordTooLargeError, UnsupportedBatchError)):
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
        """Forget a partition of a deleted topic."""
        acquired_ranges.runs.clear()
        self._acquired = {
            key: other for key, other in self._acquired.items() if other is not acquired_ranges
        }

    # ---- fetching --------------------------------------------------------------------------------

    def wait_at(self, ends: Iterable[tuple[str, int, int]]) -> None:
        """Wait for new records from these ends of logs on: (topic id, partition, offset)."""
        self._waiting, self._ends = [], list(ends)
        for topic_id, partition, offset in self._ends:
            acquired_ranges = self._acquired_ranges(topic_id, partition)
            if acquired_ranges is not None:
                acquired_ranges.aim(offset)
                self._waiting.append(acquired_ranges)
            else:
                self._is_stale = True

    def fetch(self) -> bool:
        """Fetch what is needed and not in flight. Returns True if acquired records can be read."""
        requested = [
            acquired_ranges for acquired_ranges in self._acquired.values() if acquired_ranges.runs
        ]
        for acquired_ranges in requested:
            if acquired_ranges.cursor.error is None:
                acquired_ranges.aim(acquired_ranges.runs[0].first)
        self._connection.process()
        fetched = [
            acquired_ranges
            for acquired_ranges in requested or self._waiting
            if not acquired_ranges.has_answer
        ]
        for acquired_ranges in fetched:
            acquired_ranges.limit_fetch(self._settings.max_partition_fetch_bytes)
        self._fetcher.begin([acquired_ranges.cursor for acquired_ranges in fetched])
        self._connection.process()
        return any(acquired_ranges.has_answer for acquired_ranges in requested)

    def check_ends(self) -> TailraceError | bool:
        """Check the partitions that are fetched at their ends, once for each change. Returns True
        if one has new records, or the error of one that cannot be read.
        """
        for acquired_ranges in self._waiting:
            if acquired_ranges.has_answer:
                self._waiting = []
                return acquired_ranges.cursor.error or True
        return False

    def retry_at_ns(self, now_ns: int) -> int | None:
        """The time of the next retry of a failed fetch; None: no fetch has failed."""
        cursors: list[Any] = [
            acquired_ranges.cursor
            for acquired_ranges in self._acquired.values()
            if acquired_ranges.runs
        ] or [acquired_ranges.cursor for acquired_ranges in self._waiting]
        times = [self._learn_at_ns] if self._unplaced else []
        return min(
            times
            + [
                max(cursor.retry_at_ns if cursor.refusals else cursor.learn_at_ns, now_ns + 1)
                for cursor in cursors
                if cursor.refusals or cursor.unknown_schema >= 0
            ],
            default=None,
        )


def _locked_range(acquired_ranges: AcquiredRanges, run: AcquiredRange) -> LockedRange:
    return LockedRange(acquired_ranges.key, run.first, run.last, run.locked_until_ns)
