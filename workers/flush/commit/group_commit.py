"""Group commit: makes a group of batches durable, file by file or through the journal, and handles
disk errors.

Owner: the flusher, for the step from "placed" to "durable".

Invariants:
- A failed sync is never repeated on the same pages. The bytes, from ring and journal, go to a new
  segment in a new file.
- A log in neither half's `dirty` has synced everything that the journal holds for it.
- A half is reused only when its `dirty` is empty. A log that is offline stays there.

Crash: see `journal` and `partition_log`.

Choice by the touched files with durability=disk:
- One file, or many bytes for each: fdatasync each.
- More files: the batches go to the journal with one fdatasync. The files are synced a few at a time
  behind later groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from shm.crash_points import crash_point
from tailrace.format.crc32c import Readable
from workers.log.files.active_segment import PendingBatch, pending_from_bytes
from workers.log.files.journal import Journal, JournalBatch
from workers.log.partition_log import PartitionLog
from workers.segment.files import NO_SPACE, is_shortage

logger = logging.getLogger(__name__)

NARROW_GROUP_FILES = 1
JOURNALED_BYTES_PER_FILE = 128 << 10
"""Bytes per file below which the journal is used: writing them costs less than
another sync (docs/adr/0006).
"""

Moved = Callable[[PartitionLog, list[tuple[int, int]]], None]
"""Called with the new places of a log's group, in order, after a rewrite."""


class GroupCommit:
    """Commits the groups of one data directory."""

    def __init__(
        self, journal: Journal, fail: Callable[[PartitionLog, Exception], None], moved: Moved
    ) -> None:
        """`fail` is called for a log whose disk failed permanently."""
        self._journal = journal
        self._journal_works = True
        self._fail = fail
        self._moved = moved
        self._dirty: list[dict[tuple[bytes, int], PartitionLog]] = [{}, {}]
        """Logs with unsynced segments, for each half of the journal."""
        self._sync_credit = 0.0
        """Files that must be synced for journaled bytes so far. A small frame adds a fraction."""
        self._unrescued: dict[tuple[bytes, int], OSError] = {}
        """Logs with a disk error whose new file could not be created, for lack of descriptors or
        memory. They are rescued first.
        """
        self.shortage: OSError | None = None
        """Reason why `commit` returned False."""

    @property
    def should_journal(self) -> bool:
        """True if the journal is in use and not prepared yet."""
        return self._journal_works and not self._journal.is_prepared

    def leave_journal(self) -> None:
        """Run without a journal, because an earlier run's journal has batches
        that some log has not got yet.
        """
        self._journal_works = False
        logger.warning(
            "journal_kept advice=%r",
            "repair the logs that could not be opened, then restart the appliance",
        )

    def prepare_journal(self) -> bool:
        """Write some of the journal's zeroes, when idle.

        Return False if the host is short of a resource.
        """
        try:
            self._journal.prepare()
        except OSError as error:
            if is_shortage(error):
                return False
            self._abandon_journal(error)
        return True

    def commit(self, logs: list[PartitionLog]) -> bool:
        """Write the batches placed in `logs`, and sync where the topic requires it.

        Return False if the host is short of a resource (`shortage`). Nothing is lost: call again
        later.
        """
        try:
            self._commit(logs)
        except OSError as error:
            self.shortage = error
            return False
        return True

    def _commit(self, logs: list[PartitionLog]) -> None:
        """Raises OSError only for a shortage."""
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
        if (
            len(durable) > NARROW_GROUP_FILES
            and self._journal_works
            and self._journal.is_prepared
            and self._commit_wide(durable)
        ):
            crash_point("flusher.after_journal")
        else:
            for log in durable:
                self.sync(log)
        crash_point("flusher.after_sync")

    def _raise_earlier(self, log: PartitionLog) -> None:
        """Raise the earlier error of a log that awaits rescue: its sync must not be repeated.

        Raises OSError.
        """
        earlier = self._unrescued.pop(log.key, None)
        if earlier is not None:
            raise earlier

    def sync(self, log: PartitionLog) -> bool:
        """Sync one log. Return False if it is offline now.

        Raises OSError if its disk failed and the host lacks resources for a new file.
        """
        try:
            self._raise_earlier(log)
            log.sync()
        except OSError as error:
            self._rescue(log, error)
        if not log.refusal:
            self.forget(log)
        return not log.refusal

    def roll(self, log: PartitionLog, first: Readable) -> bool:
        """Begin a new segment for the batch `first`. Return False if the log went offline. Raises
        OSError.
        """
        if log.is_unsynced and not self.sync(log):
            return False
        log.roll(first)
        return True

    def forget(self, log: PartitionLog) -> None:
        """Forget a log that is deleted or completely synced."""
        self._unrescued.pop(log.key, None)
        for dirty in self._dirty:
            dirty.pop(log.key, None)

    def journaled_for(self, log: PartitionLog) -> list[JournalBatch]:
        """Return the batches that this run's journal holds for a log. Raises OSError."""
        return (
            self._journal.read_back(*log.key, 0)
            if any(log.key in dirty for dirty in self._dirty)
            else []
        )

    def sync_all(self, logs: Iterable[PartitionLog]) -> None:
        """Sync all logs before a clean stop, so that nothing depends on the journal."""
        for log in logs:
            if log.is_unsynced and not log.refusal:
                try:
                    self.sync(log)
                except OSError as error:
                    logger.error(
                        "log_not_synced directory=%s error=%r kept_in=rings,journal",
                        log.directory,
                        str(error),
                    )

    # ---- journal ---------------------------------------------------------------------------------

    def _commit_wide(self, logs: list[PartitionLog]) -> bool:
        """Write one journal frame for all logs. Return False, to sync the files instead, if it does
        not fit or fails.
        """
        journal = self._journal
        batches = [
            JournalBatch(
                log.assignment.topic_id,
                log.assignment.partition,
                b.base_offset,
                b.next_offset,
                b.data,
            )
            for log in logs
            for b in log.group
        ]
        length = journal.frame_bytes(batches)
        if length > min(journal.half_bytes, len(logs) * JOURNALED_BYTES_PER_FILE) or any(
            not log.group for log in logs
        ):
            return False
        if not journal.fits(length):
            other = self._dirty[journal.half ^ 1]
            for log in list(other.values()):
                if not log.refusal:
                    self.sync(log)
            if other or any(log.refusal for log in logs):
                # the journal must keep what an offline log has not got on its disk
                return False
            journal.switch()
        try:
            journal.append(batches)
        except OSError as error:
            self._abandon_journal(error)
            return False
        self._dirty[journal.half].update({log.key: log for log in logs})
        self._sync_some(length)
        return True

    def _sync_some(self, length: int) -> None:
        """Sync a share of the other half's files, so that a switch finds nothing left.

        The share is this frame's part of half of the half in use.
        """
        other = self._dirty[self._journal.half ^ 1]
        self._sync_credit += 2 * len(other) * length / self._journal.half_bytes
        count = int(self._sync_credit)
        self._sync_credit -= count
        for log in [log for log in other.values() if not log.refusal][:count]:
            self.sync(log)

    def _abandon_journal(self, error: OSError) -> None:
        """Stop using the journal, and sync the files whose batches it holds."""
        self._journal_works = False
        logger.error("journal_given_up error=%r", str(error))
        for dirty in self._dirty:
            for log in list(dirty.values()):
                if not log.refusal:
                    self.sync(log)

    # ---- disk errors -----------------------------------------------------------------------------

    def _rescue(self, log: PartitionLog, error: OSError) -> None:
        """Rewrite everything not known to be durable to a new file after a failed write or sync.

        If that fails too, the log goes offline. Raises OSError when descriptors or memory are
        short. It is then tried again.
        """
        logger.error(
            "disk_error topic=%s partition=%d error=%r",
            log.assignment.topic,
            log.assignment.partition,
            str(error),
        )
        try:
            earlier = self._earlier(log)
            first = (earlier + log.group)[0].base_offset if earlier or log.group else -1
            if log.is_durable and log.live is not None and first != log.live.synced_next:
                raise error  # ring and journal no longer have all of it
            places = log.rewrite(earlier)
        except OSError as refusal:
            if is_shortage(refusal) and refusal.errno not in NO_SPACE:
                self._unrescued[log.key] = error
                raise
            self._fail(log, refusal)
            return
        logger.warning(
            "rewritten topic=%s partition=%d segment=%d",
            log.assignment.topic,
            log.assignment.partition,
            log.newest_base,
        )
        self._moved(log, places)

    def _earlier(self, log: PartitionLog) -> list[PendingBatch]:
        """Return batches before the group that were written and journaled but not synced."""
        if not log.is_durable or log.live is None:
            return []
        limit = log.group[0].base_offset if log.group else log.next_offset
        journaled = self._journal.read_back(*log.key, log.live.synced_next)
        found = [
            pending_from_bytes(batch.data, log.file.seed)
            for batch in journaled
            if batch.base_offset < limit
        ]
        return [batch for batch in found if batch is not None]
