"""Groups and hash slots: a partition that got slots from others is read when those are read to
where they ended.

Where keys have moved, the older records of a key lie in another partition than the newer ones. So a
member gets the partition that was added when the group's committed offsets have passed the
hand-over offset of each of its sources. A group that keeps its offsets elsewhere would wait for
ever: where it has committed nothing at all in a source, that source is waited for no longer than
PATIENCE_NS.

Owner: the service. `is_drained`, which decides, is pure.
Crash: nothing is kept: what is held follows from committed offsets and topics.
"""

from __future__ import annotations

from appliance.groups.base.messages import Partition, TopicImage, TopicView
from appliance.groups.base.offsets import OffsetBook
from appliance.groups.consumer.group import ConsumerGroup
from tailrace.core.hash_slots import is_drained

__all__ = ["PATIENCE_NS", "HandOvers", "is_drained"]

PATIENCE_NS = 60_000_000_000


class HandOvers:
    """Which partitions of a group are held back."""

    def __init__(self, topics: TopicImage, offsets: OffsetBook) -> None:
        self._topics = topics
        self._offsets = offsets

    def check(self, group: ConsumerGroup, now_ns: int) -> None:
        """Find out what is held back now; what is so no longer is free for its next owner."""
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
            if (found := self._topics.end_offset(topic_id, source)) is not None
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
