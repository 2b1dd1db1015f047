"""How a producer's batches reach the appliance, and what becomes of its answers: sending, retries, epochs, giving up.

Nothing here waits: `turn` does everything that can be done now, and `tailrace.sender` calls it often enough.

Owner: a Producer, under its lock.
Invariants: batches of a partition are sent in order. A batch that may have been appended without our knowing keeps its sequence, and nothing new is numbered
    before its fate is known (see `tailrace.producer_identity`).
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from tailrace.accumulator import NS_PER_MS, Accumulator
from tailrace.client_log import logger
from tailrace.connection import Connection
from tailrace.environment import Environment
from tailrace.errors import (
    DeliveryTimeoutError,
    InvalidRecordError,
    NotReachableError,
    RecordTooLargeError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.formats.structure import ROWS_FREE, is_too_large_unpacked
from tailrace.made_again import MadeAgain
from tailrace.partition_queue import PartitionQueue
from tailrace.producer_batch import BatchState, ProducerBatch
from tailrace.producer_identity import ProducerIdentity
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.session import Response
from tailrace.protocol.wire import Api
from tailrace.rerouting import Rerouting
from tailrace.settings import ProducerSettings

RETRY_BACKOFF_MAX_MS = 1_000
CREDIT_ASK_NS = 50_000_000
EXPIRY_CHECK_NS = 20_000_000
RECEIVED_TIMEOUT_MS = 5_000
RESENDS_BEFORE_NEW_EPOCH = 3
"""So often the first batch of a partition may be out of order; then what came before it is lost, and only a new epoch helps."""
_ACKS = {0: 0, 1: 1, "all": requests.ACKS_ALL}
_RESEND_CODES = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE})
_FATE_UNKNOWN_CODES = frozenset({ErrorCode.TIMED_OUT, ErrorCode.STORAGE_ERROR})
_NEW_EPOCH_CODES = frozenset({ErrorCode.UNKNOWN_SEQUENCE})


class Delivery:
    """See the module's docstring."""

    def __init__(self, settings: ProducerSettings, environment: Environment, connection: Connection, accumulator: Accumulator) -> None:
        self._settings = settings
        self._now_ns = environment.monotonic_ns
        self._random = environment.random
        self._connection = connection
        self._accumulator = accumulator
        self._acks = _ACKS[settings.acks]
        self._identity = ProducerIdentity(settings.enable_idempotence and settings.acks != 0)
        self.rerouting = Rerouting(accumulator, connection, environment.monotonic_ns)
        self.made_again = MadeAgain(accumulator, connection, environment.monotonic_ns, settings.retry_backoff_ms)
        self._unconfirmed = False
        """With acks=0: something was sent that the front may not have read."""
        self._asked_credit_ns = 0
        self._expiry_checked_ns = 0
        self._counters = {"records_sent": 0, "batches_sent": 0, "bytes_sent": 0, "retries": 0}

    @property
    def waits_for_answers(self) -> bool:
        """Whether something is to come from the appliance."""
        return bool(self._accumulator.in_flight_count or self._identity.is_asked or not self._connection.is_ready)

    def counters(self) -> dict[str, int]:
        """What happened since construction."""
        return {**self._counters, "errors": self._accumulator.error_count, "epoch_bumps": self._identity.bump_count}

    def turn(self, now_ns: int) -> None:
        """Take in answers, close and give up what has waited long enough, send what is ready."""
        connection, accumulator = self._connection, self._accumulator
        connection.process()
        accumulator.close_due(now_ns)
        if now_ns - self._expiry_checked_ns > EXPIRY_CHECK_NS:
            self._expire(now_ns)
        connection.tick(now_ns)
        if not connection.is_ready:
            return
        if self.rerouting.is_waiting:
            self.rerouting.step(now_ns)
        if self.made_again.is_waiting:
            self.made_again.step(now_ns)
        if self._identity.is_missing:
            self._obtain_epoch()
            if not self._identity.is_known:
                return
        accumulator.send_listed(partial(self._send_from, now_ns=now_ns))
        connection.process()

    # ---- sending ---------------------------------------------------------------------------------------------------------------------

    def _send_from(self, queue: PartitionQueue, now_ns: int) -> bool:
        """Send what the partition may have under way. False: something is left that an answer will not free (credit, a retry's pause)."""
        identity, limit = self._identity, self._settings.max_in_flight_requests_per_connection
        while queue.ready and len(queue.in_flight) < limit:
            if queue.awaits_topic:
                return True
            if queue.muted_until_ns > now_ns:
                return False
            position = 0
            if (
                identity.needs_epoch or queue.awaits_map
            ):  # first learn what became of everything that was sent, also behind what was refused
                position = queue.first_of_unknown_fate()
                if position < 0:
                    return False
            batch = queue.ready[position]
            is_numbered = not identity.is_used or batch.producer_id >= 0
            if not is_numbered and queue.window_is_full():
                return True
            data = self._encoded(queue, batch)
            if data is None:
                continue
            if not self._connection.session.may_send(len(data)):
                self._ask_credit(len(data), now_ns)
                return False
            if not is_numbered:
                queue.number(batch, identity.producer_id, identity.epoch)
                assert batch.data is not None
                data = batch.data
            if not self._request(queue, batch, data):
                return False
            del queue.ready[position]
            self._note_sent(queue, batch, len(data))
        return True

    def _request(self, queue: PartitionQueue, batch: ProducerBatch, data: bytearray) -> bool:
        """Hand the batch to the connection; False: it takes nothing now."""
        info = queue.info
        request = requests.ProduceRequest(
            info.topic_id, queue.partition, self._acks, self._settings.request_timeout_ms, info.slot_map_version
        )
        on_answer = partial(self._on_answer, queue, batch) if self._acks else None
        return self._connection.request(Api.PRODUCE, [requests.encode_produce(request), data], on_answer)

    def _note_sent(self, queue: PartitionQueue, batch: ProducerBatch, byte_count: int) -> None:
        self._connection.session.sent_bytes += byte_count
        batch.was_sent = True
        batch.attempts += 1
        counters = self._counters
        counters["batches_sent"] += 1
        counters["bytes_sent"] += byte_count
        counters["records_sent"] += batch.count
        if self._acks == 0:
            self._unconfirmed = True
            self._accumulator.end(batch, None, None)
        else:
            self._accumulator.enter_flight(queue, batch)

    def _encoded(self, queue: PartitionQueue, batch: ProducerBatch) -> bytearray | None:
        """The bytes of a ready batch. None: it was split or failed; look at what is first now."""
        compression = self._settings.compression_type or queue.info.settings["compression.type"]
        compression = "none" if compression == "producer" else compression
        try:
            data = batch.encode(compression)
        except Exception as error:  # what cannot be encoded costs nothing else: not another batch, nor, by halves, another record
            if batch.was_sent or not self._accumulator.split(queue, batch):
                queue.take_out(batch)
                self._accumulator.end(batch, None, _encoding_error(error))
            return None
        if batch.was_sent:
            return data
        largest = queue.info.settings["max.message.bytes"]
        limit = min(max(self._settings.max_request_size, 4096), largest)
        is_too_large = len(data) > limit
        if not is_too_large and (compression != "none" or batch.count > ROWS_FREE):
            is_too_large = is_too_large_unpacked(data, max_message_bytes=largest, is_delay_log=bool(queue.info.delay_of))
        if not is_too_large:
            return data
        if not self._accumulator.split(queue, batch):
            queue.take_out(batch)
            refusal = f"a record takes {len(data)} bytes as a batch, or more unpacked; {limit} are allowed"
            self._accumulator.end(batch, None, RecordTooLargeError(refusal))
        return None

    def _ask_credit(self, wanted: int, now_ns: int) -> None:
        if now_ns - self._asked_credit_ns > CREDIT_ASK_NS:
            self._asked_credit_ns = now_ns
            self._connection.request(Api.CREDIT, [requests.encode_credit(wanted)], None)

    def wait_until_received(self, timeout_s: float | None, lock: threading.RLock) -> None:
        """With acks=0, until the front has read all that was sent: it answers a ping behind it. What is still in a socket when that is closed may
        be lost with it: a close with unread input (credit) resets a TCP connection, and the other end's kernel then drops what it holds.
        `lock`: the producer's, held once. Raises RequestTimeoutError, NotReachableError.
        """
        if self._unconfirmed:
            timeout_ms = RECEIVED_TIMEOUT_MS if timeout_s is None else min(RECEIVED_TIMEOUT_MS, int(timeout_s * 1000))
            self._connection.call(Api.PING, [], timeout_ms, lock=lock)
            self._unconfirmed = False

    # ---- identity --------------------------------------------------------------------------------------------------------------------

    def _obtain_epoch(self) -> None:
        """A producer id at first; a new epoch once nothing is under way."""
        identity = self._identity
        if identity.is_asked:
            return
        if identity.needs_epoch and any(
            q.in_flight or (not q.awaits_topic and q.first_of_unknown_fate() >= 0) for q in self._accumulator.queues.values()
        ):
            return
        identity.is_asked = self._connection.request(Api.INIT_PRODUCER_ID, [requests.encode_json(identity.request())], self._on_epoch)

    def _on_epoch(self, response: Response | None) -> None:
        self._identity.is_asked = False
        if response is None or response.code is not ErrorCode.OK:
            return  # asked again at the next turn
        self._identity.take(requests.decode_json(response.body[0]))
        for queue in self._accumulator.queues.values():
            queue.begin_epoch()
            if queue.ready:
                self._accumulator.enlist(queue)

    # ---- answers ---------------------------------------------------------------------------------------------------------------------

    def _on_answer(self, queue: PartitionQueue, batch: ProducerBatch, response: Response | None) -> None:
        """A produce request was answered, or (None) its connection lost. Called by `Connection.process`, with the lock held."""
        if batch.state is not BatchState.IN_FLIGHT or batch not in queue.in_flight:
            return
        if response is not None and response.code is ErrorCode.OK:
            produced = requests.decode_produced(response.body[0])
            self._accumulator.leave_flight(queue, batch)
            if queue.info.settings["message.timestamp.type"] == "LogAppendTime":
                batch.stamps_us = np.array([produced.append_time_us])
            self._accumulator.end(batch, produced.base_offset, None)
        elif response is None:
            self._retry(queue, batch, ErrorCode.SESSION_UNKNOWN, "the connection was lost", pause=False)
        else:
            self._on_refusal(queue, batch, response)
        if queue.ready:
            self._accumulator.enlist(queue)

    def _on_refusal(self, queue: PartitionQueue, batch: ProducerBatch, response: Response) -> None:
        code, detail = response.code, response.detail()
        error = error_for(code, detail)
        if code not in _FATE_UNKNOWN_CODES:
            batch.was_sent = False  # refused: it was not appended
        if code is ErrorCode.STALE_SLOT_MAP and queue.info.slot_map_version:
            self._counters["retries"] += 1
            batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
            self._accumulator.leave_flight(queue, batch)
            self._accumulator.put_back(queue, batch)
            self.rerouting.begin(queue.info)
        elif code is ErrorCode.UNKNOWN_TOPIC:
            self._retry(queue, batch, code, detail, pause=False)
            self.made_again.begin(queue.info)
        elif code in _NEW_EPOCH_CODES:
            # The worker knows nothing of what came before: take a new epoch once nothing is under way, then send this one again under it.
            self._identity.use_up()
            self._retry(queue, batch, code, detail, pause=False)
        elif code in _RESEND_CODES or error.retriable:
            is_first = queue.in_flight[0] is batch
            if code in _RESEND_CODES and is_first and batch.attempts > RESENDS_BEFORE_NEW_EPOCH:
                self._identity.use_up()
            self._retry(queue, batch, code, detail, pause=code not in _RESEND_CODES or is_first)
        else:
            self._accumulator.leave_flight(queue, batch)
            self._identity.use_up()  # its sequence is missing for good
            self._accumulator.end(batch, None, error)

    def _retry(self, queue: PartitionQueue, batch: ProducerBatch, code: ErrorCode, detail: str, *, pause: bool) -> None:
        """Put a batch back where it belongs among what is ready, or end it when its retries are used up."""
        self._accumulator.leave_flight(queue, batch)
        if batch.attempts > self._settings.retries:
            self._identity.use_up()
            self._accumulator.end(batch, None, error_for(code, detail))
            return
        self._counters["retries"] += 1
        batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
        if pause:
            base_ms = min(RETRY_BACKOFF_MAX_MS, self._settings.retry_backoff_ms << min(batch.attempts - 1, 10))
            queue.muted_until_ns = self._now_ns() + int(base_ms * NS_PER_MS * (0.8 + 0.4 * self._random()))
        self._accumulator.put_back(queue, batch)

    # ---- giving up -------------------------------------------------------------------------------------------------------------------

    def _expire(self, now_ns: int) -> None:
        """End what has waited for delivery_timeout_ms. What may have reached a worker leaves a gap in the sequence: a new epoch."""
        self._expiry_checked_ns = now_ns
        if self._connection.fatal is not None:
            self._accumulator.end_all(self._connection.fatal)
            return
        oldest_ns = now_ns - self._settings.delivery_timeout_ms * NS_PER_MS
        for queue in self._accumulator.queues.values():
            for batch in [b for b in queue.batches() if b.created_ns <= oldest_ns]:
                if batch in queue.in_flight:
                    self._accumulator.leave_flight(queue, batch)
                else:
                    queue.take_out(batch)
                if batch.was_sent:
                    self._identity.use_up()
                self._accumulator.end(batch, None, self._timeout_of(queue, batch))

    def _timeout_of(self, queue: PartitionQueue, batch: ProducerBatch) -> TailraceError:
        seconds = self._settings.delivery_timeout_ms / 1000
        if queue.awaits_topic:
            return UnknownTopicError(f"topic {queue.info.name!r} was deleted, and not made again with this partition within {seconds:g} s")
        if self._connection.is_ready or batch.was_sent:
            because = f"; the last answer was: {batch.last_refusal}" if batch.last_refusal else ""
            return DeliveryTimeoutError(f"not acknowledged within {seconds:g} s{because}")
        return NotReachableError(f"not sent within {seconds:g} s: no appliance answers at {self._settings.bootstrap}")


def _encoding_error(error: Exception) -> TailraceError:
    if isinstance(error, TailraceError):
        return error
    logger.error("a batch could not be encoded", exc_info=error)
    return InvalidRecordError(f"the batch cannot be encoded ({type(error).__name__}: {error})")
