"""The topics of a consumer, looked up once and again when they may have changed.

Owner: one Consumer, one thread.
Invariants: an entry is replaced only by a response.
"""

from __future__ import annotations

from tailrace.client.connections.steps import Call, Steps
from tailrace.client.topics.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.errors import PartitionOutOfRangeError, UnknownTopicError
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api


class MetadataCache:
    """TopicInfos by name."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._known: dict[str, TopicInfo] = {}

    def of(self, topic: str) -> Steps[TopicInfo]:
        """The topic as last looked up. Raises UnknownTopicError."""
        info = self._known.get(topic)
        return (yield from self.refresh(topic)) if info is None else info

    def refresh(self, topic: str) -> Steps[TopicInfo]:
        """The topic, looked up now. Raises UnknownTopicError."""
        answer = yield from self._call(Api.METADATA, {"topics": [topic]})
        info = self._known[topic] = topics_from_metadata(answer, topic)[topic]
        return info

    def with_partition(self, key: TopicPartition) -> Steps[TopicInfo]:
        """The topic of a partition, looked up again if the partition may be new. Raises
        UnknownTopicError, PartitionOutOfRangeError.
        """
        info = yield from self.of(key.topic)
        if key.partition >= len(info.partitions):
            info = yield from self.refresh(key.topic)
        if not 0 <= key.partition < len(info.partitions):
            raise PartitionOutOfRangeError(
                f"topic {key.topic!r} has partitions 0 to {len(info.partitions) - 1}, not "
                f"{key.partition}"
            )
        return info

    def as_assigned(self, topic: str, topic_id: str, partition_count: int) -> Steps[TopicInfo]:
        """The topic of a group's assignment. Raises UnknownTopicError if the front knows another
        topic of that name, or fewer partitions.
        """
        for ask in (self.of, self.refresh):
            info = yield from ask(topic)
            if info.topic_id.hex() == topic_id and len(info.partitions) >= partition_count:
                return info
        raise UnknownTopicError(
            f"topic {topic!r} was recreated, or has fewer partitions than the group's assignment"
        )
