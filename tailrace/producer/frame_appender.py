"""Appends the rows of a frame as batches of their own: `send_arrow`.

Owner: one Producer. `append` is run without its lock.
Invariants:
- Rows keep their order within each partition.
- What is accepted is encoded. The program may change the memory of its frame afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from time import time_ns
from typing import TYPE_CHECKING, Any, NamedTuple

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.steps import PAUSE, Steps
from tailrace.core.errors import InvalidRecordError, PartitionOutOfRangeError, TailraceError
from tailrace.core.validation import partition_number
from tailrace.producer.batches.producer_batch import BATCH_OVERHEAD_BYTES
from tailrace.producer.futures import FrameFuture, RecordFuture
from tailrace.producer.record_appender import RecordAppender
from tailrace.producer.record_validation import Delay, no_key_error, timestamp_us_of
from tailrace.producer.routes import ProducerMetadata, TopicRoute
from tailrace.producer.sending.sender_thread import SenderThread

if TYPE_CHECKING:
    import numpy as np

    from tailrace.batch.frames import Frame, FrameSlice

SLICE_MAX_BYTES = 1 << 20
"""Largest batch of a frame, whatever batch_size says. The fixed cost of a batch is small then."""


class RowSlots(NamedTuple):
    """Each row's hash slot, STAYS without a key, and the version of the slot map that chose the
    partition.
    """

    of_rows: np.ndarray[Any, Any]
    map_version: int


class FrameAppender:
    """Cuts frames into batches, and appends these to their partitions."""

    def __init__(
        self,
        settings: ProducerSettings,
        sender_thread: SenderThread,
        metadata: ProducerMetadata,
        records: RecordAppender,
    ) -> None:
        """`records` chooses the partitions of keys."""
        self._settings = settings
        self._sender_thread = sender_thread
        self._metadata = metadata
        self._records = records

    def append(
        self,
        topic: str,
        frame: Frame,
        key_column: str | None,
        partition: int | None,
        timestamp: datetime | int | None,
        delay: Delay,
        delay_column: str | None,
        slots: RowSlots | None = None,
    ) -> Steps[FrameFuture]:
        """Append all rows; see `Producer.send_arrow`. `slots`: for rows that were routed by them to
        `partition`.
        """
        from tailrace.batch import frames

        self._sender_thread.check_usable()
        transaction = self._sender_thread.sender.transaction
        main = yield from self._metadata.of(topic, lambda: frames.schema_message_of(frame))
        is_delayed = delay.at is not None or delay.after is not None or delay_column is not None
        if is_delayed and (main.delay_route is None or not main.info.settings["delay.enabled"]):
            main = yield from self._metadata.load(topic)  # it may have been enabled since
        if partition is not None and partition_number(partition) >= len(main.queues):
            main = yield from self._metadata.load(topic)  # it may have been added since
        if main.info.typed:
            found = frames.fitting(frame, main.info, key_column, delay_column)
            if found is None:
                main = yield from self._metadata.load(topic)  # its schema may have been altered
                found = frames.fitting(frame, main.info, key_column, delay_column)
            frame, key_column = found or (frame, key_column)
        if main.info.compaction_key:
            frame, keyless = frames.keyless_count(frame, main.info.compaction_key)
            if keyless:
                main = yield from self._metadata.load(topic)  # its policy may have changed since
            if keyless and main.info.compaction_key:
                raise no_key_error(main.info, keyless)
        route, slices = self._cut(
            main, frame, key_column, partition, timestamp, delay, delay_column,
            None if slots is None else slots.of_rows,
        )  # fmt: skip
        routed_by = route.info.slot_map_version if slots is None else slots.map_version
        handles: list[RecordFuture] = []
        accepted_count = 0
        try:
            for piece in slices:
                if handles:
                    yield PAUSE
                while (
                    handle := self._sender_thread.do(self._add_slice, route, piece, routed_by)
                ) is None:
                    yield from self._sender_thread.room(
                        piece.byte_count, self._sender_thread.now_ns()
                    )
                    self._sender_thread.check_transaction(transaction)
                handles.append(handle)
                accepted_count += piece.rows.num_rows
        except TailraceError as error:
            if not accepted_count:
                raise
            raise type(error)(
                f"{accepted_count} rows of the frame were accepted before this and are sent, the "
                f"others are not: {error.detail}",
                error.code,
            ) from None
        if self._sender_thread.callbacks.due:
            self._sender_thread.make_callbacks()
        return FrameFuture(handles)

    def _cut(
        self,
        main: TopicRoute,
        frame: Frame,
        key_column: str | None,
        partition: int | None,
        timestamp: datetime | int | None,
        delay: Delay,
        delay_column: str | None,
        slots: np.ndarray[Any, Any] | None,
    ) -> tuple[TopicRoute, Iterator[FrameSlice]]:
        """The route of a frame (its topic's, or its delay log's), and its slices."""
        from tailrace.batch import frames

        route, topic = main, main.info.name
        if partition is not None and not 0 <= (partition := partition_number(partition)) < len(
            route.queues
        ):
            raise PartitionOutOfRangeError(
                f"topic {topic!r} has partitions 0 to {len(route.queues) - 1}, not {partition}"
            )
        stamp_us = time_ns() // 1000 if timestamp is None else timestamp_us_of(timestamp)
        is_delayed = delay.at is not None or delay.after is not None
        if is_delayed or delay_column is not None:
            if is_delayed and delay_column is not None:
                raise InvalidRecordError(
                    "delay_column is given beside deliver_at or deliver_after; a row has one due "
                    "time, so give one of them"
                )
            levels = route.info.settings["delay.levels"]
            route, due_us = route.delayed(
                delay if delay_column is None else Delay(None, timedelta(0), None)
            )
            frame = frames.with_due_times(frame, delay_column, due_us, levels)
            if route.info.typed:  # an altered delay log is known before its topic
                frame, key_column = frames.fitting(frame, route.info, key_column) or (
                    frame,
                    key_column,
                )
        if partition is None and key_column is None:
            partition = partition_number(
                self._records.partitioner(topic, None, len(route.queues)),
                "what the partitioner returned",
            )
        target_bytes = max(
            1,
            min(
                SLICE_MAX_BYTES,
                route.limit_bytes - BATCH_OVERHEAD_BYTES,
                self._settings.buffer_memory // 4,
            ),
        )
        choose = partial(self._records.choose, main)
        return route, frames.cut(
            frame, route.info, key_column, partition, choose, target_bytes, stamp_us, slots
        )

    def _add_slice(
        self, route: TopicRoute, piece: FrameSlice, routed_by: int
    ) -> RecordFuture | None:
        """Add a batch, in a section. `routed_by`: version of the slot map that chose its partition.
        None: there is no room.
        """
        sender_thread, queue = self._sender_thread, route.queues[piece.partition]
        sender_thread.check_may_add()
        if not sender_thread.buffer.has_room(piece.byte_count):
            return None
        # Since the frame was cut, hash slots have moved or the topic was recreated.
        if queue.is_gone:
            queue = self._metadata.queue_now(route, piece.partition)
        batch = sender_thread.accumulator.add_frame(queue, piece, route.info)
        sender_thread.sender.encode_now(queue, batch)
        if queue.info.slot_map_version != routed_by and not route.info.delay_of:
            sender_thread.sender.slot_map_change.reroute_newest(queue, batch)
        sender_thread.polling.on_batch_full(queue)
        return RecordFuture((batch, 0))
