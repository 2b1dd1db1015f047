"""Batches of Spark's sink, staged without Spark, and what the topic holds of them."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

import tailrace
from spark_bridge.sink.options import SinkOptions, parse_sink_options
from spark_bridge.sink.staging import Stager
from spark_bridge.sink.writer import StagedTask
from tailrace import Admin, NewTopic
from tailrace.embedded_appliance import EmbeddedAppliance

ROWS = 500


def options_of(appliance: EmbeddedAppliance, topic: str) -> SinkOptions:
    return parse_sink_options({"bootstrap": appliance.address, "topic": topic})


def make(appliance: EmbeddedAppliance, topic: str, partitions: int = 3, **configs: object) -> None:
    with Admin(appliance.address) as admin:
        admin.create_topics(NewTopic(topic, partitions, configs))


def stage(
    options: SinkOptions, batch_id: int, identity: str, run: str = "run-1", tasks: int = 2
) -> list[StagedTask]:
    """The rows of a batch, always the same ones, as so many tasks stage them."""
    made = []
    for task in range(tasks):
        stager = Stager(options, identity, task)
        try:
            numbers = range(task, ROWS, tasks)
            values = pa.array([b"%d/%d" % (batch_id, n) for n in numbers])
            stager.add(
                pa.RecordBatch.from_arrays(
                    [pa.array([b"%d" % n for n in numbers]), values], ["key", "value"]
                )
            )
            made.append(StagedTask(identity, run, stager.finish()))
        finally:
            stager.close()
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
