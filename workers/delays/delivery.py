"""What is due as batches for the partition: cut by what they take encoded, each proven as the worker will prove it before it is sent.

A delivered batch is refused by the worker for good when it is too large or misleads a reader; sent again it would be refused for ever, and everything behind
it would wait. So what the worker will not take is found here: fewer rows are tried, and a single row that cannot pass is set aside.

Owner: the scheduler, one for each partition.
Invariants: a batch of several rows <= max.message.bytes and DELIVERY_BYTES, unpacked; one of a single row <= what the lane to the worker carries: it was
    acknowledged when max.message.bytes was larger, perhaps. The timestamp of an occurrence of a recurring record is the time of that occurrence, to the
    millisecond: in its column `timestamp`; in a typed topic, whose columns are the producer's, in the header of a batch of occurrences of one tick.
"""

from __future__ import annotations

from typing import NamedTuple

from shm.catalog_messages import Assignment
from tailrace.delays import TICK_US
from tailrace.formats import arrow_batch
from tailrace.formats.arrow_metadata import read_schema
from tailrace.formats.batch_header import ATTRIBUTE_DELAYED, BatchHeader, checksum_seed
from tailrace.formats.structure import check_structure
from workers.delays.array_wheel import Rows
from workers.delays.pending_rows import PendingRows
from workers.delays.recurring_rows import with_occurrence_times

DELIVERY_BYTES = 256 << 10
DELIVERY_ROWS = 4_096


class Delivery(NamedTuple):
    """Rows that are on their way, or the one that cannot be."""

    rows: Rows
    data: bytearray | None
    """None: the row is refused."""
    reason: str = ""


class Deliveries:
    """Makes the batches of one partition."""

    def __init__(self, columns: list[int], topic_schema: bytes, payload_max: int) -> None:
        """`columns`: places of the topic's columns in the delay log's schema. `payload_max`: bytes that the lane to the worker carries in one message."""
        self._columns = columns
        self._layout = read_schema(topic_schema)
        self._payload_max = payload_max
        self._rows_max = DELIVERY_ROWS
        """Fewer for a while behind rows that could not be sent together."""

    def next_of(
        self, ready: Rows, pending: PendingRows, topic: Assignment, epoch_bits: int, previous: tuple[int, int], wall_us: int
    ) -> Delivery:
        """The first of what is ready (not empty) as one batch. Raises OSError, MemoryError."""
        count = pending.count_of_bytes(ready[: min(self._rows_max, DELIVERY_ROWS)], DELIVERY_BYTES)
        if topic.typed:
            count = _count_of_one_time(ready[:count], pending)
        while True:
            rows = ready[:count]
            try:
                data = self._encode(rows, pending, topic, epoch_bits, previous, wall_us)
            except (OSError, MemoryError):
                raise
            except Exception as error:  # rows are clients': what pyarrow makes of them is not known before
                if count == 1:
                    return Delivery(rows, None, f"{type(error).__name__}: {error}")
                data = None
            if data is not None:
                self._rows_max = min(DELIVERY_ROWS, 2 * self._rows_max)
                return Delivery(rows, data)
            count = self._rows_max = max(1, count // 2)

    def _encode(
        self, rows: Rows, pending: PendingRows, topic: Assignment, epoch_bits: int, previous: tuple[int, int], wall_us: int
    ) -> bytearray | None:
        """None: fewer rows are to be tried. Raises ValueError for one row that cannot pass."""
        batch = pending.columns_of(rows, self._columns)
        is_single = len(rows) == 1
        limit = min(int(topic.settings["max.message.bytes"]), self._payload_max)
        if not is_single and batch.nbytes > min(DELIVERY_BYTES, limit):
            return None
        compression = str(topic.settings["compression.type"]) if batch.nbytes <= limit else "none"
        compression = "none" if compression == "producer" else compression  # who sent it does not write this batch
        recur = pending.recur(rows)
        if recur.any() and not topic.typed:
            batch = with_occurrence_times(batch, rows, recur)
        is_occurrence = topic.typed and bool(recur[0])  # of one tick, all of them: see `_count_of_one_time`
        first, largest = [int(rows[0, 0]) * TICK_US] * 2 if is_occurrence else arrow_batch.timestamp_range(batch, wall_us)
        header = BatchHeader(
            attributes=ATTRIBUTE_DELAYED, record_count=batch.num_rows, last_offset_delta=batch.num_rows - 1, first_timestamp_us=first,
            max_timestamp_us=largest, schema_id=topic.schema_id, min_tick=epoch_bits | int(rows[-1, 0]), delay_position=int(rows[-1, 1]),
            due_us=previous[0], previous_position=previous[1],
        )  # fmt: skip
        data = arrow_batch.encode_as(batch, header, checksum_seed(topic.topic_id, topic.partition), compression)
        if len(data) > (self._payload_max if is_single else limit):
            if is_single:
                raise ValueError(f"the record takes {len(data)} bytes as a batch, the lane to the worker carries {self._payload_max}")
            return None
        check_structure(data, header, self._layout, is_ours=True)
        return data


def _count_of_one_time(rows: Rows, pending: PendingRows) -> int:
    """How many of these (not none) go into one batch where the header has the records' time: occurrences of one tick, or rows that do not recur."""
    recur = pending.recur(rows)
    fits = (recur == recur[0]) & (~recur | (rows[:, 0] == rows[0, 0]))
    return len(rows) if fits.all() else int(fits.argmin())
