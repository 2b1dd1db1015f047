"""The partitions that a worker serves: opened, changed, taken away, and taken up again where the flusher has decided their end anew.

Owner: one worker.
Invariants: a partition's next offset is its log's end as the table shows it, or behind what the ring holds of the same epoch; epoch and end are read at one
    time; what cannot be opened is set aside alone and its batches refused, and whatever raises has changed nothing.
Crash: all of it is derived from assignments, table, files and ring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shm.catalog_messages import Assignment
from shm.layout import SlotState
from shm.partition_table import PartitionTable
from shm.ring import RingWriter
from shm.runtime.boundary import Boundary
from tailrace.formats.arrow_metadata import read_schema
from tailrace.formats.batch_header import checksum_seed
from tailrace.formats.structure import shape_of
from tailrace.kernel import QuickPartition
from tailrace.protocol.errors import ErrorCode
from workers import delay_gate
from workers.producer_state import KEPT, ProducerTable
from workers.ring_index import RingIndex

logger = logging.getLogger(__name__)

NO_EPOCH = -1
WORKER_PRODUCERS = 10
"""So many times `producer.ids.max` producers a worker remembers in all its partitions."""
OPEN_RETRY_NS = 1_000_000_000
"""How soon a partition that could not be opened is tried again, should a batch come for it."""


class Partition(QuickPartition):
    """What the worker knows of one of its partitions."""

    def __init__(self, assignment: Assignment) -> None:
        """Raises ArrowMetadataError."""
        self.layout = read_schema(assignment.schema)
        self.seed = checksum_seed(assignment.topic_id, assignment.partition)
        self.is_delay_log = bool(assignment.delay_of)
        self.next_offset = 0
        self.leader_epoch = 0
        """The partition table's, when `next_offset` was taken from there. Another one there means that the log's end was decided anew. NO_EPOCH: the log could
        not be opened, and where it ends is not known.
        """
        self.last_append_us = 0
        self.producers = ProducerTable()
        self.assign(assignment)

    def assign(self, assignment: Assignment) -> None:
        """Its settings, now or anew; its schema and its place stay."""
        max_message_bytes = int(assignment.settings["max.message.bytes"])
        log_append_time = assignment.settings["message.timestamp.type"] == "LogAppendTime"
        self._note(shape_of(self.layout), assignment.schema_id, assignment.data_dir, self.is_delay_log)
        self.assignment, self.max_message_bytes, self.log_append_time = assignment, max_message_bytes, log_append_time
        self.slot_map_version = len(assignment.slot_counts)
        """Batches that were routed by another are refused; 0: the topic has no hash slots."""


@dataclass(slots=True)
class SetAside:
    """A partition that could not be opened: what its batches are refused with, and when to try again."""

    assignment: Assignment
    code: ErrorCode
    retry_ns: int


LoadProducers = Callable[[Assignment, int], ProducerTable]
"""(partition, next offset) -> what the files tell of its producers up to there."""


class Partitions:
    """What a worker knows of its partitions."""

    def __init__(self, ring: RingWriter, tables: list[PartitionTable], load_producers: LoadProducers, boundary: Boundary) -> None:
        self.by_slot: dict[int, Partition] = {}
        self.delay_logs: dict[tuple[str, int], Partition] = {}
        """(id of the topic, partition) -> its delay log, which the same worker has."""
        self._set_aside: dict[int, SetAside] = {}
        self._ring = ring
        self._tables = tables
        self._load_producers = load_producers
        self._boundary = boundary
        self._index = RingIndex(ring)
        self._unsettled = self._read_unsettled()

    def assign(self, assignment: Assignment, now_ns: int) -> None:
        """A partition given, changed or taken away."""
        try:
            self._apply(assignment)
        except Exception as error:
            self._put_aside(assignment, error, now_ns)

    def code_of_unopened(self, slot: int, now_ns: int) -> ErrorCode:
        """What a batch for a slot without a partition is refused with. One whose files could not be read is tried again now and then, for the next batch."""
        aside = self._set_aside.get(slot)
        if aside is None:
            return ErrorCode.UNKNOWN_TOPIC
        if aside.code is ErrorCode.NOT_READY and now_ns >= aside.retry_ns:
            self.assign(aside.assignment, now_ns)
        return aside.code

    def has_room_for_producer(self, partition: Partition, limit: int, now_us: int) -> bool:
        """Whether one more is remembered: `limit` of a partition, and WORKER_PRODUCERS times that of all, beside KEPT that each partition may have."""
        producers = partition.producers
        if not producers.has_room(limit, now_us):
            return False
        if producers.producer_count < KEPT or self._producer_count() < WORKER_PRODUCERS * limit:
            return True
        for other in self.by_slot.values():
            other.producers.has_room(limit, now_us)  # those that are idle there are forgotten
        return self._producer_count() < WORKER_PRODUCERS * limit

    def _producer_count(self) -> int:
        return sum(partition.producers.producer_count for partition in self.by_slot.values())

    def expire_producers(self, now_us: int, expiration_us: int) -> None:
        """Forget producers that have appended nothing for `expiration_us`."""
        for partition in self.by_slot.values():
            partition.producers.expire(max(now_us, partition.last_append_us) - expiration_us)

    def topic_of(self, delay_log: Assignment) -> Partition | None:
        """The partition whose delayed records this delay log has; None: it is none, or its topic is gone."""
        wanted = delay_log.delay_of, delay_log.partition
        return next((p for p in self.by_slot.values() if (p.assignment.topic_id.hex(), p.assignment.partition) == wanted), None)

    def _read_unsettled(self) -> dict[int, tuple[int, int, int]]:
        """slot -> (next offset, append time, epoch), from the descriptors that a predecessor published and the table may not show yet."""
        ring = self._ring
        found: dict[int, tuple[int, int, int]] = {}
        for number in range(ring.settled.load(), ring.next_number):
            descriptor = ring.descriptor(number)
            if descriptor.has_bytes and not descriptor.is_control:
                found[descriptor.slot] = descriptor.next_offset, descriptor.append_time_us, descriptor.leader_epoch
        return found

    def _apply(self, assignment: Assignment) -> None:
        slot = assignment.slot
        known = self.by_slot.get(slot)
        same = known is not None and known.assignment.topic_id == assignment.topic_id
        if assignment.dropped:
            if same:
                self._forget(slot)
            if slot in self._set_aside and self._set_aside[slot].assignment.topic_id == assignment.topic_id:
                del self._set_aside[slot]
        elif known is not None and same:
            if assignment.version >= known.assignment.version:
                known.assign(assignment)
        else:
            opened = self._open(assignment)
            if known is not None:
                self._forget(slot)
            self._set_aside.pop(slot, None)
            self.by_slot[slot] = opened
            if assignment.delay_of:
                self.delay_logs[assignment.delay_of, assignment.partition] = opened

    def _forget(self, slot: int) -> None:
        assignment = self.by_slot.pop(slot).assignment
        if assignment.delay_of:
            self.delay_logs.pop((assignment.delay_of, assignment.partition), None)

    def _put_aside(self, assignment: Assignment, error: Exception, now_ns: int) -> None:
        """The partition cannot be opened (its files cannot be read now, or its schema cannot be read at all): its batches are refused, the others go on."""
        slot, said = assignment.slot, self._set_aside.get(assignment.slot)
        code = ErrorCode.NOT_READY if isinstance(error, OSError) else ErrorCode.INTERNAL_ERROR
        if said is None or said.code is not code:
            what = f"topic={assignment.topic} partition={assignment.partition}"
            if isinstance(error, OSError):
                logger.error("partition_not_opened %s error=%r advice=%r", what, str(error), "it is tried again with each batch")
            else:
                self._boundary.caught(what, error)
        known = self.by_slot.get(slot)
        if known is not None and known.assignment.topic_id == assignment.topic_id:
            return  # what cannot be applied is a change: it stays as it was
        if known is not None:
            self._forget(slot)
        self._set_aside[slot] = SetAside(assignment, code, now_ns + OPEN_RETRY_NS)

    def _open(self, assignment: Assignment) -> Partition:
        table = self._tables[assignment.data_dir]
        partition = Partition(assignment)
        state = table.read(assignment.slot)
        if state.topic_id == assignment.topic_id:
            next_offset, append_us, epoch = self._unsettled.get(assignment.slot, (0, 0, 0))
            if epoch != state.leader_epoch:
                next_offset = 0  # refused since, by a disk that failed
            self._take_up(partition, max(next_offset, state.log_end_offset), state.leader_epoch)
            partition.last_append_us = max(append_us, state.last_append_us)
            if state.state is SlotState.UNREADABLE:
                partition.leader_epoch = NO_EPOCH
        return partition

    def _take_up(self, partition: Partition, next_offset: int, leader_epoch: int) -> None:
        """Go on at `next_offset`, with what the files and this ring tell of producers. Raises OSError, before anything is changed."""
        producers = self._load_producers(partition.assignment, next_offset)
        for d in self._index.batches_of(partition.assignment.slot):
            if d.leader_epoch != leader_epoch or d.next_offset > next_offset:
                continue
            if d.flags & delay_gate.SPECIAL_FLAGS:
                delay_gate.note_descriptor(producers, d)
            if d.producer_id >= 0:
                producers.record(
                    d.producer_id, d.producer_epoch, d.base_sequence, d.last_offset_delta, d.base_offset, d.next_offset, d.append_time_us
                )
        partition.next_offset, partition.leader_epoch, partition.producers = next_offset, leader_epoch, producers

    def look_at_log_ends(self, partition: Partition) -> None:
        """The scheduler sends again what this worker believes to have appended, or a mark that does not follow what it believes to have delivered: a topic
        and its delay log are looked at together.
        """
        other = (
            self.topic_of(partition.assignment)
            if partition.is_delay_log
            else self.delay_logs.get((partition.assignment.topic_id.hex(), partition.assignment.partition))
        )
        for each in (partition, other):
            if each is not None:
                self._look_at_log_end(each)

    def _look_at_log_end(self, partition: Partition) -> None:
        """If everything is settled and the log ends before what this worker believes to have appended, or has begun an epoch since, its disk had failed: the
        log is right.
        """
        ring, assignment = self._ring, partition.assignment
        if ring.settled.load() != ring.next_number:
            return
        state = self._tables[assignment.data_dir].read(assignment.slot)
        is_behind = state.log_end_offset < partition.next_offset or state.leader_epoch != partition.leader_epoch
        if state.topic_id == assignment.topic_id and state.state is SlotState.ONLINE and is_behind:
            logger.warning(
                "taken_up_anew topic=%s partition=%d from=%d to=%d",
                assignment.topic, assignment.partition, partition.next_offset, state.log_end_offset,
            )  # fmt: skip
            try:
                self._take_up(partition, state.log_end_offset, state.leader_epoch)
            except OSError as error:
                logger.warning("end_not_taken_up topic=%s partition=%d error=%r", assignment.topic, assignment.partition, str(error))

    def on_new_epoch(self, partition: Partition) -> bool:
        """The flusher has decided the log's end anew (its disk had failed): what this worker appended beyond it was refused. False: the files cannot be
        read now. Epoch and end are of one time: an end of the epoch before would leave a gap, or write over what is there.
        """
        assignment = partition.assignment
        state = self._tables[assignment.data_dir].read(assignment.slot)
        if state.topic_id == assignment.topic_id and state.state is not SlotState.UNREADABLE:
            try:
                self._take_up(partition, state.log_end_offset, state.leader_epoch)
            except OSError as error:
                logger.warning("epoch_not_taken_up topic=%s partition=%d error=%r", assignment.topic, assignment.partition, str(error))
                return False
            logger.info(
                "epoch_taken_up topic=%s partition=%d epoch=%d next_offset=%d",
                assignment.topic, assignment.partition, state.leader_epoch, state.log_end_offset,
            )  # fmt: skip
        return True
