"""Export: copies a topic into a data lake, commit by commit.

    for commit in Export("orders", "/lake/orders", partition_by="date").run():
        print(commit.rows)

Each commit changes rows and offsets together, so each record is there exactly once. Kafka Connect's
sinks also keep offsets beside the data (HDFS and S3 connectors in file names). Here they are in the
target's own commit: a commit log for files, transaction identifiers in Delta Lake, table properties
in Iceberg.

Owner: one process for a target directory, one thread.

Invariants:
- Offsets of a partition are exported in order and without gaps, except for those counted as
  skipped.
- Records are below the settled end when they are read, so no power loss removes them.

Crash: the target has whole commits. `run` continues after the last one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tailrace.client.config.settings import default_bootstrap
from tailrace.core.errors import (
    CorruptBatchError,
    InvalidRequestError,
    NotReachableError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.core.log import logger
from tailrace.export import commit_planner, hive_partitioning
from tailrace.export.checkpoint import Commit, ExportCheckpoint, Sink, SkippedRange, Step
from tailrace.export.settings import ExportSettings, build_settings
from tailrace.export.source import CLIENT_ID, Survey, TopicSource
from tailrace.scanning.columns import KAFKA_COLUMNS, Origin, with_origin
from tailrace.scanning.options import ScanSettings
from tailrace.scanning.reader import read
from tailrace.scanning.retention_lease import Lease
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan

POLL_INTERVAL_S = 0.5
"""Interval at which a continuous export looks for new records."""
ATTEMPTS = 3
"""Attempts of a round that retention overtakes, or that finds the appliance away."""
LOG_COLUMNS = ("_partition", "_offset", "_timestamp")


def open_sink(directory: str, settings: ExportSettings) -> Sink:
    """The sink of an export; nothing is opened yet. Raises NotSupportedError that names a missing
    extra.
    """
    by = settings.partition_by or ""
    if settings.format == "delta":
        from tailrace.export.delta_sink import DeltaSink

        return DeltaSink(directory, by)
    if settings.format == "iceberg":
        from tailrace.export.iceberg_sink import IcebergSink

        return IcebergSink(directory, by)
    from tailrace.export.file_sink import FileSink

    return FileSink(directory, settings.format, settings.compression, by)


class Export:
    """The export of one topic to one directory."""

    def __init__(
        self,
        topic: str,
        directory: str,
        bootstrap: str | None = None,
        *,
        connect_timeout_ms: int | None = None,
        **settings: Any,
    ) -> None:
        """`settings` are those of `ExportSettings`. Raises
        InvalidSettingError, NotSupportedError.
        """
        self.settings = build_settings(settings)
        self._topic, self._directory = topic, directory
        self._source = TopicSource(
            topic,
            bootstrap or default_bootstrap(),
            self.settings.request_timeout_ms,
            connect_timeout_ms,
        )
        self._target = open_sink(directory, self.settings)
        self._damaged: list[SkippedRange] = []
        self._pending_since_s: float | None = None
        self.resumed = False
        """True if `run` continued an earlier export."""
        self.lag = 0
        """Offsets in the topic and not yet exported, at the last look."""

    def run(self, stop: threading.Event | None = None) -> Generator[Commit, None, None]:
        """Export, and yield each commit when it is durable.

        With `follow` it runs until `stop` is set; `stop` also ends other exports between two
        commits. Raises TailraceError and OSError. Commits stay, and another `run` continues after
        them.
        """
        stop = stop or threading.Event()
        with closing(self._source), closing(self._target):
            survey = self._source.survey(with_sealed=self.settings.follow)
            self._check_columns(survey)
            state = self._opened(survey)
            if self.settings.follow:
                self._source.use_short_timeouts()
            overtaken = away = 0
            while not stop.is_set():
                try:
                    for commit, reached in self._round(state, survey, stop):
                        state, overtaken, away = reached, 0, 0
                        yield commit
                    if not self.settings.follow:
                        return
                except OffsetOutOfRangeError:
                    # Retention or delete_records was faster. The next survey shows the loss.
                    overtaken += 1
                    if overtaken >= ATTEMPTS:
                        raise
                except (NotReachableError, RequestTimeoutError) as error:
                    away += 1
                    if not self.settings.follow and away >= ATTEMPTS:
                        raise
                    logger.warning("export_waits topic=%s reason=%r", self._topic, str(error))
                survey = self._next_survey(survey, stop)

    # ---- before it begins ------------------------------------------------------------------------

    def _opened(self, survey: Survey) -> ExportCheckpoint:
        state, by = self._target.open(), self.settings.partition_by or ""
        if state is not None:
            state.check(self._directory, self._topic, survey.topic_id, by)
            self.resumed = True
            return state
        starts = self._source.starts(survey, self.settings.since, self._scan_settings())
        state = ExportCheckpoint(self._topic, survey.topic_id, starts, by)
        self._target.begin(state)
        return state

    def _scan_settings(self) -> ScanSettings:
        return ScanSettings(
            skip_damaged=self.settings.on_data_loss == "skip",
            on_damage=self._on_damage if self.settings.on_data_loss == "skip" else None,
            request_timeout_ms=self.settings.request_timeout_ms, client_id=CLIENT_ID,
        )  # fmt: skip

    def _requested(self, survey: Survey) -> list[str]:
        """Names of the columns to write."""
        if self.settings.columns is not None:
            return list(self.settings.columns)
        if not survey.typed:
            return [column.name for column in KAFKA_COLUMNS]
        own = self._source.schema(None, self._scan_settings()).names
        return [*own, *(name for name in LOG_COLUMNS if name not in own)]

    def _columns(self, names: list[str]) -> list[str]:
        """Names of the columns to read, beginning with those to write."""
        by = self.settings.partition_by
        return [*names, by] if by and by not in (*hive_partitioning.BY_TIME, *names) else names

    def _check_columns(self, survey: Survey) -> None:
        """Check the columns before anything is written. Raises InvalidSettingError."""
        requested = self._requested(survey)
        schema = self._source.schema(self._columns(requested), self._scan_settings())
        if self.settings.partition_by:
            hive_partitioning.check(schema, self._topic, self.settings.partition_by, requested)

    # ---- one look at the topic -------------------------------------------------------------------

    def _round(
        self, state: ExportCheckpoint, survey: Survey, stop: threading.Event
    ) -> Iterator[tuple[Commit, ExportCheckpoint]]:
        """Yield commits up to the settled end, or up to the offsets that are due. Raises
        TailraceError.
        """
        state.check(self._directory, self._topic, survey.topic_id, state.partition_by)
        state, lost = self._after_data_loss(state, survey)
        ends = self._ends(state, survey)
        self.lag = commit_planner.lag(state.next_offsets, ends)
        if not self.lag and not lost:
            return
        requested = self._requested(survey)
        made = self._source.plan(
            self._columns(requested),
            state.next_offsets,
            ends,
            survey.topic_id,
            self._scan_settings(),
        )
        lease = Lease(made.bootstrap, made.lease, {r.key: r.start for r in made.ranges})
        try:
            while not stop.is_set():
                chosen = commit_planner.next_ranges(
                    state.next_offsets, ends, self.settings.rows_max, state.number
                )
                if not chosen and not lost:
                    return
                step, failure = self._read(made, chosen, lease, requested)
                reached = {
                    **state.next_offsets,
                    **{partition: end for partition, _, end in step.ranges},
                }
                after = replace(state, number=state.number + 1, next_offsets=reached)
                if step.ranges or lost:
                    yield (
                        self._target.commit(replace(step, left_out=(*lost, *step.left_out)), after),
                        after,
                    )
                    state, lost = after, ()
                if failure is not None:
                    raise failure
                self.lag = commit_planner.lag(state.next_offsets, ends)
        finally:
            lease.end()

    def _after_data_loss(
        self, state: ExportCheckpoint, survey: Survey
    ) -> tuple[ExportCheckpoint, tuple[SkippedRange, ...]]:
        """The state with new partitions, moved past the offsets that retention has removed."""
        positions, lost = dict(state.next_offsets), []
        for partition, beginning in survey.start_offsets.items():
            position = positions.setdefault(partition, 0)
            if position > survey.settled[partition]:
                raise InvalidRequestError(
                    f"{self._directory} has {self._topic}-{partition} up to offset "
                    f"{position - 1}, but the log ends at "
                    f"{survey.settled[partition] - 1}; it may have been restored from a copy and "
                    "assigns offsets again: export to another directory"
                )
            if position < beginning:
                lost.append(
                    SkippedRange(
                        partition,
                        position,
                        beginning,
                        "removed by retention before it was exported",
                    )
                )
                positions[partition] = beginning
        if lost and self.settings.on_data_loss == "fail":
            explained = ", ".join(
                f"{item.start} to {item.end - 1} of {self._topic}-{item.partition}"
                for item in lost[:5]
            )
            raise OffsetLost(
                f"offsets {explained} were removed by retention before they were exported; "
                "on_data_loss=skip (--on-data-loss skip) skips and counts them"
            )
        return replace(state, next_offsets=positions), tuple(lost)

    def _ends(self, state: ExportCheckpoint, survey: Survey) -> Mapping[int, int]:
        if not self.settings.follow:
            return survey.settled
        now_s = time.monotonic()
        if not commit_planner.lag(state.next_offsets, survey.settled):
            self._pending_since_s = None
            return survey.settled
        self._pending_since_s = (
            self._pending_since_s if self._pending_since_s is not None else now_s
        )
        is_time = (now_s - self._pending_since_s) * 1000 >= self.settings.max_delay_ms
        if is_time:
            self._pending_since_s = None
        return commit_planner.due_ends(
            state.next_offsets,
            survey.settled,
            survey.sealed,
            self.settings.rows_max,
            is_time=is_time,
        )

    def _next_survey(self, last: Survey, stop: threading.Event) -> Survey:
        """Wait for new records or for the appliance's return. Returns `last` when `stop` is set."""
        while not stop.wait(POLL_INTERVAL_S):
            try:
                return self._source.survey(with_sealed=self.settings.follow)
            except (NotReachableError, RequestTimeoutError) as error:
                if not self.settings.follow:
                    raise
                logger.warning("export_waits topic=%s reason=%r", self._topic, str(error))
        return last

    # ---- one commit's rows -----------------------------------------------------------------------

    def _read(
        self, made: ScanPlan, chosen: commit_planner.Ranges, lease: Lease, requested: list[str]
    ) -> tuple[Step, TailraceError | None]:
        """Read the rows of these ranges, up to `commit_bytes` or to unreadable offsets.

        Returns the step, and the failure that ended it.
        """
        made, offset_at, by_at = self._with_needed(made)
        by_partition = {r.partition: r for r in made.ranges}
        batches: list[pa.RecordBatch] = []
        done: list[tuple[int, int, int]] = []
        self._damaged, taken, failure = [], 0, None
        for partition, start, end in chosen:
            position = start
            try:
                for batch in read(_part(made, by_partition[partition], start, end)):
                    lease.renew_when_due()
                    batches.append(batch)
                    position = batch.column(offset_at)[-1].as_py() + 1
                    taken += batch.nbytes
                    if taken >= self.settings.commit_bytes:
                        break
                else:
                    position = end  # also past control batches, which have no rows
            except CorruptBatchError as error:
                failure = _explained(error)
            if position > start:
                done.append((partition, start, position))
            if failure is not None or taken >= self.settings.commit_bytes:
                break
        reached = {partition: end for partition, _, end in done}
        left_out = tuple(
            item._replace(end=min(item.end, reached[item.partition]))
            for item in self._damaged
            if item.start < reached.get(item.partition, 0)
        )
        table = pa.Table.from_batches(batches, made.schema)
        written = table.select(range(len(requested)))
        if by := self.settings.partition_by:
            written = written.append_column(
                hive_partitioning.column_name(by),
                hive_partitioning.made_column(table.column(by_at), by),
            )
        return Step(written, tuple(done), left_out), failure

    def _with_needed(self, made: ScanPlan) -> tuple[ScanPlan, int, int]:
        """The plan with the columns that the export needs, and the indices of offset and partition
        columns.

        The latter is -1 without `partition_by`.
        """
        by = self.settings.partition_by
        columns, offset_at = with_origin(made.columns, Origin.OFFSET)
        by_at = made.schema.get_field_index(by) if by else -1
        if by in hive_partitioning.BY_TIME:
            columns, by_at = with_origin(columns, Origin.TIME)
        return replace(made, columns=columns), offset_at, by_at

    def _on_damage(self, error: CorruptBatchError) -> None:
        if (
            error.key is not None
            and error.first_offset is not None
            and error.next_offset is not None
        ):
            self._damaged.append(
                SkippedRange(error.key.partition, error.first_offset, error.next_offset, "damaged")
            )


class OffsetLost(InvalidRequestError):
    """Records were removed before they were exported."""


def _part(made: ScanPlan, whole: PartitionRange, start: int, end: int) -> ScanPlan:
    return replace(made, ranges=(replace(whole, start=start, end=end),))


def _explained(error: CorruptBatchError) -> CorruptBatchError:
    """The error with the export's setting that skips the damage."""
    explained = CorruptBatchError(
        error.detail.replace(
            "skip_damaged=True skips them",
            "on_data_loss=skip (--on-data-loss skip) skips and counts them",
        )
    )
    explained.key, explained.first_offset, explained.next_offset = (
        error.key,
        error.first_offset,
        error.next_offset,
    )
    return explained
