"""Publishes the controller's metadata to the other processes, and answers to clients' requests.

Owner: the controller; each process has a `LaneSender`.
Invariants:
- A process that asks gets the whole catalog before any newer update.
- Fronts, scheduler and group coordinator learn of a topic when it is complete, and of its end
  before its files are removed. They learn of a change when it is carried out; a front or scheduler
  that starts meanwhile waits for that (`appliance.control.publishing.feed_barrier`).
Crash: nothing is kept. A successor publishes to every process again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from appliance.catalog.catalog import PartitionRow, Topic, delay_log_of
from appliance.config import topic_config
from appliance.control.placement.dedicated_workers import DedicatedWorkers
from appliance.control.placement.partition_placement import PartitionPlacement
from appliance.control.publishing.feed_barrier import FeedBarrier, is_known_to_clients
from appliance.control.publishing.lane_sender import LaneSender
from shm.memory.layout import ProcessWord, Role
from shm.messages.lane_messages import REPLAY, Assignment, LaneKind
from shm.tables.partition_table import PartitionTable
from tailrace.core.error_codes import ErrorCode
from tailrace.core.hash_slots import missing_sources

_READERS = (Role.FRONT, Role.SCHEDULER, Role.GROUPS)
"""Processes that get complete topics only."""
_FED_FINISHED = (Role.FRONT, Role.SCHEDULER)
"""Processes whose feed waits for the end of changes. That of the group coordinator has them as they
are decided: it deletes the offsets of topics that it does not know.
"""


class Sizes(NamedTuple):
    """Sizes of this appliance."""

    front_count: int
    ring_bytes: int
    lane_bytes: int


class MetadataPublisher:
    """Senders to all processes."""

    def __init__(
        self,
        topics: Mapping[str, Topic],
        outgoing: list[LaneSender],
        tables: list[PartitionTable],
        placement: PartitionPlacement,
        dedicated: DedicatedWorkers,
        connect_worker: Callable[[int], LaneSender],
        connect_groups: Callable[[], LaneSender | None],
        request_scheduler: Callable[[], None],
        sizes: Sizes,
        topic_defaults: dict[str, Any],
    ) -> None:
        """`topics`: by name, the controller's present ones; `connect_worker`: makes the sender to a
        dedicated worker whose regions exist; `connect_groups`: makes the sender to the group
        coordinator, None before its start; `request_scheduler`: requests the scheduler from the
        supervisor, and does nothing a second time.
        """
        self._topics = topics
        self._outgoing = outgoing
        self._tables = tables
        for out in outgoing:
            self._pace(out)
        self.placement = placement
        self._barrier = FeedBarrier(topics, placement.lacks_memory)
        self._dedicated = dedicated
        self._connect_worker = connect_worker
        self._connect_groups = connect_groups
        self.knows_groups = False
        """True once there is a sender to the group coordinator."""
        self._connected: set[int] = set()
        """Dedicated workers with a sender."""
        self._answers: list[tuple[int, int, int, ErrorCode, bytes]] = []
        """Answers of this step: (front, session, correlation id, code, body)."""
        self._unconnected: dict[int, dict[tuple[bytes, int], Assignment]] = {}
        """Updates for dedicated workers that the supervisor has not started yet."""
        self.kept_topics: Callable[[], list[Topic]] = list
        """The topics in the bin."""
        self.departing: dict[tuple[bytes, int], tuple[str, str]] = {}
        """Closed partitions: (topic id, partition) -> (directory that it moves to, name of the
        move; "" while it arrives).
        """
        self.former_places: Callable[[], list[tuple[Topic, PartitionRow, int]]] = list
        """(topic, former row, worker there) of partitions that have moved, and whose former slots
        are in use.
        """
        self.feed_leases: Callable[[LaneSender], None] = lambda _out: None
        """Sends a flusher every lease: before FED, so that retention waits for them."""
        self.feed_rights: Callable[[LaneSender], None] = lambda _out: None
        """Sends a front every user and ACL: before FED, so that it serves nobody without them."""
        self._sizes = sizes
        self.topic_defaults = topic_defaults
        """Defaults of topic settings that the appliance's settings replace."""
        self._request_scheduler = request_scheduler
        if any(topic.delay_of for topic in topics.values()):
            request_scheduler()

    def is_behind(self) -> bool:
        """True if a message waits for room in a lane."""
        return any(out.queue for out in self._outgoing)

    def to(self, role: Role, index: int) -> LaneSender:
        """The sender to a process.

        Raises: StopIteration if there is none.
        """
        return next(out for out in self._outgoing if out.role is role and out.index == index)

    def table(self, row: PartitionRow) -> PartitionTable:
        """The partition table with this partition's slot."""
        return self._tables[self.placement.dir_index(row)]

    def answer(
        self, front: int, session: int, correlation_id: int, code: ErrorCode, body: bytes
    ) -> None:
        """Answer a client's request, through its front. `send` queues the answer behind the updates
        for every process, so that the change is known everywhere when the client gets it.
        """
        self._answers.append((front, session, correlation_id, code, body))

    # ---- processes that are started when they are needed -----------------------------------------

    def connect_groups(self) -> int:
        """Connect the group coordinator, once it is started."""
        if self.knows_groups or (out := self._connect_groups()) is None:
            return 0
        self._outgoing.append(out)
        self.knows_groups = True
        return 1

    def connect_workers(self) -> int:
        """Connect newly started dedicated workers, and queue the updates that wait for them."""
        count = 0
        for worker in self._dedicated.existing():
            if worker not in self._connected:
                out = self._connect_worker(worker)
                for assignment in self._unconnected.pop(worker, {}).values():
                    out.queue_update(assignment)
                self._pace(out)
                self._outgoing.append(out)
                self._connected.add(worker)
                self.to(Role.FLUSHER, self._dedicated.data_dir_of(worker)).put(
                    LaneKind.FOLLOW, slot=worker
                )
                count += 1
        return count

    def awaits_workers_of(self, topic: Topic) -> bool:
        """True if a dedicated worker of a topic is not started yet: no reader may know of it."""
        return self.placement.awaits_workers_of(topic, self._connected)

    def _pace(self, out: LaneSender) -> None:
        if out.role is Role.WORKER:
            out.is_applied = self._is_applied

    def _is_applied(self, assignment: Assignment) -> bool:
        """True if the flusher shows this assignment's version, or a later one, in its slot."""
        state = self._tables[assignment.data_dir].read(assignment.slot)
        return state.topic_id == assignment.topic_id and state.applied_version >= assignment.version

    # ---- assignments -----------------------------------------------------------------------------

    def _assignments(self, topic: Topic, *, revive: bool = False) -> list[Assignment]:
        delay_log = delay_log_of(topic, self._topics)
        sizes = self._sizes
        settings = topic_config.complete(
            topic.given,
            ring_bytes=sizes.ring_bytes,
            lane_bytes=sizes.lane_bytes,
            defaults=self.topic_defaults,
        )
        older_schemas = topic.older_schemas
        departing = {
            partition: leaving
            for (topic_id, partition), leaving in self.departing.items()
            if topic_id == topic.topic_id and topic.state != "deleting"
        }
        return [
            Assignment(
                topic=topic.name, topic_id=topic.topic_id, partition=row.partition,
                departing=departing.get(row.partition, ("", ""))[0],
                move=departing.get(row.partition, ("", ""))[1],
                partition_count=len(topic.partitions), slot=row.slot,
                version=topic.version, worker=self.placement.worker_of(topic, row),
                front=row.slot % sizes.front_count,
                data_dir=self.placement.dir_index(row), schema_id=topic.schema_id,
                schema=topic.schema, older_schemas=older_schemas, typed=topic.typed,
                dropped=topic.state == "deleting", binned=topic.is_going_to_bin,
                undeleted=topic.is_coming_back, delete_before=row.delete_before, revive=revive,
                settings=settings, delay_of=topic.delay_of.hex(),
                delay_log=delay_log.topic_id.hex() if delay_log is not None else "",
                given=topic.given, created_us=topic.created_us,
                slot_counts=list(topic.slot_counts), slots=row.slots,
                hand_over=[list(pair) for pair in row.hand_over],
            )
            for row in topic.partitions
        ]  # fmt: skip

    @staticmethod
    def _concerns(out: LaneSender, assignment: Assignment) -> bool:
        if out.role is Role.WORKER:
            return assignment.worker == out.index
        if out.role is Role.FLUSHER:
            return assignment.data_dir == out.index
        if out.role is Role.SCHEDULER:
            return assignment.has_delays
        if out.role is Role.GROUPS:
            return not assignment.delay_of
        return True

    def feed(self, now_ns: int) -> int:
        """Begin the feed of each process that has asked for it, and need not wait for a change;
        return their number.
        """
        count = 0
        for out in self._outgoing:
            requested = out.slot.load(ProcessWord.FEED_REQUESTED)
            if requested in (out.feeding, out.slot.load(ProcessWord.FED_GENERATION)):
                continue
            if out.role in _FED_FINISHED and (
                self.placement.awaits_workers(self._connected)
                or not self._barrier.is_open((out.role, out.index), requested, now_ns)
            ):
                continue
            for topic in self._topics.values():
                # A topic that is being deleted is not opened.
                if topic.state == "deleting" or (
                    out.role in _FED_FINISHED and not self._is_usable(topic)
                ):
                    continue
                for assignment in self._assignments(topic):
                    if self._concerns(out, assignment):
                        out.put(LaneKind.ASSIGN, assignment, flags=REPLAY)
            going = [topic for topic in self._topics.values() if topic.is_going_to_bin]
            self._feed_going(out, going)
            if out.role is Role.WORKER:
                self._feed_former(out)
            if out.role is Role.FLUSHER:
                self.feed_leases(out)
            if out.role is Role.FRONT:
                self.feed_rights(out)
            out.put(LaneKind.FED, correlation_id=requested)
            if out.role is Role.WORKER:
                for assignment in self._concerning(out, going):
                    out.put(LaneKind.ASSIGN, assignment)
            out.feeding = requested
            count += 1
        return count

    def _is_usable(self, topic: Topic) -> bool:
        """True if readers may know of a topic: one in change only where the barrier has lost its
        patience. Its partitions are not ready then, while it would seem to be deleted otherwise.
        """
        if topic.state == "active":
            return True
        return (
            is_known_to_clients(topic)
            and not self.awaits_workers_of(topic)
            and not any(
                missing_sources(topic.slot_counts, row.partition, row.hand_over)
                for row in topic.partitions
            )
        )

    def verifies_passwords(self, out: LaneSender) -> bool:
        """True for a gateway: they come behind the other fronts."""
        return out.role is Role.FRONT and out.index >= self._sizes.front_count

    def publish_rights(self, change: bytes, with_credentials: bytes) -> None:
        """Queue a change of users or ACLs for every front; gateways get it with credentials."""
        for out in self._outgoing:
            if out.role is Role.FRONT:
                verifies = self.verifies_passwords(out)
                out.put(LaneKind.RIGHTS, with_credentials if verifies else change)

    def _feed_former(self, out: LaneSender) -> None:
        """Feed a worker the partitions that have moved away, closed: it keeps the decisions about
        transactions that were open there from being forgotten (docs/adr/0059).
        """
        for topic, former, worker in self.former_places():
            if worker != out.index:
                continue
            data_dir = self.placement.dir_index(former)
            for assignment in self._assignments(topic):
                if assignment.partition == former.partition:
                    closed = replace(
                        assignment, slot=former.slot, worker=worker, data_dir=data_dir,
                        undeleted=False, departing="moved", move="",
                    )  # fmt: skip
                    out.put(LaneKind.ASSIGN, closed, flags=REPLAY)

    def _feed_going(self, out: LaneSender, going: list[Topic]) -> None:
        """Feed the topics that are on their way to the bin. Worker and flusher open them, to
        complete their logs: the deletion follows. The group coordinator keeps their offsets.
        """
        if out.role is Role.GROUPS:
            for topic in going:
                self._put_kept(out, topic)
            for topic in self.kept_topics():
                self._put_kept(out, topic)
        if out.role in (Role.WORKER, Role.FLUSHER):
            for assignment in self._concerning(out, going):
                opened = replace(assignment, dropped=False, version=assignment.version - 1)
                out.put(LaneKind.ASSIGN, opened, flags=REPLAY)

    def _concerning(self, out: LaneSender, topics: list[Topic]) -> list[Assignment]:
        return [
            assignment
            for topic in topics
            for assignment in self._assignments(topic)
            if self._concerns(out, assignment)
        ]

    def _put_kept(self, out: LaneSender, topic: Topic, *, is_kept: bool = True) -> None:
        if topic.delay_of:
            return
        kept = Assignment(
            topic=topic.name, topic_id=topic.topic_id, partition=0,
            partition_count=len(topic.partitions), slot=0, version=topic.version, worker=0, front=0,
            data_dir=0, schema_id=topic.schema_id, schema=b"", typed=topic.typed, dropped=True,
            binned=is_kept,
        )  # fmt: skip
        out.put(LaneKind.ASSIGN, kept, flags=REPLAY)

    def publish_purged(self, topic: Topic) -> None:
        """Tell the group coordinator that a deleted topic does not come back."""
        for out in self._outgoing:
            if out.role is Role.GROUPS:
                self._put_kept(out, topic, is_kept=False)

    def publish_to_workers(self, topic: Topic, *, revive: bool = False) -> None:
        """Queue a decided topic for the workers of its partitions, which pass it on to the
        flushers. `revive`: see `Assignment`.
        """
        if topic.delay_of:
            self._request_scheduler()  # it starts while the flusher makes the files
        workers = {out.index: out for out in self._outgoing if out.role is Role.WORKER}
        for assignment in self._assignments(topic, revive=revive):
            out = workers.get(assignment.worker)
            if out is not None:
                out.queue_update(assignment)
            else:
                self._unconnected.setdefault(assignment.worker, {})[
                    assignment.topic_id, assignment.partition
                ] = assignment

    def publish_left(self, topic: Topic, row: PartitionRow, worker: int) -> None:
        """Queue the end of a partition in its former place for its worker there, which passes it on
        to the flusher: it removes the files.
        """
        dropped = Assignment(
            topic=topic.name, topic_id=topic.topic_id, partition=row.partition, partition_count=0,
            slot=row.slot, version=topic.version, worker=worker, front=0,
            data_dir=self.placement.dir_index(row), schema_id=topic.schema_id, schema=b"",
            typed=topic.typed, dropped=True,
        )  # fmt: skip
        self.to(Role.WORKER, worker).put(LaneKind.ASSIGN, dropped)

    def have_readers_caught_up(self) -> bool:
        """True if fronts, scheduler and group coordinator have read all that was sent to them."""
        return not any(
            out.queue or not out.lane.is_empty() for out in self._outgoing if out.role in _READERS
        )

    def publish_to_readers(self, topic: Topic) -> None:
        """Queue a complete or deleted topic for fronts, scheduler and group coordinator."""
        readers = [out for out in self._outgoing if out.role in _READERS]
        for assignment in self._assignments(topic):
            for out in readers:
                if self._concerns(out, assignment):
                    out.queue_update(assignment)

    def send(self, now_ns: int) -> int:
        """Move waiting messages into the lanes, as far as they fit; answers behind all others."""
        count = sum(out.send(now_ns) for out in self._outgoing)
        answers, self._answers = self._answers, []
        for front, session, correlation_id, code, body in answers:
            self.to(Role.FRONT, front).put(
                LaneKind.RESPONSE, body, flags=code, session=session, correlation_id=correlation_id
            )
        for front in {answer[0] for answer in answers}:
            count += self.to(Role.FRONT, front).send(now_ns)
        return count
