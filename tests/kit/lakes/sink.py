"""Batches of Spark's sink, written without Spark, and what the topic holds of them."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

import tailrace
from spark_bridge.sink.messages import WrittenTask
from spark_bridge.sink.options import SinkOptions, parse_sink_options
from spark_bridge.sink.task_writer import TaskWriter
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance

ROWS = 500


def options_of(appliance: EmbeddedAppliance, topic: str, **more: str) -> SinkOptions:
    return parse_sink_options({"bootstrap": appliance.address, "topic": topic, **more})


def make(appliance: EmbeddedAppliance, topic: str, partitions: int = 3, **configs: object) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, partitions, configs))


def rows_of_task(batch_id: int, task: int, tasks: int) -> pa.RecordBatch:
    """The rows of one task of a batch, always the same ones."""
    numbers = range(task, ROWS, tasks)
    values = pa.array([b"%d/%d" % (batch_id, n) for n in numbers])
    return pa.RecordBatch.from_arrays(
        [pa.array([b"%d" % n for n in numbers]), values], ["key", "value"]
    )


def write(
    options: SinkOptions,
    batch_id: int,
    identity: str,
    run: str = "run-1",
    tasks: int = 2,
    known_as: int | None = -1,
) -> list[WrittenTask]:
    """A batch, as so many tasks write it. `known_as`: the number that Spark says to the tasks, None
    if it says none, and -1 for `batch_id`.
    """
    made = []
    for task in range(tasks):
        writer = TaskWriter(options, identity, run, task, batch_id if known_as == -1 else known_as)
        try:
            writer.add(rows_of_task(batch_id, task, tasks))
            made.append(writer.finish())
        finally:
            writer.close()
    return made


def values_in(appliance: EmbeddedAppliance, topic: str) -> list[bytes]:
    return [
        bytes(value)
        for value in tailrace.scan(topic, appliance.address, columns=["value"])
        .read_all()
        .column("value")
        .to_pylist()
    ]


def check_once(appliance: EmbeddedAppliance, topic: str, batches: int) -> None:
    counted = Counter(values_in(appliance, topic))
    assert counted == Counter(
        b"%d/%d" % (batch, n) for batch in range(batches) for n in range(ROWS)
    )
