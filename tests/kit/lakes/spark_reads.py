"""Reads as Spark makes them, through the data source without a JVM: batch and stream.

Owner: one test.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.types import IntegerType, LongType, StringType, StructType

from spark_bridge.datasource import TailraceDataSource, TopicRange
from spark_bridge.stream.options import parse_stream_options
from spark_bridge.stream.reader import TopicStreamReader
from spark_bridge.stream.tasks import StreamTask
from tailrace.embedded_appliance import EmbeddedAppliance

COLUMNS = (
    StructType()
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
)
running: list[TopicStreamReader] = []


class Read:
    """A read as Spark does it: the reader is pickled between its calls."""

    def __init__(self, address: str, schema: StructType | None = None, **options: str) -> None:
        source = TailraceDataSource({"kafka.bootstrap.servers": address, **options})
        self.schema = source.schema() if schema is None else schema
        self.reader: Any = pickle.loads(pickle.dumps(source.reader(self.schema)))
        self.tasks: list[TopicRange] = pickle.loads(pickle.dumps(self.reader.partitions()))

    def batches(self) -> Iterator[pa.RecordBatch]:
        for task in self.tasks:
            yield from self.reader.read(task)

    def ranges(self) -> list[tuple[str, int, int, int]]:
        plans = [task.task.plan for task in self.tasks if task.task is not None]
        return sorted((r.topic, r.partition, r.start, r.end) for made in plans for r in made.ranges)


class Query:
    """Spark's calls of a reader: one batch after the other. A new one on the same `committed` is a
    restart from the checkpoint.
    """

    def __init__(
        self,
        appliance: EmbeddedAppliance,
        topic: str,
        *,
        available_now: bool = False,
        **options: str,
    ) -> None:
        given = {
            "bootstrap": appliance.address,
            "subscribe": topic,
            "startingOffsets": "earliest",
            **options,
        }
        if "assign" in options or "subscribePattern" in options:
            del given["subscribe"]
        self.reader = TopicStreamReader(parse_stream_options(given), COLUMNS)
        running.append(self.reader)
        self.committed: Any = None
        self.planned: Any = None
        self.tasks: list[StreamTask] = []
        if available_now:
            self.reader.prepareForTriggerAvailableNow()

    def again(self, other: Query) -> Query:
        """From the checkpoint that `other` left."""
        self.committed, self.planned = other.committed, other.planned
        return self

    def plan(self) -> Any:
        """Decide on a batch: what goes into the offset log."""
        begin = self.committed if self.committed is not None else self.reader.initialOffset()
        end = json.loads(
            json.dumps(
                self.reader.latestOffset(
                    json.loads(json.dumps(begin)), self.reader.getDefaultReadLimit()
                )
            )
        )
        self.planned = None if end == self.committed else end
        return self.planned

    def run(self) -> list[tuple[int, int]]:
        """Read the batch that was planned, and commit it. (partition, offset), sorted."""
        begin = self.committed if self.committed is not None else self.reader.initialOffset()
        self.tasks = [
            pickle.loads(pickle.dumps(task)) for task in self.reader.partitions(begin, self.planned)
        ]
        batches = [batch for task in self.tasks for batch in self.reader.read(task)]
        self.committed = self.planned
        rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        assert len(set(rows)) == len(rows)
        return sorted((partition, offset) for _topic, partition, offset in rows)

    def batch(self) -> list[tuple[int, int]]:
        return self.run() if self.plan() is not None else []

    @property
    def metrics(self) -> dict[str, Any]:
        told = self.reader.reportLatestOffset()
        assert told is not None
        return dict(told["@metrics"])
