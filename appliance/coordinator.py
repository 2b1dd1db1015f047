"""The coordinator: decides about topics and producers, and tells everybody else.

Owner: the catalog (SQLite); in shared memory the lanes that lead from it, and who has been fed.
Waits on its doorbell: requests come from the fronts over lanes, like everything between processes (docs/adr/0001).
Invariants: a decision is on the disk before anyone is told; a client is answered when the flusher has carried the decision out (its slot in the
    partition table shows the version); a process that asks gets the whole catalog before anything newer.
Crash: decisions in state `changing` or `deleting` are told again at start; telling twice changes nothing. Requests that were read but not
    answered time out at the client.

Run as `python -P -m appliance.coordinator`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from appliance import topic_settings
from appliance.catalog import Catalog, CatalogFullError, MissingDirectoryError, PartitionRow, Topic
from appliance.dedicated_workers import DedicatedWorkers
from appliance.leases import Leases
from appliance.ownership import directory_id
from appliance.restart_policy import ExitCode
from appliance.topic_decisions import TopicDecisions
from shm.assignments import REPLAY, Assignment, LaneKind
from shm.control import ProcessSlot
from shm.crash_points import crash_point
from shm.doorbell import Doorbell
from shm.lane import LaneReader, LaneWriter
from shm.layout import ProcessWord, Role, SlotState
from shm.partition_table import PartitionTable
from shm.process import ProcessContext, configure_logging, process_name, run, start
from tailrace.delays import delay_log_name
from tailrace.errors import (
    InvalidRequestError,
    InvalidSettingError,
    TailraceError,
)
from tailrace.partition_file import PARTITION_FILE, PartitionFile
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api

logger = logging.getLogger(__name__)

CHANGE_TIMEOUT_NS = 30_000_000_000
PENDING_RETRY_NS = 50_000_000
_READERS = (Role.FRONT, Role.SCHEDULER)
"""Who may only know what is finished."""


@dataclass(slots=True)
class Outgoing:
    """A lane to one process, and what does not fit it yet."""

    role: Role
    index: int
    lane: LaneWriter
    bell: Doorbell
    slot: ProcessSlot
    queue: deque[tuple[int, int, int, int, int, bytes]] = field(default_factory=deque)
    """(kind, slot, flags, session, correlation_id, payload)"""
    feeding: int = 0
    """The generation that asked for the whole catalog and has not got all of it; 0: none."""


@dataclass(slots=True)
class Requester:
    """Whom to answer."""

    front: int
    session: int
    correlation_id: int


@dataclass(slots=True)
class Change:
    """Decisions on their way into the partition table; answered when all are there."""

    requester: Requester | None
    topics: list[Topic]
    results: list[dict[str, Any]]
    deadline_ns: int


class Machine:
    """What the coordinator looks at in the file system, to tell clients."""

    def free_and_total_bytes(self, path: str) -> tuple[int, int]:
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def read_partition_file(self, directory: str) -> PartitionFile | None:
        try:
            with open(f"{directory}/{PARTITION_FILE}", "rb") as file:
                return PartitionFile.decode(file.read())
        except OSError:
            return None


class Coordinator:
    """An agent (see `shm.process`)."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        outgoing: list[Outgoing],
        incoming: dict[int, LaneReader],
        tables: list[PartitionTable],
        dir_numbers: list[int],
        worker_dirs: list[int],
        dedicated: DedicatedWorkers,
        connect_worker: Callable[[int], Outgoing],
        describe_processes: Callable[[], list[dict[str, Any]]],
        describe_dirs: Callable[[], list[dict[str, Any]]],
        read_partition_file: Callable[[int, str], PartitionFile | None],
        supervisor_bell: Doorbell,
        front_count: int,
        ring_bytes: int,
        lane_bytes: int,
        cluster_id: str,
        now_us: Callable[[], int],
        start_ns: int,
    ) -> None:
        """`dir_numbers`: the catalog's number of each data directory, in this run's order; `worker_dirs`: worker -> index in that order;
        `connect_worker`: the way to a dedicated worker whose regions exist.
        """
        self._catalog = catalog
        self._outgoing = outgoing
        self._incoming = incoming
        self._tables = tables
        self._dir_index = {number: index for index, number in enumerate(dir_numbers)}
        """The catalog's number of a data directory -> its index in this run."""
        self._workers_of = [[w for w, d in enumerate(worker_dirs) if d == index] for index in range(len(dir_numbers))]
        self._dedicated = dedicated
        self._connect_worker = connect_worker
        self._connected: set[int] = set()
        """Dedicated workers that there is a way to."""
        self._unconnected: dict[int, list[bytes]] = {}
        """Dedicated worker that the supervisor has not started yet -> news for it."""
        self._describe_processes = describe_processes
        self._describe_dirs = describe_dirs
        self._read_partition_file = read_partition_file
        self._supervisor_bell = supervisor_bell
        self._front_count = front_count
        self._ring_bytes = ring_bytes
        self._lane_bytes = lane_bytes
        self._cluster_id = cluster_id
        self._changes: list[Change] = []
        self._now_ns = start_ns
        self._topics: dict[str, Topic] = {topic.name: topic for topic in catalog.topics()}
        self._decisions = TopicDecisions(
            catalog,
            self._topics,
            dedicated,
            lambda row: self._table(row).read(row.slot),
            now_us,
            ring_bytes=ring_bytes,
            lane_bytes=lane_bytes,
        )
        self._leases: Leases[Outgoing] = Leases(
            catalog.database, now_us, self._decisions.existing, self._flusher_of,
            lambda out, slot, payload: out.queue.append((LaneKind.LEASE, slot, 0, 0, 0, payload)), self._table, self._respond,
        )  # fmt: skip
        for topic in self._topics.values():
            self._give_workers(topic)
        self._connect_workers()
        self._restart_changes()

    # ---- agent -----------------------------------------------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        self._now_ns = now_ns
        work = self._connect_workers() + self._feed_whoever_asks()
        for front, lane in self._incoming.items():
            while (message := lane.peek()) is not None:
                if message.kind == LaneKind.REQUEST:
                    self._answer(Requester(front, message.session, message.correlation_id), message.slot, bytes(message.payload))
                lane.advance(message)
                lane.consume()
                work += 1
        work += self._finish_changes() + self._leases.answer_taken(now_ns)
        return work + self._send()

    def has_more(self) -> bool:
        return True

    def next_deadline_ns(self) -> int | None:
        # A lane that is full, or a table that is about to change: whoever moves it rings, but look again in any case.
        return (
            self._now_ns + PENDING_RETRY_NS
            if self._changes or self._leases.is_waiting or any(out.queue for out in self._outgoing)
            else None
        )

    def begin_stop(self) -> None:
        """Nothing to finish: undecided requests time out at their clients."""

    def is_finished(self) -> bool:
        return True

    # ---- telling ---------------------------------------------------------------------------------------------------------------------

    def _table(self, row: PartitionRow) -> PartitionTable:
        return self._tables[self._dir_index[row.data_dir]]

    def _flusher_of(self, row: PartitionRow) -> Outgoing:
        return next(o for o in self._outgoing if o.role is Role.FLUSHER and o.index == self._dir_index[row.data_dir])

    def _worker_of(self, topic: Topic, row: PartitionRow) -> int:
        if topic.delay_of:  # the same worker has both
            for owner in self._topics.values():
                if owner.topic_id == topic.delay_of:
                    return self._worker_of(owner, owner.partitions[row.partition])
        if topic.given.get("worker.dedicated"):
            worker = self._dedicated.worker_of(row.slot)
            assert worker is not None, "given when the topic was made, or at the start"
            return worker
        workers = self._workers_of[self._dir_index[row.data_dir]]
        return workers[row.slot % len(workers)]

    # ---- dedicated workers -------------------------------------------------------------------------------------------------------------

    def _give_workers(self, topic: Topic) -> None:
        """Have a worker for each partition of a topic that wants them. Raises InvalidSettingError when there are too few."""
        if topic.given.get("worker.dedicated") and topic.state != "deleting":
            for row in topic.partitions:
                self._dedicated.give(row.slot, self._dir_index[row.data_dir])
            self._supervisor_bell.ring()

    def _awaits_workers(self) -> bool:
        """Whether a topic that is in use has a dedicated worker that the supervisor has not started yet (at the start of the appliance)."""
        return any(
            self._worker_of(topic, row) not in self._connected
            for topic in self._topics.values()
            if topic.state == "active" and topic.given.get("worker.dedicated")
            for row in topic.partitions
        )

    def _connect_workers(self) -> int:
        """Find the way to dedicated workers that were started since; give them what waits for them."""
        count = 0
        for worker in self._dedicated.existing():
            if worker not in self._connected:
                out = self._connect_worker(worker)
                out.queue.extend((LaneKind.ASSIGN, 0, 0, 0, 0, payload) for payload in self._unconnected.pop(worker, ()))
                self._outgoing.append(out)
                self._connected.add(worker)
                flusher = self._dedicated.data_dir_of(worker)
                for known in self._outgoing:
                    if known.role is Role.FLUSHER and known.index == flusher:
                        known.queue.append((LaneKind.FOLLOW, worker, 0, 0, 0, b""))
                count += 1
        return count

    def _assignments(self, topic: Topic, *, revive: bool = False) -> list[Assignment]:
        delay_log = self._topics.get(delay_log_name(topic.name))
        settings = topic_settings.complete(topic.given, ring_bytes=self._ring_bytes, lane_bytes=self._lane_bytes)
        return [
            Assignment(
                topic=topic.name, topic_id=topic.topic_id, partition=row.partition, partition_count=len(topic.partitions), slot=row.slot,
                version=topic.version, worker=self._worker_of(topic, row), front=row.slot % self._front_count,
                data_dir=self._dir_index[row.data_dir], schema_id=topic.schema_id, schema=topic.schema, typed=topic.typed,
                dropped=topic.state == "deleting", delete_before=row.delete_before, revive=revive, settings=settings, delay_of=topic.delay_of.hex(),
                delay_log=delay_log.topic_id.hex() if delay_log is not None else "",
            )
            for row in topic.partitions
        ]  # fmt: skip

    @staticmethod
    def _concerns(out: Outgoing, assignment: Assignment) -> bool:
        if out.role is Role.WORKER:
            return assignment.worker == out.index
        if out.role is Role.FLUSHER:
            return assignment.data_dir == out.index
        if out.role is Role.SCHEDULER:
            return assignment.has_delays
        return True

    def _feed_whoever_asks(self) -> int:
        count = 0
        for out in self._outgoing:
            wanted = out.slot.load(ProcessWord.WANTS_FEED)
            if wanted in (out.feeding, out.slot.load(ProcessWord.FED_GENERATION)):
                continue
            if out.role in _READERS and self._awaits_workers():
                continue
            for topic in self._topics.values():
                # A front may only know what is finished; a topic that is being deleted is nobody's to open.
                if topic.state == "deleting" or (out.role in _READERS and topic.state != "active"):
                    continue
                for assignment in self._assignments(topic):
                    if self._concerns(out, assignment):
                        out.queue.append((LaneKind.ASSIGN, 0, REPLAY, 0, 0, assignment.encode()))
            if out.role is Role.FLUSHER:
                self._leases.feed(out, self._topics.values())
            out.queue.append((LaneKind.FED, 0, 0, 0, wanted, b""))
            out.feeding = wanted
            count += 1
        return count

    def _tell_workers(self, topic: Topic, *, revive: bool = False) -> None:
        for assignment in self._assignments(topic, revive=revive):
            payload = assignment.encode()
            out = next((o for o in self._outgoing if o.role is Role.WORKER and o.index == assignment.worker), None)
            if out is not None:
                out.queue.append((LaneKind.ASSIGN, 0, 0, 0, 0, payload))
            else:
                self._unconnected.setdefault(assignment.worker, []).append(payload)

    def _tell_readers(self, topic: Topic) -> None:
        for assignment in self._assignments(topic):
            payload = assignment.encode()
            for out in self._outgoing:
                if out.role in _READERS and self._concerns(out, assignment):
                    out.queue.append((LaneKind.ASSIGN, 0, 0, 0, 0, payload))

    def _send(self) -> int:
        """Move what is queued into the lanes, as far as it fits."""
        count = 0
        for out in self._outgoing:
            while out.queue:
                kind, slot, flags, session, correlation_id, payload = out.queue[0]
                if not out.lane.try_write(kind, slot, flags, session, correlation_id, self._now_ns, (payload,)):
                    break
                out.queue.popleft()
                count += 1
            if out.lane.publish():
                out.bell.ring()
            if out.feeding and not out.queue:
                # Only now: were this coordinator killed before, its successor must begin again.
                out.slot.store(ProcessWord.FED_GENERATION, out.feeding)
                out.feeding = 0
        return count

    def _respond(self, requester: Requester, code: ErrorCode, value: dict[str, Any]) -> None:
        out = next(o for o in self._outgoing if o.role is Role.FRONT and o.index == requester.front)
        out.queue.append((LaneKind.RESPONSE, 0, code, requester.session, requester.correlation_id, orjson.dumps(value)))

    # ---- requests --------------------------------------------------------------------------------------------------------------------

    def _answer(self, requester: Requester, api: int, payload: bytes) -> None:
        """Decide one request. Whatever it holds, the answer is a code and a sentence."""
        try:
            request = orjson.loads(payload)
            if api == Api.INIT_PRODUCER_ID:
                self._init_producer(requester, request)
            elif api == Api.DESCRIBE_CLUSTER:
                self._respond(requester, ErrorCode.OK, self._describe_cluster())
            elif api == Api.LEASE_OFFSETS:
                self._leases.take(requester, request, self._now_ns)
            elif api in (Api.CREATE_TOPICS, Api.DELETE_TOPICS, Api.ALTER_TOPICS, Api.DELETE_RECORDS):
                self._change_topics(requester, Api(api), request)
            else:
                raise TailraceError(f"API {api} is not the coordinator's", ErrorCode.UNKNOWN_API)
        except TailraceError as error:
            self._respond(requester, error.code, {"message": error.detail})

    def _init_producer(self, requester: Requester, request: dict[str, Any]) -> None:
        producer_id, epoch = request.get("producer_id"), request.get("producer_epoch", 0)
        if producer_id is None:
            producer_id, epoch = self._catalog.new_producer()
            crash_point("coordinator.after_producer_id")
        elif isinstance(producer_id, int) and isinstance(epoch, int) and 0 <= producer_id < 2**62 and -1 <= epoch <= 32767:
            producer_id, epoch = self._catalog.next_epoch(producer_id, epoch)
        else:
            raise InvalidRequestError("producer_id and producer_epoch must be whole numbers")
        self._respond(requester, ErrorCode.OK, {"producer_id": producer_id, "producer_epoch": epoch})

    def _change_topics(self, requester: Requester, api: Api, request: dict[str, Any]) -> None:
        decide = {
            Api.CREATE_TOPICS: self._decisions.create, Api.DELETE_TOPICS: self._decisions.delete, Api.ALTER_TOPICS: self._decisions.alter,
            Api.DELETE_RECORDS: self._decisions.delete_records,
        }[api]  # fmt: skip
        items = request.get("topics")
        if not isinstance(items, list) or not items or len(items) > 1000:
            raise InvalidRequestError("the request needs a list `topics` of 1 to 1000 entries")
        topics: list[Topic] = []
        results: list[dict[str, Any]] = []
        for item in items:
            result: dict[str, Any] = {"name": item.get("name") if isinstance(item, dict) else str(item), "code": 0}
            try:
                if not isinstance(item, dict):
                    raise InvalidRequestError("each entry of `topics` must be an object")
                decided = decide(item, bool(request.get("validate_only", False)))
                if decided:
                    crash_point("coordinator.after_decision")
                self._topics.update({topic.name: topic for topic in decided})
                for topic in decided:
                    topics.append(topic)
                    self._give_workers(topic)
                    if topic.state == "deleting":
                        self._tell_readers(topic)  # before the files go: nothing more is sent there
                    self._tell_workers(topic, revive=bool(item.get("online")))
            except TailraceError as error:
                result.update(code=int(error.code), message=error.detail)
            except CatalogFullError as error:
                result.update(code=int(ErrorCode.INVALID_SETTING), message=str(error))
            results.append(result)
        self._changes.append(Change(requester, topics, results, self._now_ns + CHANGE_TIMEOUT_NS))

    # ---- carrying out ----------------------------------------------------------------------------------------------------------------

    def _restart_changes(self) -> None:
        """Tell again what a predecessor may not have told."""
        unfinished = [topic for topic in self._topics.values() if topic.state != "active"]
        for topic in unfinished:
            self._tell_workers(topic)
        if unfinished:
            self._changes.append(Change(None, unfinished, [], self._now_ns + CHANGE_TIMEOUT_NS))

    def _is_applied(self, topic: Topic) -> bool:
        for row in topic.partitions:
            state = self._table(row).read(row.slot)
            if state.topic_id != topic.topic_id or state.applied_version < topic.version:
                return False
        return True

    def _finish_changes(self) -> int:
        count = 0
        for change in list(self._changes):
            for topic in [t for t in change.topics if self._is_applied(t)]:
                change.topics.remove(topic)
                self._complete(topic, change)
            if not change.topics:
                if change.requester is not None:
                    self._respond(change.requester, ErrorCode.OK, {"results": change.results})
            elif self._now_ns >= change.deadline_ns and change.requester is not None:
                self._respond(
                    change.requester,
                    ErrorCode.TIMED_OUT,
                    {"message": "the change is decided but not carried out yet; look at `tailrace status`"},
                )
                change.requester = None
                continue
            else:
                continue
            self._changes.remove(change)
            count += 1
        return count

    def _complete(self, topic: Topic, change: Change) -> None:
        crash_point("coordinator.after_apply")
        if topic.state == "deleting":
            self._catalog.forget(topic.topic_id)
            self._topics.pop(topic.name, None)
            for row in topic.partitions:
                self._dedicated.take_back(row.slot)
            self._supervisor_bell.ring()
            logger.info("topic_deleted topic=%s", topic.name)
            return
        self._catalog.mark_active(topic.topic_id)
        active = self._catalog.topic(topic.name)
        assert active is not None
        self._topics[topic.name] = active
        self._tell_readers(active)
        logger.info("topic_changed topic=%s version=%d partitions=%d", topic.name, topic.version, len(topic.partitions))
        for row in topic.partitions:
            state = self._table(row).read(row.slot)
            for result in change.results:
                if result["name"] == topic.name:
                    result.setdefault("log_start_offsets", {})[str(row.partition)] = state.log_start_offset
                    if state.reason:
                        result.update(
                            code=state.reason,
                            message=f"partition {row.partition} of {topic.name!r} takes no writes; see `tailrace status` and the log",
                        )

    def _describe_cluster(self) -> dict[str, Any]:
        partitions = [(topic, row, self._table(row).read(row.slot)) for topic in self._topics.values() for row in topic.partitions]
        return {
            "cluster_id": self._cluster_id,
            "processes": self._describe_processes(),
            "data_dirs": self._describe_dirs(),
            "topics": sum(not topic.delay_of for topic in self._topics.values()),
            "partitions": sum(not topic.delay_of for topic, _, _ in partitions),
            "bytes": sum(state.size_bytes for _, _, state in partitions),
            "offline": [
                {
                    "topic": topic.name,
                    "partition": row.partition,
                    "code": ErrorCode(state.reason).name,
                    "reason": self._reason(topic, row),
                }
                for topic, row, state in partitions
                if state.state in (SlotState.OFFLINE_FOR_WRITES, SlotState.UNREADABLE)
            ],
        }

    def _reason(self, topic: Topic, row: PartitionRow) -> str:
        known = self._read_partition_file(self._dir_index[row.data_dir], f"{topic.name}-{row.partition}")
        return known.offline if known is not None and known.offline else "see the appliance's log"


def build(context: ProcessContext, catalog: Catalog, dir_numbers: list[int], machine: Machine) -> Coordinator:
    """The coordinator of this specification. `dir_numbers`: what the catalog calls each data directory."""
    spec, settings, control = context.spec, context.spec.settings, context.control
    worker_dirs, front_count = list(settings["worker_dirs"]), int(settings["fronts"])
    roles = [(Role.FRONT, f) for f in range(front_count)]
    roles += [(Role.SCHEDULER, 0), *((Role.WORKER, w) for w in range(len(worker_dirs)))]
    roles += [(Role.FLUSHER, d) for d in range(len(spec.data_dirs))]

    dedicated = DedicatedWorkers({w: control.process(Role.WORKER, w) for w in settings["spare_workers"]}, len(spec.data_dirs))

    def connect(role: Role, index: int) -> Outgoing:
        name = process_name(role, index)
        return Outgoing(role, index, context.lane_writer(name), context.bell(role, index), control.process(role, index))

    def describe_processes() -> list[dict[str, Any]]:
        rows = []
        spares = [(Role.WORKER, w) for w in dedicated.existing() if control.process(Role.WORKER, w).load(ProcessWord.DEDICATED_TO)]
        console = [(Role.CONSOLE, 0)] if settings["http.listen"] else []
        for role, index in [(Role.SUPERVISOR, 0), (Role.COORDINATOR, 0), *roles, *spares, *console]:
            slot = control.process(role, index)
            rows.append(
                {
                    "name": process_name(role, index),
                    "pid": slot.load(ProcessWord.PID),
                    "live": slot.is_live(),
                    "restarts": slot.load(ProcessWord.RESTARTS),
                    "internal_errors": slot.load(ProcessWord.INTERNAL_ERRORS),
                }
            )
        return rows

    def describe_dirs() -> list[dict[str, Any]]:
        rows = []
        for index, path in enumerate(spec.data_dirs):
            free, total = machine.free_and_total_bytes(path)
            full = bool(control.process(Role.FLUSHER, index).load(ProcessWord.DISK_FULL))
            rows.append(
                {
                    "path": path,
                    "free_bytes": free,
                    "total_bytes": total,
                    "reserve_bytes": int(settings["reserve_bytes"]),
                    "state": "FULL" if full else "OK",
                }
            )
        return rows

    coordinator = Coordinator(
        catalog=catalog,
        outgoing=[connect(role, index) for role, index in roles],
        incoming={f: context.lane_reader(process_name(Role.FRONT, f)) for f in range(front_count)},
        tables=[context.table(d) for d in range(len(spec.data_dirs))],
        dir_numbers=dir_numbers,
        worker_dirs=worker_dirs,
        dedicated=dedicated,
        connect_worker=lambda worker: connect(Role.WORKER, worker),
        describe_processes=describe_processes,
        describe_dirs=describe_dirs,
        read_partition_file=lambda index, directory: machine.read_partition_file(f"{spec.data_dirs[index]}/{directory}"),
        supervisor_bell=context.bell(Role.SUPERVISOR, 0),
        front_count=front_count,
        ring_bytes=int(settings["ring_bytes"]),
        lane_bytes=int(settings["lane_bytes"]),
        cluster_id=spec.instance,
        now_us=context.clock.wall_us,
        start_ns=context.clock.monotonic_ns(),
    )
    context.report_ready()
    for front in range(front_count):  # they look whether this is another generation
        context.bell(Role.FRONT, front).ring()
    return coordinator


def main() -> None:
    """The process."""
    context = start()
    configure_logging(context)
    spec = context.spec
    catalog = Catalog(f"{spec.data_dirs[0]}/coordinator.db", int(spec.settings["slots"]))
    try:
        dir_numbers = catalog.register_dirs([(directory_id(path), path) for path in spec.data_dirs])
    except MissingDirectoryError as error:
        print(f"tailrace: {error}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.CONFIG)
    try:
        coordinator = build(context, catalog, dir_numbers, Machine())
    except InvalidSettingError as error:
        print(f"tailrace: {error.detail}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.CONFIG)
    run(coordinator, context)
    catalog.close()


if __name__ == "__main__":
    main()
