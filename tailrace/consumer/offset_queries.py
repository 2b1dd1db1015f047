"""Offset queries of a consumer: beginnings, ends, and the first records after a time. None of them
moves a position.

Owner: one Consumer, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tailrace.client.connection import Connection
from tailrace.client.list_offsets import At, list_offsets, offset_in
from tailrace.client.settings import ConsumerSettings
from tailrace.client.steps import Steps, T, operation
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidRequestError, RequestTimeoutError
from tailrace.core.records import OffsetAndTimestamp, to_timestamp_us
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import by_partition, partition_list, partition_of
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.fetcher import Fetcher, PartitionPosition
from tailrace.fetch.timestamp_search import offset_for_time
from tailrace.protocol.frame import Api


class OffsetQueries:
    """The offset queries, with Kafka's names."""

    settings: ConsumerSettings
    _connection: Connection
    _fetch_loop: FetchLoop
    _now_ns: Callable[[], int]

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
        found = yield from list_offsets(self._call, [(key, at) for key in keys])
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
        """The high watermark of each partition, assigned or not: the offset behind the last
        readable record. Raises as `beginning_offsets`.
        """
        return self._offsets(partition_list(partitions), "latest")

    @operation
    def highwater(self, partition: TopicPartition) -> Steps[int]:
        """The current high watermark of a partition: the offset behind the last readable record."""
        key = partition_of(partition)
        return (yield from self._offsets([key], "latest"))[key]

    @operation
    def lag(self, partition: TopicPartition) -> Steps[int]:
        """The number of offsets between the position and the high watermark."""
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
        result: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        found = yield from list_offsets(self._call, requested.items())
        for key, item in found.items():
            offset = offset_in(item)
            if offset < 0:
                result[key] = None
            elif item.get("exact"):
                result[key] = OffsetAndTimestamp(offset, item["timestamp_us"] // 1000)
            else:
                result[key] = yield from self._offset_for_time(key, offset, requested[key])
        return result

    def _offset_for_time(
        self, key: TopicPartition, start: int, when_us: int
    ) -> Steps[OffsetAndTimestamp | None]:
        cursor = PartitionPosition(key, (yield from self._info(key.topic)))
        cursor.seek(start)
        fetcher = Fetcher(self._connection, self.settings, self._now_ns)
        timeout_ms = self.settings.request_timeout_ms
        deadline_ns = self._now_ns() + timeout_ms * 1_000_000
        end = (yield from self._offsets([key], "latest"))[key]

        def fetch(requested: PartitionPosition) -> Steps[None]:
            if self._now_ns() >= deadline_ns:
                raise RequestTimeoutError(
                    f"the search for a time in {key.topic}-{key.partition} did not end within "
                    f"{timeout_ms} ms (request_timeout_ms)"
                )
            return self._fetch_loop.step(fetcher, [requested], deadline_ns)

        return (yield from offset_for_time(cursor, when_us, end, fetch, self.settings))
