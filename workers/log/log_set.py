"""The logs of one data directory, by slot: opened, changed and dropped as the coordinator says, and shown in the partition table.

Owner: the flusher. Invariants: a slot of the table is written only here; a disk that refuses makes one partition offline, never the flusher dead.
Crash: a successor is fed the whole catalog and opens everything again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shm.catalog_messages import Assignment
from shm.layout import SlotState
from shm.partition_table import PartitionState, PartitionTable
from tailrace.formats.batch_header import leader_epoch_at
from tailrace.formats.data_directory import QUARANTINE_DIRECTORY
from tailrace.protocol.errors import ErrorCode
from workers.files import Files, is_shortage
from workers.journal import JournalBatch
from workers.live_segment import pending_from_bytes
from workers.partition_log import PartitionLog
from workers.recovery import Hints

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the supervisor says of this run and the one before it."""

    run: str = ""
    """Names this run."""
    lost_memory: bool = False
    """It ended without a clean stop, and its rings are gone: what was not synced may be lost."""
    producer_expiration_us: int = 1 << 62


class LogSet:
    """Slot -> log."""

    def __init__(self, files: Files, data_dir: str, table: PartitionTable, facts: RunFacts) -> None:
        self._files = files
        self._data_dir = data_dir
        self._table = table
        self._facts = facts
        self._logs: dict[int, PartitionLog] = {}
        self._by_key: dict[tuple[bytes, int], PartitionLog] | None = None
        """Made when it is asked for, forgotten with each change."""
        self.is_draining = False
        """Whether rings of an earlier run have batches for these logs, under the epochs that they had: new ones begin when they are drained."""
        self.waiting: dict[int, Assignment] = {}
        """Slot -> what could not be done for want of space, descriptors or memory; the flusher applies it again."""
        self.journaled: dict[tuple[bytes, int], list[JournalBatch]] = {}
        """What the journal of an earlier run holds; taken by the logs as they are opened."""
        self.in_rings: dict[tuple[bytes, int], frozenset[int]] = {}
        """Base offsets that undrained rings hold."""
        self.watermarks: dict[tuple[bytes, int], int] = {}
        """High watermarks that partition tables of an earlier run showed."""

    def __len__(self) -> int:
        return len(self._logs)

    def all(self) -> list[PartitionLog]:
        return list(self._logs.values())

    def forget_what_was_found(self) -> bool:
        """Recovery is over. False: a log that could not be opened has batches in the journal, which must stay as it is."""
        closed = {log.key for log in self._logs.values() if not log.is_open}
        self.journaled = {key: held for key, held in self.journaled.items() if key in closed}
        self.in_rings = {}
        return not self.journaled

    def get(self, slot: int) -> PartitionLog | None:
        return self._logs.get(slot)

    def find(self, key: tuple[bytes, int], slot: int) -> PartitionLog | None:
        """The log of (topic id, partition), which an earlier run had at `slot`; a catalog that was made again may have given it another."""
        log = self._logs.get(slot)
        if log is not None and log.key == key:
            return log
        if self._by_key is None:
            self._by_key = {known.key: known for known in self._logs.values()}
        return self._by_key.get(key)

    def begin_epochs(self) -> None:
        """What was left in memory is drained. Raises OSError for a shortage: call again."""
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

    # ---- catalog ---------------------------------------------------------------------------------------------------------------------

    def apply(self, assignment: Assignment, *, replay: bool, on_open: Callable[[PartitionLog], None]) -> PartitionLog | None:
        """Open, change or delete a partition; returns its log, None when it is gone. `on_open`: the log was opened, or is to be closed."""
        self._by_key = None
        slot = assignment.slot
        log = self._logs.get(slot)
        same = log is not None and log.assignment.topic_id == assignment.topic_id
        if log is not None and same and log.assignment.version > assignment.version:
            return log
        if assignment.dropped:
            self._drop(log if same else None, assignment)
            return None
        reason = ErrorCode.OK
        waited = self.waiting.pop(slot, None) is not None
        try:
            if log is not None and same and not (assignment.revive and log.refusal) and (log.is_open or not waited):
                log.change(assignment, replay=replay)
            else:
                was_closed = log is not None and same and not log.is_open
                told_epoch = log.file.leader_epoch if log is not None and same else 0
                log = PartitionLog(self._files, self._data_dir, assignment, self._facts.producer_expiration_us)
                self._logs[slot] = log
                self._open(log, replay=replay)
                if assignment.revive and (was_closed or log.file.leader_epoch < told_epoch):
                    log.begin_anew(told_epoch)
                on_open(log)
            if assignment.delete_before > log.log_start_offset and not log.refusal:
                log.advance_start(assignment.delete_before)
        except OSError as error:
            assert log is not None
            if is_shortage(error):
                self._wait(log, assignment, error, again=waited)
                return log
            log.refusal = f"cannot open {log.directory}: {error}"
            logger.error(
                "log_open_failed directory=%s error=%r advice=%r", log.directory, str(error),
                f"repair the disk, then run: tailrace topic online {log.assignment.topic}",
            )  # fmt: skip
            reason = ErrorCode.STORAGE_ERROR
        self.publish(log, reason)
        return log

    def _wait(self, log: PartitionLog, assignment: Assignment, error: OSError, *, again: bool) -> None:
        """The host is short of something: try again later. Until it is open, the table has no state of the log: requests get NOT_READY."""
        self.waiting[assignment.slot] = assignment
        if not log.is_open:
            log.give_up_opening()
        if not again:
            logger.warning(
                "log_waits directory=%s error=%r advice=%r", log.directory, str(error),
                "free some space, or allow more open files (LimitNOFILE=65536 in the unit); it is tried again",
            )  # fmt: skip

    def _open(self, log: PartitionLog, *, replay: bool) -> None:
        held = self.journaled.get(log.key, [])
        hints = Hints(
            journaled={batch.base_offset: batch.data for batch in held},
            elsewhere=frozenset(batch.base_offset for batch in held) | self.in_rings.get(log.key, frozenset()),
            durable_below=self.watermarks.get(log.key, 0),
            quarantine=f"{self._data_dir}/{QUARANTINE_DIRECTORY}",
            may_have_holes=self._facts.lost_memory and not log.is_durable,
        )
        recovered = log.open(self._facts.run, hints=hints, revive=log.assignment.revive)
        try:
            replayed = self._take_from_journal(log, held)
            if replayed and log.next_offset < recovered.known_durable and log.next_offset not in self.in_rings.get(log.key, ()):
                log.lose_until(recovered.known_durable)  # recovery had counted on the journal, which has not all of it
        except OSError:
            log.give_up_opening()  # what was acknowledged is only in the journal: that must stay as it is
            raise
        if self._facts.lost_memory and not self.is_draining:
            log.begin_epoch(self._facts.run)
        if not replay or recovered.cut_bytes or recovered.damage or replayed:
            logger.info(
                "log_opened topic=%s partition=%d next_offset=%d cut_bytes=%d damaged_ranges=%d from_journal=%d read_bytes=%d epoch=%d",
                log.assignment.topic, log.assignment.partition, log.next_offset, recovered.cut_bytes, len(recovered.damage), replayed,
                recovered.read_bytes, log.file.leader_epoch,
            )  # fmt: skip

    @staticmethod
    def _take_from_journal(log: PartitionLog, held: list[JournalBatch]) -> int:
        """Append what the journal holds and the segment has lost. Raises OSError."""
        count = 0
        for batch in held:
            if batch.base_offset != log.next_offset:
                continue
            pending = pending_from_bytes(batch.data, log.file.seed)
            if pending is None:
                logger.error("journal_batch_damaged topic=%s offset=%d", log.assignment.topic, batch.base_offset)
                break
            if leader_epoch_at(batch.data, 0) != log.file.epoch_at(batch.base_offset):
                continue  # refused: its disk failed behind the journal's sync
            if log.needs_roll(len(pending.data), pending.append_time_us):
                log.write_pending()
                log.sync()
                log.settled()
                log.roll()
            log.place(pending)
            log.remember(pending.data)
            count += 1
        log.write_pending()
        log.settled()
        if count:
            log.sync()
        log.raise_watermark()
        return count

    def _drop(self, log: PartitionLog | None, assignment: Assignment) -> None:
        if log is None:
            log = PartitionLog(self._files, self._data_dir, assignment)
        try:
            log.delete()
            logger.info("log_deleted topic=%s partition=%d", assignment.topic, assignment.partition)
        except OSError as error:
            logger.error("log_not_deleted directory=%s error=%r advice=%r", log.directory, str(error), "remove it by hand")
        finally:
            self._logs.pop(assignment.slot, None)
            self._table.write(
                assignment.slot, PartitionState.empty(assignment.topic_id, assignment.partition, SlotState.DELETED, assignment.version)
            )

    # ---- showing ---------------------------------------------------------------------------------------------------------------------

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
                assignment.topic_id, assignment.partition, SlotState.OFFLINE_FOR_WRITES if log.refusal else SlotState.ONLINE,
                log.file.leader_epoch, log.file.log_start_offset, log.high_watermark, log.next_offset, log.newest_base, live.end if live else 0,
                assignment.version, max(0, log.max_timestamp_us), log.size_bytes, reason, live.first_append_us if live else 0,
                log.last_append_us, len(log.sealed) + (live is not None), ordinal, position,
            ),
        )  # fmt: skip

    def _publish_unopened(self, log: PartitionLog) -> None:
        """A log that could not be opened. What a predecessor has shown still holds for readers; without that, it is unknown what there is."""
        slot = log.assignment.slot
        shown = self._table.read(slot)
        if shown.topic_id != log.assignment.topic_id or shown.state not in (SlotState.ONLINE, SlotState.OFFLINE_FOR_WRITES):
            shown = PartitionState.empty(log.assignment.topic_id, log.assignment.partition, SlotState.UNREADABLE, log.assignment.version)
        else:
            shown = shown._replace(state=SlotState.OFFLINE_FOR_WRITES)
        self._table.write(slot, shown._replace(reason=ErrorCode.STORAGE_ERROR, applied_version=log.assignment.version))

    def show_failed(self, assignment: Assignment, sentence: str) -> None:
        """An assignment could not be carried out: show that it was looked at, which the coordinator waits for; a log that is not open takes no writes."""
        log = self._logs.get(assignment.slot)
        if log is not None and not log.is_open and not log.refusal:
            log.refusal = sentence
        shown = self._table.read(assignment.slot)
        if shown.topic_id != assignment.topic_id:
            shown = PartitionState.empty(assignment.topic_id, assignment.partition, SlotState.UNREADABLE, 0)._replace(
                reason=ErrorCode.INTERNAL_ERROR
            )
        self._table.write(assignment.slot, shown._replace(applied_version=assignment.version))

    def take_offline(self, log: PartitionLog, error: Exception) -> None:
        """The disk refused for good: no more writes, reads go on."""
        log.go_offline(f"{type(error).__name__}: {error}")
        logger.error(
            "partition_offline topic=%s partition=%d error=%r advice=%r", log.assignment.topic, log.assignment.partition, log.refusal,
            f"repair the disk, then run: tailrace topic online {log.assignment.topic}",
        )  # fmt: skip
        self.publish(log, ErrorCode.STORAGE_ERROR)
