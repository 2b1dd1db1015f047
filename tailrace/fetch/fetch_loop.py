"""Fetch loop: fetches the assigned partitions, decides where each begins, and waits for records.

Operations that wait are steps (`tailrace.client.connections.steps`). The cursors are consistent at
each wait, because a step may never be resumed.

Owner: one Consumer, one thread.

Invariants:
- Partitions take turns, batch by batch.
- A partition's error is raised when no record before it is left to deliver.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, Wait, call_json
from tailrace.client.topics.list_offsets import At
from tailrace.client.topics.topic_metadata import topics_from_metadata
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    UnknownTopicError,
    UnknownTopicIdError,
    UnsupportedBatchError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetcher import Fetcher
from tailrace.fetch.hash_slot_barrier import HashSlotBarrier
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.read_errors import corrupt_error
from tailrace.protocol.frame import Api

REFUSED_RETRY_NS = 10_000_000
"""The pause before a request that could not be sent is tried again."""
LEARN_RETRY_NS = 20_000_000
"""The pause before a schema that a front does not have yet is looked up again."""
ASK_AHEAD_INTERVAL_NS = 1_000_000
"""Without it, a program that reads one record a call would spend most of its time on the socket."""


class FetchLoop:
    """The fetch loop of one consumer."""

    def __init__(
        self,
        connection: Connection,
        settings: ConsumerSettings,
        now_ns: Callable[[], int],
        offsets: Callable[[Iterable[TopicPartition], At], Steps[dict[TopicPartition, int]]],
        unread: Callable[[TopicPartition], int | None],
    ) -> None:
        """`offsets` looks up an offset of each partition. `unread` is the first offset of a
        partition in the record buffer.
        """
        self._connection = connection
        self._settings = settings
        self._now_ns = now_ns
        self._offsets = offsets
        self.fetcher = Fetcher(connection, settings, now_ns)
        self._cursors: dict[TopicPartition, PartitionPosition] = {}
        self._barrier = HashSlotBarrier(offsets, unread, now_ns)
        self.allows_missing_topics = False
        """True if a missing topic is no error: the group assigns other partitions then."""
        self.wake_fd = -1
        """Readable when a caller that waits for records is to check its other conditions; -1:
        never.
        """
        self._rotation = 0
        self._asked_at = 0
        self._ask_ahead_at_ns = 0

    @property
    def cursors(self) -> dict[TopicPartition, PartitionPosition]:
        """The cursor of each assigned partition. An assignment replaces the dict."""
        return self._cursors

    @cursors.setter
    def cursors(self, cursors: dict[TopicPartition, PartitionPosition]) -> None:
        self._cursors = cursors
        self._barrier.arm(cursors)

    def on_seek(self) -> None:
        """A cursor was moved by the program: set the hash slot barrier again."""
        self._barrier.on_seek()

    def ask_ahead(self, progress: int = -1) -> None:
        """Process responses and send the next fetches. Their responses come while the program
        processes records.

        `progress` is the number of batches taken. While it stays the same, the connection is used
        once in ASK_AHEAD_INTERVAL_NS.
        """
        now_ns = self._now_ns()
        if progress >= 0 and progress == self._asked_at and now_ns < self._ask_ahead_at_ns:
            return
        self._asked_at = progress
        self._ask_ahead_at_ns = now_ns + ASK_AHEAD_INTERVAL_NS
        self._connection.process()
        self.fetcher.begin(self._cursors.values())

    def decide_positions(self, cursors: Iterable[PartitionPosition]) -> Steps[None]:
        """Look up a position for each cursor without one, as auto_offset_reset says."""
        undecided = {
            cursor.key: cursor
            for cursor in cursors
            if cursor.position is None and cursor.error is None and not cursor.from_committed
        }
        if not undecided:
            return
        from_beginning = [key for key, cursor in undecided.items() if cursor.begins_at_earliest]
        if from_beginning:
            found = yield from self._offsets(from_beginning, "earliest")
            _place({key: undecided.pop(key) for key in from_beginning}, found)
        if not undecided:
            return
        reset = self._settings.auto_offset_reset
        if reset == "none":
            for cursor in undecided.values():
                cursor.error = OffsetOutOfRangeError(
                    f"{cursor.key.topic}-{cursor.key.partition} has no position and "
                    "auto_offset_reset is none; seek first"
                )
            return
        try:
            found = yield from self._offsets(undecided, reset)
        except UnknownTopicError:
            if not self.allows_missing_topics:
                raise
            return
        _place(undecided, found)

    def ask(self, fetcher: Fetcher, cursors: Iterable[PartitionPosition]) -> None:
        """Process responses and send the next fetches. Raises the error that makes the connection
        unusable.
        """
        connection = self._connection
        connection.check_usable()
        connection.process()
        fetcher.begin(cursors)
        connection.process()
        now_ns = self._now_ns()
        connection.tick(now_ns)
        connection.check_reachable(now_ns)

    def retry_ns(
        self, fetcher: Fetcher, cursors: Iterable[PartitionPosition], deadline_ns: int | None
    ) -> int | None:
        """The longest wait after `ask` without input; None: no limit."""
        tick_ns = self._connection.next_tick_ns()
        times = [at_ns for at_ns in (deadline_ns, tick_ns) if at_ns is not None]
        times += [cursor.learn_at_ns for cursor in cursors if cursor.unknown_schema >= 0]
        if not fetcher.is_waiting and self._connection.is_ready:
            now_ns = self._now_ns()
            requested = [
                cursor
                for cursor in cursors
                if not cursor.is_paused and not cursor.from_committed and cursor.error is None
            ]
            times += [
                max(cursor.retry_at_ns if cursor.refusals else 0, now_ns + REFUSED_RETRY_NS)
                for cursor in requested
            ]
        return min(times, default=None)

    def step(
        self, fetcher: Fetcher, cursors: Iterable[PartitionPosition], deadline_ns: int
    ) -> Steps[None]:
        """Fetch, then wait for something until `deadline_ns` unless a response has come. Look up
        unknown schemas.
        """
        cursors = list(cursors)
        yield from self._learn_schemas(cursors)
        self.ask(fetcher, cursors)
        if not any(
            cursor.has_batch or cursor.error is not None
            for cursor in cursors
            if not cursor.is_paused
        ):
            yield Wait(self.retry_ns(fetcher, cursors, deadline_ns))
            self._connection.process()

    def poll(
        self, deadline_ns: int | None, is_filled: Callable[[], bool] | None = None
    ) -> Steps[bool]:
        """Wait until a record can be delivered, or until `deadline_ns`. `is_filled` is True if
        another task has buffered records meanwhile. Raises the error of a partition that has
        nothing left before it.
        """
        if not self.cursors:
            raise InvalidRequestError(
                "nothing is assigned: name topics at construction, or call assign()"
            )
        return (yield from self.wait(deadline_ns, is_filled)) or (
            is_filled is not None and is_filled()
        )

    def wait(
        self,
        deadline_ns: int | None,
        is_interrupted: Callable[[], bool] | None,
        *,
        once: bool = False,
    ) -> Steps[bool]:
        """`poll`, also without any partition. It ends when `is_interrupted` is True, and with
        `once` after one wait.
        """
        while True:
            cursors = list(self.cursors.values())
            yield from self.decide_positions(cursors)
            yield from self._barrier.step()
            yield from self._learn_schemas(cursors)
            self.ask(self.fetcher, cursors)
            active = [cursor for cursor in cursors if not cursor.is_paused]
            if any(cursor.has_batch for cursor in active):
                return True
            is_reset = False
            for cursor in active:
                if cursor.error is not None:
                    yield from self.raise_or_reset(cursor)
                    is_reset = is_reset or cursor.position is None
            if is_reset:
                continue
            if deadline_ns is not None and self._now_ns() >= deadline_ns:
                return False
            if is_interrupted is not None and is_interrupted():
                return False
            yield Wait(self.retry_ns(self.fetcher, cursors, deadline_ns))
            self._connection.process()
            if is_interrupted is not None and is_interrupted():
                return False
            if once:
                return any(
                    cursor.has_batch for cursor in self.cursors.values() if not cursor.is_paused
                )

    def _learn_schemas(self, cursors: Iterable[PartitionPosition]) -> Steps[None]:
        """Look up the schemas that these cursors' next batches have. Raises UnsupportedBatchError
        for one that the appliance does not describe for `request_timeout_ms`.
        """
        for cursor in cursors:
            if cursor.unknown_schema >= 0 and self._now_ns() >= cursor.learn_at_ns:
                yield from learn_schema(
                    cursor, self._connection, self._settings, (*self._cursors.values(), cursor)
                )

    def raise_or_reset(self, cursor: PartitionPosition) -> Steps[None]:
        """Raise the cursor's error once. An offset out of range resets the position instead, if
        auto_offset_reset allows it. The end of damage is looked up if it is unknown.
        """
        error = cursor.error
        assert error is not None
        if isinstance(error, OffsetOutOfRangeError) and self._settings.auto_offset_reset != "none":
            cursor.seek(None)
            return
        if (
            isinstance(error, CorruptBatchError)
            and error.next_offset is None
            and error.first_offset is not None
        ):
            found = yield from self._offsets([cursor.key], {"behind": error.first_offset})
            error = corrupt_error(cursor.key, error.first_offset, found[cursor.key], error.detail)
        cursor.error = None
        if isinstance(error, UnknownTopicError) and self.allows_missing_topics:
            return
        raise error from None

    def next_cursor(self) -> PartitionPosition | None:
        """The cursor with the next batch: partitions take turns. None: nothing is buffered."""
        cursors = [
            cursor for cursor in self.cursors.values() if cursor.has_batch and not cursor.is_paused
        ]
        if not cursors:
            return None
        self._rotation += 1
        return cursors[self._rotation % len(cursors)]


def learn_schema(
    cursor: PartitionPosition,
    connection: Connection,
    settings: ConsumerSettings,
    others: Iterable[PartitionPosition],
) -> Steps[None]:
    """Look up the version of the schema that the cursor's next batch has, for it and for other
    cursors of its topic. A front may not have it yet: then it is looked up again after a pause.

    Raises UnsupportedBatchError if it stays unknown for `request_timeout_ms`.
    """
    schema_id, timeout_ms = cursor.unknown_schema, settings.request_timeout_ms
    now_ns = connection.now_ns()
    cursor.unknown_since_ns = cursor.unknown_since_ns or now_ns
    answer = yield from call_json(
        connection, Api.METADATA, {"topics": [cursor.key.topic]}, timeout_ms
    )
    info = topics_from_metadata(answer, cursor.key.topic)[cursor.key.topic]
    if info.topic_id != cursor.info.topic_id:
        raise UnknownTopicIdError(f"topic {cursor.key.topic!r} was deleted, and created again")
    if schema_id in info.history:
        for other in others:
            if other.info.topic_id == info.topic_id:
                other.info, other.unknown_schema, other.unknown_since_ns = info, -1, 0
        return
    cursor.learn_at_ns = connection.now_ns() + LEARN_RETRY_NS
    if now_ns - cursor.unknown_since_ns > timeout_ms * 1_000_000:
        cursor.unknown_since_ns = 0
        raise UnsupportedBatchError(
            f"{cursor.key.topic}-{cursor.key.partition} has a batch of schema {schema_id}, which "
            f"the appliance has not described for {timeout_ms} ms (request_timeout_ms)"
        )


def _place(
    cursors: Mapping[TopicPartition, PartitionPosition], offsets: Mapping[TopicPartition, int]
) -> None:
    """Move cursors to these offsets, unless they were moved meanwhile."""
    for key, cursor in cursors.items():
        if cursor.position is None and not cursor.from_committed:
            cursor.seek(offsets[key])
