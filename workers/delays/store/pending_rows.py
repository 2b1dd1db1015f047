"""Pending rows in memory: the batches they came in, and the timing wheel of their due ticks.

A reference is (run number << 32) | row. A run is a batch of rows that were read together, from the
delay log or from a bucket file.

Owner: the scheduler, one for each partition.

Invariants:
- A row is alive until it is released or cancelled, each once.
- `release` returns due rows in order of (tick, offset).
- A run is dropped with its last row; one that is being saved and has cancelled rows, with the end
  of the save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from workers.delays.store.array_wheel import ArrayWheel, Rows, rows_of, split
from workers.delays.store.log_versions import version_of

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
SAVED = "saved"
"""Source of runs that were saved while some of their rows were being delivered."""
RECURRING = "recurring"
"""Source of a recurring row's run (see `workers.delays.store.recurring_rows`)."""
ROW_BYTES = 41
"""Memory of a row beside its columns: offset, tick, alive flag, and its place in the wheel."""


@dataclass(slots=True)
class Run:
    """Rows of one version of the delay log's schema, by ascending offset."""

    offsets: Ints
    ticks: Ints
    rows: pa.RecordBatch
    alive: np.ndarray[Any, np.dtype[np.bool_]]
    """True for rows that wait in the wheel and are not cancelled."""
    left: int
    """Number of rows that have not been taken out."""
    cancelled: set[int]
    """Offsets of cancelled rows."""
    source: str
    """Name of the bucket file with these rows, "" if they are in the delay log
    only, SAVED, or RECURRING.
    """

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes) + ROW_BYTES * len(self.offsets)


Take = Callable[[pa.RecordBatch, Ints], pa.RecordBatch]
"""(rows of a version, places) -> the rows at these places, in a form that all versions have."""


def take_rows(rows: pa.RecordBatch, places: Ints) -> pa.RecordBatch:
    """Return the rows at these places, as they are."""
    return rows.take(pa.array(places))


def gather(pieces: list[pa.RecordBatch], order: Ints | None = None) -> pa.RecordBatch:
    """Copy the rows of several batches of one schema into one batch, ordered by `order`."""
    table = pa.Table.from_batches(pieces)
    if order is not None:
        table = table.take(pa.array(order))
    return one_batch(table)


def table_of(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.concat_arrays(column.chunks) for column in table.columns], schema=table.schema
    )


class PendingRows:
    """Pending rows of one partition in memory."""

    def __init__(self, current_tick: int) -> None:
        self.wheel = ArrayWheel(current_tick)
        self._runs: dict[int, Run] = {}
        self._together: dict[int, Run] = {}
        """Runs of several rows."""
        self._alone: dict[int, list[int]] = {}
        """Runs with a single row, by offset (recurring and rescheduled rows). There may be
        thousands, too many to search.
        """
        self._next_run = 0
        self.unsaved_bytes = 0
        """Bytes of runs that are in the delay log only."""
        self._cancelled_count = 0
        """Number of cancelled rows in the wheel."""
        self._being_saved: frozenset[int] = frozenset()
        """Numbers of the runs that are being saved."""

    def __len__(self) -> int:
        return len(self.wheel) - self._cancelled_count

    @property
    def nbytes(self) -> int:
        return sum(run.nbytes for run in self._runs.values())

    def add(self, offsets: Ints, ticks: Ints, rows: pa.RecordBatch, source: str = "") -> None:
        """Add rows, by ascending offset."""
        if not len(offsets):
            return
        number = self._next_run
        self._next_run += 1
        run = self._runs[number] = Run(
            offsets, ticks, rows, np.ones(len(offsets), bool), len(offsets), set(), source
        )
        if len(offsets) == 1:
            self._alone.setdefault(int(offsets[0]), []).append(number)
        else:
            self._together[number] = run
        if not source:
            self.unsaved_bytes += run.nbytes
        self.wheel.add(rows_of(ticks, offsets, (number << _ROW_BITS) + np.arange(len(offsets))))

    def find(self, offset: int) -> tuple[int, int] | None:
        """Return (run, row) of a row that is alive, or None."""
        for number in self._alone.get(offset, ()):
            if self._runs[number].alive[0]:
                return number, 0
        for number, run in self._together.items():
            if run.offsets[0] <= offset <= run.offsets[-1]:
                row = int(np.searchsorted(run.offsets, offset))
                if run.offsets[row] == offset and run.alive[row]:
                    return number, row
        return None

    def source_at(self, place: tuple[int, int]) -> str:
        return self._runs[place[0]].source

    def row_at(self, place: tuple[int, int]) -> pa.RecordBatch:
        """Return the row as a batch of one."""
        run = self._runs[place[0]]
        return gather([take_rows(run.rows, np.array([place[1]]))])

    def cancel(self, place: tuple[int, int]) -> None:
        """Cancel a row. It is dropped when its tick comes, or when rows are saved."""
        run = self._runs[place[0]]
        run.alive[place[1]] = False
        run.cancelled.add(int(run.offsets[place[1]]))
        self._cancelled_count += 1

    def release(self, tick: int) -> Rows:
        """Take out rows due up to `tick` that are alive, in order.

        Pass each to `done` when it is delivered.
        """
        rows = self.wheel.advance(tick)
        if not len(rows):
            return rows
        alive = self._are_alive(rows)
        self._forget_cancelled(rows[~alive])
        due: Rows = rows[alive]
        self._take_out(due)
        return due

    def _take_out(self, rows: Rows) -> None:
        """Mark rows that left the wheel as not alive, so that `find` does not return them."""
        for number in np.unique(rows[:, 2] >> _ROW_BITS).tolist():
            if number in self._runs:
                self._runs[number].alive[rows[rows[:, 2] >> _ROW_BITS == number, 2] & _ROW_MASK] = (
                    False
                )

    def _forget_cancelled(self, rows: Rows) -> None:
        self._cancelled_count -= len(rows)
        self.done(rows)

    def _are_alive(self, rows: Rows) -> np.ndarray[Any, np.dtype[np.bool_]]:
        numbers, places = rows[:, 2] >> _ROW_BITS, rows[:, 2] & _ROW_MASK
        alive = np.zeros(len(rows), bool)
        for number in np.unique(numbers):
            run = self._runs.get(int(number))
            if run is not None:  # otherwise all of it was delivered
                mine = numbers == number
                alive[mine] = run.alive[places[mine]]
        return alive

    def done(self, rows: Rows) -> None:
        """Release rows that were taken out and are delivered."""
        if not len(rows):
            return
        numbers, counts = np.unique(rows[:, 2] >> _ROW_BITS, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            run = self._runs[number]
            run.left -= count
            if run.left <= 0 and not (run.cancelled and number in self._being_saved):
                self._forget(number)

    def has_run_of(self, source: str) -> bool:
        return any(run.source == source for run in self._runs.values())

    def _forget(self, number: int) -> None:
        run = self._runs.pop(number)
        if self._together.pop(number, None) is None:
            offset = int(run.offsets[0])
            self._alone[offset].remove(number)
            if not self._alone[offset]:
                del self._alone[offset]
        if not run.source:
            self.unsaved_bytes -= run.nbytes

    def count_of_bytes(self, rows: Rows, byte_count: int) -> int:
        """Return how many of these rows (at least one) take about `byte_count`. Sizes are the mean
        of each row's run.
        """
        numbers = rows[:, 2] >> _ROW_BITS
        sizes = np.zeros(len(rows), np.int64)
        for number in np.unique(numbers).tolist():
            run = self._runs[number]
            sizes[numbers == number] = run.rows.nbytes // len(run.offsets)
        return max(1, int(np.searchsorted(np.cumsum(sizes), byte_count, "right")))

    def columns_of(self, rows: Rows, take: Take = take_rows) -> pa.RecordBatch:
        """Return the referenced rows in their order. Rows of several versions need a `take`."""
        numbers, places = rows[:, 2] >> _ROW_BITS, rows[:, 2] & _ROW_MASK
        if (numbers == numbers[0]).all():
            return gather([take(self._runs[int(numbers[0])].rows, places)])
        pieces, ordinals = [], []
        for number in np.unique(numbers):
            mine = np.flatnonzero(numbers == number)
            pieces.append(take(self._runs[int(number)].rows, places[mine]))
            ordinals.append(mine)
        return gather(pieces, np.argsort(np.concatenate(ordinals), kind="stable"))

    def by_version(self, rows: Rows) -> list[tuple[int, Rows]]:
        """Return the rows of each version, in their order."""
        if not len(rows):
            return []
        numbers, places = np.unique(rows[:, 2] >> _ROW_BITS, return_inverse=True)
        versions = [version_of(self._runs[number].rows) for number in numbers.tolist()]
        return split(rows, np.array(versions, np.int64)[places])

    def are_from(self, rows: Rows, source: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return one boolean per row: True if its run has this source."""
        numbers = np.array(
            [number for number, run in self._runs.items() if run.source == source], np.int64
        )
        return np.isin(rows[:, 2] >> _ROW_BITS, numbers)

    def recur(self, rows: Rows) -> Bools:
        """Return one boolean per row: True if it is an occurrence of a recurring row."""
        numbers = rows[:, 2] >> _ROW_BITS
        recurring = [
            number
            for number in np.unique(numbers).tolist()
            if self._runs[number].source == RECURRING
        ]
        found: Bools = np.isin(numbers, recurring) if recurring else np.zeros(len(rows), bool)
        return found

    def expect(self, reference: int, count: int) -> None:
        """Set how many times a row, the only one of its run, will be passed to `done`."""
        number = reference >> _ROW_BITS
        self._runs[number].left = count
        if not count:
            self._forget(number)

    def still_alive(self, rows: Rows) -> Rows:
        return rows[self._are_alive(rows)] if len(rows) else rows

    def still_there(self, rows: Rows) -> Rows:
        """Return the rows whose run still exists. A dropped run of those that are being saved has
        been delivered.
        """
        numbers = np.fromiter(self._runs, np.int64, len(self._runs))
        kept: Rows = rows[np.isin(rows[:, 2] >> _ROW_BITS, numbers)]
        return kept

    def cancelled_among(self, rows: Rows) -> list[int]:
        """Return the offsets of the cancelled rows among these."""
        numbers = rows[:, 2] >> _ROW_BITS
        gone = set[int]()
        for number in np.unique(numbers).tolist():  # of its own run: a returned row has another
            if self._runs[number].cancelled:
                mine = rows[numbers == number, 1].tolist()
                gone.update(self._runs[number].cancelled.intersection(mine))
        return sorted(gone)

    def unsaved_runs(self) -> list[int]:
        """Return the runs that are in the delay log only."""
        return [number for number, run in self._runs.items() if not run.source]

    def begin_save(self) -> list[int]:
        """Return the runs that are in the delay log only. Until `saved`, rows of theirs that are
        cancelled stay, also when their tick comes.
        """
        runs = self.unsaved_runs()
        self._being_saved = frozenset(runs)
        return runs

    def rows_of_runs(self, runs: list[int]) -> Rows:
        """Return the waiting rows of these runs, by offset, alive or not.

        They stay in the wheel.
        """
        numbers = np.array(runs, np.int64)
        found = self.wheel.select(lambda piece: np.isin(piece[:, 2] >> _ROW_BITS, numbers))
        ordered: Rows = found[np.argsort(found[:, 1], kind="stable")]
        return ordered

    def saved(self, runs: list[int]) -> None:
        """Drop the waiting rows of these runs, which are in bucket files now and
        are loaded again when due.
        """
        numbers = np.array(runs, np.int64)
        everything = self.wheel.acquire_all()
        mine = np.isin(everything[:, 2] >> _ROW_BITS, numbers)
        for number in runs:
            run = self._runs.get(number)
            if run is not None:  # some of its rows may be in delivery
                self.unsaved_bytes -= run.nbytes
                run.source = SAVED
        self.wheel.add(everything[~mine])
        gone = everything[mine]
        alive = self._are_alive(gone)
        self._take_out(gone)
        self.done(gone[alive])
        self._forget_cancelled(gone[~alive])
        self._being_saved = frozenset()
        for number in runs:
            run = self._runs.get(number)
            if run is not None and run.left <= 0:
                self._forget(number)

    def put_back(self, rows: Rows) -> Ints:
        """Return released, undelivered rows to the wheel, except those in bucket files, which are
        loaded from there. Return the offsets of these.
        """
        in_files = self.are_from(rows, SAVED)
        offsets: Ints = rows[in_files, 1]
        self.done(rows[in_files])
        rows = rows[~in_files]
        for number in np.unique(rows[:, 2] >> _ROW_BITS).tolist():
            self._runs[number].alive[rows[rows[:, 2] >> _ROW_BITS == number, 2] & _ROW_MASK] = True
        self.wheel.add(rows)
        return offsets

    def set_back(self, tick: int, ticks_of: Callable[[pa.RecordBatch], Ints]) -> None:
        """Recompute due ticks with `ticks_of` after the clock was set back to `tick`, for rows that
        are in the delay log only.
        """
        unsaved = self.unsaved_runs()
        rows = self.wheel.acquire_all()
        for number in unsaved:
            run = self._runs[number]
            run.ticks = ticks_of(run.rows)
            mine = rows[:, 2] >> _ROW_BITS == number
            rows[mine, 0] = run.ticks[rows[mine, 2] & _ROW_MASK]
        self.wheel.current = tick
        self.wheel.add(rows)
