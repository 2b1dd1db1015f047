"""The flusher of one data directory: follows its workers' rings, writes batches to segment files, makes them durable, and says what is safe.

Owner: segment files, indexes, checkpoints and the journal; in shared memory the outcomes and `settled` of each ring it follows, and its partition table.
Invariants: a descriptor's verdict is written before `settled` passes it; the partition table before that; what a consumer may see (the high
    watermark) is on the disk for durability=disk and written for durability=memory.
Crash: killed anywhere, its successor recovers every log from its files and goes on at `settled`; what is found in the files already is made dirty and synced
    again, not appended twice.

Run as `python -P -m workers.flusher`.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import orjson

from shm.assignments import REPLAY, Assignment, LaneKind
from shm.boundary import Boundary
from shm.control import ProcessSlot
from shm.crash_points import crash_point
from shm.doorbell import Doorbell
from shm.lane import LaneReader
from shm.layout import FLAG_CLOSED, FLAG_DELIVERED, ProcessWord, RegionKind, Role, SlotState, Verdict
from shm.partition_table import PartitionState, PartitionTable
from shm.process import EXIT_DATA_UNUSABLE, ProcessContext, configure_logging, run, start
from shm.ring import Descriptor, Ring
from tailrace.protocol.errors import ErrorCode
from workers.disk_space import DiskSpace
from workers.files import NO_SPACE, DiskFiles, Files, is_shortage
from workers.group_commit import GroupCommit
from workers.housekeeping import Act, Housekeeping
from workers.journal import Journal
from workers.log_set import LogSet, RunFacts
from workers.partition_log import LogGapError, PartitionLog, PendingBatch
from workers.timing_wheel import Timer, TimingWheel

logger = logging.getLogger(__name__)

GROUP_DESCRIPTORS_MAX = 1024
GROUP_BYTES_MAX = 16 << 20
FULL_DISK_RETRY_NS = 250_000_000


@dataclass(slots=True)
class Group:
    """Descriptors taken from a ring and placed, on their way to their verdicts."""

    end: int
    entries: list[tuple[int, PartitionLog | None, Verdict]] = field(default_factory=list)
    touched: dict[int, PartitionLog] = field(default_factory=dict)
    placed: dict[int, list[int]] = field(default_factory=dict)
    """slot -> numbers of the descriptors whose batches are in the log's group, in order."""
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
        self.linger: Timer[Act] | None = None
        """Runs while more is waited for than the ring holds."""
        self.has_lingered = False
        self.given_up = {Verdict.DELETED: 0, Verdict.FAILED: 0}
        """Batches that were not written: of topics that are gone, of logs whose disk had refused what came before."""

    def end_linger(self) -> int:
        """The timer's act."""
        self.has_lingered = True
        return 1


@dataclass(frozen=True, slots=True)
class FlusherSettings:
    linger_ns: int = 0
    batch_bytes: int = 1 << 20
    checkpoint_bytes: int = 64 << 20
    journal_bytes: int = 64 << 20
    reserve_bytes: int = 0


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
        facts: RunFacts,
        rings: dict[int, Ring],
        old_rings: list[tuple[Ring, PartitionTable]],
        fronts: list[Doorbell],
        workers: dict[int, Doorbell],
        connect_worker: Callable[[int], tuple[Ring, Doorbell]],
        coordinator: Doorbell,
        scheduler: Doorbell,
        slot: ProcessSlot,
        settings: FlusherSettings,
        on_ready: Callable[[], None],
        now_us: Callable[[], int],
        start_ns: int,
    ) -> None:
        self._data_dir = data_dir
        self._files = files
        self._feed = feed
        self._generation = generation
        self._stages = [Stage(ring, worker) for worker, ring in rings.items()]
        self._old = [Stage(ring, -1, _translator(old_table)) for ring, old_table in old_rings]
        self._fronts = fronts
        self._workers = workers
        self._connect_worker = connect_worker
        self._coordinator = coordinator
        self._scheduler = scheduler
        self._slot = slot
        self._boundary = Boundary(slot)
        self._table = table
        self._settings = settings
        self._on_ready = on_ready
        self._space = DiskSpace(files, data_dir, settings.reserve_bytes)
        self._journal = Journal(files, data_dir, settings.journal_bytes)
        self._logs = LogSet(files, data_dir, table, facts)
        self._logs.journaled = self._journal.find()
        self._logs.is_draining = bool(old_rings)
        self._note_rings(table, old_rings)
        self._commit = GroupCommit(self._journal, self._logs.take_offline, self._on_moved)
        self._placing: tuple[Stage, Group] | None = None
        self._fed = False
        self._has_chores = True
        """Whether there may be something to tidy up."""
        self._ready = False
        self._stopping = False
        self._stalled_until_ns = 0
        self._shortage: OSError | None = None
        """What the host was short of when a group could not be placed."""
        self._is_short = False
        """Whether writing waits for descriptors or memory."""
        self._open_again_ns = 0
        self._now_ns = start_ns
        self._wheel: TimingWheel[Act] = TimingWheel(start_ns, tick_ns=100_000)
        self._housekeeping = Housekeeping(self._logs, self._commit, self._wheel, now_us, start_ns)

    def _note_rings(self, table: PartitionTable, old_rings: list[tuple[Ring, PartitionTable]]) -> None:
        """What rings hold, and what tables of an earlier run showed: recovery tells a torn tail from corruption by it."""
        found: dict[tuple[bytes, int], set[int]] = {}
        for stage in self._stages + self._old:
            translate = stage.translate or _translator(table)
            for number in range(stage.cursor, stage.ring.head.load()):
                descriptor = stage.ring.descriptor(number)
                if descriptor.has_bytes and not descriptor.is_control:
                    found.setdefault(translate(descriptor.slot), set()).add(descriptor.base_offset)
        self._logs.in_rings = {key: frozenset(offsets) for key, offsets in found.items()}
        for shown in [table, *(old_table for _, old_table in old_rings)]:
            for state in shown.all():
                key = (state.topic_id, state.partition)
                self._logs.watermarks[key] = max(self._logs.watermarks.get(key, 0), state.high_watermark)

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        work = self._read_feed()
        if not self._fed:
            return work
        if not self._ready:
            return work + (self._open_waiting(now_ns) if self._logs.waiting else self._recover(now_ns))
        if self._logs.waiting:
            work += self._open_waiting(now_ns)
        if self._space.is_due(now_ns) and (self._space.is_full or work or self._has_input()) and self._space.check(now_ns):
            self._show_space()
        if now_ns < self._stalled_until_ns:
            return work
        if now_ns >= self._wheel.quiet_until_ns:
            work += self._housekeeping.advance(now_ns)
        for stage in self._stages:
            work += self._follow(stage, now_ns)
        if work:
            return work
        tidied = self._tidy()
        self._has_chores = bool(tidied)
        return tidied

    def has_more(self) -> bool:
        if not self._ready or self._has_chores:
            return True
        if self._stalled_until_ns:
            return False
        return any(stage.linger is None and stage.cursor != stage.ring.head.load() for stage in self._stages)

    def next_deadline_ns(self) -> int | None:
        deadlines = [self._wheel.next_deadline_ns(), self._space.next_check_ns]
        if any(stage.group is not None for stage in self._stages + self._old) or self._stalled_until_ns:
            deadlines.append(self._stalled_until_ns)
        if self._logs.waiting:
            deadlines.append(self._open_again_ns)
        known = [d for d in deadlines if d]
        return min(known) if known else None

    def begin_stop(self) -> None:
        self._stopping = True

    def is_finished(self) -> bool:
        return not self._ready or not self._has_input()

    def _has_input(self) -> bool:
        return any(stage.group is not None or stage.cursor != stage.ring.head.load() for stage in self._stages)

    def close(self) -> None:
        """Sync and close every log."""
        self._commit.sync_all(self._logs.all())
        for log in self._logs.all():
            try:
                log.close()
            except OSError as error:
                logger.error("log_not_closed directory=%s error=%r", log.directory, str(error))
        self._journal.close()

    def _tidy(self) -> int:
        """When there is nothing else to do, and only until it is done: the journal's zeroes, indexes that nobody has looked at."""
        if self._commit.wants_journal and len(self._logs) > 1:
            return int(self._commit.prepare_journal())
        for log in self._logs.all():
            if log.unscrubbed and not log.group:
                try:
                    log.scrub_one_index()
                    self._housekeeping.retain(log)  # it may know a segment's age only now
                except OSError as error:
                    logger.warning("index_not_looked_at directory=%s error=%r", log.directory, str(error))
                return 1
        return 0

    # ---- catalog ---------------------------------------------------------------------------------------------------------------------

    def _read_feed(self) -> int:
        count = 0
        while (message := self._feed.peek()) is not None:
            payload = bytes(message.payload)
            self._feed.advance(message)
            self._feed.consume()
            count += 1
            if message.kind == LaneKind.ASSIGN:
                self._apply_safely(payload, replay=bool(message.flags & REPLAY))
                continue
            try:
                if message.kind == LaneKind.LEASE:
                    self._housekeeping.leases.tell(orjson.loads(payload), self._now_ns)
                    self._coordinator.ring()  # it answers when this is taken
                elif message.kind == LaneKind.FOLLOW:
                    self._follow_worker(message.slot)
                elif message.kind == LaneKind.FED and message.correlation_id == self._generation:
                    self._fed = True
            except Exception as error:
                self._boundary.caught(f"kind={message.kind} slot={message.slot} bytes={len(payload)}", error)
        return count

    def _apply_safely(self, payload: bytes | memoryview, *, replay: bool) -> None:
        """A partition given, changed or taken away; if that fails in a way that nobody expected, its log takes no writes, and the others go on."""
        assignment: Assignment | None = None
        try:
            assignment = Assignment.decode(payload)
            self._apply(assignment, replay=replay)
        except Exception as error:
            what = f"topic={assignment.topic} partition={assignment.partition}" if assignment else f"assignment_bytes={len(payload)}"
            sentence = self._boundary.caught(what, error)
            if assignment is not None:
                self._show_failed(assignment, sentence)

    def _show_failed(self, assignment: Assignment, sentence: str) -> None:
        """What the coordinator waits for has been looked at; a log that is not open is not there."""
        log = self._logs.get(assignment.slot)
        if log is not None and not log.is_open and not log.refusal:
            log.refusal = sentence
        shown = self._table.read(assignment.slot)
        if shown.topic_id != assignment.topic_id:
            shown = PartitionState.empty(assignment.topic_id, assignment.partition, SlotState.UNREADABLE, 0)._replace(
                reason=ErrorCode.INTERNAL_ERROR
            )
        self._table.write(assignment.slot, shown._replace(applied_version=assignment.version))

    def _follow_worker(self, worker: int) -> None:
        """A dedicated worker has a ring now."""
        if worker not in self._workers:
            ring, bell = self._connect_worker(worker)
            self._workers[worker] = bell
            self._stages.append(Stage(ring, worker))

    def _apply(self, assignment: Assignment, *, replay: bool) -> None:
        self._has_chores = True
        log = self._logs.get(assignment.slot)
        if log is not None and assignment.revive and log.refusal and not self._add_journaled(log):
            self._logs.publish(log)
            return
        if log is not None and assignment.dropped:
            self._commit.forget(log)
        log = self._logs.apply(assignment, replay=replay, on_open=lambda _: self._housekeeping.forget(assignment.slot))
        if log is not None and assignment.revive and not log.refusal:
            self._commit.forget(log)
            self._logs.journaled.pop(log.key, None)
        if log is None:
            self._housekeeping.forget(assignment.slot)
            self._housekeeping.leases.forget((assignment.topic_id, assignment.partition))
        else:
            self._housekeeping.begin(log, self._now_ns)

    def _open_waiting(self, now_ns: int) -> int:
        """Try again what the host was short of something for. Before recovery is over, everything waits for it: rings hold what these logs must get."""
        if now_ns < self._open_again_ns:
            return 0
        before = len(self._logs.waiting)
        for assignment in list(self._logs.waiting.values()):
            self._apply(assignment, replay=not self._ready)
        self._open_again_ns = now_ns + FULL_DISK_RETRY_NS
        opened = before - len(self._logs.waiting)
        if opened:
            logger.info("waiting_logs_opened count=%d left=%d", opened, len(self._logs.waiting))
            self._coordinator.ring()
        return opened

    def _add_journaled(self, log: PartitionLog) -> bool:
        """Before a log is opened again: what this run's journal has of it. False: the journal cannot be read."""
        try:
            held = self._commit.held_for(log)
        except OSError as error:
            logger.error("journal_not_read directory=%s error=%r", log.directory, str(error))
            return False
        if held:
            self._logs.journaled[log.key] = [*self._logs.journaled.get(log.key, []), *held]
        return True

    # ---- recovery --------------------------------------------------------------------------------------------------------------------

    def _recover(self, now_ns: int) -> int:
        """Drain the rings of an earlier run, sync everything, then say that the partition table can be trusted."""
        for stage in self._old:
            if stage.group is not None or stage.cursor != stage.ring.head.load():
                return self._follow(stage, now_ns)
        for stage in self._old:
            if stage.replay_below:
                logger.info(
                    "ring_drained descriptors=%d of_deleted_topics=%d of_failed_logs=%d", stage.replay_below, stage.given_up[Verdict.DELETED],
                    stage.given_up[Verdict.FAILED],
                )  # fmt: skip
        self._old = []
        crash_point("recovery.after_journal")
        self._commit.sync_all(self._logs.all())
        try:
            if self._logs.is_draining:
                self._logs.begin_epochs()
            self._files.sync_directory(self._data_dir)  # a predecessor may have been killed before it was
        except OSError as error:
            if is_shortage(error):
                self._stalled_until_ns = now_ns + FULL_DISK_RETRY_NS
                return 0
            for log in self._logs.all():
                self._logs.take_offline(log, error)
        if self._logs.forget_what_was_found():
            try:
                self._journal.reset()
            except OSError as error:
                logger.error("journal_not_reset error=%r", str(error))
        else:
            self._commit.leave_journal()
        crash_point("recovery.before_ready")
        self._ready = True
        self._housekeeping.may_remove = True
        for log in self._logs.all():
            self._logs.publish(log)
            self._housekeeping.retain(log)
        self._space.check(now_ns)
        self._show_space()
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
            self._say_shortage(self._shortage if group is None else self._commit.shortage)
            return 0
        if self._is_short:
            logger.info("writing_again data_dir=%s", self._data_dir)
            self._is_short = False
        self._stalled_until_ns = 0
        stage.group = None
        for log in group.touched.values():
            self._housekeeping.watch_age(log, now_ns)
        return len(group.entries)

    def _say_shortage(self, error: OSError | None) -> None:
        """A full disk is told to producers, so that they get DISK_FULL; without descriptors or memory they wait for their acks. Either ends by itself."""
        if error is not None and error.errno in NO_SPACE:
            if self._space.note_full(self._now_ns):
                logger.warning("disk_full data_dir=%s", self._data_dir)
                self._show_space()
        elif error is not None and not self._is_short:
            self._is_short = True
            logger.error(
                "writing_waits data_dir=%s error=%r advice='allow more open files (LimitNOFILE=65536 in the unit) or more memory; it is tried again'",
                self._data_dir, str(error),
            )  # fmt: skip

    def _lingers(self, stage: Stage, head: int, now_ns: int) -> bool:
        """Whether to wait for a larger group. Not while stopping, not while recovering."""
        if not self._settings.linger_ns or self._stopping or not self._ready:
            return False
        if stage.linger is None:
            stage.linger = self._wheel.add(now_ns + self._settings.linger_ns, stage.end_linger)
        first, last = stage.ring.descriptor(stage.cursor), stage.ring.descriptor(head - 1)
        gathered = last.position + last.length - first.position
        if gathered < self._settings.batch_bytes and not stage.has_lingered:
            return True
        self._wheel.cancel(stage.linger)
        stage.linger, stage.has_lingered = None, False
        return False

    def _gather(self, stage: Stage, head: int) -> Group | None:
        """Place descriptors from the cursor on. None: not even the first can be placed now (disk full)."""
        ring = stage.ring
        group = Group(stage.cursor)
        for number in range(stage.cursor, min(head, stage.cursor + GROUP_DESCRIPTORS_MAX)):
            descriptor = ring.descriptor(number)
            if descriptor.is_control:
                if group.entries:
                    break  # in order with the data: settle that first
                if stage.translate is None:
                    self._apply_safely(ring.bytes_of(descriptor), replay=False)
                group.entries.append((number, None, Verdict.DURABLE))
                group.end = number + 1
                break
            try:
                entry = self._place(stage, number, descriptor, group)
            except OSError as error:
                self._shortage = error
                break
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

    def _place(self, stage: Stage, number: int, descriptor: Descriptor, group: Group) -> tuple[PartitionLog | None, Verdict] | None:
        """One descriptor into the group; None: the group must be settled first. Raises OSError only for what the host is short of."""
        log = self._log_of(stage, descriptor.slot)
        if log is not None and not log.is_open and log.assignment.slot in self._logs.waiting:
            raise OSError(errno.EMFILE, "the log is not open yet")
        if descriptor.result or not descriptor.has_bytes:
            if descriptor.result or log is None:
                return None, Verdict.DURABLE
            # A duplicate is worth what its original is, which may be in this group, or have been refused by a disk that failed.
            failed = log.refusal or descriptor.leader_epoch != log.file.leader_epoch or descriptor.next_offset > log.next_offset
            return (None, Verdict.FAILED) if failed else (log, Verdict.DURABLE)
        if log is None:
            return None, Verdict.DELETED
        if log.refusal or descriptor.leader_epoch != log.file.leader_epoch:
            return None, Verdict.FAILED  # what came before it was refused by the disk
        data = stage.ring.bytes_of(descriptor)
        if descriptor.base_offset < log.next_offset and number < stage.replay_below:
            return self._place_again(stage, number, descriptor, log, group)
        batch = PendingBatch(descriptor.base_offset, descriptor.next_offset, descriptor.max_timestamp_us, descriptor.append_time_us, data)
        try:
            if log.needs_roll(descriptor.length, descriptor.append_time_us):
                if log.group:
                    return None
                if not self._commit.roll(log):
                    return None, Verdict.FAILED
                self._housekeeping.retain(log)
            stage.ring.plan(number, *log.place(batch))
        except OSError as error:
            if is_shortage(error):
                raise
            self._logs.take_offline(log, error)
            return None, Verdict.FAILED
        except LogGapError as error:
            self._logs.take_offline(log, error)
            return None, Verdict.FAILED
        if descriptor.producer_id >= 0:
            log.producers.record(
                descriptor.producer_id, descriptor.producer_epoch, descriptor.base_sequence, descriptor.last_offset_delta,
                descriptor.base_offset, descriptor.next_offset, descriptor.append_time_us,
            )  # fmt: skip
        if descriptor.flags & FLAG_DELIVERED:
            log.producers.deliver(descriptor.delay_ordinal, descriptor.delay_position)
        elif descriptor.flags & FLAG_CLOSED:
            log.producers.close_below(descriptor.delay_ordinal)
        group.touched[log.assignment.slot] = log
        group.placed.setdefault(log.assignment.slot, []).append(number)
        group.byte_count += descriptor.length
        return log, self._good_verdict(log)

    def _place_again(
        self, stage: Stage, number: int, descriptor: Descriptor, log: PartitionLog, group: Group
    ) -> tuple[PartitionLog | None, Verdict]:
        """Recovery found this batch in the file: write it to its place once more, and sync."""
        outcome = stage.ring.outcome(number)
        if outcome.verdict is Verdict.NONE:
            return None, Verdict.FAILED  # nobody placed it: what the log has there is another batch
        try:
            if log.write_again(descriptor.base_offset, outcome.segment_base, outcome.file_position, stage.ring.bytes_of(descriptor)):
                group.touched[log.assignment.slot] = log
        except LogGapError as error:
            logger.error("not_what_was_placed directory=%s error=%r", log.directory, str(error))
            return None, Verdict.FAILED
        except OSError as error:
            if is_shortage(error):
                raise
            self._logs.take_offline(log, error)
            return None, Verdict.FAILED
        return log, self._good_verdict(log)

    @staticmethod
    def _good_verdict(log: PartitionLog) -> Verdict:
        return Verdict.DURABLE if log.is_durable else Verdict.WRITTEN

    def _on_moved(self, log: PartitionLog, places: list[tuple[int, int]]) -> None:
        """The batches of a log's group lie elsewhere now: note it beside their descriptors."""
        if self._placing is not None:
            stage, group = self._placing
            for number, place in zip(group.placed.get(log.assignment.slot, ()), places, strict=True):
                stage.ring.plan(number, *place)

    def _finish(self, stage: Stage, group: Group) -> bool:
        """Write, sync, judge, settle. False: the disk is full, try again later; nothing is lost, the bytes are in the ring."""
        self._placing = stage, group
        committed = self._commit.commit(list(group.touched.values()))
        self._placing = None
        if not committed:
            return False
        self._space.written(group.byte_count)
        for number, log, good in group.entries:
            verdict = Verdict.FAILED if log is not None and log.refusal else good
            stage.ring.judge(number, verdict)
            if verdict in stage.given_up:
                stage.given_up[verdict] += 1
        for log in group.touched.values():
            log.settled()
            if not log.refusal:
                log.raise_watermark()
                self._logs.publish(log)
        crash_point("flusher.after_verdicts")
        stage.cursor = group.end
        stage.ring.settled.store(group.end)  # SYNC POINT: settled (verdicts and watermarks before it)
        for bell in self._fronts:
            bell.ring()
        if any(log.assignment.has_delays for log in group.touched.values()):
            self._scheduler.ring()
        if stage.worker >= 0 and stage.ring.is_crowded():
            self._workers[stage.worker].ring()
        if not group.touched:
            self._coordinator.ring()
        self._checkpoint_some()
        return True

    def _checkpoint_some(self) -> None:
        """Keep what recovery would have to read below checkpoint_bytes."""
        logs = self._logs.all()
        total = sum(log.since_checkpoint_bytes for log in logs)
        if total < self._settings.checkpoint_bytes:
            return
        for log in sorted(logs, key=lambda log: log.since_checkpoint_bytes, reverse=True):
            if total < self._settings.checkpoint_bytes // 2 or log.group:
                break
            total -= log.since_checkpoint_bytes
            try:
                if log.refusal or (log.is_unsynced and not self._commit.sync(log)):
                    continue
                log.checkpoint(sync=log.since_checkpoint_bytes >= self._settings.checkpoint_bytes // 4)
            except OSError as error:
                log.since_checkpoint_bytes = 0
                logger.warning("checkpoint_not_written directory=%s error=%r", log.directory, str(error))

    # ---- space -----------------------------------------------------------------------------------------------------------------------

    def _show_space(self) -> None:
        """Tell the workers whether to refuse batches for want of room."""
        self._slot.store(ProcessWord.DISK_FULL, int(self._space.is_full))
        for bell in self._workers.values():
            bell.ring()


def _translator(table: PartitionTable) -> Callable[[int], tuple[bytes, int]]:
    def translate(slot: int) -> tuple[bytes, int]:
        state = table.read(slot)
        return state.topic_id, state.partition

    return translate


def build(context: ProcessContext, files: Files) -> Flusher:
    """The flusher of this specification; it has asked to be fed."""
    spec, settings, clock = context.spec, context.spec.settings, context.clock
    front_count = int(settings["fronts"])
    followed = [w for w, data_dir in enumerate(settings["worker_dirs"]) if data_dir == spec.index]
    for w in settings["spare_workers"]:
        spare = context.control.process(Role.WORKER, w)
        if spare.load(ProcessWord.GENERATION) and spare.load(ProcessWord.DEDICATED_DIR) == spec.index + 1:
            followed.append(w)  # a predecessor followed it

    def connect(worker: int) -> tuple[Ring, Doorbell]:
        return Ring(context.attach(f"ring-{worker}", RegionKind.RING)), context.bell(Role.WORKER, worker)

    flusher = Flusher(
        data_dir=spec.data_dirs[spec.index],
        files=files,
        table=context.table(spec.index),
        feed=context.lane_reader("coordinator"),
        generation=spec.generation,
        facts=RunFacts(settings["run"], bool(settings["lost_memory"]), int(settings["producer.id.expiration.ms"]) * 1000),
        rings={w: connect(w)[0] for w in followed},
        old_rings=[
            (
                Ring(context.attach_named(old["ring"], RegionKind.RING)),
                PartitionTable(context.attach_named(old["table"], RegionKind.TABLE)),
            )
            for old in spec.recover
        ],
        fronts=[context.bell(Role.FRONT, f) for f in range(front_count)],
        workers={w: context.bell(Role.WORKER, w) for w in followed},
        connect_worker=connect,
        coordinator=context.bell(Role.COORDINATOR, 0),
        scheduler=context.bell(Role.SCHEDULER, 0),
        slot=context.slot,
        settings=FlusherSettings(
            int(settings["flush.linger_ms"]) * 1_000_000,
            int(settings["flush.batch_size"]),
            int(settings["checkpoint_bytes"]),
            int(settings["journal_bytes"]),
            int(settings["reserve_bytes"]),
        ),
        on_ready=context.report_ready,
        now_us=clock.wall_us,
        start_ns=clock.monotonic_ns(),
    )
    # The coordinator feeds whoever asks: readiness comes only after recovery, so asking has a word of its own.
    context.ask_for_feed()
    return flusher


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
    try:
        flusher = build(context, DiskFiles())
    except OSError as error:
        if is_shortage(error):
            raise  # the supervisor tries again
        sys.stderr.write(f"tailrace: cannot read or write {error.filename or context.spec.data_dirs[context.index]}: {error.strerror}; ")
        sys.stderr.write("what it holds may be acknowledged: repair it, or move it away to give that up, then start again.\n")
        sys.exit(EXIT_DATA_UNUSABLE)
    run(flusher, context)
    flusher.close()


if __name__ == "__main__":
    main()
