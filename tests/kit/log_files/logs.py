"""Logs in a temporary directory, and the little appliance of worker and flusher that a test steps
by hand, in one process.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from appliance.config import topic_config
from shm.memory.layout import (
    SOURCE_CONTROLLER,
    SOURCE_SCHEDULER,
    ControlLayout,
    LaneLayout,
    ProcessWord,
    RegionKind,
    RingLayout,
    Role,
    TableLayout,
)
from shm.memory.region import Region
from shm.messages.lane_messages import REPLAY, Assignment, LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneReader, LaneWriter
from shm.queues.ring import Ring, RingWriter
from shm.queues.settled_notifications import SettledNotifications
from shm.tables.control import Control
from shm.tables.partition_table import PartitionTable
from tailrace.format.schema import DEFAULT_SCHEMA, to_message
from tests.kit import memory
from tests.kit.batches import TOPIC_ID
from tests.kit.log_files.descriptors import close_with
from workers.append.worker import Worker
from workers.flush.flusher_agent import Flusher, Links
from workers.flush.flusher_settings import FlusherSettings
from workers.flush.invariants import check_flusher, check_worker
from workers.log.log_set import RunFacts
from workers.log.producers.producer_snapshots import load_producers
from workers.log.retention.wall_clock_jumps import WallJumps, follow
from workers.segment.files import DiskFiles, Files

CHECKED_EVERY = 8
"""Steps: to look at everything takes longer than most of them."""


def assignment(
    partition: int = 0,
    *,
    topic: str = "t",
    topic_id: bytes = TOPIC_ID,
    slot: int = 0,
    version: int = 1,
    **settings: Any,
) -> Assignment:
    complete = topic_config.complete(
        {k.replace("_", "."): v for k, v in settings.items()},
        ring_bytes=1 << 26,
        lane_bytes=1 << 22,
    )
    return Assignment(
        topic=topic, topic_id=topic_id, partition=partition, partition_count=1, slot=slot,
        version=version, worker=0, front=0, data_dir=0,
        schema_id=1, schema=to_message(DEFAULT_SCHEMA), typed=False, settings=complete,
    )  # fmt: skip


def _is_drained(regions: dict[str, Region]) -> bool:
    ring = Ring(regions["ring"])
    return ring.settled.load() == ring.producer_position.load()


class Bench:
    """One worker and one flusher over real memory and real files; `kill_*` starts a successor over
    what is left.
    """

    def __init__(
        self,
        directory: str,
        regions: dict[str, Region],
        files: Files,
        settings: FlusherSettings,
        *,
        assignments: list[Assignment] | None = None,
        run: str = "first",
        lost_memory: bool = False,
        now_us: int = 1_700_000_000_000_000,
        old: list[dict[str, Region]] | None = None,
    ) -> None:
        """`old`: the regions of earlier runs, whose rings are drained first."""
        self.old = [regions for regions in old or [] if not _is_drained(regions)]
        self.settings = settings
        self.producer_ids_max = 10_000
        self.run = run
        self.is_running = False
        """True if the flusher has recovered once: before that, workers wait."""
        self.lost_memory = lost_memory
        self.flusher_slot = Control(regions["control"]).process(Role.FLUSHER, 0)
        self.directory = directory
        self.regions = regions
        self.files = files
        self.now_us = now_us
        self.now_ns = 1
        self.assignments = assignments or [assignment()]
        self.bell = Doorbell.create()
        self.coordinator_bell = Doorbell.create()
        self.has_requested_coordinator = False
        self._released: list[Callable[[], object]] = [
            weakref.finalize(self, os.close, self.bell.fd),
            weakref.finalize(self, os.close, self.coordinator_bell.fd),
        ]
        if isinstance(files, DiskFiles):
            self._released.append(close_with(files))
        self.to_worker = LaneWriter(regions["front>worker"])
        self.table = PartitionTable(regions["table"])
        self.ring = Ring(regions["ring"])
        self.generation = 0
        self._steps = 0
        self.worker = self._new_worker()
        self.flusher = self._new_flusher()

    def release(self) -> None:
        """Close what its processes have open; nothing is done with it afterwards."""
        for close in self._released:
            close()

    def _new_worker(self) -> Worker:
        self.generation += 1
        ring = RingWriter(self.regions["ring"])
        resume = Worker.resume_positions(ring)
        lanes = {
            0: LaneReader(self.regions["front>worker"], resume.get(0, 0)),
            SOURCE_CONTROLLER: LaneReader(self.regions["controller>worker"]),
            SOURCE_SCHEDULER: LaneReader(
                self.regions["scheduler>worker"], resume.get(SOURCE_SCHEDULER, 0)
            ),
        }
        feed = LaneWriter(self.regions["controller>worker"])
        moved = follow(
            WallJumps(self.files, self.directory, self.now_us, self.now_ns),
            lambda: self.now_us,
            lambda: self.now_ns,
        )
        worker = Worker(
            ring=ring, lanes=lanes, tables=[self.table],
            slot=Control(self.regions["control"]).process(Role.WORKER, 0),
            generation=self.generation,
            is_running=lambda: self.is_running, live_fronts=lambda: [0], fronts=[], flushers=[],
            load_producers=lambda a, end: load_producers(
                self.files, self.directory, a, end, moved
            ),
            is_disk_full=lambda d: bool(self.flusher_slot.load(ProcessWord.DISK_FULL)),
            producer_expiration_us=86_400_000_000,
            producer_ids_max=self.producer_ids_max, now_us=lambda: self.now_us,
            connect_coordinator=self._connect_coordinator,
            request_coordinator=self._request_coordinator,
        )  # fmt: skip
        self._feed(feed)
        return worker

    def _connect_coordinator(self, resume_at: int) -> tuple[LaneReader, LaneWriter, Doorbell]:
        return (
            LaneReader(self.regions["groups>worker"], resume_at),
            LaneWriter(self.regions["worker>groups"]),
            self.coordinator_bell,
        )

    def _request_coordinator(self) -> None:
        self.has_requested_coordinator = True

    def _new_flusher(self) -> Flusher:
        self.generation += 1
        feed = LaneWriter(self.regions["controller>flusher"])
        links = Links(
            rings={0: Ring(self.regions["ring"])},
            old_rings=[
                (Ring(r["ring"]), PartitionTable(r["table"]))
                for r in ([] if self.is_running else self.old)
            ],
            workers={0: self.bell}, connect_worker=lambda _: (self.ring, self.bell),
            fronts=SettledNotifications([]), controller=self.bell, scheduler=self.bell,
            cleaner=Control(self.regions["control"]).process(Role.CLEANER, 0),
        )  # fmt: skip
        flusher = Flusher(
            data_dir=self.directory, files=self.files, table=self.table,
            feed=LaneReader(self.regions["controller>flusher"]), generation=self.generation,
            facts=RunFacts(self.run, self.lost_memory), links=links, slot=self.flusher_slot,
            settings=self.settings,
            on_ready=self._on_ready, now_us=lambda: self.now_us, start_ns=self.now_ns,
        )  # fmt: skip
        self._feed(feed)
        return flusher

    def _on_ready(self) -> None:
        self.is_running = True

    def _feed(self, lane: LaneWriter) -> None:
        for item in self.assignments:
            assert lane.try_write(LaneKind.ASSIGN, 0, REPLAY, 0, 0, 0, (item.encode(),))
        assert lane.try_write(LaneKind.FED, 0, 0, 0, self.generation, 0, (b"",))
        lane.commit()

    def assign(self, item: Assignment) -> None:
        """News from the controller; it goes through worker and ring to the flusher."""
        self.assignments = [
            item if known.slot == item.slot else known for known in self.assignments
        ]
        feed = LaneWriter(self.regions["controller>worker"])
        assert feed.try_write(LaneKind.ASSIGN, 0, 0, 0, 0, 0, (item.encode(),))
        feed.commit()

    def restarted(self, run: str) -> Bench:
        """Everything was killed at once and started anew: other regions; the rings that were left
        are drained.
        """
        return Bench(
            self.directory, simulated_regions(), self.files, self.settings,
            assignments=self.assignments, run=run, now_us=self.now_us,
            old=[*self.old, self.regions],
        )  # fmt: skip

    def kill_worker(self) -> None:
        self.worker = self._new_worker()

    def kill_flusher(self) -> None:
        self.flusher = self._new_flusher()

    def send(
        self, batch: bytes | bytearray, *, slot: int = 0, acks: int = 2, correlation_id: int = 0,
        kind: LaneKind = LaneKind.PRODUCE,
    ) -> None:  # fmt: skip
        assert self.to_worker.try_write(kind, slot, acks, 1 << 32, correlation_id, 0, (batch,))
        self.to_worker.commit()

    def step_worker(self) -> int:
        work = self.worker.step(self.now_ns)
        self._steps += 1
        if self._steps % CHECKED_EVERY == 0:
            check_worker(self.worker)
        return work

    def step_flusher(self) -> int:
        work = self.flusher.step(self.now_ns)
        if self._steps % CHECKED_EVERY == 0:
            check_flusher(self.flusher)
        return work

    def settle(self) -> None:
        """Step both until neither has anything to do; front 0 answers everything."""
        while not self.is_running:
            self.step_flusher()
        while self.step_worker() + self.step_flusher():
            self.ring.cursors[0].store(self.ring.settled.load())

    def answers(self) -> list[tuple[int, int]]:
        """(result, base offset) of every descriptor."""
        return [
            (d.result, d.base_offset)
            for d in map(self.ring.descriptor, range(self.ring.producer_position.load()))
        ]

    def segment_paths(self, partition: int = 0) -> list[str]:
        directory = f"{self.directory}/t-{partition}"
        return [
            f"{directory}/{name}"
            for name in sorted(os.listdir(directory))
            if name.endswith(".arrows")
        ]


def simulated_regions(
    ring_bytes: int = 1 << 18, descriptors: int = 256, *, is_checked: bool = True
) -> dict[str, Region]:
    """The regions of a Bench in this process's own memory: cheap, for thousands of them.
    `is_checked`: see `memory.simulated`.
    """
    lane = 1 << 17
    made = partial(memory.simulated, is_checked=is_checked)
    return {
        "ring": made(
            RegionKind.RING, RingLayout(ring_bytes, descriptors).size, ring_bytes, descriptors
        ),
        "table": made(RegionKind.TABLE, TableLayout(16).size, 16),
        "control": made(RegionKind.CONTROL, ControlLayout().size, 0),
        **{
            name: made(RegionKind.LANE, LaneLayout(lane).size, lane)
            for name in (
                "front>worker",
                "controller>worker",
                "controller>flusher",
                "scheduler>worker",
                "groups>worker",
                "worker>groups",
            )
        },
    }


@contextmanager
def bench(
    directory: str, files: Files | None = None, settings: FlusherSettings | None = None
) -> Iterator[Bench]:
    with ExitStack() as stack:
        regions = {
            "ring": stack.enter_context(memory.ring_region(1 << 20, 256)),
            "table": stack.enter_context(memory.table_region()),
            "control": stack.enter_context(
                memory.region(RegionKind.CONTROL, ControlLayout().size, 0)
            ),
            "front>worker": stack.enter_context(memory.lane_region(1 << 18)),
            "controller>worker": stack.enter_context(memory.lane_region(1 << 18)),
            "scheduler>worker": stack.enter_context(memory.lane_region(1 << 18)),
            "controller>flusher": stack.enter_context(memory.lane_region(1 << 18)),
            "groups>worker": stack.enter_context(memory.lane_region(1 << 18)),
            "worker>groups": stack.enter_context(memory.lane_region(1 << 18)),
        }
        made = Bench(
            directory,
            regions,
            files or DiskFiles(),
            settings or FlusherSettings(journal_bytes=1 << 20),
        )
        yield made
        made.release()
