"""Tasks of a micro-batch: its ranges of offsets, divided evenly among few tasks, and the reading of
one task.

A wave of tasks costs Spark tens of milliseconds. So there are as many tasks as cores, and fewer for
a small batch; minPartitions asks for more. (Spark's Kafka source has one task for each partition.)

Invariants:
- Together the tasks read each offset of the batch once.
- A task's ranges are fixed, so that a repeated batch has the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import InputPartition

from spark_bridge.source.planner import ReadTask
from spark_bridge.source.reader import read_task
from tailrace.scanning.scan_plan import PartitionRange

if TYPE_CHECKING:
    import pyarrow as pa

TASK_BYTES = 1 << 20
"""Fewest bytes that are worth a task of their own."""
OFFSET_BYTES = 100
"""Least cost of reading an offset, in bytes."""
DATA_LOSS_ADVICE = (
    "the query fails rather than leave records out (failOnDataLoss=true); with "
    "failOnDataLoss=false it goes on with the remaining ones"
)


class StreamTask(InputPartition):
    """One task of a micro-batch: ranges of one topic, in order."""

    def __init__(self, parts: Sequence[ReadTask]) -> None:
        super().__init__(None)
        self.parts = list(parts)


def divided(
    ranges: Sequence[PartitionRange],
    bytes_per_offset: Mapping[tuple[str, int], float],
    task_count_max: int,
    task_count_min: int = 1,
    offsets_max: int | None = None,
) -> list[list[PartitionRange]]:
    """The ranges of each task: at most `task_count_max` of about the same cost, a range cut where
    one ends.

    `task_count_min`: so many tasks at least, as far as there are offsets. `offsets_max`: no range
    of a task has more (maxRecordsPerPartition; there may be more tasks than `task_count_max` then).
    """
    costs = {
        (r.topic, r.partition): max(OFFSET_BYTES, bytes_per_offset.get((r.topic, r.partition), 0.0))
        for r in ranges
    }
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
            # A remainder too small for an offset of its own, after rounding, belongs to the last
            # task.
            step = (
                r.end - start
                if len(tasks) == count
                else min(r.end - start, max(1, round(left / cost)))
            )
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
    """The rows of a task. Raises TailraceError."""
    for part in task.parts:
        yield from read_task(part)
