"""What waits in one partition: rows in memory, rows in bucket files, and the manifest that says which bytes of those count.

What is due soon is in memory; what is far away is moved nearer, bucket by bucket, before its time. Saving, moving and cleaning up are jobs that are done a
little at a time, one at a time, between deliveries.

Owner: the scheduler, one for each partition.
Invariants: below the manifest's cursor everything is delivered, cancelled, or in the files that it names; what a job writes counts when the manifest says so,
    at once; a file is removed after the manifest has forgotten it. What is cancelled behind the cursor stays in its file, cancelled in memory only: the log is
    read again from the cursor after a restart, and what replaces it must find it there. No job writes while a file is being loaded, and none is half done when
    rows are released from files: each row that waits is in memory or in one file that is to be loaded.
Crash: begin with the manifest; files and bytes that it does not name are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from shm.crash_points import crash_point
from tailrace.formats.pending_files import KIND_CANCELLED
from workers.delays.array_wheel import NEVER, Rows, no_rows, split
from workers.delays.bucket_files import LOWEST_LEVEL, BucketFile, Ints, is_above, width_of
from workers.delays.bucket_set import LOAD_AHEAD_TICKS, BucketSet, label_of, labels_of
from workers.delays.pending_pages import Listed, page_of
from workers.delays.pending_rows import PendingRows
from workers.files import Files

SAVE_BYTES = 16 << 20
"""So much in memory that only the delay log has is saved to bucket files."""
SAVE_AFTER_NS = 10_000_000_000
UNSAVED_MAX_BYTES = 64 << 20
"""Beyond this the delay log is not read on."""
TIDY_INTERVAL_NS = 5_000_000_000


class PendingStore:
    """See the module's docstring."""

    def __init__(self, files: Files, directory: str, topic_id: bytes, schema: pa.Schema, now_ns: int) -> None:
        """`directory`, `topic_id`, `schema`: the delay log's. Raises OSError, PendingDamagedError."""
        self._schema = schema
        self._buckets = BucketSet(files, directory, topic_id, schema)
        self.rows = PendingRows(0)
        self.released = -1
        """The tick up to which rows were handed out by this incarnation, in the epoch of the clock that is now."""
        self._job: Iterator[None] | None = None
        self._loading: Iterator[None] | None = None
        self._saving: dict[BucketFile, int] = {}
        """Files to which what is in memory is being saved, and from where on."""
        self._now_ns = self._saved_ns = self._tidied_ns = now_ns
        self._now_tick = 0

    @property
    def cursor(self) -> int:
        """Up to here the delay log is not needed any more."""
        return self._buckets.manifest.cursor

    @property
    def closed(self) -> int:
        """The ordinal below which all were closed at the cursor."""
        return self._buckets.manifest.closed

    @property
    def recurring(self) -> list[dict[str, Any]]:
        """What recurred at the cursor."""
        return self._buckets.manifest.recurring

    def is_full(self) -> bool:
        """Whether so much is in memory that nothing more is to come before some is saved."""
        return self.rows.unsaved_bytes > UNSAVED_MAX_BYTES

    @property
    def is_busy(self) -> bool:
        """Whether a job is half done: the clock must not be set back under it, or what it saves has ticks of before."""
        return self._job is not None

    @property
    def is_crowded(self) -> bool:
        return self.rows.unsaved_bytes > UNSAVED_MAX_BYTES // 2

    @property
    def is_behind(self) -> bool:
        """Whether nothing was saved for long, since there was always something to deliver: the log behind the cursor grows."""
        return self._now_ns - self._saved_ns > 3 * SAVE_AFTER_NS

    def set_time(self, now_ns: int, now_tick: int) -> None:
        self._now_ns, self._now_tick = now_ns, now_tick

    def note_first_unsaved(self, age_us: int) -> None:
        """What the cursor stands before was read; so old it is. In time it is to be saved: at once after a restart, if a predecessor did not live to."""
        self._saved_ns = self._now_ns - max(0, age_us) * 1000

    # ---- what is due -----------------------------------------------------------------------------------------------------------------

    def first_tick(self) -> int:
        """At or before which nothing that waits is due; NEVER when nothing waits. A bucket on the disk counts by its first tick."""
        starts = [file.entry.start for file in self._buckets.to_load()]
        return min([self.rows.wheel.earliest(), *starts])

    def next_file_tick(self) -> int:
        """When a file is to be loaded, or moved nearer; NEVER when there is none."""
        return self._buckets.next_tick()

    def next_deadline_ns(self, read_offset: int, *, is_settled: bool) -> int | None:
        """When something is to be saved or removed; not before what was released is delivered."""
        deadlines: list[int] = []
        if not is_settled:
            return None
        if read_offset > self.cursor:
            deadlines.append(self._saved_ns + SAVE_AFTER_NS)
        if any(self._is_finished(file) for file in self._buckets.all):
            deadlines.append(self._tidied_ns + TIDY_INTERVAL_NS)
        return min(deadlines, default=None)

    def release(self, tick: int) -> Rows:
        """Take out what is due up to `tick`, in order. Raises OSError."""
        if self.is_late(tick):  # in its time it is there already; after a restart it may not be
            self._finish_loading()
            self._finish_job()  # rows that are half moved are in two files
            for file in self._buckets.late(tick):
                self._load(file)
        rows = self.rows.release(tick)
        self.released = max(self.released, tick)
        return rows

    def set_back(self, tick: int, delivered: tuple[int, int], ready: Rows, ticks_of: Callable[[pa.RecordBatch], Ints]) -> None:
        """The clock was set back to `tick`, when rows up to `delivered` were. Those behind wait again, though they were released. What was saved since it was
        released comes from its file, also from one that was loaded since, without it. What only the log has is placed anew, by `ticks_of`; the rest keeps the
        tick that it was saved with. Raises OSError.
        """
        self._finish_loading()
        was_not = is_above(ready[:, 0], ready[:, 1], delivered)
        self.rows.done(ready[~was_not])
        in_files = self.rows.put_back(ready[was_not])
        if len(in_files):
            for file in [file for file in self._buckets.all if file.is_loaded]:
                self._load(file, delivered, only=in_files)
        for file in self._buckets.late(self.released):
            self._load(file, delivered)
        for file in self._buckets.all:
            file.entry.delivered_tick, file.entry.delivered_offset = max(
                (file.entry.delivered_tick, file.entry.delivered_offset), delivered
            )
        self.released = min(self.released, tick)  # the clock may have gone forward again since the mark was asked for
        self.rows.set_back(tick, ticks_of)

    # ---- cancelling ------------------------------------------------------------------------------------------------------------------

    def cancel(self, offset: int, hint: int | None = None) -> bool:
        """Whether the row was pending, and is not any more. `hint`: the tick at which it is probably due. Raises OSError."""
        found = False
        place = self.rows.find(offset)
        if place is not None:
            self.rows.cancel(place)
            found = True
            if not self.rows.source_at(place) and self._job is None:
                return True
        for file, _, _ in self._buckets.places_of(offset, hint, self.released):
            if not file.is_loaded or found:
                file.unsaved_cancels.add(offset)
                found = True
        return found

    def waits(self, offset: int, hint: int | None = None) -> bool:
        """Whether this row is pending. Raises OSError."""
        return self.rows.find(offset) is not None or any(
            file.is_to_load for file, _, _ in self._buckets.places_of(offset, hint, self.released)
        )

    def row_of(self, offset: int, hint: int | None = None) -> pa.RecordBatch | None:
        """A pending row, as a batch of one; None: it is not pending. Raises OSError."""
        place = self.rows.find(offset)
        if place is not None:
            return self.rows.row_at(place)
        for file, chunk, row in self._buckets.places_of(offset, hint, self.released):
            if file.is_to_load:
                return file.read_rows(chunk, self._schema)[2].slice(row, 1)
        return None

    # ---- from the disk into memory ---------------------------------------------------------------------------------------------------

    def is_late(self, tick: int) -> bool:
        """Whether something that is due by then is on the disk only."""
        return bool(self._buckets.late(tick))

    def load_due_soon(self) -> int:
        """Load what is due soon; move what is due later than that, but not by much, to lower buckets."""
        if self._loading is not None:
            if next(self._loading, self) is self:
                self._loading = None
            return 1
        horizon = self._now_tick + LOAD_AHEAD_TICKS
        for file in sorted(self._buckets.all, key=lambda file: (file.entry.start, file.entry.level)):
            if not file.is_to_load or file.entry.start > horizon + width_of(file.entry.level - 1):
                continue
            if file.entry.level == LOWEST_LEVEL:
                if file.entry.start <= horizon and self._job is None:
                    self._loading = self._load_by_chunks(file)
                    return 1
            elif self._job is None:
                self._job = self._move_down(file)
                return self._go_on()
        return 0

    def _load(self, file: BucketFile, behind: tuple[int, int] | None = None, begin: int = 0, only: Ints | None = None) -> None:
        """All of it at once; see `_load_by_chunks`."""
        for _ in self._load_by_chunks(file, behind, begin, only):
            pass

    def _load_by_chunks(
        self, file: BucketFile, behind: tuple[int, int] | None = None, begin: int = 0, only: Ints | None = None
    ) -> Iterator[None]:
        """All rows of a file, from a position on, into memory that come behind (tick, offset), else those that were not handed out by this incarnation. What is
        being saved is in memory. `only`: rows of these offsets, no others.
        """
        end = self._saving.get(file, file.entry.end)
        floor = (self.released, NEVER) if behind is None else behind
        for chunk, ticks, offsets, rows in self._buckets.good_chunks(file, only):
            if begin <= chunk.position < end:
                wanted = self._buckets.left(file, ticks, offsets) & is_above(ticks, offsets, floor)
                if only is not None:
                    wanted &= np.isin(offsets, only)
                if not wanted.all():
                    ticks, offsets, rows = ticks[wanted], offsets[wanted], rows.filter(pa.array(wanted))
                self.rows.add(offsets, ticks, rows, file.name)
            yield
        file.is_loaded = True

    def _finish_loading(self) -> None:
        """What was begun a chunk at a time is wanted now."""
        for _ in self._loading or ():
            pass
        self._loading = None

    def _move_down(self, file: BucketFile) -> Iterator[None]:
        """Rows of a bucket to lower ones, a chunk at a time; or, where most of it is cancelled, to a new file of the same bucket."""
        to_lower = file.entry.start <= self._now_tick + LOAD_AHEAD_TICKS + width_of(file.entry.level - 1)
        for chunk, ticks, offsets, rows in self._buckets.good_chunks(file):
            left = self._buckets.left(file, ticks, offsets, as_saved=True)
            ticks, offsets, rows = ticks[left], offsets[left], rows.filter(pa.array(left))
            touched: dict[BucketFile, None] = {}  # in the order of writing
            if to_lower:
                labels = labels_of(ticks, max(self._now_tick, file.entry.start))
            else:
                labels = np.full(len(ticks), label_of(file.entry.level, file.entry.start))
            places = np.stack((ticks, offsets, np.arange(len(ticks))), axis=1) if len(ticks) else no_rows()
            for label, piece in split(places, labels):
                target = self._buckets.open_bucket(label, file)
                self._buckets.append(target, piece[:, 0], piece[:, 1], rows.take(pa.array(piece[:, 2])))
                target.unsaved_cancels |= file.unsaved_cancels.intersection(piece[:, 1].tolist())
                touched[target] = None
                yield
            for target in touched:
                target.sync()
                yield
            self._buckets.sync_names()
            file.forget_chunk(chunk)
            self._buckets.save_manifest()
            crash_point("scheduler.after_move")
        self._buckets.remove([file])

    # ---- from memory to the disk -----------------------------------------------------------------------------------------------------

    def tidy(self, read_offset: int, closed: int, recurring: Callable[[], list[dict[str, Any]]], *, is_settled: bool) -> int:
        """When there is nothing else to do: save, move, clean up. A little at a time. `read_offset`: how far the delay log was read; `is_settled`: whether
        everything that was released is delivered. Raises OSError.
        """
        if self._job is not None:
            return self._go_on()
        if (
            not is_settled or self._loading is not None
        ):  # a file to which rows came while it was being loaded would count as loaded without them
            return 0
        is_time = self.rows.unsaved_bytes > SAVE_BYTES or self._now_ns - self._saved_ns >= SAVE_AFTER_NS
        if read_offset > self.cursor and is_time:
            self._job = self._save(read_offset, closed, recurring())
            return self._go_on()
        if self._now_ns - self._tidied_ns >= TIDY_INTERVAL_NS:
            self._tidied_ns = self._now_ns
            return self._clean_up()
        return 0

    def _go_on(self) -> int:
        assert self._job is not None
        try:
            next(self._job)
        except StopIteration:
            self._job = None
        return 1

    def _save(self, cursor: int, closed: int, recurring: list[dict[str, Any]]) -> Iterator[None]:
        """Everything that only the delay log has into bucket files; then the cursor moves."""
        runs = self.rows.unsaved_runs()
        rows = self.rows.still_alive(self.rows.rows_of_runs(runs))
        touched: dict[BucketFile, None] = {}  # in the order of writing
        for file in self._buckets.all:
            cancels = np.array(sorted(file.unsaved_cancels), np.int64)
            if len(cancels):
                file.append(KIND_CANCELLED, np.empty(0, np.int64), cancels, b"")
                file.unsaved_cancels -= set(cancels.tolist())
                touched[file] = None
        yield
        for label, piece in split(rows, labels_of(rows[:, 0], self._now_tick)) if len(rows) else []:
            # What is cancelled since is saved as it was at the cursor: read again, what replaces it must find it.
            kept = self.rows.still_there(piece)
            if len(kept):
                target = self._buckets.open_bucket(label, is_making=True)
                self._saving.setdefault(target, target.entry.end)
                self._buckets.append(target, kept[:, 0], kept[:, 1], self.rows.columns_of(kept))
                target.unsaved_cancels.update(self.rows.cancelled_among(kept))
                touched[target] = None
            yield
        for file in touched:
            file.sync()
            yield
        self._buckets.sync_names()
        crash_point("scheduler.before_manifest")
        self._buckets.save_manifest(cursor, closed, recurring)
        crash_point("scheduler.after_manifest")
        self.rows.saved(runs)
        pa.default_memory_pool().release_unused()
        saving, self._saving = self._saving, {}
        for file, begin in saving.items():
            file.is_making = False
            if file.is_loaded:  # while it was written
                self._load(file, begin=begin)
        self._saved_ns = self._now_ns

    def _finish_job(self) -> None:
        """What was begun a little at a time has to be done now."""
        while self._job is not None:
            self._go_on()

    def _is_finished(self, file: BucketFile) -> bool:
        """Whether nothing in it is needed any more. What is cancelled behind the cursor is: read again, what replaces it must find it."""
        entry = file.entry
        if file.unsaved_cancels:
            return False
        return (file.is_loaded and not self.rows.has_run_of(file.name)) or (entry.rows <= entry.cancelled and not file.is_loaded)

    def _clean_up(self) -> int:
        finished = [file for file in self._buckets.all if self._is_finished(file)]
        if finished:
            self._buckets.remove(finished)
            return 1
        for file in self._buckets.all:
            entry = file.entry
            if (
                not file.is_loaded
                and entry.level > LOWEST_LEVEL
                and entry.cancelled * 2 > entry.rows
                and entry.end - entry.begin > SAVE_BYTES // 16
            ):
                self._job = self._move_down(file)
                return self._go_on()
        return 0

    # ---- showing ---------------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rows) + self._buckets.pending_count()

    @property
    def lost_rows(self) -> int:
        """How many were in chunks that are damaged."""
        return self._buckets.lost_rows

    @property
    def file_count(self) -> int:
        return len(self._buckets.all)

    def counts_ahead(self, edges: list[int]) -> list[int]:
        """How many rows are due before each of these ticks and not before the one before it; last, how many later. A file counts by its first tick."""
        counts = np.zeros(len(edges) + 1, np.int64)
        waiting = self.rows.still_alive(self.rows.wheel.look(lambda piece: np.ones(len(piece), bool)))
        np.add.at(counts, np.searchsorted(edges, waiting[:, 0], "right"), 1)
        for file in self._buckets.to_load():
            counts[np.searchsorted(edges, file.entry.start, "right")] += file.entry.rows - file.entry.cancelled
        return [int(count) for count in counts]

    def page(
        self, begin: tuple[int, int], end_tick: int, limit: int, columns: list[int], shown: Callable[[pa.RecordBatch], pa.RecordBatch]
    ) -> tuple[list[Listed], tuple[int, int] | None]:
        """See `page_of`. Raises OSError."""
        return page_of(self.rows, self._buckets.to_load(), self._schema, begin, end_tick, limit, columns, shown)
