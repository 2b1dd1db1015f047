"""A batch of a producer: records of one partition that are sent together, from the first record to
the acknowledgement.

    OPEN --close--> READY --sent--> IN_FLIGHT --answered, given up--> ENDED
                      ^---- to be sent again ----'

A batch that turns out too large as bytes is split, and so is one whose records go to different
partitions since hash slots have moved: it ends, and its `children` have its records.

Owner: a Producer, under its lock.
Invariants: a batch ends exactly once, with an offset or an error; its bytes are made once, and a
    retry sends the same ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.batch.encoded_rows import EncodedRows
from tailrace.client.topic_metadata import TopicInfo
from tailrace.core.delays import DUE_COLUMN, DelayIds, delay_id
from tailrace.core.errors import TailraceError
from tailrace.core.hash_slots import STAYS, slot_of
from tailrace.core.records import BatchMetadata, RecordMetadata
from tailrace.format.batch_header import (
    HEADER_BYTES,
    NO_PRODUCER,
    NO_SEQUENCE,
    BatchHeader,
    fill_header,
)
from tailrace.kernel import RECORD_OVERHEAD_BYTES as RECORD_OVERHEAD_BYTES
from tailrace.kernel import ObjectBuffer, OpenBatch, encoded_batch, keep_message, stamp_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.batch.frames import FrameSlice

Value = TypeVar("Value")
BATCH_OVERHEAD_BYTES = 2048
LARGE_BYTES = 128 << 10
"""From here on a batch's memory is kept for others, which would have to fetch theirs page by
page.
"""
OnDelivery = Callable[[RecordMetadata | None, TailraceError | None], None]
"""Called with (metadata, None) or (None, error), once."""
DueCallback = tuple[OnDelivery, RecordMetadata | None, TailraceError | None]
"""A call that is to be made, and its arguments."""


class BatchState(Enum):
    """How far a batch is; it goes from OPEN to ENDED, and back from IN_FLIGHT to READY when it is
    sent again.
    """

    OPEN = 1
    READY = 2
    IN_FLIGHT = 3
    COMPLETED = 4


OPEN, READY, IN_FLIGHT, COMPLETED = (
    BatchState.OPEN,
    BatchState.READY,
    BatchState.IN_FLIGHT,
    BatchState.COMPLETED,
)
"""By themselves: to look a member of an enumeration up by its name takes as long as a function."""


class Resolves(Protocol):
    """A record that was sent, as its handle names it."""

    def resolve(self) -> tuple[ProducerBatch, int]:
        """The batch that has the record now, and the record's row there."""
        ...


class Completion(Protocol):
    """Who can wait for a batch (see `tailrace.producer.sender_thread.SenderThread`)."""

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Until the batch has ended, or was split. False: `timeout` seconds are over."""
        ...

    def add_done_callback(self, record: Resolves, callback: OnDelivery) -> None:
        """Have `callback(metadata, error)` called once the record has ended: at once if it has."""
        ...


class Children(Protocol):
    """What became of a batch that was split."""

    @property
    def batches(self) -> Sequence[ProducerBatch]:
        """Those that have its records, in the order of its rows."""
        ...

    def place(self, row: int) -> tuple[ProducerBatch, int]:
        """Where the record in `row` is now."""
        ...


class Halves(NamedTuple):
    """Of a batch that was split before row `middle`."""

    middle: int
    left: ProducerBatch
    right: ProducerBatch

    @property
    def batches(self) -> Sequence[ProducerBatch]:
        return self[1:]

    def place(self, row: int) -> tuple[ProducerBatch, int]:
        return (self.left, row) if row < self.middle else (self.right, row - self.middle)


class ProducerBatch(OpenBatch):
    """Records of one partition that are sent together: rows while it is open, bytes once it is
    encoded.
    """

    __slots__ = (
        "attempts",
        "base_offset",
        "base_sequence",
        "children",
        "completion",
        "count",
        "created_ns",
        "data",
        "dues_us",
        "epoch",
        "error",
        "frame",
        "info",
        "is_closing",
        "last_refusal",
        "order",
        "ordinal",
        "partition",
        "pinned",
        "producer_id",
        "repeats",
        "reserved_bytes",
        "slots",
        "stamps_us",
        "state",
        "waiter",
        "was_sent",
    )  # fmt: skip

    def __init__(
        self,
        completion: Completion,
        info: TopicInfo,
        partition: int,
        created_ns: int,
        order: tuple[int, ...],
    ) -> None:
        super().__init__()
        if info.typed:
            self.rows = ObjectBuffer()
        self.completion = completion
        self.info = info
        self.partition = partition
        self.created_ns = created_ns
        self.order = order
        """Its place among the producer's batches; halves of a split one come where it was."""
        self.state = OPEN
        self.is_closing = False
        """Whether it takes no more records, or is about to."""
        self.count = 0
        """How many records it has; known once it is closed."""
        self.reserved_bytes = BATCH_OVERHEAD_BYTES
        """What it takes of the producer's buffer_memory."""
        self.dues_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] = (
            [] if info.delay_of else ()
        )
        """When each row of a delay log's batch is due."""
        self.repeats: dict[int, str] | None = None
        """row -> how it recurs."""
        self.stamps_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] = ()
        """The records' timestamps, known once it is encoded. Of a frame: its first and its largest;
        with LogAppendTime: the appliance's.
        """
        self.frame: pa.RecordBatch | EncodedRows | None = None
        self.data: bytearray | None = None
        self.attempts = 0
        self.last_refusal = ""
        """What the appliance said when it was sent last."""
        self.was_sent = False
        """Whether it may have been appended without our knowing: then only its sequence tells a
        second copy from a first.
        """
        self.ordinal = 0
        """Its place among the batches of its partition that were given a sequence."""
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.base_sequence = NO_SEQUENCE
        self.base_offset: int | None = None
        self.error: TailraceError | None = None
        self.waiter: threading.Event | None = None
        self.children: Children | None = None
        """The batches that have its records since it was split."""
        self.pinned: set[int] | None = None
        """Of a topic with hash slots: rows whose partition the user named."""
        self.slots: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] | None = None
        """Of a topic with hash slots, known once it is closed: the slot of each row, STAYS for one
        that is routed otherwise. None: all stay.
        """

    @classmethod
    def of_frame(
        cls,
        completion: Completion,
        info: TopicInfo,
        piece: FrameSlice,
        created_ns: int,
        order: tuple[int, ...],
    ) -> ProducerBatch:
        """Rows that are columns already: a batch that is ready to be sent."""
        batch = cls(completion, info, piece.partition, created_ns, order)
        batch.frame = piece.rows
        if info.delay_of:
            batch.dues_us = batch.rebuilt_frame().column(DUE_COLUMN).to_numpy()
        batch.count = piece.rows.num_rows
        batch.stamps_us = piece.stamps_us
        batch.reserved_bytes = BATCH_OVERHEAD_BYTES + piece.byte_count
        batch.slots = piece.slots
        batch.state = READY
        return batch

    def pin(self, row: int) -> None:
        """Of a topic with hash slots: the user has named the partition of the record that was just
        added.
        """
        self.pinned = self.pinned or set()
        self.pinned.add(row)

    def close(self) -> int:
        """It takes no more records; returns how many bytes of its reservation it did not need. What
        a signal's handler cuts off here is done again.
        """
        if self.state is not OPEN:
            return 0
        unused = self.room
        self.is_closing = True
        self.room = 0
        self.reserved_bytes -= unused
        self.count = len(self.rows)
        if self.info.delay_of:
            self.dues_us = self.dues_us[: self.count]
        if self.info.slot_map_version:
            pinned = self.pinned or ()
            self.slots = [
                STAYS if key is None or row in pinned else slot_of(key)
                for row, key in enumerate(self.rows.keys())
            ]
        if self.state is OPEN:  # a handler that sends may have closed it meanwhile, and sent it
            self.state = READY
        return unused

    def is_done(self) -> bool:
        """Whether its fate is known, or it was split (its halves then have the records)."""
        return self.state is COMPLETED

    @property
    def ends_without_key(self) -> bool:
        """Whether the last record has no key, so that the partitioner may choose another partition
        now.
        """
        return self.rows.ends_without_key()

    def _from_rows(self) -> pa.RecordBatch:
        if self.info.typed:
            rows = arrow_batch.rows_from_dicts(self.rows.values(), self.info.schema)
        else:
            rows = self.rows.frame()
        if self.info.delay_of:
            repeats = [self.repeats.get(row) for row in range(self.count)] if self.repeats else None
            rows = arrow_batch.with_delays(rows, self.info.schema, self.dues_us, repeats)
        return rows

    def encode(self, compression: str) -> bytearray:
        """The batch as bytes, kept for retries. Raises InvalidRecordError."""
        if self.data is None:
            info, rows = self.info, self.rows
            has_rows = len(rows) > 0
            if has_rows:
                self.stamps_us = rows.stamps_us()
            seed = info.seeds[self.partition]
            if has_rows and compression == "none" and not info.typed and not info.delay_of:
                self.data = encoded_batch(rows, info.schema_id, seed)
            else:
                header = BatchHeader(
                    record_count=self.count, last_offset_delta=self.count - 1,
                    first_timestamp_us=int(self.stamps_us[0]),
                    max_timestamp_us=_largest(self.stamps_us), schema_id=info.schema_id,
                )  # fmt: skip
                if compression == "none" and isinstance(self.frame, EncodedRows):
                    message, body_crc = self.frame.message(HEADER_BYTES)
                    self.data = fill_header(message, header, seed, body_crc)
                else:
                    frame = self._from_rows() if self.frame is None else self.rebuilt_frame()
                    self.data = arrow_batch.encode_as(frame, header, seed, compression)
        self.rows.clear()
        self.repeats = None
        return self.data

    def number(self, producer_id: int, epoch: int, base_sequence: int) -> None:
        """Write the producer's identity and the sequence into the encoded batch."""
        assert self.data is not None
        # A fresh copy: ZeroMQ may still be sending the old bytes.
        if self.attempts:
            self.data = bytearray(self.data)
        stamp_batch(self.data, producer_id, epoch, base_sequence, self.info.seeds[self.partition])
        self.producer_id, self.epoch, self.base_sequence = producer_id, epoch, base_sequence

    def split(self) -> tuple[ProducerBatch, ProducerBatch] | None:
        """Two batches with half of the rows each, or None for a single row. It may have been
        encoded or not.
        """
        if self.count < 2:
            return None
        middle = self.count // 2
        left, right = self._half(0, middle, 0), self._half(middle, self.count, 1)
        if self.rows:
            left.detach_rows(self, 0, middle)
            right.detach_rows(self, middle, self.count)
        else:
            frame = self.rebuilt_frame()
            left.frame = arrow_batch.cut_out(frame, 0, middle)
            right.frame = arrow_batch.cut_out(frame, middle, self.count - middle)
        for row, callback in self.callbacks or ():
            if row < middle:
                left.add_callback(row, callback)
            else:
                right.add_callback(row - middle, callback)
        halves = Halves(middle, left, right)
        self.children = halves
        self.callbacks = None
        return left, right

    def _half(self, start: int, end: int, side: int) -> ProducerBatch:
        """A batch in the place of this one for the rows from `start` to `end`, which it is yet to
        be given.
        """
        half = ProducerBatch(
            self.completion, self.info, self.partition, self.created_ns, (*self.order, side)
        )
        half.count = end - start
        half.stamps_us = (
            self.stamps_us[start:end] if len(self.stamps_us) == self.count else self.stamps_us
        )
        half.dues_us = self.dues_us[start:end]
        half.slots = None if self.slots is None else self.slots[start:end]
        half.reserved_bytes = (
            self.reserved_bytes // 2 if side else self.reserved_bytes - self.reserved_bytes // 2
        )
        half.state = READY
        return half

    def detach_rows(self, whole: ProducerBatch, start: int, end: int) -> None:
        """Of a half: the rows from `start` to `end` of a batch that is not encoded, with what was
        given beside them.
        """
        self.rows = whole.rows.picked(range(start, end))
        self.repeats = _of_rows(whole.repeats, start, end)

    def rebuilt_frame(self) -> pa.RecordBatch:
        """Its rows as columns, also when only its bytes are left."""
        if self.frame is not None:
            return self.frame.batch() if isinstance(self.frame, EncodedRows) else self.frame
        import pyarrow as pa

        assert self.data is not None
        return pa.ipc.read_record_batch(
            pa.ipc.read_message(pa.py_buffer(bytes(self.data))), self.info.schema
        )

    def made_for(self, info: TopicInfo) -> None:
        """Send it to a topic that was made again: what was made for the old one is made again, too;
        that one's log is gone, and what it had of this.
        """
        if not self.rows:
            self.frame, self.data = self.rebuilt_frame(), None
        self.info = info
        self.was_sent = False

    def add_due(self, row: int, due_us: int, repeat: str | None) -> None:
        """When the record that is the next, in a delay log's batch, is due, and how it recurs
        (JSON).
        """
        self.dues_us[row:] = [due_us]  # type: ignore[index]
        if repeat is not None:
            if self.repeats is None:
                self.repeats = {}
            self.repeats[row] = repeat
        elif self.repeats:
            self.repeats.pop(row, None)

    def add_callback(self, row: int, callback: OnDelivery) -> None:
        """Have `callback` called with the fate of a record once the batch, which has not ended,
        has.
        """
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append((row, callback))

    def metadata(self, row: int) -> RecordMetadata:
        """What became of the record in `row`, of a batch that has ended well."""
        offset = None if self.base_offset is None else self.base_offset + row
        stamp_us = self.stamps_us[min(row, len(self.stamps_us) - 1)]
        if self.info.delay_of:
            name = (
                None
                if offset is None
                else delay_id(self.info.topic_id, self.partition, offset, int(self.dues_us[row]))
            )
            return RecordMetadata(
                self.info.delay_of, self.partition, None, int(stamp_us) // 1000, name
            )
        return RecordMetadata(self.info.name, self.partition, offset, int(stamp_us) // 1000)

    def batch_metadata(self) -> BatchMetadata:
        """Of all rows together."""
        if not self.info.delay_of:
            return BatchMetadata(self.info.name, self.partition, self.base_offset, self.count)
        ids = (
            ()
            if self.base_offset is None
            else DelayIds(self.info.topic_id, self.partition, self.base_offset, self.dues_us)
        )
        return BatchMetadata(self.info.delay_of, self.partition, None, self.count, ids)

    def calls(self) -> list[DueCallback]:
        """The callbacks to make now that its fate is known."""
        error = self.error
        return [
            (callback, None if error else self.metadata(row), error)
            for row, callback in self.callbacks or ()
        ]

    def let_go(self) -> None:
        """Its fate is known: give its memory back, and wake who waits for it."""
        if self.data is not None and len(self.data) >= LARGE_BYTES:
            keep_message(self.data)
        self.data = None
        self.frame = None
        if self.waiter is not None:
            self.waiter.set()


def _largest(stamps_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> int:
    return int(max(stamps_us) if len(stamps_us) <= 32 else np.max(stamps_us))


def _of_rows(beside: dict[int, Value] | None, start: int, end: int) -> dict[int, Value] | None:
    """What is given beside the rows from `start` to `end`, which are counted from 0 now."""
    return (
        {row - start: value for row, value in beside.items() if start <= row < end}
        if beside
        else None
    )
