"""The reader behind `tailrace.scan`: reads a plan's ranges in order, as Arrow batches."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack

import pyarrow as pa

from tailrace.admin.admin import Admin
from tailrace.core.errors import (
    CorruptBatchError,
    StorageError,
    TailraceError,
    UnsupportedBatchError,
)
from tailrace.core.log import logger
from tailrace.fetch.read_errors import UnknownSchemaError
from tailrace.scanning.batch import Source, StoredBatch
from tailrace.scanning.batch_decoder import BatchDecoder, needs_bodies
from tailrace.scanning.latest.latest_offsets import check_key
from tailrace.scanning.latest.latest_rows import read_latest
from tailrace.scanning.options import Bounds, ScanOptions, build_settings
from tailrace.scanning.planner import plan, versions_of
from tailrace.scanning.retention_lease import Lease
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan
from tailrace.scanning.sources.data_dirs import is_own
from tailrace.scanning.sources.local_source import LocalSource, read_partition_file
from tailrace.scanning.sources.remote_source import RemoteSource


def scan(
    topic_or_directory: str | os.PathLike[str],
    bootstrap: str | None = None,
    columns: Sequence[str] | None = None,
    start: Any = None,
    end: Any = None,
    **settings: Unpack[ScanOptions],
) -> pa.RecordBatchReader:
    """Scan a topic as a table: a pyarrow RecordBatchReader for polars, pandas and duckdb.

        reader = tailrace.scan("flights", "tcp://127.0.0.1:7420", columns=["carrier", "delay"])
        polars.from_arrow(reader)

    `topic_or_directory` is a topic's name or DATA_DIR/topic, which can also be read while no
    appliance runs. Rows come from files if the appliance is on this host and its files can be
    opened, else over ZeroMQ, with the same result. Partitions come one after the other, each in
    offset order, up to the settled end at the start of the scan.

    `columns` are those of a typed topic, else key, value, topic, partition, offset, timestamp,
    timestampType and headers. Every topic also has `_topic`, `_partition`, `_offset` and
    `_timestamp`. Other columns are not decoded. `start` and `end` are "earliest", "latest", an
    offset, a datetime (the first record at or after it), or a dict of these by partition.

    With `latest=True` there is one row for each key, that of its latest record; keys without a
    value then are no rows.

    Raises InvalidSettingError, UnknownTopicError, OffsetOutOfRangeError, NotReachableError. Reading
    raises CorruptBatchError with the damaged range (see `skip_damaged`), UnknownTopicError if the
    topic is deleted, NotReachableError if the appliance stays away.
    """
    chosen = build_settings(settings)
    return open_reader(
        plan(
            topic_or_directory,
            bootstrap,
            columns,
            Bounds("start", start),
            Bounds("end", end),
            chosen,
        )
    )


def open_reader(made: ScanPlan) -> pa.RecordBatchReader:
    """A reader of a plan. The plan's lease ends with it."""
    lease = Lease(made.bootstrap, made.lease, {r.key: r.start for r in made.ranges}, made.topic_ids)
    if made.settings.latest:
        try:
            check_key(made)
        except TailraceError:
            lease.end()
            raise
        batches = read_latest(made, read, lease.renew_when_due)
    else:
        batches = read(made)
    iterator = _Batches(batches, lease)
    return pa.RecordBatchReader.from_batches(made.schema, iterator)


class _Batches:
    """The batches of a plan under its lease.

    The lease ends with the batches, when the object is closed or garbage collected, or with the
    program.
    """

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
    """Yield all rows of a plan, without its lease. Raises TailraceError."""
    for r in made.ranges:
        source = _source(made, r)
        try:
            yield from _read_range(made, r, source)
        finally:
            source.close()


def _source(made: ScanPlan, r: PartitionRange) -> Source:
    """The local files of a range if they are here, else the appliance."""
    if r.directory and (not made.bootstrap or is_own(r.directory, r.topic_id)):
        known = read_partition_file(r.directory)
        if known is not None:
            return LocalSource(
                r.directory,
                known,
                headers_only=not needs_bodies(made.columns),
                with_offsets=True,
                schema=made.topic_schema,
                aborted=r.aborted,
            )
    if not made.bootstrap:
        raise StorageError(
            f"{r.directory} can no longer be read: its partition.json is missing or damaged"
        )
    return RemoteSource(
        made.bootstrap, r.topic, r.topic_id, r.partition, made.settings, made.topic_schema
    )


def _read_range(made: ScanPlan, r: PartitionRange, source: Source) -> Iterator[pa.RecordBatch]:
    settings = made.settings

    def decoder(whole: ScanPlan) -> BatchDecoder:
        return BatchDecoder(
            r.key,
            made.columns,
            typed=made.typed,
            trust=not settings.validate_batches,
            max_unpacked_bytes=settings.max_decompressed_batch_bytes,
            history=whole.history,
        )

    rows = decoder(made)
    position = r.start
    while position < r.end:
        try:
            for frame in source.frames(position, r.end):
                yield from rows.add(frame, position, r.end)
                position = _behind(frame)
            break
        except UnknownSchemaError:
            yield from rows.rest()
            rows = decoder(_with_newer_schemas(made, r))
        except CorruptBatchError as error:
            if not settings.skip_damaged or error.next_offset is None:
                yield from rows.rest()  # the good rows before the damage
                raise
            logger.warning("scan_skipped %s", error.detail)
            if settings.on_damage is not None:
                settings.on_damage(error)
            position = error.next_offset
    yield from rows.rest()


def _with_newer_schemas(made: ScanPlan, r: PartitionRange) -> ScanPlan:
    """The plan with the versions that the topic's schema has now: it was altered while the plan
    was made. Raises UnsupportedBatchError if it is not known.
    """
    if not made.bootstrap:
        known = read_partition_file(r.directory)
        if known is None:
            raise StorageError(f"{r.directory} can no longer be read")
        versions = tuple(sorted(known.schemas.items()))
    else:
        with Admin(
            made.bootstrap,
            client_id=made.settings.client_id,
            request_timeout_ms=made.settings.request_timeout_ms,
        ) as admin:
            info = admin.topic_info([made.topic])[made.topic]
        versions = versions_of(info)
    if versions == made.versions or made.schema_id not in dict(versions):
        raise UnsupportedBatchError(
            f"a batch of {r.topic}-{r.partition} has a schema that the topic does not describe: "
            "begin the scan again"
        )
    return replace(made, versions=versions)


def _behind(frame: StoredBatch) -> int:
    return frame.header.next_offset
