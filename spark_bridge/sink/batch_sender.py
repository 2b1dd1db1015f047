"""Sends finished batches to their partitions over one connection, unchanged: staged batches in the
publication, and records of the decision log.

Several batches of a partition are in flight at a time, at most as many as a partition remembers of
a producer. After a refusal or a missing answer the batches are sent again, from the first without
an acknowledgement on, with the same bytes. The appliance recognises duplicates (docs/protocol.md,
Sequences).

Owner: one sender, one thread.
Invariants:
- A lane's batches are sent in their order.
- While a batch has no known result, only the batches already in flight follow it.
- At most BUFFERED_BYTES wait.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any, NamedTuple, cast

from tailrace.client.connection import Connection
from tailrace.client.runtime import SYSTEM
from tailrace.client.steps import call_json_now
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode, code_of
from tailrace.core.errors import NotReachableError, RequestTimeoutError, error_for
from tailrace.format.batch_header import REMEMBERED_BATCHES
from tailrace.kernel import keep_message
from tailrace.producer.sending.in_flight_requests import Entry, InFlightRequest
from tailrace.protocol import messages
from tailrace.protocol.frame import Api
from tailrace.protocol.session import Response

BUFFERED_BYTES = 32 << 20
REQUEST_BYTES = 4 << 20
REQUESTS_MAX = 5
REQUEST_TIMEOUT_MS = 30_000
PAUSE_NS = 50_000_000
POLL_INTERVAL_NS = 1_000_000_000
_UNDECIDED = frozenset({ErrorCode.UNKNOWN_SEQUENCE, ErrorCode.STALE_PRODUCER_EPOCH})


class UndecidedError(Exception):
    """The partition knows another epoch of the producer, or none: only its log says whether it has
    the batch.
    """

    def __init__(self, lane: Lane, code: ErrorCode) -> None:
        super().__init__(f"{lane.name}: {code.name}")
        self.lane = lane
        self.code = code


class Outgoing:
    """A batch and its result."""

    __slots__ = ("base_offset", "data", "is_done", "is_sent")

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.is_sent = False
        self.is_done = False
        self.base_offset = -1


class Destination(NamedTuple):
    """Topic id and slot map version that a request carries for a batch."""

    topic_id: bytes
    slot_map_version: int


class Lane:
    """The batches for one partition, in their order."""

    def __init__(self, topic: TopicInfo, partition: int, map_version: int) -> None:
        self.topic = topic
        self.info = Destination(topic.topic_id, map_version)
        self.partition = partition
        self.waiting: deque[Outgoing] = deque()
        """Batches without an acknowledgement; the first ones may be in flight."""
        self.under_way = 0
        self.has_failed = False
        """True if a request failed: all requests in flight must be answered before any is sent
        again.
        """
        self.retry_at_ns = 0

    @property
    def name(self) -> str:
        """Name for error messages."""
        return f"{self.topic.name}-{self.partition}"


class BatchSender:
    """See the module's docstring."""

    def __init__(
        self, bootstrap: str, client_id: str, timeout_ms: int, *, asks: bool = False
    ) -> None:
        """`timeout_ms`: without any batch taken for so long, it gives up. `asks`: a batch with a
        sequence behind a gap is to learn whether the partition knows the producer
        (OUT_OF_ORDER_SEQUENCE), and not to be sent again.
        """
        self._undecided = (_UNDECIDED | {ErrorCode.OUT_OF_ORDER_SEQUENCE}) if asks else _UNDECIDED
        self.connection = Connection(bootstrap, client_id, SYSTEM, "sink")
        self._timeout_ms = timeout_ms
        self._lanes: list[Lane] = []
        self._buffered_bytes = 0
        self._requests = 0
        self._error: Exception | None = None
        self._last_refusal = ""
        self._credit_asked_ns = 0
        self._progress_ns = SYSTEM.monotonic_ns()

    def close(self) -> None:
        """Close the connection; requests in flight may still be carried out."""
        self.connection.close()

    def call_json(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request without batches.

        Raises: TailraceError.
        """
        return call_json_now(self.connection, api, request, self._timeout_ms)

    def lane(self, topic: TopicInfo, partition: int, map_version: int = 0) -> Lane:
        """Add a partition to send to; `map_version`: that of the slot map that routed its rows."""
        lane = Lane(topic, partition, map_version)
        self._lanes.append(lane)
        return lane

    def add(self, lane: Lane, data: bytearray) -> Outgoing:
        """Queue a batch; wait while too much is queued.

        Raises: as `drain`.
        """
        outgoing = Outgoing(data)
        lane.waiting.append(outgoing)
        self._buffered_bytes += len(data)
        self._run_once(may_wait=False)
        while self._buffered_bytes > BUFFERED_BYTES:
            self._run_once(may_wait=True)
        return outgoing

    def drain(self) -> None:
        """Send until every batch is acknowledged.

        Raises:
        - UndecidedError.
        - TailraceError for what a retry cannot mend.
        - RequestTimeoutError and NotReachableError.
        """
        while any(lane.waiting for lane in self._lanes):
            self._run_once(may_wait=True)

    # ---- one turn --------------------------------------------------------------------------------

    def _run_once(self, *, may_wait: bool) -> None:
        connection, now_ns = self.connection, SYSTEM.monotonic_ns()
        connection.process()
        connection.tick(now_ns)
        if connection.fatal is not None:
            raise connection.fatal
        while connection.is_ready and self._requests < REQUESTS_MAX and self._send_request(now_ns):
            connection.process()
        if self._error is not None:
            raise self._error
        if not any(lane.waiting for lane in self._lanes):
            return
        if now_ns - self._progress_ns > self._timeout_ms * 1_000_000:
            self._abandon()
        if may_wait:
            tick_ns = connection.next_tick_ns()
            until_ns = min(
                now_ns + POLL_INTERVAL_NS,
                *(lane.retry_at_ns for lane in self._lanes if lane.retry_at_ns > now_ns),
                tick_ns or now_ns + POLL_INTERVAL_NS,
            )
            if (self._requests < REQUESTS_MAX and not connection.is_ready) or self._credit_asked_ns:
                until_ns = min(until_ns, now_ns + PAUSE_NS)
            connection.wait(max(0, until_ns - now_ns))
            connection.process()

    def _abandon(self) -> None:
        lane = next(lane for lane in self._lanes if lane.waiting)
        why = f"; the last answer was {self._last_refusal}" if self._last_refusal else ""
        if not self.connection.is_ready:
            raise NotReachableError(
                f"no appliance answered at {self.connection.address} for {self._timeout_ms} ms, "
                f"while {lane.name} was written"
            )
        raise RequestTimeoutError(f"{lane.name} accepted no batch for {self._timeout_ms} ms{why}")

    def _send_request(self, now_ns: int) -> bool:
        session = self.connection.session
        request = InFlightRequest(session.version(Api.PRODUCE), REQUEST_BYTES)
        chosen: list[tuple[Lane, Outgoing]] = []
        for lane in self._lanes:
            if (lane.has_failed and lane.under_way) or lane.retry_at_ns > now_ns:
                continue
            lane.has_failed = False
            for outgoing in lane.waiting:
                if outgoing.is_done or outgoing.is_sent:
                    continue
                if lane.under_way >= REMEMBERED_BATCHES // 2 or not request.has_room(
                    len(outgoing.data)
                ):
                    break
                if not session.may_send(request.byte_count + len(outgoing.data)):
                    if not chosen and now_ns - self._credit_asked_ns > PAUSE_NS:
                        self._credit_asked_ns = now_ns
                        self.connection.request(
                            Api.CREDIT, [messages.encode_credit(len(outgoing.data))], None
                        )
                    break
                request.add(Entry(cast("Any", lane), cast("Any", outgoing), outgoing.data))
                chosen.append((lane, outgoing))
                outgoing.is_sent = True
                lane.under_way += 1
        if not chosen:
            return False
        body = request.body(messages.ACKS_ALL, REQUEST_TIMEOUT_MS)
        if not self.connection.request(
            Api.PRODUCE, body, partial(self._on_answer, request.version, chosen)
        ):
            for lane, outgoing in chosen:
                outgoing.is_sent = False
                lane.under_way -= 1
            return False
        self._credit_asked_ns = 0
        session.sent_bytes += request.byte_count
        self._requests += 1
        return True

    # ---- answers ---------------------------------------------------------------------------------

    def _on_answer(
        self, version: int, chosen: list[tuple[Lane, Outgoing]], response: Response | None
    ) -> None:
        self._requests -= 1
        for lane, outgoing in chosen:
            lane.under_way -= 1
            outgoing.is_sent = False
        if response is None or response.code is not ErrorCode.OK:
            for lane, _ in chosen:
                self._refuse(
                    lane,
                    ErrorCode.TIMED_OUT if response is None else response.code,
                    "" if response is None else response.detail(),
                )
            return
        if version < 2:
            offsets = [(0, messages.decode_produced(response.body[0]).base_offset)]
        else:
            offsets = [
                (entry.error, entry.base_offset)
                for entry in messages.decode_produced_batches(response.body[0])
            ]
        for (lane, outgoing), (error, offset) in zip(chosen, offsets, strict=True):
            if error:
                self._refuse(lane, code_of(error), "")
                continue
            outgoing.is_done, outgoing.base_offset = True, offset
            self._progress_ns = SYSTEM.monotonic_ns()
            while lane.waiting and lane.waiting[0].is_done:
                data = lane.waiting.popleft().data
                self._buffered_bytes -= len(data)
                keep_message(
                    data
                )  # the next batch is copied into its memory, once ZeroMQ has let go of it

    def _refuse(self, lane: Lane, code: ErrorCode, detail: str) -> None:
        lane.has_failed = True
        lane.retry_at_ns = SYSTEM.monotonic_ns() + PAUSE_NS
        self._last_refusal = f"{code.name} of {lane.name}"
        if self._error is not None:
            return
        if code in self._undecided:
            self._error = UndecidedError(lane, code)
        elif code is ErrorCode.STALE_SLOT_MAP or not ERROR_TABLE[code].retriable:
            self._error = error_for(code, f"{lane.name}: {detail or ERROR_TABLE[code].meaning}")
