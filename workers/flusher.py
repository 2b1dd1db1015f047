"""The flusher of one data directory: follows its workers' rings, writes batches to segment files, syncs, and says what is safe.

Owner: segment files and indexes; in shared memory the outcomes and `settled` of each ring it follows, and its partition table.
Invariants: a descriptor's verdict is written before `settled` passes it; the partition table before that; what a consumer may see (the high
    watermark) is on the disk for durability=disk and written for durability=memory.
Crash: killed anywhere, its successor recovers every log from its files and goes on at `settled`; places already decided are kept
(`Ring.plan`),
    and what is found in the files already is not written twice.

Run as `python -P -m workers.flusher`.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shm.assignments import REPLAY, Assignment, LaneKind
from shm.doorbell import Doorbell
from shm.lane import LaneReader
from shm.layout import SlotState, Verdict
from shm.partition_table import PartitionState, PartitionTable
from shm.ring import Descriptor, Ring
from tailrace.protocol.errors import ErrorCode
from workers.files import Files
from workers.partition_log import LogGapError, PartitionLog
from workers.timing_wheel import TimingWheel

logger = logging.getLogger(__name__)

GROUP_DESCRIPTORS_MAX = 1024
GROUP_BYTES_MAX = 16 << 20
FULL_DISK_RETRY_NS = 250_000_000
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def sync_group(logs: Iterable[PartitionLog]) -> list[tuple[PartitionLog, OSError]]:
    """Make what a group wrote durable, file by file; answers the logs whose disk refused. The seam where a wide group will go through a
    journal.
    """
    failed = []
    for log in logs:
        try:
            log.sync()
        except OSError as error:
            failed.append((log, error))
    return failed


@dataclass(slots=True)
class Group:
    """Descriptors taken from a ring and placed, on their way to their verdicts."""

    end: int
    entries: list[tuple[int, PartitionLog | None, Verdict]] = field(default_factory=list)
    touched: dict[int, PartitionLog] = field(default_factory=dict)
    byte_count: int = 0


class Stage:
    """Where the flusher stands in one ring."""

    def __init__(self, ring: Ring, worker: int, translate: Callable[[int], tuple[bytes, int]] | None = None) -> None:
        self.ring = ring
        self.worker = worker
        self.cursor = ring.settled.load()
        self.replay_below = ring.head.load()
        """Descriptors below this may have been placed by a predecessor."""
        self.translate = translate
        """For a ring of an earlier run: slot -> (topic id, partition) as that run's table had it."""
        self.group: Group | None = None
        self.waiting_since_ns = 0


@dataclass(frozen=True, slots=True)
class FlusherSettings:
    linger_ns: int = 0
    batch_bytes: int = 1 << 20


class Flusher:
    """An agent (see `shm.process`)."""

    def __init__(
        self,
        *,
        data_dir: str,
        files: Files,
        table: PartitionTable,
        feed: LaneReader,
        generation: int,
        rings: dict[int, Ring],
        old_rings: list[tuple[Ring, PartitionTable]],
        fronts: list[Doorbell],
        workers: dict[int, Doorbell],
        coordinator: Doorbell,
        settings: FlusherSettings,
        on_ready: Callable[[], None],
        now_us: Callable[[], int],
        start_ns: int,
    ) -> None:
        self._data_dir = data_dir
        self._files = files
        self._table = table
        self._feed = feed
        self._generation = generation
        self._stages = [Stage(ring, worker) for worker, ring in rings.items()]
        self._old = [Stage(ring, -1, self._translator(old_table)) for ring, old_table in old_rings]
        self._fronts = fronts
        self._workers = workers
        self._coordinator = coordinator
        self._settings = settings
        self._on_ready = on_ready
        self._now_us = now_us
        self._logs: dict[int, PartitionLog] = {}
        self._fed = False
        self._ready = False
        self._stopping = False
        self._stalled_until_ns = 0
        self._now_ns = start_ns
        self._wheel: TimingWheel[tuple[int, int, int]] = TimingWheel(start_ns, tick_ns=10_000_000)
        self._age_timers: dict[int, tuple[int, int]] = {}
        """slot -> (base, deadline) of the segment whose age is being watched."""

    @staticmethod
    def _translator(table: PartitionTable) -> Callable[[int], tuple[bytes, int]]:
        def translate(slot: int) -> tuple[bytes, int]:
            state = table.read(slot)
            return state.topic_id, state.partition

        return translate

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        work = self._read_feed()
        if not self._fed:
            return work
        if not self._ready:
            return work + self._recover(now_ns)
        if now_ns < self._stalled_until_ns:
            return work
        for stage in self._stages:
            work += self._follow(stage, now_ns)
        for slot, base, deadline_ns in self._wheel.advance(now_ns):
            work += self._seal_old(slot, base, deadline_ns)
        return work

    def next_deadline_ns(self) -> int | None:
        deadlines = [self._wheel.next_deadline_ns()]
        if any(stage.group is not None for stage in self._stages + self._old) or self._stalled_until_ns:
            deadlines.append(self._stalled_until_ns)
        deadlines += [s.waiting_since_ns + self._settings.linger_ns for s in self._stages if s.waiting_since_ns]
        known = [d for d in deadlines if d]
        return min(known) if known else None

    def begin_stop(self) -> None:
        self._stopping = True

    def is_finished(self) -> bool:
        return not self._ready or all(stage.group is None and stage.cursor == stage.ring.head.load() for stage in self._stages)

    def close(self) -> None:
        """Sync and close every log. Raises OSError."""
        for log in self._logs.values():
            log.close()

    # ---- catalog ---------------------------------------------------------------------------------------------------------------------

    def _read_feed(self) -> int:
        count = 0
        while (message := self._feed.peek()) is not None:
            if message.kind == LaneKind.ASSIGN:
                self._apply(Assignment.decode(message.payload), replay=bool(message.flags & REPLAY))
            elif message.kind == LaneKind.FED and message.correlation_id == self._generation:
                self._fed = True
            self._feed.advance(message)
            self._feed.consume()
            count += 1
        return count

    def _apply(self, assignment: Assignment, *, replay: bool) -> None:
        """Open, change or delete a partition. A disk that refuses makes the partition offline, not the flusher dead."""
        slot = assignment.slot
        log = self._logs.get(slot)
        same = log is not None and log.assignment.topic_id == assignment.topic_id
        if log is not None and same and log.assignment.version > assignment.version:
            return
        reason = ErrorCode.OK
        try:
            if assignment.dropped:
                self._drop(slot, log if same else None, assignment)
                return
            if log is not None and same:
                log.assignment = assignment
                self._age_timers.pop(slot, None)  # segment.ms may be another now
            else:
                log = PartitionLog(self._files, f"{self._data_dir}/{assignment.directory_name}", assignment)
                self._logs[slot] = log
                recovered = log.open(self._data_dir)
                if not replay or recovered.cut_bytes:
                    logger.info(
                        "log_opened topic=%s partition=%d next_offset=%d cut_bytes=%d",
                        assignment.topic,
                        assignment.partition,
                        log.next_offset,
                        recovered.cut_bytes,
                    )
            self._watch_age(slot, log, self._now_ns)
        except OSError as error:
            assert log is not None
            log.refusal = f"cannot open {log.directory}: {error}"
            logger.error("log_open_failed directory=%s error=%r", log.directory, str(error))
            reason = ErrorCode.STORAGE_ERROR
        self._publish(slot, log, reason)

    def _drop(self, slot: int, log: PartitionLog | None, assignment: Assignment) -> None:
        if log is None:
            log = PartitionLog(self._files, f"{self._data_dir}/{assignment.directory_name}", assignment)
        try:
            log.delete()
        finally:
            self._logs.pop(slot, None)
            state = PartitionState(
                assignment.topic_id, assignment.partition, SlotState.DELETED, 0, 0, 0, 0, 0, 0, assignment.version, 0, 0, 0, 0
            )
            self._table.write(slot, state)
        logger.info("log_deleted topic=%s partition=%d", assignment.topic, assignment.partition)

    def _publish(self, slot: int, log: PartitionLog, reason: ErrorCode = ErrorCode.OK) -> None:
        live = log.live
        state = SlotState.OFFLINE_FOR_WRITES if log.refusal else SlotState.ONLINE
        if log.refusal and reason is ErrorCode.OK:
            reason = ErrorCode.PARTITION_OFFLINE
        self._table.write(
            slot,
            PartitionState(
                log.assignment.topic_id, log.assignment.partition, state, log.assignment.leader_epoch, log.log_start_offset, log.high_watermark,
                log.next_offset, live.base if live else (log.segments[-1] if log.segments else 0), live.end if live else 0,
                log.assignment.version, max(0, log.max_timestamp_us), log.size_bytes, reason, live.first_append_us if live else 0,
            ),
        )  # fmt: skip

    # ---- recovery --------------------------------------------------------------------------------------------------------------------

    def _recover(self, now_ns: int) -> int:
        """Drain the rings of an earlier run, then say that the partition table can be trusted."""
        for stage in self._old:
            if stage.group is not None or stage.cursor != stage.ring.head.load():
                return self._follow(stage, now_ns)
        for stage in self._old:
            if stage.replay_below:
                logger.info("ring_drained descriptors=%d", stage.replay_below)
        self._old = []
        for log in self._logs.values():
            log.sync()
        self._ready = True
        self._on_ready()
        return 1

    # ---- following a ring ------------------------------------------------------------------------------------------------------------

    def _follow(self, stage: Stage, now_ns: int) -> int:
        """Take what the ring holds, write it, sync it, settle it."""
        if stage.group is None:
            head = stage.ring.head.load()  # SYNC POINT: head
            if head == stage.cursor or self._lingers(stage, head, now_ns):
                return 0
            stage.group = self._gather(stage, head)
        group = stage.group
        if group is None or not self._finish(stage, group):
            self._stalled_until_ns = now_ns + FULL_DISK_RETRY_NS
            return 0
        self._stalled_until_ns = 0
        stage.group = None
        for slot, log in group.touched.items():
            self._watch_age(slot, log, now_ns)
        return len(group.entries)

    def _lingers(self, stage: Stage, head: int, now_ns: int) -> bool:
        """Whether to wait for a larger group. Not while stopping, not while recovering."""
        if not self._settings.linger_ns or self._stopping or not self._ready:
            return False
        if not stage.waiting_since_ns:
            stage.waiting_since_ns = now_ns
        first, last = stage.ring.descriptor(stage.cursor), stage.ring.descriptor(head - 1)
        gathered = last.position + last.length - first.position
        if gathered < self._settings.batch_bytes and now_ns - stage.waiting_since_ns < self._settings.linger_ns:
            return True
        stage.waiting_since_ns = 0
        return False

    def _gather(self, stage: Stage, head: int) -> Group | None:
        """Place descriptors from the cursor on. None: not even the first can be placed now (disk full)."""
        ring = stage.ring
        group = Group(stage.cursor)
        limit = min(head, stage.cursor + GROUP_DESCRIPTORS_MAX)
        for number in range(stage.cursor, limit):
            descriptor = ring.descriptor(number)
            if descriptor.is_control:
                if group.entries:
                    break  # in order with the data: settle that first
                if stage.translate is None:
                    self._apply(Assignment.decode(ring.bytes_of(descriptor)), replay=False)
                group.entries.append((number, None, Verdict.DURABLE))
                group.end = number + 1
                break
            try:
                entry = self._place(stage, number, descriptor, group)
            except OSError:
                break
            group.entries.append((number, *entry))
            group.end = number + 1
            if group.byte_count >= GROUP_BYTES_MAX:
                break
        return group if group.entries else None

    def _log_of(self, stage: Stage, slot: int) -> PartitionLog | None:
        if stage.translate is None:
            return self._logs.get(slot)
        topic_id, partition = stage.translate(slot)
        log = self._logs.get(slot)
        if log is not None and (log.assignment.topic_id, log.assignment.partition) == (topic_id, partition):
            return log
        return None

    def _place(self, stage: Stage, number: int, descriptor: Descriptor, group: Group) -> tuple[PartitionLog | None, Verdict]:
        """One descriptor into the group. Raises OSError only for a full disk."""
        log = self._log_of(stage, descriptor.slot)
        if descriptor.result or not descriptor.has_bytes:
            failed = log is not None and log.refusal and not descriptor.result
            return None, Verdict.FAILED if failed else Verdict.DURABLE
        if log is None:
            return None, Verdict.DELETED
        if log.refusal:
            return None, Verdict.FAILED
        if descriptor.base_offset < log.next_offset and number < stage.replay_below:
            return log, self._good_verdict(log)  # recovery found it in the file, and synced the file
        planned = stage.ring.outcome(number) if number < stage.replay_below else None
        if planned is not None and planned.verdict is Verdict.NONE:
            planned = None
        try:
            base, position = log.place(
                descriptor.base_offset,
                descriptor.next_offset,
                descriptor.length,
                descriptor.max_timestamp_us,
                descriptor.append_time_us,
                planned,
            )
        except OSError as error:
            if error.errno in _FULL_DISK:
                logger.warning("disk_full directory=%s", log.directory)
                raise
            self._fail(descriptor.slot, log, error)
            return None, Verdict.FAILED
        except LogGapError as error:
            self._fail(descriptor.slot, log, error)
            return None, Verdict.FAILED
        stage.ring.plan(number, base, position)
        log.add_pending(position, stage.ring.bytes_of(descriptor))
        if descriptor.producer_id >= 0:
            log.producers.record(
                descriptor.producer_id, descriptor.producer_epoch, descriptor.base_sequence, descriptor.last_offset_delta,
                descriptor.base_offset, descriptor.next_offset, descriptor.append_time_us,
            )  # fmt: skip
        group.touched[descriptor.slot] = log
        group.byte_count += descriptor.length
        return log, self._good_verdict(log)

    @staticmethod
    def _good_verdict(log: PartitionLog) -> Verdict:
        return Verdict.DURABLE if log.assignment.settings["durability"] == "disk" else Verdict.WRITTEN

    def _fail(self, slot: int, log: PartitionLog, error: Exception) -> None:
        log.refusal = f"{type(error).__name__}: {error}"
        logger.error("partition_offline topic=%s partition=%d error=%r", log.assignment.topic, log.assignment.partition, log.refusal)
        self._publish(slot, log, ErrorCode.STORAGE_ERROR)

    def _finish(self, stage: Stage, group: Group) -> bool:
        """Write, sync, judge, settle. False: the disk is full, try again later; nothing is lost, the bytes are in the ring."""
        for slot, log in group.touched.items():
            try:
                log.write_pending()
            except OSError as error:
                if error.errno in _FULL_DISK:
                    logger.warning("disk_full directory=%s", log.directory)
                    return False
                self._fail(slot, log, error)
        by_log = {id(log): slot for slot, log in group.touched.items()}
        durable = [log for log in group.touched.values() if not log.refusal and log.assignment.settings["durability"] == "disk"]
        for log, refusal in sync_group(durable):
            self._fail(by_log[id(log)], log, refusal)
        for number, entry_log, verdict in group.entries:
            stage.ring.judge(number, Verdict.FAILED if entry_log is not None and entry_log.refusal else verdict)
        for slot, log in group.touched.items():
            if not log.refusal:
                log.high_watermark = log.next_offset
            self._publish(slot, log)
        stage.cursor = group.end
        stage.ring.settled.store(group.end)  # SYNC POINT: settled (verdicts and watermarks before it)
        for bell in self._fronts:
            bell.ring()
        if stage.worker >= 0 and stage.ring.is_crowded():
            self._workers[stage.worker].ring()
        if not group.touched:
            self._coordinator.ring()
        return True

    # ---- age -------------------------------------------------------------------------------------------------------------------------

    def _watch_age(self, slot: int, log: PartitionLog, now_ns: int) -> None:
        """Have the live segment sealed when segment.ms has passed, unless that is arranged already."""
        live = log.live
        if live is None or not live.first_append_us or self._age_timers.get(slot, (-1, 0))[0] == live.base:
            return
        age_ms = max(0, self._now_us() - live.first_append_us) // 1000
        deadline_ns = now_ns + max(0, int(log.assignment.settings["segment.ms"]) - age_ms) * 1_000_000
        self._age_timers[slot] = (live.base, deadline_ns)
        self._wheel.add(deadline_ns, (slot, live.base, deadline_ns))

    def _seal_old(self, slot: int, base: int, deadline_ns: int) -> int:
        """Seal a live segment whose segment.ms has passed, so that readers of sealed segments get at it even when nothing follows."""
        log = self._logs.get(slot)
        if log is None or log.live is None or self._age_timers.get(slot) != (base, deadline_ns) or log.live.base != base or log.refusal:
            return 0
        try:
            log.seal()
        except OSError as error:
            if error.errno not in _FULL_DISK:
                self._fail(slot, log, error)
            return 0
        self._publish(slot, log)
        return 1


def main() -> None:
    """The process."""
    from shm.layout import RegionKind, Role
    from shm.process import configure_logging, run, start
    from shm.region import Region
    from workers.files import DiskFiles

    context = start()
    configure_logging(context)
    spec = context.spec
    settings = spec.settings
    worker_count, front_count = int(settings["workers"]), int(settings["fronts"])
    flusher = Flusher(
        data_dir=spec.data_dirs[spec.index],
        files=DiskFiles(),
        table=context.table(spec.index),
        feed=context.lane_reader("coordinator"),
        generation=spec.generation,
        rings={w: Ring(context.attach(f"ring-{w}", RegionKind.RING)) for w in range(worker_count)},
        old_rings=[
            (
                Ring(Region.attach(old["ring"], RegionKind.RING, context.instance)),
                PartitionTable(Region.attach(old["table"], RegionKind.TABLE, context.instance)),
            )
            for old in spec.recover
        ],
        fronts=[context.bell(Role.FRONT, f) for f in range(front_count)],
        workers={w: context.bell(Role.WORKER, w) for w in range(worker_count)},
        coordinator=context.bell(Role.COORDINATOR, 0),
        settings=FlusherSettings(int(settings["flush.linger_ms"]) * 1_000_000, int(settings["flush.batch_size"])),
        on_ready=context.report_ready,
        now_us=lambda: time.time_ns() // 1000,
        start_ns=time.monotonic_ns(),
    )
    # The coordinator feeds whoever asks: readiness comes only after recovery, so asking has a word of its own.
    context.ask_for_feed()
    run(flusher, context)
    flusher.close()


if __name__ == "__main__":
    main()
