"""The producer: records in, acknowledgements out. What is under way is the sender's (`tailrace.sender`).

Invariants: every record ends exactly once: delivered, or with an error on its handle; records of a partition keep the order of their `send` calls.
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
from typing import TYPE_CHECKING, Any, Unpack

from tailrace import live_clients
from tailrace.arguments import name_of, partition_number, timeout_s_of
from tailrace.delays import due_time_us
from tailrace.environment import REAL, Environment
from tailrace.errors import DelayNotEnabledError, InvalidRecordError, PartitionOutOfRangeError, RecordTooLargeError, TailraceError
from tailrace.formats.arrow_batch import Headers
from tailrace.handles import BatchesHandle, Handle
from tailrace.hash_slots import slot_of
from tailrace.kernel import QuickSender, quick_send
from tailrace.other_names import OtherProducerNames, TransactionsLater
from tailrace.partition_queue import PartitionQueue
from tailrace.partitioners import DefaultPartitioner, ModuloPartitioner, chosen_by
from tailrace.producer_batch import BATCH_OVERHEAD_BYTES, RECORD_OVERHEAD_BYTES, OnDelivery, ProducerBatch
from tailrace.producer_topics import Route, Routes
from tailrace.protocol.wire import Api
from tailrace.record_checks import Delay, bytes_of, checked_headers, row_size, timestamp_us_of
from tailrace.recurrence import Recurrence
from tailrace.sender import Sender
from tailrace.serializers import serialized
from tailrace.settings import ProducerOptions, ProducerSettings, build, documented, merged
from tailrace.topics import TopicInfo

if TYPE_CHECKING:
    from tailrace.arrow_frames import Frame, Piece

EXIT_TIMEOUT_S = 30.0
FAILED_BLOCK_TIMEOUT_S = 5.0
"""How long the end of a `with` block that raised waits for what was sent."""
PIECE_MAX_BYTES = 1 << 20
"""A frame is cut into batches of at most so many bytes, whatever batch_size says: what a batch costs beside its bytes is small then."""
DELAY_OVERHEAD_BYTES = 32
"""What a record's due time, and the room for what may replace it, take in a delay log's batch."""
_live_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


@atexit.register
def close_at_exit() -> None:
    """A program that ends without close(): what it sent is still delivered, within EXIT_TIMEOUT_S for all producers together."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for producer in list(_live_producers):
        producer.close(timeout=max(0.0, deadline - time.monotonic()))


@documented(ProducerSettings)
class Producer(QuickSender, TransactionsLater, OtherProducerNames):
    """Sends records to topics. A context manager; any number of threads may share one.

        with tailrace.Producer("tcp://127.0.0.1:7420") as producer:
            handle = producer.send("orders", b"{...}", key=b"customer 7")
            handle.result(timeout=5)             # RecordMetadata(topic, partition, offset, timestamp)
            producer.send_arrow("flights", frame)

    `send` only adds the record to a batch and returns a handle, which is a Future and can be awaited; `flush`, `close` and the end of the `with` block wait
    until everything has been acknowledged. Settings are keyword arguments, and those that Kafka has are called as there. Every method of a closed producer but
    `close` and `metrics` raises ClientClosedError.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str] | Mapping[str, Any] | None = None,
        *,
        environment: Environment = REAL,
        **settings: Unpack[ProducerOptions],
    ) -> None:
        """`bootstrap`: the address, or a dict of settings with Kafka's names (`{"bootstrap.servers": "localhost:7420", "linger.ms": 5}`). Nothing is waited
        for: an appliance that does not answer is met by the first `send`. `environment`: the clock and the network; tests
        have their own. Raises InvalidSettingError.
        """
        first = bootstrap if isinstance(bootstrap, Mapping) or bootstrap is None else {"bootstrap": bootstrap}
        self.settings = build(ProducerSettings, merged(first, settings))
        self._serializes = self.settings.key_serializer is not None or self.settings.value_serializer is not None
        self._partitioner = chosen_by(self.settings.partitioner)
        named = self._partitioner if isinstance(self._partitioner, DefaultPartitioner) else None
        self._remembers_choices = named is not None and named.remembers_keys and not self._serializes
        self._takes_numbers = isinstance(self._partitioner, ModuloPartitioner)
        self._sender = Sender(self.settings, self._on_keyless_batch, environment)
        self._sender.accumulator.tells_every_batch = named is not None and named.tells_every_batch
        self._routes = Routes(
            self.settings,
            self._sender,
            self._call,
            makes_choices=not self._serializes,
            by_murmur2=type(self._partitioner) is DefaultPartitioner,
        )
        self._known = self._routes.known
        self._begin_quick_sends(self._known, self._sender.lock)
        _live_producers.add(self)
        live_clients.add(self)

    def after_fork(self) -> None:
        """In a child: every way into `send` leads to ClientClosedError."""
        self._routes.forget_all()
        self._sender.after_fork()

    # ---- users -----------------------------------------------------------------------------------------------------------------------

    @quick_send(Handle)
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
    ) -> Handle:
        """Add one record to its partition's batch; the batch is sent when it is full, or `linger_ms` after its first record. Returns at once, unless
        `buffer_memory` is full or the topic is not known yet: then it waits for at most `max_block_ms`.

        `value` and `key` are bytes (text is taken as UTF-8), or what the serializers take; on a typed topic `value` is a dict of column -> value.
        `headers`: a list of (str, bytes). `partition`: a number; None: by the key, records without one to a partition of the producer's choice.
        `timestamp`: a datetime (UTC where it has no time zone) or int milliseconds since 1970; None: now.
        `on_delivery(metadata, error)` is called once the record has ended, in whatever thread finds out. On a topic with `delay.enabled`, `deliver_at` (a
        datetime with a time zone) or `deliver_after` has it delivered then, and `repeat` again and again from then on; its metadata has a `delay_id` and no
        offset.

        Raises UnknownTopicError, PartitionOutOfRangeError, InvalidRecordError, SchemaMismatchError, RecordTooLargeError, DelayNotEnabledError,
        NotReachableError, and BufferExhaustedError when `buffer_memory` stayed full. What happens to the record later is on the handle.
        """
        delay = None if deliver_at is None and deliver_after is None and repeat is None else Delay(deliver_at, deliver_after, repeat)
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
        return self._send_any(topic, value, key, headers, partition, timestamp, on_delivery, delay)

    def _send_any(
        self,
        topic: str,
        value: Any,
        key: Any,
        headers: Headers,
        partition: int | None,
        timestamp: datetime | int | None,
        on_delivery: OnDelivery | None,
        delay: Delay | None,
    ) -> Handle:
        """A record that needs more thought: see `send`."""
        try:
            route = main = self._routes.by_topic[topic]
        except (KeyError, TypeError):
            route = main = self._routes.load(topic)
        due_us = 0
        if delay is not None:
            route, due_us = self._delayed(main, delay)
        if self._takes_numbers and type(key) is int:
            key = b"%d" % key
        key, value, headers, size = _sized(route, key, value, headers, delay is not None)
        if on_delivery is not None and not callable(on_delivery):
            raise InvalidRecordError(f"on_delivery is {on_delivery!r:.100}; it must be a function of (metadata, error)")
        stamp_us = None if timestamp is None else timestamp_us_of(timestamp)
        chosen = self._choose(main, key, len(route.queues)) if partition is None else partition
        if type(chosen) is not int:
            chosen = partition_number(chosen, "what the partitioner returned" if partition is None else "partition")
        if not 0 <= chosen < len(route.queues):
            raise PartitionOutOfRangeError(f"topic {topic!r} has partitions 0 to {len(route.queues) - 1}, not {chosen}")
        sender, queue = self._sender, route.queues[chosen]
        with sender.lock:
            batch = queue.open
            if batch is None or batch.room < size:
                batch = self._batch_with_room(queue, route, size)
            row = -1
            while batch is not None and row < 0:
                row = batch.add(key, value, time_ns() // 1000 if stamp_us is None else stamp_us, headers, size)
                if row < 0:  # what the collector, or a signal's handler, ran meanwhile has sent
                    batch = self._batch_with_room(queue, route, size)
            if batch is not None:
                if delay is not None:
                    batch.add_due(row, due_us, None if delay.repeat is None else delay.repeat.to_json())
                if on_delivery is not None:
                    batch.add_callback(row, on_delivery)
                if partition is not None and main.owners is not None:
                    batch.pin(row)
                if batch.reserved_bytes - batch.room >= self.settings.batch_size:
                    sender.accumulator.close_batch(queue)
                    sender.pump_full(queue)
                else:
                    if partition is None and self._remembers_choices and not main.info.typed:
                        self._routes.remember(topic, key, main.queues[chosen])
                    if not row:
                        sender.see_to(queue)
        if batch is None:  # the appliance does not know the topic any more: it may have been made again
            self._routes.forget(topic)
            return self._send_any(topic, value, key, headers, partition, timestamp, on_delivery, delay)
        if sender.callbacks.due:
            sender.make_callbacks()
        return Handle((batch, row))

    def _choose(self, route: Route, key: bytes | None, partition_count: int) -> int:
        """A partition for a key."""
        if route.owners is not None and key is not None:
            return route.owners[slot_of(key)]
        return self._partitioner(route.info.name, key, partition_count)

    def _batch_with_room(self, queue: PartitionQueue, route: Route, size: int) -> ProducerBatch | None:
        """The queue's open batch, or another, with room for `size` bytes. None: the appliance does not know the topic any more. With the lock held. Raises
        ClientClosedError, BufferExhaustedError, RecordTooLargeError.
        """
        sender = self._sender
        sender.check_usable()
        accumulator, batch = sender.accumulator, queue.open
        if batch is not None and batch.reserved_bytes - batch.room + size > route.capacity_bytes:
            accumulator.close_batch(queue)
            sender.pump_full(queue)
            batch = queue.open
        elif batch is not None:
            sender.look_between()
            batch = queue.open
        if not queue.is_gone and accumulator.buffered_bytes + size + BATCH_OVERHEAD_BYTES > self.settings.buffer_memory:
            sender.block_for_memory(size)
            batch = queue.open
        if queue.is_gone:
            return None
        if batch is None:
            batch = accumulator.open_batch(queue)
            sender.begin_piece()
        if batch.room < size:
            accumulator.reserve(batch, size, route.capacity_bytes)
        return batch

    def _send_delayed(self, topic: str, value: bytes, key: Any, delay: Delay) -> Handle | None:
        """A delayed record for a key that was seen before, in a batch that has room; None: it needs more thought. Raises InvalidRecordError."""
        try:
            route = self._routes.by_topic[topic]
            chosen: Any = self._known[topic].queue_of(key)
        except (KeyError, TypeError):
            return None
        if chosen is None or (key is not None and type(key) is not bytes):
            return None
        settings = route.info.settings
        if delay.repeat is not None or route.delay_route is None or not settings["delay.enabled"] or settings["delay.levels"]:
            return None
        stamp_ns = time_ns()
        due_us = due_time_us(delay.at, delay.after, stamp_ns // 1000)
        queue = route.delay_route.queues[chosen.partition]
        with self._sender.lock:
            batch = queue.open
            size = len(value) + len(key or b"") + RECORD_OVERHEAD_BYTES + DELAY_OVERHEAD_BYTES
            if batch is None or batch.room <= size:
                return None
            row = batch.add(key, value, stamp_ns // 1000, None, size)
            if row < 0:
                return None
            batch.add_due(row, due_us, None)
            return Handle((batch, row))

    def _delayed(self, route: Route, delay: Delay) -> tuple[Route, int]:
        """(the topic's delay log, when the record is due). Raises DelayNotEnabledError, InvalidRecordError."""
        if route.delay_route is None or not route.info.settings["delay.enabled"]:
            route = self._routes.load(route.info.name)  # it may have been enabled since
        info = route.info
        if route.delay_route is None or not info.settings["delay.enabled"]:
            raise DelayNotEnabledError(f"topic {info.name!r} takes no delayed records: delay.enabled is false")
        now_us = time_ns() // 1000
        if delay.repeat is not None:
            return route.delay_route, delay.first_occurrence_us(now_us)
        return route.delay_route, due_time_us(delay.at, delay.after, now_us, info.settings["delay.levels"])

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
    ) -> BatchesHandle:
        """Send the rows of a frame; columns stay columns. `frame`: a pyarrow Table or RecordBatch, a pandas or polars frame (a LazyFrame is collected), a
        duckdb relation, or anything else with `__arrow_c_stream__` or `__arrow_c_array__`.

        It must have the columns of the topic's schema (types are cast where that is safe); on a topic of the default schema `value`, and it may have `key`,
        `timestamp` and `headers`. Rows go to the partition that `key_column` says, by the hash of each value as text or bytes, or to `partition`, or all to
        one partition of the producer's choice. Their order is kept within each partition. `timestamp`: of rows that have no such column. `deliver_at` or
        `deliver_after` delay all rows; `delay_column` names a column, not one of the topic's, of timestamps or durations that says it for each.

        Each batch has at most 1 MiB (and no more than `max_request_size` and the topic's max.message.bytes), whatever `batch_size` says.

        Raises what `send` does, and SchemaMismatchError.
        """
        route, pieces = self._pieces(topic, frame, key_column, partition, timestamp, Delay(deliver_at, deliver_after, None), delay_column)
        handles = [self._send_piece(route, piece) for piece in pieces]
        if self._sender.callbacks.due:
            self._sender.make_callbacks()
        return BatchesHandle(handles)

    def _pieces(
        self,
        topic: str,
        frame: Frame,
        key_column: str | None,
        partition: int | None,
        timestamp: datetime | int | None,
        delay: Delay,
        delay_column: str | None,
    ) -> tuple[Route, Iterator[Piece]]:
        """A frame cut into batches, and where they go: see `send_arrow`. Nothing is sent yet."""
        from tailrace import arrow_frames

        self._sender.check_usable()
        route = main = self._routes.of(topic, lambda: arrow_frames.schema_message_of(frame))
        if partition is not None and not 0 <= (partition := partition_number(partition)) < len(route.queues):
            raise PartitionOutOfRangeError(f"topic {topic!r} has partitions 0 to {len(route.queues) - 1}, not {partition}")
        stamp_us = time_ns() // 1000 if timestamp is None else timestamp_us_of(timestamp)
        is_delayed = delay.at is not None or delay.after is not None
        if is_delayed or delay_column is not None:
            if is_delayed and delay_column is not None:
                raise InvalidRecordError("delay_column is given beside deliver_at or deliver_after; a row has one due time")
            levels = route.info.settings["delay.levels"]
            route, due_us = self._delayed(route, delay if delay_column is None else Delay(None, timedelta(0), None))
            frame = arrow_frames.with_due_times(frame, delay_column, due_us, levels)
        if partition is None and key_column is None:
            partition = partition_number(self._partitioner(topic, None, len(route.queues)), "what the partitioner returned")
        target_bytes = max(1, min(PIECE_MAX_BYTES, route.limit_bytes - BATCH_OVERHEAD_BYTES, self.settings.buffer_memory // 4))
        choose = partial(self._choose, main)
        return route, arrow_frames.cut(frame, route.info, key_column, partition, choose, target_bytes, stamp_us)

    def _send_piece(self, route: Route, piece: Piece) -> Handle:
        sender, queue = self._sender, route.queues[piece.partition]
        with sender.lock:
            sender.check_usable()
            if sender.accumulator.buffered_bytes + piece.byte_count > self.settings.buffer_memory:
                sender.block_for_memory(piece.byte_count)
            if queue.is_gone:  # since the frame was cut, hash slots have moved, or the topic was made again
                queue = self._routes.queue_now(route, piece.partition)
            batch = sender.accumulator.add_frame(queue, piece)
            if queue.info.slot_map_version != route.info.slot_map_version and not route.info.delay_of:
                sender.delivery.rerouting.sort_in(queue, batch)
            sender.pump_full(queue)
        return Handle((batch, 0))

    def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until every record sent before this call has ended; errors of records are on their handles. Raises
        RequestTimeoutError when that takes longer than `timeout` seconds (None: as long as delivery_timeout_ms lets records live).
        """
        timeout_s = timeout_s_of(timeout)
        with self._sender.lock:
            self._sender.check_usable()
            batches = self._sender.accumulator.unended()
            self._sender.close_all()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for batch in batches:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            BatchesHandle([Handle((batch, 0))]).exception(remaining)
        self._sender.wait_until_received(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers, ascending. Raises UnknownTopicError, InvalidRequestError."""
        self._sender.check_usable()
        return list(range(len(self._routes.of(name_of("topic", topic)).queues)))

    def metrics(self) -> dict[str, int]:
        """Counters since construction (records_sent, batches_sent, requests_sent, bytes_sent, retries, errors, epoch_bumps), and what is there now:
        buffered_bytes, batches_in_flight.
        """
        with self._sender.lock:
            return self._sender.metrics()

    def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds (None: as long as delivery_timeout_ms lets records live), then end; what is left ends with
        ClientClosedError. A second time it does nothing.
        """
        timeout_s = timeout_s_of(timeout)
        if self._sender.closed or self._sender.forked:
            return
        try:
            self.flush(timeout_s)
        except TailraceError:
            pass  # what was not delivered ends below, on its handle
        finally:
            self._sender.stop()

    def __enter__(self) -> Producer:
        self._sender.check_usable()
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        # After an exception there is no reason to wait for long: what is under way may still arrive.
        self.close(timeout=None if kind is None else FAILED_BLOCK_TIMEOUT_S)

    def _call(self, api: Api, request: dict[str, Any], timeout_ms: int) -> dict[str, Any]:
        """Ask the appliance about topics, with the lock held. In `tailrace.aio` the answer is awaited."""
        return self._sender.connection.call_json(api, request, timeout_ms, lock=self._sender.lock)

    def _on_keyless_batch(self, info: TopicInfo) -> None:
        if isinstance(self._partitioner, DefaultPartitioner):
            name = info.delay_of or info.name
            self._routes.forget_keyless(name)
            self._partitioner.on_batch_sent(name, len(info.partitions))


def _sized(route: Route, key: Any, value: Any, headers: Headers, is_delayed: bool) -> tuple[bytes | None, Any, Headers, int]:
    """A record's parts as they are stored, and how many bytes they take in a batch. Raises InvalidRecordError, SchemaMismatchError, RecordTooLargeError."""
    if type(key) is not bytes and key is not None:
        key = bytes_of("key", key)
    if route.info.typed:
        size = row_size(value, route.info)
    else:
        if type(value) is not bytes and value is not None:
            value = bytes_of("value", value)
        size = len(value or b"") + len(key or b"") + RECORD_OVERHEAD_BYTES
    if is_delayed:
        size += DELAY_OVERHEAD_BYTES
    if headers:
        headers, header_bytes = checked_headers(headers)
        size += header_bytes
    if size > route.limit_bytes - BATCH_OVERHEAD_BYTES:
        raise RecordTooLargeError(
            f"a record of {size} bytes does not fit {route.limit_bytes} bytes, the smaller of the producer's max_request_size and the topic's "
            "max.message.bytes"
        )
    return key, value, headers, size
