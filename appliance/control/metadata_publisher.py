"""What the coordinator tells the other processes: which partitions each of them serves, and answers to clients' requests.

Owner: the coordinator; the ways to the others are `outgoing`.
Invariants: a process that asks gets the whole catalog before anything newer; fronts, scheduler and groups hear of a topic when it is finished, and of its
    end before its files go.
Crash: nothing is kept: a process that was not told is told again by a successor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from appliance import topic_settings
from appliance.catalog import PartitionRow, Topic, delay_log_of
from appliance.dedicated_workers import DedicatedWorkers
from appliance.outgoing import Outgoing
from appliance.placement import Placement
from shm.catalog_messages import REPLAY, Assignment, LaneKind
from shm.layout import ProcessWord, Role
from shm.partition_table import PartitionTable
from tailrace.protocol.errors import ErrorCode

_READERS = (Role.FRONT, Role.SCHEDULER, Role.GROUPS)
"""Who is told what is finished only."""
_FED_WHAT_IS_FINISHED = (Role.FRONT, Role.SCHEDULER)
"""The process of groups is fed topics that are being changed, too: one that it does not know was deleted, with what groups have committed there."""


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
        placement: Placement,
        dedicated: DedicatedWorkers,
        connect_worker: Callable[[int], Outgoing],
        connect_groups: Callable[[], Outgoing | None],
        sizes: Sizes,
    ) -> None:
        """`topics`: by name, as the coordinator knows them now; `connect_worker`: the way to a dedicated worker whose regions exist; `connect_groups`: the way
        to the process of groups, None while it has not been started.
        """
        self._topics = topics
        self._outgoing = outgoing
        self._tables = tables
        for out in outgoing:
            self._pace(out)
        self.placement = placement
        self._dedicated = dedicated
        self._connect_worker = connect_worker
        self._connect_groups = connect_groups
        self._knows_groups = False
        self._connected: set[int] = set()
        """Dedicated workers that there is a way to."""
        self._unconnected: dict[int, dict[tuple[bytes, int], Assignment]] = {}
        """Dedicated worker that the supervisor has not started yet -> news for it."""
        self.feed_leases: Callable[[Outgoing], None] = lambda _out: None
        """Tells a flusher every lease: before FED, so that retention waits for them."""
        self._sizes = sizes

    def is_behind(self) -> bool:
        """Whether something waits for room in a lane."""
        return any(out.queue for out in self._outgoing)

    def to(self, role: Role, index: int) -> Outgoing:
        """The way to a process that there is one to; raises StopIteration for another."""
        return next(out for out in self._outgoing if out.role is role and out.index == index)

    def table(self, row: PartitionRow) -> PartitionTable:
        """The partition table that has this partition's slot."""
        return self._tables[self.placement.dir_index(row)]

    def answer(self, front: int, session: int, correlation_id: int, code: ErrorCode, body: bytes) -> None:
        """An answer to a client's request, through its front."""
        self.to(Role.FRONT, front).put(LaneKind.RESPONSE, body, flags=code, session=session, correlation_id=correlation_id)

    # ---- processes that are started when they are needed -----------------------------------------------------------------------------

    def connect_groups(self) -> int:
        """Find the way to the process of groups, once it has been started."""
        if self._knows_groups or (out := self._connect_groups()) is None:
            return 0
        self._outgoing.append(out)
        self._knows_groups = True
        return 1

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
                version=topic.version, worker=self.placement.worker_of(topic, row), front=row.slot % sizes.front_count,
                data_dir=self.placement.dir_index(row), schema_id=topic.schema_id, schema=topic.schema, typed=topic.typed,
                dropped=topic.state == "deleting", delete_before=row.delete_before, revive=revive, settings=settings, delay_of=topic.delay_of.hex(),
                delay_log=delay_log.topic_id.hex() if delay_log is not None else "", given=topic.given, created_us=topic.created_us,
                slot_counts=list(topic.slot_counts), slots=row.slots, hand_over=[list(pair) for pair in row.hand_over],
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
        if out.role is Role.GROUPS:
            return not assignment.delay_of
        return True

    def feed(self, *, hold_readers: bool = False) -> int:
        """Begin to give the whole catalog to each process that has asked for it; returns how many there are. `hold_readers`: fronts and scheduler later."""
        count = 0
        for out in self._outgoing:
            wanted = out.slot.load(ProcessWord.WANTS_FEED)
            if wanted in (out.feeding, out.slot.load(ProcessWord.FED_GENERATION)):
                continue
            if out.role in _FED_WHAT_IS_FINISHED and (hold_readers or self.placement.awaits_workers(self._connected)):
                continue
            for topic in self._topics.values():
                # A front may only know what is finished; a topic that is being deleted is opened by none.
                if topic.state == "deleting" or (out.role in _FED_WHAT_IS_FINISHED and topic.state != "active"):
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
        """News of a decided topic, to the workers of its partitions; through them it reaches the flushers. `revive`: see `Assignment`."""
        workers = {out.index: out for out in self._outgoing if out.role is Role.WORKER}
        for assignment in self._assignments(topic, revive=revive):
            out = workers.get(assignment.worker)
            if out is not None:
                out.tell(assignment)
            else:
                self._unconnected.setdefault(assignment.worker, {})[assignment.topic_id, assignment.partition] = assignment

    def tell_readers(self, topic: Topic) -> None:
        """News of a topic that is finished, or about to go, to fronts, scheduler and groups."""
        readers = [out for out in self._outgoing if out.role in _READERS]
        for assignment in self._assignments(topic):
            for out in readers:
                if self._concerns(out, assignment):
                    out.tell(assignment)

    def send(self, now_ns: int) -> int:
        """Move what waits into the lanes, as far as it fits."""
        return sum(out.send(now_ns) for out in self._outgoing)
