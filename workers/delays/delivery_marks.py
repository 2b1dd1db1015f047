"""The marks of one delay log: which ordinals are closed, what is asked for, and whether a predecessor's mark may still come.

A mark is a control record of type 0 in the delay log (see `workers.delay_gate` for when the worker appends it, `workers.delays.delay_partition` for what it is
for). An ordinal is (epoch of the clock << TICK_BITS) | tick.

Owner: the scheduler, one for each partition.
Invariants: `closed` only grows; one mark is asked for at a time, and again after RETRY_NS if it is not read; `is_fenced` is set once, by a mark of this
    incarnation: behind that nothing that a predecessor sent is on its way to the delay log.
Crash: `closed` is in the manifest, the rest begins anew.
"""

from __future__ import annotations

from tailrace.delays import TICK_BITS, TICK_MASK
from tailrace.formats.batch_header import ATTRIBUTE_CONTROL, BatchHeader, insert_header
from tailrace.formats.checksum import Readable

RETRY_NS = 1_000_000_000
"""How soon a mark or a batch that is not seen settled is sent again: it was refused (a full disk), or lost with a worker."""
TRY_AGAIN_NS = 10_000_000
"""How soon something is tried again, when a lane is full or a request waits."""


class Marks:
    """See the module's docstring."""

    def __init__(self, empty: Readable, seed: int, closed: int, incarnation: int) -> None:
        """`empty`: no rows of the delay log's schema, as an Arrow message. `closed`: by the manifest."""
        self._empty = empty
        self._seed = seed
        self._incarnation = incarnation
        self.closed = closed
        """The ordinal below which everything is closed, by the last mark that was read."""
        self.is_fenced = False
        self._asked: tuple[int, int] | None = None
        """(ordinal, when) of the mark that was asked for and not read yet."""

    @property
    def epoch(self) -> int:
        """The clock's, by the last mark that was read."""
        return self.closed >> TICK_BITS

    @property
    def closed_tick(self) -> int:
        """Up to here everything is closed; -1: nothing is."""
        return (self.closed & TICK_MASK) - 1

    @property
    def is_asked(self) -> bool:
        return self._asked is not None

    @property
    def asks_for_epoch(self) -> bool:
        """Whether the mark that is asked for begins an epoch."""
        return self._asked is not None and self._asked[0] >> TICK_BITS > self.epoch

    @property
    def retry_ns(self) -> int | None:
        """When to ask again, should the mark not have been read."""
        return None if self._asked is None else self._asked[1] + RETRY_NS

    def asked(self, ordinal: int, now_ns: int) -> None:
        """A mark was sent."""
        self._asked = ordinal, now_ns

    def ask_no_more(self) -> None:
        """There is nothing to be closed now."""
        self._asked = None

    def see(self, header: BatchHeader) -> bool:
        """A mark was read. False: it begins another epoch, which is to be begun before anything behind it is read (`begin_epoch`)."""
        ordinal = header.min_tick
        if self._asked is not None and ordinal >= self._asked[0]:
            self._asked = None
        self.is_fenced = self.is_fenced or header.previous_position == self._incarnation
        if ordinal >> TICK_BITS > self.epoch:
            return False
        self.closed = max(self.closed, ordinal)
        return True

    def begin_epoch(self, ordinal: int) -> None:
        """The clock was set back: from here on ordinals of its new epoch count."""
        self.closed = ordinal

    def encode(self, ordinal: int, delivered: tuple[int, int], schema_id: int, wall_us: int) -> bytearray:
        """A control batch: no rows, one offset. `delivered`: what was, when the mark begins a new epoch of the clock."""
        header = BatchHeader(
            attributes=ATTRIBUTE_CONTROL, record_count=0, last_offset_delta=0, first_timestamp_us=wall_us, max_timestamp_us=wall_us,
            schema_id=schema_id, min_tick=ordinal, due_us=delivered[0], delay_position=delivered[1], previous_position=self._incarnation,
        )  # fmt: skip
        return insert_header(self._empty, header, self._seed)
