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
from collections.abc import Callable, Generator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tailrace import arrow_batch, few_rows
from tailrace.arrow_batch import Headers
from tailrace.batch_header import NO_PRODUCER, NO_SEQUENCE, REMEMBERED_BATCHES, SEQUENCE_MODULUS, stamp_producer
from tailrace.delays import DelayIds, delay_id
from tailrace.errors import ClientClosedError, RequestTimeoutError, TailraceError
from tailrace.few_rows import FEW
from tailrace.records import BatchMetadata, RecordMetadata
from tailrace.topics import TopicInfo

if TYPE_CHECKING:
    import concurrent.futures

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
    """Records of one partition that are sent together: a flat list of rows while it is open, bytes once it is encoded."""

    __slots__ = (
        "attempts", "base_offset", "base_sequence", "callbacks", "children", "count", "created_ns", "data", "dues_us", "epoch", "error",
        "frame", "headers", "info", "last_refusal", "order", "ordinal", "partition", "producer_id", "repeats", "reserved_bytes",
        "room", "rows", "stamps_us", "state", "timestamps_us", "waiter", "waits", "was_sent",
    )  # fmt: skip

    def __init__(self, waits: Waits, info: TopicInfo, partition: int, created_ns: int, order: tuple[int, ...]) -> None:
        self.waits = waits
        self.info = info
        self.partition = partition
        self.created_ns = created_ns
        self.order = order
        """Its place among the producer's batches; halves of a split one come where it was."""
        self.state = BatchState.OPEN
        self.count = 0
        """How many records it has; known once it is closed."""
        self.rows: list[Any] = []
        """key, value, nanoseconds since 1970, and so on: one list, so that a record is one addition (see `Producer.send`)."""
        self.reserved_bytes = BATCH_OVERHEAD_BYTES
        """What it takes of the producer's buffer_memory."""
        self.room = 0
        """How much of that is not used yet."""
        self.timestamps_us: dict[int, int] | None = None
        """row -> the timestamp that was given for it, in the place of the time of its `send`."""
        self.headers: dict[int, Headers] | None = None
        self.dues_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] = [] if info.delay_of else ()
        """When each row of a delay log's batch is due."""
        self.repeats: dict[int, str] | None = None
        """row -> how it recurs."""
        self.stamps_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] = ()
        """The records' timestamps, known once it is encoded. Of a frame: its first and its largest; with LogAppendTime: the appliance's."""
        self.frame: pa.RecordBatch | None = None
        self.data: bytearray | None = None
        self.callbacks: list[tuple[int, OnDelivery]] | None = None
        self.attempts = 0
        self.last_refusal = ""
        """What the appliance said when it was sent last."""
        self.was_sent = False
        """Whether it may have been appended without our knowing: then only its sequence tells a second copy from a first."""
        self.ordinal = 0
        """Its place among the batches of its partition that were given a sequence."""
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.base_sequence = NO_SEQUENCE
        self.base_offset: int | None = None
        self.error: TailraceError | None = None
        self.waiter: threading.Event | None = None
        self.children: tuple[int, ProducerBatch, ProducerBatch] | None = None
        """(row, left, right) when it was too large as bytes and was split before `row`."""

    def add(self, stamp_ns: int, timestamp_us: int | None, key: bytes | None, value: Any, headers: Headers, byte_count: int) -> int:
        """Append a record for which there is room; answers its row."""
        row = len(self.rows) // 3
        if headers:
            self.headers = self.headers or {}
            self.headers[row] = headers
        if timestamp_us is not None:
            self.timestamps_us = self.timestamps_us or {}
            self.timestamps_us[row] = timestamp_us
        self.rows += (key, value, stamp_ns)
        self.room -= byte_count
        return row

    def close(self) -> int:
        """It takes no more records; answers how many bytes of its reservation it did not need."""
        self.state = BatchState.READY
        self.count = len(self.rows) // 3
        unused, self.room = self.room, 0
        self.reserved_bytes -= unused
        return unused

    def has_ended(self) -> bool:
        return self.state is BatchState.ENDED

    @property
    def ends_without_key(self) -> bool:
        return bool(self.rows) and self.rows[-3] is None

    def _from_rows(self) -> pa.RecordBatch:
        keys, values, stamps = self.rows[0::3], self.rows[1::3], np.array(self.rows[2::3], np.int64)
        stamps //= 1000
        for row, stamp_us in (self.timestamps_us or {}).items():
            stamps[row] = stamp_us
        self.stamps_us = stamps
        if self.info.typed:
            rows = arrow_batch.rows_from_dicts(values, self.info.schema)
        else:
            headers = [self.headers.get(row) for row in range(self.count)] if self.headers else None
            rows = arrow_batch.default_rows(stamps, keys, values, headers)
        if self.info.delay_of:
            repeats = [self.repeats.get(row) for row in range(self.count)] if self.repeats else None
            rows = arrow_batch.with_delays(rows, self.info.schema, self.dues_us, repeats)
        return rows

    def encode(self, compression: str) -> bytearray:
        """The batch as bytes, kept for retries. Raises InvalidRecordError."""
        if (
            self.data is None
            and self.frame is None
            and compression == "none"
            and self.count <= FEW
            and not self.info.typed
            and not self.info.delay_of
            and not self.headers
        ):
            self.data = self._encode_few()
        elif self.data is None:
            frame = self.frame if self.frame is not None else self._from_rows()
            self.data = arrow_batch.encode(
                frame, schema_id=self.info.schema_id, seed=self.info.seeds[self.partition], compression=compression,
                first_timestamp_us=int(self.stamps_us[0]), max_timestamp_us=int(np.max(self.stamps_us)),
            )  # fmt: skip
        self.rows = []
        self.timestamps_us = self.headers = self.repeats = None
        return self.data

    def _encode_few(self) -> bytearray:
        stamps = [stamp_ns // 1000 for stamp_ns in self.rows[2::3]]
        for row, stamp_us in (self.timestamps_us or {}).items():
            stamps[row] = stamp_us
        self.stamps_us = stamps
        message = few_rows.encode(stamps, self.rows[0::3], self.rows[1::3])
        return arrow_batch.with_header(
            message, self.count, schema_id=self.info.schema_id, seed=self.info.seeds[self.partition], first_timestamp_us=stamps[0],
            max_timestamp_us=max(stamps),
        )  # fmt: skip

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
            half = ProducerBatch(self.waits, self.info, self.partition, self.created_ns, (*self.order, side))
            half.frame = arrow_batch.cut_out(frame, start, end - start)
            half.count = end - start
            half.stamps_us = self.stamps_us[start:end] if len(self.stamps_us) == self.count else self.stamps_us
            half.dues_us = self.dues_us[start:end]
            half.reserved_bytes = self.reserved_bytes // 2 if side else self.reserved_bytes - self.reserved_bytes // 2
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

    @property
    def first_handle(self) -> Handle:
        return Handle((self, 3))

    def metadata(self, row: int) -> RecordMetadata:
        offset = None if self.base_offset is None else self.base_offset + row
        stamp_us = self.stamps_us[min(row, len(self.stamps_us) - 1)]
        if self.info.delay_of:
            name = None if offset is None else delay_id(self.info.topic_id, self.partition, offset, int(self.dues_us[row]))
            return RecordMetadata(self.info.delay_of, self.partition, None, int(stamp_us) // 1000, name)
        return RecordMetadata(self.info.name, self.partition, offset, int(stamp_us) // 1000)

    def batch_metadata(self) -> BatchMetadata:
        """Of all rows together."""
        if not self.info.delay_of:
            return BatchMetadata(self.info.name, self.partition, self.base_offset, self.count)
        ids = () if self.base_offset is None else DelayIds(self.info.topic_id, self.partition, self.base_offset, self.dues_us)
        return BatchMetadata(self.info.delay_of, self.partition, None, self.count, ids)

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
    def when_ended(self, handle: Handle, callback: OnDelivery) -> None: ...


class Handle(tuple[ProducerBatch, int]):
    """What `send` answers: the record's fate, when it is known. No lock or condition is made until someone waits.

    (batch, how long its list of rows was behind the record): a tuple of what is at hand, because one is made for every record.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        batch, row = self.resolve()
        return f"<Handle of record {row} of a batch for {batch.info.name}-{batch.partition}, {batch.state.name}>"

    def resolve(self) -> tuple[ProducerBatch, int]:
        """The batch that holds the record now, and its row there; a split moves it."""
        batch, end = self
        row = end // 3 - 1
        while batch.children is not None:
            middle, left, right = batch.children
            if row < middle:
                batch = left
            else:
                batch, row = right, row - middle
        return batch, row

    def done(self) -> bool:
        return self.resolve()[0].state is BatchState.ENDED

    def exception(self, timeout: float | None = None) -> TailraceError | None:
        """The error that the record ended with, or None. Raises RequestTimeoutError when it has not ended within `timeout` seconds."""
        while True:
            batch, _ = self.resolve()
            if batch.state is BatchState.ENDED:
                return batch.error
            if not batch.waits.wait_for(batch, timeout):
                raise RequestTimeoutError(f"the record was not acknowledged within {timeout} s")

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Where the record went. Raises its error, or RequestTimeoutError when it has not ended within `timeout` seconds (it may still
        be delivered).
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        batch, row = self.resolve()
        return batch.metadata(row)

    def add_done_callback(self, callback: Callable[[Handle], None]) -> None:
        """Have `callback(handle)` called once the record has ended: at once if it has, else in whatever thread finds out."""
        self[0].waits.when_ended(self, lambda _metadata, _error: callback(self))

    def future(self) -> concurrent.futures.Future[RecordMetadata]:
        """The same fate as a Future, for `asyncio.wrap_future` and `concurrent.futures.as_completed`. It cannot be cancelled."""
        import concurrent.futures

        future: concurrent.futures.Future[RecordMetadata] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()

        def settle(metadata: RecordMetadata | None, error: TailraceError | None) -> None:
            if metadata is None:
                future.set_exception(error)
            else:
                future.set_result(metadata)

        self[0].waits.when_ended(self, settle)
        return future

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        """In a coroutine: `await producer.send(...)` is `result()` without holding the event loop up. Who gives up waiting takes nothing back."""
        import asyncio

        return asyncio.wrap_future(self.future()).__await__()


def _leaves(handles: list[Handle]) -> list[ProducerBatch]:
    """The batches that hold the handles' rows now, splits followed."""
    leaves: list[ProducerBatch] = []
    stack = [handle[0] for handle in reversed(handles)]
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
                if not waiting.waits.wait_for(waiting, remaining):
                    raise RequestTimeoutError(f"not everything was acknowledged within {timeout} s")
        return next((leaf.error for leaf in _leaves(self._handles) if leaf.error is not None), None)

    def result(self, timeout: float | None = None) -> list[BatchMetadata]:
        """Where each batch went, in the order of the rows within each partition. Raises the first error."""
        error = self.exception(timeout)
        if error is not None:
            raise error
        return [batch.batch_metadata() for batch in _leaves(self._handles)]

    def __await__(self) -> Generator[Any, None, list[BatchMetadata]]:
        """In a coroutine: `result()` without holding the event loop up."""
        for handle in self._handles:
            while (waiting := next((leaf for leaf in _leaves([handle]) if leaf.state is not BatchState.ENDED), None)) is not None:
                try:
                    yield from Handle((waiting, 3)).__await__()  # its first row: a batch ends as one, or in two that are looked at again
                except TailraceError:
                    pass  # `result` raises the first of all
        return self.result(0)


class PartitionQueue:
    """The batches of one partition, from open to answered."""

    __slots__ = (
        "in_flight",
        "info",
        "is_gone",
        "is_listed",
        "muted_until_ns",
        "next_ordinal",
        "next_sequence",
        "open",
        "partition",
        "ready",
    )

    def __init__(self, info: TopicInfo, partition: int) -> None:
        self.info = info
        self.partition = partition
        self.open: ProducerBatch | None = None
        self.ready: deque[ProducerBatch] = deque()
        self.in_flight: deque[ProducerBatch] = deque()
        self.next_sequence = 0
        self.next_ordinal = 0
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
        self.ready.append(self.open)
        self.open = None
        return True

    def number(self, batch: ProducerBatch, producer_id: int, epoch: int) -> None:
        """Give a batch that was not sent before its sequence."""
        batch.ordinal = self.next_ordinal
        self.next_ordinal += 1
        batch.number(producer_id, epoch, self.next_sequence)
        self.next_sequence = (self.next_sequence + batch.count) % SEQUENCE_MODULUS

    def window_is_full(self) -> bool:
        """Whether one more sequence would make the worker forget a batch whose fate is not known: answers need not come in order, and a request that
        has timed out may have been carried out.
        """
        return bool(self.in_flight) and self.next_ordinal - min(batch.ordinal for batch in self.in_flight) >= REMEMBERED_BATCHES

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
