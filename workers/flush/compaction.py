"""Compaction: decides which log is cleaned next, gives the cleaner its job, and swaps the segments
that it has written again.

A log is cleaned because its topic is compacted. Of other logs, segments with small batches are
merged, when nothing is to be cleaned.

    a log is due -> job (`workers.segment.cleaning_job`) -> the cleaner reports a run -> no reader
    has a lease on it -> `PartitionLog.swap`, one durable step -> the partition table shows it

Owner: the flusher, whose agent steps it. It exists once there is a compacted topic, or a segment
to merge.

Invariants:
- One job at a time. A log has no second job before the runs of the first are swapped or given up.
- A log of which a segment was not checked since the start (`workers.log.index_scrubber`) waits for
  it; merging goes on with its other segments.
- A swap that is decided is finished, whatever becomes of its topic's settings.
- A log that cannot be cleaned is shown as such, with its reason in the log, and the part before the
  damage is cleaned on.

Crash: jobs and runs that are not decided are given up with the process; a start removes their
    files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from shm.memory.layout import ProcessWord
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.timing_wheel import Timer, TimingWheel
from shm.tables.control import ProcessSlot
from workers.flush.cleaning.job_orders import CleaningSettings as CleaningSettings
from workers.flush.cleaning.job_orders import job_of
from workers.flush.cleaning.outcomes import log_done, note_damage, note_unreadable
from workers.flush.cleaning.segment_heads import SegmentHeads
from workers.flush.cleaning.segment_swapper import SegmentSwapper
from workers.flush.cleaning.watched_log import (
    MERGE_RANK,
    Rank,
    WatchedLog,
    has_segments_to_merge,
    is_compacted,
)
from workers.flush.commit.group_commit import GroupCommit
from workers.log.log_set import LogSet
from workers.log.partition_log import NOT_CLEANED, PartitionLog
from workers.log.retention.compaction_rules import Cleanable, runs
from workers.log.retention.leases import RetentionLeases, Task
from workers.log.retention.wall_clock_jumps import WallJumps
from workers.segment import cleaning_job
from workers.segment.cleaning_job import CleaningJob, CleaningReport
from workers.segment.files import Files
from workers.segment.segment_swap import remove_cleaned

logger = logging.getLogger(__name__)

SEAL_RETRY_MS = 50
"""Wait for a group of the log that is in progress, where a request wants its segment sealed, and
for the scrubber, where a request wants segments cleaned.
"""
NOTHING = Cleanable((), 0)


class CleanerLink(NamedTuple):
    """Shared memory of a flusher and its cleaner."""

    slot: ProcessSlot
    """The flusher's."""
    reports: Callable[[], int]
    """The cleaner's number of reports."""
    ring: Callable[[], None]
    """Wakes the supervisor, which starts a cleaner, and the cleaner."""


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
        retain: Callable[[PartitionLog], int],
        error_handler: CountedErrorHandler,
        reserve_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`seal`: closes the active segment of a log. `retain`: deletes expired segments.
        `reserve_bytes`: with less free space than this the data directory counts as full.
        """
        self._reserve_bytes = reserve_bytes
        self._error_handler = error_handler
        self._files = files
        self._data_dir = data_dir
        self._logs = logs
        self._commit = commit
        self._wheel = wheel
        self._swapper = SegmentSwapper(files, logs, commit, leases, self._on_refused)
        self._jumps = jumps
        self._link = link
        self._now_us = now_us
        self._seal = seal
        self._retain = retain
        self.settings = CleaningSettings()
        self._watched: dict[int, WatchedLog] = {}
        """By slot."""
        self._heads: dict[int, SegmentHeads] = {}
        """By slot, of logs that are watched or were."""
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
        """Watch a log that was opened, has new settings or a new sealed segment, if its topic is
        compacted or it has segments to merge.
        """
        self._now_ns = now_ns
        slot = log.assignment.slot
        known = self._watched.get(slot)
        is_cleaned = is_compacted(log)
        is_needed = log.is_open and (
            is_cleaned or log.sealed.is_swapping or has_segments_to_merge(log)
        )
        if known is not None and (
            known.log is not log or not is_needed or known.is_compacted != is_cleaned
        ):
            self._leave(slot)
            if known.log is log:
                log.cleaning = NOT_CLEANED
                self._logs.publish(log)
            known = None
        if is_needed and known is None:
            heads = self._heads.get(slot)
            if heads is None or heads.log is not log:
                heads = self._heads[slot] = SegmentHeads(log)
            self._watched[slot] = WatchedLog(log, heads, is_cleaned)
            self._set_timer(0)
        elif is_needed and is_cleaned:
            self._set_timer(0)

    def forget(self, slot: int) -> None:
        """Leave a log that was closed or deleted."""
        self._heads.pop(slot, None)
        self._leave(slot)

    def _leave(self, slot: int) -> None:
        """Leave a log, which may have nothing to clean any more."""
        known = self._watched.pop(slot, None)
        if known is None:
            return
        if self._job_slot == slot:
            self._end_job()
        self._swapper.give_up(known)

    def request(self, key: tuple[bytes, int], number: int, now_ns: int) -> None:
        """Clean a log at the next chance, whatever its dirty ratio. A request that is known, or
        older than one that is, changes nothing.
        """
        self._now_ns = now_ns
        for known in self._watched.values():
            if known.log.key == key and known.is_compacted and number > known.asked:
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
        if not self._watched and not any(log.sealed.is_swapping for log in self._logs.all()):
            self._end_job()
            return 0
        self._set_timer(self.settings.check_ms)
        if self.may_remove:
            self._check()
        self._wait_at_most(self._retry_ms())
        return 1

    def _retry_ms(self) -> int:
        """Time until a log that failed is tried again, or the interval of checks."""
        waits = [
            (known.retry_ns - self._now_ns) // 1_000_000 + 1
            for known in self._watched.values()
            if known.retry_ns > self._now_ns
        ]
        return min([self.settings.check_ms, *waits])

    def _wait_at_most(self, wait_ms: int) -> None:
        """Have the next check after this time, if it is not earlier."""
        due_ns = self._now_ns + wait_ms * 1_000_000
        if self._timer is None or self._timer.deadline_ns > due_ns:
            self._set_timer(wait_ms)

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

    def _set_aside(self, known: WatchedLog, error: Exception) -> None:
        """Leave a log alone for a while after an unexpected error: the flusher goes on. Raises the
        error if it is that of a broken invariant.
        """
        if isinstance(error, AssertionError):
            raise error
        self._error_handler.on_error(f"directory={known.log.directory}", error)
        self._wait_at_most(known.note_failure(self._now_ns) // 1_000_000)
        if self._job_slot == known.log.assignment.slot:
            self._end_job()
            self._swapper.give_up(known)

    def _finish_swap(self, log: PartitionLog) -> None:
        """Finish the swap of a log if its run is not known here any more."""
        known = self._watched.get(log.assignment.slot)
        if known is not None and known.pending:
            return  # it is swapped with the runs behind it
        try:
            self._swapper.finish(log)
        except AssertionError:
            raise
        except Exception as error:
            self._error_handler.on_error(f"directory={log.directory}", error)

    # ---- choosing --------------------------------------------------------------------------------

    def _check(self) -> None:
        """Look at all logs; begin a job if there is none."""
        now_us = self._now_us()
        self._jumps.observe(now_us, self._now_ns)
        swapping = [log for log in self._logs.all() if log.sealed.is_swapping]
        for log in swapping:
            self._finish_swap(log)
        best: tuple[Rank, WatchedLog] | None = None
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
        for log in swapping:
            if not log.sealed.is_swapping:
                self._retain(log)  # it has waited for the swap

    def _examine(self, known: WatchedLog, now_us: int) -> Rank | None:
        """Do what is due of a log. Returns its urgency, None if it needs no job now."""
        log = known.log
        if known.pending:
            self._swapper.swap_some(known)
        if not known.is_compacted:
            return self._examine_merge(known)
        self._seal_due(known, now_us)
        part = known.part(now_us, self._jumps.moved)
        note_damage(known)
        is_at_rest = self._is_at_rest(known)
        rank = None
        if known.is_requested and log.sealed.unscrubbed:
            self._set_timer(SEAL_RETRY_MS)
        if is_at_rest and not log.refusal and self._now_ns >= known.retry_ns:
            rank = known.rank(part, now_us, self._jumps.moved)
        if is_at_rest and known.goal >= 0 and not known.is_due_by_request(part):
            known.done = known.asked
        self._show(known, part)
        return rank

    def _is_at_rest(self, known: WatchedLog) -> bool:
        """True if nothing of the log is being cleaned, merged or swapped."""
        slot = known.log.assignment.slot
        return not known.pending and not known.log.sealed.is_swapping and self._job_slot != slot

    def _examine_merge(self, known: WatchedLog) -> Rank | None:
        """Leave a log that has nothing to merge. Returns the urgency of one that has."""
        log = known.log
        if not self._is_at_rest(known) or log.refusal or self._now_ns < known.retry_ns:
            return None
        if known.mergeable():
            return MERGE_RANK
        if not known.to_merge():
            self._leave(log.assignment.slot)
        return None

    def _seal_due(self, known: WatchedLog, now_us: int) -> None:
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

    def _show(self, known: WatchedLog, part: Cleanable) -> None:
        """Publish what compaction knows of a log."""
        log = known.log
        if not known.is_compacted:
            return
        shown = known.shown(part, is_running=self._job_slot == log.assignment.slot)
        if shown != log.cleaning:
            log.cleaning = shown
            self._logs.publish(log)

    # ---- jobs ------------------------------------------------------------------------------------

    def _begin_job(self, known: WatchedLog, now_us: int) -> None:
        log = known.log
        if log.group or (log.is_unsynced and not self._commit.sync(log)):
            return
        try:
            if log.live is None:
                log.roll()  # the newest segment is not cleaned: a start reads its headers
                self._logs.publish(log)
            part = known.part(now_us, self._jumps.moved) if known.is_compacted else NOTHING
            segment_bytes = int(log.assignment.settings["segment.bytes"])
            cut = (
                runs(part.segments, segment_bytes)
                if known.is_compacted
                else [[each] for each in known.mergeable()]
            )
            if not cut:
                return
            cleaning_job.remove_files(self._files, self._data_dir)
            number = self._link.slot.load(ProcessWord.CLEANING_JOBS) + 1
            self._link.slot.store(ProcessWord.CLEANING_JOBS, number)
            job = job_of(
                number, log, cut, self._jumps, self.settings,
                keep_free_bytes=self._keep_free_bytes(), is_merge=not known.is_compacted,
                made_us=now_us, made_ns=self._now_ns,
            )  # fmt: skip
            remove_cleaned(self._files, log.directory)
            cleaning_job.write_job(self._files, self._data_dir, job)
        except OSError as error:
            logger.warning("cleaning_not_begun directory=%s error=%r", log.directory, str(error))
            known.note_failure(self._now_ns)
            return
        known.tombstones_since_us = known.retry_ns = 0
        self._job, self._job_slot, self._run_count = job, log.assignment.slot, 0
        self._link.slot.store(ProcessWord.CLEANING, job.number)
        self._link.ring()
        self._show(known, part)

    def _keep_free_bytes(self) -> int:
        """Room that a job leaves: what keeps the directory from counting as full, or half of what
        there is. Raises OSError.
        """
        return min(self._reserve_bytes() * 5 // 4, self._files.free_bytes(self._data_dir) // 2)

    def _end_job(self) -> None:
        """Give up the job, or the cleaner if it has none."""
        self._job, self._job_slot = None, -1
        if self._link.slot.load(ProcessWord.CLEANING):
            self._link.slot.store(ProcessWord.CLEANING, 0)
            self._link.ring()

    def _on_refused(self, known: WatchedLog) -> None:
        if self._job_slot == known.log.assignment.slot:
            self._end_job()

    def _take(self, known: WatchedLog, report: CleaningReport) -> None:
        """Take over a report on the job of a log."""
        known.pending += report.runs[self._run_count :]
        self._run_count = len(report.runs)
        log = known.log
        if report.state == cleaning_job.RUNNING:
            self._swapper.swap_some(known)
            return
        self._job, self._job_slot = None, -1  # the next check has another one, or ends the cleaner
        if report.state == cleaning_job.DONE:
            known.failures = 0
            known.tombstones_since_us = report.tombstones_since_us
            log_done(known, report)
        elif report.state == cleaning_job.UNREADABLE:
            note_unreadable(known, report)
        else:
            wait_ns = known.note_failure(self._now_ns)
            logger.warning(
                "cleaning_tried_again topic=%s partition=%d wait_ms=%d reason=%r",
                log.assignment.topic, log.assignment.partition, wait_ns // 1_000_000,
                report.reason,
            )  # fmt: skip
        self._swapper.swap_some(known)
        self._set_timer(0)
