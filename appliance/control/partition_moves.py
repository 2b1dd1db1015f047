"""Moves of partitions to other data directories, while they are written (docs/adr/0059).

    state      decided by                    what happens
    ---------  ----------------------------  -----------------------------------------------------
    closing    a client's ALTER_TOPICS       the worker appends nothing more; the flusher completes
                                             the copy in the bin of the other directory
    arriving   this module: one transaction  the other flusher takes the copy out of the bin, the
               of the catalog                other worker appends
    left       -                             readers have the new place; then the former files are
                                             removed

Readers use the former files until they know the new place.

Owner: the controller.

Invariants:
- The catalog's row says where the partition is, at every moment.
- One partition of a topic is closing or arriving at a time.
- Nothing is appended in two places: the former worker is closed before the copy is complete, and
  the new one opens what the decision names.
- The former files are removed when the partition is open in its new place and the readers know it.
  The leases and the transactions of before must have ended. Until then its former worker, and each
  successor of it, has the partition closed: it keeps the coordinator from forgetting the decisions
  that came while the partition was closed.

Bounds: MOVES_MAX partitions at once are closing or arriving. One that is not copied within
CLOSED_MAX_NS stays.

Crash: a successor opens a closed partition where it is, and goes on from `arriving`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from appliance.catalog.catalog import Catalog, CatalogFullError, PartitionRow, Topic, delay_log_of
from appliance.catalog.moved_partitions import MovedPartition, MovedPartitions
from appliance.control.host_view import HostView
from appliance.control.offset_leases import OffsetLeases
from appliance.control.publishing.lane_sender import LaneSender
from appliance.control.publishing.metadata_publisher import MetadataPublisher
from appliance.control.topics.change_queue import TopicChangeQueue
from shm.crash_points import crash_point
from shm.memory.layout import Role, SlotState
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError, TailraceError
from tailrace.format.directory.data_dir import bin_name

logger = logging.getLogger(__name__)

MOVES_MAX = 16
FAILED_MAX = 16
CLOSED_MAX_NS = 60_000_000_000
KEPT_NS = 5_000_000_000
"""Shortest time from the arrival to the removal of the former files: readers end what they have
begun.
"""
LEASES_MAX_NS = 3_600_000_000_000
"""Longest wait for readers' leases."""
WAITS_FOR_READERS = "readers need the former files"
WAITS_FOR_TRANSACTIONS = "transactions that were open when it moved have not ended there"
REPEAT_NS = 5_000_000_000
_INSTEAD = (
    "To empty its directory, make another topic (drained_dirs keeps it elsewhere), and let clients "
    "use that"
)

Key = tuple[bytes, int]


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
    """Closing: the latest time. Left: the earliest time of the removal."""
    end_offset: int = 0
    """Left: end of the log at its arrival. A transaction that was open then begins below."""
    leases: set[str] = field(default_factory=set)
    """Leases of readers that may have begun with the former files."""
    waits_for: str = ""
    """Left: why the former files are still there."""
    sent_ns: int = 0

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
        state = "arriving" if row.has_left else "closing"
        self._moves[row.topic_id, row.partition] = _Move(
            row.name, row.topic_id, row.partition, state, former
        )

    def described(self) -> list[dict[str, Any]]:
        """One row a partition, for JSON: those on their way, then the last that did not move."""
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
        return [*rows, *self._failed.values()]

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
        target = self._target(topic, row, path)
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

    def _target(self, topic: Topic, row: PartitionRow, path: Any) -> int:
        """The index of the directory that a partition may move to. Raises InvalidRequestError."""
        paths = self._host_view.dir_paths()
        target = next(
            (
                index
                for index, known in enumerate(paths)
                if isinstance(path, str) and os.path.realpath(known) == os.path.realpath(path)
            ),
            None,
        )
        if target is None:
            raise InvalidRequestError(
                f"{str(path)[:200]!r} is no data directory of this appliance; it has "
                f"{', '.join(paths)}. To add one, list it in data_dirs and restart"
            )
        if target == self._publisher.placement.dir_index(row):
            raise InvalidRequestError(f"{topic.name}-{row.partition} is in {paths[target]} already")
        if topic.given.get("worker.dedicated"):
            raise InvalidRequestError(
                f"topic {topic.name!r} has worker.dedicated: its partitions cannot move. {_INSTEAD}"
            )
        if delay_log_of(topic, self._topics) is not None:
            raise InvalidRequestError(
                f"topic {topic.name!r} has delayed records: its partitions cannot move. {_INSTEAD}"
            )
        name = f"{topic.name}-{row.partition}"
        try:
            is_taken = name in self._host_view.names_in(target)
        except OSError as error:
            raise InvalidRequestError(f"{paths[target]} cannot be read: {error}") from None
        if is_taken:
            raise InvalidRequestError(
                f"{paths[target]}/{name} is there already: it was left by an earlier move or "
                "copied; move it away"
            )
        return target

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
        number = self._publisher.placement.dir_number(each.target)
        try:
            decided = self._moved.move(topic, each.partition, number)
        except (TailraceError, CatalogFullError) as error:
            return self._stay(each, topic, str(error))
        departing = self._publisher.departing.pop(each.key)
        each.state = "arriving"

        def decided_durably() -> None:
            crash_point("move.after_decision")
            self._leases.feed(self._publisher.to(Role.FLUSHER, each.target), [decided])
            logger.info(
                "partition_moves topic=%s partition=%d to=%s", each.name, each.partition,
                self._host_view.dir_paths()[each.target],
            )  # fmt: skip

        def not_decided(_error: TailraceError) -> None:
            each.state = "closing"
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

        def stays() -> None:
            paths = self._host_view.dir_paths()
            target = paths[each.target] if each.target >= 0 else ""
            logger.warning(
                "partition_stays topic=%s partition=%d to=%s reason=%r advice=%r", each.name,
                each.partition, target, reason, "run tailrace partition move again",
            )  # fmt: skip
            while len(self._failed) >= FAILED_MAX:
                del self._failed[next(iter(self._failed))]
            self._failed[each.key] = {
                "topic": each.name, "partition": each.partition, "state": "failed",
                "from": paths[self._publisher.placement.dir_index(each.former)], "to": target,
                "reason": reason,
            }  # fmt: skip

        def not_decided(_error: TailraceError) -> None:
            self._moves[each.key] = each
            if departing is not None:
                self._publisher.departing[each.key] = departing

        self._catalog.afterwards(stays, not_decided)
        self._changes.carry_out(topic, decided)
        return 1

    def _arrive(self, each: _Move) -> int:
        """Wait until the partition is open in its new place."""
        topic = self._topic_of(each)
        if topic is not None:
            row = topic.partitions[each.partition]
            state = self._publisher.table(row).read(row.slot)
            if topic.state != "active" or state.state is not SlotState.ONLINE:
                return 0
            each.end_offset = state.log_end_offset
        each.leases = self._leases.names_of(*each.key)
        each.state, each.until_ns = "left", self._now_ns + KEPT_NS
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
        each.waits_for = self._reason_to_wait(each)
        if (
            self._now_ns < max(each.until_ns, each.sent_ns + REPEAT_NS if each.sent_ns else 0)
            or each.waits_for
            or not self._publisher.have_readers_caught_up()
        ):
            return 0
        topic = self._topic_of(each)
        shown = topic if topic is not None else _unknown_topic(each)
        self._publisher.publish_left(shown, each.former)
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
            each.state != "closing",
        )  # fmt: skip
        try:
            self._moved.forget(moved)
        except TailraceError:
            return  # it is tried again
        self._publisher.departing.pop(each.key, None)
        self._moves.pop(each.key, None)
        if each.state != "closing":
            logger.info(
                "partition_moved topic=%s partition=%d", each.name, each.partition
            )  # fmt: skip


def _unknown_topic(each: _Move) -> Topic:
    """Stand-in for a deleted topic, with what the end of a partition needs."""
    return Topic(each.topic_id, each.name, "deleting", 0, False, 0, b"", {}, (), 0)
