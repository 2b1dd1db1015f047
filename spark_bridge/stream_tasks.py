"""The tasks of a micro-batch: its ranges of offsets, divided evenly among few tasks, and how one of them is read.

A wave of tasks costs Spark tens of milliseconds, so there are as many as cores, and fewer for a batch that is small (where Spark's Kafka source has one for
each partition); minPartitions asks for more.

Invariants: together the tasks read each offset of the batch once; a task's ranges are fixed, so that a repeated batch has the same rows. With
    failOnDataLoss=false what is gone when a task comes to it is left out, and logged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from tailrace.admin import Admin
from tailrace.client_log import logger
from tailrace.errors import OffsetOutOfRangeError, TailraceError, UnknownTopicError
from tailrace.offset_lookup import check_offsets_answer
from tailrace.records import TopicPartition
from tailrace.scanning.lease import Lease
from tailrace.scanning.planner import PartitionRange, ScanPlan
from tailrace.scanning.reader import read

if TYPE_CHECKING:
    import pyarrow as pa

TASK_BYTES = 1 << 20
"""Less than this is not worth a task of its own."""
OFFSET_BYTES = 100
"""What an offset costs to read at least, in bytes."""
DATA_LOSS_ADVICE = "the query fails rather than leave out what it was to read (failOnDataLoss=true); with failOnDataLoss=false it goes on with what is there"


class StreamTask(InputPartition):
    """What one task of a micro-batch reads: plans of one topic each, in order."""

    def __init__(self, plans: Sequence[ScanPlan], leased: Mapping[TopicPartition, int], fail_on_data_loss: bool) -> None:
        """`leased`: from where on the batch's lease keeps the partitions; other tasks read parts of the same ones."""
        super().__init__(None)
        self.plans = list(plans)
        self.leased = dict(leased)
        self.fail_on_data_loss = fail_on_data_loss


def divided(
    ranges: Sequence[PartitionRange],
    bytes_per_offset: Mapping[tuple[str, int], float],
    task_count_max: int,
    task_count_min: int = 1,
    offsets_max: int | None = None,
) -> list[list[PartitionRange]]:
    """The ranges of each task: at most `task_count_max` of about the same cost, a range cut where one ends.

    `task_count_min`: so many tasks at least, as far as there are offsets. `offsets_max`: no range of a task has more (maxRecordsPerPartition; there may be more
    tasks than `task_count_max` then).
    """
    costs = {(r.topic, r.partition): max(OFFSET_BYTES, bytes_per_offset.get((r.topic, r.partition), 0.0)) for r in ranges}
    total = sum((r.end - r.start) * costs[r.topic, r.partition] for r in ranges)
    if not total:
        return []
    count = max(task_count_min, min(task_count_max, math.ceil(total / TASK_BYTES)))
    share, left = total / count, total / count
    tasks: list[list[PartitionRange]] = [[]]
    for r in ranges:
        cost, start = costs[r.topic, r.partition], r.start
        while start < r.end:
            if left < cost / 2 and len(tasks) < count:
                tasks.append([])
                left += share
            # A remainder too small for an offset of its own, after rounding, belongs to the last task.
            step = r.end - start if len(tasks) == count else min(r.end - start, max(1, round(left / cost)))
            tasks[-1].append(replace(r, start=start, end=start + step))
            start, left = start + step, left - step * cost
    tasks = [task for task in tasks if task]
    if offsets_max is None:
        return tasks
    return [
        [replace(r, start=start, end=min(start + offsets_max, r.end))]
        for task in tasks
        for r in task
        for start in range(r.start, r.end, offsets_max)
    ]


def read_stream_task(task: StreamTask) -> Iterator[pa.RecordBatch]:
    """The rows of a task. Raises TailraceError; with failOnDataLoss=false neither UnknownTopicError nor OffsetOutOfRangeError."""
    for plan in task.plans:
        lease = Lease(plan.bootstrap, plan.lease, {r.key: task.leased[r.key] for r in plan.ranges if r.key in task.leased})
        for piece in plan.ranges:
            yield from _read_range(plan, piece, lease, task.fail_on_data_loss)


def _read_range(plan: ScanPlan, piece: PartitionRange, lease: Lease, fail_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    rest: PartitionRange | None = piece
    while rest is not None:
        try:
            for batch in read(replace(plan, ranges=(rest,))):
                yield batch
                _renew(lease, fail_on_data_loss)
            return
        except (OffsetOutOfRangeError, UnknownTopicError) as error:
            if fail_on_data_loss:
                raise type(error)(f"{error.detail}: {DATA_LOSS_ADVICE}") from error
            rest = _what_is_left(plan, rest, error)


def _renew(lease: Lease, fail_on_data_loss: bool) -> None:
    try:
        lease.renew_when_due()
    except (OffsetOutOfRangeError, UnknownTopicError) as error:
        if fail_on_data_loss:
            raise
        logger.warning("stream_lease_not_renewed reason=%r", error.detail)


def _what_is_left(plan: ScanPlan, r: PartitionRange, error: TailraceError) -> PartitionRange | None:
    """Of a range whose beginning is gone; None: nothing. What was read of it before lies below the log's new beginning."""
    beginning = r.end
    if isinstance(error, OffsetOutOfRangeError):
        with Admin(plan.bootstrap, client_id=plan.settings.client_id, request_timeout_ms=plan.settings.request_timeout_ms) as admin:
            try:
                beginning = check_offsets_answer(admin.offsets({r.key: "earliest"})[r.key])["beginning"]
            except UnknownTopicError:
                pass
    start = max(r.start + 1, beginning)  # on, whatever the appliance says
    logger.warning(
        "stream_data_lost partition=%s-%d from=%d to=%d reason=%r", r.topic, r.partition, r.start, min(start, r.end), error.detail
    )
    return replace(r, start=start) if start < r.end else None
