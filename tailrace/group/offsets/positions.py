"""Positions of a consumer in its group, and commits of them.

Auto commit works as in Kafka: a poll commits what earlier calls have delivered, every
auto_commit_interval_ms; a revocation and close() commit what was delivered. If the program ends by
an exception, the records delivered last are not processed, and the next reader gets them.

Owner: one Consumer, one thread.

Invariants:
- A committed offset derives from the program's position only, which is where the record buffer
  begins (`tailrace.fetch.record_buffer`). So undelivered records are never committed.
- Auto commit goes back only after the program has sought back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import NEVER_NS
from tailrace.client.connections.steps import Steps, Wait
from tailrace.client.topics.offsets import Offsets, topic_id_of
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError, UnknownTopicError
from tailrace.core.log import logger
from tailrace.core.records import OffsetAndMetadata, Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.record_buffer import RecordBuffer
from tailrace.group.offsets.offset_commit import Callback, Commit, CommitQueue

NS_PER_MS = 1_000_000
CLOSE_COMMIT_MS = 10_000
"""The timeout of a commit in close() and in a revocation."""
WITHIN_A_POLL_NS = 1_000 * NS_PER_MS
"""The shortest interval of auto commits within one poll."""


class PositionTracker:
    """The positions and commits of one consumer."""

    def __init__(
        self,
        connection: Connection,
        settings: ConsumerSettings,
        now_ns: Callable[[], int],
        fetch_loop: FetchLoop,
        buffer: RecordBuffer,
        member_fields: Callable[[], dict[str, Any]],
        on_refused: Callable[[], None],
    ) -> None:
        """`member_fields` and `on_refused`: see CommitQueue."""
        self._connection = connection
        self._settings = settings
        self._now_ns = now_ns
        self._fetch_loop = fetch_loop
        self._buffer = buffer
        self._commits = CommitQueue(connection, member_fields, on_refused, self.topic_id)
        self._committed: dict[TopicPartition, int] = {}
        """The offset of the latest commit, done or in flight, which auto commit need not repeat. A
        failed commit is removed.
        """
        self.auto_commits = settings.enable_auto_commit
        self._interval_ns = settings.auto_commit_interval_ms * NS_PER_MS
        self._last_commit_ns = 0
        self._commit_at_ns = NEVER_NS
        self.is_handled = True
        """False if the program ends by an exception: the records delivered last are not processed.
        """
        self._warned_failed: ErrorCode | None = None
        self._sought: set[TopicPartition] = set()
        """Partitions with a seek since the last poll. Their last delivered records do not tell
        their position.
        """

    def topic_id(self, key: TopicPartition) -> str:
        """The id of the topic that the name knows, or that the partition is read from; empty: the
        topic that has the name now.
        """
        if known := topic_id_of(key):
            return known
        cursor = self._fetch_loop.cursors.get(key)
        return "" if cursor is None else cursor.info.topic_id.hex()

    # ---- poll ------------------------------------------------------------------------------------

    def begin_poll(self) -> None:
        """The records delivered before are processed."""
        self._buffer.all_processed()
        self._sought.clear()
        if self.auto_commits:
            if not self._last_commit_ns:
                self._last_commit_ns = self._now_ns()
            self._commit_at_ns = self._last_commit_ns + self._interval_ns

    def step(self, now_ns: int) -> None:
        """Make the auto commit that is due, and apply responses."""
        if now_ns >= self._commit_at_ns:
            self._last_commit_ns = now_ns
            self._commit_at_ns = now_ns + max(self._interval_ns, WITHIN_A_POLL_NS)
            offsets = self._uncommitted()
            if offsets:
                self.commit_async(offsets, self._auto_committed)
        if self._commits:
            self._commits.poll(now_ns)
        if self._commits.ended:
            self._commits.run_callbacks()

    def is_due(self, now_ns: int) -> bool:
        """True if `step` has something to do."""
        return bool(self._commits) or bool(self._commits.ended) or now_ns >= self._commit_at_ns

    def due_ns(self) -> int:
        """The time of the next `step` without input."""
        queue_ns = self._commits.due_ns()
        return self._commit_at_ns if queue_ns is None else min(queue_ns, self._commit_at_ns)

    @property
    def has_ended_commits(self) -> bool:
        """True if callbacks are due."""
        return bool(self._commits.ended)

    def run_callbacks(self) -> None:
        """Call the callbacks of commits that are done."""
        self._commits.run_callbacks()

    def begins_at(self, key: TopicPartition, committed: OffsetAndMetadata) -> None:
        """Note that a partition begins at its committed offset."""
        self._committed[key] = int(committed)

    def forget(self, keys: Iterable[TopicPartition]) -> None:
        """Forget partitions that are not read any more."""
        for key in keys:
            self._committed.pop(key, None)

    def on_seek(self, key: TopicPartition) -> None:
        """Note that the program has moved the position."""
        self._sought.add(key)

    # ---- positions -------------------------------------------------------------------------------

    def positions(self) -> Offsets:
        """The offset at which the group goes on in each partition: after the delivered records, or
        before the records delivered last if these are not processed.
        """
        found: Offsets = {}
        first = self._buffer.first_offsets()
        for key, cursor in self._fetch_loop.cursors.items():
            offset = first.get(key, cursor.position)
            if offset is not None:
                found[key] = OffsetAndMetadata(offset, "", cursor.taken_epoch)
        for item in () if self.is_handled else reversed(self._buffer.last_delivered()):
            key = TopicPartition(item.topic, item.partition)
            if key in found and key not in self._sought:
                found[key] = OffsetAndMetadata(
                    item.offset if isinstance(item, Record) else item.base_offset,
                    "",
                    found[key].leader_epoch,
                )
        return found

    def _uncommitted(self) -> Offsets:
        positions = self.positions()
        if self.is_handled:
            return {
                key: one for key, one in positions.items() if self._committed.get(key) != one.offset
            }
        return {
            key: one for key, one in positions.items() if self._committed.get(key, -1) < one.offset
        }

    def with_epochs(self, offsets: Offsets) -> Offsets:
        """The offsets with the leader epochs that this consumer knows."""
        cursors = self._fetch_loop.cursors
        return {
            key: OffsetAndMetadata(one.offset, one.metadata, cursors[key].taken_epoch)
            if one.leader_epoch < 0 and key in cursors and cursors[key].position == one.offset
            else one
            for key, one in offsets.items()
        }

    def commit(self, offsets: Offsets, timeout_ms: float) -> Steps[None]:
        """Commit these offsets after all earlier commits, and wait for the response. Raises its
        error, RequestTimeoutError, NotReachableError.
        """
        commit = self._add(offsets, None, timeout_ms)
        while (until_ns := self._commit_step(commit)) is not None:
            yield Wait(until_ns)
        self._commits.run_callbacks()
        if commit.error is not None:
            raise commit.error

    def _add(self, offsets: Offsets, callback: Callback | None, timeout_ms: float) -> Commit:
        commit = self._commits.add(offsets, partial(self._ended, callback), timeout_ms)
        cursors = self._fetch_loop.cursors
        self._committed.update((key, int(one)) for key, one in offsets.items() if key in cursors)
        return commit

    def _ended(
        self, callback: Callback | None, offsets: Offsets, error: TailraceError | None
    ) -> None:
        if error is not None:
            for key, one in offsets.items():
                if self._committed.get(key) == int(one):
                    del self._committed[key]
        if callback is not None:
            callback(offsets, error)

    def _commit_step(self, commit: Commit) -> int | None:
        """Apply responses and send what is due. Returns the time until which to wait for the
        connection; None: the commit is done.
        """
        connection = self._connection
        connection.check_usable()
        connection.process()
        now_ns = self._now_ns()
        self._commits.poll(now_ns)
        connection.process()
        connection.tick(now_ns)
        if connection.fatal is not None:
            raise connection.fatal
        if commit.is_done:
            return None
        return min(
            at_ns
            for at_ns in (connection.next_tick_ns(), self._commits.due_ns())
            if at_ns is not None
        )

    def commit_async(self, offsets: Offsets, callback: Callback | None) -> Commit | None:
        """Commit these offsets. A later poll, commit or close calls `callback`. Without a callback
        an error is logged.
        """
        if not offsets and callback is None:
            return None
        commit = self._add(
            offsets,
            self._warn_failed if callback is None else callback,
            self._settings.request_timeout_ms,
        )
        self._commits.poll(self._now_ns())
        return commit

    def _warn_failed(self, _offsets: Offsets, error: TailraceError | None) -> None:
        """Log the error of a commit without a callback. Log it once until a commit succeeds,
        because there may be thousands a second.
        """
        if error is not None and self._warned_failed is not error.code:
            logger.warning(
                "commit_async of group %r failed: %s",
                self._settings.group_id,
                error,
            )
        self._warned_failed = None if error is None else error.code

    def _auto_committed(self, _offsets: Offsets, error: TailraceError | None) -> None:
        if error is not None and not isinstance(error, UnknownTopicError):
            logger.warning("auto commit of group %r failed: %s", self._settings.group_id, error)

    def commit_before_revoking(self, keys: list[TopicPartition]) -> Steps[None]:
        """With auto commit, commit what was delivered of these partitions, after all earlier
        commits. If it fails, they are read again.
        """
        requested = set(keys)
        offsets = (
            {key: one for key, one in self._uncommitted().items() if key in requested}
            if self.auto_commits
            else {}
        )
        if not offsets and not self._commits:
            return
        try:
            yield from self.commit(offsets, CLOSE_COMMIT_MS)
        except TailraceError as error:
            if not isinstance(error, UnknownTopicError):  # a topic that is gone has no offsets
                logger.warning(
                    "a consumer of group %r could not commit before it gave partitions up: %s",
                    self._settings.group_id,
                    error,
                )
