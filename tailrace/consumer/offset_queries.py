"""Offset queries of a consumer: beginnings, ends, and the first records after a time. None of them
moves a position.

Owner: one Consumer, one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, T, operation
from tailrace.client.topics.list_offsets import At, list_offsets, offset_in
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidRequestError
from tailrace.core.records import OffsetAndTimestamp, to_timestamp_us
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import by_partition, partition_list, partition_of
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.timestamp_search import first_records_at
from tailrace.protocol.frame import Api


class OffsetQueries:
    """The offset queries, with Kafka's names."""

    settings: ConsumerSettings
    _connection: Connection
    _fetch_loop: FetchLoop

    def _check_open(self) -> None:
        raise NotImplementedError

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    def _info(self, topic: str) -> Steps[TopicInfo]:
        raise NotImplementedError

    def _cursor(self, partition: TopicPartition) -> PartitionPosition:
        raise NotImplementedError

    def _position(self, cursor: PartitionPosition) -> Steps[int]:
        raise NotImplementedError

    def _offsets(self, keys: Iterable[TopicPartition], at: At) -> Steps[dict[TopicPartition, int]]:
        self._check_open()
        found = yield from list_offsets(
            self._call, [(key, at) for key in keys], self.settings.isolation_level
        )
        return {key: offset_in(item) for key, item in found.items()}

    @operation
    def beginning_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> Steps[dict[TopicPartition, int]]:
        """The first offset of each partition, assigned or not. Raises UnknownTopicError,
        PartitionOutOfRangeError.
        """
        return self._offsets(partition_list(partitions), "earliest")

    @operation
    def end_offsets(self, partitions: Iterable[TopicPartition]) -> Steps[dict[TopicPartition, int]]:
        """The end of each partition, assigned or not: the last stable offset with
        isolation_level="read_committed", else the high watermark. Raises as `beginning_offsets`.
        """
        return self._offsets(partition_list(partitions), "latest")

    @operation
    def highwater(self, partition: TopicPartition) -> Steps[int]:
        """The current end of a partition, as in `end_offsets`."""
        key = partition_of(partition)
        return (yield from self._offsets([key], "latest"))[key]

    @operation
    def lag(self, partition: TopicPartition) -> Steps[int]:
        """The number of offsets between the position and the end (see `end_offsets`)."""
        cursor = self._cursor(partition)
        ends = yield from self._offsets([cursor.key], "latest")
        return ends[cursor.key] - (yield from self._position(cursor))

    @operation
    def offsets_for_times(
        self, timestamps: Mapping[TopicPartition, Any]
    ) -> Steps[dict[TopicPartition, OffsetAndTimestamp | None]]:
        """The first record of each partition at or after a time (a datetime, UTC without a time
        zone, or int milliseconds); None: there is none. Raises InvalidRequestError,
        UnknownTopicError, PartitionOutOfRangeError.
        """
        self._check_open()
        given = by_partition("timestamps", timestamps, "{TopicPartition(topic, 0): datetime}")
        try:
            requested = {key: to_timestamp_us(when) for key, when in given.items()}
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(str(error)) from None
        return (yield from self._offsets_for_times_us(requested))

    def _offsets_for_times_us(
        self, requested: Mapping[TopicPartition, int]
    ) -> Steps[dict[TopicPartition, OffsetAndTimestamp | None]]:
        """`offsets_for_times` with times in microseconds."""
        return (
            yield from first_records_at(
                self._connection, self._fetch_loop, self.settings, self._call, self._info, requested
            )
        )
