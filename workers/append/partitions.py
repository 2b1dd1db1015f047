"""Partitions of a worker: opened, changed and removed by assignments, and resynchronised after a
new leader epoch.

Owner: one worker.

Invariants:
- A partition's next offset is the log end offset in the table, or follows the ring's descriptors of
  the same epoch. Epoch and end are read together.
- A partition that cannot be opened is set aside alone, and its batches are refused.
- A call that raises has changed nothing.

Crash: everything is derived from assignments, table, files and ring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from shm.queues.ring import RingWriter
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.partition_table import PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.arrow_metadata import SchemaLayout, read_schema
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.format.record_batch.control_batch import MarkerTemplate
from tailrace.kernel import FastPathPartition
from tailrace.kernel.batch_shape import shape_of
from workers.append.descriptor_index import DescriptorIndex
from workers.append.open_transaction_index import OpenTransactionIndex
from workers.log.producers import delay_rules, transaction_rules
from workers.log.producers.producer_state import KEPT, ProducerTable

logger = logging.getLogger(__name__)

NO_EPOCH = -1
WORKER_PRODUCERS = 10
"""Multiple of `producer.ids.max` that bounds the producers of all partitions of a worker."""
OPEN_RETRY_NS = 1_000_000_000
"""Retry interval for a partition that could not be opened, if a batch arrives for it."""


class Partition(FastPathPartition):
    """A worker's state of one partition."""

    def __init__(self, assignment: Assignment) -> None:
        """Raises ArrowMetadataError."""
        self.seed = checksum_seed(assignment.topic_id, assignment.partition)
        self.is_delay_log = bool(assignment.delay_of)
        self.next_offset = 0
        self.leader_epoch = 0
        """Leader epoch of the table when `next_offset` was read there. A different one means that
        the flusher has changed the log's end. NO_EPOCH if the log could not be opened and its end
        is unknown.
        """
        self.open_epoch = NO_EPOCH
        """`leader_epoch` of a partition that is about to move, which has NO_EPOCH meanwhile."""
        self.last_append_us = 0
        self.producers = ProducerTable()
        self.marker_template: MarkerTemplate | None
        """Made with the first marker of a transaction in this schema."""
        self.assign(assignment)

    def assign(self, assignment: Assignment) -> None:
        """Apply the settings and the schema of an assignment. Its place does not change. Batches
        of an older schema are refused from now on. Raises ArrowMetadataError.
        """
        self.layout = read_schema(assignment.schema)
        self.marker_template = None
        max_message_bytes = int(assignment.settings["max.message.bytes"])
        log_append_time = assignment.settings["message.timestamp.type"] == "LogAppendTime"
        self.key_node = _key_node(self.layout, assignment)
        """Compacted topic: index of the column whose values are the keys; -1 for others."""
        self._note(
            shape_of(self.layout), assignment.schema_id, assignment.data_dir,
            self.is_delay_log or self.key_node >= 0,
        )  # fmt: skip
        self.assignment, self.max_message_bytes, self.log_append_time = (
            assignment,
            max_message_bytes,
            log_append_time,
        )
        self.slot_map_version = len(assignment.slot_counts)
        """Batches routed by another version are refused. 0: the topic has no hash slots."""

    def close(self) -> None:
        """Append nothing more: the partition is about to move. What is known of it stays good."""
        if self.leader_epoch != NO_EPOCH:
            self.open_epoch, self.leader_epoch = self.leader_epoch, NO_EPOCH

    def reopen(self) -> None:
        """Append again: the partition has not moved."""
        if self.leader_epoch == NO_EPOCH:
            self.leader_epoch = self.open_epoch


def _key_node(layout: SchemaLayout, assignment: Assignment) -> int:
    settings = assignment.settings
    if "compact" not in settings["cleanup.policy"] or assignment.delay_of:
        return -1
    column = settings["key.column"] if assignment.typed else "key"
    return next(
        (n for n, node in enumerate(layout.nodes) if node.top_level and node.name == column), -1
    )


@dataclass(slots=True)
class UnopenedPartition:
    """A partition that could not be opened, with the error code of its batches
    and the retry time.
    """

    assignment: Assignment
    code: ErrorCode
    retry_ns: int


LoadProducers = Callable[[Assignment, int], ProducerTable]
"""(partition, next offset) -> producers up to there according to the files."""


class Partitions:
    """All partitions of a worker."""

    def __init__(
        self,
        ring: RingWriter,
        tables: list[PartitionTable],
        load_producers: LoadProducers,
        error_handler: CountedErrorHandler,
    ) -> None:
        self.by_slot: dict[int, Partition] = {}
        self.delay_logs: dict[tuple[str, int], Partition] = {}
        """Delay logs by (topic id of their topic, partition). The same worker has both."""
        self.open_transactions = OpenTransactionIndex()
        self.unreadable: set[int] = set()
        """Slots of partitions of which it is unknown what is open there."""
        self.arriving: set[int] = set()
        """Slots of partitions that come back or have moved here, and that the flusher has yet to
        open.
        """
        self.on_taken_up: Callable[[int], None] | None = None
        """Called with the slot of a partition that was opened or resynchronised."""
        self._unopened: dict[int, UnopenedPartition] = {}
        self._ring = ring
        self._tables = tables
        self._load_producers = load_producers
        self._error_handler = error_handler
        self._index = DescriptorIndex(ring)
        self._unsettled = self._read_unsettled()

    def assign(self, assignment: Assignment, now_ns: int) -> None:
        """Open, change or remove a partition."""
        try:
            self._apply(assignment)
        except Exception as error:
            self._note_unopened(assignment, error, now_ns)

    def epoch_of(self, slot: int) -> int | None:
        """The leader epoch in which a partition was taken up, None if it is not open."""
        partition = self.by_slot.get(slot)
        if partition is None:
            return None
        return (
            partition.open_epoch if partition.leader_epoch == NO_EPOCH else partition.leader_epoch
        )

    def code_of_unopened(self, slot: int, now_ns: int) -> ErrorCode:
        """Return the error code of a batch for a slot without a partition. Retry opening it if the
        retry time has come.
        """
        unopened = self._unopened.get(slot)
        if unopened is None:
            return ErrorCode.UNKNOWN_TOPIC
        if unopened.code is ErrorCode.NOT_READY and now_ns >= unopened.retry_ns:
            self.assign(unopened.assignment, now_ns)
        return unopened.code

    def has_room_for_producer(self, partition: Partition, limit: int, now_us: int) -> bool:
        """True if one more producer may be remembered.

        A partition has at most `limit`, all together WORKER_PRODUCERS times that. Up to KEPT are
        always allowed in each.
        """
        producers = partition.producers
        if not producers.has_room(limit, now_us):
            return False
        if producers.producer_count < KEPT or self._producer_count() < WORKER_PRODUCERS * limit:
            return True
        for other in self.by_slot.values():
            other.producers.has_room(limit, now_us)  # forgets idle producers
        return self._producer_count() < WORKER_PRODUCERS * limit

    def _producer_count(self) -> int:
        return sum(partition.producers.producer_count for partition in self.by_slot.values())

    def expire_producers(self, now_us: int, expiration_us: int) -> None:
        """Forget producers that have appended nothing for `expiration_us`."""
        for partition in self.by_slot.values():
            partition.producers.expire(now_us - expiration_us)

    def topic_of(self, delay_log: Assignment) -> Partition | None:
        """Return the partition whose delayed records this delay log holds, or
        None if it is unknown.
        """
        requested = delay_log.delay_of, delay_log.partition
        return next(
            (
                p
                for p in self.by_slot.values()
                if (p.assignment.topic_id.hex(), p.assignment.partition) == requested
            ),
            None,
        )

    def _read_unsettled(self) -> dict[int, tuple[int, int, int]]:
        """Return (next offset, append time, epoch) by slot of descriptors that a predecessor
        published and the table may not include yet.
        """
        ring = self._ring
        found: dict[int, tuple[int, int, int]] = {}
        for number in range(ring.settled.load(), ring.next_number):
            descriptor = ring.descriptor(number)
            if descriptor.has_bytes and not descriptor.is_control:
                found[descriptor.slot] = (
                    descriptor.next_offset,
                    descriptor.append_time_us,
                    descriptor.leader_epoch,
                )
        return found

    def _apply(self, assignment: Assignment) -> None:
        slot = assignment.slot
        known = self.by_slot.get(slot)
        same = known is not None and known.assignment.topic_id == assignment.topic_id
        if assignment.dropped:
            if same:
                self._forget(slot)
            if (
                slot in self._unopened
                and self._unopened[slot].assignment.topic_id == assignment.topic_id
            ):
                del self._unopened[slot]
                self.unreadable.discard(slot)
        elif known is not None and same:
            if assignment.version >= known.assignment.version:
                was_departing = bool(known.assignment.departing)
                known.assign(assignment)
                if assignment.departing:
                    known.close()
                elif was_departing and assignment.undeleted:
                    self.arriving.add(slot)  # it is back: its flusher may have yet to open it
                elif was_departing:
                    known.reopen()
        else:
            opened = self._open(assignment)
            if known is not None:
                self._forget(slot)
            self._unopened.pop(slot, None)
            self.by_slot[slot] = opened
            self._show_taken_up(opened)
            if assignment.departing:
                opened.close()
            if assignment.delay_of:
                self.delay_logs[assignment.delay_of, assignment.partition] = opened

    def _show_taken_up(self, partition: Partition) -> None:
        slot = partition.assignment.slot
        self.open_transactions.replace(slot, partition.producers.transactions)
        if partition.leader_epoch == NO_EPOCH:
            self.unreadable.add(slot)
        else:
            self.unreadable.discard(slot)
        if self.on_taken_up is not None:
            self.on_taken_up(slot)

    def take_up_arrived(self) -> int:
        """Take up the partitions that their flusher has opened since, for their transactions wait.
        Return their number.
        """
        count = 0
        for slot in list(self.arriving):
            partition = self.by_slot.get(slot)
            if partition is None or partition.leader_epoch != NO_EPOCH:
                self.arriving.discard(slot)
            elif self.on_new_epoch(partition):
                self.arriving.discard(slot)
                count += 1
        return count

    def take_up_new_epochs(self) -> int:
        """Take up the partitions whose log's end the flusher has changed; return their number.

        The next append to such a partition takes it up as well. Without one, a transaction that is
        open there again would stay open: a revived log may have a batch that was refused because
        its sync failed.
        """
        count = 0
        for slot, partition in self.by_slot.items():
            table, epoch = self._tables[partition.assignment.data_dir], partition.leader_epoch
            if epoch == NO_EPOCH or table.append_state(slot)[1] == epoch:
                continue
            try:
                count += self.on_new_epoch(partition)
            except Exception as error:  # the boundary of one partition
                self._error_handler.on_error(f"epoch_change slot={slot}", error)
        return count

    def _forget(self, slot: int) -> None:
        assignment = self.by_slot.pop(slot).assignment
        self.open_transactions.forget(slot)
        self.unreadable.discard(slot)
        if assignment.delay_of:
            self.delay_logs.pop((assignment.delay_of, assignment.partition), None)

    def _note_unopened(self, assignment: Assignment, error: Exception, now_ns: int) -> None:
        """Refuse the batches of a partition that cannot be opened: its files cannot be read now, or
        its schema is invalid.
        """
        slot, unopened = assignment.slot, self._unopened.get(assignment.slot)
        code = ErrorCode.NOT_READY if isinstance(error, OSError) else ErrorCode.INTERNAL_ERROR
        if unopened is None or unopened.code is not code:
            context = f"topic={assignment.topic} partition={assignment.partition}"
            if isinstance(error, OSError):
                logger.error(
                    "partition_not_opened topic=%s partition=%d error=%r",
                    assignment.topic,
                    assignment.partition,
                    str(error),
                )
            else:
                self._error_handler.on_error(context, error)
        known = self.by_slot.get(slot)
        if known is not None and known.assignment.topic_id == assignment.topic_id:
            return  # only the change failed: the partition stays as it was
        if known is not None:
            self._forget(slot)
        self._unopened[slot] = UnopenedPartition(assignment, code, now_ns + OPEN_RETRY_NS)
        self.unreadable.add(slot)

    def _open(self, assignment: Assignment) -> Partition:
        table = self._tables[assignment.data_dir]
        partition = Partition(assignment)
        state = table.read(assignment.slot)
        is_served = state.topic_id == assignment.topic_id and state.state is not SlotState.DELETED
        if is_served:
            next_offset, append_us, epoch = self._unsettled.get(assignment.slot, (0, 0, 0))
            if epoch != state.leader_epoch:
                next_offset = 0  # a failed disk has refused them since
            self._take_up(partition, max(next_offset, state.log_end_offset), state.leader_epoch)
            partition.last_append_us = max(append_us, state.last_append_us)
            if state.state is SlotState.UNREADABLE:
                partition.leader_epoch = NO_EPOCH
        elif assignment.undeleted:  # its flusher has yet to take it out of the bin
            partition.leader_epoch = NO_EPOCH
            self.arriving.add(assignment.slot)
        else:  # the flusher has not opened it yet: an empty table, which knows the clock's jumps
            partition.producers = self._load_producers(assignment, 0)
        return partition

    def _take_up(self, partition: Partition, next_offset: int, leader_epoch: int) -> None:
        """Set the next offset, and rebuild producers from the files, and from what the ring has
        beyond them. Raises OSError before any change.

        What is settled is in the files. The ring's settled descriptors of this slot may be of a
        topic that was deleted since.
        """
        settled = self._ring.settled.load()  # before the files are read
        producers = self._load_producers(partition.assignment, next_offset)
        for d in self._index.batches_of(partition.assignment.slot, settled):
            if d.leader_epoch != leader_epoch or d.next_offset > next_offset:
                continue
            if d.flags & delay_rules.SPECIAL_FLAGS:
                delay_rules.note_descriptor(producers, d)
            if d.is_transactional:
                transaction_rules.note_descriptor(producers, d)
            if d.producer_id >= 0 and d.base_sequence >= 0:
                producers.record(
                    d.producer_id,
                    d.producer_epoch,
                    d.base_sequence,
                    d.last_offset_delta,
                    d.base_offset,
                    d.next_offset,
                    d.append_time_us,
                )
        partition.next_offset, partition.leader_epoch, partition.producers = (
            next_offset,
            leader_epoch,
            producers,
        )

    def check_log_ends(self, partition: Partition) -> None:
        """Check the log ends of a topic and its delay log together.

        Called when the scheduler resends batches that this worker has appended, or sends a mark
        that does not follow its deliveries.
        """
        other = (
            self.topic_of(partition.assignment)
            if partition.is_delay_log
            else self.delay_logs.get(
                (partition.assignment.topic_id.hex(), partition.assignment.partition)
            )
        )
        for each in (partition, other):
            if each is not None:
                self.check_log_end(each)

    def check_log_end(self, partition: Partition) -> None:
        """Resynchronise a partition whose log ends before this worker's next offset, or has a new
        epoch, although everything is settled. Its disk has failed, and the log is authoritative.
        """
        ring, assignment = self._ring, partition.assignment
        if ring.settled.load() != ring.next_number or assignment.departing:
            return
        state = self._tables[assignment.data_dir].read(assignment.slot)
        is_behind = (
            state.log_end_offset < partition.next_offset
            or state.leader_epoch != partition.leader_epoch
        )
        if state.topic_id == assignment.topic_id and state.state is SlotState.ONLINE and is_behind:
            logger.warning(
                "taken_up_anew topic=%s partition=%d from=%d to=%d",
                assignment.topic, assignment.partition, partition.next_offset, state.log_end_offset,
            )  # fmt: skip
            try:
                self._take_up(partition, state.log_end_offset, state.leader_epoch)
            except OSError as error:
                logger.warning(
                    "end_not_taken_up topic=%s partition=%d error=%r",
                    assignment.topic,
                    assignment.partition,
                    str(error),
                )
            else:
                self._show_taken_up(partition)

    def on_new_epoch(self, partition: Partition) -> bool:
        """Resynchronise after the flusher has changed the log's end because of a failed disk.
        Batches beyond it were refused.

        Return False if the files cannot be read now. Epoch and end are read together: an end of the
        previous epoch would leave a gap or overwrite batches.
        """
        assignment = partition.assignment
        if assignment.departing:
            return False
        state = self._tables[assignment.data_dir].read(assignment.slot)
        if assignment.undeleted and (
            state.topic_id != assignment.topic_id or state.state is SlotState.DELETED
        ):
            return False  # its flusher has yet to open it
        if state.topic_id == assignment.topic_id and state.state is not SlotState.UNREADABLE:
            try:
                self._take_up(partition, state.log_end_offset, state.leader_epoch)
            except OSError as error:
                logger.warning(
                    "epoch_not_taken_up topic=%s partition=%d error=%r",
                    assignment.topic,
                    assignment.partition,
                    str(error),
                )
                return False
            self._show_taken_up(partition)
            logger.info(
                "epoch_taken_up topic=%s partition=%d epoch=%d next_offset=%d",
                assignment.topic, assignment.partition, state.leader_epoch, state.log_end_offset,
            )  # fmt: skip
        return True
