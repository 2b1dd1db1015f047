"""PRODUCE requests of a producer: the batches that leave together, and which requests are under
way.

At most `limit` requests are under way on a connection (Kafka's
max.in.flight.requests.per.connection). Of those that took a batch before it was full, at most
UNFILLED_MAX are: while one is, open batches go on filling, as small segments wait for an
acknowledgement in TCP (J. Nagle, RFC 896; counting only the small ones is G. Minshall's
modification). So a rate of single records that a request for each would be too much for makes
requests larger, not more.

A request is answered when all of its batches are, so a worker that stands still would hold back the
others' records for the whole request_timeout_ms. One that takes longer than SLOW_NS is not counted
any more; nothing more is sent to its partitions until it is answered.

Owner: a Producer, under its lock.
Invariants: batches of a partition are in a request in their order; a request has a batch, at most
    PRODUCE_BATCHES_MAX of them in at most PRODUCE_FRAMES_MAX frames, and no more bytes than it may,
    unless it is a single batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tailrace.core.error_codes import ErrorCode
from tailrace.format.crc32c import Readable
from tailrace.producer.partition_queue import PartitionQueue
from tailrace.producer.producer_batch import ProducerBatch
from tailrace.protocol import messages as requests
from tailrace.protocol.frame import PRODUCE_FRAMES_MAX, WireError
from tailrace.protocol.session import Response

_OK = ErrorCode.OK
UNFILLED_MAX = 1
SLOW_NS = 1_000_000_000
OWN_FRAME_BYTES = 32 << 10
"""A batch of so many bytes is a frame of its own; smaller ones are joined."""


class Entry(NamedTuple):
    """A batch in a request, and the queue that it comes from."""

    queue: PartitionQueue
    batch: ProducerBatch
    data: Readable


class InFlightRequest:
    """Batches that leave together."""

    __slots__ = (
        "_batches_max", "_bytes_max", "_ends_small", "_frame_count", "byte_count", "entries",
        "has_unfilled", "is_slow", "sent_ns", "version",
    )  # fmt: skip

    def __init__(self, version: int, bytes_max: int) -> None:
        """`version`: of PRODUCE; in the first there is one batch in a request."""
        self.version = version
        self._batches_max = requests.PRODUCE_BATCHES_MAX if version > 1 else 1
        self._bytes_max = bytes_max
        self._frame_count = 0
        self._ends_small = False
        """Whether the last frame takes another small batch."""
        self.entries: list[Entry] = []
        self.byte_count = 0
        self.has_unfilled = False
        """Whether a batch is among them that could have gone on filling."""
        self.sent_ns = 0
        self.is_slow = False

    def has_room(self, byte_count: int) -> bool:
        """Whether a batch of so many bytes may go with the others."""
        if not self.entries:
            return True
        if len(self.entries) >= self._batches_max or self.byte_count + byte_count > self._bytes_max:
            return False
        return self._frame_count < PRODUCE_FRAMES_MAX or (
            self._ends_small and byte_count < OWN_FRAME_BYTES
        )

    def add(self, entry: Entry) -> None:
        """One more batch, for which there is room."""
        size = len(entry.data)
        is_small = size < OWN_FRAME_BYTES
        if not (is_small and self._ends_small):
            self._frame_count += 1
        self._ends_small = is_small
        self.entries.append(entry)
        self.byte_count += size

    def body(self, acks: int, timeout_ms: int) -> list[Readable]:
        """The frames behind the header."""
        if self.version < 2:
            ((queue, _, data),) = self.entries
            info = queue.info
            head = requests.ProduceRequest(
                info.topic_id, queue.partition, acks, timeout_ms, info.slot_map_version
            )
            return [requests.encode_produce(head), data]
        entries = [
            (queue.info.topic_id, queue.partition, queue.info.slot_map_version, len(data))
            for queue, _, data in self.entries
        ]
        head_frame = requests.encode_produce_batches(
            requests.ProduceBatches(acks, timeout_ms, entries)
        )
        if len(self.entries) == 1:
            return [head_frame, self.entries[0].data]
        return [head_frame, *self._frames()]

    def answers_in(
        self, response: Response
    ) -> Sequence[requests.ProducedEntry | tuple[ErrorCode, str]]:
        """What a response says of each of the batches. Raises WireError."""
        count = len(self.entries)
        if response.code is not _OK:
            return [(response.code, response.detail())] * count
        if self.version < 2:
            offset, append_time_us, epoch, flags = requests.decode_produced(response.body[0])
            return [requests.ProducedEntry(0, flags, epoch, offset, append_time_us)]
        answers = requests.decode_produced_batches(response.body[0])
        if len(answers) != count:
            raise WireError(
                ErrorCode.MALFORMED_REQUEST,
                f"a produce response tells of {len(answers)} batches; {count} were sent",
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
    """Requests that are to be answered, in the order in which they were sent."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._requests: dict[InFlightRequest, None] = {}
        self._unfilled_count = 0
        self._slow: list[InFlightRequest] = []
        self.may_send = True
        """Whether one more request may be under way."""
        self.may_send_unfilled = True
        """Whether it may take batches that are not full."""

    def add(self, request: InFlightRequest, now_ns: int) -> None:
        """It was sent."""
        request.sent_ns = now_ns
        self._requests[request] = None
        self._unfilled_count += request.has_unfilled
        self._note_count()

    def remove(self, request: InFlightRequest) -> None:
        """It was answered, or its connection is lost."""
        if request not in self._requests:
            return  # it was forgotten with what was cut off by a signal's handler
        del self._requests[request]
        if request.is_slow:
            self._slow.remove(request)
        else:
            self._unfilled_count -= request.has_unfilled
        self._note_count()

    def note_slow(self, now_ns: int) -> None:
        """Requests that take long hold nothing back any more but their own partitions."""
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
        """Whether a batch of the partition is in a request that takes long."""
        return bool(self._slow) and any(
            entry.queue is queue for request in self._slow for entry in request.entries
        )
