"""Pending store of a partition: rows in memory, rows in bucket files, and their manifest.

Rows due soon are in memory. Far rows are moved nearer, bucket by bucket, before their time. Saving,
moving and cleaning up are jobs, done one at a time in small steps between deliveries.

Owner: the scheduler, one for each partition.

Invariants:
- Below the manifest's cursor every row is delivered, cancelled, or in the files that it names.
- A job's output becomes valid at once, with the manifest. A file is removed after the manifest has
  dropped it.
- A row cancelled behind the cursor stays in its file, cancelled in memory only. After a restart the
  log is read again from the cursor, and a replacement must find its row.
- No job writes while a file is loaded, and none is half done when rows are released from files.
  Each waiting row is in memory or in one file to be loaded.

Crash: begin with the manifest. Files and bytes that it does not name are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from shm.crash_points import crash_point
from tailrace.format.directory.delay_files import KIND_CANCELLED
from workers.delays.store.array_wheel import NEVER, Rows, split
from workers.delays.store.bucket_files import LOWEST_LEVEL, BucketFile, Ints, is_above, width_of
from workers.delays.store.bucket_move import move_down
from workers.delays.store.bucket_set import LOAD_AHEAD_TICKS, BucketSet, labels_of
from workers.delays.store.log_versions import LogVersions
from workers.delays.store.open_batches import LogSnapshot
from workers.delays.store.pending_pages import Listed, Others, page_of
from workers.delays.store.pending_rows import PendingRows
from workers.segment.files import Files

SAVE_BYTES = 16 << 20
"""Bytes of rows only in memory and in the delay log above which they are saved to bucket files."""
SAVE_AFTER_NS = 10_000_000_000
UNSAVED_MAX_BYTES = 64 << 20
"""Bytes of such rows above which the delay log is not read on."""
TIDY_INTERVAL_NS = 5_000_000_000


class PendingStore:
    """Pending rows of one partition."""

    def __init__(
        self, files: Files, directory: str, topic_id: bytes, versions: LogVersions, now_ns: int
    ) -> None:
        """`directory`, `topic_id` and `versions` are the delay log's.

        Raises OSError, PendingDamagedError.
        """
        self._versions = versions
        self._buckets = BucketSet(files, directory, topic_id, versions)
        self.rows = PendingRows(0)
        self.released = -1
        """Tick up to which this incarnation has released rows, in the current
        epoch of the clock.
        """
        self._job: Iterator[None] | None = None
        self._loading: Iterator[None] | None = None
        self._saving: dict[BucketFile, int] = {}
        """Files being saved to, with their end before that."""
        self._now_ns = self._saved_ns = self._tidied_ns = now_ns
        self._now_tick = 0

    @property
    def cursor(self) -> int:
        """Offset below which the delay log is not needed any more."""
        return self._buckets.manifest.cursor

    @property
    def is_version_saved(self) -> bool:
        """True if the manifest says that the schema was altered, where it was. An earlier build
        then refuses it.
        """
        return bool(self._buckets.manifest.schema_id) or not self._versions.is_altered

    def save_version(self) -> None:
        """Save the manifest as one of an altered schema. No job may be half done. Raises
        OSError.
        """
        self._buckets.save_manifest()

    @property
    def closed(self) -> int:
        """Ordinal below which everything was closed at the cursor."""
        return self._buckets.manifest.closed

    @property
    def log(self) -> LogSnapshot:
        """Transactions of the delay log at the cursor."""
        manifest = self._buckets.manifest
        return LogSnapshot(
            manifest.open_batches, manifest.committing, manifest.reserved, manifest.has_returned
        )

    @property
    def recurring(self) -> list[dict[str, Any]]:
        """Recurring rows at the cursor."""
        return self._buckets.manifest.recurring

    def is_full(self) -> bool:
        """True if no more rows may be read before some are saved."""
        return self.rows.unsaved_bytes > UNSAVED_MAX_BYTES

    @property
    def is_busy(self) -> bool:
        """True while a job is half done.

        The clock must not be set back then, or the job would save old ticks.
        """
        return self._job is not None

    @property
    def is_crowded(self) -> bool:
        return self.rows.unsaved_bytes > UNSAVED_MAX_BYTES // 2

    @property
    def is_behind(self) -> bool:
        """True if nothing was saved for long, because there was always a delivery. The log behind
        the cursor grows.
        """
        return self._now_ns - self._saved_ns > 3 * SAVE_AFTER_NS

    def set_time(self, now_ns: int, now_tick: int) -> None:
        self._now_ns, self._now_tick = now_ns, now_tick

    def note_first_unsaved(self, age_us: int) -> None:
        """Note the age of the first row after the cursor. It decides when to save: at once after a
        restart if a predecessor did not.
        """
        self._saved_ns = self._now_ns - max(0, age_us) * 1000

    # ---- what is due -----------------------------------------------------------------------------

    def first_tick(self) -> int:
        """Return a lower bound of the ticks of all waiting rows, or NEVER. A bucket on disk counts
        by its first tick.
        """
        starts = [file.entry.start for file in self._buckets.to_load()]
        return min([self.rows.wheel.earliest(), *starts])

    def next_file_tick(self) -> int:
        """Return the tick at which a file must be loaded or moved nearer, or NEVER."""
        return self._buckets.next_tick()

    def next_deadline_ns(self, read_offset: int, *, is_settled: bool) -> int | None:
        """Return the time of the next save or removal, or None while released
        rows are not delivered.
        """
        deadlines: list[int] = []
        if not is_settled:
            return None
        if read_offset > self.cursor:
            deadlines.append(self._saved_ns + SAVE_AFTER_NS)
        if any(self._is_finished(file) for file in self._buckets.all):
            deadlines.append(self._tidied_ns + TIDY_INTERVAL_NS)
        return min(deadlines, default=None)

    def release(self, tick: int) -> Rows:
        """Take out rows due up to `tick`, in order. Raises OSError."""
        if self.is_late(tick):  # normally it is loaded in time, but not after a restart
            self._finish_loading()
            self._finish_job()  # half-moved rows are in two files
            for file in self._buckets.late(tick):
                self._load(file)
        rows = self.rows.release(tick)
        self.released = max(self.released, tick)
        return rows

    def set_back(
        self,
        tick: int,
        delivered: tuple[int, int],
        ready: Rows,
        ticks_of: Callable[[pa.RecordBatch], Ints],
    ) -> None:
        """Set the clock back to `tick`, with rows up to `delivered` delivered. Raises OSError.

        - Released rows after `delivered` wait again.
        - Rows saved since their release are loaded from their file again.
        - Rows that only the log has get new ticks from `ticks_of`. The others keep the tick they
          were saved with.
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
            file.set_back(delivered)
        # the clock may have gone forward again since the mark was requested
        self.released = min(self.released, tick)
        self.rows.set_back(tick, ticks_of)

    # ---- cancelling ------------------------------------------------------------------------------

    def cancel(self, offset: int, hint: int | None = None) -> bool:
        """Cancel a row.

        Return True if it was pending. `hint` is the probable due tick. Raises OSError.
        """
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
        """True if this row is pending. Raises OSError."""
        return self.rows.find(offset) is not None or any(
            file.is_to_load for file, _, _ in self._buckets.places_of(offset, hint, self.released)
        )

    def row_of(self, offset: int, hint: int | None = None) -> pa.RecordBatch | None:
        """Return a pending row as a batch of one, or None. Raises OSError."""
        place = self.rows.find(offset)
        if place is not None:
            return self.rows.row_at(place)
        for file, chunk, row in self._buckets.places_of(offset, hint, self.released):
            if file.is_to_load:
                return self._buckets.read_rows(file, chunk)[2].slice(row, 1)
        return None

    # ---- from the disk into memory ---------------------------------------------------------------

    def is_late(self, tick: int) -> bool:
        """True if rows due by then are on disk only."""
        return bool(self._buckets.late(tick))

    def load_upcoming(self) -> int:
        """Load rows that are due soon, and move those due a little later to lower buckets."""
        if self._loading is not None:
            if next(self._loading, self) is self:
                self._loading = None
            return 1
        horizon = self._now_tick + LOAD_AHEAD_TICKS
        for file in sorted(
            self._buckets.all, key=lambda file: (file.entry.start, file.entry.level)
        ):
            if not file.is_to_load or file.entry.start > horizon + width_of(file.entry.level - 1):
                continue
            if file.entry.level == LOWEST_LEVEL:
                if file.entry.start <= horizon and self._job is None:
                    self._loading = self._load_by_chunks(file)
                    return 1
            elif self._job is None:
                self._begin_move(file)
                return self._resume()
        return 0

    def _load(
        self,
        file: BucketFile,
        behind: tuple[int, int] | None = None,
        begin: int = 0,
        only: Ints | None = None,
    ) -> None:
        """Load a file completely (see `_load_by_chunks`)."""
        for _ in self._load_by_chunks(file, behind, begin, only):
            pass

    def _load_by_chunks(
        self,
        file: BucketFile,
        behind: tuple[int, int] | None = None,
        begin: int = 0,
        only: Ints | None = None,
    ) -> Iterator[None]:
        """Load a file's rows after (tick, offset) `behind`, by default those not released by this
        incarnation.

        Only chunks from position `begin` on are read. Rows being saved are in memory already.
        `only` selects offsets.
        """
        end = self._saving.get(file, file.entry.end)
        floor = (self.released, NEVER) if behind is None else behind
        for chunk, ticks, offsets, rows in self._buckets.intact_chunks(file, only):
            if begin <= chunk.position < end:
                requested = self._buckets.left(file, chunk, ticks, offsets) & is_above(
                    ticks, offsets, floor
                )
                if only is not None:
                    requested &= np.isin(offsets, only)
                if not requested.all():
                    ticks, offsets, rows = (
                        ticks[requested],
                        offsets[requested],
                        rows.filter(pa.array(requested)),
                    )
                self.rows.add(offsets, ticks, rows, file.name)
            yield
        file.is_loaded = True

    def _finish_loading(self) -> None:
        """Complete a load in progress."""
        for _ in self._loading or ():
            pass
        self._loading = None

    def _begin_move(self, file: BucketFile) -> None:
        self._job = move_down(self._buckets, file, lambda: self._now_tick)

    # ---- from memory to the disk -----------------------------------------------------------------

    def tidy(
        self,
        read_offset: int,
        closed: int,
        recurring: Callable[[], list[dict[str, Any]]],
        log: Callable[[], LogSnapshot],
        *,
        is_settled: bool,
    ) -> int:
        """Save, move or clean up in a small step, when there is no other work. Raises OSError.

        `read_offset` is the end of the delay log read so far. `is_settled` is True if everything
        released is delivered.
        """
        if self._job is not None:
            return self._resume()
        # rows appended to a file while it is loading would count as loaded
        if not is_settled or self._loading is not None:
            return 0
        is_time = (
            self.rows.unsaved_bytes > SAVE_BYTES or self._now_ns - self._saved_ns >= SAVE_AFTER_NS
        )
        # a commit that is ingested in part has rows to save without an offset behind the cursor
        if (read_offset > self.cursor or self.is_crowded) and is_time:
            self._job = self._save(read_offset, closed, recurring(), log())
            return self._resume()
        if self._now_ns - self._tidied_ns >= TIDY_INTERVAL_NS:
            self._tidied_ns = self._now_ns
            return self._clean_up()
        return 0

    def _resume(self) -> int:
        assert self._job is not None
        try:
            next(self._job)
        except StopIteration:
            self._job = None
        return 1

    def _save(
        self, cursor: int, closed: int, recurring: list[dict[str, Any]], log: LogSnapshot
    ) -> Iterator[None]:
        """Save everything that only the delay log has to bucket files, then move the cursor."""
        runs = self.rows.begin_save()
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
            # Rows cancelled meanwhile are saved as they were at the cursor. After a restart a
            # replacement must find its row.
            for schema_id, kept in self.rows.by_version(self.rows.still_there(piece)):
                target = self._buckets.open_bucket(label, schema_id, is_making=True)
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
        self._buckets.save_manifest(cursor, closed, recurring, log)
        crash_point("scheduler.after_manifest")
        self.rows.saved(runs)
        pa.default_memory_pool().release_unused()
        saving, self._saving = self._saving, {}
        for file, begin in saving.items():
            file.is_making = False
            if file.is_loaded:  # while it was being written
                self._load(file, begin=begin)
        self._saved_ns = self._now_ns

    def _finish_job(self) -> None:
        """Complete a job in progress."""
        while self._job is not None:
            self._resume()

    def _is_finished(self, file: BucketFile) -> bool:
        """True if no row in the file is needed any more. A row cancelled behind the cursor is
        needed: after a restart its replacement must find it.
        """
        entry = file.entry
        if file.unsaved_cancels:
            return False
        return (file.is_loaded and not self.rows.has_run_of(file.name)) or (
            entry.rows <= entry.cancelled and not file.is_loaded
        )

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
                self._begin_move(file)
                return self._resume()
        return 0

    # ---- showing ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rows) + self._buckets.pending_count()

    @property
    def lost_rows(self) -> int:
        """Number of rows in damaged chunks."""
        return self._buckets.lost_rows

    @property
    def file_count(self) -> int:
        return len(self._buckets.all)

    def counts_ahead(self, edges: list[int]) -> list[int]:
        """Return how many rows are due before each of these ticks and not before the previous one,
        then how many later. A file counts by its first tick.
        """
        counts = np.zeros(len(edges) + 1, np.int64)
        waiting = self.rows.still_alive(
            self.rows.wheel.select(lambda piece: np.ones(len(piece), bool))
        )
        np.add.at(counts, np.searchsorted(edges, waiting[:, 0], "right"), 1)
        for file in self._buckets.to_load():
            counts[np.searchsorted(edges, file.entry.start, "right")] += (
                file.entry.rows - file.entry.cancelled
            )
        return [int(count) for count in counts]

    def page(
        self,
        begin: tuple[int, int],
        end_tick: int,
        limit: int,
        columns: list[str],
        shown: Callable[[pa.RecordBatch], pa.RecordBatch],
        others: Others | None = None,
    ) -> tuple[list[Listed], tuple[int, int] | None]:
        """See `page_of`. Raises OSError."""
        return page_of(
            self.rows, self._buckets.to_load(), self._buckets.read_rows, begin, end_tick, limit,
            columns, shown, others,
        )  # fmt: skip
