"""Worker process: owns the append order of its partitions.

It reads lanes, has batches appended (`workers.append.batch_appender`), and publishes its ring.

Owner: its ring's descriptors, data, `producer_position` and `reclaimed`; the `consumer_position` of
the lanes to it.

Invariants:
- A partition has one writer, and its offsets are dense.
- Every request, also a refused one or a duplicate, gets a descriptor. Acks come from one place and
  in order.
- Lane space is released only after its messages are published.
- A message that fails unexpectedly changes nothing, gets INTERNAL_ERROR, and is not read again.
- A failure after the descriptor was written ends the process, because memory no longer follows from
  the ring.
- Without transactions a step costs one look at one word more (`_transactions`).

Crash: all of its state is derived, and no batch is lost or repeated.
- Next offset of a partition: from the table and the unsettled descriptors.
- Deduplication: from snapshot, batch headers and descriptors.
- Lane positions: from the last descriptor of each lane.

Run it with `python -P -m workers.append.worker`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shm.crash_points import crash_point
from shm.memory.layout import (
    FLAG_BYTES,
    FLAG_CONTROL,
    SOURCE_CONTROLLER,
    SOURCE_GROUPS,
    SOURCE_SCHEDULER,
    Phase,
    ProcessWord,
    RegionKind,
    Role,
)
from shm.messages.lane_messages import REPLAY, Assignment, LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneMessage, LaneReader, LaneWriter
from shm.queues.ring import RingWriter
from shm.runtime.agent_runner import ProcessContext, configure_logging, process_name, run, start
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.timing_wheel import TimingWheel
from shm.tables.control import ProcessSlot
from shm.tables.partition_table import PartitionTable
from tailrace.core.error_codes import ErrorCode
from workers.append.batch_appender import BatchAppender
from workers.append.partitions import LoadProducers, Partitions
from workers.log.producers.producer_snapshots import load_producers
from workers.log.producers.producer_state import ProducerTable
from workers.log.retention.wall_clock_jumps import WallJumps, follow
from workers.segment.files import DiskFiles, Files

if TYPE_CHECKING:
    from workers.append.transactions import Transactions

logger = logging.getLogger(__name__)

LANE_FREED_BYTES = 64 << 10
"""Lane bytes released in one step above which the fronts are rung: batches may wait for them."""
LANE_QUANTUM = 64
"""Messages taken from one lane before the next lane's turn."""
EXPIRY_INTERVAL_NS = 600_000_000_000
EPOCHS_INTERVAL_NS = 10_000_000_000
"""Interval of looking for partitions whose log's end has changed and to which nothing is appended.
"""
BLOCKED_RETRY_NS = 5_000_000
"""Retry interval of a worker with a full ring, if the doorbell of the process that frees space is
lost (see `Ring.is_crowded`).
"""


ConnectCoordinator = Callable[[int], tuple[LaneReader, LaneWriter, Doorbell]]
"""Lane position to resume at -> the lanes from and to the transaction coordinator, and its
doorbell.
"""


class Worker:
    """Agent of the worker process (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        *,
        ring: RingWriter,
        lanes: dict[int, LaneReader],
        tables: list[PartitionTable],
        slot: ProcessSlot,
        generation: int,
        is_running: Callable[[], bool],
        live_fronts: Callable[[], list[int]],
        fronts: list[Doorbell],
        flushers: list[Doorbell],
        load_producers: LoadProducers,
        is_disk_full: Callable[[int], bool],
        producer_expiration_us: int,
        producer_ids_max: int,
        now_us: Callable[[], int],
        connect_coordinator: ConnectCoordinator,
        request_coordinator: Callable[[], None],
    ) -> None:
        """`is_disk_full` returns True if a data directory (by number) accepts no batches now.
        `request_coordinator` asks for the lanes to the transaction coordinator.
        """
        self._ring = ring
        self._lanes = lanes
        self._order = [source for source in lanes if source != SOURCE_CONTROLLER]
        self._every_lane = list(lanes.values())
        self._tables = tables
        self._bytes_word, self._refused_word = (
            slot.cell(ProcessWord.BYTES_COUNT),
            slot.cell(ProcessWord.REFUSED_COUNT),
        )
        self._has_lanes = slot.cell(ProcessWord.TRANSACTION_LANES)
        self._connect_coordinator = connect_coordinator
        self._request_coordinator = request_coordinator
        self._transactions: Transactions | None = None
        """None until the lanes to the transaction coordinator exist."""
        self._generation = generation
        self._has_recovered = is_running
        self._is_running = False
        """True once recovery has ended."""
        self._live_fronts = live_fronts
        self._fronts = fronts
        self._flushers = flushers
        self._now_us = now_us
        self._error_handler = CountedErrorHandler(slot)
        self._opened = Partitions(ring, tables, load_producers, self._error_handler)
        self._partitions = self._opened.by_slot
        self._appender = BatchAppender(
            ring=ring, lanes=lanes.values(), tables=tables, partitions=self._opened,
            error_handler=self._error_handler, is_disk_full=is_disk_full,
            producer_expiration_us=producer_expiration_us, producer_ids_max=producer_ids_max,
            now_us=now_us,
        )  # fmt: skip
        self._fed = False
        self._now_ns = 0
        self._rotation = 0
        self._timers: TimingWheel[Callable[[], None]] = TimingWheel(0, tick_ns=1_000_000_000)
        self._timers.add(0, self._expire_producers)
        self._timers.add(0, self._take_up_new_epochs)

    @staticmethod
    def resume_positions(ring: RingWriter) -> dict[int, int]:
        """Return the lane position after the last published request, by source lane."""
        found: dict[int, int] = {}
        for number in range(max(0, ring.next_number - ring.capacity), ring.next_number):
            descriptor = ring.descriptor(number)
            found[descriptor.source_lane] = descriptor.lane_position
        return found

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance."""
        self._appender.producer_expiration_us = int(settings["producer.id.expiration.ms"]) * 1000
        self._appender.producer_ids_max = int(settings["producer.ids.max"])

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = self._appender.now_ns = now_ns
        if not self._runs():
            return 0
        ring, appender = self._ring, self._appender
        ring.reclaim(self._live_fronts())
        appender.is_blocked = False
        transactions = self._transactions
        if transactions is None and self._has_lanes.load():
            transactions = self._connect_transactions()
        if transactions is not None:
            transactions.begin_step(now_ns)
        work = self._read_lane(SOURCE_CONTROLLER, self._lanes[SOURCE_CONTROLLER])
        if self._opened.arriving:
            work += self._opened.take_up_arrived()
        if work and transactions is None:
            self._request_coordinator_for_open()
        if self._fed:
            if transactions is not None:
                work += self._read_lane(SOURCE_GROUPS, transactions.lane)
            order = self._order
            for index in range(len(order)):
                if transactions is not None and transactions.is_full:
                    break
                source = order[(self._rotation + index) % len(order)]
                work += self._read_lane(source, self._lanes[source])
            self._rotation += 1
        has_published = ring.commit()
        if has_published:
            crash_point("worker.after_publish")
        # before ringing: a process that waits for lane space checks once
        freed = max([lane.consume() for lane in self._every_lane])
        if has_published:
            # the flusher announces acks that wait for durability
            if appender.has_replies or freed > LANE_FREED_BYTES:
                appender.has_replies = False
                for bell in self._fronts:  # first: producers wait for their acks
                    bell.ring()
            for bell in self._flushers:
                bell.ring()
            self._bytes_word.store(appender.byte_count)
            self._refused_word.store(appender.refused_count)
        if transactions is not None:
            transactions.end_step()
        if now_ns >= self._timers.quiet_until_ns:
            for task in self._timers.advance(now_ns):
                task()
        return work

    def _connect_transactions(self) -> Transactions:
        # imported now: most appliances never use a transaction
        from workers.append.coordinator_reports import CoordinatorReports
        from workers.append.transactions import Transactions

        lane, writer, bell = self._connect_coordinator(
            self.resume_positions(self._ring).get(SOURCE_GROUPS, 0)
        )
        self._lanes[SOURCE_GROUPS] = lane
        self._every_lane.append(lane)
        self._transactions = self._appender.transactions = Transactions(
            ring=self._ring,
            lane=lane,
            reports=CoordinatorReports(writer, bell, self._generation),
            partitions=self._opened,
            tables=self._tables,
            generation=self._generation,
            now_us=self._now_us,
            error_handler=self._error_handler,
        )
        return self._transactions

    def _runs(self) -> bool:
        self._is_running = self._is_running or self._has_recovered()
        return self._is_running

    def _expire_producers(self) -> None:
        self._timers.add(self._now_ns + EXPIRY_INTERVAL_NS, self._expire_producers)
        self._opened.expire_producers(self._now_us(), self._appender.producer_expiration_us)

    def _take_up_new_epochs(self) -> None:
        self._timers.add(self._now_ns + EPOCHS_INTERVAL_NS, self._take_up_new_epochs)
        if self._opened.take_up_new_epochs() and self._transactions is None:
            self._request_coordinator_for_open()

    def _request_coordinator_for_open(self) -> None:
        """Request the lanes to the transaction coordinator if a transaction is open."""
        if len(self._opened.open_transactions):
            self._request_coordinator()

    def has_more(self) -> bool:
        if self._appender.is_blocked or not self._runs():
            return False
        if not self._fed:
            return self._lanes[SOURCE_CONTROLLER].has_more()
        # a list costs less than a generator
        return any([lane.has_more() for lane in self._every_lane])  # noqa: C419

    def next_deadline_ns(self) -> int | None:
        if not self._runs():
            return None  # a ring announces the end of recovery
        deadline_ns = self._timers.quiet_until_ns
        if self._transactions is not None:
            deadline_ns = min(deadline_ns, self._transactions.next_deadline_ns() or deadline_ns)
        if self._opened.arriving:
            deadline_ns = min(deadline_ns, self._now_ns + BLOCKED_RETRY_NS)
        return (
            min(deadline_ns, self._now_ns + BLOCKED_RETRY_NS)
            if self._appender.is_blocked
            else deadline_ns
        )

    def begin_stop(self) -> None:
        """Do nothing: fronts stop first, and batches in the lanes are still appended."""

    def is_finished(self) -> bool:
        return not self._runs() or not any(lane.has_more() for lane in self._lanes.values())

    # ---- lanes -----------------------------------------------------------------------------------

    def _read_lane(self, source: int, lane: LaneReader) -> int:
        """Take up to LANE_QUANTUM messages. Stop early when the ring is full."""
        count = 0
        while count < LANE_QUANTUM and lane.has_more():
            count += self._appender.append_plain(source, lane, LANE_QUANTUM - count)
            message = lane.peek() if count < LANE_QUANTUM else None
            if message is None:
                break
            published = self._ring.next_number
            try:
                taken = self._take(source, message)
            except Exception as error:
                if self._ring.next_number != published:
                    raise
                self._fail(source, message, error)
                taken = True
            if not taken and self._appender.must_read_decisions and self._transactions is not None:
                self._appender.must_read_decisions = False
                count += self._read_lane(SOURCE_GROUPS, self._transactions.lane)
                if self._transactions.is_full:
                    break
                continue
            if not taken:
                self._appender.is_blocked = True
                break
            lane.advance(message)
            count += 1
        return count

    def _take(self, source: int, message: LaneMessage) -> bool:
        """Handle one message. Return False if the ring has no space and the lane must wait. An
        exception means that nothing was changed.
        """
        if message.kind in (LaneKind.PRODUCE, LaneKind.PRODUCE_OWNED):
            return self._appender.append(source, message)
        if source == SOURCE_GROUPS and self._transactions is not None:
            return self._transactions.take(message)
        if message.kind == LaneKind.ASSIGN:
            return self._assign(source, message)
        if message.kind == LaneKind.FED and message.correlation_id == self._generation:
            self._fed = True
        return True

    def _fail(self, source: int, message: LaneMessage, error: Exception) -> None:
        """Log and count a message whose handling failed, and refuse it if it is a batch. A
        descriptor fits: nothing raises before that is known.
        """
        self._error_handler.on_error(
            f"kind={message.kind} source={source} slot={message.slot} session={message.session} "
            f"bytes={len(message.payload)}",
            error,
        )
        if message.kind in (LaneKind.PRODUCE, LaneKind.PRODUCE_OWNED):
            partition = self._partitions.get(message.slot)
            self._appender.refuse(
                source, message, ErrorCode.INTERNAL_ERROR, partition.next_offset if partition else 0
            )

    def _assign(self, source: int, message: LaneMessage) -> bool:
        """Open, change or remove a partition.

        A change is copied into the ring, in order with the data, even if this worker cannot open
        it: the flusher checks for itself. A replay is not copied.
        """
        is_change = not message.flags & REPLAY
        assignment = Assignment.decode(message.payload)
        if assignment.dropped and assignment.binned:
            if not self._fed:
                return True  # the controller repeats it behind the feed
            if not self._end_transactions(assignment):
                return False
        position = self._ring.try_claim(len(message.payload))
        if is_change and position is None:
            return False
        self._opened.assign(assignment, self._now_ns)
        if is_change and position is not None:
            self._appender.copy(position, message.payload)
            self._appender.write_descriptor(
                position, len(message.payload), message, source, FLAG_CONTROL | FLAG_BYTES, 0, 0, 0
            )
        return True

    def _end_transactions(self, assignment: Assignment) -> bool:
        """Abort what is open in a partition that goes to the bin, so that its log is decided when
        it comes back. Return False while that has to wait.

        Markers of transactions that were decided before the deletion must lie before it. Their
        decisions are in the coordinator's lane, which is read first
        (`BatchAppender.must_read_decisions`).
        """
        partition = self._partitions.get(assignment.slot)
        if (
            partition is None
            or partition.assignment.topic_id != assignment.topic_id
            or not len(partition.producers.transactions)
        ):
            return True
        transactions = self._transactions
        if transactions is None:
            self._request_coordinator()
            return False
        if not transactions.is_fed:
            return False
        if transactions.lane.has_more():
            self._appender.must_read_decisions = not self._appender.is_blocked
            return False
        return transactions.end_all(assignment.slot)


def build(context: ProcessContext, files: Files) -> Worker:
    """Build the worker of this process and request its feed from the controller."""
    spec, control, clock = context.spec, context.control, context.clock
    front_count = int(spec.settings["fronts"])
    ring = RingWriter(context.attach(f"ring-{spec.index}", RegionKind.RING))
    resume = Worker.resume_positions(ring)
    lanes = {
        front: context.lane_reader(process_name(Role.FRONT, front), resume.get(front, 0))
        for front in range(front_count)
    }
    lanes[SOURCE_SCHEDULER] = context.lane_reader(
        process_name(Role.SCHEDULER, 0), resume.get(SOURCE_SCHEDULER, 0)
    )
    lanes[SOURCE_CONTROLLER] = context.lane_reader("controller", resume.get(SOURCE_CONTROLLER, 0))
    # Words read in each step are looked up once.
    live = [
        (front, control.process(Role.FRONT, front).cell(ProcessWord.LIVE))
        for front in range(front_count)
    ]
    full = [
        control.process(Role.FLUSHER, data_dir).cell(ProcessWord.DISK_FULL)
        for data_dir in range(len(spec.data_dirs))
    ]

    def connect_coordinator(resume_at: int) -> tuple[LaneReader, LaneWriter, Doorbell]:
        name = process_name(Role.GROUPS, 0)
        return (
            context.lane_reader(name, resume_at),
            context.lane_writer(name),
            context.bell(Role.GROUPS, 0),
        )

    def request_coordinator() -> None:
        if not context.slot.load(ProcessWord.TRANSACTIONS_REQUESTED):
            context.slot.store(ProcessWord.TRANSACTIONS_REQUESTED, 1)
            context.bell(Role.SUPERVISOR, 0).ring()

    worker = Worker(
        ring=ring,
        lanes=lanes,
        tables=[context.table(d) for d in range(len(spec.data_dirs))],
        slot=context.slot,
        generation=spec.generation,
        is_running=lambda: control.phase is not Phase.RECOVERING,
        live_fronts=lambda: [front for front, word in live if word.load()],
        fronts=[context.bell(Role.FRONT, f) for f in range(front_count)],
        flushers=[context.bell(Role.FLUSHER, d) for d in range(len(spec.data_dirs))],
        load_producers=_producer_loader(context, files),
        is_disk_full=lambda data_dir: bool(full[data_dir].load()),
        producer_expiration_us=int(spec.settings["producer.id.expiration.ms"]) * 1000,
        producer_ids_max=int(spec.settings["producer.ids.max"]),
        now_us=clock.wall_us,
        connect_coordinator=connect_coordinator,
        request_coordinator=request_coordinator,
    )
    context.report_ready()
    context.ask_for_feed()
    return worker


def _producer_loader(context: ProcessContext, files: Files) -> LoadProducers:
    """A function that loads the producers of a partition up to an offset."""
    data_dirs, clock = context.spec.data_dirs, context.clock
    moved = [
        follow(
            WallJumps(files, data_dir, clock.wall_us(), clock.monotonic_ns()),
            clock.wall_us,
            clock.monotonic_ns,
        )
        for data_dir in data_dirs
    ]

    def load(assignment: Assignment, end_offset: int) -> ProducerTable:
        data_dir = assignment.data_dir
        return load_producers(files, data_dirs[data_dir], assignment, end_offset, moved[data_dir])

    return load


def main() -> None:
    """Run the worker process."""
    context = start()
    configure_logging(context)
    worker = build(context, DiskFiles())
    run(worker, context, apply=worker.apply_settings)


if __name__ == "__main__":
    main()
