"""Scheduler process: delivers delayed records when they are due, and serves requests about pending
ones.

Owner: the files of pending records (`workers.log.files.delay_manifest`), and the tails of its lanes
to workers and fronts. It waits on its doorbell, for the next due time by the wall clock, and for
the wall clock to be set. Flushers ring it when a delay log, or a topic that has one, has moved.

Invariants:
- Every decision can be repeated from the logs (see `workers.delays.delay_partition`).
- numpy and pyarrow are imported when the first topic with delays appears.
- A partition whose log is closed for a move is closed here. It is opened again, from what is on
  disk, when topic and delay log take batches and have one worker.

Crash: a successor is fed the whole catalog and begins each partition with its manifest. Pending
requests time out at their clients.

Run it with `python -P -m workers.delays.scheduler`.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import select
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shm.crash_points import crash_point
from shm.memory.layout import Phase, RegionKind, Role, SlotState
from shm.messages.lane_messages import Assignment, LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneError, LaneReader, LaneWriter
from shm.queues.outbox import Outbox
from shm.runtime.agent_runner import ProcessContext, configure_logging, process_name, run, start
from shm.runtime.error_handler import CountedErrorHandler
from shm.tables.partition_table import PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.format.directory.delay_files import PendingDamagedError
from tailrace.protocol.json_messages import encode_reply
from workers.delays.delivery.delivery_marks import RETRY_INTERVAL_NS
from workers.delays.requests.changes import Requester
from workers.delays.requests.service import DelayRequests
from workers.delays.wall_clock_timer import WallClockTimer
from workers.segment.files import Files
from workers.segment.freeing_files import FreeingFiles

if TYPE_CHECKING:
    from workers.delays.delay_partition import DelayPartition

logger = logging.getLogger(__name__)

OPENING_NS = 10_000_000
"""First interval between looks at a log that its flusher has not opened yet. It doubles up to
REOPEN_NS.
"""
REOPEN_NS = 1_000_000_000
REOPEN_MAX_NS = 60_000_000_000
"""Retry interval of a partition that cannot be served.

It doubles each time, up to REOPEN_MAX_NS.
"""
STEADY_NS = 120_000_000_000
"""After serving for this long, the interval starts at REOPEN_NS again."""
REQUESTS_AT_ONCE = 8
"""Requests of a front that are served before deliveries continue."""
ANSWERS_MAX = 64
"""Responses that may wait for lane space. Requests of that front wait behind them."""


@dataclass(slots=True)
class WorkerLink:
    """Lane to one worker."""

    lane: LaneWriter
    bell: Doorbell


_Answer = tuple[int, int, int, bytes]
"""(error code, session, correlation id, JSON)."""


@dataclass(slots=True)
class FrontLink:
    """Lanes from and to one front."""

    requests: LaneReader
    answers: LaneWriter
    bell: Doorbell
    outbox: Outbox[_Answer] = field(init=False)
    """Waiting responses, about ANSWERS_MAX, each smaller than the lane."""

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.answers, self.bell, self._write)

    def _write(self, answer: _Answer) -> bool:
        code, session, correlation_id, payload = answer
        return self.answers.try_write(
            LaneKind.RESPONSE, 0, code, session, correlation_id, 0, (payload,)
        )


@dataclass(slots=True)
class Trouble:
    """A partition that could not be served."""

    retry_ns: int
    wait_ns: int
    reason: str
    """Empty: its log is being made."""


class Scheduler:
    """Agent of the scheduler process (see `shm.runtime.agent_runner`)."""

    def __init__(
        self,
        *,
        files: Files,
        data_dirs: list[str],
        tables: list[PartitionTable],
        from_controller: LaneReader,
        generation: int,
        workers: dict[int, WorkerLink],
        connect_worker: Callable[[int], WorkerLink],
        fronts: list[FrontLink],
        is_running: Callable[[], bool],
        wall_us: Callable[[], int],
        on_ready: Callable[[], None],
        incarnations: Iterator[int],
        error_handler: CountedErrorHandler,
        start_ns: int,
    ) -> None:
        """`incarnations` yields numbers that no other scheduler of this host has or had."""
        self._files = files
        self._data_dirs = data_dirs
        self._tables = tables
        self._from_controller = from_controller
        self._generation = generation
        self._workers = workers
        self._connect_worker = connect_worker
        self._fronts = fronts
        self._is_running = is_running
        self._wall_us = wall_us
        self._on_ready = on_ready
        self._incarnations = incarnations
        self._error_handler = error_handler
        self._now_ns = start_ns
        self._fed = False
        self._assignments: dict[tuple[str, int], Assignment] = {}
        """Delay logs and topics by (topic id, partition)."""
        self._open: dict[tuple[str, int], DelayPartition] = {}
        """Open partitions by (delay log's id, partition)."""
        self._troubles: dict[tuple[str, int], Trouble] = {}
        """Partitions that cannot be served, or could not until recently.

        At most one per delay log.
        """
        page_bytes = min((front.answers.payload_max for front in fronts), default=1 << 19) // 2
        self._requests = DelayRequests(
            self._open,
            self._opening,
            self._write,
            self._respond,
            error_handler.on_error,
            wall_us,
            page_bytes,
        )
        self._due_us: int | None = None
        self._deadline_ns: int | None = None
        """Deadlines of the partitions at the last step."""

    # ---- agent -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        work = self._read_controller()
        if not self._fed or not self._is_running():
            return work
        self._open_partitions()
        if changes := self._read_controller():  # imports take a while, and requests follow changes
            work += changes
            self._open_partitions()
        for front in range(len(self._fronts)):
            work += self._read_requests(front)
        work += self._requests.serve_deferred(now_ns)
        work += self._step_partitions(now_ns, self._wall_us())
        work += self._requests.advance_changes(now_ns)
        self._publish()
        return work

    def _step_partitions(self, now_ns: int, wall_us: int) -> int:
        """Step each partition. An error affects only its own."""
        work = 0
        dues: list[int | None] = []
        deadlines: list[int | None] = []
        for key, partition in list(self._open.items()):
            try:
                work += partition.step(now_ns, wall_us)
                dues.append(partition.next_due_us())
                deadlines.append(partition.next_deadline_ns())
            except LaneError:
                raise
            except Exception as error:
                # boundary: it is closed, and opened again from what is on disk
                self._back_off(key, partition, error)
        self._due_us = min((due for due in dues if due is not None), default=None)
        self._deadline_ns = min(
            (deadline for deadline in deadlines if deadline is not None), default=None
        )
        return work

    def has_more(self) -> bool:
        return True

    def next_deadline_ns(self) -> int | None:
        deadlines = [] if self._deadline_ns is None else [self._deadline_ns]
        deadlines += [
            trouble.retry_ns for key, trouble in self._troubles.items() if key not in self._open
        ]
        if self._due_us is not None:
            deadlines.append(self._now_ns + max(0, self._due_us - self._wall_us()) * 1000)
        deadlines += self._requests.deadlines()
        if self._requests.are_waiting or any(front.outbox.waiting for front in self._fronts):
            deadlines.append(self._now_ns + RETRY_INTERVAL_NS)
        return min(deadlines, default=None)

    @property
    def due_us(self) -> int | None:
        """Wall-clock time of the next work, or None if only a ring announces it."""
        return self._due_us

    def begin_stop(self) -> None:
        """Do nothing: undelivered rows are delivered after the next start."""

    def is_finished(self) -> bool:
        return True

    # ---- catalog ---------------------------------------------------------------------------------

    def _read_controller(self) -> int:
        lane = self._from_controller
        count = 0
        while (message := lane.peek()) is not None:
            if message.kind == LaneKind.ASSIGN:
                self._apply(Assignment.decode(message.payload))
            elif (
                message.kind == LaneKind.FED
                and message.correlation_id == self._generation
                and not self._fed
            ):
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
            self._troubles.pop(key, None)
            self._close(key)
            return
        self._assignments[key] = assignment
        log_key = (assignment.delay_log or key[0], assignment.partition)
        partition = self._open.get(log_key)
        if partition is None:
            return
        present = partition.log if assignment.delay_of else partition.topic
        place = assignment.data_dir, assignment.slot
        if assignment.departing or place != (present.data_dir, present.slot):
            self._requests.detach(log_key)
            self._close(log_key)
        else:
            partition.assign(assignment)

    def _close(self, key: tuple[str, int]) -> None:
        partition = self._open.pop(key, None)
        if partition is not None:
            partition.close()

    def _open_partitions(self) -> None:
        """Open delay logs whose topics are known too."""
        for key, log in self._assignments.items():
            if (
                not log.delay_of
                or key in self._open
                or (key in self._troubles and self._now_ns < self._troubles[key].retry_ns)
            ):
                continue
            topic = self._assignments.get((log.delay_of, log.partition))
            if topic is None or _is_moving(log, topic):
                continue
            from workers.delays.delay_partition import DelayPartition

            # only in its own process, which collects when idle (`shm.runtime.agent_runner.run`)
            if not self._open and not gc.isenabled():
                gc.collect()
                # the new imports stay for good: a collection that scans them takes 15 ms
                gc.freeze()
            try:
                state = self._tables[log.data_dir].read(log.slot)
                if state.state is SlotState.UNREADABLE and state.topic_id == log.topic_id:
                    # not empty: its content is unknown
                    raise OSError("the delay log could not be opened; see the flusher's log")
                if state.topic_id != log.topic_id or state.state is SlotState.DELETED:
                    self._await_log(key)
                    continue
                self._open[key] = DelayPartition(
                    self._files, f"{self._data_dirs[log.data_dir]}/{log.directory_name}", log,
                    topic,
                    lambda log=log: self._tables[log.data_dir].read(log.slot),  # type: ignore[misc]
                    lambda topic=topic: self._tables[topic.data_dir].delivered(topic.slot),  # type: ignore[misc]
                    self._write, next(self._incarnations), self._now_ns, self._wall_us(),
                    self._link(log).lane.payload_max,
                )  # fmt: skip
                self._requests.attach(key, self._open[key])
            except Exception as error:  # boundary: files, schemas or metadata may be invalid
                if not self._await_removal(key, error):
                    self._note_trouble(key, topic, error, is_open=False)

    def _await_removal(self, key: tuple[str, int], error: Exception) -> bool:
        """Await a log that is being removed. False: the error has another cause.

        The flusher takes the directory away first and shows it then.
        """
        log = self._assignments[key]
        state = self._tables[log.data_dir].read(log.slot)
        is_removed = state.topic_id != log.topic_id or state.state is SlotState.DELETED
        if not is_removed and isinstance(error, FileNotFoundError):
            known = self._troubles.get(key)
            is_new = known is None or (not known.reason and known.wait_ns < REOPEN_NS)
            directory = f"{self._data_dirs[log.data_dir]}/{log.directory_name}"
            is_removed = is_new and not self._files.exists(directory)
        if is_removed:
            self._await_log(key)
        return is_removed

    def _await_log(self, key: tuple[str, int]) -> None:
        """Look again soon for a log that its flusher has yet to make, or has removed."""
        known = self._troubles.get(key)
        is_waiting = known is not None and not known.reason
        wait_ns = min(2 * known.wait_ns, REOPEN_NS) if known and is_waiting else OPENING_NS
        self._troubles[key] = Trouble(self._now_ns + wait_ns, wait_ns, "")

    def _opening(self) -> list[Assignment]:
        """Return delay logs that are known and not open: their directory does not exist yet or
        cannot be read.
        """
        return [
            log for key, log in self._assignments.items() if log.delay_of and key not in self._open
        ]

    def _back_off(self, key: tuple[str, int], partition: DelayPartition, error: Exception) -> None:
        """Close a partition after an error, and open it again later from what is on disk."""
        if not isinstance(error, OSError):
            self._error_handler.on_error(
                f"topic={partition.topic.topic} partition={partition.topic.partition}", error
            )
        if not self._await_removal(key, error):
            self._note_trouble(key, partition.topic, error, is_open=True)
        try:
            self._close(key)
        except OSError as close_error:
            logger.warning(
                "close_failed topic=%s error=%r", partition.topic.topic, str(close_error)
            )

    def _note_trouble(
        self, key: tuple[str, int], topic: Assignment, error: Exception, *, is_open: bool
    ) -> None:
        """Log an error once for each reason, and set the next retry."""
        known = self._troubles.get(key)
        if known is not None and self._now_ns - known.retry_ns > STEADY_NS:
            known = None
        wait_ns = min(2 * known.wait_ns, REOPEN_MAX_NS) if known and known.reason else REOPEN_NS
        if isinstance(error, (OSError, PendingDamagedError)):
            wait_ns = REOPEN_NS  # an operator repairs it and waits for the result
        reason = f"{type(error).__name__}: {error}"[:300]
        if known is None or known.reason != reason:
            facts = topic.topic, topic.partition, reason
            if is_open:
                logger.error("delays_interrupted topic=%s partition=%d reason=%r", *facts)
            else:
                logger.error("delays_not_opened topic=%s partition=%d reason=%r", *facts)
        self._troubles[key] = Trouble(self._now_ns + wait_ns, wait_ns, reason)

    # ---- lanes -----------------------------------------------------------------------------------

    def _write(self, assignment: Assignment, data: Any) -> bool:
        """Write a batch to its worker's lane."""
        link = self._link(assignment)
        return link.lane.try_write(
            LaneKind.PRODUCE, assignment.slot, 0, 0, 0, self._now_ns, (data,)
        )

    def _link(self, assignment: Assignment) -> WorkerLink:
        link = self._workers.get(assignment.worker)
        if link is None:
            link = self._workers[assignment.worker] = self._connect_worker(assignment.worker)
        return link

    def _publish(self) -> None:
        for link in self._workers.values():
            if link.lane.commit():
                link.bell.ring()
                crash_point("scheduler.after_publish")
        for front in self._fronts:
            front.outbox.flush()

    # ---- requests --------------------------------------------------------------------------------

    def _read_requests(self, front: int) -> int:
        link, lane = self._fronts[front], self._fronts[front].requests
        count = 0
        while (
            count < REQUESTS_AT_ONCE
            and len(link.outbox.waiting) < ANSWERS_MAX
            and (message := lane.peek()) is not None
        ):
            if self._from_controller.has_more():  # the request may name a topic just created
                self._read_controller()
                self._open_partitions()
            requester, api, payload = (
                Requester(front, message.session, message.correlation_id),
                message.slot,
                bytes(message.payload),
            )
            lane.advance(message)
            lane.consume()  # a request that fails is not read again
            self._requests.serve(requester, api, payload, self._now_ns)
            count += 1
        return count

    def _respond(self, requester: Requester, code: ErrorCode, value: dict[str, Any]) -> None:
        link = self._fronts[requester.front]
        code, body = encode_reply(code, value, link.answers.payload_max)
        link.outbox.put((code, requester.session, requester.correlation_id, body))


def _is_moving(log: Assignment, topic: Assignment) -> bool:
    """True while a partition moves to another data directory, or one of its assignments is on its
    way.
    """
    return bool(log.departing or topic.departing) or log.worker != topic.worker


def _incarnations(name: str) -> Iterator[int]:
    """Yield numbers for everything that one incarnation of the scheduler opens, different from
    those of every other.
    """
    # imported late: it loads OpenSSL's library, a megabyte and some milliseconds
    import hashlib

    for number in itertools.count():
        yield int.from_bytes(
            hashlib.blake2b(f"{name} {number}".encode(), digest_size=7).digest(), "little"
        )


def build(context: ProcessContext, files: Files) -> Scheduler:
    """Build the scheduler of this process and request its feed from the controller."""
    spec, settings = context.spec, context.spec.settings

    def connect(worker: int) -> WorkerLink:
        return WorkerLink(
            context.lane_writer(process_name(Role.WORKER, worker)),
            context.bell(Role.WORKER, worker),
        )

    def front_link(front: int) -> FrontLink:
        name = process_name(Role.FRONT, front)
        return FrontLink(
            context.lane_reader(name), context.lane_writer(name), context.bell(Role.FRONT, front)
        )

    scheduler = Scheduler(
        files=files,
        data_dirs=spec.data_dirs,
        tables=[
            PartitionTable(context.attach(f"table-{d}", RegionKind.TABLE))
            for d in range(len(spec.data_dirs))
        ],
        from_controller=context.lane_reader("controller"),
        generation=spec.generation,
        workers={},
        connect_worker=connect,
        fronts=[front_link(front) for front in range(int(settings["fronts"]))],
        is_running=lambda: context.control.phase is not Phase.RECOVERING,
        wall_us=context.clock.wall_us,
        on_ready=context.report_ready,
        incarnations=_incarnations(f"{spec.regions['control']} {spec.generation}"),
        error_handler=CountedErrorHandler(context.slot),
        start_ns=context.clock.monotonic_ns(),
    )
    context.ask_for_feed()
    return scheduler


def main() -> None:
    """Run the scheduler process."""
    context = start()
    configure_logging(context)
    scheduler = build(context, FreeingFiles())
    alarm = WallClockTimer()
    poll = select.poll()
    poll.register(context.doorbell.fd, select.POLLIN)
    poll.register(alarm.fd, select.POLLIN)

    def wait(timeout_ms: float | None, _busy_ns: int) -> None:
        """Wait for a ring, the next due time, or the setting of the wall clock."""
        alarm.set(scheduler.due_us)
        poll.poll(timeout_ms)
        alarm.clear()
        context.doorbell.clear()

    run(scheduler, context, wait)
    os.close(alarm.fd)


if __name__ == "__main__":
    main()
