"""How a group of batches becomes durable: file by file, or through the journal; and what happens when the disk refuses.

Owner: the flusher. The one seam between "placed" and "durable".
Invariants: a sync that failed is never tried again on the same pages: the bytes, from ring and journal, go to a new segment in a new file; a log in neither
    half's `dirty` has everything synced that the journal holds for it; a half is used again only when its `dirty` is empty (a log that is offline
    stays there).
Crash: see `journal` and `partition_log`.

    touched files with durability=disk       then
    one, or with many bytes for each         fdatasync each
    more                                     the batches to the journal, one fdatasync; the files are synced a few at a time behind later groups
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from shm.crash_points import crash_point
from workers.files import NO_SPACE, is_shortage
from workers.journal import Journal, JournalBatch
from workers.live_segment import PendingBatch, pending_from_bytes
from workers.partition_log import PartitionLog

logger = logging.getLogger(__name__)

NARROW_GROUP_FILES = 1
JOURNALED_BYTES_PER_FILE = 128 << 10
"""A sync of one more file takes 0.3 ms here, writing this much twice as long; docs/adr/0006."""

Moved = Callable[[PartitionLog, list[tuple[int, int]]], None]
"""Called when the batches of a log's group went to other places, in order."""


class GroupCommit:
    """Commits the groups of one data directory."""

    def __init__(self, journal: Journal, fail: Callable[[PartitionLog, Exception], None], moved: Moved) -> None:
        """`fail`: the log's disk refused for good."""
        self._journal = journal
        self._journal_works = True
        self._fail = fail
        self._moved = moved
        self._dirty: list[dict[tuple[bytes, int], PartitionLog]] = [{}, {}]
        """Per half of the journal: logs whose segments are not synced since."""
        self._owed_syncs = 0.0
        """Files to be synced by what was journaled so far: a share of one for a small frame."""
        self._unrescued: dict[tuple[bytes, int], OSError] = {}
        """Logs whose disk failed, and whose new file could not be made for want of descriptors or memory: they are rescued before anything else."""
        self.shortage: OSError | None = None
        """Why `commit` returned False."""

    @property
    def wants_journal(self) -> bool:
        """Whether the journal's zeroes are still to be written."""
        return self._journal_works and not self._journal.is_prepared

    def leave_journal(self) -> None:
        """An earlier run's journal has what some log has not got yet: this run goes on without one."""
        self._journal_works = False
        logger.warning("journal_kept until the logs that could not be opened are online and the appliance was restarted")

    def prepare_journal(self) -> bool:
        """Some of them, when there is nothing else to do. False: not now."""
        try:
            self._journal.prepare()
        except OSError as error:
            if is_shortage(error):
                return False
            self._give_up_journal(error)
        return True

    def commit(self, logs: list[PartitionLog]) -> bool:
        """Write and, where promised, sync what was placed in `logs`. False: the host is short of something (`shortage`); call again later, nothing is
        lost.
        """
        try:
            self._commit(logs)
        except OSError as error:
            self.shortage = error
            return False
        return True

    def _commit(self, logs: list[PartitionLog]) -> None:
        """Raises OSError for a shortage alone."""
        for log in logs:
            if log.refusal:
                continue
            try:
                self._raise_earlier(log)
                log.write_pending()
            except OSError as error:
                if is_shortage(error):
                    raise
                self._rescue(log, error)
        crash_point("flusher.after_write")
        durable = [log for log in logs if log.is_durable and not log.refusal and log.is_unsynced]
        if len(durable) > NARROW_GROUP_FILES and self._journal_works and self._journal.is_prepared and self._commit_wide(durable):
            crash_point("flusher.after_journal")
        else:
            for log in durable:
                self.sync(log)
        crash_point("flusher.after_sync")

    def _raise_earlier(self, log: PartitionLog) -> None:
        """A sync that failed must not be tried again on the same pages. Raises OSError."""
        earlier = self._unrescued.pop(log.key, None)
        if earlier is not None:
            raise earlier

    def sync(self, log: PartitionLog) -> bool:
        """Make one log durable. False: it is offline now. Raises OSError when its disk failed and the host is short of what a new file needs."""
        try:
            self._raise_earlier(log)
            log.sync()
        except OSError as error:
            self._rescue(log, error)
        if not log.refusal:
            self.forget(log)
        return not log.refusal

    def roll(self, log: PartitionLog) -> bool:
        """Begin a new segment; False: the log went offline. Raises OSError."""
        if log.is_unsynced and not self.sync(log):
            return False
        log.roll()
        return True

    def forget(self, log: PartitionLog) -> None:
        """The log is deleted, or everything of it is on the disk."""
        self._unrescued.pop(log.key, None)
        for dirty in self._dirty:
            dirty.pop(log.key, None)

    def held_for(self, log: PartitionLog) -> list[JournalBatch]:
        """What this run's journal holds of a log whose disk failed. Raises OSError."""
        return self._journal.read_back(*log.key, 0) if any(log.key in dirty for dirty in self._dirty) else []

    def sync_all(self, logs: Iterable[PartitionLog]) -> None:
        """Before a clean end: nothing depends on the journal any more."""
        for log in logs:
            if log.is_unsynced and not log.refusal:
                try:
                    self.sync(log)
                except OSError as error:
                    logger.error("log_not_synced directory=%s error=%r the rings and the journal keep it", log.directory, str(error))

    # ---- journal ---------------------------------------------------------------------------------------------------------------------

    def _commit_wide(self, logs: list[PartitionLog]) -> bool:
        """One frame for all. False: it does not fit, or the journal is broken; sync the files."""
        journal = self._journal
        batches = [
            JournalBatch(log.assignment.topic_id, log.assignment.partition, b.base_offset, b.next_offset, b.data)
            for log in logs
            for b in log.group
        ]
        length = journal.frame_bytes(batches)
        if length > min(journal.half_bytes, len(logs) * JOURNALED_BYTES_PER_FILE) or any(not log.group for log in logs):
            return False
        if not journal.fits(length):
            other = self._dirty[journal.half ^ 1]
            for log in list(other.values()):
                if not log.refusal:
                    self.sync(log)
            if other or any(log.refusal for log in logs):
                return False  # what a log that is offline has not got on its disk stays in the journal
            journal.switch()
        try:
            journal.append(batches)
        except OSError as error:
            self._give_up_journal(error)
            return False
        self._dirty[journal.half].update({log.key: log for log in logs})
        self._sync_some(length)
        return True

    def _sync_some(self, length: int) -> None:
        """Sync as large a share of the other half's files as this frame takes of half of the half in use, so that a switch finds nothing left to do."""
        other = self._dirty[self._journal.half ^ 1]
        self._owed_syncs += 2 * len(other) * length / self._journal.half_bytes
        count = int(self._owed_syncs)
        self._owed_syncs -= count
        for log in [log for log in other.values() if not log.refusal][:count]:
            self.sync(log)

    def _give_up_journal(self, error: OSError) -> None:
        """From now on file by file. What the journal holds stays there: those files are synced first."""
        self._journal_works = False
        logger.error("journal_given_up error=%r", str(error))
        for dirty in self._dirty:
            for log in list(dirty.values()):
                if not log.refusal:
                    self.sync(log)

    # ---- a disk that refuses ---------------------------------------------------------------------------------------------------------

    def _rescue(self, log: PartitionLog, error: OSError) -> None:
        """A write or a sync failed: everything that is not known to be durable goes to a new file; if that fails too, the log goes offline. Raises OSError
        when descriptors or memory are short: then it is tried again.
        """
        logger.error("disk_error topic=%s partition=%d error=%r", log.assignment.topic, log.assignment.partition, str(error))
        try:
            earlier = self._earlier(log)
            first = (earlier + log.group)[0].base_offset if earlier or log.group else -1
            if log.is_durable and log.live is not None and first != log.live.synced_next:
                raise error  # neither ring nor journal has all of it any more
            places = log.rewrite(earlier)
        except OSError as refusal:
            if is_shortage(refusal) and refusal.errno not in NO_SPACE:
                self._unrescued[log.key] = error
                raise
            self._fail(log, refusal)
            return
        logger.warning("rewritten topic=%s partition=%d segment=%d", log.assignment.topic, log.assignment.partition, log.newest_base)
        self._moved(log, places)

    def _earlier(self, log: PartitionLog) -> list[PendingBatch]:
        """What was written and journaled but not synced, before the group."""
        if not log.is_durable or log.live is None:
            return []
        limit = log.group[0].base_offset if log.group else log.next_offset
        held = self._journal.read_back(*log.key, log.live.synced_next)
        found = [pending_from_bytes(batch.data, log.file.seed) for batch in held if batch.base_offset < limit]
        return [batch for batch in found if batch is not None]
