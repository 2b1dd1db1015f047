"""Recovery of a partition's log after any kind of stop: finds its end and applies `decision`.

Owner: the flusher, before workers and fronts open.

Invariants:
- An intact batch that was durable is never removed.
- Removed bytes are counted and reported. Nothing is skipped silently.
- Files covered by a checkpoint are not read again, except for lengths and end marks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from shm.crash_points import crash_point
from tailrace.format.directory.partition_metadata import DamagedRange, PartitionMetadata
from tailrace.format.record_batch.batch_header import END_OF_STREAM
from tailrace.format.segments.segment import (
    INDEX_SUFFIX,
    SEGMENT_SUFFIX,
    Behind,
    Ending,
    Walk,
    file_name,
    find_behind,
    is_sealed,
    schema_message_length,
    segment_bases,
)
from tailrace.format.segments.segment_index import IndexEntry
from tailrace.format.segments.transaction_index import TRANSACTION_INDEX_SUFFIX
from workers.log.producers.producer_snapshots import load_snapshot, record_producer
from workers.log.producers.producer_state import ProducerTable
from workers.log.producers.transaction_indexes import WalkedTransactions
from workers.log.recovery.decision import Action, Hints, decide
from workers.log.recovery.segment_schema import find_schema
from workers.segment.checkpoint import UNKNOWN_TIME_US, Checkpoint, SealedSegment, load_checkpoint
from workers.segment.files import Files
from workers.segment.quarantine import report_damage
from workers.segment.segment_index_files import facts_from_index, repair_index
from workers.segment.segment_reader import SegmentReader, walk_past_damage
from workers.segment.segment_swap import CleanedRun, patched

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RecoveredLog:
    """Result of a recovery."""

    segments: list[int] = field(default_factory=list)
    sealed: dict[int, SealedSegment] = field(default_factory=dict)
    live_base: int = -1
    """Base of the segment to append to, -1 if the next batch begins a new one."""
    live_schema_id: int = -1
    """The schema of that segment."""
    valid_end: int = 0
    batch_count: int = 0
    next_offset: int = 0
    max_timestamp_us: int = 0
    first_append_us: int = 0
    last_append_us: int = 0
    cut_bytes: int = 0
    read_bytes: int = 0
    damage: list[DamagedRange] = field(default_factory=list)
    """Newly found damage."""
    producers: ProducerTable = field(default_factory=ProducerTable)
    checkpoint_number: int = 0
    transactions: WalkedTransactions = field(default_factory=WalkedTransactions)
    known_durable: int = 0
    """Offset below which everything was durable once, by checkpoint, partition table or headers."""


# ---- recovering a log ----------------------------------------------------------------------------


def recover_log(
    files: Files,
    directory: str,
    partition_file: PartitionMetadata,
    hints: Hints,
    swap: CleanedRun | None = None,
) -> RecoveredLog:
    """Find the end of the log in `directory`, and apply the table. `swap` was carried out, and
    checkpoints may not know it. Raises OSError.
    """
    return _Recovery(files, directory, partition_file, hints, swap).run()


class _Recovery:
    """Recovery of one partition, starting from its checkpoint."""

    def __init__(
        self,
        files: Files,
        directory: str,
        partition_file: PartitionMetadata,
        hints: Hints,
        swap: CleanedRun | None,
    ) -> None:
        self._swap = swap
        self._files = files
        self._directory = directory
        self._file = partition_file
        self._hints = hints
        self._result = RecoveredLog(next_offset=partition_file.log_start_offset)
        self._known_durable = min(
            hints.durable_below,
            hints.end_limit if hints.end_limit is not None else hints.durable_below,
        )
        self._index: list[IndexEntry] = []

    def run(self) -> RecoveredLog:
        result, files = self._result, self._files
        bases = segment_bases(files.list(self._directory))
        checkpoint, damaged = load_checkpoint(files, self._directory, self._file.topic_id.hex())
        if damaged:
            logger.warning("checkpoint_damaged directory=%s count=%d", self._directory, damaged)
        checkpoint = self._usable(checkpoint, bases)
        first_walked = self._begin(bases, checkpoint)
        if checkpoint is not None:
            result.transactions.start = checkpoint.next_offset
            result.transactions.has_checkpoint = True
        elif bases:
            result.transactions.start = bases[-1]
        if bases and (checkpoint is None or checkpoint.segment_base != bases[-1]):
            # a predecessor may have been killed before the newest segment's name was durable
            files.sync_directory(self._directory)
        for number in range(first_walked, len(bases)):
            newest = number == len(bases) - 1
            from_checkpoint = checkpoint is not None and bases[number] == checkpoint.segment_base
            if not self._walk_segment(
                bases[number],
                None if newest else bases[number + 1],
                checkpoint if from_checkpoint else None,
            ):
                break
        if (
            result.next_offset < self._known_durable
            and result.live_base < 0
            and result.next_offset not in self._hints.elsewhere
        ):
            self._lose(
                result.segments[-1] if result.segments else -1,
                0,
                0,
                result.next_offset,
                self._known_durable,
                "whole segments are missing",
            )
            result.next_offset = self._known_durable
        result.known_durable = self._known_durable
        return result

    def _usable(self, checkpoint: Checkpoint | None, bases: list[int]) -> Checkpoint | None:
        """Return the checkpoint, or None if its segment is missing or shorter than it says. Its
        durable end is used in any case.
        """
        if checkpoint is None:
            return None
        self._result.checkpoint_number = checkpoint.number
        if self._hints.end_limit is None:
            self._known_durable = max(self._known_durable, checkpoint.next_offset)
        if self._swap is not None:
            known = patched(checkpoint, self._swap)
            if known is None:
                return None
            checkpoint = known
        if checkpoint.segment_base < 0:
            return checkpoint
        path = f"{self._directory}/{file_name(checkpoint.segment_base)}"
        if checkpoint.segment_base in bases and self._size_of(path) >= checkpoint.valid_end:
            limit = self._hints.end_limit
            return checkpoint if limit is None or checkpoint.next_offset <= limit else None
        return None

    def _begin(self, bases: list[int], checkpoint: Checkpoint | None) -> int:
        """Take over the sealed segments. Return the index of the first segment to walk."""
        result = self._result
        if checkpoint is not None:
            # Retention may have removed segments since. Existing ones must have the same length and
            # end mark.
            known = {segment.base: segment for segment in checkpoint.sealed}
            start = (
                checkpoint.segment_base if checkpoint.segment_base >= 0 else checkpoint.next_offset
            )
            first = sum(1 for base in bases if base < start)
            result.producers = ProducerTable.from_snapshot(checkpoint.producers)
            result.next_offset = max(checkpoint.next_offset, result.next_offset)
            result.max_timestamp_us, result.last_append_us = (
                checkpoint.max_timestamp_us,
                checkpoint.last_append_us,
            )
        else:
            known = {}
            first = max(0, len(bases) - 1)
            if bases:
                result.producers = load_snapshot(self._files, self._directory, bases[-1])
        for number, base in enumerate(bases[:first]):
            following = bases[number + 1] if number + 1 < len(bases) else result.next_offset
            self._add_sealed(base, following, known.get(base), must_know=number == first - 1)
        for base in sorted(set(known) - set(bases)):
            ends = [b for b in [*known, *bases] if b > base]
            end = min(ends, default=result.next_offset)
            if end > self._file.log_start_offset and not any(
                d.start <= base and end <= d.end for d in self._file.damage
            ):
                self._lose(
                    base,
                    0,
                    0,
                    max(base, self._file.log_start_offset),
                    end,
                    "the segment's file is missing",
                )
        return first

    def _add_sealed(
        self, base: int, following: int, known: SealedSegment | None, *, must_know: bool
    ) -> None:
        """Take over a segment without a walk if its length and end mark show that it is intact.

        `must_know` requires its last append time, which must not go backwards in the next segment.
        """
        result = self._result
        fd = self._files.open_for_read(f"{self._directory}/{file_name(base)}")
        try:
            reader = SegmentReader(self._files, fd)
            whole = is_sealed(reader.read_at, reader.size) and (
                known is None or known.size == reader.size
            )
            facts = known if whole and known is not None else None
            if not whole:
                facts = self._walk_closed(reader, base, following)
            elif facts is None:
                facts = facts_from_index(
                    self._files, self._directory, reader, base, self._file.seed
                )
                if must_know and not facts.last_append_us:
                    facts = self._walk_closed(reader, base, following)
            result.read_bytes += reader.read_bytes
        finally:
            self._files.close(fd)
        result.sealed[base] = facts
        result.segments.append(base)
        if facts.max_timestamp_us != UNKNOWN_TIME_US:
            result.max_timestamp_us = max(result.max_timestamp_us, facts.max_timestamp_us)
        result.last_append_us = max(result.last_append_us, facts.last_append_us)

    def _walk_closed(self, reader: SegmentReader, base: int, following: int) -> SealedSegment:
        """Walk a segment without an end mark that is not the newest. It was given up after a failed
        sync, and then reaches its successor, or it is damaged.
        """
        walk = Walk(schema_message_length(reader.read_at), base)
        count, largest, last = 0, 0, 0
        for _, header in walk_past_damage(reader, walk, self._file.seed, base, self._file.damage):
            if header.base_offset >= following:
                break
            count, largest, last = (
                count + 1,
                max(largest, header.max_timestamp_us),
                header.append_time_us,
            )
        reached = min(walk.next_offset, following)
        if reached < following and self._file.damage_at(reached) is None:
            behind = find_behind(
                reader.read_at, reader.size, walk.position, self._file.seed, reached
            )
            end = min(behind.offset, following) if behind else following
            self._lose(
                base,
                walk.position,
                behind.position if behind else 0,
                reached,
                end,
                walk.reason or "the file is too short",
            )
        return SealedSegment(
            base,
            reader.size,
            -1 if reached < following else count,
            largest or UNKNOWN_TIME_US,
            last,
            -1,
        )

    # ---- the newest segment ----------------------------------------------------------------------

    def _walk_segment(
        self, base: int, following: int | None, checkpoint: Checkpoint | None
    ) -> bool:
        """Walk a segment from the checkpoint or its start to the base of the `following` one (None:
        it is the newest). Return False if it had no schema and was removed.
        """
        result, files = self._result, self._files
        path = f"{self._directory}/{file_name(base)}"
        fd = files.open_for_write(path)
        try:
            reader = SegmentReader(files, fd)
            schema = find_schema(files, reader, self._file, base, path)
            if schema is None:
                self._discard_headless(base, reader.size)
                return False
            result.segments.append(base)
            walk = (
                Walk(schema.end, base)
                if checkpoint is None
                else Walk(checkpoint.valid_end, checkpoint.next_offset)
            )
            self._index = []
            result.first_append_us = checkpoint.first_append_us if checkpoint else 0
            skipped = checkpoint.batch_count if checkpoint else 0
            largest = checkpoint.max_timestamp_us if checkpoint else 0
            action = self._walk_to_end(reader, walk, base, largest, following)
            if following is None:
                if action is Action.CUT:
                    self._cut(reader, walk, path)
                if schema.is_cleaned and action in (Action.APPEND, Action.CUT):
                    files.write_at(fd, [END_OF_STREAM], walk.position)
                    action = Action.BEGIN_NEW_SEGMENT
            elif walk.next_offset < following:
                self._lose(
                    base,
                    walk.position,
                    0,
                    walk.next_offset,
                    following,
                    walk.reason or "the file is too short",
                )
            if not _is_covered(action, walk, checkpoint):
                files.sync_data(fd)
            result.read_bytes += reader.read_bytes
        finally:
            files.close(fd)
        result.next_offset = (
            max(walk.next_offset, result.next_offset) if following is None else following
        )
        result.batch_count = skipped + len(self._index)
        if checkpoint is not None:
            result.max_timestamp_us = max(result.max_timestamp_us, checkpoint.max_timestamp_us)
        repair_index(self._files, self._directory, base, self._index, skipped)
        if (
            following is None
            and action in (Action.APPEND, Action.CUT)
            and walk.next_offset == result.next_offset
        ):
            result.live_base, result.valid_end = base, walk.position
            result.live_schema_id = schema.schema_id
        else:
            self._add_walked(base, walk, action)
        return True

    def _add_walked(self, base: int, walk: Walk, action: Action) -> None:
        """Take over a walked segment as a sealed one."""
        result = self._result
        size = walk.position + (len(END_OF_STREAM) if action is Action.BEGIN_NEW_SEGMENT else 0)
        result.sealed[base] = SealedSegment(
            base, size, result.batch_count, result.max_timestamp_us, result.last_append_us,
            self._has_transactions(base),
        )  # fmt: skip

    def _has_transactions(self, base: int) -> int:
        """See `SealedSegment.has_transactions`, of a walked segment. What a checkpoint covers of it
        has its index.
        """
        path = f"{self._directory}/{file_name(base, TRANSACTION_INDEX_SUFFIX)}"
        return int(base in self._result.transactions.bases or self._files.exists(path))

    def _walk_to_end(
        self, reader: SegmentReader, walk: Walk, base: int, largest: int, following: int | None
    ) -> Action:
        """Walk a segment and quarantine corrupt ranges, until the table gives another action."""
        result, limit = self._result, self._hints.end_limit
        while True:
            for position, header in walk_past_damage(
                reader, walk, self._file.seed, base, self._file.damage
            ):
                if limit is not None and header.base_offset >= limit:
                    walk.ending, walk.reason = Ending.TORN, "written by a disk that failed"
                    return Action.CUT
                if following is not None and header.base_offset >= following:
                    # given up after a failed sync: the next segment has this batch
                    return Action.APPEND
                largest = max(largest, header.max_timestamp_us)
                self._index.append(
                    IndexEntry(header.base_offset, position, largest, header.batch_length)
                )
                journaled = self._hints.journaled.get(header.base_offset)
                if journaled is not None and reader.read_at(len(journaled), position) == journaled:
                    self._files.write_at(reader.fd, [journaled], position)
                result.first_append_us = result.first_append_us or header.append_time_us
                result.last_append_us = max(result.last_append_us, header.append_time_us)
                result.max_timestamp_us = max(result.max_timestamp_us, largest)
                ended = record_producer(result.producers, header)
                if header.is_transactional:
                    result.transactions.note(base, ended)
            if following is not None and walk.next_offset >= following:
                # given up after a failed sync, perhaps inside a batch: the next segment has it
                return Action.APPEND
            action, behind = self._decide(reader, walk)
            if action is not Action.QUARANTINE:
                return action
            if behind is not None and following is not None and behind.offset >= following:
                behind = None
            end = (
                behind.offset
                if behind
                else min(self._known_durable, following or self._known_durable)
            )
            self._lose(
                base,
                walk.position,
                behind.position if behind else 0,
                walk.next_offset,
                end,
                walk.reason or "the file is too short",
                reader,
            )
            if behind is None:
                result.next_offset = max(result.next_offset, end)
                return action
            walk.position, walk.next_offset, walk.ending = (
                behind.position,
                behind.offset,
                Ending.CLEAN,
            )

    def _decide(self, reader: SegmentReader, walk: Walk) -> tuple[Action, Behind | None]:
        """The table's action where a walk has stopped, and the next batch behind that place, if it
        stopped at bytes that are no batch.
        """
        behind = None
        durable = walk.next_offset < self._known_durable
        if walk.ending is Ending.TORN:
            behind = find_behind(
                reader.read_at, reader.size, walk.position, self._file.seed, walk.next_offset
            )
            durable = durable or (
                behind is not None and behind.proves_durable and not self._hints.may_have_holes
            )
        action = decide(
            walk.ending, elsewhere=walk.next_offset in self._hints.elsewhere, durable=durable
        )
        return action, behind

    def _cut(self, reader: SegmentReader, walk: Walk, path: str) -> None:
        self._result.cut_bytes += reader.size - walk.position
        logger.warning(
            "torn_tail_cut path=%s bytes=%d reason=%r",
            path,
            reader.size - walk.position,
            walk.reason,
        )
        crash_point("recovery.before_cut")
        self._files.truncate(reader.fd, walk.position)
        crash_point("recovery.after_cut")

    def _discard_headless(self, base: int, size: int) -> None:
        """Remove a segment without a schema message. It holds no batch."""
        logger.warning(
            "segment_without_schema_removed path=%s/%s bytes=%d",
            self._directory,
            file_name(base),
            size,
        )
        for suffix in (SEGMENT_SUFFIX, INDEX_SUFFIX):
            path = f"{self._directory}/{file_name(base, suffix)}"
            if self._files.exists(path):
                self._files.unlink(path)
        self._result.cut_bytes += size
        self._result.next_offset = max(self._result.next_offset, base)

    def _lose(
        self,
        base: int,
        position: int,
        end_position: int,
        start: int,
        end: int,
        reason: str,
        reader: SegmentReader | None = None,
    ) -> None:
        """Record and report offsets `start` to `end - 1` as lost, once."""
        damage = DamagedRange(base, position, end_position, start, end)
        if damage not in self._file.damage and damage not in self._result.damage:
            self._result.damage.append(damage)
            report_damage(
                self._files,
                self._directory,
                self._file,
                damage,
                reason,
                self._hints.quarantine,
                reader,
            )

    def _size_of(self, path: str) -> int:
        fd = self._files.open_for_read(path)
        try:
            return self._files.size(fd)
        finally:
            self._files.close(fd)


def _is_covered(action: Action, walk: Walk, checkpoint: Checkpoint | None) -> bool:
    """True if a segment has nothing behind its checkpoint: what that covers is durable."""
    return (
        action is Action.APPEND and checkpoint is not None and walk.position == checkpoint.valid_end
    )
