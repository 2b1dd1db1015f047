"""`tailrace.scan`: reads what a plan says, in order, and gives it as Arrow."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import pyarrow as pa

from tailrace.client_log import logger
from tailrace.errors import CorruptBatchError, StorageError
from tailrace.scanning.frames import Frame, Source
from tailrace.scanning.lease import Lease
from tailrace.scanning.options import Bounds, ScanOptions, build_settings
from tailrace.scanning.planner import PartitionRange, ScanPlan, is_own, plan
from tailrace.scanning.remote import RemoteBatches
from tailrace.scanning.rows import Rows, needs_bodies
from tailrace.scanning.segment_files import SegmentFiles, read_partition_file


def scan(
    topic_or_directory: str | os.PathLike[str],
    bootstrap: str | None = None,
    columns: Sequence[str] | None = None,
    start: Any = None,
    end: Any = None,
    **settings: Unpack[ScanOptions],
) -> pa.RecordBatchReader:
    """The log as a table: a pyarrow RecordBatchReader over a topic, which polars, pandas and duckdb take as it is.

        polars.from_arrow(tailrace.scan("flights", "tcp://127.0.0.1:7420", columns=["carrier", "delay"]))

    `topic_or_directory`: a topic's name, or DATA_DIR/topic, which is read also while no appliance runs. From files where the appliance is on this host and its
    files can be opened, over ZeroMQ otherwise; the rows are the same. Partitions come one after the other, each in offset order, up to the settled end that
    there is now.

    `columns`: those of a typed topic; of others key, value, topic, partition, offset, timestamp, timestampType, headers. `_topic`, `_partition`, `_offset` and
    `_timestamp` can be asked for in every topic. What is not asked for is not decoded.
    `start`, `end`: "earliest", "latest", an offset, a datetime (the first record of that time or later), or a dict of these by partition.

    Raises InvalidSettingError, UnknownTopicError, OffsetOutOfRangeError, NotReachableError; while it is read CorruptBatchError with the range that is damaged
    (see `skip_damaged`), UnknownTopicError when the topic is deleted meanwhile, NotReachableError when the appliance stays away.
    """
    chosen = build_settings(settings)
    return open_reader(plan(topic_or_directory, bootstrap, columns, Bounds("start", start), Bounds("end", end), chosen))


def open_reader(made: ScanPlan) -> pa.RecordBatchReader:
    """A reader of a plan; its lease ends with it."""
    batches = read(made)
    lease = Lease(made.bootstrap, made.lease, {r.key: r.start for r in made.ranges})
    iterator = _Batches(batches, lease)
    return pa.RecordBatchReader.from_batches(made.schema, iterator)


class _Batches:
    """The batches of a plan under its lease, which is given back when they end, are closed or forgotten, or the program ends."""

    def __init__(self, batches: Iterator[pa.RecordBatch], lease: Lease) -> None:
        self._batches = batches
        self._lease = lease
        self._end = weakref.finalize(self, lease.end)

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> pa.RecordBatch:
        try:
            self._lease.renew_when_due()
            return next(self._batches)
        except BaseException:
            self._end()
            raise


def read(made: ScanPlan) -> Iterator[pa.RecordBatch]:
    """The rows of a plan, without its lease. Raises TailraceError."""
    for r in made.ranges:
        source = _source(made, r)
        try:
            yield from _read_range(made, r, source)
        finally:
            source.close()


def _source(made: ScanPlan, r: PartitionRange) -> Source:
    """From its files where they are here, else from the appliance."""
    if r.directory and (not made.bootstrap or is_own(r.directory, r.topic_id)):
        known = read_partition_file(r.directory)
        if known is not None:
            return SegmentFiles(r.directory, known, headers_only=not needs_bodies(made.columns), schema=made.topic_schema)
    if not made.bootstrap:
        raise StorageError(f"{r.directory} cannot be read any more")
    return RemoteBatches(made.bootstrap, r.topic, r.topic_id, r.partition, made.settings, made.topic_schema)


def _read_range(made: ScanPlan, r: PartitionRange, source: Source) -> Iterator[pa.RecordBatch]:
    settings = made.settings
    rows = Rows(
        r.key, made.columns, typed=made.typed, trust=not settings.check_batches, max_unpacked_bytes=settings.max_unpacked_batch_bytes
    )
    position = r.start
    while position < r.end:
        try:
            for frame in source.frames(position, r.end):
                yield from rows.add(frame, position, r.end)
                position = _behind(frame)
            break
        except CorruptBatchError as error:
            if not settings.skip_damaged or error.next_offset is None:
                yield from rows.rest()  # what is good comes first
                raise
            logger.warning("scan_skipped %s", error.detail)
            if settings.on_damage is not None:
                settings.on_damage(error)
            position = error.next_offset
    yield from rows.rest()


def _behind(frame: Frame) -> int:
    return frame.header.next_offset
