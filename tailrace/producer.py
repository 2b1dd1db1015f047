"""The producer: records in, acknowledgements out.

The caller's own thread encodes and sends when a batch is full; a helper thread only looks after linger, retries and silence, so that the
caller's loop
does not fight another Python thread for the interpreter. One lock guards everything, the socket included; callbacks are made without it.

Order and count (KIP-98's idea): each batch carries producer id, epoch and sequence; the worker recognises what it has. When that is no
longer enough (an
unknown sequence, a batch given up whose fate is not known), the producer stops sending, waits until nothing is under way, takes a new
epoch and goes on
at sequence 0.

Invariants: every record ends exactly once: delivered, or with an error on its handle; batches of a partition are sent in order.
"""

from __future__ import annotations

import atexit
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tailrace.accumulator import (
    BATCH_OVERHEAD_BYTES,
    RECORD_OVERHEAD_BYTES,
    BatchesHandle,
    BatchState,
    Handle,
    OnDelivery,
    PartitionQueue,
    ProducerBatch,
    closed_error,
)
from tailrace.arrow_batch import Headers
from tailrace.connection import Connection
from tailrace.errors import (
    BufferExhaustedError,
    DeliveryTimeoutError,
    InvalidRecordError,
    NotReachableError,
    NotSupportedError,
    PartitionOutOfRangeError,
    RecordTooLargeError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.partitioners import DefaultPartitioner
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api
from tailrace.records import RecordMetadata, to_timestamp_us
from tailrace.settings import ProducerSettings, build
from tailrace.topics import TopicInfo, topics_from_metadata

if TYPE_CHECKING:
    from tailrace.arrow_frames import Frame

NS_PER_MS = 1_000_000
RETRY_BACKOFF_MAX_MS = 1_000
METADATA_AGE_NS = 300_000_000_000
CREDIT_ASK_NS = 50_000_000
EXIT_TIMEOUT_S = 30.0
_ACKS = {0: 0, 1: 1, "all": requests.ACKS_ALL}
_RESEND_CODES = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE})
_NEW_EPOCH_CODES = frozenset({ErrorCode.UNKNOWN_SEQUENCE})
_live_producers: weakref.WeakSet[Producer] = weakref.WeakSet()


def _forget_after_fork() -> None:
    """A child process has the producers' memory but not their threads, and shares their sockets: it must not use them."""
    for producer in list(_live_producers):
        producer._forked = True


os.register_at_fork(after_in_child=_forget_after_fork)


@atexit.register
def _close_at_exit() -> None:
    """A program that ends without close(): what it sent is still delivered, within reason."""
    for producer in list(_live_producers):
        if not producer._forked:
            producer.close(timeout=EXIT_TIMEOUT_S)


class Producer:
    """Sends records to topics. Thread-safe; a context manager; see `tailrace.settings.ProducerSettings` for its keyword arguments."""

    def __init__(self, bootstrap: str | None = None, **settings: Any) -> None:
        if bootstrap is not None:
            settings["bootstrap"] = bootstrap
        self.settings = build(ProducerSettings, settings)
        s = self.settings
        self._acks = _ACKS[s.acks]
        self._idempotent = s.enable_idempotence and s.acks != 0
        self._linger_ns = s.linger_ms * NS_PER_MS
        self._partitioner: Callable[[str, bytes | None, int], int] = s.partitioner or DefaultPartitioner()
        self._sticky = self._partitioner if isinstance(self._partitioner, DefaultPartitioner) else None
        self._lock = threading.RLock()
        self._connection = Connection(s.bootstrap, s.client_id)
        self._topics: dict[str, TopicInfo] = {}
        self._topic_age: dict[str, int] = {}
        self._queues: dict[tuple[bytes, int], PartitionQueue] = {}
        self._by_topic: dict[str, list[PartitionQueue]] = {}
        self._sendable: deque[PartitionQueue] = deque()
        self._lingering: deque[tuple[int, PartitionQueue, ProducerBatch]] = deque()
        self._buffered_bytes = 0
        self._in_flight_count = 0
        self._unended_count = 0
        self._order = 0
        self._callbacks: list[tuple[OnDelivery, RecordMetadata | None, TailraceError | None]] = []
        self._producer_id = -1
        self._epoch = -1
        self._asking_id = False
        self._needs_epoch = False
        self._asked_credit_ns = 0
        self._last_io_ns = 0
        self._expiry_checked_ns = 0
        self._warned: set[str] = set()
        self._closed = False
        self._forked = False
        self._counters = {"records_sent": 0, "batches_sent": 0, "bytes_sent": 0, "retries": 0, "errors": 0, "epoch_bumps": 0}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._helper_wakes_ns = 0
        self._driving = threading.Lock()
        self._helper = threading.Thread(target=self._help, name="tailrace-producer", daemon=True)
        self._helper.start()
        _live_producers.add(self)

    # ---- users -----------------------------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: bytes | str | dict[str, Any] | None = None,
        key: bytes | str | None = None,
        headers: Headers = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
        *,
        on_delivery: OnDelivery | None = None,
        deliver_at: datetime | None = None,
        deliver_after: timedelta | None = None,
    ) -> Handle:
        """Add one record to its partition's batch; sends the batch when it is full. Answers at once, unless `buffer_memory` is full.

        `value` and `key` are bytes (text is taken as UTF-8); on a typed topic `value` is a dict of column -> value.
        `on_delivery(metadata, error)` is called
        once the record has ended, in whatever thread finds out. Raises UnknownTopicError, PartitionOutOfRangeError, InvalidRecordError,
        RecordTooLargeError, BufferExhaustedError after `max_block_ms`, NotReachableError.
        """
        info = self._topics.get(topic) or self._load_topic(topic)
        if deliver_at is not None or deliver_after is not None:
            raise NotSupportedError("delayed delivery is not part of this version: send the record when it is due")
        if type(key) is not bytes and key is not None:
            key = _as_bytes("key", key)
        if info.typed:
            size = _row_size(value)
        else:
            if type(value) is not bytes and value is not None:
                value = _as_bytes("value", value)
            size = len(value or b"") + len(key or b"") + RECORD_OVERHEAD_BYTES
        if headers:
            headers, header_bytes = _checked_headers(headers)
            size += header_bytes
        partition_count = len(info.partitions)
        if partition is None:
            partition = self._partitioner(topic, key, partition_count)
        if not 0 <= partition < partition_count:
            raise PartitionOutOfRangeError(f"topic {topic!r} has partitions 0 to {partition_count - 1}, not {partition}")
        limit = min(self.settings.max_request_size, info.settings["max.message.bytes"])
        if size > limit - BATCH_OVERHEAD_BYTES:
            raise RecordTooLargeError(
                f"a record of {size} bytes does not fit {limit} bytes, the smaller of the producer's max_request_size and the topic's max.message.bytes"
            )
        stamp_us = time.time_ns() // 1000 if timestamp is None else _timestamp_us(timestamp)
        with self._lock:
            if self._closed or self._forked:
                raise self._unusable()
            if self._buffered_bytes + size > self.settings.buffer_memory:
                self._block_for_memory(size)
            queue = self._by_topic[topic][partition]
            batch = queue.open
            if batch is not None and batch.bytes_used + size > min(self.settings.batch_size, limit):
                self._close_batch(queue)
                batch = None
                self._pump()
            if batch is None:
                batch = self._open_batch(queue)
            row = batch.add(stamp_us, key, value, headers, size)
            self._buffered_bytes += size
            if on_delivery is not None:
                batch.callbacks = [*(batch.callbacks or []), (row, on_delivery)]
            if batch.bytes_used >= self.settings.batch_size:
                self._close_batch(queue)
                self._pump()
        if self._callbacks:
            self._make_callbacks()
        return Handle(self, batch, row)

    def send_arrow(
        self,
        topic: str,
        frame: Frame,
        *,
        key_column: str | None = None,
        partition: int | None = None,
        timestamp: datetime | int | None = None,
    ) -> BatchesHandle:
        """Send the rows of a pyarrow Table or RecordBatch, a pandas or polars frame; columns stay columns.

        The frame must have the columns of the topic's schema (types are cast where that is safe). Rows go to the partition that
        `key_column` says, by the
        hash of each value as text or bytes, or to `partition`, or all to one sticky partition. Their order is kept within each
        partition. Raises what `send` does, and
        SchemaMismatchError.
        """
        from tailrace import arrow_frames

        info = self._topics.get(topic) or self._load_topic(topic, lambda: arrow_frames.schema_message_of(frame))
        partition_count = len(info.partitions)
        if partition is not None and not 0 <= partition < partition_count:
            raise PartitionOutOfRangeError(f"topic {topic!r} has partitions 0 to {partition_count - 1}, not {partition}")
        stamp_us = time.time_ns() // 1000 if timestamp is None else _timestamp_us(timestamp)
        limit = min(self.settings.max_request_size, info.settings["max.message.bytes"])
        if partition is None and key_column is None:
            partition = self._partitioner(topic, None, partition_count)
        target_bytes = min(max(self.settings.batch_size, 4096), limit - BATCH_OVERHEAD_BYTES)
        handles = []
        choose = partial(self._partitioner, topic)
        for number, piece, piece_bytes in arrow_frames.cut(frame, info, key_column, partition, choose, target_bytes, stamp_us):
            handles.append(self._send_frame(topic, number, piece, piece_bytes, stamp_us))
        if self._callbacks:
            self._make_callbacks()
        return BatchesHandle(handles)

    def _send_frame(self, topic: str, partition: int, piece: Any, byte_count: int, stamp_us: int) -> Handle:
        from tailrace.arrow_batch import timestamp_range

        with self._lock:
            if self._closed or self._forked:
                raise self._unusable()
            if self._buffered_bytes + byte_count > self.settings.buffer_memory:
                self._block_for_memory(byte_count)
            queue = self._by_topic[topic][partition]
            self._close_batch(queue)  # rows sent before stay before
            batch = ProducerBatch(queue.info, partition, time.monotonic_ns(), self._next_order())
            batch.frame = piece
            batch.count = piece.num_rows
            batch.timestamps_us = list(timestamp_range(piece, stamp_us))
            batch.bytes_used = BATCH_OVERHEAD_BYTES + byte_count
            batch.state = BatchState.READY
            self._buffered_bytes += batch.bytes_used
            self._unended_count += 1
            queue.ready.append(batch)
            self._list(queue)
            self._pump()
        return Handle(self, batch, 0)

    def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until every record sent before this call has ended. Raises RequestTimeoutError; errors of records
        are on their handles.
        """
        with self._lock:
            if self._forked:
                raise self._unusable()
            batches = [batch for queue in self._queues.values() for batch in queue.batches()]
            self._close_all()
        deadline = None if timeout is None else time.monotonic() + timeout
        for batch in batches:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            BatchesHandle([Handle(self, batch, 0)]).exception(remaining)

    def partitions_for(self, topic: str) -> list[int]:
        """The topic's partition numbers. Raises UnknownTopicError."""
        info = self._topics.get(topic) or self._load_topic(topic)
        return list(range(len(info.partitions)))

    def metrics(self) -> dict[str, int]:
        """Counters since construction, and what is buffered and under way now."""
        with self._lock:
            return {**self._counters, "buffered_bytes": self._buffered_bytes, "batches_in_flight": self._in_flight_count}

    def close(self, timeout: float | None = None) -> None:
        """Flush, for at most `timeout` seconds (None: as long as delivery_timeout_ms lets records live), then end; what is left ends
        with ClientClosedError.
        """
        if self._closed:
            return
        if not self._forked:
            try:
                self.flush(timeout)
            except TailraceError:
                pass  # what was not delivered ends below, on its handle
        with self._lock:
            self._closed = True
            if not self._forked:
                for queue in self._queues.values():
                    for batch in queue.batches():
                        self._end(batch, None, closed_error())
                self._connection.process()
            self._connection.close()
        self._wake_helper()
        if not self._forked:
            self._make_callbacks()
            if threading.current_thread() is not self._helper:
                self._helper.join()
        os.close(self._wake_fd)

    def __enter__(self) -> Producer:
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        # After an exception there is no reason to wait for long: what is under way may still arrive.
        self.close(timeout=None if kind is None else 5.0)

    def _unusable(self) -> TailraceError:
        if self._forked:
            return error_for(
                ErrorCode.CLIENT_CLOSED, "this producer was made before fork() and cannot be used in the child; create one there"
            )
        return closed_error()

    # ---- topics ----------------------------------------------------------------------------------------------------------------------

    def _load_topic(self, topic: str, schema_message: Callable[[], bytes] | None = None) -> TopicInfo:
        """Metadata of a topic, asked for now. Raises UnknownTopicError, NotReachableError."""
        if not isinstance(topic, str):
            raise InvalidRecordError(f"topic is a {type(topic).__name__}; it must be text")
        with self._lock:
            if self._closed or self._forked:
                raise self._unusable()
            timeout_ms = self.settings.max_block_ms
            body = [requests.encode_json({"topics": [topic]})]
            try:
                answer = self._connection.call(Api.METADATA, body, timeout_ms)
                info = topics_from_metadata(requests.decode_json(answer.body[0]))[topic]
            except UnknownTopicError:
                if not self._connection.session.auto_create_topics:
                    raise
                info = self._create_topic(topic, schema_message, body, timeout_ms)
            self._adopt(info)
            if info.settings["durability"] == "memory" and self.settings.acks == "all" and topic not in self._warned:
                self._warned.add(topic)
                import warnings

                warnings.warn(f"topic {topic!r} has durability=memory: acks='all' does not wait for the disk", RuntimeWarning, stacklevel=4)
            return info

    def _create_topic(
        self, topic: str, schema_message: Callable[[], bytes] | None, metadata_body: list[bytes], timeout_ms: int
    ) -> TopicInfo:
        """An appliance that allows it (an embedded one) makes the topic that is missing; a frame brings its schema."""
        from tailrace.admin import create_request

        request = create_request(topic, schema_message=schema_message() if schema_message else None)
        answer = requests.decode_json(
            self._connection.call(Api.CREATE_TOPICS, [requests.encode_json({"topics": [request]})], timeout_ms).body[0]
        )
        for result in answer["results"]:
            if result["code"] not in (ErrorCode.OK, ErrorCode.TOPIC_EXISTS):
                raise error_for(ErrorCode(result["code"]), result.get("message", ""))
        described = self._connection.call(Api.METADATA, metadata_body, timeout_ms)
        return topics_from_metadata(requests.decode_json(described.body[0]))[topic]

    def _adopt(self, info: TopicInfo) -> None:
        """Use what is known of a topic now; queues of the same topic go on, those of a deleted one end with an error."""
        known = self._topics.get(info.name)
        if known is not None and known.topic_id != info.topic_id:
            for queue in self._by_topic[info.name]:
                for batch in queue.batches():
                    self._end(batch, None, UnknownTopicError(f"topic {info.name!r} was deleted and created again"))
                self._reset(queue)
                self._queues.pop((known.topic_id, queue.partition), None)
        queues = []
        for partition in range(len(info.partitions)):
            queue = self._queues.setdefault((info.topic_id, partition), PartitionQueue(info, partition))
            queue.info = info
            queues.append(queue)
        self._by_topic[info.name] = queues
        self._topics[info.name] = info

    @staticmethod
    def _reset(queue: PartitionQueue) -> None:
        queue.open = None
        queue.ready.clear()
        queue.in_flight.clear()

    # ---- accumulating ----------------------------------------------------------------------------------------------------------------

    def _open_batch(self, queue: PartitionQueue) -> ProducerBatch:
        now_ns = time.monotonic_ns()
        batch = queue.open = ProducerBatch(queue.info, queue.partition, now_ns, self._next_order())
        self._unended_count += 1
        self._buffered_bytes += BATCH_OVERHEAD_BYTES
        self._lingering.append((now_ns + self._linger_ns, queue, batch))
        if now_ns + self._linger_ns < self._helper_wakes_ns:
            self._wake_helper()
        return batch

    def _next_order(self) -> tuple[int, ...]:
        self._order += 1
        return (self._order,)

    def _close_batch(self, queue: PartitionQueue) -> None:
        batch = queue.open
        if batch is not None and queue.close_open():
            self._list(queue)
            if self._sticky is not None and batch.keys and batch.keys[-1] is None:
                self._sticky.on_batch_sent(queue.info.name, len(queue.info.partitions))

    def _close_all(self) -> None:
        for queue in self._queues.values():
            self._close_batch(queue)
        self._pump()

    def _list(self, queue: PartitionQueue) -> None:
        if not queue.is_listed:
            queue.is_listed = True
            self._sendable.append(queue)

    def _block_for_memory(self, size: int) -> None:
        """Wait, sending and receiving, until `size` bytes fit. Called with the lock held once. Raises BufferExhaustedError,
        RecordTooLargeError.
        """
        if size + BATCH_OVERHEAD_BYTES > self.settings.buffer_memory:
            raise RecordTooLargeError(f"{size} bytes can never fit buffer_memory ({self.settings.buffer_memory})")
        deadline_ns = time.monotonic_ns() + self.settings.max_block_ms * NS_PER_MS
        self._close_all()
        while self._buffered_bytes + size > self.settings.buffer_memory:
            now_ns = time.monotonic_ns()
            if now_ns >= deadline_ns:
                raise BufferExhaustedError(
                    f"buffer_memory ({self.settings.buffer_memory} bytes) stayed full for {self.settings.max_block_ms} ms"
                )
            self._lock.release()
            try:
                self._connection.wait(min(deadline_ns - now_ns, 20 * NS_PER_MS))
                self._make_callbacks()
            finally:
                self._lock.acquire()
            if self._closed:
                raise closed_error()
            self._pump()

    # ---- sending ---------------------------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Everything that can be done now: take in answers, send what is ready. With the lock held."""
        now_ns = self._last_io_ns = time.monotonic_ns()
        connection = self._connection
        connection.process()
        lingering = self._lingering
        while lingering and (lingering[0][0] <= now_ns or lingering[0][2].state is not BatchState.OPEN):
            _, queue, batch = lingering.popleft()
            if queue.open is batch:
                self._close_batch(queue)
        if now_ns - self._expiry_checked_ns > 20 * NS_PER_MS:
            self._expire(now_ns)
        connection.tick(now_ns)
        if not connection.is_ready:
            return
        if self._idempotent and (self._producer_id < 0 or self._needs_epoch):
            self._obtain_epoch()
            if self._producer_id < 0:
                return
        for _ in range(len(self._sendable)):
            queue = self._sendable.popleft()
            queue.is_listed = False
            if not self._send_from(queue, now_ns) and queue.ready:
                self._list(queue)
        connection.process()

    def _send_from(self, queue: PartitionQueue, now_ns: int) -> bool:
        """Send what the partition may have under way. False: something is left that an answer will not free (credit, a retry's pause)."""
        limit = self.settings.max_in_flight_requests_per_connection
        while queue.ready and len(queue.in_flight) < limit:
            if queue.muted_until_ns > now_ns:
                return False
            batch = queue.ready[0]
            if self._needs_epoch and not batch.was_sent:
                return False  # first learn what became of everything that was sent
            data = self._encoded(queue, batch)
            if data is None:
                continue
            if not self._connection.session.may_send(len(data)):
                self._ask_credit(len(data), now_ns)
                return False
            if self._idempotent and batch.producer_id < 0:
                batch.number(self._producer_id, self._epoch, queue.take_sequence(batch.count))
                assert batch.data is not None
                data = batch.data
            request = requests.ProduceRequest(queue.info.topic_id, queue.partition, self._acks, self.settings.request_timeout_ms)
            on_answer = partial(self._on_answer, queue, batch) if self._acks else None
            if not self._connection.request(Api.PRODUCE, [requests.encode_produce(request), data], on_answer):
                return False
            queue.ready.popleft()
            self._connection.session.sent_bytes += len(data)
            self._sent(queue, batch, len(data))
        return True

    def _sent(self, queue: PartitionQueue, batch: ProducerBatch, byte_count: int) -> None:
        batch.was_sent = True
        batch.attempts += 1
        counters = self._counters
        counters["batches_sent"] += 1
        counters["bytes_sent"] += byte_count
        counters["records_sent"] += batch.count
        if self._acks == 0:
            self._end(batch, None, None)
            return
        batch.state = BatchState.IN_FLIGHT
        queue.in_flight.append(batch)
        self._in_flight_count += 1

    def _encoded(self, queue: PartitionQueue, batch: ProducerBatch) -> bytearray | None:
        """The bytes of the first ready batch. None: it was split or failed; look at what is first now."""
        compression = self.settings.compression_type or queue.info.settings["compression.type"]
        try:
            data = batch.encode(compression)
        except TailraceError as error:
            queue.ready.popleft()
            self._end(batch, None, error)
            return None
        limit = min(max(self.settings.max_request_size, 4096), queue.info.settings["max.message.bytes"])
        if len(data) > limit and not batch.was_sent:
            queue.ready.popleft()
            halves = batch.split()
            if halves is None:
                self._end(batch, None, RecordTooLargeError(f"a record takes {len(data)} bytes as a batch; {limit} are allowed"))
            else:
                self._unended_count += 1
                queue.ready.extendleft(reversed(halves))
                batch.state = BatchState.ENDED
                if batch.waiter is not None:
                    batch.waiter.set()
            return None
        return data

    def _ask_credit(self, wanted: int, now_ns: int) -> None:
        if now_ns - self._asked_credit_ns > CREDIT_ASK_NS:
            self._asked_credit_ns = now_ns
            self._connection.request(Api.CREDIT, [requests.encode_credit(wanted)], None)

    def _obtain_epoch(self) -> None:
        """A producer id at first; a new epoch once nothing is under way."""
        if self._asking_id:
            return
        if self._needs_epoch and any(queue.in_flight or any(b.was_sent for b in queue.ready) for queue in self._queues.values()):
            return
        request: dict[str, int] = {}
        if self._producer_id >= 0:
            request = {"producer_id": self._producer_id, "producer_epoch": self._epoch}
        self._asking_id = self._connection.request(Api.INIT_PRODUCER_ID, [requests.encode_json(request)], self._on_epoch)

    def _on_epoch(self, response: Response | None) -> None:
        self._asking_id = False
        if response is None or response.code is not ErrorCode.OK:
            return  # asked again at the next turn
        answer = requests.decode_json(response.body[0])
        if self._needs_epoch:
            self._counters["epoch_bumps"] += 1
        self._producer_id, self._epoch = int(answer["producer_id"]), int(answer["producer_epoch"])
        self._needs_epoch = False
        for queue in self._queues.values():
            queue.next_sequence = 0
            for batch in queue.ready:
                batch.producer_id = -1
            if queue.ready:
                self._list(queue)

    # ---- answers ---------------------------------------------------------------------------------------------------------------------

    def _on_answer(self, queue: PartitionQueue, batch: ProducerBatch, response: Response | None) -> None:
        """A produce request was answered, or (None) its connection lost. Called by `Connection.process`, with the lock held."""
        if batch.state is not BatchState.IN_FLIGHT or batch not in queue.in_flight:
            return
        if response is not None and response.code is ErrorCode.OK:
            self._leave_flight(queue, batch)
            produced = requests.decode_produced(response.body[0])
            if queue.info.settings["message.timestamp.type"] == "LogAppendTime":
                batch.timestamps_us = [produced.append_time_us]
            self._end(batch, produced.base_offset, None)
        elif response is None:
            self._retry(queue, batch, ErrorCode.SESSION_UNKNOWN, "the connection was lost", pause=False)
        else:
            self._on_refusal(queue, batch, response)
        if queue.ready:
            self._list(queue)

    def _on_refusal(self, queue: PartitionQueue, batch: ProducerBatch, response: Response) -> None:
        code, detail = response.code, response.detail()
        error = error_for(code, detail)
        batch.was_sent = False  # refused: it was not appended
        if code in _NEW_EPOCH_CODES:
            # The worker knows nothing of what came before: take a new epoch once nothing is under way, then send this one again under it.
            self._needs_epoch = True
            self._retry(queue, batch, code, detail, pause=False)
        elif code in _RESEND_CODES or error.retriable:
            if code in _RESEND_CODES and queue.in_flight and queue.in_flight[0] is batch and not self._needs_epoch and batch.attempts > 3:
                self._needs_epoch = True
            self._retry(queue, batch, code, detail, pause=code not in _RESEND_CODES or queue.in_flight[0] is batch)
        else:
            self._leave_flight(queue, batch)
            if code is ErrorCode.UNKNOWN_TOPIC:
                self._topics.pop(queue.info.name, None)
            if self._idempotent:
                self._needs_epoch = True  # its sequence is missing for good
            self._end(batch, None, error)

    def _leave_flight(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        queue.in_flight.remove(batch)
        self._in_flight_count -= 1

    def _retry(self, queue: PartitionQueue, batch: ProducerBatch, code: ErrorCode, detail: str, *, pause: bool) -> None:
        """Put a batch back where it belongs among what is ready, or end it when its retries are used up."""
        self._leave_flight(queue, batch)
        if batch.attempts > self.settings.retries:
            if self._idempotent:
                self._needs_epoch = True
            self._end(batch, None, error_for(code, detail))
            return
        self._counters["retries"] += 1
        batch.state = BatchState.READY
        position = 0
        while position < len(queue.ready) and queue.ready[position].order < batch.order:
            position += 1
        queue.ready.insert(position, batch)
        if pause:
            base_ms = min(RETRY_BACKOFF_MAX_MS, self.settings.retry_backoff_ms << min(batch.attempts - 1, 10))
            queue.muted_until_ns = time.monotonic_ns() + int(base_ms * NS_PER_MS * random.uniform(0.8, 1.2))
        self._list(queue)

    def _end(self, batch: ProducerBatch, base_offset: int | None, error: TailraceError | None) -> None:
        if batch.state is BatchState.ENDED:
            return
        if error is not None:
            self._counters["errors"] += batch.count
        self._buffered_bytes -= batch.bytes_used
        self._unended_count -= 1
        self._callbacks += batch.end(base_offset, error)

    def _expire(self, now_ns: int) -> None:
        """End what has waited for delivery_timeout_ms. What may have reached a worker leaves a gap in the sequence: a new epoch."""
        self._expiry_checked_ns = now_ns
        if self._connection.fatal is not None:
            for queue in self._queues.values():
                for batch in queue.batches():
                    self._end(batch, None, self._connection.fatal)
                self._reset(queue)
            return
        oldest_ns = now_ns - self.settings.delivery_timeout_ms * NS_PER_MS
        for queue in self._queues.values():
            for batch in [b for b in queue.batches() if b.created_ns <= oldest_ns]:
                if batch in queue.in_flight:
                    self._leave_flight(queue, batch)
                elif queue.open is batch:
                    queue.open = None
                else:
                    queue.ready.remove(batch)
                if batch.was_sent and self._idempotent:
                    self._needs_epoch = True
                seconds = self.settings.delivery_timeout_ms / 1000
                if self._connection.is_ready or batch.was_sent:
                    self._end(batch, None, DeliveryTimeoutError(f"not acknowledged within {seconds:g} s"))
                else:
                    self._end(
                        batch, None, NotReachableError(f"not sent within {seconds:g} s: no appliance answers at {self.settings.bootstrap}")
                    )

    # ---- waiting ---------------------------------------------------------------------------------------------------------------------

    def _wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Until `batch` has ended (or split). Whoever comes first drives the connection, others wait on the batch. False: time is up."""
        deadline_ns = None if timeout is None else time.monotonic_ns() + int(timeout * 1e9)
        with self._lock:
            if self._forked:
                raise self._unusable()
            queue = self._queues.get((batch.info.topic_id, batch.partition))
            if queue is not None and queue.open is batch:
                self._close_batch(queue)  # a caller that waits has nothing to add
            self._pump()
        self._make_callbacks()
        while batch.state is not BatchState.ENDED:
            now_ns = time.monotonic_ns()
            if deadline_ns is not None and now_ns >= deadline_ns:
                return False
            if self._driving.acquire(blocking=False):
                try:
                    self._drive_once(now_ns, deadline_ns)
                finally:
                    self._driving.release()
            else:
                with self._lock:
                    if batch.waiter is None:
                        batch.waiter = threading.Event()
                    waiter = batch.waiter
                if waiter is not None:
                    waiter.wait(0.02 if deadline_ns is None else min(0.02, (deadline_ns - now_ns) / 1e9))
            self._make_callbacks()
        return True

    def _drive_once(self, now_ns: int, deadline_ns: int | None) -> None:
        with self._lock:
            self._pump()
            wake_ns = self._next_wake_ns(now_ns)
        if deadline_ns is not None:
            wake_ns = min(wake_ns, deadline_ns)
        if self._in_flight_count or self._asking_id or not self._connection.is_ready:
            self._connection.wait(min(wake_ns - time.monotonic_ns(), 50 * NS_PER_MS))
        elif self._unended_count:
            self._connection.wait(min(wake_ns - time.monotonic_ns(), 5 * NS_PER_MS))
        with self._lock:
            if not self._closed:
                self._pump()

    def _next_wake_ns(self, now_ns: int) -> int:
        """When there is something to do without an answer."""
        times = [now_ns + 1_000 * NS_PER_MS]
        tick_ns = self._connection.next_tick_ns()
        if tick_ns is not None:
            times.append(tick_ns)
        if self._lingering:
            times.append(self._lingering[0][0])
        times += [queue.muted_until_ns for queue in self._sendable if queue.muted_until_ns > now_ns]
        if self._sendable and self._connection.is_ready:
            times.append(now_ns + 20 * NS_PER_MS)  # waiting for credit
        if self._unended_count:
            times.append(now_ns + 100 * NS_PER_MS)
        return min(times)

    def _make_callbacks(self) -> None:
        """Call on_delivery, without the lock: a callback may send."""
        while self._callbacks:
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
            for callback, metadata, error in callbacks:
                callback(metadata, error)

    # ---- helper ----------------------------------------------------------------------------------------------------------------------

    def _wake_helper(self) -> None:
        try:
            os.eventfd_write(self._wake_fd, 1)
        except (BlockingIOError, OSError):
            pass

    def _help(self) -> None:
        """The helper thread: linger, retries, silence; answers only while no caller looks after them."""
        while True:
            with self._lock:
                if self._closed or self._forked:
                    return
                now_ns = time.monotonic_ns()
                caller_is_active = now_ns - self._last_io_ns < 3 * NS_PER_MS
                linger_due = bool(self._lingering) and self._lingering[0][0] <= now_ns
                if not caller_is_active or linger_due:
                    last_io_ns = self._last_io_ns
                    self._pump()
                    self._last_io_ns = last_io_ns if caller_is_active else self._last_io_ns
                wake_ns = self._next_wake_ns(now_ns)
                waits_for_answers = self._in_flight_count or self._asking_id or not self._connection.is_ready
                if caller_is_active:
                    wake_ns = min(wake_ns, now_ns + 5 * NS_PER_MS) if self._unended_count else wake_ns
                self._helper_wakes_ns = wake_ns
            self._make_callbacks()
            remaining_ns = max(NS_PER_MS, wake_ns - time.monotonic_ns())
            if waits_for_answers and not caller_is_active and not self._driving.locked():
                self._connection.wait(remaining_ns, self._wake_fd)
            else:
                _sleep_on(self._wake_fd, remaining_ns)
            try:
                os.eventfd_read(self._wake_fd)
            except (BlockingIOError, OSError):
                pass


def _sleep_on(fd: int, timeout_ns: int) -> None:
    import select

    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(max(0, -(-timeout_ns // NS_PER_MS)))


def _as_bytes(part: str, value: object) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    if isinstance(value, bytes):
        return value
    raise InvalidRecordError(f"{part} is a {type(value).__name__}; on this topic it must be bytes or text")


def _row_size(value: object) -> int:
    if not isinstance(value, dict):
        raise InvalidRecordError(f"value is a {type(value).__name__}; on a typed topic it must be a dict of column -> value")
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
    except TypeError as error:
        raise InvalidRecordError(str(error)) from None
