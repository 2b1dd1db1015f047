"""Search for the first record at or after a time, by reading. It is used when the appliance cannot
answer, because its host has no codec for a batch, or a batch is damaged.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow.compute as pc

from tailrace.batch import arrow_codec
from tailrace.client.settings import ConsumerSettings
from tailrace.client.steps import Steps
from tailrace.core.records import OffsetAndTimestamp
from tailrace.fetch.fetcher import PartitionPosition


def offset_for_time(
    cursor: PartitionPosition,
    when_us: int,
    end: int,
    fetch: Callable[[PartitionPosition], Steps[None]],
    settings: ConsumerSettings,
) -> Steps[OffsetAndTimestamp | None]:
    """The first record at or after `when_us`, from the cursor's position to the offset `end`; None:
    there is none. `fetch` waits until the cursor has a batch. Raises the cursor's error.
    """
    while cursor.position is not None and cursor.position < end:
        yield from fetch(cursor)
        found = first_buffered(cursor, when_us, settings)
        if found is not None:
            return found
    return None


def first_buffered(
    cursor: PartitionPosition, when_us: int, settings: ConsumerSettings
) -> OffsetAndTimestamp | None:
    """The first row at or after a time in the buffered batches, which are consumed. Raises the
    cursor's error.
    """
    if cursor.error is not None:
        raise cursor.error
    while (taken := cursor.take(settings)) is not None:
        header, rows, first_offset = taken
        if header.max_timestamp_us < when_us:
            continue
        stamps = arrow_codec.timestamps_of(rows, header, is_typed=cursor.info.typed)
        if stamps is None:
            return OffsetAndTimestamp(first_offset, header.max_timestamp_us // 1000)
        row = pc.index(pc.greater_equal(stamps, when_us), True).as_py()
        if row >= 0:
            return OffsetAndTimestamp(first_offset + row, stamps[row].as_py() // 1000)
    return None
