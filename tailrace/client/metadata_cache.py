"""What a consumer knows of topics: asked for once, and anew where a topic may have changed since.

Owner: one Consumer, one thread.
Invariants: what is known is replaced only by an answer: an operation that is begun again (in an event loop) asks the same questions.
"""

from __future__ import annotations

from tailrace.errors import PartitionOutOfRangeError, UnknownTopicError
from tailrace.offset_lookup import Call
from tailrace.protocol.wire import Api
from tailrace.records import TopicPartition
from tailrace.topics import TopicInfo, topics_from_metadata


class TopicInfos:
    """See the module's docstring."""

    def __init__(self, call: Call) -> None:
        """`call`: a request and its answer."""
        self._call = call
        self._known: dict[str, TopicInfo] = {}

    def of(self, topic: str) -> TopicInfo:
        """As it was when it was first asked for. Raises UnknownTopicError."""
        info = self._known.get(topic)
        return self.asked_anew(topic) if info is None else info

    def asked_anew(self, topic: str) -> TopicInfo:
        """As it is now. Raises UnknownTopicError."""
        info = self._known[topic] = topics_from_metadata(self._call(Api.METADATA, {"topics": [topic]}), topic)[topic]
        return info

    def with_partition(self, key: TopicPartition) -> TopicInfo:
        """Of a topic that has this partition, perhaps since a moment ago. Raises UnknownTopicError, PartitionOutOfRangeError."""
        info = self.of(key.topic)
        if key.partition >= len(info.partitions):
            info = self.asked_anew(key.topic)
        if not 0 <= key.partition < len(info.partitions):
            raise PartitionOutOfRangeError(f"topic {key.topic!r} has partitions 0 to {len(info.partitions) - 1}, not {key.partition}")
        return info

    def as_assigned(self, topic: str, topic_id: str, partition_count: int) -> TopicInfo:
        """What a group's assignment speaks of. Raises UnknownTopicError when the appliance's front does not know it like that."""
        for ask in (self.of, self.asked_anew):
            info = ask(topic)
            if info.topic_id.hex() == topic_id and len(info.partitions) >= partition_count:
                return info
        raise UnknownTopicError(f"topic {topic!r} is another one now, or has fewer partitions than the group says")
