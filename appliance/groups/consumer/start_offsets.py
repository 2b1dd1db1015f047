"""Where a group begins in a partition that it has committed nothing in.

Where the client's auto_offset_reset says; but a client that would begin at the end is told of a
place before it, for partitions that it is given late:

    added while the group was there                     the first record
    added before, and perhaps held back (`hand_over`)   where the log ended when the group came
    of a topic that was deleted and made again          the first record, whether the group was there or away (`gone_topics`)

With "latest" alone what was written until the member had the partition would be skipped, as it is
in Kafka (KAFKA-12478, KIP-842). A group is there from when a member subscribes to the topic, or the
first offset of the topic is committed, until it has neither members that subscribe to it nor
offsets in it.

Owner: the service. `begun`, `begins`, `names` and `gone` of a group are part of its row.
Invariants: of a topic in `begun` the partitions below the number were there when the group came;
    nothing is written when partitions are added. What is said of a topic goes with it:
    `follow_topics` leaves its name only, in `gone`.
Crash: the row of the group has it, written with the assignment or the commit that it is about.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterable

from appliance.groups.base.messages import TopicImage, TopicView
from appliance.groups.base.offsets import OffsetBook
from appliance.groups.base.store import OffsetRow
from appliance.groups.consumer.group import ConsumerGroup


class StartOffsets:
    """See the module's docstring."""

    def __init__(
        self, topics: TopicImage, offsets: OffsetBook, elapsed_ms: Callable[[], int]
    ) -> None:
        self._topics = topics
        self._offsets = offsets
        self._elapsed_ms = elapsed_ms

    def follow_topics(self, group: ConsumerGroup) -> bool:
        """Forget what was said of topics that were deleted. Returns whether there was anything."""
        deleted = []
        for topic_id in group.begun:
            topic = self._topics.by_id(topic_id)
            if topic is None:
                deleted.append(topic_id)
            else:
                group.names.setdefault(
                    topic_id, topic.name
                )  # rows of an earlier build have no names
        for topic_id in deleted:
            del group.begun[topic_id]
            group.begins.pop(topic_id, None)
            name = group.names.pop(topic_id, None)
            if name is not None:
                group.gone.add(name, self._elapsed_ms())
        if deleted:
            group.is_row_changed = True
        return bool(deleted)

    def assigned(self, group: ConsumerGroup, before: Iterable[str]) -> None:
        """The group has another target. `before`: the ids of the topics that it was assigned
        before.
        """
        known = set(before)
        for topic_id, count in group.signature.values():
            if topic_id in known:
                continue
            if topic_id not in group.begun or not self._offsets.has_any(group.group_id, topic_id):
                self._begin(group, topic_id, count)  # else it has come back
        self.follow_topics(group)
        group.is_row_changed = True

    def _begin(self, group: ConsumerGroup, topic_id: str, count: int) -> None:
        topic = self._topics.by_id(topic_id)
        if topic is not None and topic.name in group.gone:
            count = 0  # it was made again: all of it was added while the group was there
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
        """Offsets were committed, perhaps the first ones of a topic."""
        for row in rows:
            topic = self._topics.by_id(row.topic_id)
            if topic is not None and row.topic_id not in group.begun:
                self._begin(group, row.topic_id, topic.partition_count)
                group.is_row_changed = True
            if topic is not None and group.gone.forget(topic.name):
                group.is_row_changed = True

    def of(self, group: ConsumerGroup, topic: TopicView, partition: int) -> int | None:
        """Where the group begins in a partition that it has committed nothing in; None: where its
        client's auto_offset_reset says.
        """
        if topic.name in group.gone:
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
