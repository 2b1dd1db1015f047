"""Log lines for topics whose delivery an operator has paused. They explain polls that return
nothing.

Owner: one Consumer, one thread.
"""

from __future__ import annotations

from collections.abc import Mapping

from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.membership import Partition


class PausedTopics:
    """The paused topics that were logged."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._reported: frozenset[str] = frozenset()

    def apply(self, paused: frozenset[str], keys: Mapping[Partition, TopicPartition]) -> None:
        """Log what has changed. `paused` are the ids of the topics that are paused now, and `keys`
        the partitions that this consumer reads.
        """
        if not paused and not self._reported:
            return
        names = {partition[0]: key.topic for partition, key in keys.items()}
        now = frozenset(topic_id for topic_id in paused if topic_id in names)
        if now == self._reported:
            return
        for topic_id in sorted(now - self._reported):
            logger.warning(
                "delivery of topic %s is paused (delivery.paused=true): the consumers of group %r "
                "get no records of it until it is resumed",
                names[topic_id],
                self._group,
            )
        for topic_id in sorted(self._reported - now):
            if topic_id in names:
                logger.warning(
                    "delivery of topic %s is resumed: the consumers of group %r go on where they "
                    "were",
                    names[topic_id],
                    self._group,
                )
        self._reported = now
