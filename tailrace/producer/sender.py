"""How a producer's batches reach the appliance, and what becomes of its answers: sending, retries,
epochs, giving up.

Nothing here waits: `run_once` does everything that can be done now, and
`tailrace.producer.sender_thread` calls it often enough.

Owner: a Producer, under its lock.
Invariants: batches of a partition are sent in order, several of many partitions in one request (see
`tailrace.producer.in_flight_requests`). A batch that may have been
    appended without our knowing keeps its sequence, and nothing new is numbered before its fate is
    known (see `tailrace.producer.producer_id`).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tailrace.client.connection import Connection
from tailrace.client.runtime import Runtime
from tailrace.client.settings import ProducerSettings
from tailrace.client.steps import Guard, Steps, call
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.core.errors import (
    DeliveryTimeoutError,
    InvalidRecordError,
    NotReachableError,
    RecordTooLargeError,
    TailraceError,
    UnknownTopicError,
    error_for,
)
from tailrace.core.log import logger
from tailrace.format.batch_header import REMEMBERED_BATCHES, REMEMBERED_BATCHES_ONCE
from tailrace.format.batch_validation import ROWS_FREE, is_too_large_unpacked
from tailrace.producer.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.in_flight_requests import Entry, InFlightRequest, InFlightRequests
from tailrace.producer.partition_queue import PartitionQueue
from tailrace.producer.producer_batch import IN_FLIGHT, ProducerBatch
from tailrace.producer.producer_id import ProducerIdAndEpoch
from tailrace.producer.slot_map_change import SlotMapChange
from tailrace.producer.topic_recreation import TopicRecreation
from tailrace.protocol import messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

RETRY_BACKOFF_MAX_MS = 1_000
CREDIT_REQUEST_NS = 50_000_000
CREDIT_RETRY_NS = 500_000_000
"""When nothing has come since: who has asked is in the front's queue, and hundreds that asked again
and again would leave it no time to answer.
"""
EXPIRY_CHECK_NS = 20_000_000
SLOW_CHECK_NS = 1_000_000
"""How long what takes many milliseconds anyway (silence, slow requests) is not looked at again:
answers come ten times as often.
"""
RECEIVED_TIMEOUT_MS = 5_000
RESENDS_BEFORE_NEW_EPOCH = 3
"""So often the first batch of a partition may be out of order; then what came before it is lost,
and only a new epoch helps.
"""
SHARES = 2
"""A request takes at most one part in so many of what a partition may have under way, so that its
requests follow one another closely: batches that are sent in one request are answered together, and
would all leave in one again.
"""
_ACKS = {0: 0, 1: 1, "all": requests.ACKS_ALL}
_PRODUCE = Api.PRODUCE
_RESEND_CODES = frozenset({ErrorCode.OUT_OF_ORDER_SEQUENCE})
_OUTCOME_UNKNOWN_CODES = frozenset({ErrorCode.TIMED_OUT, ErrorCode.STORAGE_ERROR})
_NEW_EPOCH_CODES = frozenset({ErrorCode.UNKNOWN_SEQUENCE})


class Sender:
    """See the module's docstring."""

    def __init__(
        self,
        settings: ProducerSettings,
        runtime: Runtime,
        connection: Connection,
        accumulator: RecordAccumulator,
    ) -> None:
        self._settings = settings
        self._now_ns = runtime.monotonic_ns
        self._random = runtime.random
        self._connection = connection
        self._accumulator = accumulator
        self._acks = _ACKS[settings.acks]
        self._identity = ProducerIdAndEpoch(settings.enable_idempotence and settings.acks != 0)
        self.slot_map_change = SlotMapChange(accumulator, connection, runtime.monotonic_ns)
        self.topic_recreation = TopicRecreation(
            accumulator, connection, runtime.monotonic_ns, settings.retry_backoff_ms
        )
        limit = settings.max_in_flight_requests_per_connection
        self._requests = InFlightRequests(limit)
        self._window = REMEMBERED_BATCHES_ONCE if self._identity.is_used else limit
        """Batches of a partition under way: what its worker remembers; without sequences a later
        one could overtake an earlier one that is sent again.
        """
        self._request_bytes_max = max(settings.max_request_size, 4096)
        self.waits_for_credit = False
        """Whether something is to be sent for which the appliance has not granted credit yet."""
        self._unconfirmed = False
        """With acks=0: something was sent that the front may not have read."""
        self._asked_credit_ns = self._asked_credit_count = 0
        self._expiry_checked_ns = 0
        self._slow_check_at_ns = 0
        self._counters = {
            "records_sent": 0,
            "batches_sent": 0,
            "bytes_sent": 0,
            "requests_sent": 0,
            "retries": 0,
        }

    @property
    def waits_for_answers(self) -> bool:
        """Whether something is to come from the appliance."""
        return bool(
            self._accumulator.in_flight_count
            or self._identity.is_asked
            or not self._connection.is_ready
        )

    def counters(self) -> dict[str, int]:
        """What happened since construction."""
        return {
            **self._counters,
            "errors": self._accumulator.error_count,
            "epoch_bumps": self._identity.bump_count,
        }

    def restart(self) -> None:
        """A turn was cut off by a signal's handler: all that was under way is to be sent again,
        over another socket. Sequences tell the appliance what it has already; where the books on
        them may be wrong, they begin anew under another epoch, once everything that was sent is
        answered.
        """
        self._requests = InFlightRequests(self._settings.max_in_flight_requests_per_connection)
        if self._acks == 0:
            for batch in (
                self._accumulator.under_way()
            ):  # sent, or about to be: nobody answers, and twice would be one too many
                self._accumulator.end(batch, None, None)
        self._accumulator.rebuild(keeps_flight=False)
        if self._acks != 0:
            self._connection.give_up_socket()
        self._identity.is_asked = False
        self._identity.use_up()
        self.slot_map_change.retry()
        self.topic_recreation.retry()
        self._slow_check_at_ns = 0

    @property
    def may_send_unfilled(self) -> bool:
        """Whether an open batch that is due would be sent at once."""
        return self._requests.may_send_unfilled and self._connection.is_ready

    def may_leave(self, queue: PartitionQueue) -> bool:
        """Whether a batch of the partition might be sent before an answer comes."""
        return self._requests.may_send and len(queue.in_flight) < self._window

    def run_once(self, now_ns: int, *, sends_first: bool = False) -> None:
        """Take in answers, give up what has waited long enough, send what is due. `sends_first`:
        something has just become due, which leaves before the socket is asked for answers, because
        to ask takes as long as to send.
        """
        connection = self._connection
        has_sent = sends_first and not self._needs_thought() and self._send_all(now_ns)
        if (
            not has_sent
        ):  # perhaps for want of what has come: credit, or that something was answered
            connection.process()
            if not self._run_timers(now_ns):
                return
            has_sent = self._send_all(now_ns)
        while has_sent and connection.process() and self._run_timers(now_ns):
            has_sent = self._send_all(now_ns)  # what came may let more leave

    def _needs_thought(self) -> bool:
        """Whether something is to be done before anything may be sent."""
        return (
            not self._connection.is_ready
            or self._identity.is_missing
            or self.slot_map_change.is_waiting
            or self.topic_recreation.is_waiting
        )

    def _run_timers(self, now_ns: int) -> bool:
        """What answers have not done by themselves; False: nothing can be sent now."""
        connection = self._connection
        self._accumulator.expire_linger(now_ns)
        if now_ns >= self._slow_check_at_ns or not connection.is_ready:
            if now_ns - self._expiry_checked_ns > EXPIRY_CHECK_NS:
                self._expire(now_ns)
            connection.tick(now_ns)
            self._requests.note_slow(now_ns)
            if not connection.is_ready:
                return False
            tick_ns = (
                connection.next_tick_ns()
            )  # what comes and is sent meanwhile makes it later, never sooner
            self._slow_check_at_ns = (
                now_ns + SLOW_CHECK_NS if tick_ns is None else min(tick_ns, now_ns + SLOW_CHECK_NS)
            )
        if self.slot_map_change.is_waiting:
            self.slot_map_change.step(now_ns)
        if self.topic_recreation.is_waiting:
            self.topic_recreation.step(now_ns)
        if self._identity.is_missing:
            self._obtain_epoch()
            if not self._identity.is_known:
                return False
        return True

    def _send_all(self, now_ns: int) -> bool:
        """Whether anything was sent: then the socket was used, and is to be asked again."""
        self.waits_for_credit = has_sent = False
        under_way, has_ready = self._requests, self._accumulator.has_ready
        while (
            under_way.may_send
            and has_ready(with_unfilled=under_way.may_send_unfilled)
            and self._send_request(now_ns)
        ):
            has_sent = True
        return has_sent

    # ---- sending ---------------------------------------------------------------------------------

    def _send_request(self, now_ns: int) -> bool:
        """Send what may leave together; False: there is nothing, or the connection takes nothing
        now.
        """
        may_include_unfilled = self._requests.may_send_unfilled
        version = self._connection.session.version(_PRODUCE)
        if self._identity.is_used:
            self._window = REMEMBERED_BATCHES if version > 1 else REMEMBERED_BATCHES_ONCE
        request = InFlightRequest(version, self._request_bytes_max)
        self._accumulator.drain(
            partial(self._gather, request, may_include_unfilled, now_ns),
            with_unfilled=may_include_unfilled,
        )
        if not request.entries:
            return False
        body = request.body(self._acks, self._settings.request_timeout_ms)
        were_sent = [batch.was_sent for _, batch, _ in request.entries]
        for (
            _,
            batch,
            _,
        ) in request.entries:  # before it is: a signal's handler may cut off what comes after
            batch.attempts += 1
            batch.was_sent = True
        if not self._connection.request(
            _PRODUCE, body, partial(self._on_answer, request) if self._acks else None
        ):
            for (queue, batch, _), was_sent in zip(request.entries, were_sent, strict=True):
                batch.attempts -= 1
                batch.was_sent = was_sent
                self._accumulator.leave_flight(queue, batch)
                self._accumulator.requeue(queue, batch)
            return False
        self._note_sent(request, now_ns)
        return True

    def _gather(
        self,
        request: InFlightRequest,
        may_include_unfilled: bool,
        now_ns: int,
        queue: PartitionQueue,
    ) -> bool:
        """Put into the request what the partition may send; False: it takes no more. The queue
        stays listed when something is left that an answer from its partition will not free (credit,
        room in the request, a retry's pause).
        """
        accumulator = self._accumulator
        count_before = len(request.entries)
        share = max(1, self._window // SHARES)
        while queue.has_work:
            if (
                queue.awaits_topic
                or len(queue.in_flight) >= self._window
                or self._requests.is_muted(queue)
            ):
                return True
            if len(request.entries) - count_before >= share:
                accumulator.mark_ready(queue)
                return True
            if queue.muted_until_ns > now_ns:
                accumulator.mark_ready(queue)
                return True
            position = 0
            if self._identity.needs_epoch or queue.awaits_map:
                # First learn what became of everything that was sent, also behind what was refused.
                position = queue.first_with_unknown_outcome()
                if position < 0:
                    accumulator.mark_ready(queue)
                    return True
            elif not queue.ready:
                if self._identity.is_used and queue.window_is_full(self._window):
                    return True
                if not may_include_unfilled:
                    accumulator.mark_ready(queue)
                    return True
                assert queue.open is not None
                if not request.has_room(queue.open.reserved_bytes - queue.open.room):
                    accumulator.mark_ready(queue, as_next=len(request.entries) == count_before)
                    return False
                accumulator.close_batch(queue, is_draining=True)
                request.has_unfilled = True
            batch = queue.ready[position]
            is_numbered = not self._identity.is_used or batch.producer_id >= 0
            if not is_numbered and queue.window_is_full(self._window):
                return True
            data = self._encoded(queue, batch)
            if data is None:
                continue
            if not request.has_room(len(data)) or not self._has_credit(
                request.byte_count + len(data), request, now_ns
            ):
                accumulator.mark_ready(queue, as_next=len(request.entries) == count_before)
                return False
            if not is_numbered:
                queue.number(batch, self._identity.producer_id, self._identity.epoch)
                assert batch.data is not None
                data = batch.data
            request.add(Entry(queue, batch, data))
            del queue.ready[position]
            accumulator.enter_flight(queue, batch)
        return True

    def _has_credit(self, byte_count: int, request: InFlightRequest, now_ns: int) -> bool:
        if self._connection.session.may_send(byte_count):
            return True
        if not request.entries:
            self.waits_for_credit = True
            self._ask_credit(byte_count, now_ns)
        return False

    def _note_sent(self, request: InFlightRequest, now_ns: int) -> None:
        self._connection.session.sent_bytes += request.byte_count
        counters = self._counters
        counters["requests_sent"] += 1
        counters["batches_sent"] += len(request.entries)
        counters["bytes_sent"] += request.byte_count
        for queue, batch, _ in request.entries:
            counters["records_sent"] += batch.count
            if self._acks == 0:
                self._accumulator.leave_flight(queue, batch)
                self._accumulator.end(batch, None, None)
        if self._acks == 0:
            self._unconfirmed = True
        else:
            self._requests.add(request, now_ns)

    def encode_ahead(self, queue: PartitionQueue) -> None:
        """The newest ready batch, if it is among the next ones: nothing waits for that then, when
        an answer has come.
        """
        batch = queue.ready[-1]
        if len(queue.ready) <= self._window and batch.data is None:
            try:
                batch.encode(self._compression(queue))
            except Exception as error:  # it is met again, and told, when it is the batch's turn
                logger.debug("a batch could not be encoded ahead of its turn: %s", error)

    def _compression(self, queue: PartitionQueue) -> str:
        chosen: str = self._settings.compression_type or queue.info.settings["compression.type"]
        return "none" if chosen == "producer" else chosen

    def _encoded(self, queue: PartitionQueue, batch: ProducerBatch) -> bytearray | None:
        """The bytes of a ready batch. None: it was split or failed; look at what is first now."""
        compression = self._compression(queue)
        try:
            data = batch.encode(compression)
        except Exception as error:  # what cannot be encoded costs nothing else: not another batch, nor, by halves, another record  # noqa: E501
            if batch.was_sent or not self._accumulator.split(queue, batch):
                queue.pop(batch)
                self._accumulator.end(batch, None, _encoding_error(error))
            return None
        if batch.was_sent:
            return data
        largest = queue.info.settings["max.message.bytes"]
        limit = min(max(self._settings.max_request_size, 4096), largest)
        is_too_large = len(data) > limit
        if not is_too_large and (compression != "none" or batch.count > ROWS_FREE):
            is_too_large = is_too_large_unpacked(
                data, max_message_bytes=largest, is_delay_log=bool(queue.info.delay_of)
            )
        if not is_too_large:
            return data
        if not self._accumulator.split(queue, batch):
            queue.pop(batch)
            refusal = (
                f"a record takes {len(data)} bytes as a batch, or more unpacked; {limit} "
                "are allowed"
            )
            self._accumulator.end(batch, None, RecordTooLargeError(refusal))
        return None

    def _ask_credit(self, requested: int, now_ns: int) -> None:
        received_count = self._connection.received_count
        if now_ns - self._asked_credit_ns > (
            CREDIT_RETRY_NS if received_count == self._asked_credit_count else CREDIT_REQUEST_NS
        ):
            self._asked_credit_ns, self._asked_credit_count = now_ns, received_count
            self._connection.request(Api.CREDIT, [requests.encode_credit(requested)], None)

    def wait_until_received(self, timeout_s: float | None, guard: Guard) -> Steps[None]:
        """With acks=0, until the front has read all that was sent: it answers a ping behind it.
        What is still in a socket when that is closed may be lost with it: a close with unread input
        (credit) resets a TCP connection, and the other end's kernel then drops what it holds.
        `guard`: takes the producer's lock. Raises RequestTimeoutError, NotReachableError.
        """
        if self._unconfirmed:
            timeout_ms = (
                RECEIVED_TIMEOUT_MS
                if timeout_s is None
                else min(RECEIVED_TIMEOUT_MS, int(timeout_s * 1000))
            )
            yield from call(self._connection, Api.PING, [], timeout_ms, guard=guard)
            self._unconfirmed = False

    # ---- identity --------------------------------------------------------------------------------

    def _obtain_epoch(self) -> None:
        """A producer id at first; a new epoch once nothing is under way."""
        identity = self._identity
        if identity.is_asked:
            return
        if identity.needs_epoch and any(
            q.in_flight or (not q.awaits_topic and q.first_with_unknown_outcome() >= 0)
            for q in self._accumulator.queues.values()
        ):
            return
        identity.is_asked = self._connection.request(
            Api.INIT_PRODUCER_ID, [requests.encode_json(identity.request())], self._on_epoch
        )

    def _on_epoch(self, response: Response | None) -> None:
        self._identity.is_asked = False
        if response is None or response.code is not ErrorCode.OK:
            return  # asked again at the next turn
        self._identity.take(requests.decode_json(response.body[0]))
        for queue in self._accumulator.queues.values():
            queue.begin_epoch()
            if queue.has_work:
                self._accumulator.mark_ready(queue)

    # ---- answers ---------------------------------------------------------------------------------

    def _on_answer(self, request: InFlightRequest, response: Response | None) -> None:
        """A request was answered, or (None) its connection lost. Called by `Connection.process`,
        with the lock held. Raises WireError for an answer to another request than this.
        """
        answers = None if response is None else request.answers_in(response)
        self._requests.remove(request)
        for position, (queue, batch, _) in enumerate(request.entries):
            if batch.state is IN_FLIGHT and batch in queue.in_flight:
                self._settle(queue, batch, None if answers is None else answers[position])
            if queue.has_work:
                self._accumulator.mark_ready(queue)

    def _settle(
        self,
        queue: PartitionQueue,
        batch: ProducerBatch,
        answer: requests.ProducedEntry | tuple[ErrorCode, str] | None,
    ) -> None:
        """What became of a batch is known; None: the connection was lost before."""
        if answer is None:
            self._retry(
                queue, batch, ErrorCode.SESSION_UNKNOWN, "the connection was lost", pause=False
            )
        elif not isinstance(answer, requests.ProducedEntry):
            self._on_refusal(queue, batch, *answer)
        elif answer.error:
            code = code_of(answer.error)
            self._on_refusal(queue, batch, code, ERROR_TABLE[code].meaning)
        else:
            self._accumulator.leave_flight(queue, batch)
            if queue.info.settings["message.timestamp.type"] == "LogAppendTime":
                batch.stamps_us = np.array([answer.append_time_us])
            self._accumulator.end(batch, answer.base_offset, None)

    def _on_refusal(
        self, queue: PartitionQueue, batch: ProducerBatch, code: ErrorCode, detail: str
    ) -> None:
        error = error_for(code, detail)
        if code not in _OUTCOME_UNKNOWN_CODES:
            batch.was_sent = False  # refused: it was not appended
        if code is ErrorCode.STALE_SLOT_MAP and queue.info.slot_map_version:
            self._counters["retries"] += 1
            batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
            self._accumulator.leave_flight(queue, batch)
            self._accumulator.requeue(queue, batch)
            self.slot_map_change.begin(queue.info)
        elif code is ErrorCode.UNKNOWN_TOPIC:
            self._retry(queue, batch, code, detail, pause=False)
            self.topic_recreation.begin(queue.info)
        elif code in _NEW_EPOCH_CODES:
            # The worker knows nothing of what came before: take a new epoch once nothing is under
            # way, then send this one again under it.
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

    def _retry(
        self,
        queue: PartitionQueue,
        batch: ProducerBatch,
        code: ErrorCode,
        detail: str,
        *,
        pause: bool,
    ) -> None:
        """Put a batch back where it belongs among what is ready, or end it when its retries are
        used up.
        """
        self._accumulator.leave_flight(queue, batch)
        if batch.attempts > self._settings.retries:
            self._identity.use_up()
            self._accumulator.end(batch, None, error_for(code, detail))
            return
        self._counters["retries"] += 1
        batch.last_refusal = f"{detail or 'refused'} [{code.name}]"
        if pause:
            base_ms = min(
                RETRY_BACKOFF_MAX_MS, self._settings.retry_backoff_ms << min(batch.attempts - 1, 10)
            )
            queue.muted_until_ns = self._now_ns() + int(
                base_ms * NS_PER_MS * (0.8 + 0.4 * self._random())
            )
        self._accumulator.requeue(queue, batch)

    # ---- giving up -------------------------------------------------------------------------------

    def _expire(self, now_ns: int) -> None:
        """End what has waited for delivery_timeout_ms. What may have reached a worker leaves a gap
        in the sequence: a new epoch.
        """
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
                    queue.pop(batch)
                if batch.was_sent:
                    self._identity.use_up()
                self._accumulator.end(batch, None, self._timeout_of(queue, batch))

    def _timeout_of(self, queue: PartitionQueue, batch: ProducerBatch) -> TailraceError:
        seconds = self._settings.delivery_timeout_ms / 1000
        if queue.awaits_topic:
            return UnknownTopicError(
                f"topic {queue.info.name!r} was deleted, and not made again with this partition "
                f"within {seconds:g} s"
            )
        if self._connection.is_ready or batch.was_sent:
            because = f"; the last answer was: {batch.last_refusal}" if batch.last_refusal else ""
            return DeliveryTimeoutError(f"not acknowledged within {seconds:g} s{because}")
        return NotReachableError(
            f"not sent within {seconds:g} s: no appliance answers at "
            f"{self._settings.bootstrap_servers}"
        )


def _encoding_error(error: Exception) -> TailraceError:
    if isinstance(error, TailraceError):
        return error
    logger.error("a batch could not be encoded", exc_info=error)
    return InvalidRecordError(f"the batch cannot be encoded ({type(error).__name__}: {error})")
