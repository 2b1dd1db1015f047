"""Recurring rows: each waits in memory for its next occurrence, and is expanded to its occurrences
when due.

Owner: the scheduler, one for each partition. The manifest has all recurring rows, since they are
never done.

Invariants:
- Rows <= ROWS_MAX, their bytes <= BYTES_MAX.
- Occurrences released in one step <= about EXPANDED_MAX (fifty each with missed="none").
- A recurring row is the only one of its run in `PendingRows`, with the source RECURRING.
- The occurrences of a tick depend only on the row, its due time and the tick. Reading the log again
  gives the same.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.core.schedule.delays import DUE_TICK_MAX, TICK_US, tick_of
from tailrace.core.schedule.recurrence import Recurrence, RecurrenceError
from workers.delays.store.array_wheel import NEVER, Rows
from workers.delays.store.bucket_files import is_above
from workers.delays.store.log_versions import LogVersions, version_of
from workers.delays.store.pending_rows import RECURRING, Bools, PendingRows, one_batch

ROWS_MAX = 10_000
BYTES_MAX = 8 << 20
"""Each row is in memory, and in the manifest whenever that is written."""
EXPANDED_MAX = 50_000
"""Occurrences of all rows together when each was missed often."""

Refuse = Callable[[int, pa.RecordBatch, str], None]
"""(offset, row, reason): the row cannot recur any more."""


_TIMESTAMP = pa.timestamp("us", "UTC")


@dataclass(slots=True)
class Recurring:
    """A recurring row with its next occurrence."""

    recurrence: Recurrence
    due_us: int
    row: pa.RecordBatch


class RecurringRows:
    """Recurring rows of one partition."""

    def __init__(
        self,
        rows: PendingRows,
        versions: LogVersions,
        described: list[dict[str, Any]],
        refuse: Refuse,
    ) -> None:
        """`described` is an earlier result of `describe`. Raises OSError, UnusableSchemaError."""
        self._rows = rows
        self._versions = versions
        self._refuse = refuse
        self._items: dict[int, Recurring] = {}
        """Rows by offset in the delay log, at most ROWS_MAX."""
        self._byte_count = 0
        self._reach: int | None = None
        """Cached result of `reach`, None after a change."""
        for item in described:
            row = pa.ipc.read_record_batch(
                pa.ipc.read_message(pa.py_buffer(base64.b64decode(item["row"]))),
                versions.schema(item.get("schema_id", versions.oldest_id)),
            )
            try:
                self._keep(
                    item["offset"],
                    Recurring(Recurrence.from_json(item["repeat"]), item["due_us"], row),
                )
            except RecurrenceError as error:  # for example a removed time zone
                refuse(item["offset"], row, str(error))

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, offset: int) -> bool:
        return offset in self._items

    def add(
        self,
        offset: int,
        recurrence: Recurrence,
        due_us: int,
        row: pa.RecordBatch,
        min_tick: int,
        append_us: int,
    ) -> None:
        """Add a row. `due_us` is its first occurrence, due at `min_tick` at the earliest.
        `append_us` is when it was appended. Raises RecurrenceError.
        """
        first_us = recurrence.first_from(due_us, append_us)
        if first_us is None:
            raise RecurrenceError("it has no further occurrence")
        row = one_batch(pa.Table.from_batches([row]))
        if len(self._items) >= ROWS_MAX or self._byte_count + row.nbytes > BYTES_MAX:
            raise RecurrenceError(
                f"{len(self._items)} records of {self._byte_count} bytes recur in this partition; "
                f"the limits are {ROWS_MAX} records and {BYTES_MAX} bytes"
            )
        self._keep(offset, Recurring(recurrence, max(first_us, (min_tick - 1) * TICK_US + 1), row))

    def _keep(self, offset: int, item: Recurring) -> None:
        self._items[offset] = item
        self._byte_count += item.row.nbytes
        self._place(offset)

    def _drop(self, offset: int) -> Recurring | None:
        item = self._items.pop(offset, None)
        self._reach = None
        if item is not None:
            self._byte_count -= item.row.nbytes
        return item

    def _place(self, offset: int) -> None:
        item = self._items[offset]
        self._reach = None
        self._rows.add(
            np.array([offset]),
            np.array([min(tick_of(item.due_us), DUE_TICK_MAX)]),
            item.row,
            RECURRING,
        )

    def cancel(self, offset: int) -> bool:
        """Stop a row's recurrence.

        Return True if it recurred. The caller cancels its occurrence in memory.
        """
        return self._drop(offset) is not None

    def row_of(self, offset: int) -> pa.RecordBatch | None:
        """Return a recurring row as a batch of one in the delay log's schema, or None."""
        item = self._items.get(offset)
        return None if item is None else item.row

    def upcoming(self, offset: int) -> tuple[int, Recurrence] | None:
        """Return (next due time in microseconds since 1970, recurrence), or None."""
        item = self._items.get(offset)
        return None if item is None else (item.due_us, item.recurrence)

    def expand(self, rows: Rows, tick: int) -> Rows:
        """Replace recurring rows among those released up to `tick` by their occurrences, and
        schedule the next ones.
        """
        is_mine = np.isin(rows[:, 1], np.fromiter(self._items, np.int64, len(self._items)))
        found = []
        for row in rows[is_mine]:
            offset, reference = int(row[1]), int(row[2])
            item = self._items[offset]
            try:
                due, upcoming = item.recurrence.due_until(item.due_us, tick)
            except (RecurrenceError, OverflowError) as error:
                self._refuse(offset, item.row, str(error))
                due, upcoming = [], None
            found += [(tick_of(each), offset, reference) for each in due]
            self._rows.expect(reference, len(due))
            if upcoming is None:
                self._drop(offset)
            else:
                item.due_us = upcoming
                self._place(offset)
        merged = np.concatenate([rows[~is_mine], np.array(found, np.int64).reshape(-1, 3)])
        return merged[np.lexsort((merged[:, 1], merged[:, 0]))]

    def reach(self) -> int:
        """Return the latest tick that may be closed at once. After a long outage missed occurrences
        are delivered in pieces.
        """
        if self._reach is None:
            at_once = EXPANDED_MAX // max(1, len(self._items))
            reaches = (item.recurrence.reach(item.due_us, at_once) for item in self._items.values())
            self._reach = min((reach for reach in reaches if reach is not None), default=NEVER)
        return self._reach

    def take_back(self, rows: Rows, delivered: tuple[int, int]) -> Rows:
        """Take back released occurrences after `delivered` (tick, offset), because the clock was
        set back. Return the rows that do not recur.
        """
        is_mine = np.isin(rows[:, 1], np.fromiter(self._items, np.int64, len(self._items)))
        mine = rows[is_mine]
        for offset in np.unique(mine[is_above(mine[:, 0], mine[:, 1], delivered), 1]).tolist():
            item, waiting = self._items[offset], mine[mine[:, 1] == offset]
            tick = int(waiting[is_above(waiting[:, 0], waiting[:, 1], delivered), 0].min())
            place = self._rows.find(offset)
            if place is not None:
                self._rows.cancel(place)
            item.due_us = item.recurrence.occurrence_at(tick, item.due_us)
            self._place(offset)
        self._rows.done(mine)
        return rows[~is_mine]

    def describe(self) -> list[dict[str, Any]]:
        """Return the rows for the manifest."""
        return [
            {
                "offset": offset,
                "repeat": item.recurrence.to_json(),
                "due_us": item.due_us,
                "row": base64.b64encode(item.row.serialize()).decode(),
                **({"schema_id": version_of(item.row)} if self._versions.is_altered else {}),
            }
            for offset, item in self._items.items()
        ]


def with_occurrence_times(batch: pa.RecordBatch, rows: Rows, recur: Bools) -> pa.RecordBatch:
    """Return `batch` (of `rows`, in the default schema) with occurrence times as
    timestamps of recurring rows.
    """
    place = batch.schema.get_field_index("timestamp")
    times = pa.array(rows[:, 0] * TICK_US, pa.int64()).view(_TIMESTAMP)
    return batch.set_column(
        place, batch.schema.field(place), pc.if_else(pa.array(recur), times, batch.column(place))
    )
