"""The reader of one Spark task: reads its plan (`tailrace.scanning`) as Arrow batches, from the
log's files if they are on the executor's host.

While the appliance does not answer, it waits up to requestTimeoutMs for each request, then
continues where it was (`tailrace.scanning.sources.remote_source`).

Invariants:
- Every offset of the plan's ranges is returned once, in order, and no other.
- Lost records are an error, which names the option to go on with. With failOnDataLoss=false they
  are left out, counted and logged by the executor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa

from spark_bridge.source.planner import ReadTask, kafka_schema
from tailrace.admin.admin import Admin
from tailrace.client.topics.list_offsets import ready_offsets
from tailrace.core.errors import CorruptBatchError, OffsetOutOfRangeError, UnknownTopicError
from tailrace.core.log import logger
from tailrace.scanning.columns import Origin, with_origin
from tailrace.scanning.latest.latest_rows import latest_rows
from tailrace.scanning.reader import read
from tailrace.scanning.retention_lease import Lease
from tailrace.scanning.scan_plan import PartitionRange, ScanPlan

__all__ = ["kafka_schema", "read_task"]


class _Lost:
    """Counts offsets that were damaged or deleted, of one task."""

    def __init__(self) -> None:
        self.offsets = self.ranges = 0

    def add(self, first: int | None, following: int | None) -> None:
        if first is not None and following is not None:
            self.offsets += following - first
            self.ranges += 1

    def warn(self, task: ReadTask) -> None:
        if self.ranges:
            logger.warning(
                "spark_read_skipped topic=%s offsets=%d ranges=%d",
                task.plan.topic,
                self.offsets,
                self.ranges,
            )


def read_task(task: ReadTask) -> Iterator[pa.RecordBatch]:
    """The rows of a task, with the plan's columns in that order; renews its lease while it reads.
    Raises TailraceError.
    """
    lost = _Lost()

    def on_damage(error: CorruptBatchError) -> None:
        lost.add(error.first_offset, error.next_offset)

    lease = Lease(task.plan.bootstrap, task.plan.lease, dict(task.leased))
    made = replace(task.plan, settings=replace(task.plan.settings, on_damage=on_damage))

    def ranges(read_plan: ScanPlan) -> Iterator[pa.RecordBatch]:
        for r in read_plan.ranges:
            yield from (
                _checked(read_plan, r) if task.fail_on_data_loss else _remaining(read_plan, r, lost)
            )

    for batch in ranges(made) if task.latest is None else latest_rows(made, task.latest, ranges):
        _renew(lease)
        yield batch
    lost.warn(task)


def _renew(lease: Lease) -> None:
    """Renew the lease. One that had expired may have lost the beginning of the whole read; the task
    learns by reading whether it lost anything.
    """
    try:
        lease.renew_when_due()
    except OffsetOutOfRangeError as error:
        logger.warning("spark_read_lease_ended %s", error.detail)


def _checked(made: ScanPlan, r: PartitionRange) -> Iterator[pa.RecordBatch]:
    """Add Spark's options to error messages."""
    try:
        yield from read(replace(made, ranges=(r,)))
    except CorruptBatchError as error:
        error.add_note(
            "In Spark: .option('skipDamaged', 'true') leaves them out, and counts them in the "
            "executor's log."
        )
        raise
    except (OffsetOutOfRangeError, UnknownTopicError) as error:
        error.add_note("In Spark: .option('failOnDataLoss', 'false') reads what is left.")
        raise


def _remaining(made: ScanPlan, r: PartitionRange, lost: _Lost) -> Iterator[pa.RecordBatch]:
    """The range without offsets that are deleted while it is read."""
    columns, number = with_origin(made.columns, Origin.OFFSET)
    position = r.start
    while position < r.end:
        try:
            for batch in read(replace(made, columns=columns, ranges=(replace(r, start=position),))):
                position = batch.column(number)[-1].as_py() + 1
                yield batch if len(columns) == len(made.columns) else batch.select(range(number))
            return
        except OffsetOutOfRangeError as error:
            logger.warning("spark_read_lost %s", error.detail)
            begins = _beginning(made, r)
            lost.add(position, min(begins, r.end))
            if begins <= position:
                raise
            position = begins
        except UnknownTopicError as error:
            logger.warning("spark_read_lost %s", error.detail)
            lost.add(position, r.end)
            return


def _beginning(made: ScanPlan, r: PartitionRange) -> int:
    """Current beginning of the partition; the range's end if the topic was created again."""
    with Admin(
        made.bootstrap,
        client_id=made.settings.client_id,
        request_timeout_ms=made.settings.request_timeout_ms,
    ) as admin:
        try:
            if admin.topic_info([r.topic])[r.topic].topic_id != r.topic_id:
                return r.end
            return int(
                ready_offsets(admin.offsets, [r.key], "earliest", made.settings.request_timeout_ms)[
                    r.key
                ]["beginning"]
            )
        except UnknownTopicError as error:
            logger.warning("spark_read_lost %s", error.detail)
            return r.end
