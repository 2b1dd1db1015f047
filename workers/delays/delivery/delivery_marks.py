"""Delivery marks of a delay log: closed ordinals, the requested mark, and fencing of a
predecessor's marks.

A mark is a control record of type 0 in the delay log. `workers.log.producers.delay_rules` says when
the worker appends it, `workers.delays.delay_partition` what it is for. An ordinal is (epoch of the
clock << TICK_BITS) | tick.

Owner: the scheduler, one for each partition.

Invariants:
- `closed` only grows.
- One mark is requested at a time, and again after RETRY_NS if it is not read.
- `is_fenced` is set once, by a mark of this incarnation. No mark sent by a predecessor can follow
  it in the delay log.

Crash: `closed` is in the manifest. The rest starts from its initial state.
"""

from __future__ import annotations

from tailrace.core.schedule.delays import TICK_BITS, TICK_MASK
from tailrace.format.crc32c import Readable
from tailrace.format.record_batch.batch_header import ATTRIBUTE_CONTROL, BatchHeader
from tailrace.format.record_batch.header_stamps import insert_header

RETRY_NS = 1_000_000_000
"""Time after which an unsettled mark or batch is resent: it was refused (a full
disk), or lost with a worker.
"""
RETRY_INTERVAL_NS = 10_000_000
"""Retry interval when a lane is full or a request waits."""


class DeliveryMarks:
    """Marks of one delay log."""

    def __init__(self, empty: Readable, seed: int, closed: int, incarnation: int) -> None:
        """`empty` is an Arrow message without rows in the delay log's schema,
        `closed` comes from the manifest.
        """
        self._empty = empty
        self._seed = seed
        self._incarnation = incarnation
        self.closed = closed
        """Ordinal below which everything is closed, by the last mark read."""
        self.is_fenced = False
        self._asked: tuple[int, int] | None = None
        """(ordinal, time) of the mark that was requested and not read yet."""

    @property
    def epoch(self) -> int:
        """Epoch of the clock, by the last mark read."""
        return self.closed >> TICK_BITS

    @property
    def closed_tick(self) -> int:
        """Tick up to which everything is closed, -1 if nothing is."""
        return (self.closed & TICK_MASK) - 1

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    @property
    def asks_for_epoch(self) -> bool:
        """True if the requested mark begins an epoch."""
        return self._asked is not None and self._asked[0] >> TICK_BITS > self.epoch

    @property
    def retry_ns(self) -> int | None:
        """Time to request the mark again if it is not read."""
        return None if self._asked is None else self._asked[1] + RETRY_NS

    def use(self, empty: Readable) -> None:
        """Encode marks with this message from now on: the delay log's schema was altered. One on
        its way may be refused, and is requested again after RETRY_NS.
        """
        self._empty = empty

    def asked(self, ordinal: int, now_ns: int) -> None:
        """Record that a mark was sent."""
        self._asked = ordinal, now_ns

    def ask_no_more(self) -> None:
        """Cancel the requested mark: nothing is left to close."""
        self._asked = None

    def apply(self, header: BatchHeader) -> bool:
        """Apply a mark that was read. Return False if it begins another epoch. The caller must call
        `begin_epoch` before it reads on.
        """
        ordinal = header.min_tick
        if self._asked is not None and ordinal >= self._asked[0]:
            self._asked = None
        self.is_fenced = self.is_fenced or header.previous_position == self._incarnation
        if ordinal >> TICK_BITS > self.epoch:
            return False
        self.closed = max(self.closed, ordinal)
        return True

    def begin_epoch(self, ordinal: int) -> None:
        """Begin a new epoch of the clock, which was set back."""
        self.closed = ordinal

    def encode(
        self, ordinal: int, delivered: tuple[int, int], schema_id: int, wall_us: int
    ) -> bytearray:
        """Encode a mark as a control batch without rows, with one offset. `delivered` is the last
        delivered key if the mark begins an epoch.
        """
        header = BatchHeader(
            attributes=ATTRIBUTE_CONTROL, record_count=0, last_offset_delta=0,
            first_timestamp_us=wall_us, max_timestamp_us=wall_us,
            schema_id=schema_id, min_tick=ordinal, due_us=delivered[0], delay_position=delivered[1],
            previous_position=self._incarnation,
        )  # fmt: skip
        return insert_header(self._empty, header, self._seed)
