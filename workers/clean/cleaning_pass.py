"""Cleaning pass: writes the segments of one job again, without what was superseded.

Kept of a batch (Kafka's rules):
- a record that is the latest of its key, or has no key;
- of these a tombstone (default schema: the value is null) until delete.retention.ms after the first
  pass that met it (KIP-534), so that a reader that is slower than one pass still sees it;
- nothing of an aborted transaction, and no marker: every batch of its transaction lies before it,
  and is written again by this pass, as committed, or was by an earlier one.

Owner: one cleaner. `steps` is a generator: a step is one batch.

Runs are united as long as what stays of them has room in one segment (`CleaningJob.united_bytes`):
the flusher syncs for each swap, and acknowledgements wait.

Invariants:
- Runs are finished in order. A record is left out of a run only for a later one that was in the log
  when the job was made, and stays.

Crash: see `workers.segment.cleaning_job`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from shm.crash_points import crash_point
from tailrace.format.record_batch.batch_header import checksum_seed
from tailrace.format.record_batch.sparse_batch import cleaned_schema_message
from workers.clean.cleaned_file import CleanedFile, remove_unreported
from workers.clean.merged_batches import NONE_US, MergedBatches
from workers.clean.sources import Source, SourceReader, UnreadableError
from workers.clean.superseded import Superseded
from workers.log.retention.wall_clock_jumps import moved_by
from workers.segment.cleaning_job import DONE, CleaningJob, CleaningReport, JobSegment
from workers.segment.files import Files

SINCE_PARTS = 16
"""Tombstones of one sixteenth of delete.retention.ms share a time."""
SINCE_STEP_MIN_US = 1_000
VALUE = "value"
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class CleaningPass:
    """See the module's docstring."""

    def __init__(
        self,
        files: Files,
        job: CleaningJob,
        now_us: Callable[[], int],
        on_run: Callable[[CleaningReport], None],
    ) -> None:
        """`on_run` is called with the report after each run, and at the end."""
        self._files = files
        self._job = job
        self._now_us = now_us
        self._on_run = on_run
        self._schemas = {
            int(number): pa.ipc.read_schema(pa.py_buffer(base64.b64decode(message)))
            for number, message in job.schemas.items()
        }
        self._seed = checksum_seed(bytes.fromhex(job.topic_id), job.partition)
        self._reader = SourceReader(files, job.directory, self._schemas, self._seed)
        self.report = CleaningReport(job.number)
        self._open: CleanedFile | None = None
        newest = self._schemas[job.schema_id]
        self._value_index = -1 if job.typed else newest.get_field_index(VALUE)

    def steps(self) -> Iterator[int]:
        """Do the job. Yields the bytes read and written, after each batch. Raises OSError,
        UnreadableError.
        """
        job = self._job
        segments = [segment for run in job.runs for segment in run]
        superseded = Superseded(self._reader, job.key_column, segments, job.dedupe_bytes)
        yield from superseded.find()
        runs = job.runs
        while runs:
            runs = yield from self._clean(runs, superseded)
        self.report = self.report._replace(state=DONE)
        self._on_run(self.report)

    def abandon(self, reported_count: int) -> None:
        """Remove what is unfinished, and the runs behind the first `reported_count`, of which the
        flusher does not know. Raises OSError.
        """
        unfinished, self._open = self._open, None
        remove_unreported(
            self._files, self._job.directory, unfinished, self.report.runs[reported_count:]
        )

    def _clean(
        self, runs: list[list[JobSegment]], superseded: Superseded
    ) -> Generator[int, None, list[list[JobSegment]]]:
        """Write the first runs as one segment, as many as have room in it. Returns the others."""
        job, run = self._job, runs[0]
        schema_id = run[0].schema_id if run[0].schema_id in self._schemas else job.schema_id
        schema = self._schemas[schema_id]
        made = self._open = CleanedFile(
            self._files, job.directory, run, cleaned_schema_message(schema), job.keep_free_bytes
        )
        merged = MergedBatches(
            made.add, base=run[0].base, schema=schema, typed=job.typed, seed=self._seed,
            schema_id=schema_id, compression=job.compression,
            max_message_bytes=job.max_message_bytes,
        )  # fmt: skip
        last_append_us = count = 0
        for segments in runs:
            if count:
                left = sum(superseded.kept_bytes(each) for each in segments)
                if not self._has_room(made, merged, segments[0].schema_id, left):
                    break
                made.take_over(segments)
            for segment in segments:
                for source in self._reader.read(segment, superseded.is_superseded):
                    if source.rows.num_rows and source.rows.schema != schema:
                        raise UnreadableError(
                            f"{job.directory}: offset {source.header.base_offset} has schema "
                            f"{source.header.schema_id}, and its run has {schema_id}",
                            segment.base,
                        )
                    last_append_us = max(last_append_us, source.header.append_time_us)
                    yield self._add(source, made, merged, superseded)
            count += 1
        before = made.size
        merged.flush()
        done = made.finish(last_append_us)
        self._open = None
        crash_point("cleaner.before_report")
        self._count(bytes_out=made.size - before)
        self.report = self.report._replace(runs=(*self.report.runs, done))
        self._on_run(self.report)
        yield 0
        return runs[count:]

    def _has_room(
        self, made: CleanedFile, merged: MergedBatches, schema_id: int, left: int
    ) -> bool:
        """True if what is left of the following run, `left` bytes, has room in a file."""
        pending = merged.pending_bytes
        return (
            schema_id == made.schema_id
            and made.size + pending + left <= self._job.united_bytes
            and made.has_room_for(pending + 2 * left)
        )

    def _add(
        self, source: Source, made: CleanedFile, merged: MergedBatches, superseded: Superseded
    ) -> int:
        """Add what stays of a batch. Returns the bytes read and written."""
        before = made.size
        kept = superseded.kept(source).astype(bool)
        since_us = self._drop_tombstones(source, kept)
        rows, offsets = source.rows, source.offsets
        if not kept.all():
            rows, offsets = rows.filter(pa.array(kept)), offsets[kept]
        merged.add(source.header, rows, offsets, since_us)
        written = made.size - before
        self._count(
            bytes_in=source.byte_count, bytes_out=written,
            records_in=source.record_count, records_out=len(offsets),
        )  # fmt: skip
        return source.bytes_read + written

    def _drop_tombstones(self, source: Source, kept: Mask) -> int:
        """Take the tombstones whose time is over out of `kept`. Return since when those that stay
        are clean, NONE_US if there are none.
        """
        if self._value_index < 0 or not len(kept):
            return NONE_US
        values = source.rows.column(self._value_index)
        if not values.null_count:
            return NONE_US
        tombstones = np.asarray(values.is_null()) & kept
        if not tombstones.any():
            return NONE_US
        now_us, retention_us = self._now_us(), self._job.delete_retention_ms * 1000
        header = source.header
        if header.is_sparse and header.due_us >= 0:
            since_us = header.due_us
        else:
            step_us = max(SINCE_STEP_MIN_US, retention_us // SINCE_PARTS)
            since_us = -(-now_us // step_us) * step_us if retention_us else now_us
        if now_us - moved_by(self._job.jumps, since_us) >= retention_us:
            kept &= ~tombstones
            return NONE_US
        oldest_us = self.report.tombstones_since_us
        self.report = self.report._replace(
            tombstones_since_us=min(oldest_us, since_us) if oldest_us else since_us
        )
        return since_us

    def _count(self, **added: int) -> None:
        counted = {name: getattr(self.report, name) + more for name, more in added.items()}
        self.report = self.report._replace(**counted)
