"""Sends the batches of a producer, and handles the responses.

Nothing here blocks. `run_once` does everything that can be done now.
`tailrace.producer.sending.sender_thread` calls it often enough.

Owner: a Producer, under its lock.
Invariants:
- Batches of a partition are sent in order. A request has batches of many partitions (see
  `tailrace.producer.sending.in_flight_requests`).
- A batch that may be in the log keeps its sequence. Nothing new gets a sequence before its outcome
  is known (see `tailrace.producer.sending.producer_id`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.runtime import Runtime
from tailrace.client.connections.steps import Guard, Steps, call
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.format.record_batch.batch_header import REMEMBERED_BATCHES, REMEMBERED_BATCHES_ONCE
from tailrace.producer.batches.accumulator import RecordAccumulator
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import IN_FLIGHT, ProducerBatch
from tailrace.producer.sending.batch_encoder import REQUEST_MIN_BYTES, BatchEncoder
from tailrace.producer.sending.batch_outcomes import BatchOutcomes
from tailrace.producer.sending.in_flight_requests import Entry, InFlightRequest, InFlightRequests
from tailrace.producer.sending.metadata_refresh import MetadataRefresh
from tailrace.producer.sending.producer_id import Identity, MakeIdentity, ProducerIdAndEpoch
from tailrace.producer.sending.topic_lookups import TopicLookups
from tailrace.producer.topic_changes.slot_map_change import SlotMapChange
from tailrace.producer.topic_changes.topic_recreation import TopicRecreation
from tailrace.protocol.credit_messages import encode_credit
from tailrace.protocol.frame import Api
from tailrace.protocol.produce_messages import ACKS_ALL
from tailrace.protocol.session import Response

if TYPE_CHECKING:
    from tailrace.producer.topic_changes.refused_sizes import RefusedSizes
    from tailrace.producer.topic_changes.schema_change import SchemaChange

CREDIT_REQUEST_NS = 50_000_000
CREDIT_RETRY_NS = 500_000_000
"""Interval of CREDIT requests while nothing is received. The first request is in the front's queue.
Hundreds of producers that repeated theirs would keep the front busy.
"""
EXPIRY_CHECK_NS = 20_000_000
SLOW_CHECK_NS = 1_000_000
"""Interval of the checks for silence and slow requests. Responses come ten times as often."""
RECEIVED_TIMEOUT_MS = 5_000
SHARES = 2
"""A request takes at most 1/SHARES of a partition's window. Batches of one request get their
responses together. With the whole window in one request, the partition would stand still meanwhile.
"""
_ACKS = {0: 0, 1: 1, "all": ACKS_ALL}
_PRODUCE = Api.PRODUCE


class Sender:
    """Requests, credit, and the timers of a producer."""

    def __init__(
        self,
        settings: ProducerSettings,
        runtime: Runtime,
        connection: Connection,
        accumulator: RecordAccumulator,
        make_identity: MakeIdentity | None = None,
    ) -> None:
        """`make_identity`: None for a producer without transactions."""
        self._settings = settings
        self._connection = connection
        self._accumulator = accumulator
        self._acks = _ACKS[settings.acks]
        self._identity: Identity = (
            ProducerIdAndEpoch(
                settings.enable_idempotence and settings.acks != 0, connection, accumulator
            )
            if make_identity is None
            else make_identity(connection, accumulator)
        )
        self.check_may_add = self._identity.check_may_add
        """Raises if no record may be added now."""
        self.begin_epoch = self._identity.begin_epoch
        """Begins the sequences of a new epoch."""
        self.slot_map_change = SlotMapChange(accumulator, connection, runtime.monotonic_ns)
        self.topic_recreation = TopicRecreation(
            accumulator, connection, runtime.monotonic_ns, settings.retry_backoff_ms
        )
        self._schema_change: SchemaChange | None = None
        """Loaded with the first schema that was altered."""
        self._refused_sizes: RefusedSizes | None = None
        """Loaded with the first batch that was refused as too large."""
        self._now_ns = runtime.monotonic_ns
        self.on_schema_altered: Callable[[TopicInfo], None] = lambda _info: None
        """Called with a topic whose batches are converted to its newest schema."""
        self.metadata_refresh = MetadataRefresh(connection, settings.metadata_max_age_ms)
        self.topic_lookups = TopicLookups(connection)
        self._encoder = BatchEncoder(settings, accumulator)
        self._outcomes = BatchOutcomes(
            settings, runtime, connection, accumulator, self._identity,
            self.slot_map_change, self.topic_recreation, self._begin_schema_change,
            self._begin_split, self.metadata_refresh.request_soon,
        )  # fmt: skip
        limit = settings.max_in_flight_requests_per_connection
        self._requests = InFlightRequests(limit)
        self._window = REMEMBERED_BATCHES_ONCE if self._identity.is_used else limit
        """In-flight batches of a partition: the worker's deduplication window. Without sequences a
        batch could overtake another one that is sent again.
        """
        self._request_bytes_max = max(settings.max_request_size, REQUEST_MIN_BYTES)
        self.waits_for_credit = False
        """True if a batch to send needs more credit from the appliance."""
        self._unconfirmed = False
        """True if the front may not have read everything that was sent with acks=0."""
        self._asked_credit_ns = self._asked_credit_count = 0
        self._expiry_checked_ns = 0
        self._slow_check_at_ns = 0
        self._counters = {
            "records_sent": 0,
            "batches_sent": 0,
            "bytes_sent": 0,
            "requests_sent": 0,
        }

    @property
    def transaction(self) -> int:
        """The number of the transaction, 0 without transactions."""
        return self._identity.transaction

    @property
    def waits_for_answers(self) -> bool:
        """True if a response, or the handshake's, is pending."""
        return bool(
            self._accumulator.in_flight_count
            or self._identity.is_asked
            or not self._connection.is_ready
        )

    def counters(self) -> dict[str, int]:
        """Counters since construction."""
        return {
            **self._counters,
            "retries": self._outcomes.retry_count,
            "errors": self._accumulator.error_count,
            "epoch_bumps": self._identity.bump_count,
        }

    def restart(self) -> None:
        """Recover from a run that a signal handler interrupted: send everything in flight again,
        over a new socket.

        The appliance recognises duplicates by their sequences. The sequences themselves may be
        wrong, so they restart under a new epoch once each sent batch has an outcome.
        """
        self._requests = InFlightRequests(self._settings.max_in_flight_requests_per_connection)
        if self._acks == 0:
            # No response will come, and a second copy would be a duplicate.
            for batch in self._accumulator.under_way():
                self._accumulator.end(batch, None, None)
        self._accumulator.rebuild(keeps_flight=False)
        if self._acks != 0:
            self._connection.give_up_socket()
        self._identity.restart()
        self.slot_map_change.restart()
        self.topic_recreation.restart()
        if self._schema_change is not None:
            self._schema_change.restart()
        self.metadata_refresh.restart()
        self.topic_lookups.restart()
        self._slow_check_at_ns = 0

    @property
    def may_send_unfilled(self) -> bool:
        """True if a due open batch would be sent at once."""
        return self._requests.may_send_unfilled and self._connection.is_ready

    def may_leave(self, queue: PartitionQueue) -> bool:
        """True if a batch of the partition may be sent before another response."""
        return self._requests.may_send and len(queue.in_flight) < self._window

    def run_once(self, now_ns: int, *, sends_first: bool = False) -> None:
        """Handle responses, fail expired batches, and send what is due.

        `sends_first`: a batch has just become due. It is sent before the socket is polled, which
        takes as long as sending.
        """
        connection = self._connection
        has_sent = sends_first and not self._has_pending_state() and self._send_all(now_ns)
        # It may lack credit or room among the requests, which a received message provides.
        if not has_sent:
            connection.process()
            if not self._run_timers(now_ns):
                return
            has_sent = self._send_all(now_ns)
        while has_sent and connection.process() and self._run_timers(now_ns):
            has_sent = self._send_all(now_ns)  # a response may let more be sent

    def _has_pending_state(self) -> bool:
        """True if a handshake, an epoch or a topic change must be completed before sending."""
        return (
            not self._connection.is_ready
            or self._identity.is_missing
            or self.slot_map_change.is_waiting
            or self.topic_recreation.is_waiting
            or (self._schema_change is not None and self._schema_change.is_waiting)
            or (self._refused_sizes is not None and self._refused_sizes.is_waiting)
        )

    def _begin_schema_change(self, old: TopicInfo) -> None:
        if self._schema_change is None:
            from tailrace.producer.topic_changes.schema_change import SchemaChange

            self._schema_change = SchemaChange(
                self._accumulator, self._connection, self._now_ns, self._on_schema_altered
            )
        self._schema_change.begin(old)

    def _begin_split(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        if self._refused_sizes is None:
            from tailrace.producer.topic_changes.refused_sizes import RefusedSizes

            self._refused_sizes = RefusedSizes(self._accumulator)
        self._refused_sizes.begin(queue, batch)

    def _on_schema_altered(self, info: TopicInfo) -> None:
        self.on_schema_altered(info)

    def _run_timers(self, now_ns: int) -> bool:
        """Do everything that is due by time. False: nothing can be sent now."""
        connection = self._connection
        self._accumulator.expire_linger(now_ns)
        if now_ns >= self._slow_check_at_ns or not connection.is_ready:
            if now_ns - self._expiry_checked_ns > EXPIRY_CHECK_NS:
                self._expiry_checked_ns = now_ns
                self._outcomes.expire(now_ns)
            connection.tick(now_ns)
            self._requests.note_slow(now_ns)
            if not connection.is_ready:
                return False
            self.metadata_refresh.step(now_ns)
            # Messages that are sent and received meanwhile only postpone the next tick.
            tick_ns = connection.next_tick_ns()
            self._slow_check_at_ns = (
                now_ns + SLOW_CHECK_NS if tick_ns is None else min(tick_ns, now_ns + SLOW_CHECK_NS)
            )
        if self.slot_map_change.is_waiting:
            self.slot_map_change.step(now_ns)
        if self.topic_recreation.is_waiting:
            self.topic_recreation.step(now_ns)
        if self.topic_lookups.is_waiting:
            self.topic_lookups.step(now_ns)
        if self._schema_change is not None and self._schema_change.is_waiting:
            self._schema_change.step(now_ns)
        if self._refused_sizes is not None and self._refused_sizes.is_waiting:
            self._refused_sizes.step()
        if self._identity.is_missing:
            self._identity.obtain()
            if not self._identity.is_known:
                return False
        return True

    def _send_all(self, now_ns: int) -> bool:
        """Send everything that may be sent. True: the socket was used, and must be polled again."""
        self.waits_for_credit = has_sent = False
        under_way, has_ready = self._requests, self._accumulator.has_ready
        while (
            under_way.may_send
            and has_ready(with_unfilled=under_way.may_send_unfilled)
            and self._send_request(now_ns)
        ):
            has_sent = True
        return has_sent

    # ---- requests --------------------------------------------------------------------------------

    def _send_request(self, now_ns: int) -> bool:
        """Send one request. False: there is nothing to send, or the connection takes nothing."""
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
        # Noted before sending: a signal handler may interrupt right after it.
        for _, batch, _ in request.entries:
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
        """Add the partition's batches that may be sent to the request. False: the request is full.

        The queue is listed again if its next batch waits for something else than a response of its
        partition: for credit, for room in a request, or for the end of a retry's backoff.
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
                # Only batches that may be in the log are sent, until each has an outcome.
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
            data = self._encoder.encode(queue, batch)
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

    def encode_ahead(self, queue: PartitionQueue) -> None:
        """Encode the newest ready batch if it may be sent after the next responses."""
        self._encoder.encode_ahead(queue, self._window)

    def encode_now(self, queue: PartitionQueue, batch: ProducerBatch) -> None:
        """Encode a batch that need not be sent yet: its rows are the program's memory."""
        self._encoder.encode_now(queue, batch)

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

    def _on_answer(self, request: InFlightRequest, response: Response | None) -> None:
        """Handle a response. None: the connection was lost before it.

        `Connection.process` calls it, with the lock held. Raises WireError for a response to
        another request.
        """
        answers = None if response is None else request.answers_in(response)
        correlation_id = 0 if response is None else response.correlation_id
        self._requests.remove(request)
        for position, (queue, batch, _) in enumerate(request.entries):
            if batch.state is IN_FLIGHT and batch in queue.in_flight:
                answer = None if answers is None else answers[position]
                self._outcomes.settle(queue, batch, answer, correlation_id)
            if queue.has_work:
                self._accumulator.mark_ready(queue)

    # ---- credit ----------------------------------------------------------------------------------

    def _has_credit(self, byte_count: int, request: InFlightRequest, now_ns: int) -> bool:
        """True if the front has granted credit for `byte_count` bytes, else requests it."""
        if self._connection.session.may_send(byte_count):
            return True
        if not request.entries:
            self.waits_for_credit = True
            self._ask_credit(byte_count, now_ns)
        return False

    def _ask_credit(self, requested: int, now_ns: int) -> None:
        received_count = self._connection.received_count
        if now_ns - self._asked_credit_ns > (
            CREDIT_RETRY_NS if received_count == self._asked_credit_count else CREDIT_REQUEST_NS
        ):
            self._asked_credit_ns, self._asked_credit_count = now_ns, received_count
            self._connection.request(Api.CREDIT, [encode_credit(requested)], None)

    def wait_until_received(self, timeout_s: float | None, guard: Guard) -> Steps[None]:
        """With acks=0, wait until the front has read everything: it answers a ping sent last.

        Closing a socket may lose what is still in it. A close with unread input (credit) resets a
        TCP connection, and the peer's kernel then drops what it holds. `guard` takes the producer's
        lock. Raises RequestTimeoutError, NotReachableError.
        """
        if self._unconfirmed:
            timeout_ms = (
                RECEIVED_TIMEOUT_MS
                if timeout_s is None
                else min(RECEIVED_TIMEOUT_MS, int(timeout_s * 1000))
            )
            yield from call(self._connection, Api.PING, [], timeout_ms, guard=guard)
            self._unconfirmed = False
