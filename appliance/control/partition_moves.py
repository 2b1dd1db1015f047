"""Moves of partitions to other data directories, while they are written (docs/adr/0059).

    state      decided by                    what happens
    ---------  ----------------------------  -----------------------------------------------------
    closing    a client's ALTER_TOPICS       the worker appends nothing more; the flusher completes
                                             the copy in the bin of the other directory
    arriving   this module: one transaction  the other flusher takes the copy out of the bin and
               of the catalog                opens it
      opened   this module: another one      the other worker appends
    left       -                             readers have the new place; then the former files are
                                             removed

A partition that is not open in its new place within ARRIVAL_MAX_NS, or cannot be opened there, goes
back: it takes batches where it was, and what is in the other directory is removed.

Readers use the former files until they know the new place.

Owner: the controller.

Invariants:
- The catalog's row says where the partition is, at every moment.
- One partition of a topic is closing or arriving at a time.
- Nothing is appended in two places: the former worker is closed before the copy is complete, and
  the new one until the catalog says that the partition is open there. From then on it does not go
  back.
- The former files are removed when the partition is open in its new place and the readers know it.
  The leases and the transactions of before must have ended. Until then its former worker, and each
  successor of it, has the partition closed: it keeps the coordinator from forgetting the decisions
  that came while the partition was closed.

Bounds: MOVES_MAX partitions at once are closing or arriving. One that is not copied within
CLOSED_MAX_NS stays.

Crash: a successor opens a closed partition where it is, and goes on from `arriving`, or `opened`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from appliance.catalog.catalog import Catalog, CatalogFullError, PartitionRow, Topic
from appliance.catalog.moved_partitions import MovedPartition, MovedPartitions, Stage
from appliance.control.host_view import HostView
from appliance.control.move_target import move_target
from appliance.control.offset_leases import OffsetLeases
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.topics.change_queue import TopicChangeQueue
from shm.crash_points import crash_point
from shm.memory.layout import Role, SlotState
from shm.tables.partition_table import PartitionState
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.format.directory.data_dir import bin_name

logger = logging.getLogger(__name__)

MOVES_MAX = 16
FAILED_MAX = 16
CLOSED_MAX_NS = 60_000_000_000
ARRIVAL_MAX_NS = 60_000_000_000
"""Longest wait for the other flusher to open the copy: its disk may stand still."""
KEPT_NS = 5_000_000_000
"""Shortest time from the arrival to the removal of the former files: readers end what they have
begun.
"""
LEASES_MAX_NS = 3_600_000_000_000
"""Longest wait for readers' leases."""
WAITS_FOR_READERS = "readers need the former files"
WAITS_FOR_TRANSACTIONS = "transactions that were open when it moved have not ended there"
WAITS_FOR_FILES = (
    "the flusher there does not remove the files: its disk may stand still. Repair it, or take its "
    "directory out of data_dirs and restart"
)
ARRIVING = ("arriving", "")
"""Stands for the directory of a closed partition that arrives: it has none to depart to."""
REPEAT_NS = 5_000_000_000

Key = tuple[bytes, int]


def closed_arrivals(moved: MovedPartitions) -> dict[Key, tuple[str, str]]:
    """The partitions that a predecessor has moved and not opened, for `publisher.departing`: before
    any assignment is published. Raises StorageError.
    """
    rows = moved.all()
    return {(row.topic_id, row.partition): ARRIVING for row in rows if row.stage is Stage.LEFT}


@dataclass(slots=True)
class _Move:
    """One partition on its way."""

    name: str
    topic_id: bytes
    partition: int
    state: str
    former: PartitionRow
    target: int = -1
    """Index of the directory that it moves to; -1: not known, or the topic is gone."""
    move: str = ""
    version: int = 0
    until_ns: int = 0
    """Closing, arriving: the latest time. Left: the earliest time of the removal."""
    is_opened: bool = False
    """Arriving: its new worker may append. It does not go back."""
    is_back: bool = False
    """It went back: nothing needs what is in the other directory."""
    end_offset: int = 0
    """Left: end of the log at its arrival. A transaction that was open then begins below."""
    leases: set[str] = field(default_factory=set)
    """Leases of readers that may have begun with the former files."""
    waits_for: str = ""
    """Left: why the former files are still there."""
    sent_ns: int = 0
    is_repeated: bool = False
    """Left: the removal was requested again, since nothing was heard of the first request."""

    @property
    def key(self) -> Key:
        return self.topic_id, self.partition


class PartitionMoves:
    """See the module's docstring."""

    def __init__(
        self,
        catalog: Catalog,
        moved: MovedPartitions,
        topics: dict[str, Topic],
        publisher: MetadataPublisher,
        changes: TopicChangeQueue,
        leases: OffsetLeases[LaneSender],
        host_view: HostView,
        start_ns: int,
    ) -> None:
        """`topics`: by name, as the controller knows them."""
        self._catalog = catalog
        self._moved = moved
        self._topics = topics
        self._publisher = publisher
        self._changes = changes
        self._leases = leases
        self._host_view = host_view
        self._now_ns = start_ns
        self._moves: dict[Key, _Move] = {}
        self._failed: dict[Key, dict[str, Any]] = {}
        """The last moves that did not come about, for descriptions."""
        for row in self._moved.all():
            self._resume(row)
        publisher.former_places = self._former_places

    @property
    def is_waiting(self) -> bool:
        """True if a partition is on its way."""
        return bool(self._moves)

    def _resume(self, row: MovedPartition) -> None:
        """Take up what a predecessor has decided."""
        former = PartitionRow(row.partition, row.data_dir, row.slot, 0)
        state = "closing" if row.stage is Stage.CLOSED else "arriving"
        self._moves[row.topic_id, row.partition] = _Move(
            row.name, row.topic_id, row.partition, state, former,
            until_ns=self._now_ns + ARRIVAL_MAX_NS, is_opened=row.stage is Stage.OPEN,
        )  # fmt: skip

    def described(self) -> list[dict[str, Any]]:
        """Rows for JSON: the last partitions that did not move, then those on their way. One that
        has gone back is among both until nothing of it is left in the other directory.
        """
        paths = self._host_view.dir_paths()
        rows = []
        for each in self._moves.values():
            former = self._publisher.placement.known_dir_index(each.former)
            rows.append(
                {
                    "topic": each.name, "partition": each.partition, "state": each.state,
                    "from": "" if former is None else paths[former],
                    "to": paths[each.target] if each.target >= 0 else self._place_of(each),
                    "reason": each.waits_for,
                }
            )  # fmt: skip
        return [*self._failed.values(), *rows]

    def _former_places(self) -> list[tuple[Topic, PartitionRow]]:
        """See `MetadataPublisher.former_places`."""
        found = []
        for each in self._moves.values():
            topic = self._topic_of(each)
            is_configured = self._publisher.placement.known_dir_index(each.former) is not None
            if topic is not None and each.state != "closing" and not each.sent_ns and is_configured:
                found.append((topic, each.former))
        return found

    def _place_of(self, each: _Move) -> str:
        topic = self._topic_of(each)
        if topic is None or each.state == "closing":
            return ""
        index = self._publisher.placement.known_dir_index(topic.partitions[each.partition])
        return "" if index is None else self._host_view.dir_paths()[index]

    def _topic_of(self, each: _Move) -> Topic | None:
        """The topic of a partition; None if it is deleted."""
        topic = self._topics.get(each.name)
        is_there = topic is not None and topic.topic_id == each.topic_id
        return topic if is_there and topic is not None and topic.state != "deleting" else None

    # ---- closing ---------------------------------------------------------------------------------

    def begin(self, topic: Topic, given: Any, validate_only: bool) -> list[Topic]:
        """Decide to close a partition, so that it can move: {"partition", "data_dir"}. Raises
        InvalidRequestError, TailraceError (NOT_READY), StorageError, DiskFullError.
        """
        number, path = (given.get("partition"), given.get("data_dir")) if isinstance(
            given, dict
        ) else (None, None)  # fmt: skip
        if (
            not isinstance(number, int)
            or isinstance(number, bool)
            or not 0 <= number < len(topic.partitions)
        ):
            raise InvalidRequestError(
                f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}; `move` "
                "needs one of them"
            )
        row = topic.partitions[number]
        of_topic = [each for each in self._moves.values() if each.topic_id == topic.topic_id]
        if topic.state != "active" or any(
            each.state != "left" or each.partition == number for each in of_topic
        ):
            raise TailraceError(
                f"{topic.name} is changing, another of its partitions is moving, or the former "
                "files of this one are still being removed; try again in a moment",
                ErrorCode.NOT_READY,
            )
        target = move_target(
            topic, row, path, self._topics, self._host_view, self._publisher.placement
        )
        if sum(each.state != "left" for each in self._moves.values()) >= MOVES_MAX:
            raise TailraceError(
                f"{MOVES_MAX} partitions are moving, which is the limit; try again in a moment",
                ErrorCode.NOT_READY,
            )
        if validate_only:
            return []
        decided = self._moved.close(topic, number)
        each = _Move(
            topic.name, topic.topic_id, number, "closing", row, target, os.urandom(8).hex(),
            decided.version, self._now_ns + CLOSED_MAX_NS,
        )  # fmt: skip
        self._moves[each.key] = each
        self._failed.pop(each.key, None)
        self._publisher.departing[each.key] = self._host_view.dir_paths()[target], each.move
        return [decided]

    # ---- steps -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """Go on with each partition, as far as the other processes have come. Part of a step of the
        catalog. Returns how much was done.
        """
        self._now_ns = now_ns
        steps = {"closing": self._close, "arriving": self._arrive, "left": self._leave}
        return sum(steps[each.state](each) for each in list(self._moves.values()))

    def _close(self, each: _Move) -> int:
        topic = self._topic_of(each)
        if topic is None:
            self._forget(each)
            return 1
        if not each.move:
            if topic.state != "active":
                return 0  # a predecessor's decision is carried out first
            return self._stay(each, topic, "the controller was restarted; try again")
        name = bin_name(each.topic_id, each.partition)
        if topic.state == "active" and topic.version >= each.version:
            if self._host_view.has_arrived(each.target, name, each.move):
                return self._switch(each, topic)
            return self._stay(each, topic, "its copy could not be completed; the log says why")
        if self._now_ns > each.until_ns:
            return self._stay(each, topic, "it could not be closed in time; look at status")
        return 0

    def _switch(self, each: _Move, topic: Topic) -> int:
        """Decide the move."""
        crash_point("move.before_decision")
        if not self._publisher.placement.has_room_in(topic, each.target):
            return self._stay(each, topic, "no dedicated worker is free; raise dedicated_workers")
        number = self._publisher.placement.dir_number(each.target)
        try:
            decided = self._moved.move(topic, each.partition, number)
        except (TailraceError, CatalogFullError) as error:
            return self._stay(each, topic, str(error))
        self._publisher.placement.assign(decided)
        departing, until_ns = self._publisher.departing[each.key], each.until_ns
        self._publisher.departing[each.key] = ARRIVING
        each.state, each.until_ns = "arriving", self._now_ns + ARRIVAL_MAX_NS

        def decided_durably() -> None:
            crash_point("move.after_decision")
            self._leases.feed(self._publisher.to(Role.FLUSHER, each.target), [decided])
            logger.info(
                "partition_moves topic=%s partition=%d to=%s", each.name, each.partition,
                self._host_view.dir_paths()[each.target],
            )  # fmt: skip

        def not_decided(_error: TailraceError) -> None:
            self._publisher.placement.release_place(decided.partitions[each.partition])
            each.state, each.until_ns = "closing", until_ns
            self._publisher.departing[each.key] = departing

        self._catalog.afterwards(decided_durably, not_decided)
        self._changes.carry_out(topic, decided)
        return 1

    def _stay(self, each: _Move, topic: Topic, reason: str) -> int:
        """Decide that a closed partition stays where it is."""
        try:
            decided = self._moved.cancel(topic, each.partition)
        except TailraceError:
            return 0  # the catalog's disk is full, or failing: it is tried again
        departing = self._publisher.departing.pop(each.key, None)
        del self._moves[each.key]
        stays_in = self._publisher.placement.dir_index(each.former)

        def not_decided(_error: TailraceError) -> None:
            self._moves[each.key] = each
            if departing is not None:
                self._publisher.departing[each.key] = departing

        self._catalog.afterwards(
            lambda: self._note_failed(each, stays_in, each.target, reason), not_decided
        )
        self._changes.carry_out(topic, decided)
        return 1

    def _note_failed(self, each: _Move, stays_in: int, target: int, reason: str) -> None:
        """Say that a partition stays in the directory `stays_in`."""
        paths = self._host_view.dir_paths()
        to = paths[target] if target >= 0 else ""
        logger.warning(
            "partition_stays topic=%s partition=%d to=%s reason=%r advice=%r", each.name,
            each.partition, to, reason, "run tailrace partition move again",
        )  # fmt: skip
        while len(self._failed) >= FAILED_MAX:
            del self._failed[next(iter(self._failed))]
        self._failed[each.key] = {
            "topic": each.name, "partition": each.partition, "state": "failed",
            "from": paths[stays_in], "to": to, "reason": reason,
        }  # fmt: skip

    def _arrive(self, each: _Move) -> int:
        """Wait until the partition is open in its new place, then have it take batches there."""
        topic = self._topic_of(each)
        if topic is None:
            self._publisher.departing.pop(each.key, None)
        else:
            row = topic.partitions[each.partition]
            state = self._publisher.table(row).read(row.slot)
            is_there = state.topic_id == each.topic_id and state.state is SlotState.ONLINE
            if not each.is_opened:
                if topic.state == "active" and is_there:
                    return self._open(each, topic)
                reason = self._reason_to_go_back(each, topic, state)
                return self._go_back(each, topic, reason) if reason else 0
            if topic.state != "active" or not is_there:
                return 0
            each.end_offset = 0 if each.is_back else state.log_end_offset
        each.leases = set() if each.is_back else self._leases.names_of(*each.key)
        each.state, each.until_ns = "left", self._now_ns + KEPT_NS
        return 1

    def _open(self, each: _Move, topic: Topic) -> int:
        """Decide that the partition takes batches in its new place."""
        crash_point("move.before_opening")
        try:
            decided = self._moved.open(topic, each.partition)
        except TailraceError:
            return 0  # the catalog's disk is full, or failing: it is tried again
        departing = self._publisher.departing.pop(each.key)
        each.is_opened = True

        def not_decided(_error: TailraceError) -> None:
            each.is_opened = False
            self._publisher.departing[each.key] = departing

        self._catalog.afterwards(lambda: None, not_decided)
        self._changes.carry_out(topic, decided)
        return 1

    def _reason_to_go_back(self, each: _Move, topic: Topic, state: PartitionState) -> str:
        """The reason why a partition cannot be opened in its new place; "": it still may be."""
        if self._publisher.placement.known_dir_index(each.former) is None:
            return ""  # the directory where it was is not configured any more
        if (
            state.topic_id == each.topic_id
            and state.applied_version >= topic.version
            and state.state in (SlotState.UNREADABLE, SlotState.OFFLINE_FOR_WRITES)
        ):
            return "its copy could not be opened there; the log says why"
        if self._now_ns > each.until_ns:
            return "its copy could not be opened there in time; look at status"
        return ""

    def _go_back(self, each: _Move, topic: Topic, reason: str) -> int:
        """Decide that a partition that has left is where it was: nothing was appended since."""
        crash_point("move.before_going_back")
        left, place = topic.partitions[each.partition], each.former
        try:
            self._publisher.placement.assign(topic._replace(partitions=(place,)))
            decided = self._moved.go_back(topic, each.partition, place)
        except TailraceError:
            return 0  # the catalog's disk is full, or failing: it is tried again
        departing = self._publisher.departing.pop(each.key)
        each.former, each.target = left, -1
        each.is_opened = each.is_back = True

        def not_decided(_error: TailraceError) -> None:
            each.former = place
            each.is_opened = each.is_back = False
            self._publisher.departing[each.key] = departing

        def goes_back() -> None:
            index = self._publisher.placement.dir_index
            self._leases.feed(self._publisher.to(Role.FLUSHER, index(place)), [decided])
            self._note_failed(each, index(place), index(left), reason)

        self._catalog.afterwards(goes_back, not_decided)
        self._changes.carry_out(topic, decided)
        return 1

    def _leave(self, each: _Move) -> int:
        """Have the former files removed, when no reader needs them."""
        if self._publisher.placement.known_dir_index(each.former) is None:
            self._forget(each)  # its directory is not configured any more
            return 1
        state = self._publisher.table(each.former).read(each.former.slot)
        if each.sent_ns and state.state is SlotState.DELETED and state.topic_id == each.topic_id:
            self._forget(each)
            return 1
        reason = self._reason_to_wait(each)
        each.waits_for = reason or (WAITS_FOR_FILES if each.is_repeated else "")
        if (
            self._now_ns < max(each.until_ns, each.sent_ns + REPEAT_NS if each.sent_ns else 0)
            or reason
            or not self._publisher.have_readers_caught_up()
        ):
            return 0
        topic = self._topic_of(each)
        shown = topic if topic is not None else _unknown_topic(each)
        self._publisher.publish_left(shown, each.former)
        each.is_repeated = bool(each.sent_ns)
        each.sent_ns = self._now_ns
        return 1

    def _reason_to_wait(self, each: _Move) -> str:
        """The reason why the former files of a partition stay; "": they may go."""
        if self._has_open(each):
            return WAITS_FOR_TRANSACTIONS
        has_lease = bool(each.leases & self._leases.names_of(*each.key))
        is_late = self._now_ns >= each.until_ns + LEASES_MAX_NS
        return WAITS_FOR_READERS if has_lease and not is_late else ""

    def _has_open(self, each: _Move) -> bool:
        """True if a transaction that was open at the arrival has not ended in the new place. Its
        last stable offset passes the markers when they are as durable as the topic requires.
        """
        topic = self._topic_of(each)
        if topic is None:
            return False
        row = topic.partitions[each.partition]
        state = self._publisher.table(row).read(row.slot)
        is_there = state.topic_id == each.topic_id
        return is_there and state.last_stable_offset < each.end_offset

    def _forget(self, each: _Move) -> None:
        """Nothing is left of a move."""
        moved = MovedPartition(
            each.topic_id, each.partition, each.name, each.former.data_dir, each.former.slot,
            Stage.CLOSED if each.state == "closing" else Stage.OPEN,
        )  # fmt: skip
        try:
            self._moved.forget(moved)
        except TailraceError:
            return  # it is tried again
        self._publisher.departing.pop(each.key, None)
        self._moves.pop(each.key, None)
        if each.state == "left":
            self._publisher.placement.release_place(each.former)
        if each.state != "closing":
            logger.info(
                "partition_moved topic=%s partition=%d", each.name, each.partition
            )  # fmt: skip


def _unknown_topic(each: _Move) -> Topic:
    """Stand-in for a deleted topic, with what the end of a partition needs."""
    return Topic(each.topic_id, each.name, "deleting", 0, False, 0, b"", {}, (), 0)
