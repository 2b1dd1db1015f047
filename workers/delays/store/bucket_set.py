"""Bucket set: a partition's bucket files, and the manifest that says which of their bytes are
valid.

Owner: the scheduler, one for each partition. `workers.delays.store.pending_store` decides what is
saved, moved and removed.

Invariants:
- A file is removed after the manifest has dropped it.
- A bucket's rows go to one file until that is loaded or full.
- Damaged chunks are counted, logged and left out, never skipped silently.

Crash: begin with the manifest. Bytes that it does not name are ignored, and unreferenced files are
removed at the next start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.batch import arrow_codec
from tailrace.core.schedule.delays import NONE_DELIVERED
from tailrace.format.directory.delay_files import (
    BUCKET_SUFFIX,
    DAMAGED_SUFFIX,
    KIND_ROWS,
    BucketEntry,
    Chunk,
    PendingDamagedError,
)
from workers.delays.store.array_wheel import NEVER
from workers.delays.store.bucket_files import LOWEST_LEVEL, BucketFile, Ints, buckets_of, width_of
from workers.delays.store.log_versions import LogVersions, UnusableSchemaError
from workers.delays.store.open_batches import LogSnapshot
from workers.log.files.delay_manifest import load_manifest, save_manifest
from workers.segment.files import Files

logger = logging.getLogger(__name__)

LOAD_AHEAD_TICKS = 2_000
_LEVEL_SHIFT = 56
_START_MASK = (1 << _LEVEL_SHIFT) - 1


class BucketSet:
    """Bucket files of one partition."""

    def __init__(
        self, files: Files, directory: str, topic_id: bytes, versions: LogVersions
    ) -> None:
        """Load the manifest of the delay log in `directory`.

        Raises OSError, PendingDamagedError.
        """
        self._files = files
        self._directory = directory
        self._versions = versions
        self.manifest = load_manifest(files, directory, topic_id)
        schema_ids = {
            number: int(schema_id)
            for schema_id, numbers in self.manifest.file_schemas.items()
            for number in numbers
        }
        self.all = [
            BucketFile(files, directory, entry, schema_ids.get(entry.number, versions.oldest_id))
            for entry in self.manifest.files
        ]
        self.lost_rows = 0
        """Number of rows in damaged chunks."""
        self._remove_unreferenced_files()

    def _remove_unreferenced_files(self) -> None:
        """Remove files that no manifest names, left by a kill."""
        named = {file.name for file in self.all}
        for name in self._files.list(self._directory):
            if name.endswith(BUCKET_SUFFIX) and name not in named:
                self._files.unlink(f"{self._directory}/{name}")

    # ---- lookup ----------------------------------------------------------------------------------

    def to_load(self) -> list[BucketFile]:
        """Return files whose rows are on disk only."""
        return [file for file in self.all if file.is_to_load]

    def late(self, tick: int) -> list[BucketFile]:
        """Return the files of `to_load` with rows that may be due by `tick`."""
        return [file for file in self.all if file.entry.start <= tick and file.is_to_load]

    def next_tick(self) -> int:
        """Return the tick at which the next file must be loaded or moved nearer, or NEVER."""
        tick = NEVER
        for file in self.to_load():
            lead = LOAD_AHEAD_TICKS + (
                width_of(file.entry.level - 1) if file.entry.level > LOWEST_LEVEL else 0
            )
            tick = min(tick, file.entry.start - lead)
        return tick

    def pending_count(self) -> int:
        """Return the number of rows that are on disk only and not cancelled."""
        return sum(
            file.entry.rows - file.entry.cancelled - len(file.unsaved_cancels)
            for file in self.to_load()
        )

    def places_of(
        self, offset: int, hint: int | None, released: int
    ) -> list[tuple[BucketFile, Chunk, int]]:
        """Return (file, chunk, row) of each place where a row is pending after the tick `released`:
        two while it is moved.

        `hint` is the probable due tick. Raises OSError.
        """
        if hint is not None:
            found = self._find_in(
                [file for file in self.all if file.entry.start <= hint <= file.last_tick],
                offset,
                released,
            )
            if found:
                return found
        return self._find_in(self.all, offset, released)

    def _find_in(
        self, files: list[BucketFile], offset: int, released: int
    ) -> list[tuple[BucketFile, Chunk, int]]:
        found = []
        for file in files:
            try:
                place = file.find(offset, released)
            except PendingDamagedError as error:
                logger.error("bucket_damaged reason=%r", str(error))
                continue
            if place is not None:
                found.append((file, *place))
        return found

    def intact_chunks(
        self, file: BucketFile, only: Ints | None = None
    ) -> Iterator[tuple[Chunk, Ints, Ints, pa.RecordBatch]]:
        """Yield (chunk, ticks, offsets, rows) of a file. `only` selects chunks that may have some
        of these offsets. A damaged file is kept aside when it is removed.
        """
        try:
            for chunk in list(file.row_chunks()):
                if (
                    only is not None
                    and not ((chunk.first_offset <= only) & (only <= chunk.last_offset)).any()
                ):
                    continue
                try:
                    yield chunk, *self.read_rows(file, chunk)
                except PendingDamagedError as error:
                    file.is_damaged = True
                    self._note_lost(chunk.rows, error)
        except PendingDamagedError as error:
            file.is_damaged = True
            self._note_lost(file.entry.rows, error)

    def read_rows(self, file: BucketFile, chunk: Chunk) -> tuple[Ints, Ints, pa.RecordBatch]:
        """Return (ticks, offsets, rows) of a chunk, in the version of its file. Raises OSError,
        PendingDamagedError.
        """
        try:
            schema = self._versions.schema(file.schema_id)
        except UnusableSchemaError as error:
            raise PendingDamagedError(f"{file.path}: {error}") from None
        return file.read_rows(chunk, schema)

    def _note_lost(self, rows: int, error: PendingDamagedError) -> None:
        self.lost_rows += rows
        logger.error(
            "delays_lost directory=%s rows=%d reason=%r", self._directory, rows, str(error)
        )

    def left(
        self, file: BucketFile, chunk: Chunk, ticks: Ints, offsets: Ints, *, as_saved: bool = False
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Call `BucketFile.left`. Cancellations that cannot be read are lost: an extra delivery is
        better than a missing one.
        """
        try:
            return file.left(chunk, ticks, offsets, as_saved=as_saved)
        except PendingDamagedError as error:
            logger.error("cancellations_lost directory=%s reason=%r", self._directory, str(error))
            return np.ones(len(ticks), bool)

    # ---- writing ---------------------------------------------------------------------------------

    def open_bucket(
        self,
        label: int,
        schema_id: int,
        but: BucketFile | None = None,
        *,
        is_making: bool = False,
    ) -> BucketFile:
        """Return the file to which a bucket's rows of a version are appended, a new one if needed.
        `but`: the file that they are moved from. `is_making` marks a new file as not to be loaded
        yet.
        """
        level, start = label >> _LEVEL_SHIFT, label & _START_MASK
        delivered = NONE_DELIVERED if but is None else but.unsaved_delivered
        taking = [
            f
            for f in self.all
            if f.entry.level == level
            and f.entry.start == start
            and f.accepts_rows_of(delivered, schema_id)
            and f is not but
        ]
        if taking:
            return taking[-1]
        file = BucketFile(
            self._files,
            self._directory,
            BucketEntry(level, start, self.manifest.next_number, 0, 0, 0, 0),
            schema_id,
        )
        self.manifest.next_number += 1
        file.is_making = is_making
        file.unsaved_delivered = delivered
        self.all.append(file)
        return file

    @staticmethod
    def append(file: BucketFile, ticks: Any, offsets: Any, rows: pa.RecordBatch) -> None:
        """Append a chunk to a bucket's file. Raises OSError."""
        body = arrow_codec.cut_out(rows, 0, rows.num_rows).serialize()
        file.append(
            KIND_ROWS, np.ascontiguousarray(ticks), np.ascontiguousarray(offsets), memoryview(body)
        )

    def sync_names(self) -> None:
        """Raises OSError."""
        self._files.sync_directory(self._directory)

    def save_manifest(
        self,
        cursor: int | None = None,
        closed: int = 0,
        recurring: list[dict[str, Any]] | None = None,
        log: LogSnapshot | None = None,
    ) -> None:
        """Save the manifest, which makes appended and dropped chunks effective. With `cursor`, the
        delay log below it is not needed any more. Raises OSError.
        """
        if cursor is not None:
            for file in self.all:
                file.note_cursor_moved()
        manifest = replace(
            self.manifest,
            files=[replace(file.entry) for file in self.all],
            schema_id=self._versions.newest_id if self._versions.is_altered else 0,
            file_schemas=self._file_schemas(),
        )
        if cursor is not None:
            manifest.cursor, manifest.closed, manifest.recurring = cursor, closed, recurring or []
            if log is not None:
                manifest.open_batches, manifest.committing = log.open_batches, log.committing
                manifest.reserved, manifest.has_returned = log.reserved, log.has_returned
        save_manifest(self._files, self._directory, manifest)
        self.manifest = manifest

    def _file_schemas(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        if self._versions.is_altered:
            for file in self.all:
                found.setdefault(str(file.schema_id), []).append(file.entry.number)
        return found

    def remove(self, gone: Sequence[BucketFile]) -> None:
        """Remove files, after the manifest has dropped them. A damaged one is renamed and kept for
        operators. Raises OSError.
        """
        self.all = [file for file in self.all if file not in gone]
        self.save_manifest()
        for file in gone:
            if not self._files.exists(file.path):
                continue
            if file.is_damaged:
                self._files.rename(file.path, f"{file.path}{DAMAGED_SUFFIX}")
            else:
                self._files.unlink(file.path)


def label_of(level: int, start: int) -> int:
    """Return a bucket as one number."""
    return level << _LEVEL_SHIFT | start


def labels_of(ticks: Ints, current: int) -> Ints:
    """Return the bucket of each tick as one number."""
    levels, starts = buckets_of(ticks, current)
    labels: Ints = levels << _LEVEL_SHIFT | starts
    return labels
