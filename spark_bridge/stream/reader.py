"""The streaming source of `spark.readStream.format("tailrace")`.

    spark.readStream.format("tailrace").option("bootstrap", address).option(
        "subscribe", "flights"
    ).load()

Owner: Spark. One long-lived Python process of the driver asks for offsets and ranges. Other
processes get a task each and read it. They share nothing.
Invariants:
- Its two positions fix a micro-batch's ranges (see `stream_offsets`). Spark keeps both in the
  checkpoint, so that a repeated batch has the same rows.
- A partition or a topic that is added while the query runs is read from offset 0 on.
- A lease keeps the records to be read from retention. It is moved on every LEASE_MOVED_AFTER_S and
  lasts LEASE_MS, so that most batches need no request for it.
- Rows of a topic have the version of its schema that it had when the query began. With
  schemaChange=stop the query fails when the topic has another one.
- failOnDataLoss decides whether the query fails or goes on when the log does not have a position
  any more.
Crash: a killed query leaves its lease, which expires after LEASE_MS. Spark starts again from the
checkpoint.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from spark_bridge.source.planner import LEASE_MS, ReadTask, bounds_of, load_topics, scan_settings
from spark_bridge.source.spark_types import arrow_target, check_asked, conformed
from spark_bridge.stream.byte_limit import limited_by_bytes
from spark_bridge.stream.data_loss import Losses
from spark_bridge.stream.offsets import Delay, Position, decode, limited
from spark_bridge.stream.options import StreamOptions
from spark_bridge.stream.progress import behind
from spark_bridge.stream.tasks import StreamTask, divided, read_stream_task
from spark_bridge.stream.topic_view import Appliance, View
from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import (
    OffsetOutOfRangeError,
    SchemaMismatchError,
    TailraceError,
    UnknownTopicError,
)
from tailrace.core.log import logger
from tailrace.core.topic_partition import TopicPartition
from tailrace.scanning.columns import LOG_COLUMNS, arrow_schema, own_columns
from tailrace.scanning.planner import plan_of
from tailrace.scanning.scan_plan import PartitionRange

if TYPE_CHECKING:
    import pyarrow as pa

LEASE_MOVED_AFTER_S = 60
LEASE_ATTEMPTS = 3


class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader for options that are not allowed: every call raises the error.

    Spark 4.3 stops the reader that it has asked for whether it was given one or not. An error
    raised instead of a reader is lost in an UnboundLocalError.
    """

    def __init__(self, error: TailraceError) -> None:
        self._error = error

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Raises the error, as all do."""
        raise self._error

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Raises the error."""
        raise self._error

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Raises the error."""
        raise self._error

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Raises the error."""
        raise self._error

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raises the error."""
        raise self._error

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Raises the error."""
        raise self._error


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads topics as a stream. See the module's docstring."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._appliance = Appliance(options.read)
        self._losses = Losses(options.read.fail_on_data_loss)
        self._delay = Delay(options.min_offsets, options.max_trigger_delay_ms)
        self._initial: dict[str, Any] | None = None
        self._target: View | None = None
        """The topics as of the query's start, with Trigger.AvailableNow; else None."""
        self._seen: View | None = None
        self._end: Position | None = None
        self._lease = f"{options.read.client_id}-stream-{uuid.uuid4().hex}"
        self._leased: dict[TopicPartition, int] = {}
        self._leased_s = 0.0
        self._schema_ids: dict[bytes, int] = {}
        """Topic id -> the version of its schema that rows have."""

    # ---- where a batch begins and ends -----------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """The beginning of a new query, the same however often Spark asks.

        Raises: TailraceError.
        """
        if self._initial is None:
            view = self._view()
            load_topics(
                self._appliance.admin, self._options.read
            )  # all that are named are there, and alike
            extent = {key: (of.beginning, of.end) for key, of in view.extents.items()}
            starts = bounds_of(self._appliance.admin, self._options.read, extent, "start")
            self._initial = Position(starts, view.topic_ids, is_first=True).encode()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """The limit that the options choose. Spark passes one limit back, or ReadAllAvailable; the
        others are known here.
        """
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix the end of the query: later records are not read."""
        self._target = self._view()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """The end of the next batch; `start` itself where there is nothing to read, or less than
        minOffsetsPerTrigger.

        Raises: TailraceError.
        """
        begin = decode(start)
        view = self._target if self._target is not None else self._view()
        self._seen = view
        self._losses.check_topics(begin, view)
        begins = self._begins(begin, view)
        ends = view.ends
        if not isinstance(limit, ReadAllAvailable):
            available = sum(max(0, ends[key] - begins[key]) for key in ends)
            if self._target is None and self._delay.should_wait(
                available, time.monotonic_ns() // 1_000_000
            ):
                self._end = begin
                return start
            ends = self._limited(begins, ends, view, limit)
        self._end = Position(ends, {name: view.topic_ids[name] for name in view.infos})
        if (
            self._end.offsets == begin.offsets
            and self._end.topic_ids == begin.topic_ids
            and not begin.is_first
        ):
            return start
        if begin.is_first:
            self._end = replace(self._end, start=begin.offsets, start_ids=begin.topic_ids)
        return self._end.encode()

    def _begins(self, begin: Position, view: View) -> dict[TopicPartition, int]:
        """The beginning of each partition's next range, at or behind the log start offset.

        Raises: OffsetOutOfRangeError.
        """
        result = {}
        for key, extent in view.extents.items():
            is_known = begin.topic_ids.get(key.topic) == view.infos[key.topic].topic_id
            # before Spark writes down a batch that ends before it begins, and repeats it when the
            # log is whole again
            if is_known:
                self._losses.check_end(key, begin.offsets.get(key, 0), extent)
            result[key] = max(begin.offsets.get(key, 0) if is_known else 0, extent.beginning)
        return result

    def _limited(
        self,
        begins: Mapping[TopicPartition, int],
        ends: dict[TopicPartition, int],
        view: View,
        limit: ReadLimit,
    ) -> dict[TopicPartition, int]:
        most = [
            count
            for count in (self._options.max_offsets, getattr(limit, "max_rows", None))
            if count is not None
        ]
        if most:
            ends = limited(begins, ends, min(most))
        bytes_max = [
            count
            for count in (self._options.max_bytes, getattr(limit, "max_bytes", None))
            if count is not None
        ]
        if bytes_max:
            ends = limited_by_bytes(begins, ends, min(bytes_max), view, self._appliance.data_dirs())
        return ends

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Report the topics' ends at the last look for the query's progress, and under "@metrics"
        the query's lag.
        """
        if self._seen is None or self._end is None:
            return None
        return {
            **Position(self._seen.ends, self._seen.topic_ids).encode(),
            "@metrics": behind(self._end, self._seen, self._losses.offsets),
        }

    # ---- what a batch reads ----------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of the batch between two positions; none for an empty one. Raises
        TailraceError.
        """
        until = decode(end)
        begin = decode(start)
        if until.start is not None:
            begin = Position(until.start, until.start_ids)
        is_fresh = self._seen is not None and self._target is None and self._end == until
        view = self._seen if self._seen is not None and is_fresh else self._view()
        for attempt in range(LEASE_ATTEMPTS):
            ranges = self._ranges(begin, until, view)
            try:
                self._keep(ranges, until, view)
                break
            except (OffsetOutOfRangeError, UnknownTopicError):
                if (
                    attempt == LEASE_ATTEMPTS - 1
                ):  # retention moved the beginning between look and lease each time
                    raise
                view = self._view()
        options = self._options.read
        average = {
            (key.topic, key.partition): extent.bytes_per_offset
            for key, extent in view.extents.items()
        }
        tasks = divided(
            ranges,
            average,
            self._options.task_count_max,
            options.min_partitions or 1,
            options.max_records_per_partition,
        )
        return [self._task(task, view) for task in tasks]

    def _ranges(self, begin: Position, until: Position, view: View) -> list[PartitionRange]:
        """The ranges of the batch that the log still has.

        Raises: as `Losses`.
        """
        self._losses.check_topics(until, view)
        self._losses.check_topics(begin, view)
        ranges = []
        for key in sorted(until.offsets):
            info, extent = view.infos.get(key.topic), view.extents.get(key)
            if info is None or extent is None or until.topic_ids.get(key.topic) != info.topic_id:
                continue  # it was said above
            is_known = begin.topic_ids.get(key.topic) == info.topic_id
            requested = PartitionRange(
                key.topic,
                info.topic_id,
                key.partition,
                begin.offsets.get(key, 0) if is_known else 0,
                until.offsets[key],
            )
            there = self._losses.without_lost(requested, extent)
            if there.start < there.end:
                ranges.append(there)
        return ranges

    def _keep(self, ranges: list[PartitionRange], until: Position, view: View) -> None:
        """Lease what is about to be read, and what comes behind it, where the lease that there is
        does not do. Raises OffsetOutOfRangeError, UnknownTopicError.
        """
        is_covered = all(self._leased.get(r.key, r.start + 1) <= r.start for r in ranges)
        if not ranges or (is_covered and time.monotonic() - self._leased_s < LEASE_MOVED_AFTER_S):
            return
        requested = {
            key: max(until.offsets[key], extent.beginning)
            for key, extent in view.extents.items()
            if key in until.offsets
        }
        requested.update((r.key, r.start) for r in ranges)
        self._appliance.acquire_lease(self._lease, requested, LEASE_MS, view.topic_ids)
        self._leased, self._leased_s = requested, time.monotonic()

    def _task(self, ranges: list[PartitionRange], view: View) -> StreamTask:
        options, parts = self._options.read, []
        for topic in dict.fromkeys(r.topic for r in ranges):
            info, of_topic = view.infos[topic], [r for r in ranges if r.topic == topic]
            version = self._version(info)
            schema = info.schema if version == info.schema_id else info.history.schema(version)
            check_asked(
                self._schema,
                arrow_schema((*LOG_COLUMNS, *own_columns(schema, typed=info.typed))),
                topic,
            )
            made = plan_of(
                info,
                options.bootstrap,
                of_topic,
                self._appliance.data_dirs(),
                self._schema.fieldNames(),
                scan_settings(options),
                self._lease,
                version,
            )
            parts.append(
                ReadTask(
                    made,
                    {r.key: self._leased.get(r.key, r.start) for r in of_topic},
                    options.fail_on_data_loss,
                )
            )
        return StreamTask(parts)

    def _version(self, info: TopicInfo) -> int:
        """The version of a topic's schema that rows have. Raises SchemaMismatchError."""
        version = self._schema_ids.setdefault(info.topic_id, info.schema_id)
        if version != info.schema_id and self._options.stops_at_new_schema:
            raise SchemaMismatchError(
                f"the schema of topic {info.name!r} was altered, from version {version} to "
                f"{info.schema_id}, and schemaChange=stop: start the query again, which reads the "
                "new columns, or with schemaChange=keep, which goes on with the columns of its "
                "start"
            )
        return version

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task. Raises TailraceError."""
        assert isinstance(partition, StreamTask)
        return conformed(read_stream_task(partition), arrow_target(self._schema))

    # ---- its end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Release the lease, if the appliance answers."""
        if self._leased:
            leased, self._leased = self._leased, {}
            try:
                self._appliance.end_lease(self._lease, leased)
            except TailraceError as error:
                logger.info(
                    "stream_lease_left lease=%s ends_after_ms=%d reason=%r",
                    self._lease,
                    LEASE_MS,
                    str(error),
                )
        self._appliance.close()

    def _view(self) -> View:
        view = self._appliance.view()
        for info in view.infos.values():
            self._schema_ids.setdefault(info.topic_id, info.schema_id)
        return view
