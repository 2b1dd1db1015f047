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

A partition of a topic with delays moves together with that of its delay log, since one worker has
both (docs/adr/0067): each stage begins for both in one transaction.

Readers use the former files until they know the new place.

Owner: the controller.

Invariants:
- The catalog's row says where the partition is, at every moment.
- One partition of a topic is closing or arriving at a time.
- A partition and that of its delay log are in one stage, and in one directory.
- Nothing is appended in two places: the former worker is closed before the copy is complete, and
  the new one until the catalog says that the partition is open there. From then on it does not go
  back.
- The former files are removed when the partition is open in its new place, and nothing needs them
  (`former_files`).

Bounds: MOVES_MAX partitions at once are closing or arriving. One that is not copied within
CLOSED_MAX_NS stays.

Crash: a successor opens a closed partition where it is, and goes on from `arriving`, or `opened`.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from appliance.catalog.catalog import (
    Catalog,
    CatalogFullError,
    PartitionRow,
    Topic,
    delay_log_of,
)
from appliance.catalog.moved_partitions import MovedPartition, MovedPartitions, Stage
from appliance.control.host_view import HostView
from appliance.control.moves.failed_moves import FailedMoves
from appliance.control.moves.former_files import FormerFiles
from appliance.control.moves.move_target import move_target
from appliance.control.moves.moving_partition import Key, Move, Part, states_of, taken_up
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
CLOSED_MAX_NS = 60_000_000_000
ARRIVAL_MAX_NS = 60_000_000_000
"""Longest wait for the other flusher to open the copy: its disk may stand still."""
ARRIVING = ("arriving", "")
"""Stands for the directory of a closed partition that arrives: it has none to depart to."""


def closed_arrivals(moved: MovedPartitions) -> dict[Key, tuple[str, str]]:
    """The partitions that a predecessor has moved and not opened, for `publisher.departing`: before
    any assignment is published. Raises StorageError.
    """
    rows = moved.all()
    return {(row.topic_id, row.partition): ARRIVING for row in rows if row.stage is Stage.LEFT}


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
        self._former_files = FormerFiles(publisher, leases)
        self._host_view = host_view
        self._now_ns = start_ns
        self._moves: dict[Key, Move] = {}
        self._failed = FailedMoves()
        for each in taken_up(self._moved.all(), start_ns + ARRIVAL_MAX_NS):
            self._moves[each.key] = each
        publisher.former_places = self._former_places

    @property
    def is_waiting(self) -> bool:
        """True if a partition is on its way."""
        return bool(self._moves)

    def is_moving(self, topic: Topic) -> bool:
        """True if a partition of the topic is on its way, or its former files are there."""
        return any(each.parts[0].topic_id == topic.topic_id for each in self._moves.values())

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
        known = {topic.topic_id for topic in self._topics.values() if topic.state != "deleting"}
        return [*self._failed.described(known, self._now_ns), *rows]

    def _former_places(self) -> list[tuple[Topic, PartitionRow, int]]:
        """See `MetadataPublisher.former_places`."""
        return [
            place
            for each in self._moves.values()
            for place in self._former_files.place(each, each.topics_in(self._topics))
        ]

    def _place_of(self, each: Move) -> str:
        topics = each.topics_in(self._topics)
        if not topics or each.state == "closing":
            return ""
        index = self._publisher.placement.known_dir_index(topics[0].partitions[each.partition])
        return "" if index is None else self._host_view.dir_paths()[index]

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
        log = delay_log_of(topic, self._topics)
        topics = [topic] if log is None else [topic, log]
        of_topic = [each for each in self._moves.values() if each.key[0] == topic.topic_id]
        if any(each.state != "active" for each in topics) or any(
            each.state != "left" or each.partition == number for each in of_topic
        ):
            raise TailraceError(
                f"{topic.name} is changing, another of its partitions is moving, or the former "
                "files of this one are still being removed; try again in a moment",
                ErrorCode.NOT_READY,
            )
        target = move_target(topics, number, path, self._host_view, self._publisher.placement)
        if sum(each.state != "left" for each in self._moves.values()) >= MOVES_MAX:
            raise TailraceError(
                f"{MOVES_MAX} partitions are moving, which is the limit; try again in a moment",
                ErrorCode.NOT_READY,
            )
        if validate_only:
            return []
        with self._catalog.together():
            decided = [self._moved.close(each, number) for each in topics]
        parts = [
            Part(each.name, each.topic_id, number, each.partitions[number], each.version)
            for each in decided
        ]
        move = Move(
            parts, "closing", target, os.urandom(8).hex(), self._now_ns + CLOSED_MAX_NS
        )  # fmt: skip
        self._moves[move.key] = move
        self._failed.forget(move.key)
        self._set_departing(move, (self._host_view.dir_paths()[target], move.move))
        return decided

    def _set_departing(self, each: Move, departing: tuple[str, str] | None) -> None:
        """Have all parts published as closed, or as open again (None)."""
        for part in each.parts:
            if departing is None:
                self._publisher.departing.pop(part.key, None)
            else:
                self._publisher.departing[part.key] = departing

    def _carry_out(self, before: list[Topic], decided: list[Topic]) -> None:
        for former, topic in zip(before, decided, strict=True):
            self._changes.carry_out(former, topic)

    # ---- steps -----------------------------------------------------------------------------------

    def step(self, now_ns: int) -> int:
        """Go on with each partition, as far as the other processes have come. Part of a step of the
        catalog. Returns how much was done.
        """
        self._now_ns = now_ns
        steps = {"closing": self._close, "arriving": self._arrive, "left": self._leave}
        return sum(steps[each.state](each) for each in list(self._moves.values()))

    def _close(self, each: Move) -> int:
        topics = each.topics_in(self._topics)
        if not topics:
            self._forget(each)
            return 1
        is_settled = all(topic.state == "active" for topic in topics)
        if not each.move:
            if not is_settled:
                return 0  # a predecessor's decision is carried out first
            return self._stay(each, topics, "the controller was restarted; try again")
        if is_settled and all(
            topic.version >= part.version for topic, part in zip(topics, each.parts, strict=True)
        ):
            if all(
                self._host_view.has_arrived(
                    each.target, bin_name(part.topic_id, part.partition), each.move
                )
                for part in each.parts
            ):
                return self._switch(each, topics)
            return self._stay(each, topics, "its copy could not be completed; the log says why")
        if self._now_ns > each.until_ns:
            return self._stay(each, topics, "it could not be closed in time; look at status")
        return 0

    def _switch(self, each: Move, topics: list[Topic]) -> int:
        """Decide the move."""
        crash_point("move.before_decision")
        if not self._publisher.placement.has_room_in(topics[0], each.target):
            return self._stay(each, topics, "no dedicated worker is free; raise dedicated_workers")
        number = self._publisher.placement.dir_number(each.target)
        try:
            with self._catalog.together():
                decided = [self._moved.move(topic, each.partition, number) for topic in topics]
        except (TailraceError, CatalogFullError) as error:
            return self._stay(each, topics, str(error))
        for topic in decided:
            self._publisher.placement.assign(topic)
        departing, until_ns = self._publisher.departing[each.key], each.until_ns
        self._set_departing(each, ARRIVING)
        each.state, each.until_ns = "arriving", self._now_ns + ARRIVAL_MAX_NS

        def decided_durably() -> None:
            crash_point("move.after_decision")
            self._leases.feed(self._publisher.to(Role.FLUSHER, each.target), decided)
            logger.info(
                "partition_moves topic=%s partition=%d to=%s", each.name, each.partition,
                self._host_view.dir_paths()[each.target],
            )  # fmt: skip

        def not_decided(_error: TailraceError) -> None:
            self._publisher.placement.release_place(decided[0].partitions[each.partition])
            each.state, each.until_ns = "closing", until_ns
            self._set_departing(each, departing)

        self._catalog.afterwards(decided_durably, not_decided)
        self._carry_out(topics, decided)
        return 1

    def _stay(self, each: Move, topics: list[Topic], reason: str) -> int:
        """Decide that a closed partition stays where it is."""
        try:
            with self._catalog.together():
                decided = [self._moved.cancel(topic, each.partition) for topic in topics]
        except TailraceError:
            return 0  # the catalog's disk is full, or failing: it is tried again
        departing = self._publisher.departing.get(each.key)
        self._set_departing(each, None)
        del self._moves[each.key]
        stays_in = self._publisher.placement.dir_index(each.former)

        def not_decided(_error: TailraceError) -> None:
            self._moves[each.key] = each
            self._set_departing(each, departing)

        self._catalog.afterwards(
            lambda: self._note_failed(each, stays_in, each.target, reason), not_decided
        )
        self._carry_out(topics, decided)
        return 1

    def _note_failed(self, each: Move, stays_in: int, target: int, reason: str) -> None:
        """Say that a partition stays in the directory with the index `stays_in`."""
        paths = self._host_view.dir_paths()
        to = paths[target] if target >= 0 else ""
        self._failed.note(each, paths[stays_in], to, reason, self._now_ns)

    def _arrive(self, each: Move) -> int:
        """Wait until the partition is open in its new place, then have it take batches there."""
        topics = each.topics_in(self._topics)
        if not topics:
            self._set_departing(each, None)
        else:
            states = states_of(each, topics, self._publisher)
            is_there = all(topic.state == "active" for topic in topics) and all(
                state.topic_id == part.topic_id and state.state is SlotState.ONLINE
                for state, part in zip(states, each.parts, strict=True)
            )
            if not each.is_opened:
                if is_there:
                    return self._open(each, topics)
                reason = self._reason_to_go_back(each, topics, states)
                return self._go_back(each, topics, reason) if reason else 0
            if not is_there:
                return 0
            for state, part in zip(states, each.parts, strict=True):
                part.end_offset = 0 if each.is_back else state.log_end_offset
        self._former_files.keep(each, self._now_ns)
        return 1

    def _open(self, each: Move, topics: list[Topic]) -> int:
        """Decide that the partition takes batches in its new place."""
        crash_point("move.before_opening")
        try:
            with self._catalog.together():
                decided = [self._moved.open(topic, each.partition) for topic in topics]
        except TailraceError:
            return 0  # the catalog's disk is full, or failing: it is tried again
        departing = self._publisher.departing[each.key]
        self._set_departing(each, None)
        each.is_opened = True

        def not_decided(_error: TailraceError) -> None:
            each.is_opened = False
            self._set_departing(each, departing)

        self._catalog.afterwards(lambda: None, not_decided)
        self._carry_out(topics, decided)
        return 1

    def _reason_to_go_back(
        self, each: Move, topics: list[Topic], states: list[PartitionState]
    ) -> str:
        """The reason why a partition cannot be opened in its new place; "": it still may be."""
        if self._publisher.placement.known_dir_index(each.former) is None:
            return ""  # the directory where it was is not configured any more
        if any(
            state.topic_id == topic.topic_id
            and state.applied_version >= topic.version
            and state.state in (SlotState.UNREADABLE, SlotState.OFFLINE_FOR_WRITES)
            for topic, state in zip(topics, states, strict=True)
        ):
            return "its copy could not be opened there; the log says why"
        if self._now_ns > each.until_ns:
            return "its copy could not be opened there in time; look at status"
        return ""

    def _go_back(self, each: Move, topics: list[Topic], reason: str) -> int:
        """Decide that a partition that has left is where it was: nothing was appended since."""
        crash_point("move.before_going_back")
        left = [topic.partitions[each.partition] for topic in topics]
        places = [part.former for part in each.parts]
        try:
            for topic, place in zip(topics, places, strict=True):
                self._publisher.placement.assign(topic._replace(partitions=(place,)))
            with self._catalog.together():
                decided = [
                    self._moved.go_back(topic, each.partition, place)
                    for topic, place in zip(topics, places, strict=True)
                ]
        except TailraceError:
            return 0  # the catalog's disk is full, or failing: it is tried again
        departing = self._publisher.departing[each.key]
        self._set_departing(each, None)
        self._set_former(each, left)
        target, each.target = each.target, -1
        each.is_opened = each.is_back = True

        def not_decided(_error: TailraceError) -> None:
            self._set_former(each, places)
            each.target = target
            each.is_opened = each.is_back = False
            self._set_departing(each, departing)

        def goes_back() -> None:
            index = self._publisher.placement.dir_index
            self._leases.feed(self._publisher.to(Role.FLUSHER, index(places[0])), decided)
            self._note_failed(each, index(places[0]), index(left[0]), reason)

        self._catalog.afterwards(goes_back, not_decided)
        self._carry_out(topics, decided)
        return 1

    @staticmethod
    def _set_former(each: Move, rows: list[PartitionRow]) -> None:
        for part, row in zip(each.parts, rows, strict=True):
            part.former = row

    def _leave(self, each: Move) -> int:
        """Have the former files removed, when nothing needs them."""
        if self._former_files.are_gone(each):
            self._forget(each)
            return 1
        return self._former_files.remove(each, each.topics_in(self._topics), self._now_ns)

    def _forget(self, each: Move) -> None:
        """Nothing is left of a move."""
        stage = Stage.CLOSED if each.state == "closing" else Stage.OPEN
        try:
            with self._catalog.together():
                for part in each.parts:
                    self._moved.forget(
                        MovedPartition(
                            part.topic_id,
                            part.partition,
                            part.name,
                            part.former.data_dir,
                            part.former.slot,
                            stage,
                        )
                    )
        except TailraceError:
            return  # it is tried again
        self._set_departing(each, None)
        self._moves.pop(each.key, None)
        if each.state == "left":
            self._publisher.placement.release_place(each.former)
        if each.state != "closing":
            logger.info(
                "partition_moved topic=%s partition=%d", each.name, each.partition
            )  # fmt: skip
