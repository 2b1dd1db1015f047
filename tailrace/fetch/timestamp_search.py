"""The first record at or after a time, looked for by reading, where the appliance could not say:
its host has no codec for a batch, or one is damaged.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow.compute as pc

from tailrace.batch import arrow_codec as arrow_batch
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
    """The first record from the cursor's position to the offset `end` that is not before `when_us`;
    None: there is none. `fetch`: waits until the cursor has something buffered. Raises what the
    cursor meets.
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
    """The first row at or after a time among the buffered batches, which are used up. Raises the
    cursor's error.
    """
    if cursor.error is not None:
        raise cursor.error
    while (taken := cursor.take(settings)) is not None:
        header, rows, first_offset = taken
        if header.max_timestamp_us < when_us:
            continue
        stamps = arrow_batch.timestamps_of(rows, header, is_typed=cursor.info.typed)
        if stamps is None:
            return OffsetAndTimestamp(first_offset, header.max_timestamp_us // 1000)
        row = pc.index(pc.greater_equal(stamps, when_us), True).as_py()
        if row >= 0:
            return OffsetAndTimestamp(first_offset + row, stamps[row].as_py() // 1000)
    return None
