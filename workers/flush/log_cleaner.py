"""What a flusher does with segments when time has passed: seals those that are old, removes those whose retention has expired.

Owner: the flusher, whose agent steps it; deadlines are on its timing wheel.
Invariants: nothing is removed before recovery is over (`may_remove`), nothing that a lease covers, nothing of a log that is offline; a log with a group
    under way is left alone until it is settled.
Crash: timers are made anew when the logs are opened; the log start offset is durable before a file goes (see `partition_log`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from workers.delay_gate import kept_from, newest_us
from workers.delays.manifest import read_cursor
from workers.files import is_shortage
from workers.group_commit import GroupCommit
from workers.index_scrub import scrub_one_index
from workers.leases import Leases, LogKey, Task
from workers.log_set import LogSet
from workers.partition_log import PartitionLog
from workers.retention import KEEP_FOR_EVER, CautiousClock, expires_us, new_start
from workers.timing_wheel import Timer, TimingWheel

logger = logging.getLogger(__name__)

RETENTION_LOOK_MAX_MS = 3_600_000
RETENTION_LOOK_MIN_MS = 100
DELAY_LOG_LOOK_MS = 10_000


class Housekeeping:
    """For every log of one data directory."""

    def __init__(self, logs: LogSet, commit: GroupCommit, wheel: TimingWheel[Task], now_us: Callable[[], int], start_ns: int) -> None:
        self._logs = logs
        self._commit = commit
        self._now_us = now_us
        self._now_ns = start_ns
        self._clock = CautiousClock(now_us(), start_ns)
        self._wheel = wheel
        self.may_remove = False
        self._ages: dict[int, tuple[int, Timer[Task]]] = {}
        """slot -> (base, timer) of the segment whose age is being watched."""
        self._retentions: dict[int, Timer[Task]] = {}
        self.leases = Leases(wheel, self._look_at)

    def advance(self, now_ns: int) -> int:
        """Do what is due on the wheel; returns how much was done."""
        self._now_ns = now_ns
        return sum(task() for task in self._wheel.advance(now_ns))

    def begin(self, log: PartitionLog, now_ns: int) -> None:
        """A log was opened, or its settings are others now."""
        self._ages.pop(log.assignment.slot, None)
        self.watch_age(log, now_ns)
        self.retain(log)

    def forget(self, slot: int) -> None:
        """The log is closed or gone."""
        self._ages.pop(slot, None)
        timer = self._retentions.pop(slot, None)
        if timer is not None:
            self._wheel.cancel(timer)

    def watch_age(self, log: PartitionLog, now_ns: int) -> None:
        """Have the live segment sealed when segment.ms has passed, unless that is arranged already."""
        self._now_ns = now_ns
        live, slot = log.live, log.assignment.slot
        known = self._ages.get(slot)
        if live is None or not live.first_append_us or (known is not None and known[0] == live.base):
            return
        age_ms = max(0, self._now_us() - live.first_append_us) // 1000
        deadline_ns = now_ns + max(0, int(log.assignment.settings["segment.ms"]) - age_ms) * 1_000_000
        base = live.base
        timer = self._wheel.add(deadline_ns, lambda: self._seal_old(log, base))
        if known is not None:
            self._wheel.cancel(known[1])
        self._ages[slot] = (base, timer)
        if slot not in self._retentions:  # it was empty when that was looked at last
            self.retain(log)

    def _seal_old(self, log: PartitionLog, base: int) -> int:
        """Seal a live segment whose segment.ms has passed, so that readers of sealed segments get at it even when nothing follows."""
        slot = log.assignment.slot
        if (
            self._logs.get(slot) is not log
            or log.live is None
            or log.live.base != base
            or log.refusal
            or self._ages.get(slot, (-1,))[0] != base
        ):
            return 0
        if log.group:  # its group waits for a full disk: look again then
            self._ages.pop(slot, None)
            return 0
        self._ages.pop(slot, None)
        self._seal(log)
        return 1

    def _seal(self, log: PartitionLog) -> None:
        """Close the live segment; the next batch begins another."""
        try:
            if log.is_unsynced and not self._commit.sync(log):
                return
            log.seal()
            log.checkpoint(sync=False)
        except OSError as error:
            if not is_shortage(error):
                self._logs.take_offline(log, error)
            return
        self._logs.publish(log)
        self.retain(log)

    def retain(self, log: PartitionLog) -> int:
        """Remove the segments whose retention has expired, and set the timer for the next look."""
        slot, settings = log.assignment.slot, log.assignment.settings
        timer = self._retentions.pop(slot, None)
        if timer is not None:
            self._wheel.cancel(timer)
        if self._logs.get(slot) is not log or log.refusal or not self.may_remove or settings["cleanup.policy"] != "delete":
            return 0
        retention_ms, retention_bytes = int(settings["retention.ms"]), int(settings["retention.bytes"])
        now_us = self._clock.now_us(self._now_us(), self._now_ns)
        live = log.live
        if (
            live is not None
            and live.first_append_us
            and retention_ms != KEEP_FOR_EVER
            and not log.group
            and expires_us(newest_us(log.assignment, live.max_timestamp_us, log.last_append_us), log.last_append_us, retention_ms) < now_us
        ):
            self._seal(log)  # comes back here
            return 1
        if log.assignment.delay_of:
            return self._remove_scheduled(log)
        leased = self.leases.lowest(log.key)
        segments = [
            s._replace(max_timestamp_us=newest_us(log.assignment, s.max_timestamp_us, s.last_append_us)) for s in log.closed_segments()
        ]
        start = new_start(
            segments, live.base if live else log.next_offset, live.end if live else 0, retention_ms=retention_ms,
            retention_bytes=retention_bytes, now_us=now_us, leased_from=leased,
        )  # fmt: skip
        removed = 0
        if start > log.log_start_offset or any(log.following_base(s.base) <= log.log_start_offset for s in log.closed_segments()[:1]):
            try:
                removed = log.advance_start(start)
            except OSError as error:
                logger.error("retention_failed directory=%s error=%r", log.directory, str(error))
        if removed:
            logger.info(
                "segments_removed topic=%s partition=%d count=%d log_start=%d",
                log.assignment.topic,
                log.assignment.partition,
                removed,
                start,
            )
            self._logs.publish(log)
        self._look_again(log, retention_ms, now_us)
        return removed

    def _remove_scheduled(self, log: PartitionLog) -> int:
        """A delay log: its segments go when the scheduler has everything in them elsewhere, durably (`workers.delays.manifest`)."""
        removed = 0
        try:
            cursor = read_cursor(log.files, log.directory, log.assignment.topic_id)
            bases = [segment.base for segment in log.closed_segments()] + [log.live.base if log.live is not None else log.next_offset]
            start = kept_from(cursor, bases, log.log_start_offset)
            if start > log.log_start_offset:
                removed = log.advance_start(start)
                self._logs.publish(log)
        except OSError as error:
            logger.error("retention_failed directory=%s error=%r", log.directory, str(error))
        if log.closed_segments():
            deadline_ns = self._now_ns + DELAY_LOG_LOOK_MS * 1_000_000
            self._retentions[log.assignment.slot] = self._wheel.add(deadline_ns, lambda: self.retain(log))
        return removed

    def _look_again(self, log: PartitionLog, retention_ms: int, now_us: int) -> None:
        """Set a timer for the expiry of the oldest segment. Retention by bytes needs none: it is looked at whenever a segment is closed."""
        if retention_ms == KEEP_FOR_EVER:
            return
        oldest = next(iter(log.closed_segments()), None)
        if oldest is not None:
            end_us = expires_us(
                newest_us(log.assignment, oldest.max_timestamp_us, oldest.last_append_us), oldest.last_append_us, retention_ms
            )
        elif log.live is not None and log.live.first_append_us:
            end_us = expires_us(newest_us(log.assignment, log.live.max_timestamp_us, log.last_append_us), log.last_append_us, retention_ms)
        else:
            return
        wait_ms = min(max((end_us - now_us) // 1000, RETENTION_LOOK_MIN_MS), RETENTION_LOOK_MAX_MS)
        self._retentions[log.assignment.slot] = self._wheel.add(self._now_ns + wait_ms * 1_000_000, lambda: self.retain(log))

    def tidy(self) -> int:
        """One step of what can wait until there is nothing else to do: the journal's zeroes, indexes not checked since the start. Returns 0 at its end."""
        if self._commit.wants_journal and len(self._logs) > 1:
            return int(self._commit.prepare_journal())
        for log in self._logs.all():
            if log.unscrubbed and not log.group:
                try:
                    scrub_one_index(log)
                    self.retain(log)  # it may know a segment's age only now
                except OSError as error:
                    logger.warning("index_not_looked_at directory=%s error=%r", log.directory, str(error))
                return 1
        return 0

    def checkpoint_some(self, checkpoint_bytes: int) -> None:
        """Keep what recovery would have to read below `checkpoint_bytes`."""
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
                logger.warning("checkpoint_not_written directory=%s error=%r", log.directory, str(error))

    def _look_at(self, key: LogKey) -> int:
        """A lease has ended."""
        return sum(self.retain(log) for log in self._logs.all() if log.key == key)
