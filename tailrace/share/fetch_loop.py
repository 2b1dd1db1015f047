"""What a share consumer fetches: the records that it has acquired, and, while there are none, the ends of partitions, to learn of new ones.

Owner: one ShareConsumer, one thread.
Invariants: fetches are made only where something was acquired, or, while nothing is, where the appliance said that there is nothing yet. Only `look_up`,
    `learn_topics` and `repair` ask questions, and they change nothing before the last answer has come (an event loop makes them several times).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.errors import (
    CorruptBatchError,
    InvalidRequestError,
    LogTruncatedError,
    OffsetOutOfRangeError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.fetcher import Fetcher
from tailrace.offset_lookup import At, Call, list_offsets, offset_in
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition
from tailrace.settings import ConsumerSettings
from tailrace.share.feed import PartitionFeed, Piece, Run
from tailrace.share.requests import Acquired
from tailrace.topics import TopicInfo, topics_from_metadata

Found = tuple[TopicPartition, TopicInfo, Piece]


class ShareReading:
    """See the module's docstring."""

    def __init__(self, connection: Connection, settings: ConsumerSettings, call: Call) -> None:
        self._connection = connection
        self._settings = settings
        self._call = call
        self._fetcher = Fetcher(connection, settings, connection.now_ns)
        self._names: list[str] = []
        self._infos: dict[str, TopicInfo] = {}
        """By name."""
        self._feeds: dict[tuple[str, int], PartitionFeed] = {}
        """By topic id and partition."""
        self._unknown: list[Acquired] = []
        """Of topics or partitions that are not known yet."""
        self._ends: list[tuple[str, int, int]] = []
        self._is_stale = False
        """Whether one of `_ends` is of such a one."""
        self._waiting: list[PartitionFeed] = []
        """At the ends of their logs."""

    # ---- topics --------------------------------------------------------------------------------------------------------------------------

    def look_up(self, names: list[str]) -> list[str]:
        """Know these topics. Returns those that were made anew since they were looked up last. Raises UnknownTopicError."""
        found = topics_from_metadata(self._call(Api.METADATA, {"topics": names}), *names)
        self._names = names
        return self._know(found)

    def _know(self, found: dict[str, TopicInfo]) -> list[str]:
        anew = [name for name, info in found.items() if name in self._infos and self._infos[name].topic_id != info.topic_id]
        self._infos.update(found)
        for feed in [feed for feed in self._feeds.values() if feed.key.topic in anew]:
            self._drop(feed)
        return anew

    def topic_id(self, name: str) -> str | None:
        """The id of the topic that records are handed out under as `name`."""
        info = self._infos.get(name)
        return None if info is None else info.topic_id.hex()

    def info(self, name: str) -> TopicInfo:
        """Raises InvalidRequestError."""
        info = self._infos.get(name)
        if info is None:
            raise InvalidRequestError(f"topic {name!r} is none of those that records were handed out of")
        return info

    def _feed(self, topic_id: str, partition: int) -> PartitionFeed | None:
        """The partition; None: it is not known."""
        feed = self._feeds.get((topic_id, partition))
        if feed is None:
            for info in self._infos.values():
                if info.topic_id.hex() == topic_id and partition < len(info.partitions):
                    feed = self._feeds[topic_id, partition] = PartitionFeed(TopicPartition(info.name, partition), info)
        return feed

    @property
    def needs_topics(self) -> bool:
        """Whether something is said of topics or partitions that are not known: `learn_topics` is due."""
        return bool(self._unknown) or self._is_stale

    def learn_topics(self) -> list[str]:
        """Look the topics up anew, and take in what was acquired of them. Returns those that were made anew. Nothing has changed when it raises."""
        found: dict[str, TopicInfo] = {}
        for name in self._names:
            try:
                found.update(topics_from_metadata(self._call(Api.METADATA, {"topics": [name]}), name))
            except UnknownTopicError:
                continue
        anew = self._know(found)
        unknown, self._unknown, ends = self._unknown, [], self._ends
        self.acquired(unknown)
        self.wait_at(ends)
        self._unknown, self._is_stale = [], False  # what is still not known is gone: its locks pass
        return anew

    def fresh_info(self, name: str) -> TopicInfo | None:
        """The topic with its settings as they are now; None: it is gone, or another one."""
        known = self._infos.get(name)
        try:
            found = topics_from_metadata(self._call(Api.METADATA, {"topics": [name]}), name)[name]
        except UnknownTopicError:
            return None
        return found if known is None or found.topic_id == known.topic_id else None

    # ---- what was acquired ---------------------------------------------------------------------------------------------------------------

    @property
    def has_runs(self) -> bool:
        """Whether something is acquired that was not read yet."""
        return bool(self._unknown) or any(feed.runs for feed in self._feeds.values())

    @property
    def fetch_count(self) -> int:
        """Fetches since construction."""
        return self._fetcher.fetch_count

    def acquired(self, runs: Iterable[Acquired]) -> None:
        """These are to be read."""
        for acquired in runs:
            topic_id, partition, first, last, delivery_count, is_dead, locked_until_ns = acquired
            feed = self._feed(topic_id, partition)
            if feed is not None:
                feed.runs.append(Run(first, last, delivery_count, is_dead, locked_until_ns))
            else:
                self._unknown.append(acquired)
        self._waiting, self._ends = [], []

    def forget_runs(self) -> int:
        """The locks are gone. Returns how many records were acquired and not read."""
        count = sum(run.last - run.first + 1 for feed in self._feeds.values() for run in feed.runs)
        count += sum(run.last - run.first + 1 for run in self._unknown)
        self._unknown = []
        for feed in self._feeds.values():
            feed.runs.clear()
        return count

    def pieces(self, limit: int) -> Iterator[Found]:
        """What has come of what was acquired, up to so many records. A partition that cannot be read gives nothing until `repair`."""
        count = 0
        now_ns = self._connection.now_ns()
        for feed in list(self._feeds.values()):
            if not feed.runs:
                continue
            expired = feed.drop_expired(now_ns)
            if expired:
                logger.warning("share_locks_passed partition=%s-%d records=%d: they were not read in time", *feed.key, expired)
            while feed.runs:
                if count >= limit:
                    return
                piece = feed.next_piece(self._settings)
                if piece is None:
                    break
                count += len(piece.records)
                yield feed.key, feed.info, piece

    # ---- what cannot be read -------------------------------------------------------------------------------------------------------------

    def broken(self) -> list[PartitionFeed]:
        """Partitions of which something is to be read and nothing can be: each is to be repaired."""
        return [feed for feed in self._feeds.values() if feed.runs and feed.cursor.error is not None and not feed.cursor.buffered]

    def repair(self, feed: PartitionFeed) -> None:
        """Pass over what cannot be read. Raises what the partition cannot be read for, if it is to be tried again; when a question of its own fails, nothing
        has changed.
        """
        cursor, error = feed.cursor, feed.cursor.error
        if error is None or not feed.runs:
            return
        first = feed.runs[0].first
        if isinstance(error, OffsetOutOfRangeError):
            beginning, end = self._offset(feed.key, "earliest"), self._offset(feed.key, "latest")
            if first >= end:  # its log lost them in a crash
                cursor.error = None
                feed.runs.clear()
            else:
                feed.pass_over(beginning, None)
        elif isinstance(error, (CorruptBatchError, RecordTooLargeError)):
            behind = error.next_offset
            feed.pass_over(self._offset(feed.key, {"behind": first}) if behind is None else behind, error)
        elif isinstance(error, LogTruncatedError):
            cursor.seek(first)
        elif isinstance(error, (UnknownTopicError, PartitionOutOfRangeError)):
            self._drop(feed)
        else:
            cursor.error = None
            raise error

    def _offset(self, key: TopicPartition, at: At) -> int:
        return offset_in(list_offsets(self._call, [(key, at)])[key])

    def _drop(self, feed: PartitionFeed) -> None:
        """The topic was deleted."""
        feed.runs.clear()
        self._feeds = {key: other for key, other in self._feeds.items() if other is not feed}

    # ---- fetching ------------------------------------------------------------------------------------------------------------------------

    def wait_at(self, ends: Iterable[tuple[str, int, int]]) -> None:
        """Nothing is there: learn of records from these offsets on."""
        self._waiting, self._ends = [], list(ends)
        for topic_id, partition, offset in self._ends:
            feed = self._feed(topic_id, partition)
            if feed is not None:
                feed.aim(offset)
                self._waiting.append(feed)
            else:
                self._is_stale = True

    def fetch(self) -> bool:
        """Ask for what is wanted and is not being asked for; returns whether some of what was acquired can be read now."""
        wanted = [feed for feed in self._feeds.values() if feed.runs]
        for feed in wanted:
            if feed.cursor.error is None:
                feed.aim(feed.runs[0].first)
        self._connection.process()
        asked = [feed for feed in wanted or self._waiting if not feed.cursor.buffered]
        for feed in asked:
            feed.limit_fetch(self._settings.max_partition_fetch_bytes)
        self._fetcher.begin([feed.cursor for feed in asked])
        self._connection.process()
        return any(feed.cursor.buffered or feed.cursor.error is not None for feed in wanted)

    def takes_news(self) -> TailraceError | bool:
        """Whether a partition at whose end this consumer waits has records now; an error: it cannot be read there. Each news once."""
        for feed in self._waiting:
            if feed.cursor.buffered or feed.cursor.error is not None:
                self._waiting = []
                return feed.cursor.error or True
        return False

    def retry_at_ns(self, now_ns: int) -> int | None:
        """When a partition may be asked for again that could not be read; None: nothing waits for that."""
        cursors: list[Any] = [feed.cursor for feed in self._feeds.values() if feed.runs] or [feed.cursor for feed in self._waiting]
        return min((max(cursor.retry_at_ns, now_ns + 1) for cursor in cursors if cursor.refusals), default=None)
