"""Compaction: decides which log is cleaned next, gives the cleaner its job, and swaps the segments
that it has cleaned.

    a log is due -> job (`workers.segment.cleaning_job`) -> the cleaner reports a run -> no reader
    has a lease on it -> `PartitionLog.swap`, one durable step -> the partition table shows it

Owner: the flusher, whose agent steps it. It exists once there is a compacted topic.

Invariants:
- One job at a time. A log has no second job before the runs of the first are swapped or given up.
- Runs are swapped in their order. If one cannot be, those after it are given up: a run may lack
  what an earlier one still has.
- A log that cannot be cleaned is shown as such, with its reason in the log, and the part before the
  damage is cleaned on.

Crash: jobs and runs that are not decided are given up with the process; a start removes their
    files.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from shm.memory.layout import ProcessWord
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.timing_wheel import Timer, TimingWheel
from shm.tables.control import ProcessSlot
from shm.tables.partition_table import CleaningState
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_SPARSE,
    METADATA_MAX_BYTES,
    PREFIX_BYTES,
    BatchFormatError,
    read_header,
)
from tailrace.format.segments.segment import file_name, schema_message_length
from workers.flush.group_commit import GroupCommit
from workers.log.log_set import LogSet
from workers.log.partition_log import NOT_CLEANED, PartitionLog
from workers.log.retention.compaction_rules import (
    Candidate,
    Cleanable,
    cleanable,
    is_due,
    is_overdue,
    runs,
)
from workers.log.retention.leases import RetentionLeases, Task
from workers.log.retention.wall_clock_jumps import WallJumps
from workers.segment import cleaning_job
from workers.segment.cleaning_job import CleaningJob, CleaningReport, JobSegment
from workers.segment.files import Files, is_shortage
from workers.segment.segment_swap import CleanedRun, remove_cleaned

logger = logging.getLogger(__name__)

FAILED_RETRY_NS = 60_000_000_000
"""Wait after a job that failed, before the log has another one."""
SEAL_RETRY_MS = 50
"""Wait for a group of the log that is in progress, where a request wants its segment sealed."""
Rank = tuple[bool, bool, float]
"""The urgency of a log: (an operator wants it, it is overdue, its dirty ratio)."""


class CleaningSettings(NamedTuple):
    """Settings of the appliance."""

    check_ms: int = 15_000
    dedupe_bytes: int = 128 << 20
    bytes_per_second: int = 0


class CleanerLink(NamedTuple):
    """Shared memory of a flusher and its cleaner."""

    slot: ProcessSlot
    """The flusher's."""
    reports: Callable[[], int]
    """The cleaner's number of reports."""
    ring: Callable[[], None]
    """Wakes the supervisor, which starts a cleaner, and the cleaner."""


@dataclass(slots=True)
class _Watched:
    """A compacted log, with the heads of its segments."""

    log: PartitionLog
    heads: dict[int, tuple[bool, int, int]] = field(default_factory=dict)
    """(is cleaned, append time of the first batch, schema id) by segment base."""
    pending: list[CleanedRun] = field(default_factory=list)
    """Cleaned runs that are not swapped yet, in their order."""
    stopped_base: int = -1
    """Base of the segment that cannot be read, -1: none."""
    retry_ns: int = 0
    tombstones_since_us: int = 0
    asked: int = 0
    """Number of the last request to clean it now."""
    done: int = 0
    """The last request that was carried out."""
    goal: int = -1
    """The request's: everything below this offset is to be clean. -1: the active segment has yet to
    be sealed for it.
    """
    waits_for_readers: bool = False

    @property
    def is_requested(self) -> bool:
        return self.asked > self.done

    def is_due_by_request(self, part: Cleanable) -> bool:
        """True if a request wants something of this part to be cleaned."""
        dirty = part.segments[part.clean_count :]
        return self.is_requested and bool(dirty) and dirty[0].base < self.goal


class Compaction:
    """Compaction of the logs of one data directory."""

    def __init__(
        self,
        files: Files,
        data_dir: str,
        logs: LogSet,
        commit: GroupCommit,
        wheel: TimingWheel[Task],
        leases: RetentionLeases,
        jumps: WallJumps,
        link: CleanerLink,
        now_us: Callable[[], int],
        seal: Callable[[PartitionLog], bool],
        error_handler: CountedErrorHandler,
    ) -> None:
        """`seal`: closes the active segment of a log."""
        self._error_handler = error_handler
        self._files = files
        self._data_dir = data_dir
        self._logs = logs
        self._commit = commit
        self._wheel = wheel
        self._leases = leases
        self._jumps = jumps
        self._link = link
        self._now_us = now_us
        self._seal = seal
        self.settings = CleaningSettings()
        self._watched: dict[int, _Watched] = {}
        """Compacted logs by slot."""
        self._job: CleaningJob | None = None
        self._job_slot = -1
        self._run_count = 0
        """Runs of the job that were taken over."""
        self._reports = link.reports()
        self._timer: Timer[Task] | None = None
        self._now_ns = 0
        self.may_remove = False

    # ---- logs ------------------------------------------------------------------------------------

    def begin(self, log: PartitionLog, now_ns: int) -> None:
        """Watch a log that was opened or has new settings, if its topic is compacted."""
        self._now_ns = now_ns
        slot = log.assignment.slot
        known = self._watched.get(slot)
        is_compacted = (
            "compact" in log.assignment.settings["cleanup.policy"]
            and not log.assignment.delay_of
            and log.is_open
        )
        if known is not None and (known.log is not log or not is_compacted):
            self.forget(slot)
            if known.log is log:
                log.cleaning = NOT_CLEANED
                self._logs.publish(log)
            known = None
        if is_compacted and known is None:
            self._watched[slot] = _Watched(log)
        if is_compacted:
            self._set_timer(0)

    def forget(self, slot: int) -> None:
        """Leave a log that was closed or deleted, or is not compacted any more."""
        known = self._watched.pop(slot, None)
        if known is None:
            return
        if self._job_slot == slot:
            self._end_job()
        self._give_up(known)

    def request(self, key: tuple[bytes, int], number: int, now_ns: int) -> None:
        """Clean a log at the next chance, whatever its dirty ratio. A request that is known, or
        older than one that is, changes nothing.
        """
        self._now_ns = now_ns
        for known in self._watched.values():
            if known.log.key == key and number > known.asked:
                known.asked, known.goal = number, -1
                known.stopped_base, known.retry_ns = -1, 0
                self._set_timer(0)

    def on_lease_end(self, key: tuple[bytes, int]) -> None:
        """Swap what has waited for a reader."""
        for known in self._watched.values():
            if known.log.key == key and known.pending:
                self._set_timer(0)

    def set(self, settings: CleaningSettings) -> None:
        """Use changed settings; a job that is under way keeps those that it has."""
        if settings != self.settings:
            self.settings = settings
            self._set_timer(0)

    # ---- time ------------------------------------------------------------------------------------

    def _set_timer(self, wait_ms: int) -> None:
        if self._timer is not None:
            self._wheel.cancel(self._timer)
        self._timer = self._wheel.add(self._now_ns + wait_ms * 1_000_000, self._on_timer)

    def _on_timer(self) -> int:
        self._timer = None
        if not self._watched:
            self._end_job()
            return 0
        self._set_timer(self.settings.check_ms)
        if self.may_remove:
            self._check()
        return 1

    def step(self, now_ns: int) -> int:
        """Take over what the cleaner has reported. Return the amount of work done."""
        self._now_ns = now_ns
        if self._job is None or (count := self._link.reports()) == self._reports:
            return 0
        self._reports = count
        try:
            report = cleaning_job.read_report(self._files, self._data_dir, self._job.number)
        except OSError as error:
            logger.warning("cleaner_report_not_read error=%r", str(error))
            return 1
        if report is not None:
            known = self._watched[self._job_slot]
            try:
                self._take(known, report)
            except Exception as error:
                self._set_aside(known, error)
        return 1

    def _set_aside(self, known: _Watched, error: Exception) -> None:
        """Leave a log alone for a while after an unexpected error: the flusher goes on. Raises the
        error if it is that of a broken invariant.
        """
        if isinstance(error, AssertionError):
            raise error
        self._error_handler.on_error(f"directory={known.log.directory}", error)
        known.retry_ns = self._now_ns + FAILED_RETRY_NS
        if self._job_slot == known.log.assignment.slot:
            self._end_job()
            self._give_up(known)

    # ---- choosing --------------------------------------------------------------------------------

    def _check(self) -> None:
        """Look at all logs; begin a job if there is none."""
        now_us = self._now_us()
        self._jumps.observe(now_us, self._now_ns)
        best: tuple[Rank, _Watched] | None = None
        for known in list(self._watched.values()):
            try:
                rank = self._examine(known, now_us)
            except Exception as error:
                self._set_aside(known, error)
                continue
            if rank is not None and (best is None or rank > best[0]):
                best = rank, known
        if best is not None and self._job is None:
            try:
                self._begin_job(best[1], now_us)
            except Exception as error:
                self._set_aside(best[1], error)
        if self._job is None:
            self._end_job()

    def _examine(self, known: _Watched, now_us: int) -> Rank | None:
        """Do what is due of a log. Returns its urgency, None if it needs no job now."""
        log = known.log
        if known.pending:
            self._swap_some(known)
        self._seal_due(known, now_us)
        part = self._part(known, now_us)
        is_at_rest = (
            not known.pending and not log.is_swapping and self._job_slot != log.assignment.slot
        )
        rank = None
        if is_at_rest and not log.refusal and self._now_ns >= known.retry_ns:
            rank = self._rank(known, part, now_us)
        if is_at_rest and known.goal >= 0 and not known.is_due_by_request(part):
            known.done = known.asked
        self._show(known, part)
        return rank

    def _rank(self, known: _Watched, part: Cleanable, now_us: int) -> Rank | None:
        """The urgency of a log, None if it is not due."""
        settings = known.log.assignment.settings
        max_lag_ms = int(settings["max.compaction.lag.ms"])
        is_due_now = is_due(
            part,
            now_us=now_us,
            min_ratio=float(settings["min.cleanable.dirty.ratio"]),
            max_lag_ms=max_lag_ms,
        )
        since_us = known.tombstones_since_us
        has_old_tombstones = bool(since_us) and now_us - self._jumps.moved(since_us) >= (
            int(settings["delete.retention.ms"]) * 1000
        )
        is_due_by_request = known.is_due_by_request(part)
        if not part.segments or not (is_due_by_request or is_due_now or has_old_tombstones):
            return None
        overdue = is_overdue(part, now_us=now_us, max_lag_ms=max_lag_ms)
        return is_due_by_request, overdue, part.dirty_ratio

    def _seal_due(self, known: _Watched, now_us: int) -> None:
        """Close an active segment whose oldest records are older than max.compaction.lag.ms, or
        that a request wants to be cleaned.
        """
        log, live = known.log, known.log.live
        must_seal = known.is_requested and known.goal < 0
        if log.group:
            if must_seal:
                self._set_timer(SEAL_RETRY_MS)
            return
        if live is not None and live.first_append_us and not log.refusal:
            max_lag_us = int(log.assignment.settings["max.compaction.lag.ms"]) * 1000
            age_us = now_us - self._jumps.moved(live.first_append_us)
            if (must_seal or age_us >= max_lag_us) and not self._seal(log) and must_seal:
                return  # it is tried again
        if must_seal:
            known.goal = log.next_offset

    def _part(self, known: _Watched, now_us: int) -> Cleanable:
        """The part of a log that can be cleaned now."""
        log = known.log
        segments = log.closed_segments()
        ends = [segment.base for segment in segments[1:]]
        ends.append(log.live.base if log.live is not None else log.next_offset)
        candidates = []
        for segment, end in zip(segments, ends, strict=False):  # a log without segments has an end
            if segment.base not in known.heads:
                known.heads[segment.base] = self._read_head(log, segment.base)
            is_cleaned, first_us, schema_id = known.heads[segment.base]
            is_damaged = 0 <= known.stopped_base <= segment.base or any(
                damage.start < end and segment.base < damage.end for damage in log.file.damage
            )
            candidates.append(
                Candidate(
                    segment.base, end, segment.size, self._jumps.moved(first_us),
                    self._jumps.moved(segment.last_append_us), is_cleaned, is_damaged, schema_id,
                )
            )  # fmt: skip
        bases = {segment.base for segment in segments}
        known.heads = {base: head for base, head in known.heads.items() if base in bases}
        return cleanable(
            candidates,
            stable_offset=log.last_stable_offset,
            now_us=now_us,
            min_lag_ms=int(log.assignment.settings["min.compaction.lag.ms"]),
        )

    def _read_head(self, log: PartitionLog, base: int) -> tuple[bool, int, int]:
        """Read from a segment's first batch if the segment is cleaned, its first append time, and
        its schema id.
        """
        try:
            fd = self._files.open_for_read(f"{log.directory}/{file_name(base)}")
            try:
                start = schema_message_length(lambda n, at: self._files.read_at(fd, n, at))
                head = self._files.read_at(fd, PREFIX_BYTES + METADATA_MAX_BYTES, start)
            finally:
                self._files.close(fd)
            header = read_header(head)
        except (OSError, BatchFormatError):
            return False, 0, -1  # the cleaner reports what is wrong
        is_cleaned = bool(header.attributes & ATTRIBUTE_SPARSE)
        return is_cleaned, header.append_time_us, header.schema_id

    def _show(self, known: _Watched, part: Cleanable) -> None:
        """Publish what compaction knows of a log."""
        log = known.log
        state = CleaningState.NONE
        if known.stopped_base >= 0:
            state = CleaningState.STOPPED
        elif self._job_slot == log.assignment.slot:
            state = CleaningState.RUNNING
        elif known.waits_for_readers:
            state = CleaningState.WAITS_FOR_READERS
        elif known.retry_ns:
            state = CleaningState.RETRYING
        clean = part.segments[: part.clean_count]
        below = clean[-1].end if clean else log.log_start_offset
        shown = (
            below, part.clean_bytes, part.dirty_bytes, max(0, part.dirty_since_us), int(state),
            known.asked, known.done,
        )  # fmt: skip
        if shown != log.cleaning:
            log.cleaning = shown
            self._logs.publish(log)

    # ---- jobs ------------------------------------------------------------------------------------

    def _begin_job(self, known: _Watched, now_us: int) -> None:
        log = known.log
        if log.group or (log.is_unsynced and not self._commit.sync(log)):
            return
        try:
            if log.live is None:
                log.roll()  # the newest segment is not cleaned: a start reads its headers
                self._logs.publish(log)
            part = self._part(known, now_us)
            segment_bytes = int(log.assignment.settings["segment.bytes"])
            cleaning_job.remove_files(self._files, self._data_dir)
            number = self._link.slot.load(ProcessWord.CLEANING_JOBS) + 1
            self._link.slot.store(ProcessWord.CLEANING_JOBS, number)
            job = self._job_of(number, log, runs(part.segments, segment_bytes))
            remove_cleaned(self._files, log.directory)
            cleaning_job.write_job(self._files, self._data_dir, job)
        except OSError as error:
            logger.warning("cleaning_not_begun directory=%s error=%r", log.directory, str(error))
            known.retry_ns = self._now_ns + FAILED_RETRY_NS
            return
        known.tombstones_since_us = known.retry_ns = 0
        self._job, self._job_slot, self._run_count = job, log.assignment.slot, 0
        self._link.slot.store(ProcessWord.CLEANING, job.number)
        self._link.ring()
        self._show(known, part)

    def _job_of(self, number: int, log: PartitionLog, cut: list[list[Candidate]]) -> CleaningJob:
        assignment, settings = log.assignment, log.assignment.settings
        return CleaningJob(
            number=number, directory=log.directory, topic=assignment.topic,
            topic_id=assignment.topic_id.hex(), partition=assignment.partition,
            schemas={
                str(number): base64.b64encode(message).decode("ascii")
                for number, message in log.file.schemas.items()
            },
            schema_id=assignment.schema_id, typed=assignment.typed,
            key_column=settings["key.column"] if assignment.typed else "key",
            compression=settings["compression.type"],
            max_message_bytes=int(settings["max.message.bytes"]),
            delete_retention_ms=int(settings["delete.retention.ms"]),
            runs=[
                [
                    JobSegment(
                        each.base, each.end, each.size, each.is_cleaned,
                        log.transaction_indexes.has(each.base), each.schema_id,
                    )
                    for each in run
                ]
                for run in cut
            ],
            jumps=self._jumps.all(),
            dedupe_bytes=self.settings.dedupe_bytes,
            bytes_per_second=self.settings.bytes_per_second,
        )  # fmt: skip

    def _end_job(self) -> None:
        """Give up the job, or the cleaner if it has none."""
        self._job, self._job_slot = None, -1
        if self._link.slot.load(ProcessWord.CLEANING):
            self._link.slot.store(ProcessWord.CLEANING, 0)
            self._link.ring()

    def _take(self, known: _Watched, report: CleaningReport) -> None:
        """Take over a report on the job of a log."""
        known.pending += report.runs[self._run_count :]
        self._run_count = len(report.runs)
        log = known.log
        if report.state == cleaning_job.RUNNING:
            self._swap_some(known)
            return
        self._job, self._job_slot = None, -1  # the next check has another one, or ends the cleaner
        if report.state == cleaning_job.DONE:
            known.tombstones_since_us = report.tombstones_since_us
            logger.info(
                "cleaned topic=%s partition=%d bytes_in=%d bytes_out=%d records_in=%d "
                "records_out=%d segments=%d",
                log.assignment.topic, log.assignment.partition, report.bytes_in, report.bytes_out,
                report.records_in, report.records_out, len(report.runs),
            )  # fmt: skip
        elif report.state == cleaning_job.UNREADABLE:
            known.stopped_base = max(0, report.stopped_base)
            logger.error(
                "cleaning_stopped topic=%s partition=%d base=%d reason=%r",
                log.assignment.topic, log.assignment.partition, known.stopped_base, report.reason,
            )  # fmt: skip
        else:
            known.retry_ns = self._now_ns + FAILED_RETRY_NS
            logger.warning(
                "cleaning_tried_again topic=%s partition=%d reason=%r",
                log.assignment.topic, log.assignment.partition, report.reason,
            )  # fmt: skip
        self._swap_some(known)
        self._set_timer(0)

    # ---- swapping --------------------------------------------------------------------------------

    def _swap_some(self, known: _Watched) -> None:
        """Swap the cleaned runs of a log as far as no lease keeps their segments."""
        log = known.log
        known.waits_for_readers = False
        while known.pending:
            run = known.pending[0]
            leased = self._leases.lowest(log.key)
            if leased is not None and leased < run.end and not log.is_swapping:
                known.waits_for_readers = True
                return
            if log.group:
                self._set_timer(self.settings.check_ms)
                return
            try:
                if log.is_unsynced and not self._commit.sync(log):
                    return
                is_swapped = not log.refusal and log.swap(run)
            except OSError as error:
                logger.warning(
                    "segments_not_swapped directory=%s base=%d shortage=%s error=%r",
                    log.directory, run.base, "yes" if is_shortage(error) else "no", str(error),
                )  # fmt: skip
                return  # the next check tries again
            if not is_swapped:
                if self._job_slot == log.assignment.slot:
                    self._end_job()
                self._give_up(known)
                return
            known.pending.pop(0)
            known.heads[run.base] = True, *known.heads.get(run.base, (False, 0, -1))[1:]
            self._logs.publish(log)

    def _give_up(self, known: _Watched) -> None:
        """Remove the cleaned files of a log that are not swapped."""
        known.pending.clear()
        known.waits_for_readers = False
        if known.log.is_swapping:
            return
        try:
            if self._files.exists(known.log.directory):
                remove_cleaned(self._files, known.log.directory)
        except OSError as error:
            logger.warning(
                "cleaned_files_not_removed directory=%s error=%r", known.log.directory, str(error)
            )
