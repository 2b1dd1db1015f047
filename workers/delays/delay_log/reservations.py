"""Reservations: pending rows that open transactions have cancelled or rescheduled.

A change by a transaction is a batch of the delay log. Of each row that it changes it has two rows:
the row as it was, then the change that the commit makes. The change takes effect at the marker. In
between the row is out of the pending store, so it is not delivered, and no other request can change
it.

    change read:    pending store --> reservation
    commit marker:  the row is gone; its replacement, if there is one, is pending
    abort marker:   the row is pending again, with its offset, so its delay id stays valid

Owner: the scheduler, one for each partition.

Invariants:
- A row is reserved by one transaction. Within it the change with the highest number counts, so a
  request that comes twice is one change.
- A row that comes back, or replaces another, is not due before what was closed at the marker.

Crash: the manifest names the changes that were open at its cursor, with the rows that each has
reserved. Their content is read from the delay log, whose segments are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tailrace.core.error_codes import ErrorCode
from tailrace.core.schedule.delays import tick_of
from tailrace.core.schedule.recurrence import Recurrence
from tailrace.format.record_batch.batch_header import CONTROL_COMMIT, BatchHeader
from workers.delays.changing_transaction import Key
from workers.delays.delay_log.batches import LogBatch, owner_in, shown_due_us
from workers.delays.delay_log.ingest import LogIngest, Outcome
from workers.delays.store.bucket_files import Ints
from workers.delays.store.log_versions import DUE, ORIGIN, REPEAT
from workers.delays.store.pending_pages import Others
from workers.delays.store.pending_rows import gather, take_rows

ROW_BYTES = 600
"""Memory of a reservation beside its columns."""


@dataclass(slots=True)
class Reserved:
    """A reserved row."""

    key: Key
    number: int
    """Number of the change within its transaction."""
    batch: LogBatch
    place: int
    """Index of the row as it was. The change is the row after it."""
    upcoming_us: int
    """Its next due time when it was reserved."""


class Reservations:
    """Reserved rows of one partition."""

    def __init__(
        self,
        intake: LogIngest,
        described: list[list[int]],
        read: Callable[[int], LogBatch | None],
    ) -> None:
        """`described` is an earlier result of `describe`. `read` returns the batch at an offset of
        the delay log, None if it is damaged. Raises OSError.
        """
        self._intake = intake
        self._rows: dict[int, Reserved] = {}
        """By offset of the reserved row."""
        for producer_id, epoch, offset, *taken in described:
            batch = read(offset)
            if batch is None:
                continue
            key, number = (producer_id, epoch), batch.header.previous_position
            origins = batch.rows.column(ORIGIN)
            for place, upcoming_us in zip(taken[::2], taken[1::2], strict=True):
                reserved = Reserved(key, number, batch, place, upcoming_us)
                self._rows[origins[place].as_py()] = reserved

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def byte_count(self) -> int:
        """Approximate memory of all."""
        batches = {id(each.batch): len(each.batch.data) for each in self._rows.values()}
        return 2 * sum(batches.values()) + ROW_BYTES * len(self._rows)

    def key_of(self, offset: int) -> Key | None:
        """Return the transaction that has reserved a row, None if none has."""
        reserved = self._rows.get(offset)
        return None if reserved is None else reserved.key

    def row_of(self, offset: int) -> pa.RecordBatch:
        """Return a reserved row as it was, as a batch of one."""
        return self._row_at(self._rows[offset])

    def _row_at(self, reserved: Reserved, change: int = 0) -> pa.RecordBatch:
        """Return a reserved row as it was, or (1) as it is changed, with its owner."""
        row = reserved.batch.rows.slice(reserved.place + change, 1)
        return self._intake.batches.owned(row, owner_in(reserved.batch.header))

    def describe(self) -> list[list[int]]:
        """Return `Manifest.reserved`."""
        found: dict[int, list[int]] = {}
        for each in self._rows.values():
            offset = each.batch.header.base_offset
            found.setdefault(offset, [*each.key, offset]).extend((each.place, each.upcoming_us))
        return list(found.values())

    # ---- the delay log ---------------------------------------------------------------------------

    def reserve(self, batch: LogBatch) -> list[Outcome]:
        """Reserve the rows of a change. Return the outcome of each, if the transaction commits.
        Raises OSError.
        """
        origins = batch.rows.column(ORIGIN).to_pylist()
        places = range(0, len(origins) - 1, 2)
        return [
            False if origins[place] is None else self._reserve(batch, place, origins[place])
            for place in places
        ]

    def _reserve(self, batch: LogBatch, place: int, origin: int) -> Outcome:
        header = batch.header
        key, number = (header.producer_id, header.producer_epoch), header.previous_position
        known = self._rows.get(origin)
        if known is not None:
            if known.key != key:
                return ErrorCode.CONCURRENT_TRANSACTIONS
            if known.number < number:
                known.number, known.batch, known.place = number, batch, place
            return self._outcome_of(known)
        upcoming = self._intake.upcoming(origin)
        if not self._intake.cancel(origin):
            return False
        due_us = batch.rows.column(DUE)[place].as_py() or 0
        upcoming_us = due_us if upcoming is None else upcoming[0]
        reserved = self._rows[origin] = Reserved(key, number, batch, place, upcoming_us)
        return self._outcome_of(reserved)

    def _outcome_of(self, reserved: Reserved) -> Outcome:
        batch, place = reserved.batch, reserved.place + 1
        due_us = batch.rows.column(DUE)[place].as_py()
        return None if due_us is None else (batch.header.base_offset + place, due_us)

    def end(self, marker: BatchHeader, closed: int) -> bool:
        """End a transaction. `closed` is the ordinal closed at its marker. Return True if a row was
        returned. Raises OSError.
        """
        key = marker.producer_id, marker.producer_epoch
        ended = {offset: each for offset, each in self._rows.items() if each.key == key}
        if not ended:
            return False
        for offset in ended:
            del self._rows[offset]
        if marker.control_type == CONTROL_COMMIT:
            self._commit(ended.values(), marker, closed)
            return False
        rows = [(offset, self._row_at(each), each.upcoming_us) for offset, each in ended.items()]
        self._intake.add_rows(rows, marker, closed)
        return True

    def _commit(self, ended: Iterable[Reserved], marker: BatchHeader, closed: int) -> None:
        rows: list[tuple[int, pa.RecordBatch, int]] = []
        for each in ended:
            outcome = self._outcome_of(each)
            if isinstance(outcome, tuple):
                rows.append((outcome[0], self._row_at(each, 1), outcome[1]))
            else:
                self._intake.counters.cancelled += 1
        self._intake.add_rows(rows, marker, closed)

    # ---- showing ---------------------------------------------------------------------------------

    def listed(self, columns: list[str]) -> Others | None:
        """Return columns of the rows for `page_of`: they are pending until the commit."""
        if not self._rows:
            return None
        reserved = list(self._rows.values())
        ticks = np.array([tick_of(shown_due_us(each.upcoming_us)) for each in reserved], np.int64)
        offsets = np.fromiter(self._rows, np.int64, len(reserved))

        def rows_at(places: Ints) -> pa.RecordBatch:
            return gather(
                [
                    take_rows(each.batch.rows.select(columns), np.array([each.place]))
                    for each in (reserved[place] for place in places.tolist())
                ]
            )

        return ticks, offsets, rows_at

    def upcoming(self, offset: int) -> tuple[int, Recurrence] | None:
        """Return (next due time, recurrence) of a reserved row that recurs, or None."""
        reserved = self._rows.get(offset)
        if reserved is None:
            return None
        repeat = self.row_of(offset).column(REPEAT)[0].as_py()
        return None if repeat is None else (reserved.upcoming_us, Recurrence.from_json(repeat))
