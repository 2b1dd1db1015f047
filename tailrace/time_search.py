"""The first record at or after a time: the appliance knows batches, so it says where to begin, and the records are looked at here."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from tailrace import arrow_batch
from tailrace.batch_header import BatchHeader
from tailrace.fetcher import PartitionCursor
from tailrace.records import OffsetAndTimestamp
from tailrace.settings import ConsumerSettings


def first_at_or_after(
    cursor: PartitionCursor, when_us: int, end: int, fetch: Callable[[PartitionCursor], None], settings: ConsumerSettings
) -> OffsetAndTimestamp | None:
    """The first record from the cursor's position to the offset `end` that is not before `when_us`; None: there is none. `fetch`: waits until the cursor
    has something buffered. Raises what the cursor meets.
    """
    while cursor.position is not None and cursor.position < end:
        fetch(cursor)
        if cursor.error is not None:
            raise cursor.error
        while (taken := cursor.take(settings)) is not None:
            found = _first_in_batch(cursor, *taken, when_us)
            if found is not None:
                return found
    return None


def _first_in_batch(
    cursor: PartitionCursor, header: BatchHeader, rows: pa.RecordBatch, first_offset: int, when_us: int
) -> OffsetAndTimestamp | None:
    index = cursor.info.schema.get_field_index("timestamp")
    has_one_time = arrow_batch.timestamp_type_of(header) or index < 0 or not pa.types.is_timestamp(rows.schema.field("timestamp").type)
    if has_one_time:
        return OffsetAndTimestamp(first_offset, header.max_timestamp_us // 1000) if header.max_timestamp_us >= when_us else None
    stamps = rows.column(rows.schema.get_field_index("timestamp")).cast(pa.int64())
    row = pc.index(pc.fill_null(pc.greater_equal(stamps, when_us), False), True).as_py()
    return OffsetAndTimestamp(first_offset + row, stamps[row].as_py() // 1000) if row >= 0 else None
