"""What the coordinator tells the other processes: which partition each of them serves, and its answers, in order, as far as their lanes take it.

Owner: the coordinator; in shared memory the lanes that lead from it, and who has been fed.
Invariants: a process that asks gets the whole catalog before anything newer; of news about one partition that a lane does not take yet, only the newest
    waits; an assignment becomes bytes when it goes into the lane, so that a schema waits once for all of a topic's partitions.
Crash: nothing is kept: whoever was not told is told again by a successor (FED_GENERATION is stored last).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from appliance import topic_settings
from appliance.catalog import PartitionRow, Topic, delay_log_of
from appliance.dedicated_workers import DedicatedWorkers
from shm.assignments import REPLAY, Assignment, LaneKind
from shm.control import ProcessSlot
from shm.doorbell import Doorbell
from shm.lane import LaneWriter
from shm.layout import ProcessWord, Role
from shm.partition_table import PartitionTable
from tailrace.delays import DELAY_SUFFIX
from tailrace.protocol.errors import ErrorCode

_READERS = (Role.FRONT, Role.SCHEDULER)
"""Who may only know what is finished."""
NEWS_AT_ONCE = 4
"""So many partitions a flusher makes, changes or deletes at a time: each costs some milliseconds of syncs, and batches of others lie behind it in the ring."""
NEWS_PATIENCE_NS = 1_000_000_000
"""News that is not carried out for so long (a disk that refuses, a process that is dead) holds back no other."""


@dataclass(slots=True)
class Waiting:
    """A message that is not in its lane yet."""

    kind: LaneKind
    slot: int
    flags: int
    session: int
    correlation_id: int
    content: bytes | Assignment


@dataclass(slots=True)
class Outgoing:
    """A lane to one process, and what does not fit it yet."""

    role: Role
    index: int
    lane: LaneWriter
    bell: Doorbell
    slot: ProcessSlot
    queue: deque[Waiting] = field(default_factory=deque)
    feeding: int = 0
    """The generation that asked for the whole catalog and has not got all of it; 0: none."""
    is_applied: Callable[[Assignment], bool] | None = None
    """Of a worker: whether what it was told of a partition has been carried out. None: nobody waits for that."""
    _news: dict[tuple[bytes, int], Waiting] = field(default_factory=dict)
    """News in the queue, by partition."""
    _under_way: list[tuple[int, Assignment]] = field(default_factory=list)
    """(when it was sent, news) that is not carried out yet."""

    def put(
        self, kind: LaneKind, content: bytes | Assignment = b"", *, slot: int = 0, flags: int = 0, session: int = 0, correlation_id: int = 0
    ) -> None:
        self.queue.append(Waiting(kind, slot, flags, session, correlation_id, content))

    def tell(self, assignment: Assignment) -> None:
        """News of a partition; it takes the place of older news that wait."""
        key = (assignment.topic_id, assignment.partition)
        waiting = self._news.get(key)
        if waiting is None:
            waiting = self._news[key] = Waiting(LaneKind.ASSIGN, 0, 0, 0, 0, assignment)
            self.queue.append(waiting)
        else:
            revive = assignment.revive or (isinstance(waiting.content, Assignment) and waiting.content.revive)
            waiting.content = replace(assignment, revive=revive)

    def send(self, now_ns: int) -> int:
        """Move what waits into the lane, as far as it fits."""
        count = 0
        while self.queue:
            waiting = self.queue[0]
            content = waiting.content
            is_news = isinstance(content, Assignment) and not waiting.flags & REPLAY
            if is_news and not self._may_tell_more(now_ns):
                break
            payload = content if isinstance(content, bytes) else content.encode()
            if not self.lane.try_write(
                waiting.kind, waiting.slot, waiting.flags, waiting.session, waiting.correlation_id, now_ns, (payload,)
            ):
                break
            self.queue.popleft()
            if isinstance(content, Assignment) and is_news:
                self._news.pop((content.topic_id, content.partition), None)
                if self.is_applied is not None:
                    self._under_way.append((now_ns, content))
            count += 1
        if self.lane.publish():
            self.bell.ring()
        if self.feeding and not self.queue:
            # Only now: were this coordinator killed before, its successor must begin again.
            self.slot.store(ProcessWord.FED_GENERATION, self.feeding)
            self.feeding = 0
        return count

    def _may_tell_more(self, now_ns: int) -> bool:
        """Whether few enough partitions are being made, changed or deleted behind this worker."""
        if len(self._under_way) >= NEWS_AT_ONCE and self.is_applied is not None:
            self._under_way = [
                (sent_ns, news) for sent_ns, news in self._under_way if now_ns - sent_ns < NEWS_PATIENCE_NS and not self.is_applied(news)
            ]
        return len(self._under_way) < NEWS_AT_ONCE


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of this appliance."""

    front_count: int
    ring_bytes: int
    lane_bytes: int


class Telling:
    """The ways to all processes."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        outgoing: list[Outgoing],
        tables: list[PartitionTable],
        dir_numbers: list[int],
        worker_dirs: list[int],
        dedicated: DedicatedWorkers,
        connect_worker: Callable[[int], Outgoing],
        supervisor_bell: Doorbell,
        sizes: Sizes,
    ) -> None:
        """`topics`: by name, as the coordinator knows them now; `dir_numbers`: the catalog's number of each data directory, in this run's order;
        `worker_dirs`: worker -> index in that order; `connect_worker`: the way to a dedicated worker whose regions exist.
        """
        self._topics = topics
        self._outgoing = outgoing
        self._tables = tables
        for out in outgoing:
            self._pace(out)
        self._dir_index = {number: index for index, number in enumerate(dir_numbers)}
        """The catalog's number of a data directory -> its index in this run."""
        self._workers_of = [[w for w, d in enumerate(worker_dirs) if d == index] for index in range(len(dir_numbers))]
        self._dedicated = dedicated
        self._connect_worker = connect_worker
        self._connected: set[int] = set()
        """Dedicated workers that there is a way to."""
        self._unconnected: dict[int, dict[tuple[bytes, int], Assignment]] = {}
        """Dedicated worker that the supervisor has not started yet -> news for it."""
        self.feed_leases: Callable[[Outgoing], None] = lambda _out: None
        """Tells a flusher every lease: before FED, so that retention waits for them."""
        self._supervisor_bell = supervisor_bell
        self._sizes = sizes

    def is_behind(self) -> bool:
        return any(out.queue for out in self._outgoing)

    def to(self, role: Role, index: int) -> Outgoing:
        return next(out for out in self._outgoing if out.role is role and out.index == index)

    def dir_index(self, row: PartitionRow) -> int:
        return self._dir_index[row.data_dir]

    def table(self, row: PartitionRow) -> PartitionTable:
        return self._tables[self._dir_index[row.data_dir]]

    def answer(self, front: int, session: int, correlation_id: int, code: ErrorCode, body: bytes) -> None:
        self.to(Role.FRONT, front).put(LaneKind.RESPONSE, body, flags=code, session=session, correlation_id=correlation_id)

    # ---- workers ---------------------------------------------------------------------------------------------------------------------

    def _worker_of(self, topic: Topic, row: PartitionRow) -> int:
        owner = self._topics.get(topic.name.removesuffix(DELAY_SUFFIX)) if topic.delay_of else None
        if owner is not None and owner.topic_id == topic.delay_of:  # the same worker has both
            return self._worker_of(owner, owner.partitions[row.partition])
        if topic.given.get("worker.dedicated"):
            worker = self._dedicated.worker_of(row.slot)
            assert worker is not None, "given when the topic was made, or at the start"
            return worker
        workers = self._workers_of[self._dir_index[row.data_dir]]
        return workers[row.slot % len(workers)]

    def give_workers(self, topic: Topic) -> None:
        """Have a worker for each partition of a topic that wants them. Raises InvalidSettingError when there are too few."""
        if topic.given.get("worker.dedicated") and topic.state != "deleting":
            for row in topic.partitions:
                self._dedicated.give(row.slot, self._dir_index[row.data_dir])
            self._supervisor_bell.ring()

    def lacks_memory(self, topic: Topic) -> bool:
        """Whether a dedicated worker of a topic cannot be started for want of shared memory."""
        is_dedicated = topic.given.get("worker.dedicated") and topic.state != "deleting"
        return bool(is_dedicated) and any(self._dedicated.lacks_memory(row.slot) for row in topic.partitions)

    def take_workers_back(self, topic: Topic) -> None:
        """The topic is gone."""
        for row in topic.partitions:
            self._dedicated.take_back(row.slot)
        self._supervisor_bell.ring()

    def _awaits_workers(self) -> bool:
        """Whether a topic that is in use has a dedicated worker that the supervisor has not started yet (at the start of the appliance)."""
        return any(
            self._worker_of(topic, row) not in self._connected
            for topic in self._topics.values()
            if topic.state == "active" and topic.given.get("worker.dedicated")
            for row in topic.partitions
        )

    def connect_workers(self) -> int:
        """Find the way to dedicated workers that were started since; give them what waits for them."""
        count = 0
        for worker in self._dedicated.existing():
            if worker not in self._connected:
                out = self._connect_worker(worker)
                for assignment in self._unconnected.pop(worker, {}).values():
                    out.tell(assignment)
                self._pace(out)
                self._outgoing.append(out)
                self._connected.add(worker)
                self.to(Role.FLUSHER, self._dedicated.data_dir_of(worker)).put(LaneKind.FOLLOW, slot=worker)
                count += 1
        return count

    def _pace(self, out: Outgoing) -> None:
        if out.role is Role.WORKER:
            out.is_applied = self._is_applied

    def _is_applied(self, assignment: Assignment) -> bool:
        """Whether the flusher shows it, or something later in its place."""
        state = self._tables[assignment.data_dir].read(assignment.slot)
        return state.topic_id == assignment.topic_id and state.applied_version >= assignment.version

    # ---- assignments -----------------------------------------------------------------------------------------------------------------

    def _assignments(self, topic: Topic, *, revive: bool = False) -> list[Assignment]:
        delay_log = delay_log_of(topic, self._topics)
        sizes = self._sizes
        settings = topic_settings.complete(topic.given, ring_bytes=sizes.ring_bytes, lane_bytes=sizes.lane_bytes)
        return [
            Assignment(
                topic=topic.name, topic_id=topic.topic_id, partition=row.partition, partition_count=len(topic.partitions), slot=row.slot,
                version=topic.version, worker=self._worker_of(topic, row), front=row.slot % sizes.front_count,
                data_dir=self._dir_index[row.data_dir], schema_id=topic.schema_id, schema=topic.schema, typed=topic.typed,
                dropped=topic.state == "deleting", delete_before=row.delete_before, revive=revive, settings=settings, delay_of=topic.delay_of.hex(),
                delay_log=delay_log.topic_id.hex() if delay_log is not None else "", given=topic.given, created_us=topic.created_us,
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

    def feed_whoever_asks(self) -> int:
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
                        out.put(LaneKind.ASSIGN, assignment, flags=REPLAY)
            if out.role is Role.FLUSHER:
                self.feed_leases(out)
            out.put(LaneKind.FED, correlation_id=wanted)
            out.feeding = wanted
            count += 1
        return count

    def tell_workers(self, topic: Topic, *, revive: bool = False) -> None:
        workers = {out.index: out for out in self._outgoing if out.role is Role.WORKER}
        for assignment in self._assignments(topic, revive=revive):
            out = workers.get(assignment.worker)
            if out is not None:
                out.tell(assignment)
            else:
                self._unconnected.setdefault(assignment.worker, {})[assignment.topic_id, assignment.partition] = assignment

    def tell_readers(self, topic: Topic) -> None:
        readers = [out for out in self._outgoing if out.role in _READERS]
        for assignment in self._assignments(topic):
            for out in readers:
                if self._concerns(out, assignment):
                    out.tell(assignment)

    def send(self, now_ns: int) -> int:
        return sum(out.send(now_ns) for out in self._outgoing)
