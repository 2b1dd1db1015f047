"""The worker: owns the append order of its partitions. Reads lanes, checks, deduplicates, assigns offsets, publishes in its ring.

Owner: its ring's descriptors, data, `head` and `reclaimed`; the `consumed` words of the lanes that lead to it.
Invariants: one writer per partition; offsets are dense; an answer (also a refusal or a duplicate) is a descriptor, so every answer comes from
    one place and in order; a lane's space is given back only after what was read from it is published.
Crash: everything it knows is derived: the next offset of a partition from the table and the descriptors not yet settled, deduplication from
    snapshot, headers and descriptors, the place to go on in each lane from the last descriptor that came from it. Killed anywhere it
    neither loses nor repeats a batch.

Run as `python -P -m workers.worker`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from shm.assignments import REPLAY, Assignment, LaneKind
from shm.control import ProcessSlot
from shm.crash_points import crash_point
from shm.doorbell import Doorbell
from shm.lane import LaneMessage, LaneReader
from shm.layout import (
    ACKS_LEADER,
    ACKS_MASK,
    FLAG_BYTES,
    FLAG_CLOSED,
    FLAG_CONTROL,
    FLAG_DELIVERED,
    FLAG_DUPLICATE,
    SOURCE_COORDINATOR,
    SOURCE_SCHEDULER,
    Phase,
    ProcessWord,
    RegionKind,
    Role,
    SlotState,
    SlotWord,
)
from shm.partition_table import PartitionTable
from shm.process import ProcessContext, configure_logging, process_name, run, start
from shm.ring import RingWriter
from tailrace.arrow_metadata import SchemaLayout, read_schema
from tailrace.batch_header import (
    ATTRIBUTE_DELAYED,
    BatchChecksumError,
    BatchFormatError,
    BatchHeader,
    checksum_seed,
    header_position,
    stamp_append_time,
    stamp_appended,
    stamp_min_tick,
    verify_batch,
)
from tailrace.delays import NONE_DELIVERED, TICK_BITS, TICK_MASK, TICK_US
from tailrace.partition_file import PARTITION_FILE, PartitionFile
from tailrace.protocol.errors import ErrorCode
from tailrace.structure import UnsafeBatchError, check_structure
from workers.files import DiskFiles, Files, read_whole
from workers.producer_state import Decision, ProducerTable
from workers.recovery import load_live_producers
from workers.timing_wheel import TimingWheel

logger = logging.getLogger(__name__)

LANE_NEWS_BYTES = 64 << 10
"""So much room given back in a lane is news for the front: batches may be waiting for it."""
NO_EPOCH = -1
LANE_QUANTUM = 64
"""Messages taken from one lane before the next has its turn."""
EXPIRY_INTERVAL_NS = 600_000_000_000
BLOCKED_RETRY_NS = 5_000_000
"""How soon a worker whose ring is full looks again, should the ring of who frees space be lost (see `Ring.is_crowded`)."""


@dataclass(slots=True)
class Partition:
    """What the worker knows of one of its partitions."""

    assignment: Assignment
    seed: int
    layout: SchemaLayout
    max_message_bytes: int
    log_append_time: bool
    next_offset: int
    leader_epoch: int = 0
    """The partition table's, when `next_offset` was taken from there. Another one there means that the log's end was decided anew. NO_EPOCH: the log could
    not be opened, and where it ends is not known.
    """
    last_append_us: int = 0
    producers: ProducerTable = field(default_factory=ProducerTable)


LoadProducers = Callable[[Assignment, int], ProducerTable]
"""(partition, next offset) -> what the files tell of its producers up to there."""


class Worker:
    """An agent (see `shm.process`)."""

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
        now_us: Callable[[], int],
    ) -> None:
        """`is_disk_full`: whether a data directory (its number) takes nothing more now."""
        self._ring = ring
        self._lanes = lanes
        self._order = [source for source in lanes if source != SOURCE_COORDINATOR]
        self._tables = tables
        self._slot = slot
        self._generation = generation
        self._is_running = is_running
        self._live_fronts = live_fronts
        self._fronts = fronts
        self._flushers = flushers
        self._load_producers = load_producers
        self._is_disk_full = is_disk_full
        self._producer_expiration_us = producer_expiration_us
        self._now_us = now_us
        self._partitions: dict[int, Partition] = {}
        self._delay_logs: dict[tuple[str, int], Partition] = {}
        """(id of the topic, partition) -> its delay log, which the same worker has."""
        self._fed = False
        self._blocked = False
        self._has_answers = False
        """Whether something was appended that fronts answer as soon as it is published."""
        self._now_ns = 0
        self._turn = 0
        self._refused_count = 0
        self._byte_count = 0
        self._timers: TimingWheel[Callable[[], None]] = TimingWheel(0, tick_ns=1_000_000_000)
        self._timers.add(0, self._expire_producers)
        self._unsettled = self._read_unsettled()

    def _read_unsettled(self) -> dict[int, tuple[int, int, int]]:
        """slot -> (next offset, append time, epoch), from the descriptors that a predecessor published and the table may not show yet."""
        ring = self._ring
        found: dict[int, tuple[int, int, int]] = {}
        for number in range(ring.settled.load(), ring.next_number):
            descriptor = ring.descriptor(number)
            if descriptor.has_bytes and not descriptor.is_control:
                found[descriptor.slot] = descriptor.next_offset, descriptor.append_time_us, descriptor.leader_epoch
        return found

    @staticmethod
    def resume_positions(ring: RingWriter) -> dict[int, int]:
        """source -> lane position behind the last request that a predecessor answered from it."""
        found: dict[int, int] = {}
        for number in range(max(0, ring.next_number - ring.capacity), ring.next_number):
            descriptor = ring.descriptor(number)
            found[descriptor.source_lane] = descriptor.lane_position
        return found

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        if not self._is_running():
            return 0
        ring = self._ring
        ring.reclaim(self._live_fronts())
        self._blocked = False
        work = self._read_lane(SOURCE_COORDINATOR, self._lanes[SOURCE_COORDINATOR])
        if self._fed:
            order = self._order
            for index in range(len(order)):
                source = order[(self._turn + index) % len(order)]
                work += self._read_lane(source, self._lanes[source])
            self._turn += 1
        has_published = ring.publish()
        if has_published:
            crash_point("worker.after_publish")
        freed = max([lane.consume() for lane in self._lanes.values()])  # before the rings: who waits for room in a lane looks once
        if has_published:
            if self._has_answers or freed > LANE_NEWS_BYTES:  # what is only answered when it is durable is the flusher's to announce
                self._has_answers = False
                for bell in self._fronts:  # first: somebody waits for them
                    bell.ring()
            for bell in self._flushers:
                bell.ring()
            self._slot.store(ProcessWord.BYTES_COUNT, self._byte_count)
            self._slot.store(ProcessWord.REFUSED_COUNT, self._refused_count)
        if now_ns >= self._timers.quiet_until_ns:
            for act in self._timers.advance(now_ns):
                act()
        return work

    def _expire_producers(self) -> None:
        self._timers.add(self._now_ns + EXPIRY_INTERVAL_NS, self._expire_producers)
        for partition in self._partitions.values():
            partition.producers.expire(max(self._now_us(), partition.last_append_us) - self._producer_expiration_us)

    def has_more(self) -> bool:
        if self._blocked or not self._is_running():
            return False
        return any(lane.has_more() for source, lane in self._lanes.items() if self._fed or source == SOURCE_COORDINATOR)

    def next_deadline_ns(self) -> int | None:
        if not self._is_running():
            return None  # it is rung when it may begin
        deadline_ns = self._timers.quiet_until_ns
        return min(deadline_ns, self._now_ns + BLOCKED_RETRY_NS) if self._blocked else deadline_ns

    def begin_stop(self) -> None:
        """Nothing to do: fronts have stopped before; what is in the lanes is still appended."""

    def is_finished(self) -> bool:
        return not self._is_running() or not any(lane.has_more() for lane in self._lanes.values())

    # ---- lanes -----------------------------------------------------------------------------------------------------------------------

    def _read_lane(self, source: int, lane: LaneReader) -> int:
        """Take up to a quantum of messages; stops early when the ring is full."""
        count = 0
        while count < LANE_QUANTUM:
            message = lane.peek()
            if message is None:
                break
            if message.kind == LaneKind.PRODUCE:
                taken = self._produce(source, message)
            elif message.kind == LaneKind.ASSIGN:
                taken = self._assign(source, message)
            else:
                taken = True
                if message.kind == LaneKind.FED and message.correlation_id == self._generation:
                    self._fed = True
            if not taken:
                self._blocked = True
                break
            lane.advance(message)
            count += 1
        return count

    def _assign(self, source: int, message: LaneMessage) -> bool:
        """A partition given, changed or taken away. News goes into the ring, in order with the data; a replay does not."""
        assignment = Assignment.decode(message.payload)
        is_news = not message.flags & REPLAY
        position = self._ring.try_reserve(len(message.payload))
        if is_news and position is None:
            return False
        known = self._partitions.get(assignment.slot)
        same = known is not None and known.assignment.topic_id == assignment.topic_id
        if assignment.dropped:
            if same:
                del self._partitions[assignment.slot]
                self._delay_logs.pop((assignment.delay_of, assignment.partition), None)
        elif known is not None and same:
            if assignment.version >= known.assignment.version:
                known.assignment = assignment
                known.max_message_bytes = int(assignment.settings["max.message.bytes"])
                known.log_append_time = assignment.settings["message.timestamp.type"] == "LogAppendTime"
        else:
            opened = self._partitions[assignment.slot] = self._open(assignment, is_news)
            if assignment.delay_of:
                self._delay_logs[assignment.delay_of, assignment.partition] = opened
        if is_news and position is not None:
            self._copy(position, message.payload)
            self._append(position, len(message.payload), message, source, FLAG_CONTROL | FLAG_BYTES, 0, 0, 0)
        return True

    def _open(self, assignment: Assignment, is_new: bool) -> Partition:
        table = self._tables[assignment.data_dir]
        partition = Partition(
            assignment,
            checksum_seed(assignment.topic_id, assignment.partition),
            read_schema(assignment.schema),
            int(assignment.settings["max.message.bytes"]),
            assignment.settings["message.timestamp.type"] == "LogAppendTime",
            next_offset=0,
        )
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
        """Go on at `next_offset`, with what the files and this ring tell of producers."""
        partition.next_offset, partition.leader_epoch = next_offset, leader_epoch
        partition.producers = self._load_producers(partition.assignment, next_offset)
        self._replay_descriptors(partition)

    def _replay_descriptors(self, partition: Partition) -> None:
        """Add what this ring still tells of the partition's producers."""
        slot, next_offset, epoch = partition.assignment.slot, partition.next_offset, partition.leader_epoch
        ring = self._ring
        for number in range(max(0, ring.next_number - ring.capacity), ring.next_number):
            d = ring.descriptor(number)
            mine = d.slot == slot and d.has_bytes and not d.is_control and d.leader_epoch == epoch
            mine = mine and d.next_offset <= next_offset
            if mine and d.flags & FLAG_DELIVERED:
                partition.producers.deliver(d.delay_ordinal, d.delay_position)
            elif mine and d.flags & FLAG_CLOSED:
                partition.producers.close_below(d.delay_ordinal)
            if mine and d.producer_id >= 0:
                partition.producers.record(
                    d.producer_id, d.producer_epoch, d.base_sequence, d.last_offset_delta, d.base_offset, d.next_offset, d.append_time_us
                )

    # ---- appending -------------------------------------------------------------------------------------------------------------------

    def _produce(self, source: int, message: LaneMessage) -> bool:
        """Append, refuse or recognise one batch. False when the ring has no room: the lane waits."""
        batch = message.payload
        length = len(batch)
        position = self._ring.try_reserve(length)
        if position is None:
            return False
        partition = self._partitions.get(message.slot)
        if partition is None:
            return self._refuse(source, message, ErrorCode.UNKNOWN_TOPIC, 0)
        next_offset = partition.next_offset
        epoch = self._tables[partition.assignment.data_dir].load(message.slot, SlotWord.LEADER_EPOCH)
        if epoch != partition.leader_epoch:
            self._on_new_epoch(partition)
        header, code = self._check(partition, batch, source)
        if header is None:
            return self._refuse(source, message, code, next_offset)
        duplicate = False
        if source == SOURCE_SCHEDULER and not self._is_next_delay(partition, header):
            self._look_at_log_end(partition)
            return self._refuse(source, message, ErrorCode.UNKNOWN_SEQUENCE, next_offset, header)
        if header.producer_id >= 0:
            forget_before_us = max(self._now_us(), partition.last_append_us) - self._producer_expiration_us
            verdict = partition.producers.decide(
                header.producer_id, header.producer_epoch, header.base_sequence, header.last_offset_delta, forget_before_us
            )
            if verdict.decision is Decision.REFUSE:
                return self._refuse(source, message, verdict.code, next_offset, header)
            if verdict.original is not None:
                duplicate = True
                self._append(self._ring.tail, 0, message, source, message.flags | FLAG_DUPLICATE, 0, verdict.original.base_offset,
                             verdict.original.next_offset, header, partition, verdict.original.append_time_us)  # fmt: skip
        if not duplicate:
            self._append_batch(partition, header, message, source, position)
        return True

    def _is_next_delay(self, partition: Partition, header: BatchHeader) -> bool:
        """Whether what the scheduler sends is new (it sends again what it has not seen settled), closed in the delay log, and due now."""
        if header.is_control:
            return self._is_next_mark(partition, header)
        if header.attributes & ATTRIBUTE_DELAYED:
            delivered = partition.producers.delivered
            log = self._delay_logs.get((partition.assignment.topic_id.hex(), partition.assignment.partition))
            open_ordinal = log.producers.open_ordinal if log is not None else 0
            if header.min_tick >= open_ordinal or header.min_tick >> TICK_BITS != open_ordinal >> TICK_BITS:
                return False
            if (header.min_tick & TICK_MASK) * TICK_US > self._now_us():
                return False  # the wall clock was set back since it was sent
            return (header.due_us, header.previous_position) == delivered < (header.min_tick, header.delay_position)
        return True

    def _is_next_mark(self, log: Partition, header: BatchHeader) -> bool:
        """Whether it closes more of a delay log; one that begins an epoch of the clock must know all that was delivered before."""
        open_ordinal = log.producers.open_ordinal
        if not log.assignment.delay_of or header.min_tick <= open_ordinal:
            return False
        if header.min_tick >> TICK_BITS == open_ordinal >> TICK_BITS:
            return True
        of = log.assignment.delay_of, log.assignment.partition
        topic = next((p for p in self._partitions.values() if (p.assignment.topic_id.hex(), p.assignment.partition) == of), None)
        if topic is None:
            return False  # it is being deleted: its delay log goes next
        ordinal, position = topic.producers.delivered
        done = (ordinal & TICK_MASK, position) if ordinal >> TICK_BITS == open_ordinal >> TICK_BITS else NONE_DELIVERED
        return (header.due_us, header.delay_position) == done

    def _look_at_log_end(self, partition: Partition) -> None:
        """The scheduler sends again what this worker believes to have appended. If everything is settled and the log ends before that, the disk refused it
        in a way that began no epoch: then the log is right.
        """
        ring, assignment = self._ring, partition.assignment
        if ring.settled.load() != ring.next_number:
            return
        state = self._tables[assignment.data_dir].read(assignment.slot)
        if state.topic_id == assignment.topic_id and state.state is SlotState.ONLINE and state.log_end_offset < partition.next_offset:
            logger.warning(
                "taken_up_behind topic=%s partition=%d from=%d to=%d",
                assignment.topic, assignment.partition, partition.next_offset, state.log_end_offset,
            )  # fmt: skip
            self._take_up(partition, state.log_end_offset, state.leader_epoch)

    def _on_new_epoch(self, partition: Partition) -> None:
        """The flusher has decided the log's end anew (its disk had failed): what this worker appended beyond it was refused."""
        assignment = partition.assignment
        state = self._tables[assignment.data_dir].read(assignment.slot)
        if state.topic_id == assignment.topic_id and state.state is not SlotState.UNREADABLE:
            self._take_up(partition, state.log_end_offset, state.leader_epoch)
            logger.info(
                "epoch_taken_up topic=%s partition=%d epoch=%d next_offset=%d",
                assignment.topic, assignment.partition, state.leader_epoch, state.log_end_offset,
            )  # fmt: skip

    def _check(self, partition: Partition, batch: memoryview, source: int) -> tuple[BatchHeader | None, ErrorCode]:
        """Everything that must hold before a batch may be stored, cheapest first."""
        assignment = partition.assignment
        if (
            len(batch) > partition.max_message_bytes and source != SOURCE_SCHEDULER
        ):  # a delayed record was taken under another limit, perhaps
            return None, ErrorCode.RECORD_TOO_LARGE
        table = self._tables[assignment.data_dir]
        if table.load(assignment.slot, SlotWord.STATE) in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE):
            return None, ErrorCode.PARTITION_OFFLINE
        if self._is_disk_full(assignment.data_dir):
            return None, ErrorCode.DISK_FULL
        try:
            header = verify_batch(batch, partition.seed)
            if header.schema_id != assignment.schema_id:
                return None, ErrorCode.SCHEMA_MISMATCH
            check_structure(batch, header, partition.layout, is_ours=source == SOURCE_SCHEDULER)
        except BatchChecksumError:
            return None, ErrorCode.CORRUPT_BATCH
        except BatchFormatError:
            return None, ErrorCode.UNSUPPORTED_BATCH
        except UnsafeBatchError as error:
            logger.warning("unsafe_batch topic=%s partition=%d reason=%r", assignment.topic, assignment.partition, str(error))
            return None, ErrorCode.UNSAFE_BATCH
        return header, ErrorCode.OK

    def _append_batch(self, partition: Partition, header: BatchHeader, message: LaneMessage, source: int, position: int) -> None:
        batch = message.payload
        append_us = partition.last_append_us = max(self._now_us(), partition.last_append_us)
        base_offset = partition.next_offset
        next_offset = base_offset + header.last_offset_delta + 1
        target = self._copy(position, batch)
        at = header_position(target)
        table = self._tables[partition.assignment.data_dir]
        flags = message.flags | FLAG_BYTES
        if header.is_control:
            flags |= FLAG_CLOSED
            partition.producers.close_below(header.min_tick)
        elif header.attributes & ATTRIBUTE_DELAYED:
            flags |= FLAG_DELIVERED
            partition.producers.deliver(header.min_tick, header.delay_position)
        elif partition.assignment.delay_of:
            stamp_min_tick(target, at, header, partition.producers.open_ordinal)
        if partition.log_append_time and not header.is_control:
            stamp_append_time(target, at, header, append_us)
        stamp_appended(
            target, at, header, base_offset=base_offset, append_time_us=append_us, leader_epoch=partition.leader_epoch,
            durable_offset=table.load(partition.assignment.slot, SlotWord.HIGH_WATERMARK), seed=partition.seed,
        )  # fmt: skip
        crash_point("worker.after_copy")
        self._append(position, len(batch), message, source, flags, 0, base_offset, next_offset, header, partition, append_us)
        if header.producer_id >= 0:
            partition.producers.record(
                header.producer_id,
                header.producer_epoch,
                header.base_sequence,
                header.last_offset_delta,
                base_offset,
                next_offset,
                append_us,
            )
        partition.next_offset = next_offset
        self._byte_count += len(batch)

    def _copy(self, position: int, payload: memoryview) -> memoryview:
        ring = self._ring
        index = position % ring.ring_bytes
        target = ring.data[index : index + len(payload)]
        target[:] = payload
        return target

    def _refuse(self, source: int, message: LaneMessage, code: ErrorCode, next_offset: int, header: BatchHeader | None = None) -> bool:
        self._refused_count += 1
        self._append(self._ring.tail, 0, message, source, message.flags, code, next_offset, next_offset, header)
        return True

    def _append(
        self, position: int, length: int, message: LaneMessage, source: int, flags: int, result: int, base_offset: int, next_offset: int,
        header: BatchHeader | None = None, partition: Partition | None = None, append_time_us: int = 0,
    ) -> None:  # fmt: skip
        self._has_answers = self._has_answers or result != 0 or flags & ACKS_MASK == ACKS_LEADER
        self._ring.append(
            position, length, message.slot, base_offset, next_offset, message.session, message.correlation_id, message.next_position, flags,
            source, result,
            header.producer_id if header else -1, header.base_sequence if header else -1, header.producer_epoch if header else -1,
            header.last_offset_delta if header else 0, partition.leader_epoch if partition else 0, append_time_us,
            header.max_timestamp_us if header else 0,
            *((header.min_tick, header.delay_position) if header and flags & (FLAG_CLOSED | FLAG_DELIVERED) else (0, 0)),
        )  # fmt: skip


def load_producers(files: Files, data_dir: str, assignment: Assignment, end_offset: int) -> ProducerTable:
    """What a partition's files tell of its producers, up to `end_offset`; nothing where they are not this topic's. Raises OSError."""
    directory = f"{data_dir}/{assignment.directory_name}"
    path = f"{directory}/{PARTITION_FILE}"
    known = PartitionFile.decode(read_whole(files, path)) if files.exists(path) else None
    if known is None or known.topic_id != assignment.topic_id:
        return ProducerTable()
    return load_live_producers(files, directory, known, end_offset)


def build(context: ProcessContext, files: Files) -> Worker:
    """The worker of this specification; it has asked to be fed."""
    spec, control, clock = context.spec, context.control, context.clock
    front_count = int(spec.settings["fronts"])
    ring = RingWriter(context.attach(f"ring-{spec.index}", RegionKind.RING))
    resume = Worker.resume_positions(ring)
    lanes = {front: context.lane_reader(process_name(Role.FRONT, front), resume.get(front, 0)) for front in range(front_count)}
    lanes[SOURCE_SCHEDULER] = context.lane_reader(process_name(Role.SCHEDULER, 0), resume.get(SOURCE_SCHEDULER, 0))
    lanes[SOURCE_COORDINATOR] = context.lane_reader("coordinator", resume.get(SOURCE_COORDINATOR, 0))
    fronts = [control.process(Role.FRONT, f) for f in range(front_count)]
    flushers = [control.process(Role.FLUSHER, d) for d in range(len(spec.data_dirs))]

    def load(assignment: Assignment, end_offset: int) -> ProducerTable:
        return load_producers(files, spec.data_dirs[assignment.data_dir], assignment, end_offset)

    worker = Worker(
        ring=ring,
        lanes=lanes,
        tables=[context.table(d) for d in range(len(spec.data_dirs))],
        slot=context.slot,
        generation=spec.generation,
        is_running=lambda: control.phase is not Phase.RECOVERING,
        live_fronts=lambda: [f for f, slot in enumerate(fronts) if slot.is_live()],
        fronts=[context.bell(Role.FRONT, f) for f in range(front_count)],
        flushers=[context.bell(Role.FLUSHER, d) for d in range(len(spec.data_dirs))],
        load_producers=load,
        is_disk_full=lambda d: bool(flushers[d].load(ProcessWord.DISK_FULL)),
        producer_expiration_us=int(spec.settings["producer.id.expiration.ms"]) * 1000,
        now_us=clock.wall_us,
    )
    context.report_ready()
    context.ask_for_feed()
    return worker


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
    run(build(context, DiskFiles()), context)


if __name__ == "__main__":
    main()
