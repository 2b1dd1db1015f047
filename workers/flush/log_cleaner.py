"""Log cleaner: seals segments that are older than segment.ms and deletes those whose retention has
expired.

The active segment is sealed without an append when all of it has expired, or when segment.bytes was
lowered below its size. On a full disk, where no append comes, it is split when a part of it has
expired. The rest is copied to a new segment (docs/adr/0029-sealing-without-an-append.md).

Owner: the flusher, whose agent steps it. Deadlines are on its timing wheel.

Invariants:
- Nothing is deleted before recovery has ended (`may_remove`), nothing under a lease, and nothing of
  an offline log.
- A log with a group in progress is left alone until it is settled.

Crash: timers are set again when the logs are opened. The log start offset is durable before a file
is deleted. A split is a rewrite (see `partition_log`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from shm.runtime.timing_wheel import Timer, TimingWheel
from workers.flush.cleaning.segment_split import split_off
from workers.flush.commit.group_commit import GroupCommit
from workers.log.files.active_segment import ActiveSegment
from workers.log.files.delay_manifest import read_cursor
from workers.log.log_set import LogSet
from workers.log.partition_log import PartitionLog
from workers.log.producers.delay_rules import kept_from, newest_us
from workers.log.retention.expiry import KEEP_FOR_EVER, expires_us, new_start
from workers.log.retention.leases import LogKey, RetentionLeases, Task
from workers.log.retention.merging_rules import SETTING, has_small_batches
from workers.log.retention.wall_clock_jumps import WallJumps
from workers.segment.files import is_shortage

if TYPE_CHECKING:
    from workers.flush.compaction import Compaction

logger = logging.getLogger(__name__)

RETENTION_CHECK_MIN_MS = 100
COMPACT = "compact"
"""The part of cleanup.policy that says that a topic is compacted."""
DELAY_LOG_CHECK_MS = 10_000
CLOCK_CHECK_NS = 1_000_000_000
"""Interval of checks for jumps of the wall clock. Records appended between a jump and the check may
stay longer, by the jump.
"""


class LogCleaner:
    """Sealing and retention of all logs of one data directory."""

    def __init__(
        self,
        logs: LogSet,
        commit: GroupCommit,
        wheel: TimingWheel[Task],
        now_us: Callable[[], int],
        start_ns: int,
        is_disk_full: Callable[[], bool] = lambda: False,
        *,
        jumps: WallJumps,
        check_interval_ms: int = 3_600_000,
        make_compaction: Callable[[LogCleaner], Compaction] | None = None,
    ) -> None:
        """`check_interval_ms`: longest time between two checks of a log for expired segments.
        `make_compaction`: called when the first compacted topic appears.
        """
        self._check_interval_ms = check_interval_ms
        self._is_disk_full = is_disk_full
        self._logs = logs
        self._commit = commit
        self._now_us = now_us
        self._now_ns = start_ns
        self._jumps = jumps
        self._clock_checked_ns = start_ns
        self._wheel = wheel
        self.may_remove = False
        self._ages: dict[int, tuple[int, Timer[Task]]] = {}
        """(segment base, timer) by slot, of segments with a segment.ms timer."""
        self._retentions: dict[int, Timer[Task]] = {}
        self.leases = RetentionLeases(wheel, self._on_lease_end)
        self._make_compaction = make_compaction
        self.compaction: Compaction | None = None
        """Made when the first compacted topic appears."""

    def advance(self, now_ns: int) -> int:
        """Run the timers that are due. Return the amount of work done."""
        self._now_ns = now_ns
        if now_ns - self._clock_checked_ns >= CLOCK_CHECK_NS:
            self._check_clock()
        return sum(task() for task in self._wheel.advance(now_ns))

    def _check_clock(self) -> int:
        """Check for a jump of the wall clock. Returns its time, us."""
        self._clock_checked_ns, now_us = self._now_ns, self._now_us()
        self._jumps.observe(now_us, self._now_ns)
        return now_us

    def begin(self, log: PartitionLog, now_ns: int) -> None:
        """Set the timers of a log that was opened or has new settings."""
        self._ages.pop(log.assignment.slot, None)
        self.watch_age(log, now_ns)
        self.retain(log)
        if COMPACT in log.assignment.settings["cleanup.policy"] or self.compaction is not None:
            self._watch(log)

    def _watch(self, log: PartitionLog) -> None:
        """Have compaction look at a log."""
        if self.compaction is None and self._make_compaction is not None:
            self.compaction = self._make_compaction(self)
            self.compaction.may_remove = self.may_remove
        if self.compaction is not None:
            self.compaction.begin(log, self._now_ns)

    def _watch_small_batches(self, log: PartitionLog) -> None:
        """Have small batches of sealed segments merged."""
        below_bytes = int(log.assignment.settings.get(SETTING, 0))
        if (
            below_bytes
            and not log.assignment.delay_of
            and any(has_small_batches(each, below_bytes) for each in log.sealed.oldest_first())
        ):
            self._watch(log)

    def allow_removal(self) -> None:
        """Begin to remove: recovery has ended."""
        self.may_remove = True
        if self.compaction is not None:
            self.compaction.may_remove = True

    def forget(self, slot: int) -> None:
        """Drop the timers of a log that was closed or deleted."""
        self._ages.pop(slot, None)
        timer = self._retentions.pop(slot, None)
        if timer is not None:
            self._wheel.cancel(timer)
        if self.compaction is not None:
            self.compaction.forget(slot)

    def watch_age(self, log: PartitionLog, now_ns: int) -> None:
        """Set the timer that seals the active segment after segment.ms, unless it is set."""
        self._now_ns = now_ns
        live, slot = log.live, log.assignment.slot
        known = self._ages.get(slot)
        if (
            live is None
            or not live.first_append_us
            or (known is not None and known[0] == live.base)
        ):
            return
        age_ms = max(0, self._now_us() - live.first_append_us) // 1000
        deadline_ns = (
            now_ns + max(0, int(log.assignment.settings["segment.ms"]) - age_ms) * 1_000_000
        )
        base = live.base
        timer = self._wheel.add(deadline_ns, lambda: self._seal_old(log, base))
        if known is not None:
            self._wheel.cancel(known[1])
        self._ages[slot] = (base, timer)
        if slot not in self._retentions:  # the log was empty at the last check
            self.retain(log)

    def _seal_old(self, log: PartitionLog, base: int) -> int:
        """Seal an active segment whose segment.ms has passed, so that readers of sealed segments
        get it even without further appends.
        """
        slot = log.assignment.slot
        if (
            self._logs.get(slot) is not log
            or log.live is None
            or log.live.base != base
            or log.refusal
            or self._ages.get(slot, (-1,))[0] != base
        ):
            return 0
        if log.group:  # its group waits for space on the disk; its commit sets the timer again
            self._ages.pop(slot, None)
            return 0
        self._ages.pop(slot, None)
        self._seal(log)
        return 1

    def seal(self, log: PartitionLog) -> bool:
        """Close the active segment. Returns True if it is closed."""
        return self._seal(log)

    def _seal(self, log: PartitionLog, *, is_deleted_next: bool = False) -> bool:
        """Close the active segment; the next batch starts another one. With `is_deleted_next` its
        end mark may be missing on a full disk. Returns True if it is closed.
        """
        try:
            if log.is_unsynced and not self._commit.sync(log):
                return False
            try:
                log.seal()
            except OSError as error:
                if not is_deleted_next or not is_shortage(error):
                    raise
                log.abandon_segment()
            self._checkpoint(log)
        except OSError as error:
            if not is_shortage(error):
                self._logs.take_offline(log, error)
            return False
        self._logs.publish(log)
        self.retain(log)
        return True

    @staticmethod
    def _checkpoint(log: PartitionLog) -> None:
        """Write a checkpoint. Raises OSError, except for a full disk. Then the previous checkpoint
        stays valid, and recovery reads more.
        """
        try:
            log.checkpoint(sync=False)
        except OSError as error:
            if not is_shortage(error):
                raise
            logger.warning(
                "checkpoint_not_written directory=%s error=%r", log.directory, str(error)
            )

    def set_check_interval(self, check_interval_ms: int) -> None:
        """Check all logs now, and then at the new interval."""
        if check_interval_ms != self._check_interval_ms:
            self._check_interval_ms = check_interval_ms
            for log in self._logs.all():
                self.retain(log)

    def make_room(self) -> None:
        """Delete all expired segments at once, since the disk is full."""
        for log in self._logs.all():
            self.retain(log)

    def retain(self, log: PartitionLog) -> int:
        """Delete the segments whose retention has expired, and set the timer of the next check."""
        slot, settings = log.assignment.slot, log.assignment.settings
        timer = self._retentions.pop(slot, None)
        if timer is not None:
            self._wheel.cancel(timer)
        is_leaving = bool(log.assignment.departing)
        if self._logs.get(slot) is not log or log.refusal or not self.may_remove or is_leaving:
            return 0
        retention_ms, retention_bytes = (
            int(settings["retention.ms"]),
            int(settings["retention.bytes"]),
        )
        if settings["cleanup.policy"] == COMPACT:
            retention_ms = retention_bytes = KEEP_FOR_EVER
        self._watch_small_batches(log)
        now_us = self._check_clock()
        leased = self.leases.lowest(log.key)
        if self._close_live(log, retention_ms, retention_bytes, now_us, leased):
            return 1  # it has called `retain` again
        live = log.live
        if log.assignment.delay_of:
            return self._remove_scheduled(log)
        moved = self._jumps.moved
        segments = [
            s._replace(
                max_timestamp_us=moved(
                    newest_us(log.assignment, s.max_timestamp_us, s.last_append_us)
                ),
                last_append_us=moved(s.last_append_us),
            )
            for s in log.sealed.oldest_first()
        ]
        start = new_start(
            segments, live.base if live else log.next_offset, live.end if live else 0,
            retention_ms=retention_ms,
            retention_bytes=retention_bytes, now_us=now_us, leased_from=leased,
        )  # fmt: skip
        start = min(start, log.last_stable_offset)  # what is open is not removed
        removed = 0
        if start > log.log_start_offset or any(
            log.following_base(s.base) <= log.log_start_offset
            for s in log.sealed.oldest_first()[:1]
        ):
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
                log.log_start_offset,
            )
            self._logs.publish(log)
        self._set_expiry_timer(log, retention_ms, now_us)
        return removed

    def _close_live(
        self,
        log: PartitionLog,
        retention_ms: int,
        retention_bytes: int,
        now_us: int,
        leased: int | None,
    ) -> bool:
        """Seal or split the active segment if all of it, or on a full disk a part of it, has
        expired. Returns True if that was done; it has then called `retain`.
        """
        live = log.live
        if live is None or not live.first_append_us or log.group:
            return False
        is_expired = retention_ms != KEEP_FOR_EVER and (
            self._expires_us(log, live.max_timestamp_us, log.last_append_us, retention_ms) < now_us
        )
        if is_expired or log.assignment.delay_of:
            return is_expired and self._seal(log, is_deleted_next=True)
        if log.log_start_offset >= log.next_offset or (
            retention_bytes == 0 and self._is_disk_full()
        ):
            return self._seal(log, is_deleted_next=log.log_start_offset >= log.next_offset)
        if self._is_disk_full() and leased is None and self._split(log, live, retention_bytes):
            return True
        return live.end > int(log.assignment.settings["segment.bytes"]) and self._seal(log)

    def _split(self, log: PartitionLog, live: ActiveSegment, retention_bytes: int) -> bool:
        """Split the active segment on a full disk."""
        if not split_off(log, live, retention_bytes, self._commit, self._checkpoint):
            return False
        self._logs.publish(log)
        self.watch_age(log, self._now_ns)
        self.retain(log)
        return True

    def _expires_us(
        self, log: PartitionLog, max_timestamp_us: int, last_append_us: int, retention_ms: int
    ) -> int:
        """Expiry time of a segment of the log with these timestamps."""
        newest = newest_us(log.assignment, max_timestamp_us, last_append_us)
        return expires_us(
            self._jumps.moved(newest), self._jumps.moved(last_append_us), retention_ms
        )

    def _remove_scheduled(self, log: PartitionLog) -> int:
        """Delete a delay log's segments once the scheduler has stored all of
        their rows durably (`workers.log.files.delay_manifest`).
        """
        removed = 0
        try:
            cursor = read_cursor(log.files, log.directory, log.assignment.topic_id)
            bases = [segment.base for segment in log.sealed.oldest_first()] + [
                log.live.base if log.live is not None else log.next_offset
            ]
            start = kept_from(cursor, bases, log.log_start_offset)
            if start > log.log_start_offset:
                removed = log.advance_start(start)
                self._logs.publish(log)
        except OSError as error:
            logger.error("retention_failed directory=%s error=%r", log.directory, str(error))
        if log.sealed.oldest_first():
            deadline_ns = self._now_ns + DELAY_LOG_CHECK_MS * 1_000_000
            self._retentions[log.assignment.slot] = self._wheel.add(
                deadline_ns, lambda: self.retain(log)
            )
        return removed

    def _set_expiry_timer(self, log: PartitionLog, retention_ms: int, now_us: int) -> None:
        """Set a timer for the expiry of the oldest segment. Retention by bytes is checked whenever
        a segment is closed.
        """
        if retention_ms == KEEP_FOR_EVER:
            return
        oldest = next(iter(log.sealed.oldest_first()), None)
        if oldest is not None:
            end_us = self._expires_us(
                log, oldest.max_timestamp_us, oldest.last_append_us, retention_ms
            )
        elif log.live is not None and log.live.first_append_us:
            end_us = self._expires_us(
                log, log.live.max_timestamp_us, log.last_append_us, retention_ms
            )
        else:
            return
        wait_ms = min(
            max((end_us - now_us) // 1000, RETENTION_CHECK_MIN_MS), self._check_interval_ms
        )
        self._retentions[log.assignment.slot] = self._wheel.add(
            self._now_ns + wait_ms * 1_000_000, lambda: self.retain(log)
        )

    def _on_lease_end(self, key: LogKey) -> int:
        """Check retention again after a lease has ended. Cleaned segments wait for it, too."""
        if self.compaction is not None:
            self.compaction.on_lease_end(key)
        return sum(self.retain(log) for log in self._logs.all() if log.key == key)
