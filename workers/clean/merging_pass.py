"""Merging pass: writes segments with small batches again, with batches of about TARGET_BYTES.

    stored   |r r|r|r|marker|r|r r|r|     every batch with a producer, a sequence, a metadata block
    merged   |r r r r|marker|r r r r|     offsets, rows, times, headers and end as before

Rows of successive batches become one plain batch. Some batches are copied as they are: a marker, a
batch of an aborted transaction, a delivered batch (it says how far the delay log was read), and one
that is large already. A merged batch is of no producer and of no transaction: its rows were
committed, and sequences are in the producers' snapshots.

Owner: one cleaner. `steps` is a generator: a step is a number of batches.

Invariants:
- What was written is decoded again and held against what was read, before it is reported.
- Rows of one batch have one schema, one leader epoch, one kind of time, and each its own time.
- Every batch of a merged segment has `merged_count`.

Crash: see `workers.segment.cleaning_job`.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator

import pyarrow as pa

from shm.crash_points import crash_point
from tailrace.format.record_batch.batch_header import (
    ATTRIBUTE_CONTROL,
    ATTRIBUTE_DELAYED,
    ATTRIBUTE_SPARSE,
    BatchHeader,
    checksum_seed,
)
from tailrace.format.record_batch.header_stamps import stamp_merged
from tailrace.format.segments.transaction_index import AbortedBatches
from workers.clean.cleaned_file import CleanedFile, remove_unreported
from workers.clean.plain_batches import PlainBatches
from workers.clean.sources import SourceReader, UnreadableError
from workers.segment.cleaning_job import DONE, CleaningJob, CleaningReport, JobSegment
from workers.segment.files import Files

STEP_BATCHES = 64
LARGE_BYTES = 64 << 10
"""A batch of this size is copied as it is."""
_SPECIAL = ATTRIBUTE_CONTROL | ATTRIBUTE_DELAYED | ATTRIBUTE_SPARSE


class MergingPass:
    """See the module's docstring."""

    def __init__(
        self,
        files: Files,
        job: CleaningJob,
        on_run: Callable[[CleaningReport], None],
    ) -> None:
        """`on_run` is called with the report after each run, and at the end."""
        self._files = files
        self._job = job
        self._on_run = on_run
        self._schemas = {
            int(number): pa.ipc.read_schema(pa.py_buffer(base64.b64decode(message)))
            for number, message in job.schemas.items()
        }
        self._seed = checksum_seed(bytes.fromhex(job.topic_id), job.partition)
        self._reader = SourceReader(files, job.directory, self._schemas, self._seed)
        self.report = CleaningReport(job.number)
        self._open: CleanedFile | None = None

    def steps(self) -> Iterator[int]:
        """Do the job. Yields the bytes read and written, after some batches. Raises OSError,
        UnreadableError.
        """
        for run in self._job.runs:
            yield from self._merge(run[0])
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

    def _merge(self, segment: JobSegment) -> Iterator[int]:
        try:
            yield from self._write(segment)
        except UnreadableError as error:
            error.base = segment.base
            raise

    def _write(self, segment: JobSegment) -> Iterator[int]:
        job = self._job
        schema_id = segment.schema_id if segment.schema_id in self._schemas else job.schema_id
        message = base64.b64decode(job.schemas[str(schema_id)])
        made = self._open = CleanedFile(
            self._files, job.directory, [segment], message, job.keep_free_bytes
        )
        merged = PlainBatches(
            made.add, message=message, schema=self._schemas[schema_id], seed=self._seed,
            compression=job.compression, max_message_bytes=job.max_message_bytes, typed=job.typed,
        )  # fmt: skip
        aborted = self._reader.aborted(segment)
        last_append_us = bytes_in = 0
        has_transactions = False
        before = made.size
        for count, (header, data) in enumerate(self._reader.read_bytes(segment), 1):
            if header.schema_id != schema_id and len(self._schemas) > 1:
                raise UnreadableError(
                    f"{job.directory}: offset {header.base_offset} has schema {header.schema_id}, "
                    f"and its segment has {schema_id}"
                )
            last_append_us = max(last_append_us, header.append_time_us)
            if _is_mergeable(header, aborted) and merged.can_take(data):
                merged.add(header, data)
            else:
                merged.flush()
                copy = bytearray(data)
                stamp_merged(memoryview(copy), header, self._seed)
                made.add(copy, header.base_offset, header.max_timestamp_us)
                has_transactions = has_transactions or header.is_transactional
            bytes_in += len(data)
            if count % STEP_BATCHES == 0:
                written = made.size - before
                self._count(bytes_in, written)
                yield bytes_in + written
                before, bytes_in = made.size, 0
        merged.flush()
        done = made.finish(last_append_us, has_transactions=has_transactions)
        self._open = None
        crash_point("cleaner.before_report")
        self._count(bytes_in, made.size - before)
        rows = self.report.records_in + segment.end - segment.base
        self.report = self.report._replace(
            runs=(*self.report.runs, done), records_in=rows, records_out=rows
        )
        self._on_run(self.report)
        yield 0

    def _count(self, bytes_in: int, bytes_out: int) -> None:
        report = self.report
        self.report = report._replace(
            bytes_in=report.bytes_in + bytes_in, bytes_out=report.bytes_out + bytes_out
        )


def _is_mergeable(header: BatchHeader, aborted: AbortedBatches) -> bool:
    """True if rows are all that a batch has."""
    return not (
        header.attributes & _SPECIAL
        or header.extension_length
        or header.batch_length >= LARGE_BYTES
        or (
            header.is_transactional
            and aborted.has(header.producer_id, header.producer_epoch, header.base_offset)
        )
    )
