"""What a consumer knows of topics: asked for once, and anew where a topic may have changed since.

Owner: one Consumer, one thread.
Invariants: what is known is replaced only by an answer.
"""

from __future__ import annotations

from tailrace.client.steps import Call, Steps
from tailrace.client.topic_metadata import TopicInfo, topics_from_metadata
from tailrace.core.errors import PartitionOutOfRangeError, UnknownTopicError
from tailrace.core.topic_partition import TopicPartition
from tailrace.protocol.frame import Api


class MetadataCache:
    """See the module's docstring."""

    def __init__(self, call: Call) -> None:
        """`call`: a request and its answer."""
        self._call = call
        self._known: dict[str, TopicInfo] = {}

    def of(self, topic: str) -> Steps[TopicInfo]:
        """As it was when it was first asked for. Raises UnknownTopicError."""
        info = self._known.get(topic)
        return (yield from self.refresh(topic)) if info is None else info

    def refresh(self, topic: str) -> Steps[TopicInfo]:
        """As it is now. Raises UnknownTopicError."""
        answer = yield from self._call(Api.METADATA, {"topics": [topic]})
        info = self._known[topic] = topics_from_metadata(answer, topic)[topic]
        return info

    def with_partition(self, key: TopicPartition) -> Steps[TopicInfo]:
        """Of a topic that has this partition, perhaps since a moment ago. Raises UnknownTopicError,
        PartitionOutOfRangeError.
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
        """What a group's assignment speaks of. Raises UnknownTopicError when the appliance's front
        does not know it like that.
        """
        for ask in (self.of, self.refresh):
            info = yield from ask(topic)
            if info.topic_id.hex() == topic_id and len(info.partitions) >= partition_count:
                return info
        raise UnknownTopicError(
            f"topic {topic!r} is another one now, or has fewer partitions than the group says"
        )
