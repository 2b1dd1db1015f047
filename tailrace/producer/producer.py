"""The producer: records in, acknowledgements out. What is under way is the sender's
(`tailrace.producer.sender_thread`).

Invariants: every record ends exactly once: delivered, or with an error on its handle; records of a
    partition keep the order of their `send` calls.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from tailrace.client.kafka_names import RenamedProducerMethods, UnsupportedTransactions
from tailrace.client.partitioners import DefaultPartitioner, ModuloPartitioner, chosen_by
from tailrace.client.runtime import SYSTEM, Runtime
from tailrace.client.serdes import serialized
from tailrace.client.settings import ProducerOptions, ProducerSettings, build, documented, merged
from tailrace.client.steps import PAUSE, Steps, call_json, operation, run
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core import fork
from tailrace.core.delays import due_time_us
from tailrace.core.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.core.hash_slots import slot_of
from tailrace.core.records import Headers
from tailrace.core.recurrence import Recurrence
from tailrace.core.validation import name_of, partition_number, timeout_s_of
from tailrace.kernel import FastPathSender, fast_send
from tailrace.producer.futures import FrameFuture, RecordFuture
from tailrace.producer.partition_queue import PartitionQueue
from tailrace.producer.producer_batch import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    OnDelivery,
    ProducerBatch,
)
from tailrace.producer.record_validation import (
    Delay,
    bytes_of,
    checked_headers,
    row_size,
    timestamp_us_of,
)
from tailrace.producer.routes import ProducerMetadata, TopicRoute
from tailrace.producer.sender_thread import SenderThread
from tailrace.protocol.frame import Api

if TYPE_CHECKING:
    from tailrace.batch.frames import Frame, FrameSlice

T = TypeVar("T")
EXIT_TIMEOUT_S = 30.0
FAILED_BLOCK_TIMEOUT_S = 5.0
"""How long the end of a `with` block that raised waits for what was sent."""
PIECE_MAX_BYTES = 1 << 20
"""A frame is cut into batches of at most so many bytes, whatever batch_size says: what a batch
costs beside its bytes is small then.
"""
DELAY_OVERHEAD_BYTES = 32
"""What a record's due time, and the room for what may replace it, take in a delay log's batch."""
_live_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


@atexit.register
def close_at_exit() -> None:
    """A program that ends without close(): what it sent is still delivered, within EXIT_TIMEOUT_S
    for all producers together.
    """
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for producer in list(_live_producers):
        producer.close(timeout=max(0.0, deadline - time.monotonic()))


class Outgoing(NamedTuple):
    """A record whose sending has to wait."""

    record: tuple[
        Any, Any, Any, Any, int | None, datetime | int | None, OnDelivery | None, Delay | None
    ]
    """(topic, value, key, headers, partition, timestamp, on_delivery, delay), what can be read once
    being read.
    """
    header_bytes: int
    size: int = 0
    """What it takes in a batch, if it waits for that much room; 0: it waits for its topic to be
    known.
    """
    chooser: TopicRoute | None = None
    """The route for which its partition was chosen: once for each, because a partitioner may count
    its calls.
    """
    chosen: int = -1
    """Its partition."""


@documented(ProducerSettings)
class Producer(FastPathSender, UnsupportedTransactions, RenamedProducerMethods):
    """Sends records to topics. A context manager; any number of threads may share one.

        with tailrace.Producer("tcp://127.0.0.1:7420") as producer:
            handle = producer.send("orders", b"{...}", key=b"customer 7")
            handle.result(timeout=5)             # RecordMetadata(topic, partition, offset, timestamp)
            producer.send_arrow("flights", frame)

    `send` only adds the record to a batch and returns a handle, which is a Future and can be
    awaited; `flush`, `close` and the end of the `with` block wait until everything has been
    acknowledged. Settings are keyword arguments, and those that Kafka has are called as there.
    Every method of a closed producer but `close` and `metrics` raises ClientClosedError.
    """  # noqa: E501

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        *,
        runtime: Runtime = SYSTEM,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """`bootstrap`: the address, or a dict of settings with Kafka's names
        (`{"bootstrap.servers": "localhost:7420", "linger.ms": 5}`). Nothing is waited for: an
        appliance that does not answer is met by the first `send`. `runtime`: the clock and the
        network; tests have their own. Raises InvalidSettingError.
        """
        first = (
            bootstrap
            if isinstance(bootstrap, Mapping) or bootstrap is None
            else {"bootstrap": bootstrap}
        )
        self.settings = build(ProducerSettings, merged(first, settings))
        self._serializes = (
            self.settings.key_serializer is not None or self.settings.value_serializer is not None
        )
        self._partitioner = chosen_by(self.settings.partitioner)
        named = self._partitioner if isinstance(self._partitioner, DefaultPartitioner) else None
        self._remembers_choices = (
            named is not None and named.remembers_keys and not self._serializes
        )
        self._takes_numbers = isinstance(self._partitioner, ModuloPartitioner)
        self._sender_thread = SenderThread(self.settings, self._on_keyless_batch, runtime)
        self._sender_thread.accumulator.notifies_every_batch = (
            named is not None and named.notifies_every_batch
        )
        self._metadata = ProducerMetadata(
            self.settings,
            self._sender_thread,
            self._call,
            caches_partitions=not self._serializes,
            by_murmur2=type(self._partitioner) is DefaultPartitioner,
        )
        self._known = self._metadata.known
        self._begin_fast_sends(self._known, self._sender_thread.lock)
        _live_producers.add(self)
        fork.add(self)

    def after_fork(self) -> None:
        """In a child: every way into `send` leads to ClientClosedError."""
        self._metadata.forget_all()
        self._sender_thread.after_fork()

    # ---- users -----------------------------------------------------------------------------------

    @fast_send(RecordFuture)
    def send(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        repeat: Recurrence | None = None,
    ) -> RecordFuture:
        """Add one record to its partition's batch; the batch is sent when it is full, or
        `linger_ms` after its first record. Returns at once, unless `buffer_memory` is full or the
        topic is not known yet: then it waits for at most `max_block_ms`.

        `value` and `key` are bytes (text is taken as UTF-8), or what the serializers take; on a
        typed topic `value` is a dict of column -> value. `headers`: a list of (str, bytes).
        `partition`: a number; None: by the key, records without one to a partition of the
        producer's choice. `timestamp`: a datetime (UTC where it has no time zone) or int
        milliseconds since 1970; None: now. `on_delivery(metadata, error)` is called once the record
        has ended, in whatever thread finds out. On a topic with `delay.enabled`, `deliver_at` (a
        datetime with a time zone) or `deliver_after` has it delivered then, and `repeat` again and
        again from then on; its metadata has a `delay_id` and no offset.

        Raises UnknownTopicError, PartitionOutOfRangeError, InvalidRecordError, SchemaMismatchError,
        RecordTooLargeError, DelayNotEnabledError, NotReachableError, and BufferExhaustedError when
        `buffer_memory` stayed full. What happens to the record later is on the handle.
        """
        begun = self._begin_send(
            topic,
            value,
            key,
            headers,
            partition,
            timestamp,
            on_delivery,
            deliver_at,
            deliver_after,
            repeat,
        )
        return (
            self._run_steps(self._send_when_possible(begun))
            if isinstance(begun, Outgoing)
            else begun
        )

    def _begin_send(
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
        """`send` as far as it goes without waiting. What the record is given with is used once,
        here: an Outgoing has it as it is to be stored.
        """
        delay = (
            None
            if deliver_at is None and deliver_after is None and repeat is None
            else Delay(deliver_at, deliver_after, repeat)
        )
        if self._serializes:
            key = serialized("key", self.settings.key_serializer, key)
            value = serialized("value", self.settings.value_serializer, value)
        if (
            delay is not None
            and type(value) is bytes
            and headers is None
            and partition is None
            and timestamp is None
            and on_delivery is None
        ):
            handle = self._send_delayed(topic, value, key, delay)
            if handle is not None:
                return handle
        return self._send_slow(topic, value, key, headers, partition, timestamp, on_delivery, delay)

    def _send_when_possible(
        self, outgoing: Outgoing, start_ns: int | None = None
    ) -> Steps[RecordFuture]:
        """`send`, where it has to wait: for the topic to be known, for room. `start_ns`: since when
        it waits; None: since now.
        """
        start_ns = self._sender_thread.now_ns() if start_ns is None else start_ns
        while True:
            if outgoing.size:
                yield from self._sender_thread.room(outgoing.size, start_ns)
            else:
                yield from self._metadata.load(outgoing.record[0], start_ns=start_ns)
            begun = self._send_slow(*outgoing.record, waited=outgoing)
            if not isinstance(begun, Outgoing):
                return begun
            outgoing = begun

    def _send_slow(
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
        """A record that needs more thought: see `send`. `waited`: the record has waited since it
        was tried last.
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
            route, due_us = self._delayed(main, delay)
        if self._takes_numbers and type(key) is int:
            key = b"%d" % key
        key, value, size = _sized(route, key, value, header_bytes, delay is not None)
        if on_delivery is not None and not callable(on_delivery):
            raise InvalidRecordError(
                f"on_delivery is {on_delivery!r:.100}; it must be a function of (metadata, error)"
            )
        stamp_us = None if timestamp is None else timestamp_us_of(timestamp)
        if waited is not None and waited.chooser is main:
            chosen = waited.chosen
        else:
            chosen = self._choose(main, key, len(route.queues)) if partition is None else partition
            if type(chosen) is not int:
                chosen = partition_number(
                    chosen, "what the partitioner returned" if partition is None else "partition"
                )
            if not 0 <= chosen < len(route.queues):
                raise PartitionOutOfRangeError(
                    f"topic {topic!r} has partitions 0 to {len(route.queues) - 1}, not {chosen}"
                )
        sender_thread, queue = self._sender_thread, route.queues[chosen]
        with sender_thread.lock:
            if sender_thread.is_torn:  # a section within a section, or one was cut off
                added = sender_thread.do(
                    self._add,
                    queue,
                    route,
                    key,
                    value,
                    stamp_us,
                    headers,
                    size,
                    due_us,
                    delay,
                    main,
                    topic,
                    partition,
                    on_delivery,
                    chosen,
                )
            else:  # `do`, by itself: most of what it takes is the call
                sender_thread.is_inside = sender_thread.is_torn = True
                try:
                    added = self._add(
                        queue,
                        route,
                        key,
                        value,
                        stamp_us,
                        headers,
                        size,
                        due_us,
                        delay,
                        main,
                        topic,
                        partition,
                        on_delivery,
                        chosen,
                    )
                    sender_thread.is_torn = (
                        sender_thread.run_was_interrupted or sender_thread.nested_is_torn
                    )
                except TailraceError:
                    sender_thread.is_torn = (
                        sender_thread.run_was_interrupted or sender_thread.nested_is_torn
                    )
                    raise
                finally:
                    sender_thread.is_inside = False
        if added is None:
            if (
                queue.is_gone
            ):  # the appliance does not know the topic any more: it may have been made again
                self._metadata.forget(topic)
                return Outgoing(record, header_bytes)
            return Outgoing(record, header_bytes, size, main, chosen)
        if sender_thread.callbacks.due:
            sender_thread.make_callbacks()
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
        """Add a record to its queue's open batch. A section of the sender's (see
        `tailrace.producer.sender_thread`). None: there is no room, or `queue.is_gone`.
        """
        batch = queue.open
        if batch is None or batch.room < size:
            batch = self._batch_with_room(queue, route, size)
        row = -1
        while batch is not None and row < 0:
            expected = len(batch.rows)
            if delay is not None:  # first: what is cut off behind it is of no record
                batch.add_due(
                    expected, due_us, None if delay.repeat is None else delay.repeat.to_json()
                )
            row = batch.add(
                key, value, time_ns() // 1000 if stamp_us is None else stamp_us, headers, size
            )
            if row < 0:  # what the collector, or a signal's handler, ran meanwhile has sent
                batch = self._batch_with_room(queue, route, size)
            elif delay is not None and row != expected:
                batch.add_due(row, due_us, None if delay.repeat is None else delay.repeat.to_json())
        if batch is None:
            return None
        if on_delivery is not None:
            batch.add_callback(row, on_delivery)
        if partition is not None and main.owners is not None:
            batch.pin(row)
        sender_thread = self._sender_thread
        if batch.reserved_bytes - batch.room >= self.settings.batch_size:
            sender_thread.accumulator.close_batch(queue)
            sender_thread.on_batch_full(queue)
        else:
            if partition is None and self._remembers_choices and not main.info.typed:
                self._metadata.remember(topic, key, main.queues[chosen])
            if not row:
                sender_thread.on_batch_opened(queue)
        return batch, row

    def _choose(self, route: TopicRoute, key: bytes | None, partition_count: int) -> int:
        """A partition for a key."""
        if route.owners is not None and key is not None:
            return route.owners[slot_of(key)]
        return self._partitioner(route.info.name, key, partition_count)

    def _batch_with_room(
        self, queue: PartitionQueue, route: TopicRoute, size: int
    ) -> ProducerBatch | None:
        """The queue's open batch, or another, with room for `size` bytes. None: there is none, or
        the appliance does not know the topic any more (`queue.is_gone`). In a section. Raises
        ClientClosedError.
        """
        sender_thread = self._sender_thread
        sender_thread.check_usable()
        accumulator, batch = sender_thread.accumulator, queue.open
        if batch is not None and (
            batch.is_closing or batch.reserved_bytes - batch.room + size > route.capacity_bytes
        ):
            accumulator.close_batch(queue)
            sender_thread.on_batch_full(queue)
            batch = queue.open
        elif batch is not None:
            sender_thread.poll_while_appending()
            batch = queue.open
        if queue.is_gone or not sender_thread.has_room(size):
            return None
        if batch is None:
            batch = accumulator.open_batch(queue)
            sender_thread.begin_piece()
        if batch.room < size:
            accumulator.reserve(batch, size, route.capacity_bytes)
        return batch

    def _send_delayed(
        self, topic: str, value: bytes, key: Any, delay: Delay
    ) -> RecordFuture | None:
        """A delayed record for a key that was seen before, in a batch that has room; None: it needs
        more thought. Raises InvalidRecordError.
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
        return self._sender_thread.do(
            self._add_delayed, queue, key, value, stamp_ns // 1000, size, due_us
        )

    def _add_delayed(
        self, queue: PartitionQueue, key: Any, value: bytes, stamp_us: int, size: int, due_us: int
    ) -> RecordFuture | None:
        batch = queue.open
        if batch is None or batch.room <= size:
            return None
        expected = len(batch.rows)
        batch.add_due(expected, due_us, None)  # first: what is cut off behind it is of no record
        row = batch.add(key, value, stamp_us, None, size)
        if row < 0:
            return None
        if row != expected:
            batch.add_due(row, due_us, None)
        return RecordFuture((batch, row))

    def _delayed(self, route: TopicRoute, delay: Delay) -> tuple[TopicRoute, int]:
        """(the topic's delay log, when the record is due). Raises DelayNotEnabledError,
        InvalidRecordError.
        """
        info = route.info
        if route.delay_route is None or not info.settings["delay.enabled"]:
            raise DelayNotEnabledError(
                f"topic {info.name!r} takes no delayed records: delay.enabled is false"
            )
        now_us = time_ns() // 1000
        if delay.repeat is not None:
            return route.delay_route, delay.first_occurrence_us(now_us)
        return route.delay_route, due_time_us(
            delay.at, delay.after, now_us, info.settings["delay.levels"]
        )

    @operation
    def send_arrow(
        self,
        topic: str,
        frame: Frame,
        *,
        key_column: str | None = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
        delay_column: str | None = None,
    ) -> Steps[FrameFuture]:
        """Send the rows of a frame; columns stay columns. `frame`: a pyarrow Table or RecordBatch,
        a pandas or polars frame (a LazyFrame is collected), a duckdb relation, or anything else
        with `__arrow_c_stream__` or `__arrow_c_array__`.

        It must have the columns of the topic's schema (types are cast where that is safe); on a
        topic of the default schema `value`, and it may have `key`, `timestamp` and `headers`. Rows
        go to the partition that `key_column` says, by the hash of each value as text or bytes, or
        to `partition`, or all to one partition of the producer's choice. Their order is kept within
        each partition. `timestamp`: of rows that have no such column. `deliver_at` or
        `deliver_after` delay all rows; `delay_column` names a column, not one of the topic's, of
        timestamps or durations that says it for each.

        Each batch has at most 1 MiB (and no more than `max_request_size` and the topic's
        max.message.bytes), whatever `batch_size` says.

        Raises what `send` does, and SchemaMismatchError.
        """
        from tailrace.batch import frames as arrow_frames

        self._sender_thread.check_usable()
        main = yield from self._metadata.of(topic, lambda: arrow_frames.schema_message_of(frame))
        delay = Delay(deliver_at, deliver_after, None)
        is_delayed = deliver_at is not None or deliver_after is not None or delay_column is not None
        if is_delayed and (main.delay_route is None or not main.info.settings["delay.enabled"]):
            main = yield from self._metadata.load(topic)  # it may have been enabled since
        route, pieces = self._pieces(
            main, frame, key_column, partition, timestamp, delay, delay_column
        )
        handles: list[RecordFuture] = []
        for piece in pieces:
            if handles:
                yield PAUSE
            while (handle := self._sender_thread.do(self._add_piece, route, piece)) is None:
                yield from self._sender_thread.room(piece.byte_count, self._sender_thread.now_ns())
            handles.append(handle)
        if self._sender_thread.callbacks.due:
            self._sender_thread.make_callbacks()
        return FrameFuture(handles)

    def _pieces(
        self,
        main: TopicRoute,
        frame: Frame,
        key_column: str | None,
        partition: int | None,
        timestamp: datetime | int | None,
        delay: Delay,
        delay_column: str | None,
    ) -> tuple[TopicRoute, Iterator[FrameSlice]]:
        """A frame cut into batches, and where they go: see `send_arrow`. Nothing is sent yet."""
        from tailrace.batch import frames as arrow_frames

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
                    "time"
                )
            levels = route.info.settings["delay.levels"]
            route, due_us = self._delayed(
                route, delay if delay_column is None else Delay(None, timedelta(0), None)
            )
            frame = arrow_frames.with_due_times(frame, delay_column, due_us, levels)
        if partition is None and key_column is None:
            partition = partition_number(
                self._partitioner(topic, None, len(route.queues)), "what the partitioner returned"
            )
        target_bytes = max(
            1,
            min(
                PIECE_MAX_BYTES,
                route.limit_bytes - BATCH_OVERHEAD_BYTES,
                self.settings.buffer_memory // 4,
            ),
        )
        choose = partial(self._choose, main)
        return route, arrow_frames.cut(
            frame, route.info, key_column, partition, choose, target_bytes, stamp_us
        )

    def _add_piece(self, route: TopicRoute, piece: FrameSlice) -> RecordFuture | None:
        """Add a batch. A section of the sender's. None: there is no room."""
        sender_thread, queue = self._sender_thread, route.queues[piece.partition]
        sender_thread.check_usable()
        if not sender_thread.has_room(piece.byte_count):
            return None
        if (
            queue.is_gone
        ):  # since the frame was cut, hash slots have moved, or the topic was made again
            queue = self._metadata.queue_now(route, piece.partition)
        batch = sender_thread.accumulator.add_frame(queue, piece)
        if queue.info.slot_map_version != route.info.slot_map_version and not route.info.delay_of:
            sender_thread.sender.slot_map_change.sort_in(queue, batch)
        sender_thread.on_batch_full(queue)
        return RecordFuture((batch, 0))

    @operation
    def flush(self, timeout: float | None = None) -> Steps[None]:
        """Send everything now and wait until every record sent before this call has ended; errors
        of records are on their handles. Raises RequestTimeoutError when that takes longer than
        `timeout` seconds (None: as long as delivery_timeout_ms lets records live).
        """
        timeout_s = timeout_s_of(timeout)
        sender_thread = self._sender_thread
        deadline_ns = None if timeout_s is None else sender_thread.now_ns() + int(timeout_s * 1e9)
        batches = sender_thread.do(self._close_batches)
        is_ended = yield from sender_thread.ended(batches, deadline_ns)
        if not is_ended:
            raise RequestTimeoutError(f"not everything was acknowledged within {timeout} s")
        yield from sender_thread.received(
            None if deadline_ns is None else max(0.0, (deadline_ns - sender_thread.now_ns()) / 1e9)
        )

    def _close_batches(self) -> list[ProducerBatch]:
        self._sender_thread.check_usable()
        batches = self._sender_thread.accumulator.incomplete()
        self._sender_thread.close_all()
        return batches

    @operation
    def partitions_for(self, topic: str) -> Steps[list[int]]:
        """The topic's partition numbers, ascending. Raises UnknownTopicError,
        InvalidRequestError.
        """
        self._sender_thread.check_usable()
        route = yield from self._metadata.of(name_of("topic", topic))
        return list(range(len(route.queues)))

    def metrics(self) -> dict[str, int]:
        """Counters since construction (records_sent, batches_sent, requests_sent, bytes_sent,
        retries, errors, epoch_bumps), and what is there now: buffered_bytes, batches_in_flight.
        """
        with self._sender_thread.lock:
            return self._sender_thread.metrics()

    def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds (None: as long as delivery_timeout_ms lets records
        live), then end; what is left ends with ClientClosedError. A second time it does nothing.
        """
        timeout_s = timeout_s_of(timeout)
        if self._sender_thread.is_stopped or self._sender_thread.forked:
            return
        try:
            self.flush(timeout_s)
        except TailraceError:
            pass  # what was not delivered ends below, on its handle
        finally:
            self._sender_thread.stop()

    def __enter__(self) -> Producer:
        self._sender_thread.check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        # After an exception there is no reason to wait for long: what is under way may still
        # arrive.
        self.close(timeout=None if kind is None else FAILED_BLOCK_TIMEOUT_S)

    def _run_steps(self, steps: Steps[T], /) -> T:
        result = run(steps, self._sender_thread.sleep_until)
        self._sender_thread.make_callbacks()
        return result

    def _call(
        self, api: Api, request: dict[str, Any], start_ns: int | None
    ) -> Steps[dict[str, Any]]:
        """Ask the appliance about topics, for max_block_ms since `start_ns`."""
        sender_thread = self._sender_thread
        return call_json(
            sender_thread.connection,
            api,
            request,
            self.settings.max_block_ms,
            start_ns=start_ns,
            guard=sender_thread.use_connection,
        )

    def _on_keyless_batch(self, info: TopicInfo) -> None:
        if isinstance(self._partitioner, DefaultPartitioner):
            name = info.delay_of or info.name
            self._metadata.forget_keyless(name)
            self._partitioner.on_batch_sent(name, len(info.partitions))


def _sized(
    route: TopicRoute, key: Any, value: Any, header_bytes: int, is_delayed: bool
) -> tuple[bytes | None, Any, int]:
    """A record's key and value as they are stored, and how many bytes it takes in a batch. Raises
    InvalidRecordError, SchemaMismatchError, RecordTooLargeError.
    """
    if type(key) is not bytes and key is not None:
        key = bytes_of("key", key)
    if route.info.typed:
        size = row_size(value, route.info) + header_bytes
    else:
        if type(value) is not bytes and value is not None:
            value = bytes_of("value", value)
        size = len(value or b"") + len(key or b"") + RECORD_OVERHEAD_BYTES + header_bytes
    if is_delayed:
        size += DELAY_OVERHEAD_BYTES
    if size > route.limit_bytes - BATCH_OVERHEAD_BYTES:
        raise RecordTooLargeError(
            f"a record of {size} bytes does not fit {route.limit_bytes} bytes, the smaller of the "
            "producer's max_request_size and the topic's "
            "max.message.bytes"
        )
    return key, value, size
