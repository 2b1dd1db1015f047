"""Batch placement: assigns descriptors of a ring to places in segments, in order, as one group.

Owner: the flusher.

Invariants:
- A descriptor is in one group, after all before it.
- A batch is placed only at its log's end, under its log's leader epoch.
- An assignment in the ring is applied between groups, in order with the data.
- An unexpected failure ends the process once. A successor that fails at the same descriptor takes
  that log offline, and the others continue.

Crash: places are recorded in the ring before anything is written. Recovery finds a batch in its
segment or writes it from the ring.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from shm.crash_points import crash_point
from shm.memory.layout import Verdict
from shm.queues.ring import Descriptor
from shm.runtime.error_handler import CountedErrorHandler
from workers.flush.commit.group_commit import GroupCommit
from workers.flush.commit.ring_follower import (
    GROUP_BYTES_MAX,
    GROUP_DESCRIPTORS_MAX,
    FlushGroup,
    RingFollower,
)
from workers.log.files.active_segment import LogGapError, PendingBatch
from workers.log.log_set import LogSet
from workers.log.partition_log import PartitionLog
from workers.log.producers.delay_rules import SPECIAL_FLAGS, note_descriptor
from workers.log.producers.transaction_rules import note_descriptor as note_transaction
from workers.segment.files import is_shortage

logger = logging.getLogger(__name__)

Entry = tuple[PartitionLog | None, Verdict]
"""Log of a descriptor, and its verdict if the commit succeeds."""


class BatchPlacement:
    """Places descriptors in the logs of one data directory."""

    def __init__(
        self,
        logs: LogSet,
        commit: GroupCommit,
        apply: Callable[[bytes | memoryview], None],
        on_rolled: Callable[[PartitionLog], object],
        error_handler: CountedErrorHandler,
    ) -> None:
        """`apply` is called with an assignment found in the ring, `on_rolled` with a log that has
        begun a new segment.
        """
        self._error_handler = error_handler
        self._logs = logs
        self._commit = commit
        self._apply = apply
        self._on_rolled = on_rolled
        self.shortage: OSError | None = None
        """Resource shortage that stopped the last placement."""

    def gather(self, follower: RingFollower, producer_position: int) -> FlushGroup | None:
        """Place descriptors from the cursor up to `producer_position`. Return None if not even the
        first can be placed now (`shortage`).
        """
        ring = follower.ring
        group = FlushGroup(follower.cursor)
        for number in range(
            follower.cursor, min(producer_position, follower.cursor + GROUP_DESCRIPTORS_MAX)
        ):
            descriptor = ring.descriptor(number)
            if descriptor.is_control:
                if group.entries:
                    break  # in order with the data: settle the group first
                if follower.translate is None:
                    self._apply(ring.bytes_of(descriptor))
                group.entries.append((number, None, Verdict.DURABLE))
                group.end = number + 1
                break
            try:
                entry = self._place(follower, number, descriptor, group)
            except OSError as error:
                self.shortage = error
                break
            except Exception as error:
                if number >= follower.replay_below:
                    # A successor starts from files and ring. It has none of this process's memory
                    # errors, and no batch is refused.
                    raise
                entry = self._contain(follower, number, descriptor, error)
            if entry is None:
                break
            group.entries.append((number, *entry))
            group.end = number + 1
            if group.byte_count >= GROUP_BYTES_MAX:
                break
        crash_point("flusher.after_place")
        return group if group.entries else None

    def _log_of(self, follower: RingFollower, slot: int) -> PartitionLog | None:
        return (
            self._logs.get(slot)
            if follower.translate is None
            else self._logs.find(follower.translate(slot), slot)
        )

    def _place(
        self, follower: RingFollower, number: int, descriptor: Descriptor, group: FlushGroup
    ) -> Entry | None:
        """Place one descriptor. Return None if the group must be settled first. Raises OSError only
        for a shortage.
        """
        log = self._log_of(follower, descriptor.slot)
        if log is not None and not log.is_open and log.assignment.slot in self._logs.waiting:
            raise OSError(errno.EMFILE, "the log is not open yet")
        if descriptor.result or not descriptor.has_bytes:
            return _without_bytes(log, descriptor)
        if log is None:
            return None, Verdict.DELETED
        if log.refusal or descriptor.leader_epoch != log.file.leader_epoch:
            return None, Verdict.FAILED  # the disk refused an earlier batch
        if descriptor.base_offset < log.next_offset and number < follower.replay_below:
            return self._replace(follower, number, descriptor, log, group)
        data = follower.ring.bytes_of(descriptor)
        batch = PendingBatch(
            descriptor.base_offset,
            descriptor.next_offset,
            descriptor.max_timestamp_us,
            descriptor.append_time_us,
            data,
        )
        try:
            if log.needs_roll(descriptor.length, descriptor.append_time_us) or log.has_other_schema(
                data
            ):
                if log.group:
                    return None
                if not self._commit.roll(log, data):
                    return None, Verdict.FAILED
                self._on_rolled(log)
            follower.ring.plan(number, *log.place(batch))
        except (OSError, LogGapError) as error:
            return self._abandon(log, error)
        if descriptor.is_transactional:
            log.note_transactional(note_transaction(log.producers, descriptor))
        if descriptor.producer_id >= 0 and descriptor.base_sequence >= 0:
            log.producers.record(
                descriptor.producer_id, descriptor.producer_epoch, descriptor.base_sequence,
                descriptor.last_offset_delta,
                descriptor.base_offset, descriptor.next_offset, descriptor.append_time_us,
            )  # fmt: skip
        if descriptor.flags & SPECIAL_FLAGS:
            note_descriptor(log.producers, descriptor)
        if descriptor.control_type:
            group.has_markers = True
        group.touched[log.assignment.slot] = log
        group.placed.setdefault(log.assignment.slot, []).append(number)
        group.byte_count += descriptor.length
        return log, _success_verdict(log)

    def _replace(
        self,
        follower: RingFollower,
        number: int,
        descriptor: Descriptor,
        log: PartitionLog,
        group: FlushGroup,
    ) -> Entry:
        """Rewrite a batch that recovery found in the file at its place, and sync it."""
        outcome = follower.ring.outcome(number)
        if outcome.verdict is Verdict.NONE:
            # it was never placed: the log has another batch there
            return None, Verdict.FAILED
        try:
            if log.rewrite_batch(
                descriptor.base_offset,
                outcome.segment_base,
                outcome.file_position,
                follower.ring.bytes_of(descriptor),
            ):
                group.touched[log.assignment.slot] = log
        except LogGapError as error:
            logger.error("not_what_was_placed directory=%s error=%r", log.directory, str(error))
            return None, Verdict.FAILED
        except OSError as error:
            return self._abandon(log, error)
        return log, _success_verdict(log)

    def _contain(
        self, follower: RingFollower, number: int, descriptor: Descriptor, error: Exception
    ) -> Entry:
        """Take a log offline when this process and its predecessor both failed at
        the same descriptor.
        """
        log = self._log_of(follower, descriptor.slot)
        sentence = self._error_handler.on_error(
            f"descriptor={number} slot={descriptor.slot} base_offset={descriptor.base_offset}",
            error,
        )
        if log is not None and log.is_open and not log.refusal:
            self._logs.take_offline(log, RuntimeError(sentence))
        return None, Verdict.FAILED

    def _abandon(self, log: PartitionLog, error: OSError | LogGapError) -> Entry:
        """Take a log offline when it cannot accept a batch. Raises OSError for a shortage, which is
        not the log's fault.
        """
        if isinstance(error, OSError) and is_shortage(error):
            raise error
        self._logs.take_offline(log, error)
        return None, Verdict.FAILED


def _success_verdict(log: PartitionLog) -> Verdict:
    return Verdict.DURABLE if log.is_durable else Verdict.WRITTEN


def _without_bytes(log: PartitionLog | None, descriptor: Descriptor) -> Entry:
    """Return the entry of a refusal or a duplicate.

    A duplicate has the verdict of its original, which may be in this group or have failed.
    """
    if descriptor.result or log is None:
        return None, Verdict.DURABLE
    failed = (
        log.refusal
        or descriptor.leader_epoch != log.file.leader_epoch
        or descriptor.next_offset > log.next_offset
    )
    return (None, Verdict.FAILED) if failed else (log, Verdict.DURABLE)
