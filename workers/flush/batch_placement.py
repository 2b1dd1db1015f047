"""Placement: descriptors of a ring become places in segments, in order, as one group.

Owner: the flusher.
Invariants: a descriptor is in a group once, behind all before it; a batch is placed only where its log ends, under its log's leader epoch; an assignment in
    the ring is carried out between groups, in order with the data. A failure that was not foreseen ends the process once: a successor that fails at the
    same descriptor takes that log offline, and the others go on.
Crash: places are decided and noted in the ring before anything is written; recovery finds a batch in its segment or writes it from the ring.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from shm.crash_points import crash_point
from shm.layout import Verdict
from shm.ring import Descriptor
from shm.runtime.boundary import Boundary
from workers.delay_gate import SPECIAL_FLAGS, note_descriptor
from workers.files import is_shortage
from workers.group_commit import GroupCommit
from workers.live_segment import PendingBatch
from workers.log_set import LogSet
from workers.partition_log import LogGapError, PartitionLog
from workers.stage import GROUP_BYTES_MAX, GROUP_DESCRIPTORS_MAX, Group, Stage

logger = logging.getLogger(__name__)

Entry = tuple[PartitionLog | None, Verdict]
"""The log that a descriptor is about, and its verdict if all goes well."""


class Placement:
    """Places descriptors in the logs of one data directory."""

    def __init__(
        self,
        logs: LogSet,
        commit: GroupCommit,
        apply: Callable[[bytes | memoryview], None],
        on_rolled: Callable[[PartitionLog], object],
        boundary: Boundary,
    ) -> None:
        """`apply`: an assignment was found in the ring. `on_rolled`: a log has begun another segment."""
        self._boundary = boundary
        self._logs = logs
        self._commit = commit
        self._apply = apply
        self._on_rolled = on_rolled
        self.shortage: OSError | None = None
        """What the host was short of when a group could not be placed."""

    def gather(self, stage: Stage, head: int) -> Group | None:
        """Place descriptors from the cursor on, up to `head` at most. None: not even the first can be placed now (`shortage`)."""
        ring = stage.ring
        group = Group(stage.cursor)
        for number in range(stage.cursor, min(head, stage.cursor + GROUP_DESCRIPTORS_MAX)):
            descriptor = ring.descriptor(number)
            if descriptor.is_control:
                if group.entries:
                    break  # in order with the data: settle that first
                if stage.translate is None:
                    self._apply(ring.bytes_of(descriptor))
                group.entries.append((number, None, Verdict.DURABLE))
                group.end = number + 1
                break
            try:
                entry = self._place(stage, number, descriptor, group)
            except OSError as error:
                self.shortage = error
                break
            except Exception as error:
                if number >= stage.replay_below:
                    raise  # a successor starts from files and ring: what was wrong only in this process's memory is mended, and nothing is refused
                entry = self._contain(stage, number, descriptor, error)
            if entry is None:
                break
            group.entries.append((number, *entry))
            group.end = number + 1
            if group.byte_count >= GROUP_BYTES_MAX:
                break
        crash_point("flusher.after_place")
        return group if group.entries else None

    def _log_of(self, stage: Stage, slot: int) -> PartitionLog | None:
        return self._logs.get(slot) if stage.translate is None else self._logs.find(stage.translate(slot), slot)

    def _place(self, stage: Stage, number: int, descriptor: Descriptor, group: Group) -> Entry | None:
        """One descriptor into the group; None: the group must be settled first. Raises OSError only for what the host is short of."""
        log = self._log_of(stage, descriptor.slot)
        if log is not None and not log.is_open and log.assignment.slot in self._logs.waiting:
            raise OSError(errno.EMFILE, "the log is not open yet")
        if descriptor.result or not descriptor.has_bytes:
            return _without_bytes(log, descriptor)
        if log is None:
            return None, Verdict.DELETED
        if log.refusal or descriptor.leader_epoch != log.file.leader_epoch:
            return None, Verdict.FAILED  # what came before it was refused by the disk
        if descriptor.base_offset < log.next_offset and number < stage.replay_below:
            return self._place_again(stage, number, descriptor, log, group)
        data = stage.ring.bytes_of(descriptor)
        batch = PendingBatch(descriptor.base_offset, descriptor.next_offset, descriptor.max_timestamp_us, descriptor.append_time_us, data)
        try:
            if log.needs_roll(descriptor.length, descriptor.append_time_us):
                if log.group:
                    return None
                if not self._commit.roll(log):
                    return None, Verdict.FAILED
                self._on_rolled(log)
            stage.ring.plan(number, *log.place(batch))
        except (OSError, LogGapError) as error:
            return self._give_up(log, error)
        if descriptor.producer_id >= 0:
            log.producers.record(
                descriptor.producer_id, descriptor.producer_epoch, descriptor.base_sequence, descriptor.last_offset_delta,
                descriptor.base_offset, descriptor.next_offset, descriptor.append_time_us,
            )  # fmt: skip
        if descriptor.flags & SPECIAL_FLAGS:
            note_descriptor(log.producers, descriptor)
        group.touched[log.assignment.slot] = log
        group.placed.setdefault(log.assignment.slot, []).append(number)
        group.byte_count += descriptor.length
        return log, _good_verdict(log)

    def _place_again(self, stage: Stage, number: int, descriptor: Descriptor, log: PartitionLog, group: Group) -> Entry:
        """Recovery found this batch in the file: write it to its place once more, and sync."""
        outcome = stage.ring.outcome(number)
        if outcome.verdict is Verdict.NONE:
            return None, Verdict.FAILED  # it was never placed: what the log has there is another batch
        try:
            if log.write_again(descriptor.base_offset, outcome.segment_base, outcome.file_position, stage.ring.bytes_of(descriptor)):
                group.touched[log.assignment.slot] = log
        except LogGapError as error:
            logger.error("not_what_was_placed directory=%s error=%r", log.directory, str(error))
            return None, Verdict.FAILED
        except OSError as error:
            return self._give_up(log, error)
        return log, _good_verdict(log)

    def _contain(self, stage: Stage, number: int, descriptor: Descriptor, error: Exception) -> Entry:
        """Neither this process nor, it seems, its predecessor could place this descriptor: its log goes offline, as one whose disk refused."""
        log = self._log_of(stage, descriptor.slot)
        sentence = self._boundary.caught(f"descriptor={number} slot={descriptor.slot} base_offset={descriptor.base_offset}", error)
        if log is not None and log.is_open and not log.refusal:
            self._logs.take_offline(log, RuntimeError(sentence))
        return None, Verdict.FAILED

    def _give_up(self, log: PartitionLog, error: OSError | LogGapError) -> Entry:
        """The log cannot take a batch: it goes offline, the others go on. Raises OSError for a shortage, which says nothing of this log."""
        if isinstance(error, OSError) and is_shortage(error):
            raise error
        self._logs.take_offline(log, error)
        return None, Verdict.FAILED


def _good_verdict(log: PartitionLog) -> Verdict:
    return Verdict.DURABLE if log.is_durable else Verdict.WRITTEN


def _without_bytes(log: PartitionLog | None, descriptor: Descriptor) -> Entry:
    """A refusal, or a duplicate: that is worth what its original is, which may be in this group, or have been refused by a disk that failed."""
    if descriptor.result or log is None:
        return None, Verdict.DURABLE
    failed = log.refusal or descriptor.leader_epoch != log.file.leader_epoch or descriptor.next_offset > log.next_offset
    return (None, Verdict.FAILED) if failed else (log, Verdict.DURABLE)
