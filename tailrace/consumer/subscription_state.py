"""Subscription state of a consumer: its assigned partitions, their positions and pauses.

Owner: one Consumer, one thread or event loop.

Invariants:
- `FetchLoop.cursors` has one cursor per assigned partition. `assign` replaces the dict.
- The position of a partition is the offset of the next record to deliver: the first one in the
  record buffer, or else the cursor's position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps
from tailrace.client.topics.list_offsets import At
from tailrace.client.topics.metadata_cache import MetadataCache
from tailrace.core.errors import InvalidRequestError, UnknownTopicError, UnknownTopicIdError
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import partition_of, partitions_named
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.record_buffer import RecordBuffer

if TYPE_CHECKING:
    from tailrace.group.group_coordinator import ConsumerCoordinator


class SubscriptionState:
    """The assigned partitions of one consumer."""

    def __init__(
        self,
        connection: Connection,
        fetch_loop: FetchLoop,
        buffer: RecordBuffer,
        group: ConsumerCoordinator | None,
        infos: MetadataCache,
        offsets: Callable[[Iterable[TopicPartition], At], Steps[dict[TopicPartition, int]]],
    ) -> None:
        """`offsets` looks up an offset of each partition."""
        self._connection = connection
        self._fetch_loop = fetch_loop
        self._buffer = buffer
        self._group = group
        self._infos = infos
        self._offsets = offsets

    # ---- assignment ------------------------------------------------------------------------------

    def assign(self, requested: list[TopicPartition]) -> Steps[None]:
        """See `Consumer.assign`."""
        self._check_not_subscribed()
        # The name of a record knows its topic. Here a name means the topic that has it now.
        requested = [TopicPartition(str(key.topic), key.partition) for key in requested]
        infos = {}
        if self._group is not None and requested:
            requested = list(
                dict.fromkeys(requested + (yield from self._group.retries_of(requested)))
            )
        for topic in dict.fromkeys(key.topic for key in requested):
            yield from self._refresh(topic)
        for key in requested:
            infos[key] = yield from self._infos.with_partition(key)
        self._check_not_subscribed()
        given_up = [key for key in self._fetch_loop.cursors if key not in infos]
        if self._group is not None and given_up:
            yield from self._group.position_tracker.commit_before_revoking(given_up)
        cursors: dict[TopicPartition, PartitionPosition] = {}
        for key, info in infos.items():
            cursor = self._fetch_loop.cursors.get(key)
            if cursor is None or cursor.info.topic_id != info.topic_id:
                cursor = PartitionPosition(key, info)
                if self._group is not None:
                    self._group.read_as_retries(cursor)
            cursors[key] = cursor
        if self._group is not None:
            self._group.read_from_committed(
                [
                    cursor
                    for key, cursor in cursors.items()
                    if self._fetch_loop.cursors.get(key) is not cursor
                ]
            )
        self._fetch_loop.cursors = cursors
        self._buffer.keep_assigned(cursors)

    def _refresh(self, topic: str) -> Steps[None]:
        """Look a topic up again: another one may have its name. A deleted topic that is read stays
        known. Raises UnknownTopicError for any other.
        """
        try:
            yield from self._infos.refresh(topic)
        except UnknownTopicError:
            if not any(key.topic == topic for key in self._fetch_loop.cursors):
                raise

    def _check_not_subscribed(self) -> None:
        if self._group is not None and self._group.is_subscribed:
            raise InvalidRequestError(
                "assign() does not go with subscribe(): the group assigns the partitions. Write "
                "unsubscribe() before assign()"
            )

    def cursor(self, partition: TopicPartition) -> PartitionPosition:
        """The cursor of an assigned partition. Raises InvalidRequestError."""
        self._connection.check_usable()
        key = partition_of(partition)
        cursor = self._fetch_loop.cursors.get(key)
        if cursor is None:
            raise InvalidRequestError(
                f"{key.topic}-{key.partition} is not assigned to this "
                f"consumer{self._advice_before_assignment()}"
            )
        return cursor

    def _advice_before_assignment(self) -> str:
        """Advice for a group member without partitions; else empty."""
        if self._group is None or not self._group.is_subscribed or self._fetch_loop.cursors:
            return ""
        return (
            ": its group assigns partitions while poll() runs. Poll until assignment() has "
            "them, or do this in on_partitions_assigned of a listener"
        )

    def _cursors(self, partitions: tuple[Any, ...]) -> list[PartitionPosition]:
        self._connection.check_usable()
        return [self.cursor(partition) for partition in partitions_named(partitions)]

    def pause(self, partitions: tuple[Any, ...]) -> None:
        """See `Consumer.pause`."""
        cursors = self._cursors(partitions)
        for cursor in cursors:
            cursor.pause(by_user=True)
        self._buffer.withdraw(
            self._fetch_loop.cursors, [cursor.key for cursor in cursors], rows_too=False
        )

    def resume(self, partitions: tuple[Any, ...]) -> None:
        """See `Consumer.resume`."""
        for cursor in self._cursors(partitions):
            cursor.pause(by_user=False)

    # ---- positions -------------------------------------------------------------------------------

    def cursor_to_seek(self, partition: TopicPartition) -> PartitionPosition:
        """`cursor`, for an offset of the topic that the partition's name knows. Raises
        UnknownTopicIdError if it is that of a record whose topic was deleted.
        """
        cursor = self.cursor(partition)
        topic_id = getattr(partition[0], "topic_id", b"")
        if topic_id not in (b"", cursor.info.topic_id):
            raise UnknownTopicIdError(
                f"the offset is of a deleted topic {cursor.key.topic!r}, and another topic has its "
                "name now"
            )
        return cursor

    def seek(self, cursor: PartitionPosition, offset: int) -> None:
        """Move the position to `offset`, and discard the partition's buffers."""
        if self._group is not None:
            self._group.position_tracker.on_seek(cursor.key)
        self._buffer.move(cursor, offset)
        self._fetch_loop.on_seek()

    def seek_all(self, partitions: tuple[Any, ...], at: str) -> Steps[None]:
        """Move to the "earliest" or "latest" offset of these partitions; none named: of all."""
        if partitions:
            keys = [cursor.key for cursor in self._cursors(partitions)]
        else:
            self._connection.check_usable()
            keys = list(self._fetch_loop.cursors)
        if not keys and (advice := self._advice_before_assignment()):
            raise InvalidRequestError(f"nothing is assigned to this consumer{advice}")
        offsets = yield from self._offsets(keys, at)
        for key, offset in offsets.items():
            self.seek(self.cursor(key), offset)

    def position(self, cursor: PartitionPosition) -> Steps[int]:
        """The offset of the next record to deliver. Raises the cursor's error if it has none."""
        if self._group is not None:
            yield from self._group.decide(cursor)
        yield from self._fetch_loop.decide_positions([cursor])
        first = self._buffer.first_offset(cursor.key)
        if first is not None:
            return first
        if cursor.position is None:
            raise cursor.error or UnknownTopicError(
                f"topic {cursor.key.topic!r} is not there, and partition {cursor.key.partition} "
                "has no position"
            )
        return cursor.position  # also before damage: the next poll raises that

    def positions(self) -> dict[TopicPartition, int]:
        """The known positions of all assigned partitions. The topics of the keys have their ids."""
        first = self._buffer.first_offsets()
        found = {
            cursor.key: first.get(key, cursor.position)
            for key, cursor in self._fetch_loop.cursors.items()
        }
        return {key: offset for key, offset in found.items() if offset is not None}
