"""`spark.read.format("tailrace")`: topics as DataFrames, in batch reads. Spark finds it through `pyspark_tailrace`; nothing has to be registered.

    spark.read.format("tailrace").option("bootstrap", address).option("subscribe", "flights").load()

Columns: those of a typed topic; for others those of Spark's Kafka source (key, value, topic, partition, offset, timestamp, timestampType[, headers]).
`.schema("offset bigint")` before `.load()` reads only the columns named. Filters are not pushed down: with Spark 4.3's plan cache that gives wrong results.

Owner: Spark, which calls `schema` and `partitions` in the driver and `read` in one Python process per task.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamWriter, DataSourceWriter, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark_bridge.planner import ReadOptions, load_topics, parse_options, plan_leased
from spark_bridge.reader import kafka_schema, read_task
from tailrace.admin import Admin
from tailrace.errors import NotSupportedError
from tailrace.scanning.planner import ScanPlan

if TYPE_CHECKING:
    import pyarrow as pa

CONNECT_TIMEOUT_MS = 10_000


class TopicRange(InputPartition):
    """What one task reads."""

    def __init__(self, task: ScanPlan) -> None:
        super().__init__(task)
        self.task = task


class TailraceDataSource(DataSource):
    """The data source named "tailrace"."""

    @classmethod
    def name(cls) -> str:
        """What `spark.read.format` is given."""
        return "tailrace"

    def _options(self) -> ReadOptions:
        return parse_options(dict(self.options))

    def schema(self) -> StructType:
        """Columns of the first topic; all topics of one read have the same. Raises UnknownTopicError, SchemaMismatchError."""
        options = self._options()
        with Admin(options.bootstrap, connect_timeout_ms=CONNECT_TIMEOUT_MS) as admin:
            infos = load_topics(admin, options)
        first = next(iter(infos.values()))
        return from_arrow_schema(first.schema if first.typed else kafka_schema(options.include_headers), prefer_timestamp_ntz=False)

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns in `schema`, in that order."""
        return TopicReader(self._options(), schema.fieldNames())

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """`df.write`: see `spark_bridge.sink`. Raises TailraceError."""
        from spark_bridge.sink_entry import batch_sink

        return batch_sink(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """`df.writeStream`: see `spark_bridge.sink`. Raises TailraceError."""
        from spark_bridge.sink_entry import stream_sink

        return stream_sink(dict(self.options), schema)

    def streamReader(self, schema: StructType) -> NoReturn:  # noqa: N802
        """Not in this version. Raises NotSupportedError."""
        raise NotSupportedError(
            "Spark streams are not part of this version: read batches with spark.read, from startingOffsets to endingOffsets"
        )


class TopicReader(DataSourceReader):
    """A batch read. Spark pickles it before it calls `partitions`, so everything that tasks need is in their plans."""

    def __init__(self, options: ReadOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> list[InputPartition]:
        """One task for each range of a partition; the ranges are fixed here. Raises TailraceError."""
        with Admin(self._options.bootstrap, connect_timeout_ms=CONNECT_TIMEOUT_MS) as admin:
            infos = load_topics(admin, self._options)
            tasks = plan_leased(admin, self._options, infos, self._columns, f"spark-{uuid.uuid4().hex}")
        return [TopicRange(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task's range. Raises TailraceError."""
        assert isinstance(partition, TopicRange)
        return read_task(partition.task)
