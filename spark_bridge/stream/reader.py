"""`spark.readStream.format("tailrace")`: what Spark asks a streaming source, answered from the log.

    spark.readStream.format("tailrace").option("bootstrap", address).option("subscribe", "flights").load()

Owner: Spark. One long-lived Python process of the driver asks for offsets and ranges; other processes are given a task each, and read it: they share nothing.
Invariants: a micro-batch's ranges are fixed by its two positions (see `stream_offsets`), both of which Spark keeps in the checkpoint, so that a repeated
    batch has the same rows. A partition or a topic that comes while the query runs is read from offset 0 on. A lease keeps what is to be read from retention;
    it is moved on every LEASE_MOVED_AFTER_S and kept for LEASE_MS, so that a batch usually costs no request for it.
    Of what a position names and the log does not have any more, failOnDataLoss says whether the query fails or goes on.
Crash: a killed query leaves its lease, which ends by itself after LEASE_MS; Spark starts again from the checkpoint.
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

from spark_bridge.planner import LEASE_MS, ReadTask, bounds_of, load_topics, scan_settings
from spark_bridge.spark_types import arrow_target, check_asked, conformed
from spark_bridge.stream_bytes import limited_by_bytes
from spark_bridge.stream_losses import Losses
from spark_bridge.stream_offsets import Delay, Position, decode, limited
from spark_bridge.stream_options import StreamOptions
from spark_bridge.stream_progress import behind
from spark_bridge.stream_tasks import StreamTask, divided, read_stream_task
from spark_bridge.stream_view import Appliance, View
from tailrace.client_log import logger
from tailrace.errors import OffsetOutOfRangeError, TailraceError, UnknownTopicError
from tailrace.records import TopicPartition
from tailrace.scanning.columns import LOG_COLUMNS, arrow_schema, own_columns
from tailrace.scanning.planner import PartitionRange, plan_of

if TYPE_CHECKING:
    import pyarrow as pa

LEASE_MOVED_AFTER_S = 60
LEASE_ATTEMPTS = 3


class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """In the place of a reader that the options do not allow. Spark 4.3 stops the reader that it has asked for whether it was given one or not, and what is
    raised instead is lost in an UnboundLocalError.
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
        """With Trigger.AvailableNow: what there was at its beginning."""
        self._seen: View | None = None
        self._end: Position | None = None
        self._lease = f"{options.read.client_id}-stream-{uuid.uuid4().hex}"
        self._leased: dict[TopicPartition, int] = {}
        self._leased_s = 0.0

    # ---- where a batch begins and ends -------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Where a new query begins; the same however often Spark asks. Raises TailraceError."""
        if self._initial is None:
            view = self._look()
            load_topics(self._appliance.admin, self._options.read)  # all that are named are there, and alike
            held = {key: (of.beginning, of.end) for key, of in view.held.items()}
            starts = bounds_of(self._appliance.admin, self._options.read, held, "start")
            self._initial = Position(starts, view.topic_ids, is_first=True).encode()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """What the options say. Spark hands one limit back, or ReadAllAvailable; the others are known here."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Nothing that comes later is read."""
        self._target = self._look()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """How far the next batch goes; `start` itself where there is nothing to read, or too little. Raises TailraceError."""
        begin = decode(start)
        view = self._target if self._target is not None else self._look()
        self._seen = view
        self._losses.check_topics(begin, view)
        begins = self._begins(begin, view)
        ends = view.ends
        if not isinstance(limit, ReadAllAvailable):
            available = sum(max(0, ends[key] - begins[key]) for key in ends)
            if self._target is None and self._delay.holds_back(available, time.monotonic_ns() // 1_000_000):
                self._end = begin
                return start
            ends = self._limited(begins, ends, view, limit)
        self._end = Position(ends, {name: view.topic_ids[name] for name in view.infos})
        if self._end.offsets == begin.offsets and self._end.topic_ids == begin.topic_ids and not begin.is_first:
            return start
        if begin.is_first:
            self._end = replace(self._end, start=begin.offsets, start_ids=begin.topic_ids)
        return self._end.encode()

    def _begins(self, begin: Position, view: View) -> dict[TopicPartition, int]:
        """Where each partition goes on: never before what it still holds. Raises OffsetOutOfRangeError."""
        result = {}
        for key, held in view.held.items():
            is_known = begin.topic_ids.get(key.topic) == view.infos[key.topic].topic_id
            if is_known:  # before Spark writes down a batch that ends before it begins, and repeats it when the log is whole again
                self._losses.check_end(key, begin.offsets.get(key, 0), held)
            result[key] = max(begin.offsets.get(key, 0) if is_known else 0, held.beginning)
        return result

    def _limited(
        self, begins: Mapping[TopicPartition, int], ends: dict[TopicPartition, int], view: View, limit: ReadLimit
    ) -> dict[TopicPartition, int]:
        most = [count for count in (self._options.max_offsets, getattr(limit, "max_rows", None)) if count is not None]
        if most:
            ends = limited(begins, ends, min(most))
        bytes_max = [count for count in (self._options.max_bytes, getattr(limit, "max_bytes", None)) if count is not None]
        if bytes_max:
            ends = limited_by_bytes(begins, ends, min(bytes_max), view, self._appliance.data_dirs())
        return ends

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """For the query's progress: where the topics ended at the last look, and under "@metrics" how far the query is behind."""
        if self._seen is None or self._end is None:
            return None
        return {**Position(self._seen.ends, self._seen.topic_ids).encode(), "@metrics": behind(self._end, self._seen, self._losses.offsets)}

    # ---- what a batch reads ----------------------------------------------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """The tasks of the batch between two positions; none for an empty one. Raises TailraceError."""
        until = decode(end)
        begin = decode(start)
        if until.start is not None:
            begin = Position(until.start, until.start_ids)
        is_fresh = self._seen is not None and self._target is None and self._end == until
        view = self._seen if self._seen is not None and is_fresh else self._look()
        for attempt in range(LEASE_ATTEMPTS):
            ranges = self._ranges(begin, until, view)
            try:
                self._keep(ranges, until, view)
                break
            except (OffsetOutOfRangeError, UnknownTopicError):
                if attempt == LEASE_ATTEMPTS - 1:  # retention moved the beginning between look and lease each time
                    raise
                view = self._look()
        options = self._options.read
        average = {(key.topic, key.partition): held.bytes_per_offset for key, held in view.held.items()}
        tasks = divided(ranges, average, self._options.task_count_max, options.min_partitions or 1, options.max_records_per_partition)
        return [self._task(task, view) for task in tasks]

    def _ranges(self, begin: Position, until: Position, view: View) -> list[PartitionRange]:
        """What is there of the batch. Raises what `Losses` does."""
        self._losses.check_topics(until, view)
        self._losses.check_topics(begin, view)
        ranges = []
        for key in sorted(until.offsets):
            info, held = view.infos.get(key.topic), view.held.get(key)
            if info is None or held is None or until.topic_ids.get(key.topic) != info.topic_id:
                continue  # it was said above
            is_known = begin.topic_ids.get(key.topic) == info.topic_id
            wanted = PartitionRange(
                key.topic, info.topic_id, key.partition, begin.offsets.get(key, 0) if is_known else 0, until.offsets[key]
            )
            there = self._losses.what_is_there(wanted, held)
            if there.start < there.end:
                ranges.append(there)
        return ranges

    def _keep(self, ranges: list[PartitionRange], until: Position, view: View) -> None:
        """Lease what is about to be read, and what comes behind it, where the lease that there is does not do. Raises OffsetOutOfRangeError,
        UnknownTopicError.
        """
        is_covered = all(self._leased.get(r.key, r.start + 1) <= r.start for r in ranges)
        if not ranges or (is_covered and time.monotonic() - self._leased_s < LEASE_MOVED_AFTER_S):
            return
        wanted = {key: max(until.offsets[key], held.beginning) for key, held in view.held.items() if key in until.offsets}
        wanted.update((r.key, r.start) for r in ranges)
        self._appliance.take_lease(self._lease, wanted, LEASE_MS)
        self._leased, self._leased_s = wanted, time.monotonic()

    def _task(self, ranges: list[PartitionRange], view: View) -> StreamTask:
        options, parts = self._options.read, []
        for topic in dict.fromkeys(r.topic for r in ranges):
            info, of_topic = view.infos[topic], [r for r in ranges if r.topic == topic]
            check_asked(self._schema, arrow_schema((*LOG_COLUMNS, *own_columns(info.schema, typed=info.typed))), topic)
            made = plan_of(
                info,
                options.bootstrap,
                of_topic,
                self._appliance.data_dirs(),
                self._schema.fieldNames(),
                scan_settings(options),
                self._lease,
            )
            parts.append(ReadTask(made, {r.key: self._leased.get(r.key, r.start) for r in of_topic}, options.fail_on_data_loss))
        return StreamTask(parts)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a task. Raises TailraceError."""
        assert isinstance(partition, StreamTask)
        return conformed(read_stream_task(partition), arrow_target(self._schema))

    # ---- its end -----------------------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Give the lease back, as far as the appliance is there to take it."""
        if self._leased:
            leased, self._leased = self._leased, {}
            try:
                self._appliance.end_lease(self._lease, leased)
            except TailraceError as error:
                logger.info("stream_lease_left lease=%s ends_after_ms=%d reason=%r", self._lease, LEASE_MS, str(error))
        self._appliance.close()

    def _look(self) -> View:
        return self._appliance.look()
