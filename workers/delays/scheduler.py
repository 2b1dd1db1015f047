"""The scheduler: delivers delayed records when they are due, and answers for what is pending.

Owner: the files of pending records (`workers.delays.manifest`), the tails of its lanes to workers and fronts.
Waits on its doorbell (flushers ring it when a delay log, or a topic that has one, has moved), until the next due time by the wall clock, and on being told
that the wall clock was set.
Invariants: it decides nothing that cannot be decided again: see `workers.delays.delay_partition`. numpy and pyarrow are loaded when the first topic with delays
    comes, not before.
Crash: a successor is fed the whole catalog and begins each partition with its manifest. Requests that were under way time out at their clients.

Run as `python -P -m workers.delays.scheduler`.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from shm.assignments import Assignment, LaneKind
from shm.crash_points import crash_point
from shm.doorbell import Doorbell
from shm.lane import LaneReader, LaneWriter
from shm.layout import Phase, RegionKind, Role
from shm.partition_table import PartitionTable
from shm.process import ProcessContext, configure_logging, process_name, run, start
from tailrace.pending_files import PendingDamagedError
from tailrace.protocol.errors import ErrorCode
from workers.delays.requests import DelayRequests, Requester
from workers.delays.wall_clock import WallClockAlarm
from workers.files import DiskFiles, Files

if TYPE_CHECKING:
    from workers.delays.delay_partition import DelayPartition

logger = logging.getLogger(__name__)

REOPEN_NS = 1_000_000_000
TRY_AGAIN_NS = 10_000_000
"""How soon, when a lane is full or a request waits."""


@dataclass(slots=True)
class WorkerLink:
    """The way to one worker."""

    lane: LaneWriter
    bell: Doorbell


@dataclass(slots=True)
class FrontLink:
    """The way from one front, and back."""

    requests: LaneReader
    answers: LaneWriter
    bell: Doorbell
    queue: deque[tuple[int, int, int, bytes]] = field(default_factory=deque)
    """(error code, session, correlation id, JSON) of answers that do not fit the lane yet."""


class Scheduler:
    """An agent (see `shm.process`)."""

    def __init__(
        self,
        *,
        files: Files,
        data_dirs: list[str],
        tables: list[PartitionTable],
        from_coordinator: LaneReader,
        generation: int,
        workers: dict[int, WorkerLink],
        connect_worker: Callable[[int], WorkerLink],
        fronts: list[FrontLink],
        is_running: Callable[[], bool],
        wall_us: Callable[[], int],
        on_ready: Callable[[], None],
        lives: Iterator[int],
        start_ns: int,
    ) -> None:
        """`lives`: numbers that no scheduler had before, nor another one of this host has."""
        self._files = files
        self._data_dirs = data_dirs
        self._tables = tables
        self._from_coordinator = from_coordinator
        self._generation = generation
        self._workers = workers
        self._connect_worker = connect_worker
        self._fronts = fronts
        self._is_running = is_running
        self._wall_us = wall_us
        self._on_ready = on_ready
        self._lives = lives
        self._now_ns = start_ns
        self._fed = False
        self._assignments: dict[tuple[str, int], Assignment] = {}
        """(topic id, partition), delay logs and topics alike."""
        self._open: dict[tuple[str, int], DelayPartition] = {}
        """(delay log's id, partition)."""
        self._retry_at: dict[tuple[str, int], int] = {}
        """Partitions whose files could not be used: when to try again."""
        self._requests = DelayRequests(self._open, self._opening, self._write, self._respond, wall_us, generation)
        self._due_us: int | None = None

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        work = self._read_coordinator()
        if not self._fed or not self._is_running():
            return work
        self._open_partitions()
        for front in range(len(self._fronts)):
            work += self._read_requests(front)
        work += self._requests.serve_deferred(now_ns)
        wall_us = self._wall_us()
        for key, partition in list(self._open.items()):
            try:
                work += partition.step(now_ns, wall_us)
            except OSError as error:
                self._give_up_for_now(key, partition, error)
        work += self._requests.advance_changes(now_ns)
        self._publish()
        due = [due_us for p in self._open.values() if (due_us := p.next_due_us()) is not None]
        self._due_us = min(due, default=None)
        return work

    def has_more(self) -> bool:
        return True

    def next_deadline_ns(self) -> int | None:
        deadlines = [deadline for p in self._open.values() if (deadline := p.next_deadline_ns()) is not None]
        deadlines += self._retry_at.values()
        if self._due_us is not None:
            deadlines.append(self._now_ns + max(0, self._due_us - self._wall_us()) * 1000)
        deadlines += self._requests.deadlines()
        if self._requests.are_waiting or any(front.queue for front in self._fronts):
            deadlines.append(self._now_ns + TRY_AGAIN_NS)
        return min(deadlines, default=None)

    @property
    def due_us(self) -> int | None:
        """When, by the wall clock, something is to be done next; None: not without a ring."""
        return self._due_us

    def begin_stop(self) -> None:
        """Nothing to finish: what is not delivered is delivered after the next start."""

    def is_finished(self) -> bool:
        return True

    # ---- catalog ---------------------------------------------------------------------------------------------------------------------

    def _read_coordinator(self) -> int:
        lane = self._from_coordinator
        count = 0
        while (message := lane.peek()) is not None:
            if message.kind == LaneKind.ASSIGN:
                self._apply(Assignment.decode(message.payload))
            elif message.kind == LaneKind.FED and message.correlation_id == self._generation and not self._fed:
                self._fed = True
                self._on_ready()
            lane.advance(message)
            lane.consume()
            count += 1
        return count

    def _apply(self, assignment: Assignment) -> None:
        key = (assignment.topic_id.hex(), assignment.partition)
        known = self._assignments.get(key)
        if known is not None and known.version > assignment.version:
            return
        if assignment.dropped:
            self._assignments.pop(key, None)
            self._close(key)
            return
        self._assignments[key] = assignment
        log_key = (assignment.delay_log or key[0], assignment.partition)
        partition = self._open.get(log_key)
        if partition is not None:
            if assignment.delay_of:
                partition.log = assignment
            else:
                partition.topic = assignment

    def _close(self, key: tuple[str, int]) -> None:
        self._retry_at.pop(key, None)
        partition = self._open.pop(key, None)
        if partition is not None:
            partition.close()

    def _open_partitions(self) -> None:
        """Begin with delay logs whose topics are known too."""
        for key, log in self._assignments.items():
            if not log.delay_of or key in self._open or self._now_ns < self._retry_at.get(key, 0):
                continue
            topic = self._assignments.get((log.delay_of, log.partition))
            if topic is None:
                continue
            from workers.delays.delay_partition import DelayPartition

            if not self._open:
                gc.collect()
                gc.freeze()  # what was imported now stays: a collection that looks through it takes 15 ms
            try:
                self._open[key] = DelayPartition(
                    self._files, f"{self._data_dirs[log.data_dir]}/{log.directory_name}", log, topic,
                    lambda log=log: self._tables[log.data_dir].read(log.slot),  # type: ignore[misc]
                    lambda topic=topic: self._tables[topic.data_dir].delivered(topic.slot),  # type: ignore[misc]
                    self._write, next(self._lives), self._now_ns, self._wall_us(),
                )  # fmt: skip
                self._retry_at.pop(key, None)
            except (OSError, PendingDamagedError) as error:
                if key not in self._retry_at:
                    logger.error("delays_not_opened topic=%s partition=%d reason=%r", topic.topic, log.partition, str(error))
                self._retry_at[key] = self._now_ns + REOPEN_NS

    def _opening(self) -> list[Assignment]:
        """Delay logs that are known and not open: their directory is not made yet, or cannot be read."""
        return [log for key, log in self._assignments.items() if log.delay_of and key not in self._open]

    def _give_up_for_now(self, key: tuple[str, int], partition: DelayPartition, error: OSError) -> None:
        """The disk refused: begin anew from what is on it, a little later."""
        logger.error("delays_interrupted topic=%s partition=%d error=%r", partition.topic.topic, partition.topic.partition, str(error))
        self._close(key)
        self._retry_at[key] = self._now_ns + REOPEN_NS

    # ---- lanes -----------------------------------------------------------------------------------------------------------------------

    def _write(self, assignment: Assignment, data: Any) -> bool:
        """A batch into the lane of its worker."""
        link = self._workers.get(assignment.worker)
        if link is None:
            link = self._workers[assignment.worker] = self._connect_worker(assignment.worker)
        return link.lane.try_write(LaneKind.PRODUCE, assignment.slot, 0, 0, 0, self._now_ns, (data,))

    def _publish(self) -> None:
        for link in self._workers.values():
            if link.lane.publish():
                link.bell.ring()
                crash_point("scheduler.after_publish")
        for front in self._fronts:
            while front.queue:
                code, session, correlation_id, payload = front.queue[0]
                if not front.answers.try_write(LaneKind.RESPONSE, 0, code, session, correlation_id, self._now_ns, (payload,)):
                    break
                front.queue.popleft()
            if front.answers.publish():
                front.bell.ring()

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def _read_requests(self, front: int) -> int:
        lane = self._fronts[front].requests
        count = 0
        while (message := lane.peek()) is not None:
            requester = Requester(front, message.session, message.correlation_id)
            self._requests.serve(requester, message.slot, bytes(message.payload), self._now_ns)
            lane.advance(message)
            lane.consume()
            count += 1
        return count

    def _respond(self, requester: Requester, code: ErrorCode, value: dict[str, Any]) -> None:
        self._fronts[requester.front].queue.append((code, requester.session, requester.correlation_id, orjson.dumps(value)))


def _lives(life: str) -> Iterator[int]:
    """Numbers for everything that is opened in one life of a scheduler, different from those of every other life."""
    for number in itertools.count():
        yield int.from_bytes(hashlib.blake2b(f"{life} {number}".encode(), digest_size=7).digest(), "little")


def build(context: ProcessContext, files: Files) -> Scheduler:
    """The scheduler of this specification; it has asked to be fed."""
    spec, settings = context.spec, context.spec.settings

    def connect(worker: int) -> WorkerLink:
        return WorkerLink(context.lane_writer(process_name(Role.WORKER, worker)), context.bell(Role.WORKER, worker))

    def front_link(front: int) -> FrontLink:
        name = process_name(Role.FRONT, front)
        return FrontLink(context.lane_reader(name), context.lane_writer(name), context.bell(Role.FRONT, front))

    scheduler = Scheduler(
        files=files,
        data_dirs=spec.data_dirs,
        tables=[PartitionTable(context.attach(f"table-{d}", RegionKind.TABLE)) for d in range(len(spec.data_dirs))],
        from_coordinator=context.lane_reader("coordinator"),
        generation=spec.generation,
        workers={},
        connect_worker=connect,
        fronts=[front_link(front) for front in range(int(settings["fronts"]))],
        is_running=lambda: context.control.phase is not Phase.RECOVERING,
        wall_us=context.clock.wall_us,
        on_ready=context.report_ready,
        lives=_lives(f"{spec.regions['control']} {spec.generation}"),
        start_ns=context.clock.monotonic_ns(),
    )
    context.ask_for_feed()
    return scheduler


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
    scheduler = build(context, DiskFiles())
    alarm = WallClockAlarm()
    poll = select.poll()
    poll.register(context.doorbell.fd, select.POLLIN)
    poll.register(alarm.fd, select.POLLIN)

    def wait(timeout_ms: float | None) -> None:
        """Until rung, until the next due time by the wall clock, or until that is set."""
        alarm.set(scheduler.due_us)
        poll.poll(timeout_ms)
        alarm.clear()
        context.doorbell.clear()

    run(scheduler, context, wait)
    os.close(alarm.fd)


if __name__ == "__main__":
    main()
