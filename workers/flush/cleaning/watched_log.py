"""Watched log: what compaction knows of a log that is compacted, or has segments to merge.

Owner: `workers.flush.compaction`, which changes it.

Invariants:
- All of it follows from the log's files, beside requests, failures and what waits to be swapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shm.tables.partition_table import CleaningState
from workers.flush.cleaning.segment_heads import SegmentHeads
from workers.log.partition_log import PartitionLog
from workers.log.retention.compaction_rules import (
    Candidate,
    Cleanable,
    cleanable,
    is_due,
    is_overdue,
)
from workers.log.retention.merging_rules import SETTING, has_small_batches
from workers.segment.checkpoint import SealedSegment
from workers.segment.segment_swap import CleanedRun

COMPACT = "compact"
"""The part of cleanup.policy that says that a topic is compacted."""
RETRY_MIN_NS = 1_000_000_000
RETRY_MAX_NS = 60_000_000_000
Shown = tuple[int, int, int, int, int, int, int]
MERGED_AT_ONCE = 8
"""Most segments of a job that merges."""
Rank = tuple[bool, bool, float]
"""The urgency of a log: (an operator wants it, it is overdue, its dirty ratio)."""
MERGE_RANK: Rank = (False, False, -1.0)
"""The urgency of merging: after all that is to be cleaned."""


def is_compacted(log: PartitionLog) -> bool:
    """True if the log's topic is compacted."""
    return COMPACT in log.assignment.settings["cleanup.policy"] and not log.assignment.delay_of


def has_segments_to_merge(log: PartitionLog) -> bool:
    """True if the log may have segments to merge, by what is known without reading."""
    below_bytes = int(log.assignment.settings.get(SETTING, 0))
    return (
        below_bytes > 0
        and not log.assignment.delay_of
        and any(has_small_batches(segment, below_bytes) for segment in log.sealed.oldest_first())
    )


@dataclass(slots=True)
class WatchedLog:
    """A log and the heads of its segments."""

    log: PartitionLog
    heads: SegmentHeads
    is_compacted: bool
    pending: list[CleanedRun] = field(default_factory=list)
    """Cleaned runs that are not swapped yet, in their order."""
    stopped_base: int = -1
    """Base of the segment that the cleaner could not read, -1: none."""
    damaged_base: int = -1
    """Base of the first sealed segment with damage that a start has found, -1: none."""
    noted_base: int = -1
    """The one of these that is in the log."""
    failures: int = 0
    """Failed jobs since the last one that ended well."""
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

    def note_failure(self, now_ns: int) -> int:
        """Leave the log alone for a while, for longer each time. Returns how long, ns."""
        wait_ns = min(RETRY_MAX_NS, RETRY_MIN_NS << min(self.failures, 10))
        self.failures += 1
        self.retry_ns = now_ns + wait_ns
        return wait_ns

    def part(self, now_us: int, moved: Callable[[int], int]) -> Cleanable:
        """The part of the log that can be cleaned now. `moved`: see `WallJumps`."""
        log = self.log
        candidates = []
        self.damaged_base = -1
        if min(log.sealed, default=log.next_offset) > self.stopped_base:
            self.stopped_base = -1  # the segment was removed, by retention or by an operator
        for segment, end in self._segments():
            head = self.heads.of(segment)
            is_damaged = 0 <= self.stopped_base <= segment.base
            if self._is_damaged(segment, end):
                is_damaged = True
                self.damaged_base = self.damaged_base if self.damaged_base >= 0 else segment.base
            candidates.append(
                Candidate(
                    segment.base, end, segment.size, moved(head.first_append_us),
                    moved(segment.last_append_us), head.is_cleaned, is_damaged, head.schema_id,
                )
            )  # fmt: skip
        return cleanable(
            candidates,
            stable_offset=log.last_stable_offset,
            now_us=now_us,
            min_lag_ms=int(log.assignment.settings["min.compaction.lag.ms"]),
        )

    def is_unscrubbed(self, part: Cleanable) -> bool:
        """True if the transaction index of a segment was not checked since the start: it may be
        missing, and its aborted records would count as committed.
        """
        unscrubbed = {*self.log.sealed.unscrubbed}
        return any(segment.base in unscrubbed for segment in part.segments)

    def rank(self, part: Cleanable, now_us: int, moved: Callable[[int], int]) -> Rank | None:
        """The urgency of a compacted log, None if it is not due, or waits for the scrubber."""
        if self.is_unscrubbed(part):
            return None
        settings = self.log.assignment.settings
        max_lag_ms = int(settings["max.compaction.lag.ms"])
        is_due_now = is_due(
            part,
            now_us=now_us,
            min_ratio=float(settings["min.cleanable.dirty.ratio"]),
            max_lag_ms=max_lag_ms,
        )
        since_us = self.tombstones_since_us
        has_old_tombstones = bool(since_us) and now_us - moved(since_us) >= (
            int(settings["delete.retention.ms"]) * 1000
        )
        is_due_by_request = self.is_due_by_request(part)
        if not part.segments or not (is_due_by_request or is_due_now or has_old_tombstones):
            return None
        overdue = is_overdue(part, now_us=now_us, max_lag_ms=max_lag_ms)
        return is_due_by_request, overdue, part.dirty_ratio

    def shown(self, part: Cleanable, *, is_running: bool) -> Shown:
        """The state of a compacted log that the partition table shows (`PartitionLog.cleaning`)."""
        state = CleaningState.NONE
        if self.stopped_base >= 0 or self.damaged_base >= 0:
            state = CleaningState.STOPPED
        elif is_running:
            state = CleaningState.RUNNING
        elif self.waits_for_readers:
            state = CleaningState.WAITS_FOR_READERS
        elif self.retry_ns:
            state = CleaningState.RETRYING
        clean = part.segments[: part.clean_count]
        below = clean[-1].end if clean else self.log.log_start_offset
        return (
            below, part.clean_bytes, part.dirty_bytes, max(0, part.dirty_since_us), int(state),
            self.asked, self.done,
        )  # fmt: skip

    def mergeable(self) -> list[Candidate]:
        """The segments whose small batches can be merged now."""
        stable, unscrubbed = self.log.last_stable_offset, {*self.log.sealed.unscrubbed}
        return [
            each for each in self.to_merge() if each.end <= stable and each.base not in unscrubbed
        ][:MERGED_AT_ONCE]

    def to_merge(self) -> list[Candidate]:
        """The segments whose small batches are to be merged, now or when they are stable and the
        scrubber has checked them.
        """
        below_bytes = int(self.log.assignment.settings.get(SETTING, 0))
        found = []
        for segment, end in self._segments():
            if (
                not has_small_batches(segment, below_bytes)
                or self.heads.is_unmergeable(segment)
                or self._is_damaged(segment, end)
            ):
                continue
            head = self.heads.of(segment)
            if not head.is_cleaned and not head.is_merged:
                found.append(
                    Candidate(
                        segment.base, end, segment.size, 0, 0, is_cleaned=False,
                        schema_id=head.schema_id,
                    )
                )  # fmt: skip
        return found

    def _is_damaged(self, segment: SealedSegment, end: int) -> bool:
        return any(
            damage.start < end and segment.base < damage.end for damage in self.log.file.damage
        )

    def _segments(self) -> Iterator[tuple[SealedSegment, int]]:
        """Each sealed segment with its end."""
        log = self.log
        segments = log.sealed.oldest_first()
        ends = [segment.base for segment in segments[1:]]
        ends.append(log.live.base if log.live is not None else log.next_offset)
        self.heads.drop_removed()
        yield from zip(segments, ends, strict=False)  # a log without segments has an end
