"""PRODUCE requests: the batches that are sent together, and the requests in flight.

At most `limit` requests are in flight on a connection (Kafka's
max.in.flight.requests.per.connection). At most UNFILLED_MAX of them took a batch before it was
full. While one does, open batches fill on, as small segments wait for an acknowledgement in TCP
(J. Nagle, RFC 896; G. Minshall's modification counts only the small ones). A high rate of single
records thus makes requests larger, not more frequent.

A response comes when all batches of the request have an outcome, so a stalled worker would delay
the others' records by request_timeout_ms. A request that takes longer than SLOW_NS counts no
longer. Its partitions send nothing more before its response.

Owner: a Producer, under its lock.
Invariants:
- Batches of a partition are in a request in their order.
- A request has 1 to PRODUCE_BATCHES_MAX batches in at most PRODUCE_FRAMES_MAX frames.
- A request of several batches has at most its maximum of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.producer.batches.partition_queue import PartitionQueue
from tailrace.producer.batches.producer_batch import ProducerBatch
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import PRODUCE_FRAMES_MAX, WireError
from tailrace.protocol.session import Response

_OK = ErrorCode.OK
UNFILLED_MAX = 1
SLOW_NS = 1_000_000_000
OWN_FRAME_BYTES = 32 << 10
"""A batch from this size on gets a frame of its own. Smaller ones are joined."""


class Entry(NamedTuple):
    """A batch in a request, and its queue."""

    queue: PartitionQueue
    batch: ProducerBatch
    data: Readable


class InFlightRequest:
    """Batches that are sent together."""

    __slots__ = (
        "_batches_max", "_bytes_max", "_ends_small", "_frame_count", "byte_count", "entries",
        "has_unfilled", "is_slow", "sent_ns", "version",
    )  # fmt: skip

    def __init__(self, version: int, bytes_max: int) -> None:
        """`version`: of PRODUCE. In version 1 a request has a single batch."""
        self.version = version
        self._batches_max = produce_messages.PRODUCE_BATCHES_MAX if version > 1 else 1
        self._bytes_max = bytes_max
        self._frame_count = 0
        self._ends_small = False
        """True if the last frame takes another small batch."""
        self.entries: list[Entry] = []
        self.byte_count = 0
        self.has_unfilled = False
        """True if a batch was taken before it was full."""
        self.sent_ns = 0
        self.is_slow = False

    def has_room(self, byte_count: int) -> bool:
        """True if a batch of `byte_count` bytes fits."""
        if not self.entries:
            return True
        if len(self.entries) >= self._batches_max or self.byte_count + byte_count > self._bytes_max:
            return False
        return self._frame_count < PRODUCE_FRAMES_MAX or (
            self._ends_small and byte_count < OWN_FRAME_BYTES
        )

    def add(self, entry: Entry) -> None:
        """Add a batch that fits."""
        size = len(entry.data)
        is_small = size < OWN_FRAME_BYTES
        if not (is_small and self._ends_small):
            self._frame_count += 1
        self._ends_small = is_small
        self.entries.append(entry)
        self.byte_count += size

    def body(self, acks: int, timeout_ms: int) -> list[Readable]:
        """The frames after the request's header."""
        if self.version < 2:
            ((queue, _, data),) = self.entries
            info = queue.info
            head = produce_messages.ProduceRequest(
                info.topic_id, queue.partition, acks, timeout_ms, info.slot_map_version
            )
            return [produce_messages.encode_produce(head), data]
        entries = [
            (queue.info.topic_id, queue.partition, queue.info.slot_map_version, len(data))
            for queue, _, data in self.entries
        ]
        head_frame = produce_messages.encode_produce_batches(
            produce_messages.ProduceBatches(acks, timeout_ms, entries, self._trace_id())
        )
        if len(self.entries) == 1:
            return [head_frame, self.entries[0].data]
        return [head_frame, *self._frames()]

    def _trace_id(self) -> bytes:
        """A trace that a record belongs to; empty if none is known, or the appliance knows no
        traces.
        """
        if self.version < produce_messages.TRACED_PRODUCE_VERSION:
            return b""
        return next((batch.trace_id for _, batch, _ in self.entries if batch.trace_id), b"")

    def answers_in(
        self, response: Response
    ) -> Sequence[produce_messages.ProducedEntry | tuple[ErrorCode, str]]:
        """The outcome of each batch, from a response. Raises WireError."""
        count = len(self.entries)
        if response.code is not _OK:
            return [(response.code, response.detail())] * count
        if self.version < 2:
            offset, append_time_us, epoch, flags = produce_messages.decode_produced(
                response.body[0]
            )
            return [produce_messages.ProducedEntry(0, flags, epoch, offset, append_time_us)]
        answers = produce_messages.decode_produced_batches(response.body[0])
        if len(answers) != count:
            raise WireError(
                ErrorCode.MALFORMED_REQUEST,
                f"a PRODUCE response has {len(answers)} batches; {count} were sent",
            )
        return answers

    def _frames(self) -> list[Readable]:
        frames: list[Readable] = []
        small: list[Readable] = []
        for _, _, data in self.entries:
            if len(data) < OWN_FRAME_BYTES:
                small.append(data)
                continue
            if small:
                frames.append(_joined(small))
                small = []
            frames.append(data)
        if small:
            frames.append(_joined(small))
        return frames


def _joined(small: list[Readable]) -> Readable:
    return small[0] if len(small) == 1 else b"".join(small)


class InFlightRequests:
    """Requests without a response, in the order in which they were sent."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: dict[InFlightRequest, None] = {}
        self._unfilled_count = 0
        self._slow: list[InFlightRequest] = []
        self.may_send = True
        """True if another request may be sent."""
        self.may_send_unfilled = True
        """True if that request may take batches that are not full."""

    def add(self, request: InFlightRequest, now_ns: int) -> None:
        """Add a request that was sent."""
        request.sent_ns = now_ns
        self._requests[request] = None
        self._unfilled_count += request.has_unfilled
        self._note_count()

    def remove(self, request: InFlightRequest) -> None:
        """Remove a request with a response, or whose connection is lost."""
        if request not in self._requests:
            return  # forgotten by a restart
        del self._requests[request]
        if request.is_slow:
            self._slow.remove(request)
        else:
            self._unfilled_count -= request.has_unfilled
        self._note_count()

    def note_slow(self, now_ns: int) -> None:
        """Stop counting requests that take longer than SLOW_NS."""
        for request in self._requests:
            if now_ns - request.sent_ns < SLOW_NS:
                break
            if not request.is_slow:
                request.is_slow = True
                self._slow.append(request)
                self._unfilled_count -= request.has_unfilled
                self._note_count()

    def _note_count(self) -> None:
        self.may_send = len(self._requests) - len(self._slow) < self._limit
        self.may_send_unfilled = self.may_send and self._unfilled_count < UNFILLED_MAX

    def is_muted(self, queue: PartitionQueue) -> bool:
        """True if a batch of the partition is in a slow request."""
        return bool(self._slow) and any(
            entry.queue is queue for request in self._slow for entry in request.entries
        )
