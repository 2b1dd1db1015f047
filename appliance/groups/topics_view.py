"""The topics that groups see: from the coordinator's news, with offsets from the partition tables.

Owner: the process of groups. Reads the partition tables, which the flushers write.
Invariants: a topic is here from the first news of its partition 0 until news that one of its partitions is dropped; of its partitions those count that are
    known without a gap; older news of a partition never take the place of newer ones; delay logs are no topics here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from appliance.groups.messages import TopicView
from shm.catalog_messages import Assignment
from shm.layout import SlotState
from shm.partition_table import PartitionState, PartitionTable


@dataclass(slots=True)
class _Known:
    """A topic, with its newest news by partition."""

    topic_id: bytes
    view: TopicView
    partitions: dict[int, Assignment] = field(default_factory=dict)


class CatalogTopics:
    """`appliance.groups.messages.TopicsView` over what the coordinator has told."""

    def __init__(self, tables: Sequence[PartitionTable]) -> None:
        """`tables`: by the index of the data directory."""
        self._tables = tables
        self._topics: dict[str, _Known] = {}
        """By id."""
        self._ids: dict[str, str] = {}
        """Name -> id."""

    # ---- news ------------------------------------------------------------------------------------------------------------------------

    def apply(self, assignment: Assignment) -> bool:
        """Take in news of a partition; returns whether a topic, its partitions or its settings are others than before."""
        if assignment.delay_of:
            return False
        topic_id = assignment.topic_id.hex()
        known = self._topics.get(topic_id)
        if assignment.dropped:
            return self._forget(topic_id)
        if known is None:
            known = _Known(assignment.topic_id, TopicView(assignment.topic, topic_id, 0, assignment.settings))
        older = known.partitions.get(assignment.partition)
        if older is not None and older.version > assignment.version:
            return False
        known.partitions[assignment.partition] = assignment
        count = known.view.partition_count
        while count in known.partitions:
            count += 1
        view = TopicView(assignment.topic, topic_id, count, assignment.settings)
        is_news = view != known.view
        known.view = view
        self._topics[topic_id] = known
        self._ids[assignment.topic] = topic_id
        return is_news

    def _forget(self, topic_id: str) -> bool:
        known = self._topics.pop(topic_id, None)
        if known is None:
            return False
        if self._ids.get(known.view.name) == topic_id:
            del self._ids[known.view.name]
        return True

    # ---- what groups ask -------------------------------------------------------------------------------------------------------------

    def by_name(self, name: str) -> TopicView | None:
        """None: there is no such topic."""
        topic_id = self._ids.get(name)
        return None if topic_id is None else self._topics[topic_id].view

    def by_id(self, topic_id: str) -> TopicView | None:
        """None: there is no such topic, or it was deleted."""
        known = self._topics.get(topic_id)
        return None if known is None else known.view

    def topics(self) -> Iterable[TopicView]:
        return [known.view for known in self._topics.values()]

    def end_offset(self, topic_id: str, partition: int) -> int | None:
        """The offset behind the last record that consumers see; None: not known, there is no such partition or its log is not open yet."""
        state = self._state(topic_id, partition)
        return None if state is None else state.high_watermark

    def beginning_offset(self, topic_id: str, partition: int) -> int | None:
        """The first offset that is kept; None: not known."""
        state = self._state(topic_id, partition)
        return None if state is None else state.log_start_offset

    def _state(self, topic_id: str, partition: int) -> PartitionState | None:
        known = self._topics.get(topic_id)
        assignment = None if known is None else known.partitions.get(partition)
        if known is None or assignment is None:
            return None
        state = self._tables[assignment.data_dir].read(assignment.slot)
        if state.topic_id != known.topic_id or state.state not in (SlotState.ONLINE, SlotState.OFFLINE_FOR_WRITES):
            return None
        return state
