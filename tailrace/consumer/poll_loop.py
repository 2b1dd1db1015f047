"""The poll loop of a consumer: fills its record buffer from fetched batches, and waits for more.

Operations that wait are written as steps (`tailrace.client.connections.steps`). `Consumer` runs
them in its thread, `AsyncConsumer` in an event loop.

Owner: one Consumer, one thread or event loop.

Invariants:
- It moves records into the buffer only. Delivery is the caller's (`tailrace.fetch.record_buffer`).
- An error is raised when no record before it is left to deliver.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, Wait
from tailrace.core.errors import TailraceError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetch_loop import FetchLoop
from tailrace.fetch.record_buffer import RecordBuffer

if TYPE_CHECKING:
    from tailrace.client.tracing.read_spans import LoopSpan
    from tailrace.group.group_coordinator import ConsumerCoordinator


_LAST = itemgetter(-1)


class PollLoop:
    """The poll loop of one consumer."""

    def __init__(
        self,
        connection: Connection,
        settings: ConsumerSettings,
        fetch_loop: FetchLoop,
        buffer: RecordBuffer,
        group: ConsumerCoordinator | None,
        now_ns: Callable[[], int],
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._fetch_loop = fetch_loop
        self._buffer = buffer
        self._group = group
        self._now_ns = now_ns
        self.active_count = 0
        """The number of callers in a poll. An interrupted one may still be counted."""

    def begin(self) -> None:
        """A caller asks for records: those delivered before are processed."""
        if self._group is not None:
            self._group.begin_poll()
        self.active_count += 1

    def end(self) -> None:
        """The caller's poll has ended."""
        self.active_count = max(0, self.active_count - 1)
        if self._group is not None:
            self._group.end_poll()

    def loop_part(self, loop_span: LoopSpan | None) -> Iterator[Record]:
        """The buffered records: each step delivers one, without bytecode after it. In a group it
        ends when the loop has to poll, even if records are left. `loop_span`: of the loop's body.
        """
        records = self._buffer.iterator
        if self._group is None and loop_span is None:
            return records
        before: list[Iterator[Any]] = []
        if self._group is not None:
            before.append(self._group.until_loop_poll())
        if loop_span is not None:
            before.append(loop_span.before_each(self.next_record))
        return map(_LAST, zip(*before, records, strict=False))

    def next_record(self) -> Record | None:
        """The record that is delivered next, which stays buffered."""
        return next(iter(self._buffer.first(1)), None)

    @property
    def loop_limit(self) -> int:
        """The number of records that a loop's poll buffers."""
        return 1 if len(self._buffer) else self._settings.max_poll_records

    def fill(self, limit: int) -> int:
        """Buffer up to `limit` records from fetched batches. Returns the number of buffered
        records. Raises InvalidRecordError when a deserializer fails on the first.
        """
        buffer, fetch_loop = self._buffer, self._fetch_loop
        count = buffer.gather(limit, fetch_loop.cursors)
        while count < limit:
            cursor = fetch_loop.next_cursor()
            if cursor is None:
                break
            buffer.take_batch(cursor, self._settings)
            before, count = count, buffer.gather(limit, fetch_loop.cursors)
            if count == before:
                break
        return count

    def gather(self, requested: int, limit: int, deadline_ns: int | None) -> Steps[None]:
        """Buffer at least `requested` and up to `limit` records, or those that come in time. Raises
        what `Consumer.poll` does; records before an error are delivered first.
        """
        group, count = self._group, 0
        self._buffer.has_failure = False
        while True:
            if group is not None:
                yield from group.step()
            try:
                count = self.fill(limit)
                if count >= requested or (count and self._buffer.has_failure):
                    return
                for cursor in () if count else list(self._fetch_loop.cursors.values()):
                    if cursor.error is not None and not cursor.buffered and not cursor.is_paused:
                        yield from self._fetch_loop.raise_or_reset(cursor)
                fetch = self._fetch_loop.poll if group is None else group.poll
                if not (
                    yield from fetch(
                        deadline_ns, partial(self._has_more_than, count, self._buffer.batch_count)
                    )
                ):
                    return
            except TailraceError as error:
                if not count or (group is not None and error is group.raised):
                    raise
                return

    def _has_more_than(self, record_count: int, batch_count: int) -> bool:
        """True if another task has buffered something meanwhile."""
        return self._buffer.batch_count != batch_count or len(self._buffer) > record_count

    def gather_partitions(
        self, requested: Collection[TopicPartition], limit: int, deadline_ns: int | None
    ) -> Steps[None]:
        """`gather` of these partitions only, for at least one record."""
        fetch_loop = self._fetch_loop
        while True:
            if self._group is not None:
                yield from self._group.step()
            others = [
                cursor
                for key, cursor in fetch_loop.cursors.items()
                if key not in requested and not cursor.is_paused_by_user
            ]
            try:
                for cursor in others:
                    cursor.pause(by_user=True)
                count = self.fill(limit)
            finally:
                for cursor in others:
                    cursor.pause(by_user=False)
            now_ns = self._now_ns()
            if count or (deadline_ns is not None and now_ns >= deadline_ns):
                return
            yield from (fetch_loop if self._group is None else self._group).poll(now_ns, _never)
            yield Wait(
                fetch_loop.retry_ns(fetch_loop.fetcher, fetch_loop.cursors.values(), deadline_ns)
            )
            self._connection.process()

    def gather_batches(self, deadline_ns: int | None) -> Steps[None]:
        """Buffer Arrow batches. Rows of a batch that `poll` has decoded are fetched again as a
        batch.
        """
        group, fetch_loop, buffer = self._group, self._fetch_loop, self._buffer
        if group is not None:
            yield from group.step()
        if not buffer.has_batches:
            buffer.withdraw(fetch_loop.cursors)
            fetch_loop.on_seek()
        while True:
            if not buffer.has_batches and not (
                yield from (fetch_loop if group is None else group).poll(
                    deadline_ns, partial(getattr, buffer, "has_batches")
                )
            ):
                return
            has_passed_over = False
            while (cursor := fetch_loop.next_cursor()) is not None:
                buffer.take_arrow(cursor, self._settings)
                has_passed_over = True
                if cursor.error is not None and not buffer.has_batches:
                    yield from fetch_loop.raise_or_reset(cursor)
            if buffer.has_batches or not has_passed_over:
                break
        fetch_loop.ask_ahead()


def _never() -> bool:
    return False
