"""Transactions as a worker carries them out: it follows the coordinator, ends what was decided, and
says which batches it may take.

    coordinator's lane -> registered producers, markers -> ring -> verdicts -> reports

Owner: one worker; it exists once the lanes to the coordinator do.

Invariants:
- A marker ends exactly the (producer id, epoch) that was decided, and only where it is open.
- Markers of a decision precede its registrations: no batch of the next epoch lies before them.
- A batch of a transaction is refused before the feed of this process generation is complete, and
  where another epoch of its producer is open.
- What is open and not registered at the end of a feed, or in a partition that is opened later, is
  asked for. Every decision that is not carried out was fed, so the marker was lost here: with a
  damaged file, or with the memory of a topic that is not synced.

Crash: nothing is kept. The successor is fed again, and a repeated decision finds nothing open where
its marker is in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from weakref import WeakKeyDictionary

from shm.crash_points import crash_point
from shm.memory.layout import ACKS_NONE, FLAG_BYTES, FLAG_TRANSACTIONAL, SOURCE_GROUPS, SlotState
from shm.messages.lane_messages import LaneKind
from shm.messages.transaction_messages import Decision, Outcome, decode_decisions
from shm.queues.lane import LaneMessage, LaneReader
from shm.queues.ring import RingWriter
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.partition_table import PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.format.record_batch.arrow_metadata import SchemaLayout
from tailrace.format.record_batch.batch_header import NO_SEQUENCE, BatchHeader
from tailrace.format.record_batch.control_batch import MarkerTemplate, empty_message
from workers.append.coordinator_reports import CoordinatorReports
from workers.append.decision_progress import DecisionProgress
from workers.append.open_transaction_index import Key
from workers.append.partitions import Partition, Partitions
from workers.append.transactional_producers import Standing, TransactionalProducers

RETRY_NS = 500_000_000
"""Interval between attempts to write missing markers, and to be fed again after a failure."""
VERDICT_RETRY_NS = 5_000_000
"""Interval of looking for verdicts, if the flusher's doorbell is lost."""

_empty_messages: WeakKeyDictionary[SchemaLayout, bytes] = WeakKeyDictionary()


class _Marked(Enum):
    DONE = 0
    NOT_NOW = 1
    RING_IS_FULL = 2


class Transactions:
    """The worker's side of the transaction coordinator."""

    def __init__(
        self,
        *,
        ring: RingWriter,
        lane: LaneReader,
        reports: CoordinatorReports,
        partitions: Partitions,
        tables: list[PartitionTable],
        generation: int,
        now_us: Callable[[], int],
        error_handler: CountedErrorHandler,
    ) -> None:
        self.lane = lane
        self._ring = ring
        self._reports = reports
        self._partitions = partitions
        self._open = partitions.open_transactions
        self._tables = tables
        self._generation = generation
        self._now_us = now_us
        self._error_handler = error_handler
        self._producers = TransactionalProducers()
        self._progress = DecisionProgress(ring, partitions.epoch_of)
        self._done = 0
        """Decisions of the lane's next message that are applied."""
        self._asked: set[Key] = set()
        self._unknown_since: dict[int, int] = {}
        """Slot of a partition that cannot be read -> `registration_count` then. What was registered
        later is not open there.
        """
        self._taken_up: set[int] = set()
        """Slots that were opened, or taken up anew, and not looked at since."""
        self._now_ns = 0
        self._retry_ns = 0
        self.is_full = False
        """True if markers wait for room in the ring. No batch may be appended in this step then:
        behind a marker of the same decision it would open the transaction again.
        """
        self._needs_feed = False
        partitions.on_taken_up = self._note_taken_up

    # ---- steps -----------------------------------------------------------------------------------

    def begin_step(self, now_ns: int) -> None:
        """Read verdicts, and write missing markers. Call it before the ring is written."""
        self._now_ns = now_ns
        self.is_full = False
        self._progress.advance()
        if self._producers.is_fed:
            while self._taken_up and not self.is_full:
                self._inspect(self._taken_up.pop())
        if now_ns >= self._retry_ns and (self._progress.missing or self._needs_feed):
            self._retry_ns = now_ns + RETRY_NS
            self._retry()

    def end_step(self) -> None:
        """Send reports. Call it when the ring is published."""
        self._progress.advance()
        if self._producers.is_fed and self._progress.is_due(self._now_ns):
            settled = self._progress.report()
            crash_point("worker.before_settled")
            self._reports.settled(settled)
        self._reports.flush(self._now_ns)

    def next_deadline_ns(self) -> int | None:
        """Return the time of the next work that no ring announces."""
        if self._progress.is_waiting or self._taken_up or self._reports.is_waiting:
            return self._now_ns + VERDICT_RETRY_NS
        times = [self._reports.due_ns]
        if self._producers.is_fed:
            times.append(self._progress.due_ns)
        if self._progress.missing or self._needs_feed:
            times.append(self._retry_ns)
        return min((time_ns for time_ns in times if time_ns is not None), default=None)

    # ---- batches ---------------------------------------------------------------------------------

    @property
    def is_fed(self) -> bool:
        """True if the feed of this process generation is complete."""
        return self._producers.is_fed

    @property
    def registered(self) -> dict[int, int] | None:
        """Registered producers for the kernel (`TransactionalProducers.by_id`)."""
        return self._producers.by_id

    def refusal(self, partition: Partition, header: BatchHeader) -> ErrorCode:
        """Return the error code of a transactional batch, OK if its sequence decides."""
        producer_id, epoch = header.producer_id, header.producer_epoch
        standing = self._producers.standing(producer_id, epoch)
        if standing is Standing.FENCED:
            return ErrorCode.PRODUCER_FENCED
        if standing is Standing.NOT_YET:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        open_here = partition.producers.transactions.of(producer_id)
        if open_here is not None and open_here.epoch != epoch:
            key = producer_id, open_here.epoch
            if key not in self._progress.missing.get(partition.assignment.slot, ()):
                self._ask(key)
            return ErrorCode.CONCURRENT_TRANSACTIONS
        return ErrorCode.OK

    def note_opened(
        self, partition: Partition, slot: int, producer_id: int, epoch: int, base_offset: int
    ) -> None:
        """Record a batch that was appended. The first one opens its transaction."""
        if partition.producers.transactions.append(producer_id, epoch, base_offset):
            key = producer_id, epoch
            if self._open.open(slot, key):
                self._reports.began(key, self._now_ns)

    # ---- the coordinator's lane ------------------------------------------------------------------

    def take(self, message: LaneMessage) -> bool:
        """Handle one message. Return False if the ring has no space for a marker: what is done is
        not repeated.
        """
        written = self._ring.next_number
        try:
            if message.kind == LaneKind.DECISIONS:
                return self._take_decisions(message)
            if message.kind == LaneKind.TRANSACTIONS_FEED:
                self._begin_feed()
            elif (
                message.kind == LaneKind.TRANSACTIONS_FED
                and message.correlation_id == self._generation
            ):
                self._end_feed()
        except Exception as error:
            if self._ring.next_number != written:
                raise
            self._error_handler.on_error(
                f"source=coordinator kind={message.kind} bytes={len(message.payload)}", error
            )
            self._done = 0
            self._producers.begin_feed()  # a decision is lost: only another feed has it
            self._needs_feed = True
        return True

    def _begin_feed(self) -> None:
        self._producers.begin_feed()
        self._progress.begin_feed()
        self._reports.forget()
        self._asked.clear()
        self._unknown_since.clear()

    def _take_decisions(self, message: LaneMessage) -> bool:
        if not self._done and (ordinal := self._producers.try_pack(message.payload)) is not None:
            self._progress.apply(ordinal, (), is_urgent=True)
            return True
        for decision in decode_decisions(message.payload)[self._done :]:
            if not self._apply(decision):
                return False
            self._done += 1
        self._done = 0
        return True

    def _end_feed(self) -> None:
        """Report what is open and registered, and ask how the rest has ended."""
        for key in self._open:
            if self._producers.is_registered(*key):
                self._reports.opened(key)
            elif not self._is_missing_everywhere(key):
                self._ask(key)
        self._producers.end_feed()
        self._progress.end_feed()
        self._taken_up.intersection_update(self._progress.missing)
        count = self._producers.registration_count
        self._unknown_since = dict.fromkeys(self._partitions.unreadable, count)

    def _is_missing_everywhere(self, key: Key) -> bool:
        """True if the outcome of an open transaction is known in each of its partitions."""
        missing = self._progress.missing
        return all(key in missing.get(slot, ()) for slot in self._open.slots_of(key))

    def _apply(self, decision: Decision) -> bool:
        """Carry out a decision. False if the ring has no space for a marker."""
        keys = [(producer_id, epoch) for producer_id, epoch, _ in decision.outcomes]
        for producer_id, epoch, outcome in decision.outcomes:
            if not self._end((producer_id, epoch), outcome):
                return False
        self._producers.apply(decision)
        self._progress.apply(decision.ordinal, keys, is_urgent=not _only_commits(decision))
        return True

    # ---- markers ---------------------------------------------------------------------------------

    def _end(self, key: Key, outcome: Outcome) -> bool:
        """End a transaction in all partitions where it is open. False if the ring has no space."""
        self._asked.discard(key)
        self._reports.ended(key)
        for slot in self._open.slots_of(key):
            if not self._end_in(slot, key, outcome):
                return False
        for slot in self._partitions.unreadable:
            if not self._producers.is_fed:  # a feed registers what was registered long before
                self._progress.add_missing(slot, key, outcome)
                continue
            since = self._unknown_since.setdefault(slot, self._producers.registration_count)
            if self._producers.registered_at(*key) <= since:
                self._progress.add_missing(slot, key, outcome)
        return True

    def _end_in(self, slot: int, key: Key, outcome: Outcome) -> bool:
        """End a transaction in one partition. False if the ring has no space."""
        written = self._ring.next_number
        outcome = self._progress.missing.get(slot, {}).get(key, outcome)  # decided before, for ever
        try:
            marked = self._mark(slot, key, outcome)
        except Exception as error:
            if self._ring.next_number != written:
                raise
            self._error_handler.on_error(f"marker slot={slot} producer_id={key[0]}", error)
            marked = _Marked.NOT_NOW
        if marked is _Marked.RING_IS_FULL:
            self.is_full = True
            return False
        if marked is _Marked.NOT_NOW:
            self._progress.add_missing(slot, key, outcome)
        else:
            self._progress.resolve(slot, key)
        return True

    def _mark(self, slot: int, key: Key, outcome: Outcome) -> _Marked:
        """Append a marker to a partition where the transaction is open."""
        partition = self._partitions.by_slot.get(slot)
        if partition is None:
            self._open.forget(slot)
            return _Marked.DONE
        table = self._tables[partition.assignment.data_dir]
        state, leader_epoch, _, high_watermark, _ = table.append_state(slot)
        if leader_epoch != partition.leader_epoch:
            if not self._partitions.on_new_epoch(partition):
                return _Marked.NOT_NOW
            state, leader_epoch, _, high_watermark, _ = table.append_state(slot)
            if leader_epoch != partition.leader_epoch:
                return _Marked.NOT_NOW
            if not self._open.has(slot, key):
                return _Marked.DONE
        if state in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE):
            return _Marked.NOT_NOW
        return self._append(partition, key, outcome, high_watermark)

    def _append(
        self, partition: Partition, key: Key, outcome: Outcome, durable_offset: int
    ) -> _Marked:
        ring, assignment = self._ring, partition.assignment
        append_us = max(self._now_us(), partition.last_append_us)
        template = partition.marker_template
        if template is None:
            template = partition.marker_template = MarkerTemplate(
                _empty_message(partition.layout), assignment.schema_id, partition.seed
            )
        length = template.length
        position = ring.try_claim(length)
        if position is None:
            return _Marked.RING_IS_FULL
        base_offset = partition.next_offset
        index = position % ring.ring_bytes
        template.write(
            ring.data[index : index + length], control_type=outcome, producer_id=key[0],
            producer_epoch=key[1], base_offset=base_offset, time_us=append_us,
            leader_epoch=partition.leader_epoch, durable_offset=durable_offset,
        )  # fmt: skip
        number = ring.next_number
        # resumed before this message: it may have more decisions, and each is exact
        ring.write(
            position, length, assignment.slot, base_offset, base_offset + 1, 0, 0,
            self.lane.position, FLAG_BYTES | FLAG_TRANSACTIONAL | ACKS_NONE, SOURCE_GROUPS, 0,
            key[0], NO_SEQUENCE, key[1], 0, partition.leader_epoch, append_us, append_us,
            control_type=outcome,
        )  # fmt: skip
        crash_point("worker.after_marker")
        partition.next_offset, partition.last_append_us = base_offset + 1, append_us
        partition.producers.end_transaction(*key)
        self._open.end(assignment.slot, key)
        self._progress.wrote(number, assignment.slot, key, outcome)
        return _Marked.DONE

    def end_all(self, slot: int) -> bool:
        """Abort every transaction that is open in a partition, unless it was decided already.
        Return False while the ring has no space, or an outcome that was asked for is not known yet.

        A partition that takes no marker now keeps what is open. Its outcome is asked for when the
        partition is opened again.
        """
        is_over = True
        for key in self._open.of_slot(slot):
            is_decided = key in self._progress.missing.get(slot, {})
            if not is_decided and not self._producers.is_registered(*key):
                self._ask(key)
                is_over = False
            elif not self._end_in(slot, key, Outcome.ABORT):
                return False
        return is_over

    # ---- partitions that come back ---------------------------------------------------------------

    def _note_taken_up(self, slot: int) -> None:
        self._taken_up.add(slot)
        self._progress.stale.discard(slot)
        self._unknown_since.pop(slot, None)

    def _inspect(self, slot: int) -> None:
        """End what is open in a partition and decided, and ask about what is not registered."""
        partition = self._partitions.by_slot.get(slot)
        if partition is None or slot in self._partitions.unreadable:
            return
        missing = dict(self._progress.missing.get(slot, {}))
        for key in self._open.of_slot(slot):
            outcome = missing.pop(key, None)
            if outcome is not None:
                if not self._end_in(slot, key, outcome):
                    self._taken_up.add(slot)
                    return
            elif self._producers.is_registered(*key):
                self._reports.opened(key)
            else:
                self._ask(key)
        if slot not in self._progress.stale:
            for gone in missing:
                self._progress.resolve(slot, gone)

    def _ask(self, key: Key) -> None:
        if key not in self._asked:
            self._asked.add(key)
            self._reports.ask(key)

    def _retry(self) -> None:
        """Try again what could not be done."""
        if self._needs_feed:
            self._needs_feed = False
            self._reports.request_feed()
        for slot in list(self._progress.missing) if self._producers.is_fed else ():
            if not self.is_full:
                self._retry_slot(slot)

    def _retry_slot(self, slot: int) -> None:
        partition = self._partitions.by_slot.get(slot)
        if partition is None:
            if self._partitions.code_of_unopened(slot, self._now_ns) is ErrorCode.UNKNOWN_TOPIC:
                self._progress.forget(slot)  # it was deleted
            return
        table = self._tables[partition.assignment.data_dir]
        if table.append_state(slot)[1] != partition.leader_epoch:
            if not self._partitions.on_new_epoch(partition):
                return
        elif slot in self._progress.stale:
            self._partitions.check_log_end(partition)
        if slot not in self._progress.stale:
            self._inspect(slot)


def _only_commits(decision: Decision) -> bool:
    """True if nothing waits for the decision: its owner goes on at once after a commit."""
    return bool(decision.outcomes) and all(
        outcome is Outcome.COMMIT for _, _, outcome in decision.outcomes
    )


def _empty_message(layout: SchemaLayout) -> bytes:
    """Return the message without rows of a schema, shared by its partitions."""
    found = _empty_messages.get(layout)
    if found is None:
        found = _empty_messages[layout] = empty_message(layout)
    return found
