"""Where a group begins in a partition that it has committed nothing in.

Where the client's auto_offset_reset says; but a client that would begin at the end is told of a place before it, for partitions that it is given late:

    added while the group was there                     the first record
    added before, and perhaps held back (`hand_over`)   where the log ended when the group came

With "latest" alone what was written until the member had the partition would be skipped, as it is in Kafka (KAFKA-12478, KIP-842). A group is there from when
a member subscribes to the topic, or the first offset of the topic is committed, until it has neither members that subscribe to it nor offsets in it.

Owner: the service. `begun` and `begins` of a group are part of its row.
Invariants: of a topic in `begun` the partitions below the number were there when the group came; nothing is written when partitions are added.
Crash: the row of the group has it, written with the assignment or the commit that it is about.
"""

from __future__ import annotations

from collections.abc import Iterable

from appliance.groups.group import ConsumerGroup
from appliance.groups.messages import TopicsView, TopicView
from appliance.groups.offsets import OffsetBook
from appliance.groups.store import OffsetRow


class Beginnings:
    """See the module's docstring."""

    def __init__(self, topics: TopicsView, offsets: OffsetBook) -> None:
        self._topics = topics
        self._offsets = offsets

    def assigned(self, group: ConsumerGroup, before: Iterable[str]) -> None:
        """The group has another target. `before`: the ids of the topics that it was assigned before."""
        known = set(before)
        for topic_id, count in group.signature.values():
            if topic_id in known:
                continue
            if topic_id not in group.begun or not self._offsets.has_any(group.group_id, topic_id):
                self._begin(group, topic_id, count)  # else it has come back
        for topic_id in [one for one in group.begun if self._topics.by_id(one) is None]:
            del group.begun[topic_id]
            group.begins.pop(topic_id, None)
        group.is_row_changed = True

    def _begin(self, group: ConsumerGroup, topic_id: str, count: int) -> None:
        group.begun[topic_id] = count
        topic = self._topics.by_id(topic_id)
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
        """Offsets were committed, perhaps the first ones of a topic."""
        for row in rows:
            if row.topic_id not in group.begun and (topic := self._topics.by_id(row.topic_id)) is not None:
                self._begin(group, row.topic_id, topic.partition_count)
                group.is_row_changed = True

    def of(self, group: ConsumerGroup, topic: TopicView, partition: int) -> int | None:
        """Where the group begins in a partition that it has committed nothing in; None: where its client's auto_offset_reset says."""
        count, end = group.begun.get(topic.topic_id), group.begins.get(topic.topic_id, {}).get(str(partition))
        if end is None and (count is None or not count <= partition < topic.partition_count):
            return None
        if topic.name not in group.signature and not self._offsets.has_any(group.group_id, topic.topic_id):
            return None
        return max(end or 0, self._topics.beginning_offset(topic.topic_id, partition) or 0)
