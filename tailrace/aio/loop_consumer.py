"""The plain consumer whose requests an event loop answers.

Owner: one event loop's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailrace.aio.driver import Answers, Question
from tailrace.connection import Connection
from tailrace.consumer import Consumer
from tailrace.fetcher import Fetcher, PartitionCursor
from tailrace.offset_lookup import list_offsets, offset_in
from tailrace.protocol.wire import Api
from tailrace.records import OffsetAndTimestamp, Record, TopicPartition
from tailrace.time_search import first_buffered

if TYPE_CHECKING:
    from tailrace.groups.group_reading import GroupReading
    from tailrace.groups.offsets import Offsets


class LoopConsumer(Consumer):
    """A Consumer whose requests an event loop answers."""

    answers = Answers()

    @property
    def connection(self) -> Connection:
        return self._connection

    def _call(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        return self.answers.take(Question(api, request, self.settings.request_timeout_ms, None))

    @property
    def group(self) -> GroupReading | None:
        return self._group

    def close_without_group(self) -> None:
        """Its group is left already."""
        self._group = None
        self.close()

    def now_ns(self) -> int:
        """The consumer's clock."""
        return self._now_ns()

    def look_again_ns(self, looked_ns: int) -> int | None:
        """When `poll`, which found nothing at `looked_ns`, has something to do though nothing comes: a step of the connection, a partition that is asked for
        again after a pause, or one that has lost its position.
        """
        tick_ns = self._connection.next_tick_ns()
        times = [] if tick_ns is None else [tick_ns]
        for cursor in self._reading.cursors.values():
            if cursor.position is None and cursor.error is None and not cursor.from_committed:
                return looked_ns
            if cursor.refusals and cursor.retry_at_ns > looked_ns:
                times.append(cursor.retry_at_ns)
        if self._group is not None:
            times.append(max(looked_ns, self._group.due_ns()))
        return min(times, default=None)

    def offsets_to_commit(self, offsets: Any, message: Record | None) -> tuple[GroupReading, Offsets]:
        """What `commit` was given. Raises InvalidRequestError."""
        group = self._group_of()
        return group, self._offsets_to_commit(group, offsets, message)

    def find_time(self, partition: TopicPartition, when_us: int) -> tuple[int, OffsetAndTimestamp | None]:
        """Where to look for the first record at or after a time (-1: there is none), and the record where the appliance knows it."""
        self._check_open()
        item = list_offsets(self._call, [(partition, when_us)])[partition]
        offset = offset_in(item)
        return offset, OffsetAndTimestamp(offset, item["timestamp_us"] // 1000) if offset >= 0 and item.get("exact") else None

    def search_from(self, partition: TopicPartition, offset: int) -> tuple[PartitionCursor, Fetcher]:
        """A reader of its own, beside what is assigned."""
        cursor = PartitionCursor(partition, self._info(partition.topic))
        cursor.seek(offset)
        return cursor, Fetcher(self._connection, self.settings, self._now_ns)

    def search_on(self, cursor: PartitionCursor, fetcher: Fetcher, when_us: int) -> OffsetAndTimestamp | None:
        """The first record at or after a time, if it has come; asks for more."""
        self._reading.step(fetcher, [cursor], self._now_ns())
        return first_buffered(cursor, when_us, self.settings)
