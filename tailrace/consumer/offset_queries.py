"""The questions that a consumer asks about offsets: beginnings, ends, and the first records after a time. None of them moves a position.

Owner: one Consumer, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tailrace.arguments import by_partition, partition_list, partition_of
from tailrace.connection import Connection
from tailrace.errors import InvalidRequestError
from tailrace.fetcher import Fetcher, PartitionCursor
from tailrace.offset_lookup import At, list_offsets, offset_in
from tailrace.protocol.wire import Api
from tailrace.reading import Reading
from tailrace.records import OffsetAndTimestamp, TopicPartition, to_timestamp_us
from tailrace.settings import ConsumerSettings
from tailrace.time_search import first_at_or_after
from tailrace.topics import TopicInfo


class OffsetQuestions:
    """A part of Consumer; see the module's docstring."""

    settings: ConsumerSettings
    _connection: Connection
    _reading: Reading
    _now_ns: Callable[[], int]

    def _check_open(self) -> None:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _info(self, topic: str) -> TopicInfo:
        raise NotImplementedError

    def _cursor(self, partition: TopicPartition) -> PartitionCursor:
        raise NotImplementedError

    def position(self, partition: TopicPartition) -> int:
        """The offset of the next record that will be handed out."""
        raise NotImplementedError

    def _offsets(self, keys: Iterable[TopicPartition], at: At) -> dict[TopicPartition, int]:
        self._check_open()
        return {key: offset_in(item) for key, item in list_offsets(self._call, [(key, at) for key in keys]).items()}

    def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset of each partition, assigned or not. Raises UnknownTopicError, PartitionOutOfRangeError."""
        return self._offsets(partition_list(partitions), "earliest")

    def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The high watermark of each partition, assigned or not: the offset behind the last record that can be read. Raises as `beginning_offsets`."""
        return self._offsets(partition_list(partitions), "latest")

    def highwater(self, partition: TopicPartition) -> int:
        """The high watermark of one partition, asked for now: the offset behind the last record that can be read."""
        key = partition_of(partition)
        return self.end_offsets([key])[key]

    def lag(self, partition: TopicPartition) -> int:
        """How many offsets lie between the position and the end."""
        key = self._cursor(partition).key
        return self.end_offsets([key])[key] - self.position(key)

    def offsets_for_times(self, timestamps: Mapping[TopicPartition, Any]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """For each partition the first record at or after a time (a datetime, UTC where it has no time zone, or int milliseconds), None where there is
        none. Raises InvalidRequestError, UnknownTopicError, PartitionOutOfRangeError.
        """
        self._check_open()
        given = by_partition("timestamps", timestamps, "{TopicPartition(topic, 0): datetime}")
        try:
            wanted = {key: to_timestamp_us(when) for key, when in given.items()}
        except (TypeError, ValueError) as error:
            raise InvalidRequestError(str(error)) from None
        return self._offsets_for_times_us(wanted)

    def _offsets_for_times_us(self, wanted: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """`offsets_for_times` of times in microseconds."""
        result: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        for key, item in list_offsets(self._call, wanted.items()).items():
            offset = offset_in(item)
            if offset < 0:
                result[key] = None
            elif item.get("exact"):
                result[key] = OffsetAndTimestamp(offset, item["timestamp_us"] // 1000)
            else:
                result[key] = self._first_at_or_after(key, offset, wanted[key])
        return result

    def _first_at_or_after(self, key: TopicPartition, start: int, when_us: int) -> OffsetAndTimestamp | None:
        cursor = PartitionCursor(key, self._info(key.topic))
        cursor.seek(start)
        fetcher = Fetcher(self._connection, self.settings, self._now_ns)
        deadline_ns = self._now_ns() + self.settings.request_timeout_ms * 1_000_000
        end = self.end_offsets([key])[key]
        return first_at_or_after(cursor, when_us, end, lambda wanted: self._reading.step(fetcher, [wanted], deadline_ns), self.settings)
