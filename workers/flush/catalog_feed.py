"""Catalog feed of a flusher: applies the controller's assignments, leases and rings to follow.

Owner: the flusher. In shared memory the consumer position of the controller's lane.

Invariants:
- A message is consumed before it is applied, so that one that fails is not read again.
- An assignment that fails unexpectedly makes its own log refuse writes. The others continue.

Crash: the controller feeds the whole catalog to a successor.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

import orjson

from shm.messages.lane_messages import REPLAY, Assignment, LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneReader
from shm.runtime.error_handler import CountedErrorHandler
from workers.flush.commit.group_commit import GroupCommit
from workers.flush.log_cleaner import LogCleaner
from workers.log.log_set import LogSet
from workers.log.partition_log import PartitionLog

logger = logging.getLogger(__name__)

REOPEN_RETRY_NS = 250_000_000


class CatalogFeed:
    """The flusher's side of the controller's lane."""

    def __init__(
        self,
        lane: LaneReader,
        generation: int,
        logs: LogSet,
        commit: GroupCommit,
        log_cleaner: LogCleaner,
        controller: Doorbell,
        error_handler: CountedErrorHandler,
        follow_worker: Callable[[int], None],
        on_change: Callable[[], None],
        purge: Callable[[bytes], None],
        start_ns: int,
    ) -> None:
        """`follow_worker`: called with a dedicated worker whose ring is to be followed.
        `on_change`: called before an assignment is applied. `purge`: called with the id of a topic
        that is to be removed from the bin.
        """
        self._lane = lane
        self._generation = generation
        self._logs = logs
        self._commit = commit
        self._log_cleaner = log_cleaner
        self._controller = controller
        self._error_handler = error_handler
        self._follow_worker = follow_worker
        self._on_change = on_change
        self._purge = purge
        self._now_ns = start_ns
        self.is_complete = False
        """True once the controller has fed the whole catalog."""
        self.reopen_at_ns = 0
        """Time of the next try to open logs that wait for resources."""

    def read(self, now_ns: int) -> int:
        """Apply the messages in the lane. Return their number."""
        self._now_ns = now_ns
        count = 0
        while (message := self._lane.peek()) is not None:
            payload = bytes(message.payload)
            self._lane.advance(message)
            self._lane.consume()
            count += 1
            if message.kind == LaneKind.ASSIGN:
                self._apply_safely(payload, replay=bool(message.flags & REPLAY))
                continue
            try:
                if message.kind == LaneKind.LEASE:
                    self._log_cleaner.leases.apply(orjson.loads(payload), self._now_ns)
                    self._controller.ring()  # it replies to the reader when this is taken
                elif message.kind == LaneKind.PURGE:
                    self._purge(payload)
                elif message.kind == LaneKind.COMPACT:
                    self._request_compaction(*orjson.loads(payload))
                elif message.kind == LaneKind.FOLLOW:
                    self._follow_worker(message.slot)
                elif message.kind == LaneKind.FED and message.correlation_id == self._generation:
                    self.is_complete = True
            except Exception as error:
                self._error_handler.on_error(
                    f"kind={message.kind} slot={message.slot} bytes={len(payload)}", error
                )
        return count

    def _request_compaction(self, topic_id: str, partition: int, number: int) -> None:
        """Clean a log now. A log that is not compacted any more is left alone."""
        compaction = self._log_cleaner.compaction
        if compaction is not None:
            compaction.request((bytes.fromhex(topic_id), partition), number, self._now_ns)

    def apply_from_ring(self, payload: bytes | memoryview) -> None:
        """Apply an assignment that a worker has copied into its ring."""
        self._apply_safely(payload, replay=False)

    def _apply_safely(self, payload: bytes | memoryview, *, replay: bool) -> None:
        """Open, change or remove a partition. If that fails unexpectedly, its log refuses writes
        and the others continue.
        """
        assignment: Assignment | None = None
        try:
            assignment = Assignment.decode(payload)
            self._apply(assignment, replay=replay)
        except Exception as error:
            context = (
                f"topic={assignment.topic} partition={assignment.partition}"
                if assignment
                else f"assignment_bytes={len(payload)}"
            )
            sentence = self._error_handler.on_error(context, error)
            if assignment is not None:
                self._logs.show_failed(assignment, sentence)

    def _apply(self, assignment: Assignment, *, replay: bool) -> None:
        self._on_change()
        log = self._logs.get(assignment.slot)
        if log is not None and assignment.revive and log.refusal and not self._add_journaled(log):
            self._logs.publish(log)
            return
        if log is not None and assignment.dropped and log.key[0] == assignment.topic_id:
            if assignment.binned and not self._sync_for_bin(log, assignment):
                return
            self._commit.forget(log)
        departed_to = (
            log.assignment.departing
            if log is not None
            and log.assignment.move
            and log.key[0] == assignment.topic_id
            and not (assignment.dropped or assignment.undeleted)  # the other flusher may have it
            else ""
        )
        if log is not None and assignment.move and not replay:
            self._depart(log, assignment)  # before the table shows that it is carried out
        log = self._logs.apply(
            assignment, replay=replay, on_open=lambda _: self._log_cleaner.forget(assignment.slot)
        )
        if log is not None and assignment.revive and not log.refusal:
            self._commit.forget(log)
            self._logs.journaled.pop(log.key, None)
        if departed_to and not assignment.departing:
            self._discard_copy(assignment, departed_to)
        if log is None:
            if assignment.slot in self._logs.waiting:
                return  # its directory cannot be moved to the bin yet
            self._log_cleaner.forget(assignment.slot)
            self._log_cleaner.leases.forget((assignment.topic_id, assignment.partition))
        else:
            self._log_cleaner.begin(log, self._now_ns)

    def _depart(self, log: PartitionLog, assignment: Assignment) -> None:
        """Complete the copy of a partition that moves to another directory. The controller looks
        for the copy: without it the partition stays here.
        """
        from workers.log.files.departure import complete_copy  # rare

        try:
            if not log.is_open or log.refusal or log.sealed.is_swapping:
                raise OSError(errno.EBUSY, "the log takes no writes, or is being cleaned")
            if not self._commit.sync(log):
                raise OSError(errno.EIO, "the log could not be synced and is offline now")
            log.checkpoint(sync=True)
            copied = complete_copy(self._logs.files, log.directory, assignment)
        except OSError as error:
            logger.warning(
                "partition_not_moved directory=%s to=%s error=%r advice=%r", log.directory,
                assignment.departing, str(error), "it stays where it is; try again",
            )  # fmt: skip
        else:
            logger.info(
                "partition_copied directory=%s to=%s last_bytes=%d", log.directory,
                assignment.departing, copied,
            )  # fmt: skip

    def _discard_copy(self, assignment: Assignment, target: str) -> None:
        """Remove the copy of a partition that stays. No decision can name it any more."""
        from workers.log.files.departure import discard_copy  # rare

        try:
            discard_copy(self._logs.files, target, assignment)
        except OSError as error:
            logger.warning(
                "copy_not_removed path=%s error=%r advice=%r", target, str(error),
                "the next move of the partition replaces it",
            )  # fmt: skip

    def _sync_for_bin(self, log: PartitionLog, assignment: Assignment) -> bool:
        """Make a log durable before it goes to the bin: the journal forgets it. Return False if
        that must wait for resources.
        """
        try:
            if log.is_open and log.is_unsynced and not log.refusal:
                self._commit.sync(log)
        except OSError as error:
            self._logs.wait_to_drop(assignment, error)
            return False
        return True

    def open_waiting(self, now_ns: int, *, replay: bool) -> int:
        """Retry assignments that waited for resources. Recovery waits for all of them: rings hold
        batches for these logs.
        """
        if now_ns < self.reopen_at_ns:
            return 0
        before = len(self._logs.waiting)
        for assignment in list(self._logs.waiting.values()):
            self._apply(assignment, replay=replay)
        self.reopen_at_ns = now_ns + REOPEN_RETRY_NS
        opened = before - len(self._logs.waiting)
        if opened:
            logger.info("waiting_logs_opened count=%d left=%d", opened, len(self._logs.waiting))
            self._controller.ring()
        return opened

    def _add_journaled(self, log: PartitionLog) -> bool:
        """Add this run's journaled batches of a log before it is reopened. Return False if the
        journal cannot be read.
        """
        try:
            journaled = self._commit.journaled_for(log)
        except OSError as error:
            logger.error("journal_not_read directory=%s error=%r", log.directory, str(error))
            return False
        if journaled:
            self._logs.journaled[log.key] = [*self._logs.journaled.get(log.key, []), *journaled]
        return True
