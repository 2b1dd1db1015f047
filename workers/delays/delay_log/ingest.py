"""Log ingest: adds rows of the delay log to the store, and applies cancellations and replacements.

A batch or row that cannot be validated or kept is set aside, without effect on others.

Owner: the scheduler, one for each partition.

Invariants:
- `changes` has an entry for each batch of a pending request (`requests` bounds them).
- `hints` <= HINTS_MAX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.core.error_codes import ErrorCode
from tailrace.core.schedule.delays import TICK_MASK
from tailrace.core.schedule.recurrence import Recurrence, RecurrenceError
from tailrace.format.record_batch.batch_header import BatchHeader
from workers.delays.dead_delays import DeadDelays
from workers.delays.delay_log.batches import (
    DUE_MAX_US,
    LogBatch,
    LogBatches,
    RefusedBatchError,
    owner_in,
    ticks_of,
)
from workers.delays.store.log_versions import DUE, ORIGIN, REPEAT, version_of
from workers.delays.store.pending_rows import one_batch, table_of
from workers.delays.store.pending_store import PendingStore
from workers.delays.store.recurring_rows import RecurringRows

HINTS_MAX = 100_000
GATHERED_BYTES = 8 << 20
"""Decompressed bytes of the log that are ingested at a time."""
Outcome = tuple[int, int] | bool | ErrorCode | None
"""Outcome of a changed row: the new row's (offset, due), None if it is cancelled, False if it is
not pending, or an error code.
"""


@dataclass(slots=True)
class Change:
    """A request's batch in the delay log. `outcomes` are set when it is read first."""

    outcomes: list[Outcome] | None = None


@dataclass(slots=True)
class Counters:
    delivered: int = 0
    cancelled: int = 0
    lateness_us: int = 0
    """Lateness of the first row in the last delivered batch."""


class LogIngest:
    """Ingest of one partition's delay log."""

    def __init__(
        self, store: PendingStore, recurring: RecurringRows, batches: LogBatches, aside: DeadDelays
    ) -> None:
        self._store = store
        self._recurring = recurring
        self.batches = batches
        self._aside = aside
        self.counters = Counters()
        self.changes: dict[int, Change] = {}
        """Changes by token that wait for their batch to be read."""
        self.is_reserved: Callable[[int], bool] = lambda _offset: False
        """Returns True if an open transaction has reserved a row."""
        self.hints: dict[int, int] = {}
        """Probable due tick by offset, for rows in requests. It is right for most rows."""

    def proven(
        self, header: BatchHeader, data: memoryview, max_message_bytes: int
    ) -> LogBatch | None:
        """Return a batch's rows, or None if they were set aside. Raises OSError."""
        try:
            return self.batches.decode(header, data, max_message_bytes)
        except RefusedBatchError as error:
            self._aside.keep(
                header.base_offset, header.record_count, str(error), data, header.schema_id
            )
            return None

    def add(self, gathered: list[LogBatch]) -> None:
        """Add batches of the log, in order.

        Plain rows of consecutive batches of one version become one run. Raises OSError.
        """
        plain: list[LogBatch] = []
        for batch in gathered:
            if batch.is_plain:
                if plain and plain[-1].header.schema_id != batch.header.schema_id:
                    self._add_plain(plain)
                    plain = []
                plain.append(batch)
                continue
            self._add_plain(plain)
            plain = []
            try:
                if batch.is_change:
                    self._add_change(batch)
                else:
                    self._add_some(batch)
            except (OSError, MemoryError):
                raise
            except Exception as error:
                self._refuse(batch, error)
        self._add_plain(plain)

    def _add_plain(self, batches: list[LogBatch]) -> None:
        """Add batches together, or one by one if that fails, so that a bad one affects no other."""
        if not batches:
            return
        try:
            # copied, so that the read buffer is released
            rows = one_batch(pa.Table.from_batches([batch.rows for batch in batches]))
            offsets = np.concatenate(
                [np.arange(batch.header.base_offset, batch.header.next_offset) for batch in batches]
            )
            ticks = np.concatenate([self._ticks_of(batch.rows, batch.header) for batch in batches])
        except MemoryError:
            raise
        except Exception as error:
            if len(batches) == 1:
                self._refuse(batches[0], error)
            else:
                for batch in batches:
                    self._add_plain([batch])
            return
        self._store.rows.add(offsets, ticks, rows)

    def _ticks_of(
        self, rows: pa.RecordBatch, header: BatchHeader
    ) -> np.ndarray[Any, np.dtype[np.int64]]:
        return ticks_of(rows.column(DUE), header.min_tick & TICK_MASK)

    def _add_some(self, batch: LogBatch) -> None:
        """Add a client's batch in which some rows recur or have no due time, which only the
        appliance may write.
        """
        has_due, recurs = self.batches.has_due(batch), self.batches.recurs(batch)
        if not has_due.all():
            self._aside.keep(
                batch.header.base_offset,
                int((~has_due).sum()),
                "rows without a due time",
                batch.data,
                batch.header.schema_id,
            )
        offsets, rows = self.batches.select(batch, has_due & ~recurs)
        self._store.rows.add(
            offsets, self._ticks_of(rows, batch.header), one_batch(pa.Table.from_batches([rows]))
        )
        offsets, rows = self.batches.select(batch, has_due & recurs)
        for row, offset in enumerate(offsets.tolist()):
            self._add_recurring(batch.header, offset, rows.slice(row, 1))

    def _add_change(self, batch: LogBatch) -> None:
        """Apply rows that cancel or replace others, in order.

        A request may wait for the outcomes.
        """
        outcomes: list[Outcome] = []
        columns = [batch.rows.column(place).to_pylist() for place in (DUE, ORIGIN, REPEAT)]
        for row, (due_us, origin, repeat) in enumerate(zip(*columns, strict=True)):
            offset = batch.header.base_offset + row
            if origin is not None and self.is_reserved(origin):
                outcomes.append(ErrorCode.CONCURRENT_TRANSACTIONS)
                continue
            was_pending = origin is None or self.cancel(origin)
            if not was_pending or (due_us is None and origin is None):
                outcomes.append(False)
                continue
            if due_us is None:
                outcomes.append(None)
                self.counters.cancelled += 1
                continue
            outcomes.append((offset, due_us))
            one = self.batches.owned(batch.rows.slice(row, 1), owner_in(batch.header))
            if repeat is not None:
                self._add_recurring(batch.header, offset, one)
            else:
                self._store.rows.add(
                    np.array([offset]),
                    self._ticks_of(one, batch.header),
                    one_batch(pa.Table.from_batches([one])),
                )
        self.answer(batch, outcomes)

    def answer(self, batch: LogBatch, outcomes: list[Outcome]) -> None:
        """Note the outcomes of a change, unless it was read before: it may be sent twice."""
        change = self.changes.get(batch.header.due_us)
        if change is not None and change.outcomes is None:
            change.outcomes = outcomes

    def add_rows(
        self, rows: list[tuple[int, pa.RecordBatch, int]], marker: BatchHeader, closed: int
    ) -> None:
        """Add single rows, as (offset, row, next due time), that exist from a marker on. `closed`
        is the ordinal that is closed there.
        """
        header = replace(marker, min_tick=closed)
        plain: dict[int, list[tuple[int, pa.RecordBatch]]] = {}
        for offset, row, due_us in sorted(rows, key=lambda each: each[0]):
            if row.column(REPEAT).null_count:
                plain.setdefault(version_of(row), []).append((offset, row))
            else:
                self._add_recurring(header, offset, row, due_us)
        for of_version in plain.values():
            together = one_batch(table_of([row for _, row in of_version]))
            offsets = np.array([offset for offset, _ in of_version], np.int64)
            self._store.rows.add(offsets, self._ticks_of(together, header), together)

    def _add_recurring(
        self, header: BatchHeader, offset: int, row: pa.RecordBatch, due_us: int | None = None
    ) -> None:
        """Add a recurring row. `due_us` is its next due time, by default that of the row."""
        if due_us is None:
            due_us = row.column(DUE)[0].as_py()
        due_us = min(max(0, due_us), DUE_MAX_US)
        try:
            recurrence = Recurrence.from_json(row.column(REPEAT)[0].as_py())
            self._recurring.add(
                offset, recurrence, due_us, row, header.min_tick & TICK_MASK, header.append_time_us
            )
        except RecurrenceError as error:
            self._aside.keep_row(offset, row, str(error))

    def _refuse(self, batch: LogBatch, error: Exception) -> None:
        self._aside.keep(
            batch.header.base_offset,
            batch.header.record_count,
            f"{type(error).__name__}: {error}",
            batch.data,
            batch.header.schema_id,
        )

    # ---- cancelling ------------------------------------------------------------------------------

    def cancel(self, offset: int) -> bool:
        """Cancel a row. Return True if it was pending."""
        was_recurring = self._recurring.cancel(offset)
        return self._store.cancel(offset, self.hints.pop(offset, None)) or was_recurring

    def upcoming(self, offset: int) -> tuple[int, Recurrence] | None:
        """Return (next due time in microseconds, recurrence) of a recurring row, or None."""
        return self._recurring.upcoming(offset)

    def waits(self, offset: int) -> bool:
        """True if this row is pending. Raises OSError."""
        return offset in self._recurring or self._store.waits(offset, self.hints.get(offset))

    def hint(self, offset: int, tick: int) -> None:
        """Note the probable due tick of a row in a request."""
        if len(self.hints) >= HINTS_MAX:
            self.hints.clear()  # they only speed up a search
        self.hints[offset] = tick

    def row_of(self, offset: int) -> pa.RecordBatch | None:
        """Return a pending row as a batch of one in the delay log's schema, or None.

        Raises OSError.
        """
        row = self._recurring.row_of(offset)
        return row if row is not None else self._store.row_of(offset, self.hints.get(offset))
