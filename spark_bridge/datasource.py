"""The Spark data source "tailrace": topics as DataFrames, in batch reads. Spark finds it through
`pyspark_tailrace`, without registration.

    spark.read.format("tailrace").option("kafka.bootstrap.servers", address).option(
        "subscribe", "flights"
    ).load()

Columns: those of a typed topic; for other topics those of Spark's Kafka source (key, value, topic,
partition, offset, timestamp, timestampType[, headers]). `.schema("offset bigint")` before
`.load()`, or `.option("columns", "offset")`, reads only the named columns. Filters are not pushed
down: with Spark 4.3's plan cache that gives wrong results.

Owner: Spark. It calls `schema` and `partitions` in processes of its own, and `read` in one Python
process for each task; `self` shares nothing between them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)  # fmt: skip
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    import pyarrow as pa

    from spark_bridge.source.planner import ReadTask
    from spark_bridge.source.read_options import ReadOptions

# The rest is imported where it is used: Spark imports this module in four kinds of process, most of
# which do one thing.
CONNECT_TIMEOUT_MS = 10_000


class TopicRange(InputPartition):
    """The range of one task; None: no rows. An empty list of ranges would become one partition
    without a task.
    """

    def __init__(self, task: ReadTask | None) -> None:
        super().__init__(task)
        self.task = task


class TailraceDataSource(DataSource):
    """The data source named "tailrace"."""

    @classmethod
    def name(cls) -> str:
        """Name of the format, for `spark.read.format`."""
        return "tailrace"

    def schema(self) -> StructType:
        """Columns of the first topic; all topics of one read have the same. Raises
        UnknownTopicError, SchemaMismatchError.
        """
        from spark_bridge.environment import check_here
        from spark_bridge.source.read_options import parse_options
        from spark_bridge.source.topic_columns import load_topics, spark_columns
        from tailrace.admin.admin import Admin

        check_here()
        options = parse_options(dict(self.options))
        with Admin(
            options.bootstrap, client_id=options.client_id, connect_timeout_ms=CONNECT_TIMEOUT_MS
        ) as admin:
            return spark_columns(options, load_topics(admin, options))

    def reader(self, schema: StructType) -> DataSourceReader:
        """A reader of the columns in `schema`, in that order. Raises InvalidSettingError."""
        from spark_bridge.environment import check_here
        from spark_bridge.source.read_options import check_batch_options, parse_options

        check_here()
        options = parse_options(dict(self.options))
        check_batch_options(dict(self.options), options)
        return TopicReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """`df.write`: see `spark_bridge.sink.writer`. Raises TailraceError."""
        from spark_bridge.sink.entry import batch_sink

        return batch_sink(dict(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """`df.writeStream`: see `spark_bridge.sink.writer`. Raises TailraceError."""
        from spark_bridge.sink.entry import stream_sink

        return stream_sink(dict(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """A reader of topics as a stream, of the columns in `schema`. What is wrong with the
        options it says when it is asked for the first offset.
        """
        from spark_bridge.environment import check_here
        from spark_bridge.stream.options import parse_stream_options
        from spark_bridge.stream.reader import RefusedStream, TopicStreamReader
        from tailrace.core.errors import TailraceError

        try:
            check_here()
            return TopicStreamReader(parse_stream_options(dict(self.options)), schema)
        except TailraceError as error:
            return RefusedStream(error)


class TopicReader(DataSourceReader):
    """A batch read. Spark pickles it before it calls `partitions`, so everything that tasks need is
    in their plans.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks of the read, which fixes the ranges.

        Raises: TailraceError.
        """
        from spark_bridge.source.planner import plan_leased
        from spark_bridge.source.spark_types import check_asked
        from spark_bridge.source.topic_columns import load_topics
        from tailrace.admin.admin import Admin
        from tailrace.scanning.columns import LOG_COLUMNS, arrow_schema, own_columns

        options = self._options
        with Admin(
            options.bootstrap, client_id=options.client_id, connect_timeout_ms=CONNECT_TIMEOUT_MS
        ) as admin:
            infos = load_topics(admin, options)
            for info in infos.values():
                check_asked(
                    self._schema,
                    arrow_schema((*LOG_COLUMNS, *own_columns(info.schema, typed=info.typed))),
                    info.name,
                )
            tasks = plan_leased(
                admin,
                options,
                infos,
                self._schema.fieldNames(),
                f"{options.client_id}-{uuid.uuid4().hex}",
            )
        return [TopicRange(task) for task in tasks] or [TopicRange(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task's ranges. Raises TailraceError."""
        from spark_bridge.source.reader import read_task
        from spark_bridge.source.spark_types import arrow_target, conformed

        assert isinstance(partition, TopicRange)
        if partition.task is None:
            return iter(())
        return conformed(read_task(partition.task), arrow_target(self._schema))
