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
from tailrace.delays import HORIZON_US, TICK_US, delay_id, parse_delay_id, tick_of
from tailrace.errors import InvalidRequestError, TailraceError, UnknownDelayError, UnknownTopicError
from tailrace.pending_files import PendingDamagedError
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api
from workers.delays.wall_clock import WallClockAlarm
from workers.files import DiskFiles, Files

if TYPE_CHECKING:
    from workers.delays.delay_partition import DelayPartition

logger = logging.getLogger(__name__)

LIST_LIMIT = 1_000
CHANGE_LIMIT = 2_000
CHANGE_TIMEOUT_NS = 12_000_000_000
DEFER_NS = 5_000_000_000
"""How long a request about a row that is acknowledged (acks=1) waits for it to be settled."""
REOPEN_NS = 1_000_000_000
NEVER_US = 1 << 62


class NotSettledYet(Exception):
    """What a request is about lies above the high watermark."""


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


@dataclass(slots=True)
class Requester:
    front: int
    session: int
    correlation_id: int


@dataclass(slots=True)
class Part:
    """What a request changes in one partition: its batch in the delay log."""

    partition: DelayPartition
    token: int
    batch: bytearray
    rows: list[int]
    """Which of the request's items they are."""
    is_sent: bool = False


@dataclass(slots=True)
class PendingChange:
    """A request that cancels or reschedules, until the delay logs show what came of it."""

    requester: Requester
    results: list[dict[str, Any]]
    parts: list[Part]
    deadline_ns: int


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
        self._changes: list[PendingChange] = []
        self._deferred: list[tuple[Requester, int, bytes, int]] = []
        """Requests about rows that were acknowledged but are not settled yet, each with its deadline."""
        self._next_token = 1
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
        work += self._serve_deferred()
        wall_us = self._wall_us()
        for key, partition in list(self._open.items()):
            try:
                work += partition.step(now_ns, wall_us)
            except OSError as error:
                self._give_up_for_now(key, partition, error)
        work += self._advance_changes()
        self._publish()
        due = [due_us for p in self._open.values() if (due_us := p.next_due_us()) is not None]
        self._due_us = min(due, default=None)
        return work

    def has_more(self) -> bool:
        return True

    def next_deadline_ns(self) -> int | None:
        deadlines = [deadline for p in self._open.values() if (deadline := p.next_deadline_ns()) is not None]
        deadlines += [*self._retry_at.values(), *(change.deadline_ns for change in self._changes)]
        if self._due_us is not None:
            deadlines.append(self._now_ns + max(0, self._due_us - self._wall_us()) * 1000)
        if (
            self._deferred
            or any(front.queue for front in self._fronts)
            or any(not part.is_sent for change in self._changes for part in change.parts)
        ):
            deadlines.append(self._now_ns + 10_000_000)
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
            self._serve(
                Requester(front, message.session, message.correlation_id), message.slot, bytes(message.payload), self._now_ns + DEFER_NS
            )
            lane.advance(message)
            lane.consume()
            count += 1
        return count

    def _serve(self, requester: Requester, api: int, payload: bytes, deadline_ns: int) -> None:
        """Answer a request, now or when what it is about is known."""
        try:
            self._answer(requester, api, payload, may_wait=self._now_ns < deadline_ns)
        except NotSettledYet:
            self._deferred.append((requester, api, payload, deadline_ns))
        except TailraceError as error:
            self._respond(requester, error.code, {"message": error.detail})
        except OSError as error:
            self._respond(requester, ErrorCode.STORAGE_ERROR, {"message": f"pending records cannot be read: {error}"})

    def _serve_deferred(self) -> int:
        waiting, self._deferred = self._deferred, []
        for item in waiting:
            self._serve(*item)
        return len(waiting) - len(self._deferred)

    def _respond(self, requester: Requester, code: ErrorCode, value: dict[str, Any]) -> None:
        self._fronts[requester.front].queue.append((code, requester.session, requester.correlation_id, orjson.dumps(value)))

    def _answer(self, requester: Requester, api: int, payload: bytes, *, may_wait: bool) -> None:
        request = orjson.loads(payload)
        if api == Api.LIST_DELAYS:
            self._respond(requester, ErrorCode.OK, self._list(request))
        elif api == Api.DESCRIBE_DELAYS:
            self._respond(requester, ErrorCode.OK, {"partitions": [p.describe() for p in self._open.values()]})
        elif api == Api.CHANGE_DELAYS:
            self._change(requester, request, may_wait)
        else:
            raise TailraceError(f"API {api} is not the scheduler's", ErrorCode.UNKNOWN_API)

    def _partitions_of(self, topic: object) -> list[DelayPartition]:
        found = sorted((p for p in self._open.values() if p.topic.topic == topic), key=lambda p: p.topic.partition)
        if not found:
            raise UnknownTopicError(f"there is no topic {topic!r} with delays")
        return found

    def _list(self, request: dict[str, Any]) -> dict[str, Any]:
        """A page of what is pending in a topic, by (partition, tick, offset). `after`: where the page before ended; one that is not the last may be short."""
        partitions = self._partitions_of(request.get("topic"))
        for partition in partitions:
            partition.catch_up()
        limit, after = request.get("limit", 100), request.get("after")
        if not isinstance(limit, int) or not 1 <= limit <= LIST_LIMIT:
            raise InvalidRequestError(f"limit is {limit!r}; it takes 1 to {LIST_LIMIT}")
        from_us, to_us = request.get("from_us"), request.get("to_us")
        key = request.get("key")
        try:
            wanted_key = None if key is None else bytes.fromhex(key)
            begin = (int(from_us) + TICK_US - 1) // TICK_US if from_us is not None else 0
            end = (int(to_us) + TICK_US - 1) // TICK_US if to_us is not None else NEVER_US
            place = None if after is None else (int(after[0]), int(after[1]), int(after[2]))
        except (TypeError, ValueError, IndexError):
            raise InvalidRequestError(
                "from_us and to_us are whole numbers, key is hexadecimal, after is what the page before ended with"
            ) from None
        rows: list[dict[str, Any]] = []
        last = None
        for partition in partitions:
            number = partition.topic.partition
            if request.get("partition") not in (None, number) or (place is not None and number < place[0]):
                continue
            start = (place[1], place[2] + 1) if place is not None and number == place[0] else (0, 0)
            listed, reached = partition.listed(max(start, (begin, 0)), end, limit - len(rows), wanted_key)
            for row in listed:
                rows.append({
                    "delay_id": delay_id(partition.log.topic_id, number, row["offset"], row["due_us"]), "topic": partition.topic.topic,
                    "partition": number, "due_us": row["due_us"], "key": row["key"], "repeat": row["repeat"],
                })  # fmt: skip
            if reached is not None:
                last = [number, *reached]
                break
        return {"delays": rows, "after": last}

    def _change(self, requester: Requester, request: dict[str, Any], may_wait: bool) -> None:
        """Cancel or reschedule: `changes` is a list of {"delay_id", "due_us" (null: cancel)}. Answered when the delay logs show what came of it."""
        from workers.delays.pending_rows import one_batch, table_of

        items = request.get("changes")
        if not isinstance(items, list) or not 1 <= len(items) <= CHANGE_LIMIT:
            raise InvalidRequestError(f"the request needs a list `changes` of 1 to {CHANGE_LIMIT} entries")
        for partition in self._open.values():
            partition.catch_up()
        results: list[dict[str, Any]] = [{} for _ in items]
        gathered: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        for number, item in sorted(enumerate(items), key=_by_offset):  # a chunk of a bucket file is looked at once
            try:
                place, row = self._changed_row(item, request.get("topic"), may_wait)
                gathered.setdefault(place, []).append((number, row))
            except TailraceError as error:
                results[number] = {"code": int(error.code), "message": error.detail}
        parts = []
        for place, rows in gathered.items():
            partition = self._open[place]
            token, self._next_token = self._next_token, self._next_token + 1
            # A predecessor's tokens are in the log too.
            token = token << 32 | self._generation & 0xFFFFFFFF
            batch = partition.change_batch(one_batch(table_of([row for _, row in rows])), token)
            limit = int(partition.log.settings["max.message.bytes"])
            if len(batch) > limit:
                raise InvalidRequestError(f"what is rescheduled takes {len(batch)} bytes in one partition; {limit} are allowed at once")
            from workers.delays.delay_partition import Change

            partition.changes[token] = Change()
            parts.append(Part(partition, token, batch, [number for number, _ in rows]))
        self._changes.append(PendingChange(requester, results, parts, self._now_ns + CHANGE_TIMEOUT_NS))

    def _changed_row(self, item: Any, topic: object, may_wait: bool) -> tuple[tuple[str, int], Any]:
        """(partition, row to append). Raises TailraceError."""
        if not isinstance(item, dict):
            raise InvalidRequestError("each entry of `changes` must be an object")
        key = parse_delay_id(item.get("delay_id"))
        place = (key.topic_id.hex(), key.partition)
        partition = self._open.get(place)
        if partition is None:
            raise UnknownDelayError("there is no topic with this delayed record")
        if topic is not None and partition.topic.topic != topic:
            raise UnknownDelayError(f"the delayed record belongs to topic {partition.topic.topic!r}, not {topic!r}")
        due_us = item.get("due_us")
        if due_us is not None and (
            not isinstance(due_us, int) or isinstance(due_us, bool) or not 0 <= due_us <= self._wall_us() + HORIZON_US
        ):
            raise InvalidRequestError(f"due_us is {due_us!r}; it takes microseconds since 1970, at most 20 years ahead")
        if may_wait and not partition.has_read(key.offset):
            raise NotSettledYet
        partition.hints[key.offset] = tick_of(key.due_us)
        if due_us is None:
            if not partition.waits(key.offset):
                partition.hints.pop(key.offset)
                raise UnknownDelayError
            return place, partition.cancellation(key.offset)
        row = partition.row_of(key.offset)
        if row is None:
            partition.hints.pop(key.offset)
            raise UnknownDelayError
        return place, partition.replacement(row, due_us, key.offset)

    def _advance_changes(self) -> int:
        count = 0
        for change in list(self._changes):
            for part in change.parts:
                if not part.is_sent:
                    part.is_sent = self._write(part.partition.log, part.batch)
            outcomes = [part.partition.changes[part.token].outcomes for part in change.parts]
            if all(outcome is not None for outcome in outcomes):
                for part, outcome in zip(change.parts, outcomes, strict=True):
                    assert outcome is not None
                    for number, found in zip(part.rows, outcome, strict=True):
                        change.results[number] = self._outcome(part.partition, found)
                self._respond(change.requester, ErrorCode.OK, {"results": change.results})
            elif self._now_ns < change.deadline_ns:
                continue
            else:
                self._respond(
                    change.requester, ErrorCode.TIMED_OUT, {"message": "nobody knows yet whether the change was made; list what is pending"}
                )
            for part in change.parts:
                part.partition.changes.pop(part.token, None)
            self._changes.remove(change)
            count += 1
        return count

    @staticmethod
    def _outcome(partition: DelayPartition, found: tuple[int, int] | bool | None) -> dict[str, Any]:
        if found is None:
            return {"code": 0}
        if isinstance(found, tuple):
            offset, due_us = found
            return {"code": 0, "due_us": due_us, "delay_id": delay_id(partition.log.topic_id, partition.log.partition, offset, due_us)}
        return {"code": int(ErrorCode.UNKNOWN_DELAY), "message": "it came too late: the record is delivered, or on its way"}


def _by_offset(numbered: tuple[int, Any]) -> tuple[int, int]:
    """(offset, number) of an entry of a request; what is no id comes first."""
    number, item = numbered
    try:
        return parse_delay_id(item.get("delay_id")).offset, number
    except (TailraceError, AttributeError):
        return -1, number


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
