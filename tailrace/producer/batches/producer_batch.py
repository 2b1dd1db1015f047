"""A batch of a producer: records of one partition that are sent together.

    OPEN --close--> READY --sent--> IN_FLIGHT --acknowledged, or failed--> COMPLETED
                      ^------- to be sent again -------'

A batch may be split (`tailrace.producer.batches.batch_split`). It is then completed, and its
`children` have its records.

Owner: a Producer, under its lock.
Invariants:
- A batch is completed exactly once, with an offset or an error.
- Its bytes are encoded once. A retry sends the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tailrace.batch import arrow_codec
from tailrace.batch.encoded_rows import EncodedRows
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import SchemaMismatchError, TailraceError, UnsupportedBatchError
from tailrace.core.hash_slots import STAYS, slot_of
from tailrace.core.records import BatchMetadata, RecordMetadata
from tailrace.core.schedule.delays import DUE_COLUMN, DelayIds, delay_id
from tailrace.format.record_batch.batch_header import (
    HEADER_BYTES,
    NO_PRODUCER,
    NO_SEQUENCE,
    BatchHeader,
)
from tailrace.format.record_batch.header_stamps import fill_header
from tailrace.kernel import RECORD_OVERHEAD_BYTES as RECORD_OVERHEAD_BYTES
from tailrace.kernel import ObjectBuffer, OpenBatch, encoded_batch, keep_message, stamp_batch

if TYPE_CHECKING:
    import pyarrow as pa

    from tailrace.batch.exact_floats import Exact
    from tailrace.batch.frames import FrameSlice

BATCH_OVERHEAD_BYTES = 2048
LARGE_BYTES = 128 << 10
"""Memory of a message from this size on is kept for later batches. New memory of that size would be
fetched page by page.
"""
OnDelivery = Callable[[RecordMetadata | None, TailraceError | None], None]
"""Called once, with (metadata, None) or (None, error)."""
DueCallback = tuple[OnDelivery, RecordMetadata | None, TailraceError | None]
"""A callback that is due, and its arguments."""


class BatchState(Enum):
    """The state of a batch; see the module's docstring."""

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
"""Module constants: the lookup of an enumeration's member costs as much as a function call."""


class Resolves(Protocol):
    """A sent record, as its future names it."""

    def resolve(self) -> tuple[ProducerBatch, int]:
        """The batch that has the record now, and the record's row in it."""
        ...


class Completion(Protocol):
    """Waits for batches (see `tailrace.producer.sending.sender_thread.SenderThread`)."""

    def wait_for(self, batch: ProducerBatch, timeout: float | None) -> bool:
        """Wait until the batch is completed. False: `timeout` seconds have passed."""
        ...

    def add_done_callback(self, record: Resolves, callback: OnDelivery) -> None:
        """Call `callback(metadata, error)` once the record is completed, or now if it is."""
        ...


class Children(Protocol):
    """The batches that a split batch became."""

    @property
    def batches(self) -> Sequence[ProducerBatch]:
        """Those that have its records, in the order of its rows."""
        ...

    def place(self, row: int) -> tuple[ProducerBatch, int]:
        """The batch that has the record of `row`, and the record's row in it."""
        ...


class ProducerBatch(OpenBatch):
    """Records of one partition that are sent together. An open batch has rows, an encoded one
    bytes.
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
        "exact",
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
        "sent_as",
        "slots",
        "stamps_us",
        "state",
        "trace_id",
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
        self.sent_as: TopicInfo | None = None
        """The topic with a newer schema, to which the rows are converted when they are encoded.
        None: they are sent in the schema of `info`.
        """
        self.partition = partition
        self.created_ns = created_ns
        self.order = order
        """Its place among the producer's batches. Parts of a split batch take its place."""
        self.state = OPEN
        self.is_closing = False
        """True from the beginning of `close` on."""
        self.count = 0
        """Number of records, known once it is closed."""
        self.reserved_bytes = BATCH_OVERHEAD_BYTES
        """Its share of the producer's buffer_memory."""
        self.dues_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] = (
            [] if info.delay_of else ()
        )
        """Due time of each row, in a delay log's batch."""
        self.repeats: dict[int, str] | None = None
        """row -> its recurrence (JSON)."""
        self.stamps_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] = ()
        """The records' timestamps, known once it is encoded. A frame has its first and its largest
        one. With LogAppendTime it is the appliance's.
        """
        self.frame: pa.RecordBatch | EncodedRows | None = None
        self.exact: Exact | None = None
        """The given values of float columns that the schema of `info` rounds, known once it is
        encoded. A conversion to a wider type takes these.
        """
        self.data: bytearray | None = None
        self.attempts = 0
        self.last_refusal = ""
        """The appliance's reason for refusing its last attempt."""
        self.was_sent = False
        """True if it may be in the log. Only its sequence then distinguishes a second copy from the
        first.
        """
        self.ordinal = 0
        """Its place among the partition's batches that were given a sequence."""
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.base_sequence = NO_SEQUENCE
        self.base_offset: int | None = None
        self.error: TailraceError | None = None
        self.waiter: threading.Event | None = None
        self.trace_id = b""
        """A sampled trace that a record belongs to; empty if there is none."""
        self.children: Children | None = None
        """The batches that have its records after a split."""
        self.pinned: set[int] | None = None
        """Rows whose partition the user named, in a topic with hash slots."""
        self.slots: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]] | None = None
        """Hash slot of each row, known once it is closed. STAYS marks a row without a slot. None:
        no row has one.
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
        """Make a ready batch of rows that are columns already."""
        batch = cls(completion, info, piece.partition, created_ns, order)
        batch.frame, batch.exact = piece.rows, piece.exact
        if info.delay_of:
            batch.dues_us = batch.rebuilt_frame().column(DUE_COLUMN).to_numpy()
        batch.count = piece.rows.num_rows
        batch.stamps_us = piece.stamps_us
        batch.reserved_bytes = BATCH_OVERHEAD_BYTES + piece.byte_count
        batch.slots = piece.slots
        batch.state = READY
        return batch

    def pin(self, row: int) -> None:
        """Keep the record that was just added in this partition: the user named it."""
        self.pinned = self.pinned or set()
        self.pinned.add(row)

    def close(self) -> int:
        """Take no more records. Returns the unused bytes of its reservation.

        If a signal handler interrupts it, it is called again.
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
        """True if it is completed. The children of a split batch may still be pending."""
        return self.state is COMPLETED

    @property
    def ends_without_key(self) -> bool:
        """True if the last record has no key. The partitioner may then choose another partition."""
        return self.rows.ends_without_key()

    def _from_rows(self) -> pa.RecordBatch:
        if self.info.typed:
            values, defaults = self.rows.values(), self.info.column_defaults
            if defaults:
                values = [{**defaults, **row} for row in values]
            rows = arrow_codec.rows_from_dicts(values, self.info.schema)
            if self.info.narrow_floats:
                from tailrace.batch import exact_floats

                self.exact = exact_floats.of_rows(values, rows, self.info.narrow_floats)
        else:
            rows = self.rows.frame()
        if self.info.delay_of:
            repeats = [self.repeats.get(row) for row in range(self.count)] if self.repeats else None
            rows = arrow_codec.with_delays(rows, self.info.schema, self.dues_us, repeats)
        return rows

    def encode(self, compression: str) -> bytearray:
        """Encode the batch. The bytes are kept for retries. Raises InvalidRecordError."""
        if self.data is None:
            info, rows = self.info, self.rows
            has_rows = len(rows) > 0
            if has_rows:
                self.stamps_us = rows.stamps_us()
            seed = self._seed()
            if has_rows and compression == "none" and not info.typed and not info.delay_of:
                self.data = encoded_batch(rows, info.schema_id, seed)
            else:
                sent_as = self.sent_as
                made = self._from_rows() if self.frame is None else None
                if made is not None and info.typed and not info.delay_of:
                    self.stamps_us = arrow_codec.times_of_rows(made, self.stamps_us)
                header = BatchHeader(
                    record_count=self.count, last_offset_delta=self.count - 1,
                    first_timestamp_us=int(self.stamps_us[0]),
                    max_timestamp_us=_largest(self.stamps_us),
                    schema_id=(info if sent_as is None else sent_as).schema_id,
                )  # fmt: skip
                if sent_as is not None:
                    self.frame = self.rebuilt_frame() if made is None else made
                    frame = _converted(self.frame, self.exact, info, sent_as)
                    self.data = arrow_codec.encode_as(frame, header, seed, compression)
                elif compression == "none" and isinstance(self.frame, EncodedRows):
                    message, body_crc = self.frame.message(HEADER_BYTES)
                    self.data = fill_header(message, header, seed, body_crc)
                else:
                    frame = self.rebuilt_frame() if made is None else made
                    self.data = arrow_codec.encode_as(frame, header, seed, compression)
        self.rows.clear()
        self.repeats = None
        if self.sent_as is None:
            self.frame = None  # it may be the program's memory, which may change
        return self.data

    def _seed(self) -> int:
        """The seed of its partition, which the topic may have got with a newer schema."""
        return (self.info if self.sent_as is None else self.sent_as).seeds[self.partition]

    def number(self, producer_id: int, epoch: int, base_sequence: int) -> None:
        """Write the producer's id and epoch and the sequence into the encoded batch."""
        assert self.data is not None
        # A fresh copy: ZeroMQ may still be sending the old bytes.
        if self.attempts:
            self.data = bytearray(self.data)
        stamp_batch(self.data, producer_id, epoch, base_sequence, self._seed())
        self.producer_id, self.epoch, self.base_sequence = producer_id, epoch, base_sequence

    def rebuilt_frame(self) -> pa.RecordBatch:
        """Its rows as columns, decoded from its bytes if need be."""
        if self.frame is not None:
            return self.frame.batch() if isinstance(self.frame, EncodedRows) else self.frame
        import pyarrow as pa

        assert self.data is not None
        return pa.ipc.read_record_batch(
            pa.ipc.read_message(pa.py_buffer(bytes(self.data))), self.info.schema
        )

    def convert_for(self, info: TopicInfo) -> None:
        """Send its rows in the newer schema of `info`. They are encoded again."""
        if self.sent_as is None and info.schema_id == self.info.schema_id:
            return
        if self.sent_as is not None and info.schema_id == self.sent_as.schema_id:
            self.sent_as = info  # its bytes are the same; the topic may have more partitions
            return
        if not self.rows:
            self.frame = self.rebuilt_frame()
        self.data = None
        if info.schema_id == self.info.schema_id:
            self.info, self.sent_as = info, None
        else:
            self.sent_as = info

    def made_for(self, info: TopicInfo) -> None:
        """Send it to a recreated topic. Its bytes, which name the old topic, are encoded again. The
        old log is gone, so no copy of it can exist.
        """
        if not self.rows:
            self.frame, self.data = self.rebuilt_frame(), None
        self.info = info
        self.sent_as = None
        self.was_sent = False

    def add_due(self, row: int, due_us: int, repeat: str | None) -> None:
        """Set the due time and the recurrence (JSON) of the next record of a delay log's batch."""
        self.dues_us[row:] = [due_us]  # type: ignore[index]
        if repeat is not None:
            if self.repeats is None:
                self.repeats = {}
            self.repeats[row] = repeat
        elif self.repeats:
            self.repeats.pop(row, None)

    def add_callback(self, row: int, callback: OnDelivery) -> None:
        """Call `callback` with the outcome of a record. The batch is not completed yet."""
        if self.callbacks is None:
            self.callbacks = []
        self.callbacks.append((row, callback))

    def metadata(self, row: int) -> RecordMetadata:
        """The metadata of the record in `row`, of a batch that was acknowledged."""
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
        """The metadata of all rows together."""
        if not self.info.delay_of:
            return BatchMetadata(self.info.name, self.partition, self.base_offset, self.count)
        ids = (
            ()
            if self.base_offset is None
            else DelayIds(self.info.topic_id, self.partition, self.base_offset, self.dues_us)
        )
        return BatchMetadata(self.info.delay_of, self.partition, None, self.count, ids)

    def calls(self) -> list[DueCallback]:
        """The callbacks that are due, of a batch with an outcome."""
        error = self.error
        return [
            (callback, None if error else self.metadata(row), error)
            for row, callback in self.callbacks or ()
        ]

    def let_go(self) -> None:
        """Release the memory of a batch with an outcome, and wake its waiters."""
        if self.data is not None and len(self.data) >= LARGE_BYTES:
            keep_message(self.data)
        self.data = None
        self.frame = self.exact = None
        if self.waiter is not None:
            self.waiter.set()


def _converted(
    frame: pa.RecordBatch, exact: Exact | None, info: TopicInfo, sent_as: TopicInfo
) -> pa.RecordBatch:
    """Rows of the schema of `info` in that of `sent_as`. Raises SchemaMismatchError."""
    history = sent_as.history
    try:
        history.check_kept(frame, info.schema_id)
        if exact is not None:
            from tailrace.batch import exact_floats

            frame = exact_floats.with_exact(frame, exact, history.widened(info.schema_id))
        return history.convert(frame, info.schema_id)
    except UnsupportedBatchError as error:
        raise SchemaMismatchError(error.detail) from None


def _largest(stamps_us: Sequence[int] | np.ndarray[Any, np.dtype[np.int64]]) -> int:
    return int(max(stamps_us) if len(stamps_us) <= 32 else np.max(stamps_us))
