"""Log set: the logs of one data directory by slot, opened, changed and dropped by assignments.

It also publishes their states in the partition table.

Owner: the flusher.

Invariants:
- A slot of the table is written only here.
- A disk error takes one partition offline and never ends the flusher.

Crash: a successor is fed the whole catalog and opens all logs again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionState, PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.format.directory.data_dir import QUARANTINE_DIRECTORY
from tailrace.format.record_batch.header_peek import leader_epoch_at
from workers.log.files.active_segment import pending_from_bytes
from workers.log.files.journal import JournalBatch
from workers.log.partition_log import PartitionLog
from workers.log.recovery.decision import Hints
from workers.segment.files import Files, is_shortage

logger = logging.getLogger(__name__)


class RunFacts(NamedTuple):
    """Facts from the supervisor about this run and the one before it."""

    run: str = ""
    """Id of this run."""
    lost_memory: bool = False
    """True if the earlier run had no clean stop and its rings are gone.

    Unsynced batches may be lost.
    """


class LogSet:
    """Logs of one data directory, by slot."""

    def __init__(self, files: Files, data_dir: str, table: PartitionTable, facts: RunFacts) -> None:
        self._files = files
        self._data_dir = data_dir
        self._table = table
        self._facts = facts
        self.moved: Callable[[int], int] | None = None
        """See `ProducerTable.moved`."""
        self._logs: dict[int, PartitionLog] = {}
        self._by_key: dict[tuple[bytes, int], PartitionLog] | None = None
        """Logs by (topic id, partition). Built when needed, dropped after each change."""
        self.is_draining = False
        """True while rings of an earlier run have batches for these logs, under the old epochs. New
        epochs begin when they are drained.
        """
        self.waiting: dict[int, Assignment] = {}
        """Assignments by slot that wait for space, descriptors or memory.

        The flusher applies them again.
        """
        self.journaled: dict[tuple[bytes, int], list[JournalBatch]] = {}
        """Batches in the journal of an earlier run. Each log takes its own when opened."""
        self.in_rings: dict[tuple[bytes, int], frozenset[int]] = {}
        """Base offsets of batches in undrained rings."""
        self.watermarks: dict[tuple[bytes, int], int] = {}
        """High watermarks in partition tables of an earlier run."""

    @property
    def files(self) -> Files:
        return self._files

    def __len__(self) -> int:
        return len(self._logs)

    def all(self) -> list[PartitionLog]:
        return list(self._logs.values())

    def forget_recovered(self) -> bool:
        """Drop recovery state. Return False if a log that could not be opened has batches in the
        journal, which must then be kept.
        """
        closed = {log.key for log in self._logs.values() if not log.is_open}
        self.journaled = {
            key: journal_batches for key, journal_batches in self.journaled.items() if key in closed
        }
        self.in_rings = {}
        return not self.journaled

    def get(self, slot: int) -> PartitionLog | None:
        return self._logs.get(slot)

    def find(self, key: tuple[bytes, int], slot: int) -> PartitionLog | None:
        """Return the log of (topic id, partition), which had `slot` in an earlier run. A rebuilt
        catalog may have assigned another slot.
        """
        log = self._logs.get(slot)
        if log is not None and log.key == key:
            return log
        if self._by_key is None:
            self._by_key = {known.key: known for known in self._logs.values()}
        return self._by_key.get(key)

    def begin_epochs(self) -> None:
        """Begin new leader epochs after draining. Raises OSError for a shortage: call again."""
        for log in self._logs.values():
            if not self._facts.lost_memory or log.refusal or not log.is_open:
                continue
            try:
                log.begin_epoch(self._facts.run)
            except OSError as error:
                if is_shortage(error):
                    raise
                self.take_offline(log, error)
        self.is_draining = False

    # ---- catalog ---------------------------------------------------------------------------------

    def apply(
        self, assignment: Assignment, *, replay: bool, on_open: Callable[[PartitionLog], None]
    ) -> PartitionLog | None:
        """Open, change or delete a partition. Return its log, or None if deleted. `on_open` is
        called when the log was opened or must be closed.
        """
        self._by_key = None
        slot = assignment.slot
        log = self._logs.get(slot)
        same = log is not None and log.assignment.topic_id == assignment.topic_id
        if log is not None and same and log.assignment.version > assignment.version:
            return log
        if assignment.dropped:
            self.waiting.pop(slot, None)
            if log is None or same:
                self._drop(log, assignment)
            return None
        if assignment.binned and not self._files.exists(
            f"{self._data_dir}/{assignment.directory_name}"
        ):
            return None  # it is in the bin
        reason = ErrorCode.OK
        waited = self.waiting.pop(slot, None) is not None
        try:
            if (
                log is not None
                and same
                and not (assignment.revive and log.refusal)
                and (log.is_open or not waited)
            ):
                log.change(assignment, replay=replay)
            else:
                was_closed = log is not None and same and not log.is_open
                # The table's: the disk may not have kept it, or not be readable.
                shown = self._table.read(slot)
                is_shown = shown.topic_id == assignment.topic_id
                shown_epoch = shown.leader_epoch if is_shown else 0
                log = PartitionLog(self._files, self._data_dir, assignment, self.moved)
                self._logs[slot] = log
                self._open(log, replay=replay)
                if is_shown:
                    log.transaction_indexes.continue_above(shown.aborted_version)
                if log.file.leader_epoch < shown_epoch or (assignment.revive and was_closed):
                    log.begin_new_log(shown_epoch)
                on_open(log)
            if assignment.delete_before > log.log_start_offset and not log.refusal:
                log.advance_start(assignment.delete_before)
        except OSError as error:
            assert log is not None
            if is_shortage(error):
                self._wait(log, assignment, error, is_retry=waited)
                return log
            log.refusal = f"cannot open {log.directory}: {error}"
            logger.error(
                "log_open_failed directory=%s error=%r advice=%r", log.directory, str(error),
                f"repair the disk, then run: tailrace topic online {log.assignment.topic}",
            )  # fmt: skip
            reason = ErrorCode.STORAGE_ERROR
        self.publish(log, reason)
        return log

    def _wait(
        self, log: PartitionLog, assignment: Assignment, error: OSError, *, is_retry: bool
    ) -> None:
        """Queue an assignment until the host has resources again. Until the log is open, the table
        has no state of it, and requests get NOT_READY.
        """
        self.waiting[assignment.slot] = assignment
        if not log.is_open:
            log.abandon_opening()
        if not is_retry:
            logger.warning(
                "log_waits directory=%s error=%r advice=%r", log.directory, str(error),
                "free some space, or allow more open files (LimitNOFILE=65536 in the unit); "
                "opening is retried",
            )  # fmt: skip

    def _open(self, log: PartitionLog, *, replay: bool) -> None:
        journal_batches = self.journaled.get(log.key, [])
        hints = Hints(
            journaled={batch.base_offset: batch.data for batch in journal_batches},
            elsewhere=frozenset(batch.base_offset for batch in journal_batches)
            | self.in_rings.get(log.key, frozenset()),
            durable_below=self.watermarks.get(log.key, 0),
            quarantine=f"{self._data_dir}/{QUARANTINE_DIRECTORY}",
            may_have_holes=self._facts.lost_memory and not log.is_durable,
        )
        recovered = log.open(self._facts.run, hints=hints, revive=log.assignment.revive)
        try:
            replayed = self._replay_journal(log, journal_batches)
            if (
                replayed
                and log.next_offset < recovered.known_durable
                and log.next_offset not in self.in_rings.get(log.key, ())
            ):
                # recovery had counted on the journal, which does not have all of it
                log.lose_until(recovered.known_durable)
        except OSError:
            # Acknowledged batches are only in the journal, which must be kept.
            log.abandon_opening()
            raise
        if self._facts.lost_memory and not self.is_draining:
            log.begin_epoch(self._facts.run)
        if not replay or recovered.cut_bytes or recovered.damage or replayed:
            logger.info(
                "log_opened topic=%s partition=%d next_offset=%d cut_bytes=%d damaged_ranges=%d "
                "from_journal=%d read_bytes=%d epoch=%d",
                log.assignment.topic, log.assignment.partition, log.next_offset,
                recovered.cut_bytes, len(recovered.damage), replayed,
                recovered.read_bytes, log.file.leader_epoch,
            )  # fmt: skip

    @staticmethod
    def _replay_journal(log: PartitionLog, journal_batches: list[JournalBatch]) -> int:
        """Append batches from the journal that the segment has lost. Raises OSError."""
        count = 0
        for batch in journal_batches:
            if batch.base_offset != log.next_offset:
                continue
            pending = pending_from_bytes(batch.data, log.file.seed)
            if pending is None:
                logger.error(
                    "journal_batch_damaged topic=%s offset=%d",
                    log.assignment.topic,
                    batch.base_offset,
                )
                break
            if leader_epoch_at(batch.data, 0) != log.file.epoch_at(batch.base_offset):
                continue  # refused: its disk failed after the journal's sync
            if log.needs_roll(len(pending.data), pending.append_time_us) or log.has_other_schema(
                pending.data
            ):
                log.write_pending()
                log.sync()
                log.settled()
                log.roll(pending.data)
            log.place(pending)
            log.remember(pending.data)
            count += 1
        log.write_pending()
        log.settled()
        if count:
            log.sync()
        log.write_transaction_indexes()
        log.raise_watermark()
        return count

    def _drop(self, log: PartitionLog | None, assignment: Assignment) -> None:
        if log is None:
            log = PartitionLog(self._files, self._data_dir, assignment)
        try:
            if assignment.binned:
                log.put_in_bin()
            else:
                log.delete()
            logger.info(
                "log_deleted topic=%s partition=%d in_bin=%s",
                assignment.topic,
                assignment.partition,
                "yes" if assignment.binned else "no",
            )
        except OSError as error:
            if assignment.binned and is_shortage(error):
                self.wait_to_drop(assignment, error)
                return
            logger.error(
                "log_not_deleted directory=%s error=%r advice=%r",
                log.directory,
                str(error),
                "remove it by hand",
            )
        except BaseException:
            self._show_dropped(assignment)
            raise
        self._show_dropped(assignment)

    def wait_to_drop(self, assignment: Assignment, error: OSError) -> None:
        """Queue the move of a partition to the bin until the host has resources again."""
        self.waiting[assignment.slot] = assignment
        logger.warning(
            "log_waits directory=%s error=%r advice=%r", assignment.directory_name, str(error),
            "free some space, for example with: tailrace topic purge; the deletion is retried",
        )  # fmt: skip

    def _show_dropped(self, assignment: Assignment) -> None:
        self._logs.pop(assignment.slot, None)
        self._table.write(
            assignment.slot,
            PartitionState.empty(
                assignment.topic_id, assignment.partition, SlotState.DELETED, assignment.version
            ),
        )

    # ---- publication -----------------------------------------------------------------------------

    def publish(self, log: PartitionLog, reason: ErrorCode = ErrorCode.OK) -> None:
        """Write a log's state to the partition table."""
        if not log.is_open:
            self._publish_unopened(log)
            return
        live = log.live
        if log.refusal and reason is ErrorCode.OK:
            reason = ErrorCode.PARTITION_OFFLINE
        assignment, (ordinal, position) = log.assignment, log.delivered
        self._table.write(  # once for each group: by position, in the order of the fields
            assignment.slot,
            PartitionState(
                assignment.topic_id, assignment.partition,
                SlotState.OFFLINE_FOR_WRITES if log.refusal else SlotState.ONLINE,
                log.file.leader_epoch, log.file.log_start_offset, log.high_watermark,
                log.next_offset, log.newest_base, live.end if live else 0,
                assignment.version, max(0, log.max_timestamp_us), log.size_bytes, reason,
                live.first_append_us if live else 0,
                log.last_append_us, len(log.sealed) + (live is not None), ordinal, position,
                max(log.last_stable_offset, log.log_start_offset), log.transaction_indexes.version,
                log.appended_batches, log.appended_bytes, log.sealed.files_version, *log.cleaning,
            ),
        )  # fmt: skip

    def _publish_unopened(self, log: PartitionLog) -> None:
        """Publish a log that could not be opened. A predecessor's state stays valid for reads.
        Without one the log is UNREADABLE.
        """
        slot = log.assignment.slot
        shown = self._table.read(slot)
        if shown.topic_id != log.assignment.topic_id or shown.state not in (
            SlotState.ONLINE,
            SlotState.OFFLINE_FOR_WRITES,
        ):
            shown = PartitionState.empty(
                log.assignment.topic_id,
                log.assignment.partition,
                SlotState.UNREADABLE,
                log.assignment.version,
            )
        else:
            shown = shown._replace(state=SlotState.OFFLINE_FOR_WRITES)
        self._table.write(
            slot,
            shown._replace(reason=ErrorCode.STORAGE_ERROR, applied_version=log.assignment.version),
        )

    def show_failed(self, assignment: Assignment, sentence: str) -> None:
        """Publish that an assignment failed, since the controller waits for its version. A log that
        is not open refuses writes.
        """
        log = self._logs.get(assignment.slot)
        if log is not None and not log.is_open and not log.refusal:
            log.refusal = sentence
        shown = self._table.read(assignment.slot)
        if shown.topic_id != assignment.topic_id:
            shown = PartitionState.empty(
                assignment.topic_id, assignment.partition, SlotState.UNREADABLE, 0
            )._replace(reason=ErrorCode.INTERNAL_ERROR)
        self._table.write(assignment.slot, shown._replace(applied_version=assignment.version))

    def take_offline(self, log: PartitionLog, error: Exception) -> None:
        """Take a log offline after a permanent disk error. Reads continue."""
        log.go_offline(f"{type(error).__name__}: {error}")
        logger.error(
            "partition_offline topic=%s partition=%d error=%r advice=%r", log.assignment.topic,
            log.assignment.partition, log.refusal,
            f"repair the disk, then run: tailrace topic online {log.assignment.topic}",
        )  # fmt: skip
        self.publish(log, ErrorCode.STORAGE_ERROR)
