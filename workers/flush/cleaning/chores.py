"""Chores of a flusher: transaction indexes that could not be written, idle work, checkpoints.

Owner: the flusher, whose agent steps it.

Crash: an index that is missing is made by the next start; a checkpoint that is missing means more
to read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shm.runtime.timing_wheel import TimingWheel
from workers.flush.commit.group_commit import GroupCommit
from workers.log.index_scrubber import scrub_one_index
from workers.log.log_set import LogSet
from workers.log.partition_log import PartitionLog
from workers.log.retention.leases import LogKey, Task

logger = logging.getLogger(__name__)

INDEX_RETRY_NS = 250_000_000
"""Interval between attempts to write a transaction index."""


class Chores:
    """See the module's docstring."""

    def __init__(
        self,
        logs: LogSet,
        commit: GroupCommit,
        wheel: TimingWheel[Task],
        retain: Callable[[PartitionLog], int],
        now_ns: Callable[[], int],
    ) -> None:
        """`retain`: see `LogCleaner`. `now_ns`: the time of the flusher's step."""
        self._now_ns = now_ns
        self._logs = logs
        self._commit = commit
        self._wheel = wheel
        self._retain = retain
        self._index_retries: set[LogKey] = set()
        """Logs with a timer to write their transaction indexes."""

    def write_transaction_indexes(self, log: PartitionLog) -> int:
        """Write the log's missing entries of transaction indexes. On a full or failing disk it is
        tried again, and the last stable offset waits. Returns the amount of work done.
        """
        if not log.transaction_indexes.is_behind or self._logs.get(log.assignment.slot) is not log:
            return 0
        try:
            log.write_transaction_indexes()
        except OSError as error:
            logger.warning(
                "transaction_index_not_written directory=%s error=%r advice=%r",
                log.directory, str(error),
                "free some space or repair the disk; readers of committed records wait, and it is "
                "retrying",
            )  # fmt: skip
            if log.key not in self._index_retries:
                self._index_retries.add(log.key)
                self._wheel.add(self._now_ns() + INDEX_RETRY_NS, lambda: self._retry(log))
            return 0
        return 1

    def _retry(self, log: PartitionLog) -> int:
        """Retry after a failure. Task of a timer."""
        self._index_retries.discard(log.key)
        if self.write_transaction_indexes(log) and not log.group and not log.refusal:
            log.raise_stable()
            self._logs.publish(log)
        return 1

    def run_idle_work(self) -> int:
        """Do one step of idle work: extend the journal with zeroes, then check indexes that were
        not checked since the start. Return 0 when done.
        """
        if self._commit.should_journal and len(self._logs) > 1:
            return int(self._commit.prepare_journal())
        for log in self._logs.all():
            if log.sealed.unscrubbed and not log.group:
                try:
                    scrub_one_index(log)
                    self._retain(log)  # the check may have found a segment's age
                except OSError as error:
                    logger.warning(
                        "index_not_checked directory=%s error=%r", log.directory, str(error)
                    )
                return 1
        return 0

    def checkpoint_some(self, checkpoint_bytes: int) -> None:
        """Write checkpoints, so that recovery reads at most `checkpoint_bytes`."""
        logs = self._logs.all()
        total = sum(log.since_checkpoint_bytes for log in logs)
        if total < checkpoint_bytes:
            return
        for log in sorted(logs, key=lambda log: log.since_checkpoint_bytes, reverse=True):
            if total < checkpoint_bytes // 2 or log.group:
                break
            total -= log.since_checkpoint_bytes
            try:
                if log.refusal or (log.is_unsynced and not self._commit.sync(log)):
                    continue
                log.checkpoint(sync=log.since_checkpoint_bytes >= checkpoint_bytes // 4)
            except OSError as error:
                log.since_checkpoint_bytes = 0
                logger.warning(
                    "checkpoint_not_written directory=%s error=%r", log.directory, str(error)
                )
