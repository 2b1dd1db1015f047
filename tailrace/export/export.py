"""A topic copied into a lake, commit by commit: rows and the offsets that they reach change at once, so that each record is there once.

    for commit in Export("orders", "/lake/orders", partition_by="date").run():
        print(commit.rows)

Kafka Connect's sinks keep their offsets beside the data for the same reason (its HDFS and S3 connectors in file names); here they are in the target's own
commit: a manifest for files, transaction identifiers in Delta Lake, table properties in Iceberg.

Owner: one process for a target directory; one thread.
Invariants: offsets of a partition are exported in order, without a gap but those that are counted as left out. What is read lies below the settled end: no
    power loss takes it back.
Crash: the target holds whole commits; `run` goes on behind the last.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tailrace.client_log import logger
from tailrace.errors import (
    CorruptBatchError,
    InvalidRequestError,
    NotReachableError,
    OffsetOutOfRangeError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.exporting import partitioning, steps
from tailrace.exporting.settings import ExportSettings, build_settings
from tailrace.exporting.source import CLIENT_ID, Survey, TopicSource
from tailrace.exporting.state import Commit, ExportState, LeftOut, Step, Target
from tailrace.scanning.columns import KAFKA_COLUMNS, Origin, with_origin
from tailrace.scanning.lease import Lease
from tailrace.scanning.options import ScanSettings
from tailrace.scanning.planner import PartitionRange, ScanPlan
from tailrace.scanning.reader import read
from tailrace.settings import DEFAULT_BOOTSTRAP

LOOK_S = 0.5
"""How often a continuous export asks what is new."""
ATTEMPTS = 3
"""Of a round that retention overtakes, or that finds the appliance away."""
LOG_COLUMNS = ("_partition", "_offset", "_timestamp")


def open_target(directory: str, settings: ExportSettings) -> Target:
    """Nothing is touched yet. Raises NotSupportedError, which names the extra that is missing."""
    by = settings.partition_by or ""
    if settings.format == "delta":
        from tailrace.exporting.delta_target import DeltaTarget

        return DeltaTarget(directory, by)
    if settings.format == "iceberg":
        from tailrace.exporting.iceberg_target import IcebergTarget

        return IcebergTarget(directory, by)
    from tailrace.exporting.file_target import FileTarget

    return FileTarget(directory, settings.format, settings.compression, by)


class Export:
    """See the module's docstring."""

    def __init__(
        self, topic: str, directory: str, bootstrap: str | None = None, *, connect_timeout_ms: int | None = None, **settings: Any
    ) -> None:
        """`settings`: those of `ExportSettings`. Raises InvalidSettingError, NotSupportedError."""
        self.settings = build_settings(settings)
        self._topic, self._directory = topic, directory
        self._source = TopicSource(topic, bootstrap or DEFAULT_BOOTSTRAP, self.settings.request_timeout_ms, connect_timeout_ms)
        self._target = open_target(directory, self.settings)
        self._damaged: list[LeftOut] = []
        self._pending_since_s: float | None = None
        self.resumed = False
        """Whether there was an export to go on with."""
        self.lag = 0
        """Offsets that were there and not exported when it was last looked."""

    def run(self, stop: threading.Event | None = None) -> Generator[Commit, None, None]:
        """Export, and give each commit when it is durable; with `follow` until `stop` is set, which ends the others between two commits, too. Raises
        TailraceError and OSError: what was committed stays, and another `run` goes on behind it.
        """
        stop = stop or threading.Event()
        with closing(self._source), closing(self._target):
            survey = self._source.survey(with_sealed=self.settings.follow)
            self._check_columns(survey)
            state = self._opened(survey)
            if self.settings.follow:
                self._source.look_briefly()
            overtaken = away = 0
            while not stop.is_set():
                try:
                    for commit, reached in self._round(state, survey, stop):
                        state, overtaken, away = reached, 0, 0
                        yield commit
                    if not self.settings.follow:
                        return
                except OffsetOutOfRangeError:
                    overtaken += 1  # retention, or delete_records, was faster: the next survey says by how much
                    if overtaken >= ATTEMPTS:
                        raise
                except (NotReachableError, RequestTimeoutError) as error:
                    away += 1
                    if not self.settings.follow and away >= ATTEMPTS:
                        raise
                    logger.warning("export_waits topic=%s reason=%r", self._topic, str(error))
                survey = self._next_survey(survey, stop)

    # ---- before it begins ------------------------------------------------------------------------------------------------------------

    def _opened(self, survey: Survey) -> ExportState:
        state, by = self._target.open(), self.settings.partition_by or ""
        if state is not None:
            state.check(self._directory, self._topic, survey.topic_id, by)
            self.resumed = True
            return state
        starts = self._source.starts(survey, self.settings.since, self._scan_settings())
        state = ExportState(self._topic, survey.topic_id, starts, by)
        self._target.begin(state)
        return state

    def _scan_settings(self) -> ScanSettings:
        return ScanSettings(
            skip_damaged=self.settings.on_data_loss == "skip", on_damage=self._on_damage if self.settings.on_data_loss == "skip" else None,
            request_timeout_ms=self.settings.request_timeout_ms, client_id=CLIENT_ID,
        )  # fmt: skip

    def _wanted(self, survey: Survey) -> list[str]:
        """Names of the columns that are written."""
        if self.settings.columns is not None:
            return list(self.settings.columns)
        if not survey.typed:
            return [column.name for column in KAFKA_COLUMNS]
        own = self._source.schema(None, self._scan_settings()).names
        return [*own, *(name for name in LOG_COLUMNS if name not in own)]

    def _columns(self, names: list[str]) -> list[str]:
        """Names of the columns that are read, to write these: the first of them."""
        by = self.settings.partition_by
        return [*names, by] if by and by not in (*partitioning.BY_TIME, *names) else names

    def _check_columns(self, survey: Survey) -> None:
        """Before anything is written. Raises InvalidSettingError."""
        wanted = self._wanted(survey)
        schema = self._source.schema(self._columns(wanted), self._scan_settings())
        if self.settings.partition_by:
            partitioning.check(schema, self._topic, self.settings.partition_by, wanted)

    # ---- one look at the topic -------------------------------------------------------------------------------------------------------

    def _round(self, state: ExportState, survey: Survey, stop: threading.Event) -> Iterator[tuple[Commit, ExportState]]:
        """Commits up to where the topic is settled now, or to where it is worth a commit. Raises TailraceError."""
        state.check(self._directory, self._topic, survey.topic_id, state.partition_by)
        state, lost = self._behind_what_is_lost(state, survey)
        ends = self._ends(state, survey)
        self.lag = steps.lag(state.next_offsets, ends)
        if not self.lag and not lost:
            return
        wanted = self._wanted(survey)
        made = self._source.plan(self._columns(wanted), state.next_offsets, ends, survey.topic_id, self._scan_settings())
        lease = Lease(made.bootstrap, made.lease, {r.key: r.start for r in made.ranges})
        try:
            while not stop.is_set():
                chosen = steps.next_ranges(state.next_offsets, ends, self.settings.rows_max, state.number)
                if not chosen and not lost:
                    return
                step, failure = self._read(made, chosen, lease, wanted)
                reached = {**state.next_offsets, **{partition: end for partition, _, end in step.ranges}}
                after = replace(state, number=state.number + 1, next_offsets=reached)
                if step.ranges or lost:
                    yield self._target.commit(replace(step, left_out=(*lost, *step.left_out)), after), after
                    state, lost = after, ()
                if failure is not None:
                    raise failure
                self.lag = steps.lag(state.next_offsets, ends)
        finally:
            lease.end()

    def _behind_what_is_lost(self, state: ExportState, survey: Survey) -> tuple[ExportState, tuple[LeftOut, ...]]:
        """The state with partitions that are new, behind what retention removed before it was exported."""
        positions, lost = dict(state.next_offsets), []
        for partition, beginning in survey.beginnings.items():
            position = positions.setdefault(partition, 0)
            if position > survey.settled[partition]:
                raise InvalidRequestError(
                    f"{self._directory} holds {self._topic}-{partition} up to offset {position - 1}, and the log ends at "
                    f"{survey.settled[partition] - 1}: it was restored from a copy, perhaps, and gives offsets again. Export to another directory"
                )
            if position < beginning:
                lost.append(LeftOut(partition, position, beginning, "removed by retention before it was exported"))
                positions[partition] = beginning
        if lost and self.settings.on_data_loss == "fail":
            said = ", ".join(f"{item.start} to {item.end - 1} of {self._topic}-{item.partition}" for item in lost[:5])
            raise OffsetLost(
                f"offsets {said} were removed by retention before they were exported; "
                "on_data_loss=skip (--on-data-loss skip) goes on behind them, and counts them"
            )
        return replace(state, next_offsets=positions), tuple(lost)

    def _ends(self, state: ExportState, survey: Survey) -> Mapping[int, int]:
        if not self.settings.follow:
            return survey.settled
        now_s = time.monotonic()
        if not steps.lag(state.next_offsets, survey.settled):
            self._pending_since_s = None
            return survey.settled
        self._pending_since_s = self._pending_since_s if self._pending_since_s is not None else now_s
        is_time = (now_s - self._pending_since_s) * 1000 >= self.settings.max_delay_ms
        if is_time:
            self._pending_since_s = None
        return steps.due_ends(state.next_offsets, survey.settled, survey.sealed, self.settings.rows_max, is_time=is_time)

    def _next_survey(self, last: Survey, stop: threading.Event) -> Survey:
        """When there may be something new, or the appliance is back; the last one when it is told to stop."""
        while not stop.wait(LOOK_S):
            try:
                return self._source.survey(with_sealed=self.settings.follow)
            except (NotReachableError, RequestTimeoutError) as error:
                if not self.settings.follow:
                    raise
                logger.warning("export_waits topic=%s reason=%r", self._topic, str(error))
        return last

    # ---- one commit's rows -----------------------------------------------------------------------------------------------------------

    def _read(self, made: ScanPlan, chosen: steps.Ranges, lease: Lease, wanted: list[str]) -> tuple[Step, TailraceError | None]:
        """The rows of these ranges, or of the first of them as far as `commit_bytes` go, or as what cannot be read allows; then that is said, too."""
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
                    position = end  # behind marks of the appliance, too, which have no rows
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
        written = table.select(range(len(wanted)))
        if by := self.settings.partition_by:
            written = written.append_column(partitioning.column_name(by), partitioning.made_column(table.column(by_at), by))
        return Step(written, tuple(done), left_out), failure

    def _with_needed(self, made: ScanPlan) -> tuple[ScanPlan, int, int]:
        """The plan with what must be known of each row, and the numbers of the columns that say its offset, and what it is partitioned by (-1: by nothing)."""
        by = self.settings.partition_by
        columns, offset_at = with_origin(made.columns, Origin.OFFSET)
        by_at = made.schema.get_field_index(by) if by else -1
        if by in partitioning.BY_TIME:
            columns, by_at = with_origin(columns, Origin.TIME)
        return replace(made, columns=columns), offset_at, by_at

    def _on_damage(self, error: CorruptBatchError) -> None:
        if error.key is not None and error.first_offset is not None and error.next_offset is not None:
            self._damaged.append(LeftOut(error.key.partition, error.first_offset, error.next_offset, "damaged"))


class OffsetLost(InvalidRequestError):
    """Records were gone before they were exported."""


def _part(made: ScanPlan, whole: PartitionRange, start: int, end: int) -> ScanPlan:
    return replace(made, ranges=(replace(whole, start=start, end=end),))


def _explained(error: CorruptBatchError) -> CorruptBatchError:
    """With what an export can do about it."""
    said = CorruptBatchError(
        error.detail.replace(
            "skip_damaged=True goes on behind them", "on_data_loss=skip (--on-data-loss skip) goes on behind them, and counts them"
        )
    )
    said.key, said.first_offset, said.next_offset = error.key, error.first_offset, error.next_offset
    return said
