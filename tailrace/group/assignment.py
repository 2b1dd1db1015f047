"""Assigned partitions of a group's consumer: their names, and the cursors that read them.

The group identifies partitions by topic id, the program and the cursors by topic name. This module
translates. `tailrace.group.reconciliation` decides which partitions are taken or dropped, and when
listeners are called.

Owner: one Consumer, one thread.

Invariants:
- Each partition here has a cursor, until `assign` or a seek of the program replaces it.
- A recreated topic has another id, so its partitions are different ones.

Crash: nothing is stored. The next consumer begins at the committed offsets.
"""

from __future__ import annotations

from collections.abc import Callable

from tailrace.client.connections.steps import Call, Steps
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import UnknownTopicError
from tailrace.core.topic_names import with_retry_topics
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.record_buffer import RecordBuffer
from tailrace.group.membership import Change, Membership, Partition
from tailrace.group.offsets.committed_offsets import PositionLookup
from tailrace.group.offsets.positions import PositionTracker
from tailrace.group.paused_topics import PausedTopics
from tailrace.group.retry_partitions import read_as_retries
from tailrace.group.subscription import Subscription, named_topics


class AssignedPartitions:
    """The assigned partitions of one consumer."""

    def __init__(
        self,
        group_id: str,
        membership: Membership,
        fetch_loop: FetchLoop,
        buffer: RecordBuffer,
        position_tracker: PositionTracker,
        lookup: PositionLookup,
        call: Call,
        info: Callable[[str, str, int], Steps[TopicInfo]],
    ) -> None:
        """`info`: see ConsumerCoordinator."""
        self._group_id = group_id
        self._membership = membership
        self._fetch_loop = fetch_loop
        self._buffer = buffer
        self._position_tracker = position_tracker
        self._lookup = lookup
        self._call = call
        self._info = info
        self._keys: dict[Partition, TopicPartition] = {}
        self._paused = PausedTopics(group_id)

    def all(self) -> frozenset[Partition]:
        """All assigned partitions, by topic id."""
        return frozenset(self._keys)

    def keys_of(self, change: Change) -> list[TopicPartition]:
        """The partitions of a step that are read now."""
        return sorted(
            self._keys[partition] for partition in change.partitions if partition in self._keys
        )

    def infos_of(
        self, change: Change, subscription: Subscription | None
    ) -> Steps[dict[str, TopicInfo]]:
        """Look up the topics of a step, by id. Raises UnknownTopicError."""
        counts: dict[str, int] = {}
        for topic_id, partition in change.partitions:
            counts[topic_id] = max(counts.get(topic_id, 0), partition + 1)
        names = self._membership.topic_names
        if not counts.keys() <= names.keys():
            requested = (
                with_retry_topics(subscription.topics, self._group_id)
                if subscription is not None
                else []
            )
            names.update(
                (yield from named_topics(self._call, requested, counts.keys() - names.keys()))
            )
        if not counts.keys() <= names.keys():
            raise UnknownTopicError(
                "the group assigns partitions of topics that were deleted, or that this consumer "
                "does not know yet: poll again"
            )
        infos = {}
        for topic_id, count in counts.items():
            infos[topic_id] = yield from self._info(names[topic_id], topic_id, count)
        return infos

    def take(self, change: Change, infos: dict[str, TopicInfo]) -> list[TopicPartition]:
        """Begin to read the partitions of a step."""
        cursors = {}
        for topic_id, partition in sorted(change.partitions):
            info = infos[topic_id]
            key = TopicPartition(info.name, partition)
            cursors[key] = cursor = PartitionPosition(key, info)
            read_as_retries(cursor, self._group_id)
            cursor.pause(delivery=topic_id in self._membership.paused_topics)
            self._keys[topic_id, partition] = key
        self._lookup.add(cursors.values())
        self._fetch_loop.cursors = {**self._fetch_loop.cursors, **cursors}
        return sorted(cursors)

    def drop(self, change: Change, keys: list[TopicPartition]) -> None:
        """Stop reading these partitions, and discard their buffers."""
        cursors = {
            key: cursor for key, cursor in self._fetch_loop.cursors.items() if key not in set(keys)
        }
        self._fetch_loop.cursors = cursors
        self._buffer.keep_assigned(cursors)
        self._position_tracker.forget(keys)
        for partition in change.partitions:
            self._keys.pop(partition, None)

    def apply_pauses(self) -> None:
        """Pause or resume the partitions of topics whose delivery an operator has paused or
        resumed, and log it.
        """
        paused = self._membership.paused_topics
        for partition, key in self._keys.items():
            cursor = self._fetch_loop.cursors.get(key)
            if cursor is not None:
                cursor.pause(delivery=partition[0] in paused)
        self._paused.apply(paused, self._keys)
