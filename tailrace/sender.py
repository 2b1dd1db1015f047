"""What a producer has under way: batches waiting, in flight, to be sent again; the producer's identity; and the helper thread.

The caller's own thread encodes and sends when a batch is full; a helper thread only looks after linger, retries and silence, so that the caller's loop
does not fight another Python thread for the interpreter. One lock guards everything, the socket included; callbacks are made without it.

Order and count (KIP-98's idea): each batch carries producer id, epoch and sequence; the worker recognises what it has. When that is no longer enough
(an unknown sequence, a batch given up whose fate is not known), nothing new is sent until the fate of everything that was sent is known; then comes a new
epoch, and sequences begin at 0.

A user's callback that raises is logged and costs nobody else anything; the helper thread logs what it did not expect and goes on, and when it cannot, every
handle ends with the error.

Owner: one Producer; every method but `wait_for`, `make_callbacks`, `stop` and those marked so is called with `lock` held.
Invariants: a batch ends exactly once; batches of a partition are sent in order; `buffered_bytes` is the sum over batches that have not ended; each callback
    is called at most once, and none is skipped for what another raised.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from tailrace import live_clients
from tailrace.accumulator import BATCH_OVERHEAD_BYTES, BatchState, Handle, OnDelivery, PartitionQueue, ProducerBatch, closed_error
from tailrace.connection import Connection
from tailrace.environment import REAL, Environment, sleep_on
from tailrace.errors import (
    BufferExhaustedError,
    DeliveryTimeoutError,
    InvalidRecordError,
    NotReachableError,
    RecordTooLargeError,
    TailraceError,
    error_for,
)
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api
from tailrace.records import RecordMetadata
from tailrace.settings import ProducerSettings
from tailrace.structure import ROWS_FREE, is_too_large_unpacked
from tailrace.topics import TopicInfo

logger = logging.getLogger("tailrace")

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
RETRY_BACKOFF_MAX_MS = 1_000
CREDIT_ASK_NS = 50_000_000
RECEIVED_TIMEOUT_MS = 5_000
HELPER_FAILURES_MAX = 10
"""So often in a row the helper thread may fail in what nobody expected; then the producer fails."""
HELPER_PAUSE_NS = 100 * NS_PER_MS
BUSY_BATCHES = 16
FAST_RECORDS_PER_S = 100_000
SMALL_BATCHES_PER_S = 400
"""A producer that takes records faster than that sends at most so many batches a second that are not full: between 64 partitions or 200 topics it would
spend itself on what each batch costs (see docs/performance.md).
"""
LOAD_CHECK_NS = 20 * NS_PER_MS
RESERVE_BYTES = 64 << 10
"""How much buffer memory an open batch takes at a time: between, a record is added without looking at what others need."""
_ACKS = {0: 0, 1: 1, "all": requests.ACKS_ALL}
_RESEND_CODES = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE})
_FATE_UNKNOWN_CODES = frozenset({ErrorCode.TIMED_OUT, ErrorCode.STORAGE_ERROR})
_NEW_EPOCH_CODES = frozenset({ErrorCode.UNKNOWN_SEQUENCE})


class Sender:
    """See the module's docstring."""

    def __init__(self, settings: ProducerSettings, on_keyless_batch: Callable[[TopicInfo], None], environment: Environment = REAL) -> None:
        """`on_keyless_batch`: told when a batch that ended with a record without a key takes no more."""
        self._settings = settings
        self._environment = environment
        self.now_ns = environment.monotonic_ns
        self._on_keyless_batch = on_keyless_batch
        self._acks = _ACKS[settings.acks]
        self._idempotent = settings.enable_idempotence and settings.acks != 0
        self._linger_ns = settings.linger_ms * NS_PER_MS
        self.lock = threading.RLock()
        self.connection = Connection(settings.bootstrap, settings.client_id, environment, "producer")
        self.queues: dict[tuple[bytes, int], PartitionQueue] = {}
        self._sendable: deque[PartitionQueue] = deque()
        self._lingering: deque[tuple[int, PartitionQueue, ProducerBatch]] = deque()
        self._held_ns = 0
        """How long beyond linger_ms open batches fill now, because records come so fast."""
        self._closed_records = 0
        """How many records were in batches that filled, or filled long enough."""
        self._load_checked = 0, 0
        """When the load was looked at, and how many records there had been."""
        self.buffered_bytes = 0
        self.in_flight_count = 0
        self.unended_count = 0
        self._order = 0
        self.callbacks: list[tuple[OnDelivery, RecordMetadata | None, TailraceError | None]] = []
        self._producer_id = -1
        self._epoch = -1
        self._asking_id = False
        self._needs_epoch = False
        self._unconfirmed = False
        """With acks=0: something was sent that the front may not have read."""
        self._asked_credit_ns = 0
        self._last_io_ns = 0
        self._expiry_checked_ns = 0
        self.closed = False
        self.forked = False
        self.failure: TailraceError | None = None
        """What stopped the helper thread for good: nothing can be sent any more."""
        self.counters = {"records_sent": 0, "batches_sent": 0, "bytes_sent": 0, "retries": 0, "errors": 0, "epoch_bumps": 0}
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._helper_wakes_ns = 0
        self._driving = threading.Lock()
        self._driver = 0
        """The thread that sleeps for an answer, 0: none. Whoever else looks at the socket wakes it: the answer may have come to them."""
        self._driver_is_rung = False
        self._driver_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        _load_what_exit_cannot()
        self._helper = threading.Thread(target=self._help, name="tailrace-producer", daemon=True)
        if environment.has_threads:
            self._helper.start()

    def check_usable(self) -> None:
        """Raise ClientClosedError when closed, or made before a fork."""
        if self.forked:
            raise live_clients.forked_error("producer")
        if self.closed:
            raise closed_error()
        if self.failure is not None:
            raise self.failure

    def after_fork(self) -> None:
        """In a child: nothing can be sent. What the parent's threads held is free; the eventfds are shared with the parent, so nobody rings them here."""
        self.forked = True
        live_clients.free_in_child(self.lock)
        self._wake_fd = self._driver_fd = -1

    def stop(self) -> None:
        """End everything: what has not ended, ends with ClientClosedError; the helper thread and the socket go. Called without the lock."""
        with self.lock:
            if self.closed or self.forked:
                self.closed = True
                return
            self.closed = True
            self._end_all(closed_error())
            self.connection.process()
            self.connection.close()
            self._wake_helper()
        try:
            self.make_callbacks()
        finally:
            if self._helper.is_alive() and threading.current_thread() is not self._helper:
                self._helper.join()
            with self.lock:
                fds, self._wake_fd, self._driver_fd = (self._wake_fd, self._driver_fd), -1, -1
            for fd in fds:
                os.close(fd)

    def _end_all(self, error: TailraceError) -> None:
        for queue in self.queues.values():
            for batch in queue.batches():
                self.end(batch, None, error)
            self.reset(queue)

    @staticmethod
    def reset(queue: PartitionQueue) -> None:
        queue.open = None
        queue.ready.clear()
        queue.in_flight.clear()

    # ---- accumulating ----------------------------------------------------------------------------------------------------------------

    def open_batch(self, queue: PartitionQueue) -> ProducerBatch:
        now_ns = self.now_ns()
        batch = queue.open = ProducerBatch(self, queue.info, queue.partition, now_ns, self.next_order())
        self.unended_count += 1
        self.buffered_bytes += BATCH_OVERHEAD_BYTES
        self._lingering.append((now_ns + self._linger_ns, queue, batch))
        return batch

    def see_to(self, queue: PartitionQueue) -> None:
        """A batch was opened: without linger send it at once, if it may be; else have the helper look at it in time."""
        if (
            not self._linger_ns
            and not self.is_busy
            and not queue.ready
            and len(queue.in_flight) < self._settings.max_in_flight_requests_per_connection
        ):
            self.close_batch(queue)
            self.pump()
        elif self._lingering and self._linger_ends_ns() < self._helper_wakes_ns:
            self._wake_helper()

    def _linger_ends_ns(self) -> int:
        return self._lingering[0][0] + self._held_ns

    def _look_at_load(self, now_ns: int) -> None:
        """Decide how long open batches may fill beyond their linger."""
        then_ns, then_count = self._load_checked
        open_batches = [batch for _, _, batch in self._lingering if batch.state is BatchState.OPEN]
        count = self._closed_records + sum(len(batch.rows) // 3 for batch in open_batches)
        self._load_checked = now_ns, count
        fast = (count - then_count) * NS_PER_S > FAST_RECORDS_PER_S * (now_ns - then_ns)
        self._held_ns = len(open_batches) * NS_PER_S // SMALL_BATCHES_PER_S if fast and self._linger_ns else 0

    def next_order(self) -> tuple[int, ...]:
        self._order += 1
        return (self._order,)

    def reserve(self, batch: ProducerBatch, byte_count: int, capacity: int) -> None:
        """Give an open batch room for `byte_count` bytes, and for what is likely to follow, up to `capacity` bytes in all; that much memory is free."""
        unused = self._settings.buffer_memory - self.buffered_bytes - BATCH_OVERHEAD_BYTES
        used = batch.reserved_bytes - batch.room
        more = max(byte_count - batch.room, min(RESERVE_BYTES, unused, capacity - used - batch.room))
        batch.reserved_bytes += more
        batch.room += more
        self.buffered_bytes += more

    def close_batch(self, queue: PartitionQueue) -> None:
        batch = queue.open
        if batch is not None and queue.close_open():
            self.buffered_bytes -= batch.close()
            self._closed_records += batch.count
            self.enlist(queue)
            if batch.ends_without_key:
                self._on_keyless_batch(queue.info)

    def close_all(self) -> None:
        for queue in self.queues.values():
            self.close_batch(queue)
        self.pump()

    @property
    def is_busy(self) -> bool:
        """Whether so many batches are under way that one more would only wait elsewhere: an open one goes on filling instead. Kafka's limit of requests
        on a connection has this effect.
        """
        return self.in_flight_count >= BUSY_BATCHES

    def enlist(self, queue: PartitionQueue) -> None:
        if not queue.is_listed:
            queue.is_listed = True
            self._sendable.append(queue)

    def block_for_memory(self, size: int) -> None:
        """Wait, sending and receiving, until `size` bytes fit. Called with the lock held once. Raises BufferExhaustedError,
        RecordTooLargeError.
        """
        if size + BATCH_OVERHEAD_BYTES > self._settings.buffer_memory:
            raise RecordTooLargeError(f"{size} bytes can never fit buffer_memory ({self._settings.buffer_memory})")
        deadline_ns = self.now_ns() + self._settings.max_block_ms * NS_PER_MS
        self.close_all()
        while self.buffered_bytes + size + BATCH_OVERHEAD_BYTES > self._settings.buffer_memory:
            now_ns = self.now_ns()
            if now_ns >= deadline_ns:
                raise BufferExhaustedError(
                    f"buffer_memory ({self._settings.buffer_memory} bytes) stayed full for {self._settings.max_block_ms} ms"
                )
            self.lock.release()
            try:
                self.connection.wait(min(deadline_ns - now_ns, 20 * NS_PER_MS))
                self.make_callbacks()
            finally:
                self.lock.acquire()
            self.check_usable()
            self.pump()

    # ---- sending ---------------------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Everything that can be done now: take in answers, send what is ready. With the lock held."""
        self._pump()
        if self._driver and self._driver != threading.get_ident():
            self._driver_is_rung = True
            _ring(self._driver_fd)

    def _pump(self) -> None:
        now_ns = self._last_io_ns = self.now_ns()
        connection = self.connection
        connection.process()
        lingering = self._lingering
        if now_ns - self._load_checked[0] > LOAD_CHECK_NS:
            self._look_at_load(now_ns)
        while lingering and (self._linger_ends_ns() <= now_ns or lingering[0][2].state is not BatchState.OPEN):
            if lingering[0][2].state is BatchState.OPEN and self.is_busy:
                break
            _, queue, batch = lingering.popleft()
            if queue.open is batch:
                self.close_batch(queue)
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
                self.enlist(queue)
        connection.process()

    def _send_from(self, queue: PartitionQueue, now_ns: int) -> bool:
        """Send what the partition may have under way. False: something is left that an answer will not free (credit, a retry's pause)."""
        limit = self._settings.max_in_flight_requests_per_connection
        while queue.ready and len(queue.in_flight) < limit:
            if queue.muted_until_ns > now_ns:
                return False
            position = 0
            if self._needs_epoch:  # first learn what became of everything that was sent, also behind what was refused
                position = queue.first_of_unknown_fate()
                if position < 0:
                    return False
            batch = queue.ready[position]
            if self._idempotent and batch.producer_id < 0 and queue.window_is_full():
                return True
            data = self._encoded(queue, batch)
            if data is None:
                continue
            if not self.connection.session.may_send(len(data)):
                self._ask_credit(len(data), now_ns)
                return False
            if self._idempotent and batch.producer_id < 0:
                queue.number(batch, self._producer_id, self._epoch)
                assert batch.data is not None
                data = batch.data
            request = requests.ProduceRequest(queue.info.topic_id, queue.partition, self._acks, self._settings.request_timeout_ms)
            on_answer = partial(self._on_answer, queue, batch) if self._acks else None
            if not self.connection.request(Api.PRODUCE, [requests.encode_produce(request), data], on_answer):
                return False
            del queue.ready[position]
            self.connection.session.sent_bytes += len(data)
            self._sent(queue, batch, len(data))
        return True

    def _sent(self, queue: PartitionQueue, batch: ProducerBatch, byte_count: int) -> None:
        batch.was_sent = True
        batch.attempts += 1
        counters = self.counters
        counters["batches_sent"] += 1
        counters["bytes_sent"] += byte_count
        counters["records_sent"] += batch.count
        if self._acks == 0:
            self._unconfirmed = True
            self.end(batch, None, None)
            return
        batch.state = BatchState.IN_FLIGHT
        queue.in_flight.append(batch)
        self.in_flight_count += 1

    def _encoded(self, queue: PartitionQueue, batch: ProducerBatch) -> bytearray | None:
        """The bytes of the first ready batch. None: it was split or failed; look at what is first now."""
        compression = self._settings.compression_type or queue.info.settings["compression.type"]
        compression = "none" if compression == "producer" else compression
        try:
            data = batch.encode(compression)
        except Exception as error:  # one batch that cannot be made costs no other
            queue.ready.popleft()
            self.end(batch, None, _encoding_error(error))
            return None
        limit = min(max(self._settings.max_request_size, 4096), queue.info.settings["max.message.bytes"])
        is_too_large = len(data) > limit
        if not is_too_large and (compression != "none" or batch.count > ROWS_FREE):
            is_too_large = is_too_large_unpacked(
                data, max_message_bytes=queue.info.settings["max.message.bytes"], is_delay_log=bool(queue.info.delay_of)
            )
        if is_too_large and not batch.was_sent:
            queue.ready.popleft()
            halves = batch.split()
            if halves is None:
                self.end(
                    batch, None, RecordTooLargeError(f"a record takes {len(data)} bytes as a batch, or more unpacked; {limit} are allowed")
                )
            else:
                self.unended_count += 1
                queue.ready.extendleft(reversed(halves))
                batch.state = BatchState.ENDED
                if batch.waiter is not None:
                    batch.waiter.set()
            return None
        return data

    def _ask_credit(self, wanted: int, now_ns: int) -> None:
        if now_ns - self._asked_credit_ns > CREDIT_ASK_NS:
            self._asked_credit_ns = now_ns
            self.connection.request(Api.CREDIT, [requests.encode_credit(wanted)], None)

    def _obtain_epoch(self) -> None:
        """A producer id at first; a new epoch once nothing is under way."""
        if self._asking_id:
            return
        if self._needs_epoch and any(queue.in_flight or queue.first_of_unknown_fate() >= 0 for queue in self.queues.values()):
            return
        request: dict[str, int] = {}
        if self._producer_id >= 0:
            request = {"producer_id": self._producer_id, "producer_epoch": self._epoch}
        self._asking_id = self.connection.request(Api.INIT_PRODUCER_ID, [requests.encode_json(request)], self._on_epoch)

    def _on_epoch(self, response: Response | None) -> None:
        self._asking_id = False
        if response is None or response.code is not ErrorCode.OK:
            return  # asked again at the next turn
        answer = requests.decode_json(response.body[0])
        if self._needs_epoch:
            self.counters["epoch_bumps"] += 1
        self._producer_id, self._epoch = int(answer["producer_id"]), int(answer["producer_epoch"])
        self._needs_epoch = False
        for queue in self.queues.values():
            queue.next_sequence = 0
            for batch in queue.ready:
                batch.producer_id = -1
            if queue.ready:
                self.enlist(queue)

    # ---- answers ---------------------------------------------------------------------------------------------------------------------

    def _on_answer(self, queue: PartitionQueue, batch: ProducerBatch, response: Response | None) -> None:
        """A produce request was answered, or (None) its connection lost. Called by `Connection.process`, with the lock held."""
        if batch.state is not BatchState.IN_FLIGHT or batch not in queue.in_flight:
            return
        if response is not None and response.code is ErrorCode.OK:
            produced = requests.decode_produced(response.body[0])
            self._leave_flight(queue, batch)
            if queue.info.settings["message.timestamp.type"] == "LogAppendTime":
                batch.stamps_us = np.array([produced.append_time_us])
            self.end(batch, produced.base_offset, None)
        elif response is None:
            self._retry(queue, batch, ErrorCode.SESSION_UNKNOWN, "the connection was lost", pause=False)
        else:
            self._on_refusal(queue, batch, response)
        if queue.ready:
            self.enlist(queue)

    def _on_refusal(self, queue: PartitionQueue, batch: ProducerBatch, response: Response) -> None:
        code, detail = response.code, response.detail()
        error = error_for(code, detail)
        if code not in _FATE_UNKNOWN_CODES:
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
                queue.is_gone = True
                self.close_batch(queue)  # the next record asks anew
            if self._idempotent:
                self._needs_epoch = True  # its sequence is missing for good
            self.end(batch, None, error)

    def _leave_flight(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        queue.in_flight.remove(batch)
        self.in_flight_count -= 1

    def _retry(self, queue: PartitionQueue, batch: ProducerBatch, code: ErrorCode, detail: str, *, pause: bool) -> None:
        """Put a batch back where it belongs among what is ready, or end it when its retries are used up."""
        self._leave_flight(queue, batch)
        if batch.attempts > self._settings.retries:
            if self._idempotent:
                self._needs_epoch = True
            self.end(batch, None, error_for(code, detail))
            return
        self.counters["retries"] += 1
        batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
        batch.state = BatchState.READY
        position = 0
        while position < len(queue.ready) and queue.ready[position].order < batch.order:
            position += 1
        queue.ready.insert(position, batch)
        if pause:
            base_ms = min(RETRY_BACKOFF_MAX_MS, self._settings.retry_backoff_ms << min(batch.attempts - 1, 10))
            queue.muted_until_ns = self.now_ns() + int(base_ms * NS_PER_MS * (0.8 + 0.4 * self._environment.random()))
        self.enlist(queue)

    def end(self, batch: ProducerBatch, base_offset: int | None, error: TailraceError | None) -> None:
        if batch.state is BatchState.ENDED:
            return
        if batch.state is BatchState.OPEN:
            self.buffered_bytes -= batch.close()
            self._closed_records += batch.count
        if error is not None:
            self.counters["errors"] += batch.count
        self.buffered_bytes -= batch.reserved_bytes
        self.unended_count -= 1
        self.callbacks += batch.end(base_offset, error)

    def _expire(self, now_ns: int) -> None:
        """End what has waited for delivery_timeout_ms. What may have reached a worker leaves a gap in the sequence: a new epoch."""
        self._expiry_checked_ns = now_ns
        if self.connection.fatal is not None:
            for queue in self.queues.values():
                for batch in queue.batches():
                    self.end(batch, None, self.connection.fatal)
                self.reset(queue)
            return
        oldest_ns = now_ns - self._settings.delivery_timeout_ms * NS_PER_MS
        for queue in self.queues.values():
            for batch in [b for b in queue.batches() if b.created_ns <= oldest_ns]:
                if batch in queue.in_flight:
                    self._leave_flight(queue, batch)
                elif queue.open is batch:
                    queue.open = None
                else:
                    queue.ready.remove(batch)
                if batch.was_sent and self._idempotent:
                    self._needs_epoch = True
                seconds = self._settings.delivery_timeout_ms / 1000
                if self.connection.is_ready or batch.was_sent:
                    self.end(batch, None, DeliveryTimeoutError(f"not acknowledged within {seconds:g} s{_because(batch)}"))
                else:
                    self.end(
                        batch, None, NotReachableError(f"not sent within {seconds:g} s: no appliance answers at {self._settings.bootstrap}")
                    )

    # ---- waiting ---------------------------------------------------------------------------------------------------------------------

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Until `batch` has ended (or split). Whoever comes first drives the connection, others wait on the batch. False: time is up."""
        deadline_ns = None if timeout is None else self.now_ns() + int(timeout * 1e9)
        with self.lock:
            if batch.has_ended():
                return True
            self.check_usable()
            queue = self.queues.get((batch.info.topic_id, batch.partition))
            if queue is not None and queue.open is batch:
                self.close_batch(queue)  # a caller that waits has nothing to add
            self.pump()
        self.make_callbacks()
        while not batch.has_ended():
            now_ns = self.now_ns()
            if deadline_ns is not None and now_ns >= deadline_ns:
                return False
            if self.forked or self.failure is not None:
                self.check_usable()
            if self._driving.acquire(blocking=False):
                try:
                    self._drive_once(batch, now_ns, deadline_ns)
                finally:
                    self._driving.release()
            else:
                with self.lock:
                    if batch.waiter is None:
                        batch.waiter = threading.Event()
                    waiter = batch.waiter
                waiter.wait(0.02 if deadline_ns is None else min(0.02, (deadline_ns - now_ns) / 1e9))
            self.make_callbacks()
        return True

    def when_ended(self, handle: Handle, callback: OnDelivery) -> None:
        """Have `callback(metadata, error)` called once the record has ended: now if it has, else in whatever thread finds out."""
        with self.lock:
            batch, row = handle.resolve()
            if batch.state is not BatchState.ENDED:
                batch.callbacks = [*(batch.callbacks or []), (row, callback)]
                self._wake_helper()  # whoever asks for this waits elsewhere
                return
        callback(None if batch.error else batch.metadata(row), batch.error)

    def wait_until_received(self, timeout: float | None) -> None:
        """With acks=0, until the front has read all that was sent: it answers a ping behind it. What is still in a socket when that is closed may
        be lost with it: a close with unread input (credit) resets a TCP connection, and the other end's kernel then drops what it holds.
        Raises RequestTimeoutError, NotReachableError.
        """
        with self.lock:
            if self._unconfirmed and not self.closed:
                timeout_ms = RECEIVED_TIMEOUT_MS if timeout is None else min(RECEIVED_TIMEOUT_MS, int(timeout * 1000))
                self.connection.call(Api.PING, [], timeout_ms, lock=self.lock)
                self._unconfirmed = False

    def _drive_once(self, batch: ProducerBatch, now_ns: int, deadline_ns: int | None) -> None:
        """Sleep until something may have come, then see to it. Whoever calls has pumped before; or another has, and the answer came to them."""
        with self.lock:
            if batch.has_ended():
                return
            wake_ns = self._next_wake_ns(now_ns)
            self._driver = threading.get_ident()
        if deadline_ns is not None:
            wake_ns = min(wake_ns, deadline_ns)
        if self.in_flight_count or self._asking_id or not self.connection.is_ready:
            self.connection.wait(min(wake_ns - self.now_ns(), 50 * NS_PER_MS), self._driver_fd)
        elif self.unended_count:
            self.connection.wait(min(wake_ns - self.now_ns(), 5 * NS_PER_MS), self._driver_fd)
        with self.lock:
            self._driver = 0
            if self._driver_is_rung:
                self._driver_is_rung = False
                _hush(self._driver_fd)
            if not self.closed:
                self.pump()

    def _next_wake_ns(self, now_ns: int) -> int:
        """When there is something to do without an answer."""
        times = [now_ns + 1_000 * NS_PER_MS]
        tick_ns = self.connection.next_tick_ns()
        if tick_ns is not None:
            times.append(tick_ns)
        if self._lingering and not self.is_busy:
            times.append(min(self._linger_ends_ns(), self._load_checked[0] + LOAD_CHECK_NS) if self._held_ns else self._linger_ends_ns())
        times += [queue.muted_until_ns for queue in self._sendable if queue.muted_until_ns > now_ns]
        if self._sendable and self.connection.is_ready:
            times.append(now_ns + 20 * NS_PER_MS)  # waiting for credit
        if self.unended_count:
            times.append(now_ns + 100 * NS_PER_MS)
        return min(times)

    def make_callbacks(self) -> None:
        """Call on_delivery, without the lock: a callback may send, flush and close."""
        while self.callbacks:
            with self.lock:
                calls, self.callbacks = deque(self.callbacks), []
            try:
                while calls:
                    callback, metadata, error = calls.popleft()
                    try:
                        callback(metadata, error)
                    except Exception:
                        logger.exception("on_delivery raised; its record %s", "failed" if error else "was delivered")
            finally:
                if calls:  # KeyboardInterrupt, SystemExit: whoever looks next makes the others
                    with self.lock:
                        self.callbacks[:0] = calls
                        self._wake_helper()

    # ---- helper ----------------------------------------------------------------------------------------------------------------------

    def _wake_helper(self) -> None:
        _ring(self._wake_fd)

    def _help(self) -> None:
        """The helper thread: linger, retries, silence; answers only while no caller looks after them."""
        failures = 0
        while True:
            try:
                if not self._help_once():
                    return
                failures = 0
            except BaseException as error:  # also what a callback raises to end a thread: this one is not its own
                failures += 1
                logger.error("the producer's helper thread failed, %d times in a row", failures, exc_info=error)
                if failures >= HELPER_FAILURES_MAX:
                    self._fail(error)
                    return
                self._environment.sleep_on((), HELPER_PAUSE_NS)

    def _help_once(self) -> bool:
        """See to what is due, then sleep until something is; False: the producer has ended."""
        with self.lock:
            if self.closed or self.forked:
                return False
            _hush(self._wake_fd)
            now_ns = self.now_ns()
            caller_is_active = now_ns - self._last_io_ns < 3 * NS_PER_MS
            linger_due = bool(self._lingering) and self._linger_ends_ns() <= now_ns
            if not caller_is_active or linger_due:
                last_io_ns = self._last_io_ns
                self.pump()
                self._last_io_ns = last_io_ns if caller_is_active else self._last_io_ns
            wake_ns = self._next_wake_ns(now_ns)
            waits_for_answers = self.in_flight_count or self._asking_id or not self.connection.is_ready
            if caller_is_active:
                wake_ns = min(wake_ns, now_ns + 5 * NS_PER_MS) if self.unended_count else wake_ns
            self._helper_wakes_ns = wake_ns
        self.make_callbacks()
        if self._wake_fd < 0:
            return False  # a callback has closed the producer
        remaining_ns = max(NS_PER_MS, wake_ns - self.now_ns())
        if waits_for_answers and not caller_is_active and not self._driving.locked():
            self.connection.wait(remaining_ns, self._wake_fd)
        else:
            sleep_on((self._wake_fd,), remaining_ns)
        return True

    def _fail(self, error: BaseException) -> None:
        """Nobody looks after linger and retries any more: say so on every handle, and to every caller."""
        with self.lock:
            self.failure = TailraceError(f"the producer failed in a way that it should not ({type(error).__name__}: {error})")
            self._end_all(self.failure)
        self.make_callbacks()


def _ring(fd: int) -> None:
    try:
        os.eventfd_write(fd, 1)
    except OSError:
        pass  # it is ringing, or closed


def _hush(fd: int) -> None:
    try:
        os.eventfd_read(fd)
    except OSError:
        pass  # it does not ring, or is closed


def _encoding_error(error: Exception) -> TailraceError:
    if isinstance(error, TailraceError):
        return error
    logger.error("a batch could not be encoded", exc_info=error)
    return InvalidRecordError(f"the batch cannot be encoded ({type(error).__name__}: {error})")


def _because(batch: ProducerBatch) -> str:
    return f"; the last answer was: {batch.last_refusal}" if batch.last_refusal else ""


def _load_what_exit_cannot() -> None:
    """pyarrow loads pandas, where there is one, with the first array it makes; a program's exit is too late for that, and a producer that was not
    closed may encode its first batch there. pandas needs only this to be loaded in time.
    """
    import concurrent.futures.thread  # noqa: F401
