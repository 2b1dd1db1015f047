"""Batch appender: validates and deduplicates batches, gives them offsets, writes them to the ring.

Owner: one worker. The ring's descriptors and data.

Invariants:
- Every batch, also a refused one or a duplicate, gets a descriptor.
- Nothing is published here: the worker commits once a step.
- An exception before the descriptor means that nothing was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from shm.crash_points import crash_point, is_armed
from shm.memory.atomic_word import is_compiled
from shm.memory.layout import (
    ACKS_LEADER,
    ACKS_MASK,
    FLAG_BYTES,
    FLAG_DUPLICATE,
    FLAG_TRANSACTIONAL,
    SLOT_MAP_SHIFT,
    SOURCE_CONTROLLER,
    SOURCE_SCHEDULER,
    SlotState,
)
from shm.messages.lane_messages import LaneKind
from shm.queues.lane import LaneError, LaneMessage, LaneReader
from shm.queues.ring import RingWriter
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.partition_table import PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_DELAYED,
    BatchHeader,
    header_position,
)
from tailrace.format.record_batch.header_stamps import (
    stamp_append_time,
    stamp_appended,
    stamp_min_tick,
)
from tailrace.kernel import fast_append
from workers.append.batch_validation import checked_header
from workers.append.partitions import Partition, Partitions
from workers.log.producers.delay_rules import (
    SPECIAL_ATTRIBUTES,
    SPECIAL_FLAGS,
    begins_epoch,
    flags_of,
    is_next_delivery,
    is_next_mark,
    note_header,
)
from workers.log.producers.producer_state import OLDER_BYTES, Decision

if TYPE_CHECKING:
    from workers.append.transactions import Transactions


class BatchAppender:
    """Appends of one worker's partitions."""

    def __init__(
        self,
        *,
        ring: RingWriter,
        lanes: Iterable[LaneReader],
        tables: list[PartitionTable],
        partitions: Partitions,
        error_handler: CountedErrorHandler,
        is_disk_full: Callable[[int], bool],
        producer_expiration_us: int,
        producer_ids_max: int,
        now_us: Callable[[], int],
    ) -> None:
        """`is_disk_full` returns True if a data directory (by number) accepts no batches now."""
        self._ring = ring
        self._tables = tables
        self._opened = partitions
        self._partitions, self._delay_logs = partitions.by_slot, partitions.delay_logs
        self._error_handler = error_handler
        self._is_disk_full = is_disk_full
        self._now_us = now_us
        self._has_fast_path = all(is_compiled(each) for each in (ring, *lanes, *tables))
        self.producer_expiration_us = producer_expiration_us
        self.producer_ids_max = producer_ids_max
        self.transactions: Transactions | None = None
        """None until the lanes to the transaction coordinator exist."""
        self.must_read_decisions = False
        """True if a batch waits for what the coordinator has sent."""
        self.is_blocked = False
        """True if a lane waits for space in the ring."""
        self.has_replies = False
        """True if an unpublished descriptor needs an ack as soon as it is published."""
        self.refused_count = 0
        self.byte_count = 0
        self.now_ns = 0
        """Time of this step."""

    def append_plain(self, source: int, lane: LaneReader, count_max: int) -> int:
        """Append batches by the kernel's fast path, as many as `append` would
        without a special case.
        """
        if not self._has_fast_path or source >= SOURCE_CONTROLLER or is_armed():
            return 0
        open_tables = [
            None if self._is_disk_full(data_dir) else table
            for data_dir, table in enumerate(self._tables)
        ]
        transactions, count = self.transactions, 0
        registered = None if transactions is None else transactions.registered
        while True:
            try:
                appended, byte_count, has_replies, opened = fast_append(
                    self._ring, lane, source, LaneKind.PRODUCE, count_max - count,
                    self._partitions, open_tables, self._now_us(),
                    self.producer_expiration_us, OLDER_BYTES, registered,
                )  # fmt: skip
            except LaneError:
                raise
            except Exception as error:
                # earlier appends are complete; from now on each batch takes the slow path
                self._error_handler.on_error(f"source={source} fast_append", error)
                self._has_fast_path, self.has_replies = False, True
                return count
            count += appended
            self.byte_count += byte_count
            self.has_replies = self.has_replies or has_replies
            if opened is None or transactions is None:
                return count
            transactions.note_opened(self._partitions[opened[0]], *opened)

    def append(self, source: int, message: LaneMessage) -> bool:
        """Append, refuse or deduplicate one batch. Return False if the ring has no space and the
        lane must wait.
        """
        batch = message.payload
        length = len(batch)
        position = self._ring.try_claim(length)
        if position is None:
            return False
        partition = self._partitions.get(message.slot)
        if partition is None:
            return self.refuse(
                source, message, self._opened.code_of_unopened(message.slot, self.now_ns), 0
            )
        shown = self._tables[partition.assignment.data_dir].append_state(message.slot)
        if shown[1] != partition.leader_epoch:
            if not self._opened.on_new_epoch(partition):
                return self.refuse(source, message, ErrorCode.NOT_READY, partition.next_offset)
            shown = self._tables[partition.assignment.data_dir].append_state(message.slot)
        next_offset = partition.next_offset
        has_owner = message.kind == LaneKind.PRODUCE_OWNED
        header, code = self._check(partition, batch, source, shown[0], has_owner)
        if header is None:
            return self.refuse(source, message, code, next_offset)
        if source == SOURCE_SCHEDULER and not self._is_next_delay(partition, header):
            self._opened.check_log_ends(partition)
            return self.refuse(source, message, ErrorCode.UNKNOWN_SEQUENCE, next_offset, header)
        if source == SOURCE_SCHEDULER and (code := self._change_refusal(partition, header)):
            if self.must_read_decisions:
                return False
            return self.refuse(source, message, code, next_offset, header)
        if header.is_transactional and (code := self._transaction_refusal(partition, header)):
            if self.must_read_decisions:
                return False
            return self.refuse(source, message, code, next_offset, header)
        return self._deduplicate(partition, header, message, source, position, shown[3])

    def _deduplicate(
        self,
        partition: Partition,
        header: BatchHeader,
        message: LaneMessage,
        source: int,
        position: int,
        durable_offset: int,
    ) -> bool:
        """Append a checked batch, unless its producer's sequence or its slot map refuses it, or it
        is stored already.
        """
        next_offset = partition.next_offset
        verdict = None
        if header.producer_id >= 0 and source != SOURCE_SCHEDULER:
            now_us = self._now_us()
            verdict = partition.producers.decide(
                header.producer_id, header.producer_epoch, header.base_sequence,
                header.last_offset_delta,
                now_us - self.producer_expiration_us,
            )  # fmt: skip
            if verdict.original is not None:
                self.write_descriptor(self._ring.next_position, 0, message, source,
                message.flags | FLAG_DUPLICATE, 0, verdict.original.base_offset,
                             verdict.original.next_offset, header, partition,
                             verdict.original.append_time_us)  # fmt: skip
                return True
        # After the duplicate check: a batch appended under an older map must not be sent elsewhere
        # again.
        if (
            message.flags >> SLOT_MAP_SHIFT != partition.slot_map_version
            and source != SOURCE_SCHEDULER
        ):
            return self.refuse(source, message, ErrorCode.STALE_SLOT_MAP, next_offset, header)
        if verdict is not None:
            # registered producers are bounded, and forgotten with their transactions
            if (
                verdict.is_new
                and not header.is_transactional
                and not self._opened.has_room_for_producer(partition, self.producer_ids_max, now_us)
            ):
                return self.refuse(
                    source, message, ErrorCode.TOO_MANY_PRODUCERS, next_offset, header
                )
            if verdict.decision is Decision.REFUSE:
                flags = FLAG_DUPLICATE if verdict.is_stored else 0
                return self.refuse(source, message, verdict.code, next_offset, header, flags)
        # After the duplicate check: a batch that is in the log has moved the end itself.
        if header.required_end not in (None, next_offset) and source != SOURCE_SCHEDULER:
            return self.refuse(source, message, ErrorCode.OFFSET_CONFLICT, next_offset, header)
        self._append_batch(partition, header, message, source, position, durable_offset)
        return True

    def _transaction_refusal(self, partition: Partition, header: BatchHeader) -> ErrorCode:
        """Return the error code of a batch of a transaction, OK if its sequence decides.

        Before a refusal the coordinator's lane is read once more, since the decision that explains
        the batch may have come within this step: then `must_read_decisions` is set.
        """
        if self.transactions is None:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        code = self.transactions.refusal(partition, header)
        if code and self.transactions.lane.has_more():
            self.must_read_decisions = not self.is_blocked
            return ErrorCode.CONCURRENT_TRANSACTIONS  # if the ring has no space for its markers
        return code

    def _change_refusal(self, partition: Partition, header: BatchHeader) -> ErrorCode:
        """Return the error code of a change of delayed records, OK if it may be appended.

        Markers of transactions that were decided before it was asked for must lie before it. Their
        decisions are in the coordinator's lane, which is read first (`must_read_decisions`).
        """
        transactions = self.transactions
        is_change = partition.is_delay_log and header.due_us > 0 and not header.is_control
        if not is_change or not len(partition.producers.transactions):
            return ErrorCode.OK
        if transactions is None or not transactions.is_fed:
            return ErrorCode.NOT_READY
        if transactions.lane.has_more():
            self.must_read_decisions = not self.is_blocked
            return ErrorCode.NOT_READY
        return ErrorCode.OK

    def _is_next_delay(self, partition: Partition, header: BatchHeader) -> bool:
        """True if a batch from the scheduler is new.

        The scheduler resends batches that it has not seen settled.
        """
        assignment = partition.assignment
        if header.is_control:
            topic = (
                self._opened.topic_of(assignment)
                if begins_epoch(header, partition.producers)
                else None
            )
            return bool(assignment.delay_of) and is_next_mark(
                header, partition.producers, topic.producers if topic else None
            )
        if header.attributes & ATTRIBUTE_DELAYED:
            log = self._delay_logs.get((assignment.topic_id.hex(), assignment.partition))
            return is_next_delivery(
                header, partition.producers, log.producers if log else None, self._now_us()
            )
        return True

    def _check(
        self, partition: Partition, batch: memoryview, source: int, state: int, has_owner: bool
    ) -> tuple[BatchHeader | None, ErrorCode]:
        """Run all checks before a batch is stored, cheapest first.

        `state` is the slot's state in the table.
        """
        assignment = partition.assignment
        # a delayed record may have been accepted under another limit
        if len(batch) > partition.max_message_bytes and source != SOURCE_SCHEDULER:
            return None, ErrorCode.RECORD_TOO_LARGE
        if state in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE):
            return None, ErrorCode.PARTITION_OFFLINE
        if self._is_disk_full(assignment.data_dir):
            return None, ErrorCode.DISK_FULL
        return checked_header(
            partition, batch, is_ours=source == SOURCE_SCHEDULER, has_owner=has_owner
        )

    def _append_batch(
        self,
        partition: Partition,
        header: BatchHeader,
        message: LaneMessage,
        source: int,
        position: int,
        durable_offset: int,
    ) -> None:
        """Write a batch to the ring, then update the worker's state. An exception means that
        nothing was changed.
        """
        batch = message.payload
        append_us = max(self._now_us(), partition.last_append_us)
        base_offset = partition.next_offset
        next_offset = base_offset + header.last_offset_delta + 1
        target = self.copy(position, batch)
        at = header_position(target)
        flags = message.flags | FLAG_BYTES
        if header.is_transactional:
            flags |= FLAG_TRANSACTIONAL
        if header.attributes & SPECIAL_ATTRIBUTES:
            flags |= flags_of(header)
        elif partition.assignment.delay_of:
            stamp_min_tick(target, at, header, partition.producers.open_ordinal)
        if partition.log_append_time and not header.is_control:
            stamp_append_time(target, at, header, append_us)
        stamp_appended(
            target, at, header, base_offset=base_offset, append_time_us=append_us,
            leader_epoch=partition.leader_epoch,
            durable_offset=durable_offset, seed=partition.seed,
        )  # fmt: skip
        crash_point("worker.after_copy")
        self.write_descriptor(
            position,
            len(batch),
            message,
            source,
            flags,
            0,
            base_offset,
            next_offset,
            header,
            partition,
            append_us,
        )
        partition.next_offset, partition.last_append_us = next_offset, append_us
        self.byte_count += len(batch)
        if header.attributes & SPECIAL_ATTRIBUTES:
            note_header(partition.producers, header)
        if header.is_transactional and self.transactions is not None:
            self.transactions.note_opened(
                partition, message.slot, header.producer_id, header.producer_epoch, base_offset
            )
        if header.producer_id >= 0 and source != SOURCE_SCHEDULER:
            partition.producers.record(
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.last_offset_delta,
                base_offset,
                next_offset,
                append_us,
            )

    def copy(self, position: int, payload: memoryview) -> memoryview:
        """Copy bytes to the ring, where `try_claim` found space for them."""
        ring = self._ring
        index = position % ring.ring_bytes
        target = ring.data[index : index + len(payload)]
        target[:] = payload
        return target

    def refuse(
        self,
        source: int,
        message: LaneMessage,
        code: ErrorCode,
        next_offset: int,
        header: BatchHeader | None = None,
        flags: int = 0,
    ) -> bool:
        """Write the descriptor of a refused batch. Always True."""
        self.refused_count += 1
        self.write_descriptor(
            self._ring.next_position,
            0,
            message,
            source,
            message.flags | flags,
            code,
            next_offset,
            next_offset,
            header,
        )
        return True

    def write_descriptor(
        self, position: int, length: int, message: LaneMessage, source: int, flags: int,
        result: int, base_offset: int, next_offset: int,
        header: BatchHeader | None = None, partition: Partition | None = None,
        append_time_us: int = 0,
    ) -> None:  # fmt: skip
        """Write a descriptor to the ring. The next commit publishes it."""
        self.has_replies = self.has_replies or result != 0 or flags & ACKS_MASK == ACKS_LEADER
        self._ring.write(
            position, length, message.slot, base_offset, next_offset, message.session,
            message.correlation_id, message.next_position, flags,
            source, result,
            header.producer_id if header else -1, header.base_sequence if header else -1,
            header.producer_epoch if header else -1,
            header.last_offset_delta if header else 0, partition.leader_epoch if partition else 0,
            append_time_us,
            header.max_timestamp_us if header else 0,
            *((header.min_tick, header.delay_position) if header and flags & SPECIAL_FLAGS else (0,
            0)),
        )  # fmt: skip
