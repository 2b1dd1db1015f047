"""Start offsets of a group in partitions without a committed offset.

The client's auto_offset_reset decides, with these exceptions for partitions that a group gets late:

    partition                                                 start offset
    added while the group was active on the topic             the first record
    added before, and blocked at first (hash_slot_handover)   log end when the group became active
    of a recreated topic (deleted_topics)                     the first record

With "latest" alone the group would skip the records written before a member got the partition, as
in Kafka (KAFKA-12478, KIP-842). A group becomes active on a topic when a member subscribes to it or
the first offset is committed. It ends when it has neither subscribed members nor offsets.

Owner: the service. `begun`, `begins`, `names` and `deleted_topics` of a group are part of its row.
Invariants:
- The partitions of a topic below its number in `begun` existed when the group became active.
- Adding partitions writes nothing.
- `follow_topics` drops the entries of a deleted topic, and adds its name to `deleted_topics`.
Crash: the entries are in the group's row, in the transaction of the assignment or commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from appliance.groups.base.messages import TopicImage, TopicView
from appliance.groups.base.offsets import OffsetBook
from appliance.groups.consumer.group import ConsumerGroup
from appliance.groups.store.schema import OffsetRow


class StartOffsets:
    """Computes and maintains the start offsets of groups."""

    def __init__(
        self, topics: TopicImage, offsets: OffsetBook, elapsed_ms: Callable[[], int]
    ) -> None:
        self._topics = topics
        self._offsets = offsets
        self._elapsed_ms = elapsed_ms

    def follow_topics(self, group: ConsumerGroup) -> bool:
        """Drop the entries of deleted topics. Returns whether there were any."""
        deleted = []
        for topic_id in group.begun:
            topic = self._topics.by_id(topic_id)
            if topic is None:
                deleted.append(topic_id)
            else:
                group.names.setdefault(topic_id, topic.name)  # rows of earlier builds have no names
        for topic_id in deleted:
            del group.begun[topic_id]
            group.begins.pop(topic_id, None)
            name = group.names.pop(topic_id, None)
            if name is not None:
                group.deleted_topics.add(name, self._elapsed_ms())
        if deleted:
            group.is_row_changed = True
        return bool(deleted)

    def assigned(self, group: ConsumerGroup, before: Iterable[str]) -> None:
        """Note a new target assignment. `before`: topic ids of the previous assignment."""
        known = set(before)
        for topic_id, count in group.signature.values():
            if topic_id in known:
                continue
            if topic_id not in group.begun or not self._offsets.has_any(group.group_id, topic_id):
                self._begin(group, topic_id, count)  # otherwise the group returns to the topic
        self.follow_topics(group)
        group.is_row_changed = True

    def _begin(self, group: ConsumerGroup, topic_id: str, count: int) -> None:
        topic = self._topics.by_id(topic_id)
        if topic is not None and topic.name in group.deleted_topics:
            count = 0  # recreated: all its partitions were added while the group was active
        group.begun[topic_id] = count
        if topic is not None:
            group.names[topic_id] = topic.name
        ends = {
            str(partition): end
            for partition in (topic.hand_overs if topic is not None else ())
            if (end := self._topics.end_offset(topic_id, partition)) is not None
        }
        if ends:
            group.begins[topic_id] = ends
        else:
            group.begins.pop(topic_id, None)

    def committed(self, group: ConsumerGroup, rows: Iterable[OffsetRow]) -> None:
        """Note committed offsets, which may be the group's first ones in a topic."""
        for row in rows:
            topic = self._topics.by_id(row.topic_id)
            if topic is not None and row.topic_id not in group.begun:
                self._begin(group, row.topic_id, topic.partition_count)
                group.is_row_changed = True
            if topic is not None and group.deleted_topics.forget(topic.name):
                group.is_row_changed = True

    def of(self, group: ConsumerGroup, topic: TopicView, partition: int) -> int | None:
        """The start offset of a partition without a committed offset; None: the client's
        auto_offset_reset decides.
        """
        if topic.name in group.deleted_topics:
            return (
                self._topics.beginning_offset(topic.topic_id, partition) or 0
                if partition < topic.partition_count
                else None
            )
        count, end = (
            group.begun.get(topic.topic_id),
            group.begins.get(topic.topic_id, {}).get(str(partition)),
        )
        if end is None and (count is None or not count <= partition < topic.partition_count):
            return None
        if topic.name not in group.signature and not self._offsets.has_any(
            group.group_id, topic.topic_id
        ):
            return None
        return max(end or 0, self._topics.beginning_offset(topic.topic_id, partition) or 0)
