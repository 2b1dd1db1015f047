"""The topics that groups see: from the controller's assignments, with offsets from the partition
tables.

Owner: the process of groups. It reads the partition tables, which the flushers write.
Invariants:
- A topic exists here from its first assignment until an assignment drops one of its partitions.
- Its partition count is the length of the gapless prefix of its known partitions.
- An older assignment of a partition never replaces a newer one.
- Delay logs are excluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from appliance.groups.base.messages import LogExtent, TopicView
from shm.memory.layout import SlotState
from shm.messages.lane_messages import Assignment
from shm.tables.partition_table import PartitionTable
from tailrace.core.hash_slots import HandOver

_OPEN = (SlotState.ONLINE, SlotState.OFFLINE_FOR_WRITES)


@dataclass(slots=True)
class _Known:
    """A topic with the newest assignment of each partition."""

    topic_id: bytes
    view: TopicView
    partitions: dict[int, Assignment] = field(default_factory=dict)


def _hand_overs(partitions: Mapping[int, Assignment]) -> dict[int, HandOver]:
    return {
        number: tuple((source, offset) for source, offset in assignment.hand_over)
        for number, assignment in partitions.items()
        if assignment.hand_over
    }


class CatalogTopicImage:
    """`appliance.groups.base.messages.TopicImage` over the controller's assignments."""

    def __init__(self, tables: Sequence[PartitionTable]) -> None:
        """`tables`: by the index of the data directory."""
        self._tables = tables
        self._topics: dict[str, _Known] = {}
        """Topic id -> topic."""
        self._ids: dict[str, str] = {}
        """Name -> id."""
        self._kept: set[str] = set()
        """Ids of deleted topics that can come back from the bin."""

    # ---- assignments -----------------------------------------------------------------------------

    def apply(self, assignment: Assignment) -> bool:
        """Apply an assignment of the controller. Returns whether a topic, its partition count or
        its settings changed.
        """
        if assignment.delay_of:
            return False
        topic_id = assignment.topic_id.hex()
        known = self._topics.get(topic_id)
        if assignment.dropped:
            was_kept = topic_id in self._kept
            if assignment.binned:
                self._kept.add(topic_id)
            else:
                self._kept.discard(topic_id)
            return self._forget(topic_id) or was_kept is not assignment.binned
        self._kept.discard(topic_id)
        if known is None:
            known = _Known(
                assignment.topic_id, TopicView(assignment.topic, topic_id, 0, assignment.settings)
            )
        older = known.partitions.get(assignment.partition)
        if older is not None and older.version > assignment.version:
            return False
        known.partitions[assignment.partition] = assignment
        count = known.view.partition_count
        while count in known.partitions:
            count += 1
        view = TopicView(
            assignment.topic, topic_id, count, assignment.settings, _hand_overs(known.partitions)
        )
        is_changed = view != known.view
        known.view = view
        self._topics[topic_id] = known
        self._ids[assignment.topic] = topic_id
        return is_changed

    def _forget(self, topic_id: str) -> bool:
        known = self._topics.pop(topic_id, None)
        if known is None:
            return False
        if self._ids.get(known.view.name) == topic_id:
            del self._ids[known.view.name]
        return True

    # ---- lookups ---------------------------------------------------------------------------------

    def by_name(self, name: str) -> TopicView | None:
        """The topic of a name; None: unknown."""
        topic_id = self._ids.get(name)
        return None if topic_id is None else self._topics[topic_id].view

    def by_id(self, topic_id: str) -> TopicView | None:
        """The topic of an id; None: unknown or deleted."""
        known = self._topics.get(topic_id)
        return None if known is None else known.view

    def kept(self) -> Iterable[str]:
        """Ids of deleted topics that can come back: their committed offsets stay."""
        return self._kept

    def topics(self) -> Iterable[TopicView]:
        return [known.view for known in self._topics.values()]

    def end_offset(self, topic_id: str, partition: int) -> int | None:
        """The last stable offset; None: the partition is unknown, or its log is not open yet."""
        extent = self.extent(topic_id, partition)
        return None if extent is None else extent.end

    def high_watermark(self, topic_id: str, partition: int) -> int | None:
        """The high watermark; None: not known."""
        extent = self.extent(topic_id, partition)
        return None if extent is None else extent.high_watermark

    def beginning_offset(self, topic_id: str, partition: int) -> int | None:
        """The log start offset; None: not known."""
        extent = self.extent(topic_id, partition)
        return None if extent is None else extent.beginning

    def extent(self, topic_id: str, partition: int) -> LogExtent | None:
        """The offsets of a log at one time; None: not known."""
        known = self._topics.get(topic_id)
        assignment = None if known is None else known.partitions.get(partition)
        if known is None or assignment is None:
            return None
        state = self._tables[assignment.data_dir].read(assignment.slot)
        if state.topic_id != known.topic_id or state.state not in _OPEN:
            return None
        return LogExtent(
            state.log_start_offset, max(state.log_start_offset, state.last_stable_offset),
            state.high_watermark,
        )  # fmt: skip
