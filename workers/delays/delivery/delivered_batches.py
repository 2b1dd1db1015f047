"""Delivery of due rows: encodes them as batches for the partition, each validated as the worker
will.

The worker refuses a delivered batch permanently if it is too large or invalid. Resent, it would be
refused for ever and block all rows behind it. So such rows are found here: fewer rows are tried,
and a single row that cannot pass is set aside.

Owner: the scheduler, one for each partition.

Invariants:
- Rows of each version are delivered as rows of the topic's present schema.
- A batch of several rows has at most max.message.bytes and DELIVERY_BYTES, decompressed.
- A batch of a single row fits the lane to the worker. It may have been acknowledged under a larger
  max.message.bytes.
- The timestamp of an occurrence of a recurring record is its occurrence time, to the millisecond.
  It is in the column `timestamp`, or for a typed topic in the header of a batch of occurrences of
  one tick.
"""

from __future__ import annotations

from typing import NamedTuple

from shm.messages.lane_messages import Assignment
from tailrace.batch import arrow_codec
from tailrace.core.schedule.delays import TICK_US
from tailrace.format.record_batch.arrow_metadata import SchemaLayout, read_schema
from tailrace.format.record_batch.batch_header import ATTRIBUTE_DELAYED, BatchHeader, checksum_seed
from tailrace.format.record_batch.batch_validation import validate_batch
from workers.delays.store.array_wheel import Rows
from workers.delays.store.log_versions import LogVersions
from workers.delays.store.pending_rows import PendingRows
from workers.delays.store.recurring_rows import with_occurrence_times

DELIVERY_BYTES = 256 << 10
DELIVERY_ROWS = 4_096


class Delivery(NamedTuple):
    """A batch of rows to send, or a row that cannot be sent."""

    rows: Rows
    data: bytearray | None
    """None if the row is refused."""
    reason: str = ""


class Deliveries:
    """Encodes the batches of one partition."""

    def __init__(self, versions: LogVersions, payload_max: int) -> None:
        """`versions` are the delay log's. `payload_max` is the largest message of the lane to the
        worker, in bytes.
        """
        self._versions = versions
        self._layout: tuple[int, SchemaLayout] | None = None
        """The topic's schema id and schema."""
        self._payload_max = payload_max
        self._rows_max = DELIVERY_ROWS
        """Row limit, lowered for a while after rows that could not be sent together."""

    def next_of(
        self,
        ready: Rows,
        pending: PendingRows,
        topic: Assignment,
        epoch_bits: int,
        previous: tuple[int, int],
        wall_us: int,
    ) -> Delivery:
        """Encode the first of the ready rows (at least one) as one batch.

        Raises OSError, MemoryError.
        """
        count = pending.count_of_bytes(ready[: min(self._rows_max, DELIVERY_ROWS)], DELIVERY_BYTES)
        if topic.typed:
            count = _count_of_one_time(ready[:count], pending)
        while True:
            rows = ready[:count]
            try:
                data = self._encode(rows, pending, topic, epoch_bits, previous, wall_us)
            except (OSError, MemoryError):
                raise
            except Exception as error:
                # rows are client data, for which pyarrow may raise any error
                if count == 1:
                    return Delivery(rows, None, f"{type(error).__name__}: {error}")
                data = None
            if data is not None:
                self._rows_max = min(DELIVERY_ROWS, 2 * self._rows_max)
                return Delivery(rows, data)
            count = self._rows_max = max(1, count // 2)

    def _encode(
        self,
        rows: Rows,
        pending: PendingRows,
        topic: Assignment,
        epoch_bits: int,
        previous: tuple[int, int],
        wall_us: int,
    ) -> bytearray | None:
        """Encode rows.

        Return None if there are too many. Raises ValueError for a single row that cannot pass.
        """
        batch = pending.columns_of(rows, self._versions.topic_rows)
        is_single = len(rows) == 1
        limit = min(int(topic.settings["max.message.bytes"]), self._payload_max)
        if not is_single and batch.nbytes > min(DELIVERY_BYTES, limit):
            return None
        compression = str(topic.settings["compression.type"]) if batch.nbytes <= limit else "none"
        # this batch is not the producer's own
        compression = "none" if compression == "producer" else compression
        recur = pending.recur(rows)
        if recur.any() and not topic.typed:
            batch = with_occurrence_times(batch, rows, recur)
        # occurrences of one tick only: see `_count_of_one_time`
        is_occurrence = topic.typed and bool(recur[0])
        first, largest = (
            [int(rows[0, 0]) * TICK_US] * 2
            if is_occurrence
            else arrow_codec.timestamp_range(batch, wall_us)
        )
        header = BatchHeader(
            attributes=ATTRIBUTE_DELAYED, record_count=batch.num_rows,
            last_offset_delta=batch.num_rows - 1, first_timestamp_us=first,
            max_timestamp_us=largest, schema_id=topic.schema_id,
            min_tick=epoch_bits | int(rows[-1, 0]), delay_position=int(rows[-1, 1]),
            due_us=previous[0], previous_position=previous[1],
        )  # fmt: skip
        data = arrow_codec.encode_as(
            batch, header, checksum_seed(topic.topic_id, topic.partition), compression
        )
        if len(data) > (self._payload_max if is_single else limit):
            if is_single:
                raise ValueError(
                    f"the record takes {len(data)} bytes as a batch; the lane to the worker "
                    f"carries {self._payload_max}"
                )
            return None
        validate_batch(data, header, self._layout_of(topic), is_ours=True)
        return data

    def _layout_of(self, topic: Assignment) -> SchemaLayout:
        if self._layout is None or self._layout[0] != topic.schema_id:
            self._layout = topic.schema_id, read_schema(topic.schema)
        return self._layout[1]


def _count_of_one_time(rows: Rows, pending: PendingRows) -> int:
    """Return how many of these rows (at least one) fit a batch whose header has the records' time:
    occurrences of one tick, or rows that do not recur.
    """
    recur = pending.recur(rows)
    fits = (recur == recur[0]) & (~recur | (rows[:, 0] == rows[0, 0]))
    return len(rows) if fits.all() else int(fits.argmin())
