"""Hand-over of hash slots in groups: a partition that received slots is blocked until the group has
drained its source partitions.

When keys have moved, the older records of a key lie in another partition than the newer ones. A
member therefore gets an added partition only after the group's committed offsets have passed the
hand-over offset of each source. A group that stores its offsets elsewhere would wait for ever.
A source without any committed offset therefore blocks for at most PATIENCE_NS.

Owner: the service. `is_drained`, which decides, is pure.
Crash: nothing is stored. The blocked partitions follow from committed offsets and topics.
"""

from __future__ import annotations

from appliance.groups.base.messages import Partition, TopicImage, TopicView
from appliance.groups.base.offsets import OffsetBook
from appliance.groups.consumer.group import ConsumerGroup
from tailrace.core.hash_slots import is_drained

__all__ = ["PATIENCE_NS", "HandOvers", "is_drained"]

PATIENCE_NS = 60_000_000_000


class HandOvers:
    """Computes the blocked partitions of groups."""

    def __init__(self, topics: TopicImage, offsets: OffsetBook) -> None:
        self._topics = topics
        self._offsets = offsets

    def check(self, group: ConsumerGroup, now_ns: int) -> None:
        """Recompute the group's blocked partitions. Those no longer blocked become free."""
        blocked: dict[Partition, int] = {}
        for topic_id, _ in group.signature.values():
            topic = self._topics.by_id(topic_id)
            if topic is not None and topic.hand_overs:
                blocked.update(self._blocked(group, topic, now_ns))
        group.block(blocked)

    def _blocked(self, group: ConsumerGroup, topic: TopicView, now_ns: int) -> dict[Partition, int]:
        topic_id = topic.topic_id
        committed = {
            partition: row.committed
            for partition, row in self._offsets.of_topic(group.group_id, topic_id).items()
        }
        sources = {source for hand_over in topic.hand_overs.values() for source, _ in hand_over}
        start_offsets = {
            source: found
            for source in sources
            if (found := self._topics.beginning_offset(topic_id, source)) is not None
        }
        ends = {
            source: found
            for source in sources
            if (found := self._topics.high_watermark(topic_id, source)) is not None
        }
        blocked = {}
        for partition, hand_over in topic.hand_overs.items():
            since_ns = group.blocked.get((topic_id, partition), now_ns)
            waited_for = [
                pair
                for pair in hand_over
                if pair[0] in committed or now_ns - since_ns < PATIENCE_NS
            ]
            if not is_drained(tuple(waited_for), committed, start_offsets, ends):
                blocked[topic_id, partition] = since_ns
        return blocked
