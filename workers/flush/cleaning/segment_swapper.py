"""Segment swapper: swaps the segments of a log that the cleaner has written again, as soon as no
reader keeps the old ones.

Owner: `workers.flush.compaction`.

Invariants:
- Runs are swapped in their order. If one cannot be, those after it are given up: a run may lack
  what an earlier one still has.
- A swap that is decided belongs to its log and is finished, even if the log is not watched any
  more: until then retention removes nothing.

Crash: see `workers.segment.segment_swap`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from workers.flush.cleaning.watched_log import WatchedLog
from workers.flush.commit.group_commit import GroupCommit
from workers.log.log_set import LogSet
from workers.log.partition_log import PartitionLog
from workers.log.retention.leases import RetentionLeases
from workers.segment.files import Files, is_shortage
from workers.segment.segment_swap import remove_cleaned

logger = logging.getLogger(__name__)


class SegmentSwapper:
    """See the module's docstring."""

    def __init__(
        self,
        files: Files,
        logs: LogSet,
        commit: GroupCommit,
        leases: RetentionLeases,
        on_refused: Callable[[WatchedLog], None],
    ) -> None:
        """`on_refused` is called for a log whose segments are not those of a run any more."""
        self._files = files
        self._logs = logs
        self._commit = commit
        self._leases = leases
        self._on_refused = on_refused

    def swap_some(self, known: WatchedLog) -> None:
        """Swap the runs of a log as far as no lease keeps their segments. A log with a group in
        progress, and one whose disk fails, are tried again at the next check.
        """
        log = known.log
        known.waits_for_readers = False
        while known.pending:
            run = known.pending[0]
            leased = self._leases.lowest(log.key)
            if leased is not None and leased < run.end and not log.sealed.is_swapping:
                known.waits_for_readers = True
                return
            if log.group:
                return
            try:
                if log.is_unsynced and not self._commit.sync(log):
                    return
                is_swapped = not log.refusal and log.swap(run)
            except OSError as error:
                self._warn(log, run.base, error)
                return
            if not is_swapped:
                self._on_refused(known)
                self.give_up(known)
                return
            known.pending.pop(0)
            known.heads.note_swapped(run, is_cleaned=known.is_compacted)
            self._logs.publish(log)

    def finish(self, log: PartitionLog) -> None:
        """Finish the swap of a log that is decided, whose run no watched log has any more. It is
        tried again at the next check.
        """
        if log.group or log.refusal:
            return
        try:
            if log.is_unsynced and not self._commit.sync(log):
                return
            log.sealed.finish_swap()
            self._logs.publish(log)
            remove_cleaned(self._files, log.directory)  # of runs that were given up with it
        except OSError as error:
            self._warn(log, log.newest_base, error)

    @staticmethod
    def _warn(log: PartitionLog, base: int, error: OSError) -> None:
        logger.warning(
            "segments_not_swapped directory=%s base=%d shortage=%s error=%r",
            log.directory, base, "yes" if is_shortage(error) else "no", str(error),
        )  # fmt: skip

    def give_up(self, known: WatchedLog) -> None:
        """Remove the cleaned files of a log that are not swapped. A swap that is decided stays."""
        del known.pending[1 if known.log.sealed.is_swapping else 0 :]
        known.waits_for_readers = False
        if known.log.sealed.is_swapping:
            return
        try:
            if self._files.exists(known.log.directory):
                remove_cleaned(self._files, known.log.directory)
        except OSError as error:
            logger.warning(
                "cleaned_files_not_removed directory=%s error=%r", known.log.directory, str(error)
            )
