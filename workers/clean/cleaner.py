"""Cleaner process of one data directory: does the jobs of its flusher.

Jobs and reports are files (`workers.segment.cleaning_job`).

The supervisor starts it when a flusher has a job and ends it when there is none. It runs at the
lowest priority of processor and disk, and within cleaner.io.max.bytes.per.second.

Owner: the `.cleaned` files of its job, and cleaner.report. It changes nothing that readers see: the
flusher swaps the segments.

Invariants:
- The segments that a run replaces are open here while the flusher swaps them, so that it removes
  names only. Their blocks are freed here, at the next run or the job's end: 25 ms for 64 MiB.
- A job that fails is reported with its reason, and the process goes on.
- A step handles a few batches. Nothing waits for the cleaner.

Crash: its successor ends a job that was reported on, and begins any other one again.

Run it with `python -P -m workers.clean.cleaner`.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shm.memory.layout import ProcessWord, Role
from shm.queues.doorbell import Doorbell
from shm.runtime.agent_runner import ProcessContext, configure_logging, run, start
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.control import ProcessSlot
from tailrace.format.segments.segment import file_name
from workers.segment import cleaning_job
from workers.segment.cleaning_job import CleaningJob, CleaningReport
from workers.segment.files import DiskFiles, Files

if TYPE_CHECKING:
    from workers.clean.cleaning_pass import CleaningPass
    from workers.clean.merging_pass import MergingPass
    from workers.segment.segment_swap import CleanedRun

logger = logging.getLogger(__name__)

STEP_BATCHES = 16
STEP_BYTES = 4 << 20
PINNED_MAX = 256
"""Most segments that are held open for the flusher."""
RETRY_NS = 1_000_000_000
"""Interval between attempts to write a report on a full disk."""
_NICE = 19
_IOPRIO_SET, _IOPRIO_PROCESS, _IOPRIO_IDLE = 251, 1, 3 << 13


class Cleaner:
    """Agent of the cleaner process."""

    def __init__(
        self,
        *,
        files: Files,
        data_dir: str,
        flusher: ProcessSlot,
        slot: ProcessSlot,
        flusher_bell: Doorbell,
        on_ready: Callable[[], None],
        now_us: Callable[[], int],
    ) -> None:
        """`flusher`: the slot in which the flusher shows its job."""
        self._files = files
        self._data_dir = data_dir
        self._flusher = flusher
        self._slot = slot
        self._flusher_bell = flusher_bell
        self._on_ready = on_ready
        self._now_us = now_us
        self._error_handler = CountedErrorHandler(slot)
        self._is_ready = False
        self._number = 0
        self._job: CleaningJob | None = None
        self._pass: CleaningPass | MergingPass | None = None
        self._steps: Iterator[int] | None = None
        self._pinned: list[int] = []
        """Descriptors of the segments that the last run replaces."""
        self._reported_count = 0
        """Runs of the job in the last report that was written."""
        self._unreported: CleaningReport | None = None
        """A report that a full disk has refused."""
        self._wait_until_ns = 0
        self._now_ns = 0
        self._counted = CleaningReport(0)
        """Part of this job that is in the slot's counters."""

    def step(self, now_ns: int) -> int:
        """Do a part of the job."""
        self._now_ns = now_ns
        if not self._is_ready:
            self._is_ready = True
            self._on_ready()
        number = self._flusher.load(ProcessWord.CLEANING)
        if number != self._number:
            self._begin(number)
        if now_ns < self._wait_until_ns:
            return 0
        if self._unreported is not None:
            self._report(self._unreported, now_ns)
            return 1
        if self._steps is None or self._job is None:
            return 0
        return self._work(self._steps, self._job, now_ns)

    def has_more(self) -> bool:
        return (self._steps is not None or self._unreported is not None) and not self._wait_until_ns

    def next_deadline_ns(self) -> int | None:
        return self._wait_until_ns or None

    def begin_stop(self) -> None:
        self._leave()

    def is_finished(self) -> bool:
        return True

    # ---- a job -----------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Leave the job, and take the one of this number, if it is not 0."""
        self._leave()
        self._number = number
        if not number:
            return
        try:
            earlier = cleaning_job.read_report(self._files, self._data_dir, number)
            if earlier is not None and earlier.state == cleaning_job.RUNNING:
                self._unreported = earlier._replace(
                    state=cleaning_job.FAILED, reason="the cleaner was restarted"
                )
                return
            if earlier is not None:  # a predecessor may have died before it said so
                self._announce()
                return
            self._job = cleaning_job.read_job(self._files, self._data_dir, number)
            if self._job is None:
                self._fail("cleaner.job cannot be read")
                return
            self._pass = self._pass_of(self._job)
            self._steps = self._pass.steps()
        except Exception as error:
            self._fail(self._error_handler.on_error(f"job={number}", error))

    def _pass_of(self, job: CleaningJob) -> CleaningPass | MergingPass:
        if job.is_merge:
            from workers.clean.merging_pass import MergingPass  # pyarrow, numpy

            return MergingPass(self._files, job, self._note_run)
        from workers.clean.cleaning_pass import CleaningPass

        return CleaningPass(self._files, job, self._clock_of(job), self._note_run)

    def _clock_of(self, job: CleaningJob) -> Callable[[], int]:
        """The time since which tombstones are counted. A wall clock that is set forward while the
        job runs, of which the job's jumps do not know, makes none of them old.
        """
        if not job.made_ns:
            return self._now_us
        return lambda: min(self._now_us(), job.made_us + (self._now_ns - job.made_ns) // 1000)

    def _work(self, steps: Iterator[int], job: CleaningJob, now_ns: int) -> int:
        done = moved = 0
        reason, state, base = "", cleaning_job.FAILED, -1
        try:
            for byte_count in steps:
                done += 1
                moved += byte_count
                if done >= STEP_BATCHES or moved >= STEP_BYTES or self._unreported is not None:
                    break
            else:
                self._steps = None
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
        except ValueError as error:  # UnreadableError is one, and what pyarrow cannot read
            reason, state = str(error), cleaning_job.UNREADABLE
            base = getattr(error, "base", -1)
        except Exception as error:
            reason = self._error_handler.on_error(
                f"topic={job.topic} partition={job.partition}", error
            )
        self._show_counts()
        if reason:
            self._fail(reason, state, base)
        self._wait_until_ns = 0
        if job.bytes_per_second:
            wait_ns = moved * 1_000_000_000 // job.bytes_per_second
            self._wait_until_ns = now_ns + wait_ns
            self._add(ProcessWord.THROTTLED_US, wait_ns // 1000)
        return 1

    def _fail(self, reason: str, state: str = cleaning_job.FAILED, base: int = -1) -> None:
        """End the job with a reason."""
        logger.warning(
            "cleaning_failed topic=%s partition=%d state=%s reason=%r",
            self._job.topic if self._job else "", self._job.partition if self._job else 0, state,
            reason,
        )  # fmt: skip
        report = self._pass.report if self._pass is not None else CleaningReport(self._number)
        report = report._replace(runs=report.runs[: self._reported_count])
        self._leave()
        self._unreported = report._replace(
            number=self._number, state=state, reason=reason, stopped_base=base
        )

    def _leave(self) -> None:
        """Give up what is unfinished."""
        self._unpin()
        made, self._pass, self._steps, self._job = self._pass, None, None, None
        self._unreported, self._wait_until_ns = None, 0
        self._counted = CleaningReport(0)
        reported, self._reported_count = self._reported_count, 0
        if made is not None:
            try:
                made.abandon(reported)
            except OSError as error:
                logger.warning("cleaned_files_not_removed error=%r", str(error))

    # ---- reports ---------------------------------------------------------------------------------

    def _note_run(self, report: CleaningReport) -> None:
        """Report after the step: a report may wait for room on the disk, a step may not."""
        self._unreported = report
        if report.state == cleaning_job.RUNNING:
            self._unpin()
            self._pin(report.runs[-1])

    def _pin(self, run: CleanedRun) -> None:
        """Open the segments that a run replaces, as far as descriptors go."""
        assert self._job is not None
        for base, _ in run.replaced[:PINNED_MAX]:
            try:
                path = f"{self._job.directory}/{file_name(base)}"
                self._pinned.append(self._files.open_for_read(path))
            except OSError:
                return

    def _unpin(self) -> None:
        """Close the segments that were held. Those that were replaced are freed by it."""
        pinned, self._pinned = self._pinned, []
        for fd in pinned:
            self._files.close(fd)

    def _report(self, report: CleaningReport, now_ns: int) -> None:
        self._wait_until_ns = 0
        if self._flusher.load(ProcessWord.CLEANING) != self._number:
            self._leave()  # its flusher has given it up, and removed what it knew of
            return
        try:
            cleaning_job.write_report(self._files, self._data_dir, report)
        except OSError as error:
            logger.warning("cleaning_not_reported error=%r", str(error))
            self._wait_until_ns = now_ns + RETRY_NS
            return
        self._unreported = None
        self._reported_count = len(report.runs)
        if report.state == cleaning_job.DONE:
            self._add(ProcessWord.CLEANED_PASSES, 1)
        self._announce()

    def _announce(self) -> None:
        self._add(ProcessWord.CLEANING_REPORTS, 1)
        self._flusher_bell.ring()

    def _show_counts(self) -> None:
        """Add to the slot's counters what the pass has done since."""
        if self._pass is None:
            return
        report, counted = self._pass.report, self._counted
        self._add(ProcessWord.CLEANED_BYTES_IN, report.bytes_in - counted.bytes_in)
        self._add(ProcessWord.CLEANED_BYTES_OUT, report.bytes_out - counted.bytes_out)
        self._counted = report

    def _add(self, word: ProcessWord, count: int) -> None:
        if count:
            self._slot.store(word, self._slot.load(word) + count)


def be_idle() -> None:
    """Give way to every other process, of processor and disk."""
    os.nice(_NICE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_IOPRIO_SET, _IOPRIO_PROCESS, 0, _IOPRIO_IDLE):
        logger.warning("no_idle_io_priority errno=%d", ctypes.get_errno())


def build(context: ProcessContext, files: Files) -> Cleaner:
    """Build the cleaner of this process."""
    return Cleaner(
        files=files,
        data_dir=context.spec.data_dirs[context.index],
        flusher=context.control.process(Role.FLUSHER, context.index),
        slot=context.slot,
        flusher_bell=context.bell(Role.FLUSHER, context.index),
        on_ready=context.report_ready,
        now_us=context.clock.wall_us,
    )


def main() -> None:
    """Run the cleaner process."""
    context = start()
    configure_logging(context)
    be_idle()
    run(build(context, DiskFiles()), context)


if __name__ == "__main__":
    main()
