"""Flusher: the agent of the flusher process. It follows rings, and writes, syncs and settles groups
of batches.

- `RingFollower`: the groups of a ring.
- `BatchPlacement`: a group's places in the logs.
- `GroupCommit`: writes and syncs them.
- `LogCleaner`, `Compaction`, `Bin`: retention, compaction, deleted topics.
- `CatalogFeed`: messages of the controller.
- `Chores`: what may wait until nothing else is to be done.

Owner: segment files, indexes, checkpoints and the journal. In shared memory: the outcomes and
`settled` of each ring it follows, and its partition table.

Invariants:
- A descriptor's verdict is written before `settled` passes it, and the partition table before that.
- Records below the high watermark are on disk for durability=disk, and written for
  durability=memory.

Crash: its successor recovers every log from its files and continues at `settled`. Batches found in
the files are rewritten in place and synced, not appended twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from shm.crash_points import crash_point
from shm.memory.layout import Measure, ProcessWord, Verdict
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneReader
from shm.queues.ring import Ring
from shm.queues.settled_notifications import SettledNotifications
from shm.runtime.error_handler import CountedErrorHandler
from shm.runtime.logs.slow_operations import SLOW
from shm.runtime.timing_wheel import TimingWheel
from shm.tables.control import ProcessSlot
from shm.tables.partition_table import PartitionTable
from tailrace.format.directory.data_dir import BIN_DIRECTORY
from workers.flush.bin import Bin
from workers.flush.catalog_feed import CatalogFeed
from workers.flush.cleaning.chores import Chores
from workers.flush.commit.batch_placement import BatchPlacement
from workers.flush.commit.group_commit import GroupCommit
from workers.flush.commit.ring_follower import FlushGroup, RingFollower, translator
from workers.flush.directory_status import DirectoryStatus
from workers.flush.flusher_settings import FlusherSettings
from workers.flush.log_cleaner import LogCleaner
from workers.flush.startup import end_recovery, note_rings
from workers.log.files.journal import Journal
from workers.log.log_set import LogSet, RunFacts
from workers.log.partition_log import PartitionLog
from workers.log.retention.leases import Task
from workers.log.retention.wall_clock_jumps import WallJumps
from workers.segment.directory_watch import DirectoryWatch
from workers.segment.disk_space import DiskSpace
from workers.segment.files import Files

if TYPE_CHECKING:
    from workers.flush.compaction import CleaningSettings, Compaction

logger = logging.getLogger(__name__)

FULL_DISK_RETRY_NS = 250_000_000


class Links(NamedTuple):
    """Rings and doorbells of the other processes."""

    rings: dict[int, Ring]
    """Worker -> its ring."""
    old_rings: list[tuple[Ring, PartitionTable]]
    """Those of an earlier run, each with the table of its slots."""
    workers: dict[int, Doorbell]
    connect_worker: Callable[[int], tuple[Ring, Doorbell]]
    """Returns the ring of a dedicated worker."""
    fronts: SettledNotifications
    controller: Doorbell
    scheduler: Doorbell
    cleaner: ProcessSlot | None = None
    """The process that cleans for this one."""
    ring_cleaner: Callable[[], None] = lambda: None
    """Wakes it, and the supervisor, which starts it."""


class Flusher:
    """Agent of the flusher process (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        *,
        data_dir: str,
        files: Files,
        table: PartitionTable,
        feed: LaneReader,
        generation: int,
        facts: RunFacts,
        links: Links,
        slot: ProcessSlot,
        settings: FlusherSettings,
        on_ready: Callable[[], None],
        now_us: Callable[[], int],
        start_ns: int,
        watch: DirectoryWatch | None = None,
    ) -> None:
        slot.store(ProcessWord.CLEANING, 0)  # a predecessor's job has ended with it
        self._links = links
        self._data_dir = data_dir
        self._files = files
        self._followers = [RingFollower(ring, worker) for worker, ring in links.rings.items()]
        self._old = [RingFollower(ring, -1, translator(old)) for ring, old in links.old_rings]
        self._slot = slot
        self._sync_durations = slot.histogram(Measure.SYNC)
        self._error_handler = CountedErrorHandler(slot)
        self._table = table
        self._settings = settings
        self._on_ready = on_ready
        self._space = DiskSpace(files, data_dir, settings.reserve_bytes)
        self._journal = Journal(files, data_dir, settings.journal_bytes)
        self._logs = LogSet(files, data_dir, table, facts)
        self._logs.journaled = self._journal.find()
        self._logs.is_draining = bool(links.old_rings)
        note_rings(
            self._logs, self._followers + self._old, table, [old for _, old in links.old_rings]
        )
        self._watch = watch
        self._directory = DirectoryStatus(
            data_dir, self._space, watch, self._logs, slot, links.workers
        )
        self._commit = GroupCommit(self._journal, self._logs.take_offline, self._on_moved)
        self._placing: tuple[RingFollower, FlushGroup] | None = None
        self._has_chores = True
        """True if the log cleaner may have work."""
        self._bin: Bin | None = None
        """Made with the first topic that is removed from the bin."""
        self._ready = False
        self._stopping = False
        self._stalled_until_ns = 0
        self._now_ns = start_ns
        self._wheel: TimingWheel[Task] = TimingWheel(start_ns, tick_ns=100_000)
        self._now_us = now_us
        self._jumps = WallJumps(files, data_dir, now_us(), start_ns)
        self._logs.moved = self._jumps.moved
        self._log_cleaner = self._new_log_cleaner()
        self._chores = Chores(
            self._logs, self._commit, self._wheel, self._log_cleaner.retain, lambda: self._now_ns
        )  # fmt: skip
        self._feed = CatalogFeed(
            feed, generation, self._logs, self._commit, self._log_cleaner, links.controller,
            self._error_handler, self._follow_worker, self._on_assignment, self._purge, start_ns,
        )  # fmt: skip
        self._placement = BatchPlacement(
            self._logs, self._commit, self._feed.apply_from_ring, self._log_cleaner.retain,
            self._error_handler,
        )  # fmt: skip

    def _new_log_cleaner(self) -> LogCleaner:
        return LogCleaner(
            self._logs, self._commit, self._wheel, self._now_us, self._now_ns,
            lambda: self._space.is_full, jumps=self._jumps,
            check_interval_ms=self._settings.retention_check_ms,
            make_compaction=None if self._links.cleaner is None else self._make_compaction,
        )  # fmt: skip

    def apply_settings(self, settings: dict[str, Any]) -> None:
        """Use changed settings of the appliance."""
        self._settings = FlusherSettings.of(settings)
        self._space.set_reserve(self._settings.reserve_bytes)
        self._log_cleaner.set_check_interval(self._settings.retention_check_ms)
        if self._log_cleaner.compaction is not None:
            self._log_cleaner.compaction.set(self._cleaning_settings())
        if self._space.check(self._now_ns):
            self._directory.show()

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        work = self._feed.read(now_ns)
        if not self._feed.is_complete:
            return work
        if not self._ready:
            return work + (
                self._feed.open_waiting(now_ns, replay=True)
                if self._logs.waiting
                else self._recover(now_ns)
            )
        if self._logs.waiting:
            work += self._feed.open_waiting(now_ns, replay=False)
        if (
            self._space.is_due(now_ns)
            and (self._is_active(work) or self._space.is_overdue(now_ns))
            and self._space.check(now_ns)
        ):
            self._directory.show()
            if self._space.is_full:
                self._log_cleaner.make_room()
        if self._watch is not None and self._watch.check(now_ns):
            self._directory.on_watched(self._watch.reason)
        if self._bin is not None and not self._bin.is_idle:
            work += self._purge_some(self._bin)
        if now_ns < self._stalled_until_ns:
            return work
        if self._log_cleaner.compaction is not None:
            work += self._log_cleaner.compaction.step(now_ns)
        if now_ns >= self._wheel.quiet_until_ns:
            work += self._log_cleaner.advance(now_ns)
        for follower in self._followers:
            work += self._follow(follower, now_ns)
        if work:
            return work
        tidied = self._chores.run_idle_work()
        self._has_chores = bool(tidied)
        return tidied

    def _is_active(self, work: int) -> bool:
        return self._space.is_full or bool(work) or self._has_input()

    def has_more(self) -> bool:
        if not self._ready or self._has_chores or (self._bin and not self._bin.is_idle):
            return True
        if self._stalled_until_ns:
            return False
        return any(
            not follower.is_lingering and follower.cursor != follower.ring.producer_position.load()
            for follower in self._followers
        )

    def next_deadline_ns(self) -> int | None:
        deadlines = [self._wheel.next_deadline_ns(), self._space.next_check_ns]
        if (
            any(follower.group is not None for follower in self._followers + self._old)
            or self._stalled_until_ns
        ):
            deadlines.append(self._stalled_until_ns)
        if self._logs.waiting:
            deadlines.append(self._feed.reopen_at_ns)
        known = [d for d in deadlines if d]
        return min(known) if known else None

    def begin_stop(self) -> None:
        self._stopping = True

    def is_finished(self) -> bool:
        return not self._ready or not self._has_input()

    def _has_input(self) -> bool:
        return any(follower.has_input for follower in self._followers)

    def close(self) -> None:
        """Sync and close every log."""
        self._commit.sync_all(self._logs.all())
        for log in self._logs.all():
            try:
                log.close()
            except OSError as error:
                logger.error("log_not_closed directory=%s error=%r", log.directory, str(error))
        self._journal.close()

    # ---- catalog ---------------------------------------------------------------------------------

    def _follow_worker(self, worker: int) -> None:
        """Follow the ring of a dedicated worker."""
        if worker not in self._links.workers:
            ring, bell = self._links.connect_worker(worker)
            self._links.workers[worker] = bell
            self._followers.append(RingFollower(ring, worker))

    def _on_assignment(self) -> None:
        self._has_chores = True

    def _make_compaction(self, log_cleaner: LogCleaner) -> Compaction:
        """Make what compacted topics need, when there is the first."""
        from workers.flush.compaction import CleanerLink, Compaction

        cleaner = self._links.cleaner
        assert cleaner is not None
        made = Compaction(
            self._files, self._data_dir, self._logs, self._commit, self._wheel,
            log_cleaner.leases, self._jumps,
            CleanerLink(
                self._slot,
                cleaner.cell(ProcessWord.CLEANING_REPORTS).load,
                self._links.ring_cleaner,
            ),
            self._now_us, log_cleaner.seal, log_cleaner.retain, self._error_handler,
            lambda: self._space.reserve_bytes,
        )  # fmt: skip
        made.settings = self._cleaning_settings()
        return made

    def _cleaning_settings(self) -> CleaningSettings:
        from workers.flush.compaction import CleaningSettings

        settings = self._settings
        return CleaningSettings(
            settings.cleaner_check_ms,
            settings.cleaner_dedupe_bytes,
            settings.cleaner_bytes_per_second,
        )

    # ---- the bin ---------------------------------------------------------------------------------

    def _purge(self, topic_id: bytes) -> None:
        """Remove a topic from the bin, a partition at a time."""
        self._bin = self._bin or Bin(self._files, self._data_dir)
        self._bin.purge(topic_id)

    def _purge_some(self, topic_bin: Bin) -> int:
        count = topic_bin.step()
        if topic_bin.is_idle:
            self._links.controller.ring()
        return count

    # ---- recovery --------------------------------------------------------------------------------

    def _recover(self, now_ns: int) -> int:
        """Drain the rings of an earlier run, sync everything, then report that
        the partition table is valid.
        """
        for follower in self._old:
            if follower.has_input:
                return self._follow(follower, now_ns)
        drained, self._old = self._old, []
        if not end_recovery(
            self._files, self._data_dir, drained, self._logs, self._commit, self._journal
        ):
            self._stalled_until_ns = now_ns + FULL_DISK_RETRY_NS
            return 0
        self._ready = True
        self._log_cleaner.allow_removal()
        for log in self._logs.all():
            self._logs.publish(log)
            self._log_cleaner.retain(log)
        self._space.check(now_ns)
        self._directory.show()
        if self._files.exists(f"{self._data_dir}/{BIN_DIRECTORY}"):
            self._bin = Bin(self._files, self._data_dir)
            self._bin.purge_removed()
        self._on_ready()
        return 1

    # ---- following a ring ------------------------------------------------------------------------

    def _follow(self, follower: RingFollower, now_ns: int) -> int:
        """Gather a group from a ring, write it, sync it and settle it."""
        if follower.group is None:
            producer_position = (
                follower.ring.producer_position.load()
            )  # SYNC POINT: producer_position
            if producer_position == follower.cursor or self._lingers(
                follower, producer_position, now_ns
            ):
                return 0
            follower.group = self._placement.gather(follower, producer_position)
        group = follower.group
        if group is None or not self._finish(follower, group):
            self._stalled_until_ns = now_ns + FULL_DISK_RETRY_NS
            self._directory.note_shortage(
                self._placement.shortage if group is None else self._commit.shortage, now_ns
            )
            return 0
        if self._directory.is_short:
            self._directory.note_written()
        self._stalled_until_ns = 0
        follower.group = None
        for log in group.touched.values():
            self._log_cleaner.watch_age(log, now_ns)
        return len(group.entries)

    def _lingers(self, follower: RingFollower, producer_position: int, now_ns: int) -> bool:
        """True if a larger group should be awaited: not while stopping or recovering."""
        settings = self._settings
        if not settings.linger_ns or self._stopping or not self._ready:
            return False
        return follower.lingers(
            producer_position, self._wheel, now_ns, settings.linger_ns, settings.batch_bytes
        )

    def _on_moved(self, log: PartitionLog, places: list[tuple[int, int]]) -> None:
        """Record new places of a log's group beside their descriptors."""
        if self._placing is not None:
            follower, group = self._placing
            for number, place in zip(
                group.placed.get(log.assignment.slot, ()), places, strict=True
            ):
                follower.ring.plan(number, *place)

    def _finish(self, follower: RingFollower, group: FlushGroup) -> bool:
        """Write, sync, judge and settle a group. Return False if the host is short of a resource:
        the batches stay in the ring.
        """
        self._placing = follower, group
        begin_ns = time.monotonic_ns()
        committed = self._commit.commit(list(group.touched.values()))
        duration_ns = time.monotonic_ns() - begin_ns
        self._sync_durations.add(duration_ns)
        if duration_ns > SLOW.limit_ns:
            SLOW.log(
                "sync", duration_ns, data_dir=self._data_dir, bytes=group.byte_count,
                partitions=len(group.touched),
            )  # fmt: skip
        self._placing = None
        if not committed:
            return False
        self._space.written(group.byte_count)
        for number, log, good in group.entries:
            verdict = Verdict.FAILED if log is not None and log.refusal else good
            follower.ring.judge(number, verdict)
            if verdict in follower.given_up:
                follower.given_up[verdict] += 1
        for log in group.touched.values():
            log.settled()
            if not log.refusal:
                self._chores.write_transaction_indexes(log)
                log.raise_watermark()
                self._logs.publish(log)
        crash_point("flusher.after_verdicts")
        before, follower.cursor = follower.cursor, group.end
        follower.ring.settled.store(
            group.end
        )  # SYNC POINT: settled (verdicts and watermarks before it)
        is_crowded = self._links.fronts.announce(follower.ring, before, group.end)
        if any(log.assignment.has_delays for log in group.touched.values()):
            self._links.scheduler.ring()
        if (is_crowded or group.has_markers) and follower.worker >= 0:
            self._links.workers[follower.worker].ring()
        if not group.touched:
            self._links.controller.ring()
        self._chores.checkpoint_some(self._settings.checkpoint_bytes)
        return True
