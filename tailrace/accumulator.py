"""Records on their way into batches, and batches on their way to their answers.

Owner: a Producer, under its lock.
Invariants: batches of a partition are sent in the order they were begun, and their sequences ascend without a gap; at most
`max_in_flight` are under
    way; a batch ends exactly once, with an offset or an error; `buffered_bytes` is the sum of all batches that have not ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

from tailrace import arrow_batch
from tailrace.arrow_batch import Headers
from tailrace.batch_header import NO_PRODUCER, NO_SEQUENCE, SEQUENCE_MODULUS, stamp_producer
from tailrace.errors import ClientClosedError, RequestTimeoutError, TailraceError
from tailrace.records import BatchMetadata, RecordMetadata
from tailrace.topics import TopicInfo

if TYPE_CHECKING:
    import pyarrow as pa

RECORD_OVERHEAD_BYTES = 24
"""What a record costs in a batch beside key and value: timestamp, three offsets, bits."""
BATCH_OVERHEAD_BYTES = 2048
OnDelivery = Callable[[RecordMetadata | None, TailraceError | None], None]


class BatchState(Enum):
    OPEN = 1
    READY = 2
    IN_FLIGHT = 3
    ENDED = 4


class ProducerBatch:
    """Records of one partition that are sent together. Rows are lists while it is open, bytes once it is encoded."""

    __slots__ = (
        "attempts", "base_offset", "base_sequence", "bytes_used", "callbacks", "children", "count", "created_ns", "data", "epoch", "error",
        "frame", "headers", "info", "keys", "last_refusal", "order", "partition", "producer_id", "state", "timestamps_us", "values", "waiter", "was_sent",
    )  # fmt: skip

    def __init__(self, info: TopicInfo, partition: int, created_ns: int, order: tuple[int, ...]) -> None:
        self.info = info
        self.partition = partition
        self.created_ns = created_ns
        self.order = order
        """Its place among the producer's batches; halves of a split one come where it was."""
        self.state = BatchState.OPEN
        self.count = 0
        self.bytes_used = BATCH_OVERHEAD_BYTES
        self.timestamps_us: list[int] = []
        self.keys: list[bytes | None] = []
        self.values: list[Any] = []
        self.headers: list[Headers] | None = None
        self.frame: pa.RecordBatch | None = None
        self.data: bytearray | None = None
        self.callbacks: list[tuple[int, OnDelivery]] | None = None
        self.attempts = 0
        self.last_refusal = ""
        """What the appliance said when it was sent last."""
        self.was_sent = False
        """Whether it may have been appended without our knowing: then only its sequence tells a second copy from a first."""
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.base_sequence = NO_SEQUENCE
        self.base_offset: int | None = None
        self.error: TailraceError | None = None
        self.waiter: threading.Event | None = None
        self.children: tuple[int, ProducerBatch, ProducerBatch] | None = None
        """(row, left, right) when it was too large as bytes and was split before `row`."""

    def add(self, timestamp_us: int, key: bytes | None, value: Any, headers: Headers, byte_count: int) -> int:
        """Append a record; answers its row."""
        row = self.count
        if headers:
            if self.headers is None:
                self.headers = [None] * row
            self.headers.append(headers)
        elif self.headers is not None:
            self.headers.append(None)
        self.timestamps_us.append(timestamp_us)
        self.keys.append(key)
        self.values.append(value)
        self.bytes_used += byte_count
        self.count = row + 1
        return row

    def has_ended(self) -> bool:
        return self.state is BatchState.ENDED

    def _to_frame(self) -> pa.RecordBatch:
        if self.frame is not None:
            return self.frame
        if self.info.typed:
            return arrow_batch.rows_from_dicts(self.values, self.info.schema)
        return arrow_batch.default_rows(self.timestamps_us, self.keys, self.values, self.headers)

    def encode(self, compression: str) -> bytearray:
        """The batch as bytes, kept for retries. Raises InvalidRecordError."""
        if self.data is None:
            frame = self._to_frame()
            stamps = self.timestamps_us
            self.data = arrow_batch.encode(
                frame, schema_id=self.info.schema_id, seed=self.info.seeds[self.partition], compression=compression,
                first_timestamp_us=stamps[0], max_timestamp_us=max(stamps),
            )  # fmt: skip
            self.keys = []
            self.values = []
            self.headers = None
            self.frame = frame if self.frame is not None else None
        return self.data

    def number(self, producer_id: int, epoch: int, base_sequence: int) -> None:
        """Write the producer's identity and the sequence into the encoded batch."""
        assert self.data is not None
        self.producer_id, self.epoch, self.base_sequence = producer_id, epoch, base_sequence
        # A fresh copy: ZeroMQ may still be sending the old bytes.
        if self.attempts:
            self.data = bytearray(self.data)
        with memoryview(self.data) as view:
            stamp_producer(
                view, producer_id=producer_id, producer_epoch=epoch, base_sequence=base_sequence, seed=self.info.seeds[self.partition]
            )

    def split(self) -> tuple[ProducerBatch, ProducerBatch] | None:
        """Two batches with half of the rows each, or None for a single row."""
        if self.count < 2:
            return None
        frame = self._frame_again()
        middle = self.count // 2
        halves = []
        for side, (start, end) in enumerate(((0, middle), (middle, self.count))):
            half = ProducerBatch(self.info, self.partition, self.created_ns, (*self.order, side))
            half.frame = arrow_batch.cut_out(frame, start, end - start)
            half.count = end - start
            half.timestamps_us = self.timestamps_us[start:end] if len(self.timestamps_us) == self.count else list(self.timestamps_us)
            half.bytes_used = self.bytes_used // 2 if side else self.bytes_used - self.bytes_used // 2
            half.state = BatchState.READY
            halves.append(half)
        left, right = halves
        for row, callback in self.callbacks or ():
            target, target_row = (left, row) if row < middle else (right, row - middle)
            target.callbacks = [*(target.callbacks or []), (target_row, callback)]
        self.callbacks = None
        self.children = (middle, left, right)
        return left, right

    def _frame_again(self) -> pa.RecordBatch:
        if self.frame is not None:
            return self.frame
        import pyarrow as pa

        assert self.data is not None
        return pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(bytes(self.data))), self.info.schema)

    def metadata(self, row: int) -> RecordMetadata:
        offset = None if self.base_offset is None else self.base_offset + row
        stamp_us = self.timestamps_us[row] if row < len(self.timestamps_us) else self.timestamps_us[-1]
        return RecordMetadata(self.info.name, self.partition, offset, stamp_us // 1000)

    def end(
        self, base_offset: int | None, error: TailraceError | None
    ) -> list[tuple[OnDelivery, RecordMetadata | None, TailraceError | None]]:
        """Settle the batch; answers the callbacks to make, which the caller does without its lock."""
        self.state = BatchState.ENDED
        self.base_offset = base_offset
        self.error = error
        self.data = None
        self.frame = None
        if self.waiter is not None:
            self.waiter.set()
        calls = [(callback, None if error else self.metadata(row), error) for row, callback in self.callbacks or ()]
        self.callbacks = None
        return calls


class Waits(Protocol):
    """Who can wait for a batch (see `tailrace.sender.Sender`)."""

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool: ...


class Handle:
    """What `send` answers: the record's fate, when it is known. No lock or condition is made until someone waits."""

    __slots__ = ("_batch", "_row", "_sender")

    def __init__(self, sender: Waits, batch: ProducerBatch, row: int) -> None:
        self._sender = sender
        self._batch = batch
        self._row = row

    def _resolve(self) -> ProducerBatch:
        """The batch that holds the record now; a split moves it."""
        while self._batch.children is not None:
            middle, left, right = self._batch.children
            if self._row < middle:
                self._batch = left
            else:
                self._batch, self._row = right, self._row - middle
        return self._batch

    def done(self) -> bool:
        return self._resolve().state is BatchState.ENDED

    def exception(self, timeout: float | None = None) -> TailraceError | None:
        """The error that the record ended with, or None. Raises RequestTimeoutError when it has not ended within `timeout` seconds."""
        while not self.done():
            if not self._sender.wait_for(self._resolve(), timeout):
                raise RequestTimeoutError(f"the record was not acknowledged within {timeout} s")
        return self._resolve().error

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record went. Raises its error, or RequestTimeoutError when it has not ended within `timeout` seconds (it may still
        be delivered).
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._resolve().metadata(self._row)


def _leaves(handles: list[Handle]) -> list[ProducerBatch]:
    """The batches that hold the handles' rows now, splits followed."""
    leaves: list[ProducerBatch] = []
    stack = [handle._batch for handle in reversed(handles)]
    while stack:
        batch = stack.pop()
        if batch.children is not None:
            stack += [batch.children[2], batch.children[1]]
        else:
            leaves.append(batch)
    return leaves


class BatchesHandle:
    """What `send_arrow` answers: the fate of the batches that the frame was cut into."""

    __slots__ = ("_handles",)

    def __init__(self, handles: list[Handle]) -> None:
        self._handles = handles

    def done(self) -> bool:
        return all(batch.state is BatchState.ENDED for batch in _leaves(self._handles))

    def exception(self, timeout: float | None = None) -> TailraceError | None:
        """The first error among the batches, or None. Raises RequestTimeoutError when not all have ended within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for handle in self._handles:
            while (waiting := next((leaf for leaf in _leaves([handle]) if leaf.state is not BatchState.ENDED), None)) is not None:
                remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not handle._sender.wait_for(waiting, remaining):
                    raise RequestTimeoutError(f"not everything was acknowledged within {timeout} s")
        return next((leaf.error for leaf in _leaves(self._handles) if leaf.error is not None), None)

    def result(self, timeout: float | None = None) -> list[BatchMetadata]:
        """Where each batch went, in the order of the rows within each partition. Raises the first error."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return [BatchMetadata(b.info.name, b.partition, b.base_offset, b.count) for b in _leaves(self._handles)]


class PartitionQueue:
    """The batches of one partition, from open to answered."""

    __slots__ = ("in_flight", "info", "is_gone", "is_listed", "muted_until_ns", "next_sequence", "open", "partition", "ready")

    def __init__(self, info: TopicInfo, partition: int) -> None:
        self.info = info
        self.partition = partition
        self.open: ProducerBatch | None = None
        self.ready: deque[ProducerBatch] = deque()
        self.in_flight: deque[ProducerBatch] = deque()
        self.next_sequence = 0
        self.muted_until_ns = 0
        """Not to be sent from before this: a retry is waiting for its time."""
        self.is_gone = False
        """The appliance does not know the topic any more: ask anew before sending to it."""
        self.is_listed = False
        """Whether the producer's list of queues with something to send holds it."""

    def close_open(self) -> bool:
        """The open batch, if any, takes no more records."""
        if self.open is None:
            return False
        self.open.state = BatchState.READY
        self.ready.append(self.open)
        self.open = None
        return True

    def take_sequence(self, count: int) -> int:
        sequence = self.next_sequence
        self.next_sequence = (sequence + count) % SEQUENCE_MODULUS
        return sequence

    def first_of_unknown_fate(self) -> int:
        """Where among `ready` the first batch stands that may have been appended, -1: there is none. What was never sent comes behind all that was."""
        for position, batch in enumerate(self.ready):
            if batch.was_sent:
                return position
            if not batch.attempts:
                break
        return -1

    def batches(self) -> list[ProducerBatch]:
        return [*self.in_flight, *self.ready, *([self.open] if self.open is not None else [])]


def closed_error() -> ClientClosedError:
    return ClientClosedError("the producer is closed")
