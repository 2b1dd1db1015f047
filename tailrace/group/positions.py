"""How far a consumer of a group has come, and committing that.

Auto commit, as Kafka's: a poll commits what earlier polls have handed out, every auto_commit_interval_ms; a revocation and close() commit what was handed out.
A loop over the consumer counts record by record; and where a program ends by an exception, what it was given last is not done.

Owner: one Consumer, one thread.
Invariants: auto commit commits nothing that the call of poll() that is under way, or an iteration, has not handed out, and nothing below what was committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import length_hint
from typing import Any

from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.decoded_records import DecodedRecords
from tailrace.errors import TailraceError, UnknownTopicError
from tailrace.groups.offsets import Callback, Commit, CommitQueue, Offsets
from tailrace.protocol.errors import ErrorCode
from tailrace.reading import Reading
from tailrace.records import OffsetAndMetadata, Record, TopicBatch, TopicPartition
from tailrace.settings import ConsumerSettings

NS_PER_MS = 1_000_000
NEVER_NS = 2**63 - 1
CLOSE_COMMIT_MS = 10_000
"""How long close() and a revocation try to commit."""
WITHIN_A_POLL_NS = 1_000 * NS_PER_MS
"""A poll that waits commits so often at most."""


class Progress:
    """See the module's docstring."""

    def __init__(
        self,
        connection: Connection,
        settings: ConsumerSettings,
        now_ns: Callable[[], int],
        reading: Reading,
        decoded: DecodedRecords,
        who: Callable[[], dict[str, Any]],
        on_refused: Callable[[], None],
    ) -> None:
        """`who`, `on_refused`: see CommitQueue."""
        self._connection = connection
        self._settings = settings
        self._now_ns = now_ns
        self._reading = reading
        self._decoded = decoded
        self._commits = CommitQueue(connection, who, on_refused)
        self._committed: dict[TopicPartition, int] = {}
        """What auto commit need not commit again."""
        self.auto_commits = settings.enable_auto_commit
        self._interval_ns = settings.auto_commit_interval_ms * NS_PER_MS
        self._last_commit_ns = 0
        self._commit_at_ns = NEVER_NS
        self.is_handled = True
        """Whether the program is done with what it was handed out; False: it ends by an exception."""
        self._handed_out: list[Record] | list[TopicBatch] = []
        """By the last poll."""
        self._iterating: tuple[list[Record], Iterable[Record]] | None = None
        self._said_failed: ErrorCode | None = None
        self._sought: set[TopicPartition] = set()
        """Moved since the last poll: what was handed out of them says nothing of their position."""

    # ---- poll ------------------------------------------------------------------------------------------------------------------------------

    def begin_poll(self) -> None:
        """What was handed out before is done with."""
        self._iterating = None
        self._sought.clear()
        self._handed_out = []
        if self.auto_commits:
            if not self._last_commit_ns:
                self._last_commit_ns = self._now_ns()
            self._commit_at_ns = self._last_commit_ns + self._interval_ns

    def step(self, now_ns: int) -> None:
        """Commit what is due, take in what has come of commits."""
        if now_ns >= self._commit_at_ns:
            self._last_commit_ns = now_ns
            self._commit_at_ns = now_ns + max(self._interval_ns, WITHIN_A_POLL_NS)
            offsets = self._uncommitted()
            if offsets:
                self.commit_async(offsets, self._auto_committed)
        if self._commits:
            self._commits.pump(now_ns)
        if self._commits.ended:
            self._commits.call_back()

    def due_ns(self) -> int:
        """When `step` has something to do though nothing comes."""
        queue_ns = self._commits.due_ns()
        return self._commit_at_ns if queue_ns is None else min(queue_ns, self._commit_at_ns)

    @property
    def has_ended_commits(self) -> bool:
        """Whether callbacks are to be made."""
        return bool(self._commits.ended)

    def call_back(self) -> None:
        """Make the callbacks of what has ended."""
        self._commits.call_back()

    def begins_at(self, key: TopicPartition, committed: OffsetAndMetadata) -> None:
        """The partition is read from its committed offset."""
        self._committed[key] = int(committed)

    def forget(self, keys: Iterable[TopicPartition]) -> None:
        """These are not read any more."""
        for key in keys:
            self._committed.pop(key, None)

    def handed_out(self, found: list[Record] | list[TopicBatch]) -> None:
        """These are the caller's now."""
        self._handed_out = found

    def iterating(self, records: list[Record], iterator: Iterable[Record]) -> None:
        """The last poll's records are handed out one by one; `iterator` has those that are left."""
        self._iterating = records, iterator

    def left_iteration(self, last: list[Record]) -> None:
        """An iteration ended with this record; what followed it is handed out again."""
        self._iterating = None
        self._sought.clear()
        self._handed_out = last

    def sought(self, key: TopicPartition) -> None:
        """The position was set by the caller."""
        self._sought.add(key)

    # ---- positions -------------------------------------------------------------------------------------------------------------------------

    def positions(self) -> Offsets:
        """Where the group is to go on: behind what was handed out; before what the last poll has handed out, where that is not handled."""
        found: Offsets = {}
        for key, cursor in self._reading.cursors.items():
            first = self._decoded.first_offset(key)
            offset = cursor.position if first is None else first
            if offset is not None:
                found[key] = OffsetAndMetadata(offset, "", cursor.taken_epoch)
        for item in reversed(self._not_handled()):
            key = TopicPartition(item.topic, item.partition)
            if key in found and key not in self._sought:
                found[key] = OffsetAndMetadata(item.offset if isinstance(item, Record) else item.base_offset, "", found[key].leader_epoch)
        return found

    def _not_handled(self) -> list[Record] | list[TopicBatch]:
        if self._iterating is None:
            return [] if self.is_handled else self._handed_out
        records, iterator = self._iterating
        at = len(records) - length_hint(iterator)
        return records[at if self.is_handled else max(0, at - 1) :]

    def _uncommitted(self) -> Offsets:
        positions = self.positions()
        if self.is_handled:
            return {key: one for key, one in positions.items() if self._committed.get(key) != one.offset}
        return {key: one for key, one in positions.items() if self._committed.get(key, -1) < one.offset}

    def with_epochs(self, offsets: Offsets) -> Offsets:
        """The same, with the leader epochs that this consumer knows."""
        cursors = self._reading.cursors
        return {
            key: OffsetAndMetadata(one.offset, one.metadata, cursors[key].taken_epoch)
            if one.leader_epoch < 0 and key in cursors and cursors[key].position == one.offset
            else one
            for key, one in offsets.items()
        }

    def commit(self, offsets: Offsets, timeout_ms: float) -> None:
        """Commit these, behind all that was committed before, and wait for it. Raises what the appliance says, RequestTimeoutError, NotReachableError."""
        commit = self.begin_commit(offsets, timeout_ms)
        while (until_ns := self.commit_step(commit)) is not None:
            self._connection.wait(until_ns - self._now_ns())
        self.end_commit(commit)

    def begin_commit(self, offsets: Offsets, timeout_ms: float) -> Commit:
        """A commit to be waited for: `commit_step` until that returns None, then `end_commit`."""
        return self._commits.add(offsets, None, timeout_ms)

    def commit_step(self, commit: Commit) -> int | None:
        """Take in what has come and send what is due; returns until when to wait for the connection, None: it is done."""
        connection = self._connection
        connection.check_usable()
        connection.process()
        now_ns = self._now_ns()
        self._commits.pump(now_ns)
        connection.process()
        connection.tick(now_ns)
        if connection.fatal is not None:
            raise connection.fatal
        if commit.is_done:
            return None
        return min(at_ns for at_ns in (connection.next_tick_ns(), self._commits.due_ns()) if at_ns is not None)

    def end_commit(self, commit: Commit) -> None:
        """Make the callbacks of what was committed before. Raises what the appliance says."""
        self._commits.call_back()
        if commit.error is not None:
            raise commit.error
        self._remember(commit.offsets)

    def commit_async(self, offsets: Offsets, callback: Callback | None) -> Commit | None:
        """Commit these; `callback` is called by a later poll, commit or close. Without one the log is told of what fails."""
        if not offsets and callback is None:
            return None
        commit = self._commits.add(offsets, self._say_failed if callback is None else callback, self._settings.request_timeout_ms)
        self._commits.pump(self._now_ns())
        return commit

    def _say_failed(self, _offsets: Offsets, error: TailraceError | None) -> None:
        """Of a commit that nobody waits for and that has no callback; once until one succeeds, as there may be thousands a second."""
        if error is not None and self._said_failed is not error.code:
            logger.warning("commit_async of group %r failed, and has no callback to say so: %s", self._settings.group_id, error)
        self._said_failed = None if error is None else error.code

    def _auto_committed(self, offsets: Offsets, error: TailraceError | None) -> None:
        if error is None:
            self._remember(offsets)
        elif not isinstance(error, UnknownTopicError):
            logger.warning("auto commit of group %r failed: %s", self._settings.group_id, error)

    def _remember(self, offsets: Offsets) -> None:
        self._committed.update((key, int(one)) for key, one in offsets.items() if key in self._reading.cursors)

    def commit_before_revoking(self, keys: list[TopicPartition]) -> None:
        """What was handed out of these (auto commit), behind what was committed before."""
        offsets = self.to_commit_before_revoking(keys)
        if offsets is None:
            return
        try:
            self.commit(offsets, CLOSE_COMMIT_MS)
        except TailraceError as error:
            self.say_not_committed(error)

    def to_commit_before_revoking(self, keys: list[TopicPartition]) -> Offsets | None:
        """What is to be committed before these are given up; None: nothing is, and nothing is under way."""
        wanted = set(keys)
        offsets = {key: one for key, one in self._uncommitted().items() if key in wanted} if self.auto_commits else {}
        return offsets if offsets or self._commits else None

    def say_not_committed(self, error: TailraceError) -> None:
        """A commit before a revocation failed: what was handed out is read again."""
        if not isinstance(error, UnknownTopicError):  # a topic that is gone has no offsets
            logger.warning("a consumer of group %r could not commit before it gave partitions up: %s", self._settings.group_id, error)
