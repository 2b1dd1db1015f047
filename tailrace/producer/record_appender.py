"""Appends single records to the open batches of their partitions: the slow path of `send`.

The fast path (`tailrace.kernel.fast_send`) takes most records. This takes the others: typed rows,
unknown topics and keys, delayed records, and those for which a batch is opened or closed.

Owner: one Producer. `begin` and `finish` are called without its lock.
Invariants:
- A record that has to wait (`Outgoing`) is not in a batch. Its arguments were read once.
- A partitioner is called once for each record and slot map.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from time import time_ns
from typing import Any, NamedTuple

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.steps import Steps
from tailrace.client.records.partitioners import DefaultPartitioner, ModuloPartitioner, Partitioner
from tailrace.client.records.serdes import serialized
from tailrace.core.errors import (
    PartitionOutOfRangeError,
    RecordTooLargeError,
    SchemaMismatchError,
    TailraceError,
)
from tailrace.core.hash_slots import slot_of
from tailrace.core.records import Headers
from tailrace.core.schedule.delays import due_time_us
from tailrace.core.schedule.recurrence import Recurrence
from tailrace.core.validation import partition_number
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    OnDelivery,
    ProducerBatch,
)
from tailrace.producer.futures import RecordFuture
from tailrace.producer.record_validation import (
    Delay,
    bytes_of,
    check_callback,
    checked_headers,
    checked_row,
    lacks_key,
    no_key_error,
    refuse_headers,
    timed_row,
    timestamp_us_of,
)
from tailrace.producer.routes import ProducerMetadata, TopicRoute
from tailrace.producer.sending.sender_thread import SenderThread

DELAY_OVERHEAD_BYTES = 32
"""Bytes of a due time in a delay log's batch, with room for a later change of it."""


class Outgoing(NamedTuple):
    """A record that waits for its topic's metadata, or for room."""

    record: tuple[
        Any, Any, Any, Any, int | None, datetime | int | None, OnDelivery | None, Delay | None
    ]
    """(topic, value, key, headers, partition, timestamp, on_delivery, delay). Iterators among them
    have been read.
    """
    header_bytes: int
    size: int = 0
    """Bytes that it waits for. 0: it waits for its topic's metadata."""
    chooser: TopicRoute | None = None
    """The route for which its partition was chosen."""
    chosen: int = -1
    """Its partition."""
    transaction: int = 0
    """The number of the transaction that it belongs to, 0 without transactions."""


class RecordAppender:
    """Appends records; see the module's docstring."""

    def __init__(
        self,
        settings: ProducerSettings,
        sender_thread: SenderThread,
        metadata: ProducerMetadata,
        partitioner: Partitioner,
    ) -> None:
        self._settings = settings
        self._serializes = serializes(settings)
        self._metadata = metadata
        self._known = metadata.known
        self.partitioner = partitioner
        self._caches_partitions = (
            isinstance(partitioner, DefaultPartitioner)
            and partitioner.remembers_keys
            and takes_fast_path(settings)
        )
        self._takes_numbers = isinstance(partitioner, ModuloPartitioner)
        self._sender_thread = sender_thread
        self._accumulator = sender_thread.accumulator
        self._buffer = sender_thread.buffer
        self._callbacks = sender_thread.callbacks
        self._polling = sender_thread.polling
        self._section = sender_thread.section

    def begin(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Headers,
        partition: int | None,
        timestamp: datetime | int | None,
        on_delivery: OnDelivery | None,
        deliver_at: datetime | None,
        deliver_after: timedelta | None,
        repeat: Recurrence | None,
    ) -> RecordFuture | Outgoing:
        """Do what `Producer.send` can do without waiting. An Outgoing is for `finish`."""
        delay = (
            None
            if deliver_at is None and deliver_after is None and repeat is None
            else Delay(deliver_at, deliver_after, repeat)
        )
        if self._serializes:
            key = serialized("key", self._settings.key_serializer, key)
            value = serialized("value", self._settings.value_serializer, value)
        if (
            delay is not None
            and type(value) is bytes
            and headers is None
            and partition is None
            and timestamp is None
            and on_delivery is None
        ):
            future = self._append_delayed(topic, value, key, delay)
            if future is not None:
                return future
        begun = self._append(topic, value, key, headers, partition, timestamp, on_delivery, delay)
        if isinstance(begun, Outgoing) and self._settings.transactional_id is not None:
            return begun._replace(transaction=self._sender_thread.sender.transaction)
        return begun

    def finish(self, outgoing: Outgoing, start_ns: int | None = None) -> Steps[RecordFuture]:
        """Wait for the topic's metadata or for room, and append. `start_ns`: start of
        max_block_ms, None for now.
        """
        start_ns = self._sender_thread.now_ns() if start_ns is None else start_ns
        transaction = outgoing.transaction
        while True:
            if outgoing.size:
                yield from self._sender_thread.room(outgoing.size, start_ns)
            else:
                yield from self._metadata.load(outgoing.record[0], start_ns=start_ns)
            self._sender_thread.check_transaction(transaction)
            begun = self._append(*outgoing.record, waited=outgoing)
            if not isinstance(begun, Outgoing):
                return begun
            outgoing = begun

    def choose(self, route: TopicRoute, key: bytes | None, partition_count: int) -> int:
        """The partition for a key."""
        if route.owners is not None and key is not None:
            return route.owners[slot_of(key)]
        return self.partitioner(route.info.name, key, partition_count)

    def _append(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Headers,
        partition: int | None,
        timestamp: datetime | int | None,
        on_delivery: OnDelivery | None,
        delay: Delay | None,
        waited: Outgoing | None = None,
    ) -> RecordFuture | Outgoing:
        """Append a record if its topic is known and there is room. `waited`: the record as it
        waited.
        """
        if headers:
            headers, header_bytes = (
                (headers, waited.header_bytes) if waited is not None else checked_headers(headers)
            )
        else:
            header_bytes = 0
        record = topic, value, key, headers, partition, timestamp, on_delivery, delay
        try:
            route = main = self._metadata.by_topic[topic]
        except (KeyError, TypeError):
            return Outgoing(record, header_bytes)
        due_us = 0
        if delay is not None:
            if (
                main.delay_route is None or not main.info.settings["delay.enabled"]
            ) and waited is None:
                return Outgoing(record, header_bytes)  # it may have been enabled since
            route, due_us = main.delayed(delay)
        if headers and main.info.typed:
            refuse_headers(main.info, on_delivery)
        stamp_us = None if timestamp is None else timestamp_us_of(timestamp)
        if stamp_us is not None and main.info.typed:
            value = timed_row(main.info, value, stamp_us)
        if self._takes_numbers and type(key) is int:
            key = b"%d" % key
        if main.info.compaction_key and lacks_key(main.info, key, value):
            if waited is None:
                return Outgoing(record, header_bytes)  # its policy may have changed since
            raise no_key_error(main.info)
        try:
            key, value, size = _sized(route, key, value, header_bytes, delay is not None)
        except SchemaMismatchError:
            if waited is not None:
                raise
            return Outgoing(record, header_bytes)  # the schema may have been altered since
        if on_delivery is not None:
            check_callback(on_delivery)
        if waited is not None and waited.chooser is main:
            chosen = waited.chosen
        else:
            chosen = self.choose(main, key, len(route.queues)) if partition is None else partition
            if type(chosen) is not int:
                chosen = partition_number(
                    chosen, "what the partitioner returned" if partition is None else "partition"
                )
            if not 0 <= chosen < len(route.queues):
                if partition is not None and waited is None and chosen > 0:
                    return Outgoing(record, header_bytes)  # it may have been added since
                raise PartitionOutOfRangeError(
                    f"topic {topic!r} has partitions 0 to {len(route.queues) - 1}, not {chosen}"
                )
        section, queue = self._section, route.queues[chosen]
        with section.lock:
            if section.is_torn:  # a section within a section, or one was interrupted
                added = section.run(
                    self._add, queue, route, key, value, stamp_us, headers, size, due_us,
                    delay, main, topic, partition, on_delivery, chosen,
                )  # fmt: skip
            else:  # the body of `run`, which costs less than the call
                section.is_inside = section.is_torn = True
                try:
                    added = self._add(
                        queue, route, key, value, stamp_us, headers, size, due_us,
                        delay, main, topic, partition, on_delivery, chosen,
                    )  # fmt: skip
                    section.is_torn = section.connection_is_torn or section.nested_is_torn
                except TailraceError:
                    section.is_torn = section.connection_is_torn or section.nested_is_torn
                    raise
                finally:
                    section.is_inside = False
        if added is None:
            if (
                queue.is_gone or queue.info.schema_id != route.info.schema_id
            ):  # the topic may have been recreated
                self._metadata.forget(topic)
                return Outgoing(record, header_bytes)
            return Outgoing(record, header_bytes, size, main, chosen)
        if self._callbacks.due:
            self._callbacks.make()
        return RecordFuture(added)

    def _add(
        self,
        queue: PartitionQueue,
        route: TopicRoute,
        key: bytes | None,
        value: Any,
        stamp_us: int | None,
        headers: Headers,
        size: int,
        due_us: int,
        delay: Delay | None,
        main: TopicRoute,
        topic: str,
        partition: int | None,
        on_delivery: OnDelivery | None,
        chosen: int,
    ) -> tuple[ProducerBatch, int] | None:
        """Add a record to its queue's open batch, in a section. None: there is no room, or
        `queue.is_gone`.
        """
        if queue.info.schema_id != route.info.schema_id:
            return None  # altered since the row was checked
        batch = queue.open
        if batch is None or batch.room < size:
            batch = self._batch_with_room(queue, route, size)
        row = -1
        while batch is not None and row < 0:
            expected = len(batch.rows)
            if delay is not None:  # before the record: if it is interrupted after, no record has it
                batch.add_due(
                    expected, due_us, None if delay.repeat is None else delay.repeat.to_json()
                )
            row = batch.add(
                key, value, time_ns() // 1000 if stamp_us is None else stamp_us, headers, size
            )
            # Code that the garbage collector or a signal handler ran may have sent or added.
            if row < 0:
                batch = self._batch_with_room(queue, route, size)
            elif delay is not None and row != expected:
                batch.add_due(row, due_us, None if delay.repeat is None else delay.repeat.to_json())
        if batch is None:
            return None
        if on_delivery is not None:
            batch.add_callback(row, on_delivery)
        if partition is not None and main.owners is not None:
            batch.pin(row)
        if batch.reserved_bytes - batch.room >= self._settings.batch_size:
            self._accumulator.close_batch(queue)
            self._polling.on_batch_full(queue)
        else:
            if partition is None and self._caches_partitions and not main.info.typed:
                self._metadata.remember(topic, key, main.queues[chosen])
            if not row:
                self._polling.on_batch_opened(queue)
        return batch, row

    def _batch_with_room(
        self, queue: PartitionQueue, route: TopicRoute, size: int
    ) -> ProducerBatch | None:
        """The queue's open batch, or another one, with room for `size` bytes. Called in a section.

        None: there is no room, or `queue.is_gone`. Raises ClientClosedError, and
        InvalidTransactionError outside of a transaction.
        """
        self._sender_thread.check_may_add()
        accumulator, batch = self._accumulator, queue.open
        if batch is not None and (
            batch.is_closing or batch.reserved_bytes - batch.room + size > route.capacity_bytes
        ):
            accumulator.close_batch(queue)
            self._polling.on_batch_full(queue)
            batch = queue.open
        elif batch is not None:
            self._polling.poll_while_appending()
            batch = queue.open
        if queue.is_gone or not self._buffer.has_room(size):
            return None
        if batch is None:
            batch = accumulator.open_batch(queue)
            self._polling.begin_piece()
        if batch.room < size:
            accumulator.reserve(batch, size, route.capacity_bytes)
        return batch

    def _append_delayed(
        self, topic: str, value: bytes, key: Any, delay: Delay
    ) -> RecordFuture | None:
        """Append a delayed record whose key has a cached partition, to a batch with room. None:
        `_append` takes it. Raises InvalidRecordError.
        """
        try:
            route = self._metadata.by_topic[topic]
            chosen: Any = self._known[topic].queue_of(key)
        except (KeyError, TypeError):
            return None
        if chosen is None or (key is not None and type(key) is not bytes):
            return None
        settings = route.info.settings
        if (
            delay.repeat is not None
            or route.delay_route is None
            or not settings["delay.enabled"]
            or settings["delay.levels"]
        ):
            return None
        stamp_ns = time_ns()
        due_us = due_time_us(delay.at, delay.after, stamp_ns // 1000)
        queue = route.delay_route.queues[chosen.partition]
        size = len(value) + len(key or b"") + RECORD_OVERHEAD_BYTES + DELAY_OVERHEAD_BYTES
        return self._section.run(
            self._add_delayed, queue, key, value, stamp_ns // 1000, size, due_us
        )

    def _add_delayed(
        self, queue: PartitionQueue, key: Any, value: bytes, stamp_us: int, size: int, due_us: int
    ) -> RecordFuture | None:
        batch = queue.open
        if batch is None or batch.room <= size:
            return None
        expected = len(batch.rows)
        # Before the record: if it is interrupted after, no record has this due time.
        batch.add_due(expected, due_us, None)
        row = batch.add(key, value, stamp_us, None, size)
        if row < 0:
            return None
        if row != expected:
            batch.add_due(row, due_us, None)
        return RecordFuture((batch, row))


def serializes(settings: ProducerSettings) -> bool:
    """True if the producer has a serializer."""
    return settings.key_serializer is not None or settings.value_serializer is not None


def takes_fast_path(settings: ProducerSettings) -> bool:
    """True if nothing is to be done with a record of bytes before it is appended."""
    return not (serializes(settings) or settings.tracing)


def _sized(
    route: TopicRoute, key: Any, value: Any, header_bytes: int, is_delayed: bool
) -> tuple[bytes | None, Any, int]:
    """A record's key and value as they are stored, and its bytes in a batch. Raises
    InvalidRecordError, SchemaMismatchError, RecordTooLargeError.
    """
    if type(key) is not bytes and key is not None:
        key = bytes_of("key", key)
    if route.info.typed:
        value, size = checked_row(value, route.info)
        size += header_bytes
    else:
        if type(value) is not bytes and value is not None:
            value = bytes_of("value", value)
        size = len(value or b"") + len(key or b"") + RECORD_OVERHEAD_BYTES + header_bytes
    if is_delayed:
        size += DELAY_OVERHEAD_BYTES
    if size > route.limit_bytes - BATCH_OVERHEAD_BYTES:
        raise RecordTooLargeError(
            f"a record of {size} bytes does not fit {route.limit_bytes} bytes, the smaller of the "
            "producer's max_request_size and the topic's max.message.bytes, of which "
            f"{BATCH_OVERHEAD_BYTES} are kept for the batch itself"
        )
    return key, value, size
