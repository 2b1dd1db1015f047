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
from appliance.control.moves.move_target import move_target
from appliance.control.moves.moving_partition import Key, Move, Part, taken_up
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
FAILED_SHOWN_NS = 86_400_000_000_000
"""A move that did not come about is described for a day."""
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
        self._host_view = host_view
        self._now_ns = start_ns
        self._moves: dict[Key, Move] = {}
        self._failed: dict[Key, tuple[int, dict[str, Any]]] = {}
        """The last moves that did not come about, each with the time until which it is described.
        """
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
        failed = [
            row
            for (topic_id, _), (until_ns, row) in self._failed.items()
            if topic_id in known and self._now_ns < until_ns
        ]
        return [*failed, *rows]

    def _former_places(self) -> list[tuple[Topic, PartitionRow, int]]:
        """See `MetadataPublisher.former_places`."""
        found = []
        for each in self._moves.values():
            topics = self._topics_of(each)
            is_configured = self._publisher.placement.known_dir_index(each.former) is not None
            if topics and each.state != "closing" and not each.sent_ns and is_configured:
                worker = self._former_worker(each, topics)
                found += [
                    (topic, part.former, worker)
                    for topic, part in zip(topics, each.parts, strict=True)
                ]
        return found

    def _former_worker(self, each: Move, topics: list[Topic]) -> int:
        """The worker of the former place."""
        topic = topics[0] if topics else _unknown_topic(each.parts[0])
        return self._publisher.placement.former_worker_of(topic, each.former)

    def _place_of(self, each: Move) -> str:
        topics = self._topics_of(each)
        if not topics or each.state == "closing":
            return ""
        index = self._publisher.placement.known_dir_index(topics[0].partitions[each.partition])
        return "" if index is None else self._host_view.dir_paths()[index]

    def _topics_of(self, each: Move) -> list[Topic]:
        """The topic of each part; empty if they are deleted, which is one decision."""
        found = []
        for part in each.parts:
            topic = self._topics.get(part.name)
            if topic is None or topic.topic_id != part.topic_id or topic.state == "deleting":
                return []
            found.append(topic)
        return found

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
        self._failed.pop(move.key, None)
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
        topics = self._topics_of(each)
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
        """Say that a partition stays in the directory `stays_in`."""
        paths = self._host_view.dir_paths()
        to = paths[target] if target >= 0 else ""
        logger.warning(
            "partition_stays topic=%s partition=%d to=%s reason=%r advice=%r", each.name,
            each.partition, to, reason, "run tailrace partition move again",
        )  # fmt: skip
        while len(self._failed) >= FAILED_MAX:
            del self._failed[next(iter(self._failed))]
        row = {
            "topic": each.name, "partition": each.partition, "state": "failed",
            "from": paths[stays_in], "to": to, "reason": reason,
        }  # fmt: skip
        self._failed[each.key] = self._now_ns + FAILED_SHOWN_NS, row

    def _arrive(self, each: Move) -> int:
        """Wait until the partition is open in its new place, then have it take batches there."""
        topics = self._topics_of(each)
        if not topics:
            self._set_departing(each, None)
        else:
            states = self._states_of(each, topics)
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
        for part in each.parts:
            part.leases = set() if each.is_back else self._leases.names_of(*part.key)
        each.state, each.until_ns = "left", self._now_ns + KEPT_NS
        return 1

    def _states_of(self, each: Move, topics: list[Topic]) -> list[PartitionState]:
        """States of the parts in their present places, as the flushers show them."""
        rows = [topic.partitions[each.partition] for topic in topics]
        return [self._publisher.table(row).read(row.slot) for row in rows]

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
        """Have the former files removed, when no reader needs them."""
        if self._publisher.placement.known_dir_index(each.former) is None:
            self._forget(each)  # its directory is not configured any more
            return 1
        left = [part for part in each.parts if not (each.sent_ns and self._is_removed(part))]
        if not left:
            self._forget(each)
            return 1
        topics = self._topics_of(each)
        reason = self._reason_to_wait(each, topics)
        each.waits_for = reason or (WAITS_FOR_FILES if each.is_repeated else "")
        if (
            self._now_ns < max(each.until_ns, each.sent_ns + REPEAT_NS if each.sent_ns else 0)
            or reason
            or not self._publisher.have_readers_caught_up()
        ):
            return 0
        worker = self._former_worker(each, topics)
        for part in left:
            topic = self._topics.get(part.name) if topics else None
            shown = topic if topic is not None else _unknown_topic(part)
            self._publisher.publish_left(shown, part.former, worker)
        each.is_repeated = bool(each.sent_ns)
        each.sent_ns = self._now_ns
        return 1

    def _is_removed(self, part: Part) -> bool:
        state = self._publisher.table(part.former).read(part.former.slot)
        return state.state is SlotState.DELETED and state.topic_id == part.topic_id

    def _reason_to_wait(self, each: Move, topics: list[Topic]) -> str:
        """The reason why the former files of a partition stay; "": they may go."""
        if topics and self._has_open(each, topics):
            return WAITS_FOR_TRANSACTIONS
        has_lease = any(part.leases & self._leases.names_of(*part.key) for part in each.parts)
        is_late = self._now_ns >= each.until_ns + LEASES_MAX_NS
        return WAITS_FOR_READERS if has_lease and not is_late else ""

    def _has_open(self, each: Move, topics: list[Topic]) -> bool:
        """True if a transaction that was open at the arrival has not ended in the new place. Its
        last stable offset passes the markers when they are as durable as the topic requires.
        """
        return any(
            state.topic_id == part.topic_id and state.last_stable_offset < part.end_offset
            for state, part in zip(self._states_of(each, topics), each.parts, strict=True)
        )

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


def _unknown_topic(each: Part) -> Topic:
    """Stand-in for a deleted topic, with what the end of a partition needs."""
    return Topic(each.topic_id, each.name, "deleting", 0, False, 0, b"", {}, (), 0)
