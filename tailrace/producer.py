"""The producer: records in, acknowledgements out. What is under way is the sender's (`tailrace.sender`).

Invariants: every record ends exactly once: delivered, or with an error on its handle; records of a partition keep the order of their `send` calls.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from time import time_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from tailrace import live_clients
from tailrace.accumulator import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    BatchesHandle,
    BatchState,
    Handle,
    OnDelivery,
    PartitionQueue,
    ProducerBatch,
)
from tailrace.arrow_batch import Headers
from tailrace.delays import DUE_COLUMN, due_time_us
from tailrace.environment import REAL, Environment
from tailrace.errors import (
    DelayNotEnabledError,
    InvalidRecordError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    SchemaMismatchError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.partitioners import DefaultPartitioner
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api
from tailrace.records import to_timestamp_us
from tailrace.recurrence import Recurrence, RecurrenceError
from tailrace.sender import Sender
from tailrace.settings import ProducerOptions, ProducerSettings, build, merged
from tailrace.topics import TopicInfo, topics_from_metadata

if TYPE_CHECKING:
    from tailrace.arrow_frames import Frame, Piece

EXIT_TIMEOUT_S = 30.0
KNOWN_KEYS_MAX = 100_000
DELAY_OVERHEAD_BYTES = 32
"""What a record's due time, and the room for what may replace it, take in a delay log's batch."""
_live_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


@atexit.register
def close_at_exit() -> None:
    """A program that ends without close(): what it sent is still delivered, within EXIT_TIMEOUT_S for all producers together."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    for producer in list(_live_producers):
        producer.close(timeout=max(0.0, deadline - time.monotonic()))


class Delay(NamedTuple):
    """When a record is to be delivered."""

    at: datetime | None
    after: timedelta | None
    repeat: Recurrence | None


def _first_occurrence(delay: Delay, now_us: int) -> datetime:
    """Of a recurring record: when it was asked to begin, else its first time from now on. Raises InvalidRecordError."""
    if not isinstance(delay.repeat, Recurrence):
        raise InvalidRecordError(f"repeat is a {type(delay.repeat).__name__}; it must be a tailrace.Recurrence")
    try:
        delay.repeat.checked()
        first_us = delay.repeat.after(now_us)
    except RecurrenceError as error:
        raise InvalidRecordError(str(error)) from None
    if delay.at is not None or delay.after is not None:
        first_us = due_time_us(delay.at, delay.after, now_us)
    if first_us is None:
        raise InvalidRecordError("repeat has no occurrence in the future")
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=first_us)


class Producer:
    """Sends records to topics. Thread-safe; a context manager; see `tailrace.settings.ProducerSettings` for its keyword arguments."""

    def __init__(
        self, bootstrap: str | Mapping[str, Any] | None = None, *, environment: Environment = REAL, **settings: Unpack[ProducerOptions]
    ) -> None:
        """`bootstrap`: the address, or a dict of settings with Kafka's names (`{"bootstrap.servers": "localhost:7420", "linger.ms": 5}`). Raises
        InvalidSettingError.
        """
        first = bootstrap if isinstance(bootstrap, Mapping) or bootstrap is None else {"bootstrap": bootstrap}
        self.settings = build(ProducerSettings, merged(first, settings))
        self._serializes = self.settings.key_serializer is not None or self.settings.value_serializer is not None
        chosen = self.settings.partitioner
        self._partitioner: Callable[[str, bytes | None, int], int] = chosen or DefaultPartitioner()
        self._sender = Sender(self.settings, self._on_keyless_batch, environment)
        self._topics: dict[str, TopicInfo] = {}
        self._by_topic: dict[str, list[PartitionQueue]] = {}
        self._known: dict[str, dict[object, tuple[PartitionQueue, bytes | None, int]]] = {}
        """topic -> key -> (where its records go, the key, what a record takes beside its value): choices of the default partitioner."""
        self._acquire, self._release = self._sender.lock.acquire, self._sender.lock.release
        self._warned: set[str] = set()
        _live_producers.add(self)
        live_clients.add(self)

    def after_fork(self) -> None:
        """In a child: every way into `send` leads to ClientClosedError."""
        self._known.clear()
        self._sender.after_fork()

    # ---- users -----------------------------------------------------------------------------------------------------------------------

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
        """Add one record to its partition's batch; sends the batch when it is full. Answers at once, unless `buffer_memory` is full.

        `value` and `key` are bytes (text is taken as UTF-8), or what the serializers take; on a typed topic `value` is a dict of column -> value.
        `on_delivery(metadata, error)` is called once the record has ended, in whatever thread finds out.
        On a topic with `delay.enabled`, `deliver_at` (a datetime with a time zone) or `deliver_after` has it delivered then, and `repeat` again and again from
        then on; its metadata has a `delay_id` and no offset.

        Raises UnknownTopicError, PartitionOutOfRangeError, InvalidRecordError, RecordTooLargeError, NotReachableError, and
        BufferExhaustedError after `max_block_ms`.
        """
        # Most records are a few bytes for a key that was seen before, in a batch that has room: this much is done for each of them, and no more.
        if (
            type(value) is bytes and headers is None and partition is None and timestamp is None and on_delivery is None and deliver_at is None
            and deliver_after is None and repeat is None
        ):  # fmt: skip
            try:
                queue, key, byte_count = self._known[topic][key]
            except (KeyError, TypeError):
                pass
            else:
                self._acquire()
                try:
                    batch = queue.open
                    if batch is not None and (room := batch.room - len(value) - byte_count) > 0:
                        batch.room = room
                        rows = batch.rows
                        rows += (key, value, time_ns())
                        return Handle((batch, len(rows)))
                finally:
                    self._release()
        delay = None if deliver_at is None and deliver_after is None and repeat is None else Delay(deliver_at, deliver_after, repeat)
        if self._serializes:
            key, value = self._serialized("key", key), self._serialized("value", value)
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

    def _serialized(self, part: str, given: Any) -> Any:
        """What a serializer makes of a key or value. Raises InvalidRecordError."""
        serializer = self.settings.key_serializer if part == "key" else self.settings.value_serializer
        if serializer is None or given is None:
            return given
        try:
            return serializer(given)
        except Exception as error:
            raise InvalidRecordError(f"{part}_serializer failed: {type(error).__name__}: {error}") from error

    def _send_any(
        self,
        topic: str,
        value: bytes | str | dict[str, Any] | None,
        key: bytes | str | None,
        headers: Headers,
        partition: int | None,
        timestamp: datetime | int | None,
        on_delivery: OnDelivery | None,
        delay: Delay | None,
    ) -> Handle:
        """A record that needs more thought: see `send`."""
        sender = self._sender
        info = self._topics.get(topic) or self._load_topic(topic)
        due_us, target = 0, topic
        if delay is not None:
            info, due_us = self._delayed(info, delay)
            target = info.name
        if type(key) is not bytes and key is not None:
            key = _as_bytes("key", key)
        if info.typed:
            size = _row_size(value, info)
        else:
            if type(value) is not bytes and value is not None:
                value = _as_bytes("value", value)
            size = len(value or b"") + len(key or b"") + RECORD_OVERHEAD_BYTES
        if delay is not None:
            size += DELAY_OVERHEAD_BYTES
        if headers:
            headers, header_bytes = _checked_headers(headers)
            size += header_bytes
        partition_count = len(info.partitions)
        is_default_choice = (
            partition is None and not info.typed and not self._serializes and isinstance(self._partitioner, DefaultPartitioner)
        )
        if partition is None:
            partition = self._partitioner(topic, key, partition_count)
        if not 0 <= partition < partition_count:
            raise PartitionOutOfRangeError(f"topic {topic!r} has partitions 0 to {partition_count - 1}, not {partition}")
        limit = min(self.settings.max_request_size, info.settings["max.message.bytes"])
        if size > limit - BATCH_OVERHEAD_BYTES:
            raise RecordTooLargeError(
                f"a record of {size} bytes does not fit {limit} bytes, the smaller of the producer's max_request_size and the topic's max.message.bytes"
            )
        stamp_us = None if timestamp is None else _timestamp_us(timestamp)
        with sender.lock:
            sender.check_usable()
            queue = self._by_topic[target][partition]
            if queue.is_gone:
                self._topics.pop(topic, None)
                self._known.pop(topic, None)
                return self._send_any(topic, value, key, headers, partition, timestamp, on_delivery, delay)
            batch = queue.open
            capacity = min(self.settings.batch_size, limit)
            if batch is not None and batch.reserved_bytes - batch.room + size > capacity:
                sender.close_batch(queue)
                batch = None
                sender.pump()
            if (batch is None or batch.room < size) and sender.buffered_bytes + size + BATCH_OVERHEAD_BYTES > self.settings.buffer_memory:
                sender.block_for_memory(size)
                batch = queue.open
            is_new = batch is None
            if batch is None:
                batch = sender.open_batch(queue)
            if batch.room < size:
                sender.reserve(batch, size, capacity)
            row = batch.add(time_ns(), stamp_us, key, value, headers, size)
            if delay is not None:
                batch.dues_us.append(due_us)  # type: ignore[union-attr]
                if delay.repeat is not None:
                    batch.repeats = {**(batch.repeats or {}), row: delay.repeat.to_json()}
            if on_delivery is not None:
                batch.callbacks = [*(batch.callbacks or []), (row, on_delivery)]
            if batch.reserved_bytes - batch.room >= self.settings.batch_size:
                sender.close_batch(queue)
                sender.pump()
            else:
                if is_default_choice:
                    self._remember(topic, key, self._by_topic[topic][partition])
                if is_new:
                    sender.see_to(queue)
        if sender.callbacks:
            sender.make_callbacks()
        return Handle((batch, 3 * (row + 1)))

    def _send_delayed(self, topic: str, value: bytes, key: object, delay: Delay) -> Handle | None:
        """A delayed record for a key that was seen before, in a batch that has room; None: it needs more thought. Raises InvalidRecordError."""
        info = self._topics.get(topic)
        known = self._known.get(topic)
        if info is None or known is None or delay.repeat is not None or info.delay_log is None:
            return None
        settings = info.settings
        if not settings["delay.enabled"] or settings["delay.levels"]:
            return None
        stamp_ns = time_ns()
        due_us = due_time_us(delay.at, delay.after, stamp_ns // 1000)
        try:
            chosen, key, byte_count = known[key]
        except (KeyError, TypeError):
            return None
        queue = self._by_topic[info.delay_log.name][chosen.partition]
        with self._sender.lock:
            batch = queue.open
            if batch is None or (room := batch.room - len(value) - byte_count - DELAY_OVERHEAD_BYTES) <= 0:
                return None
            batch.room = room
            rows = batch.rows
            rows += (key, value, stamp_ns)
            batch.dues_us.append(due_us)  # type: ignore[union-attr]
            return Handle((batch, len(rows)))

    def _delayed(self, info: TopicInfo, delay: Delay) -> tuple[TopicInfo, int]:
        """(the topic's delay log, when the record is due). Raises DelayNotEnabledError, InvalidRecordError."""
        if info.delay_log is None or not info.settings["delay.enabled"]:
            info = self._load_topic(info.name)  # it may have been enabled since
            if info.delay_log is None or not info.settings["delay.enabled"]:
                raise DelayNotEnabledError(f"topic {info.name!r} takes no delayed records: delay.enabled is false")
        now_us = time_ns() // 1000
        if delay.repeat is not None:
            first = _first_occurrence(delay, now_us)
            return info.delay_log, due_time_us(first, None, now_us)
        return info.delay_log, due_time_us(delay.at, delay.after, now_us, info.settings["delay.levels"])

    def _remember(self, topic: str, key: bytes | None, queue: PartitionQueue) -> None:
        """What the default partitioner has chosen. Without a key that is until its batch is closed."""
        known = self._known.setdefault(topic, {})
        if len(known) >= KNOWN_KEYS_MAX:
            known.clear()
        known[key] = queue, key, len(key or b"") + RECORD_OVERHEAD_BYTES

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
        """Send the rows of a pyarrow Table or RecordBatch, a pandas or polars frame; columns stay columns.

        The frame must have the columns of the topic's schema (types are cast where that is safe). Rows go to the partition that
        `key_column` says, by the
        hash of each value as text or bytes, or to `partition`, or all to one sticky partition. Their order is kept within each
        partition. `deliver_at` or `deliver_after` delay all rows; `delay_column` names a column, not one of the topic's, of timestamps or durations that says
        it for each. Raises what `send` does, and SchemaMismatchError.
        """
        from tailrace import arrow_frames

        self._sender.check_usable()
        info = self._topics.get(topic) or self._load_topic(topic, lambda: arrow_frames.schema_message_of(frame))
        partition_count = len(info.partitions)
        if partition is not None and not 0 <= partition < partition_count:
            raise PartitionOutOfRangeError(f"topic {topic!r} has partitions 0 to {partition_count - 1}, not {partition}")
        stamp_us = time.time_ns() // 1000 if timestamp is None else _timestamp_us(timestamp)
        target = topic
        if deliver_at is not None or deliver_after is not None or delay_column is not None:
            if delay_column is not None and (deliver_at is not None or deliver_after is not None):
                raise InvalidRecordError("delay_column is given beside deliver_at or deliver_after; a row has one due time")
            delay_log, due_us = self._delayed(info, Delay(deliver_at, timedelta(0) if delay_column is not None else deliver_after, None))
            frame = arrow_frames.with_due_times(frame, delay_column, due_us, info.settings["delay.levels"])
            info, target = delay_log, delay_log.name
        limit = min(self.settings.max_request_size, info.settings["max.message.bytes"])
        if partition is None and key_column is None:
            partition = self._partitioner(topic, None, partition_count)
        target_bytes = min(max(self.settings.batch_size, 4096), limit - BATCH_OVERHEAD_BYTES)
        handles = []
        choose = partial(self._partitioner, topic)
        for piece in arrow_frames.cut(frame, info, key_column, partition, choose, target_bytes, stamp_us):
            handles.append(self._send_piece(target, piece))
        if self._sender.callbacks:
            self._sender.make_callbacks()
        return BatchesHandle(handles)

    def _send_piece(self, topic: str, piece: Piece) -> Handle:
        with self._sender.lock:
            self._sender.check_usable()
            if self._sender.buffered_bytes + piece.byte_count > self.settings.buffer_memory:
                self._sender.block_for_memory(piece.byte_count)
            queue = self._by_topic[topic][piece.partition]
            self._sender.close_batch(queue)  # rows sent before stay before
            batch = ProducerBatch(self._sender, queue.info, piece.partition, self._sender.now_ns(), self._sender.next_order())
            batch.frame = piece.batch
            if queue.info.delay_of:
                batch.dues_us = piece.batch.column(DUE_COLUMN).to_numpy()
            batch.count = piece.batch.num_rows
            batch.stamps_us = piece.stamps_us
            batch.reserved_bytes = BATCH_OVERHEAD_BYTES + piece.byte_count
            batch.state = BatchState.READY
            self._sender.buffered_bytes += batch.reserved_bytes
            self._sender.unended_count += 1
            queue.ready.append(batch)
            self._sender.enlist(queue)
            self._sender.pump()
        return batch.first_handle

    def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until every record sent before this call has ended. Raises RequestTimeoutError; errors of records
        are on their handles.
        """
        with self._sender.lock:
            self._sender.check_usable()
            batches = [batch for queue in self._sender.queues.values() for batch in queue.batches()]
            self._sender.close_all()
        deadline = None if timeout is None else time.monotonic() + timeout
        for batch in batches:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            BatchesHandle([batch.first_handle]).exception(remaining)
        self._sender.wait_until_received(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers. Raises UnknownTopicError."""
        self._sender.check_usable()
        info = self._topics.get(topic) or self._load_topic(topic)
        return list(range(len(info.partitions)))

    def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and under way now."""
        with self._sender.lock:
            return {
                **self._sender.counters,
                "buffered_bytes": self._sender.buffered_bytes,
                "batches_in_flight": self._sender.in_flight_count,
            }

    def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds (None: as long as delivery_timeout_ms lets records live), then end; what is left ends
        with ClientClosedError.
        """
        if self._sender.closed or self._sender.forked:
            return
        try:
            self.flush(timeout)
        except TailraceError:
            pass  # what was not delivered ends below, on its handle
        finally:
            self._sender.stop()

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        # After an exception there is no reason to wait for long: what is under way may still arrive.
        self.close(timeout=None if kind is None else 5.0)

    def _on_keyless_batch(self, info: TopicInfo) -> None:
        if isinstance(self._partitioner, DefaultPartitioner):
            name = info.delay_of or info.name
            self._known.get(name, {}).pop(None, None)
            self._partitioner.on_batch_sent(name, len(info.partitions))

    # ---- topics ----------------------------------------------------------------------------------------------------------------------

    def _load_topic(self, topic: str, schema_message: Callable[[], bytes] | None = None) -> TopicInfo:
        """Metadata of a topic, asked for now. Raises UnknownTopicError, NotReachableError."""
        if not isinstance(topic, str):
            raise InvalidRecordError(f"topic is a {type(topic).__name__}; it must be text")
        with self._sender.lock:
            self._sender.check_usable()
            timeout_ms = self.settings.max_block_ms
            wanted = {"topics": [topic]}
            try:
                info = self._described(topic, wanted, timeout_ms)
            except UnknownTopicError:
                if not self._sender.connection.session.auto_create_topics:
                    raise
                info = self._create_topic(topic, schema_message, wanted, timeout_ms)
            self._adopt(info)
            if info.settings["durability"] == "memory" and self.settings.acks == "all" and topic not in self._warned:
                self._warned.add(topic)
                import warnings

                warnings.warn(f"topic {topic!r} has durability=memory: acks='all' does not wait for the disk", RuntimeWarning, stacklevel=4)
            return info

    def _create_topic(self, topic: str, schema_message: Callable[[], bytes] | None, wanted: dict[str, Any], timeout_ms: int) -> TopicInfo:
        """An appliance that allows it (an embedded one) makes the topic that is missing; a frame brings its schema."""
        from tailrace.new_topic import create_request

        request = create_request(topic, schema_message=schema_message() if schema_message else None)
        answer = self._sender.connection.call_json(Api.CREATE_TOPICS, {"topics": [request]}, timeout_ms, lock=self._sender.lock)
        for result in answer["results"]:
            if result["code"] not in (ErrorCode.OK, ErrorCode.TOPIC_EXISTS):
                raise error_for(ErrorCode(result["code"]), result.get("message", ""))
        return self._described(topic, wanted, timeout_ms)

    def _described(self, topic: str, wanted: dict[str, Any], timeout_ms: int) -> TopicInfo:
        connection = self._sender.connection
        return topics_from_metadata(connection.call_json(Api.METADATA, wanted, timeout_ms, lock=self._sender.lock), topic)[topic]

    def _adopt(self, info: TopicInfo) -> None:
        """Use what is known of a topic now; queues of the same topic go on, those of a deleted one end with an error."""
        known = self._topics.get(info.name)
        if known is not None and known.topic_id != info.topic_id:
            for queue in self._by_topic[info.name]:
                for batch in queue.batches():
                    self._sender.end(batch, None, UnknownTopicError(f"topic {info.name!r} was deleted and created again"))
                self._sender.reset(queue)
                self._sender.queues.pop((known.topic_id, queue.partition), None)
        queues = []
        for partition in range(len(info.partitions)):
            queue = self._sender.queues.setdefault((info.topic_id, partition), PartitionQueue(info, partition))
            queue.info = info
            queue.is_gone = False
            queues.append(queue)
        self._by_topic[info.name] = queues
        self._known.pop(info.name, None)
        self._topics[info.name] = info
        if info.delay_log is not None:
            self._adopt(info.delay_log)


def _as_bytes(part: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, bytes):
        return value
    raise InvalidRecordError(f"{part} is a {type(value).__name__}; on this topic it must be bytes or text or have a {part}_serializer")


def _row_size(value: object, info: TopicInfo) -> int:
    if not isinstance(value, dict):
        raise InvalidRecordError(f"value is a {type(value).__name__}; on a typed topic it must be a dict of column -> value")
    if not info.columns.issuperset(value):
        unknown = ", ".join(repr(name) for name in value if name not in info.columns)
        raise SchemaMismatchError(
            f"the row has {unknown[:200]}, which topic {info.delay_of or info.name!r} has not; its columns are {', '.join(sorted(info.columns))[:300]}"
        )
    return 16 * len(value) + sum(len(v) if isinstance(v, (bytes, str, list, tuple)) else 8 for v in value.values())


def _checked_headers(headers: object) -> tuple[Sequence[tuple[str, bytes]], int]:
    """The headers as (text, bytes) pairs, and the bytes they take."""
    checked = []
    size = 0
    try:
        for name, value in headers:  # type: ignore[attr-defined]
            if not isinstance(name, str) or not isinstance(value, (bytes, bytearray, memoryview, type(None))):
                raise InvalidRecordError(
                    f"header {name!r} is a pair of {type(name).__name__} and {type(value).__name__}; it must be (str, bytes)"
                )
            checked.append((name, None if value is None else bytes(value)))
            size += len(name) + len(value or b"") + 16
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRecordError):
            raise
        raise InvalidRecordError("headers must be a list of (str, bytes) pairs") from None
    return checked, size  # type: ignore[return-value]


def _timestamp_us(value: datetime | int) -> int:
    try:
        return to_timestamp_us(value)
    except (TypeError, ValueError) as error:
        raise InvalidRecordError(str(error)) from None
