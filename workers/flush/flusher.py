"""The flusher of one data directory: follows its workers' rings, writes batches to segment files, makes them durable, publishes what is safe.

Owner: segment files, indexes, checkpoints and the journal; in shared memory the outcomes and `settled` of each ring it follows, and its partition table.
Invariants: a descriptor's verdict is written before `settled` passes it; the partition table before that; what a consumer may see (the high
    watermark) is on the disk for durability=disk and written for durability=memory.
Crash: killed anywhere, its successor recovers every log from its files and goes on at `settled`; what is found in the files already is made dirty and synced
    again, not appended twice.

Run as `python -P -m workers.flusher`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from shm.catalog_messages import REPLAY, Assignment, LaneKind
from shm.control import ProcessSlot
from shm.crash_points import crash_point
from shm.doorbell import Doorbell
from shm.lane import LaneReader
from shm.layout import ProcessWord, RegionKind, Role, Verdict
from shm.partition_table import PartitionTable
from shm.ring import Ring
from shm.runtime.boundary import Boundary
from shm.runtime.process import EXIT_DATA_UNUSABLE, ProcessContext, configure_logging, run, start
from shm.settled_news import SettledNews
from workers.disk_space import DiskSpace
from workers.files import NO_SPACE, DiskFiles, Files, is_shortage
from workers.group_commit import GroupCommit
from workers.housekeeping import Housekeeping
from workers.journal import Journal
from workers.leases import Task
from workers.log_set import LogSet, RunFacts
from workers.partition_log import PartitionLog
from workers.placement import Placement
from workers.stage import Group, Stage, translator
from workers.start_up import end_recovery, note_rings
from workers.timing_wheel import TimingWheel

logger = logging.getLogger(__name__)

FULL_DISK_RETRY_NS = 250_000_000


@dataclass(frozen=True, slots=True)
class FlusherSettings:
    linger_ns: int = 0
    batch_bytes: int = 1 << 20
    checkpoint_bytes: int = 64 << 20
    journal_bytes: int = 64 << 20
    reserve_bytes: int = 0


class Flusher:
    """An agent (see `shm.runtime.process`)."""

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
        fronts: SettledNews,
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
        self._old = [Stage(ring, -1, translator(old_table)) for ring, old_table in old_rings]
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
        note_rings(self._logs, self._stages + self._old, table, [old_table for _, old_table in old_rings])
        self._commit = GroupCommit(self._journal, self._logs.take_offline, self._on_moved)
        self._placing: tuple[Stage, Group] | None = None
        self._fed = False
        self._has_chores = True
        """Whether there may be something to tidy up."""
        self._ready = False
        self._stopping = False
        self._stalled_until_ns = 0
        self._is_short = False
        """Whether writing waits for descriptors or memory."""
        self._open_again_ns = 0
        self._now_ns = start_ns
        self._wheel: TimingWheel[Task] = TimingWheel(start_ns, tick_ns=100_000)
        self._housekeeping = Housekeeping(self._logs, self._commit, self._wheel, now_us, start_ns)
        self._placement = Placement(self._logs, self._commit, self._apply_from_ring, self._housekeeping.retain, self._boundary)

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
        tidied = self._housekeeping.tidy()
        self._has_chores = bool(tidied)
        return tidied

    def has_more(self) -> bool:
        if not self._ready or self._has_chores:
            return True
        if self._stalled_until_ns:
            return False
        return any(not stage.is_lingering and stage.cursor != stage.ring.head.load() for stage in self._stages)

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
        return any(stage.has_input for stage in self._stages)

    def close(self) -> None:
        """Sync and close every log."""
        self._commit.sync_all(self._logs.all())
        for log in self._logs.all():
            try:
                log.close()
            except OSError as error:
                logger.error("log_not_closed directory=%s error=%r", log.directory, str(error))
        self._journal.close()

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
                    self._coordinator.ring()  # it replies to the reader when this is taken
                elif message.kind == LaneKind.FOLLOW:
                    self._follow_worker(message.slot)
                elif message.kind == LaneKind.FED and message.correlation_id == self._generation:
                    self._fed = True
            except Exception as error:
                self._boundary.caught(f"kind={message.kind} slot={message.slot} bytes={len(payload)}", error)
        return count

    def _apply_from_ring(self, payload: bytes | memoryview) -> None:
        self._apply_safely(payload, replay=False)

    def _apply_safely(self, payload: bytes | memoryview, *, replay: bool) -> None:
        """A partition given, changed or taken away; if that fails unforeseen, its log takes no writes, and the others go on."""
        assignment: Assignment | None = None
        try:
            assignment = Assignment.decode(payload)
            self._apply(assignment, replay=replay)
        except Exception as error:
            what = f"topic={assignment.topic} partition={assignment.partition}" if assignment else f"assignment_bytes={len(payload)}"
            sentence = self._boundary.caught(what, error)
            if assignment is not None:
                self._logs.show_failed(assignment, sentence)

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
            if stage.has_input:
                return self._follow(stage, now_ns)
        drained, self._old = self._old, []
        if not end_recovery(self._files, self._data_dir, drained, self._logs, self._commit, self._journal):
            self._stalled_until_ns = now_ns + FULL_DISK_RETRY_NS
            return 0
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
            stage.group = self._placement.gather(stage, head)
        group = stage.group
        if group is None or not self._finish(stage, group):
            self._stalled_until_ns = now_ns + FULL_DISK_RETRY_NS
            self._say_shortage(self._placement.shortage if group is None else self._commit.shortage)
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
        """Producers get DISK_FULL on a full disk; without descriptors or memory they wait for their acks. Either ends by itself."""
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
        settings = self._settings
        if not settings.linger_ns or self._stopping or not self._ready:
            return False
        return stage.lingers(head, self._wheel, now_ns, settings.linger_ns, settings.batch_bytes)

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
        before, stage.cursor = stage.cursor, group.end
        stage.ring.settled.store(group.end)  # SYNC POINT: settled (verdicts and watermarks before it)
        is_crowded = self._fronts.announce(stage.ring, before, group.end)
        if any(log.assignment.has_delays for log in group.touched.values()):
            self._scheduler.ring()
        if is_crowded and stage.worker >= 0:
            self._workers[stage.worker].ring()
        if not group.touched:
            self._coordinator.ring()
        self._housekeeping.checkpoint_some(self._settings.checkpoint_bytes)
        return True

    # ---- space -----------------------------------------------------------------------------------------------------------------------

    def _show_space(self) -> None:
        """Tell the workers whether to refuse batches for want of room."""
        self._slot.store(ProcessWord.DISK_FULL, int(self._space.is_full))
        for bell in self._workers.values():
            bell.ring()


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
        fronts=SettledNews(
            [
                (context.bell(Role.FRONT, f), context.control.process(Role.FRONT, f).cell(ProcessWord.SETTLED_UNWANTED))
                for f in range(front_count)
            ]
        ),
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
    # The coordinator feeds a process that asks: readiness comes only after recovery, so asking has a word of its own.
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
