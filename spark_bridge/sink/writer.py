"""The writers that Spark calls for `df.write.format("tailrace")` and
`df.writeStream.format("tailrace")`.

    query = df.writeStream.format("tailrace").option("bootstrap", address).option(
        "topic", "totals"
    ).option("checkpointLocation", path).start()

Tasks write their rows once, into the topics themselves, as branches of one transaction
(`spark_bridge.sink.task_writer`). The driver's commit decides it (`spark_bridge.sink.commit`). A
stream's batch is committed exactly once, identified by query id and batch id, also after kills. A
batch write is one commit. Repeated after a failure it is written again, unless txnAppId and
txnVersion identify it.

Owner: Spark. `write` runs in a Python process for each task, `commit` and `abort` in one of the
driver, each with a writer of its own. They share only the commit messages.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from spark_bridge.sink.messages import WrittenTask
from spark_bridge.sink.options import SinkOptions
from tailrace.core.errors import InvalidSettingError, NotSupportedError

if TYPE_CHECKING:
    import pyarrow as pa

# The rest is imported where it is used: each process of Spark does one thing.
logger = logging.getLogger("tailrace.spark")
QUERY_ID_KEY = "sql.streaming.queryId"
BATCH_ID_KEY = "streaming.sql.batchId"
RUN_ID_KEY = "spark.jobGroup.id"
"""Spark's property with the job group of a micro-batch: the run of the query."""


def refuse_overwrite(overwrite: bool) -> None:
    """A log is appended to. Raises NotSupportedError."""
    if overwrite:
        raise NotSupportedError(
            'a topic is a log, which is appended to: use .mode("append") or .outputMode("append")'
        )


def write_task(
    options: SinkOptions,
    identity: str,
    run: str,
    batch_id: int | None,
    batches: Iterator[pa.RecordBatch],
) -> WrittenTask:
    """Write the rows of one attempt of a task. Raises TailraceError."""
    from spark_bridge.sink.task_writer import TaskWriter

    context = TaskContext.get()
    writer = TaskWriter(
        options, identity, run, 0 if context is None else context.partitionId(), batch_id
    )
    try:
        for batch in batches:
            writer.add(batch)
        return writer.finish()
    finally:
        writer.close()


def written(messages: Sequence[WriterCommitMessage | None]) -> list[WrittenTask]:
    """The messages of tasks that have ended well."""
    return [message for message in messages if isinstance(message, WrittenTask)]


def query_identity(options: SinkOptions, query_id: str | None) -> str:
    """Name of a stream's sink.

    Raises: InvalidSettingError if Spark does not say which query the sink belongs to.
    """
    chosen = options.query_id or query_id
    if not chosen:
        raise InvalidSettingError(
            "this Spark does not say which query a task belongs to (the local property "
            f"{QUERY_ID_KEY} is missing): set the option queryId to a name of the query that "
            "stays the same over its restarts"
        )
    return f"query:{chosen}"


class StreamSink(DataSourceStreamArrowWriter):
    """Writes micro-batches."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenTask:
        """Write a task's rows. Raises TailraceError."""
        context = TaskContext.get()
        query_id, run, batch_id = (
            None if context is None else context.getLocalProperty(key)
            for key in (QUERY_ID_KEY, RUN_ID_KEY, BATCH_ID_KEY)
        )
        identity = query_identity(self._options, query_id)
        if not run:
            raise InvalidSettingError(
                "this Spark does not say which run of a query a task belongs to (the local "
                f"property {RUN_ID_KEY} is missing), so two drivers of one query could not be "
                "told apart: write through foreachBatch with txnAppId and txnVersion"
            )
        return write_task(
            self._options, identity, run, int(batch_id) if batch_id else None, iterator
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit the batch, or find that it is committed. Raises TailraceError."""
        if tasks := written(messages):
            from spark_bridge.sink.commit import commit_tasks

            commit_tasks(self._options, tasks, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Abort what is not decided. The batch may be committed, although Spark aborts it."""
        logger.info("sink_batch_aborted batch=%d tasks=%d", batchId, len(messages))
        if tasks := written(messages):
            from spark_bridge.sink.commit import abort_tasks

            abort_tasks(self._options, tasks)


class BatchSink(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._identity = (
            f"job:{uuid.uuid4().hex}" if options.app_id is None else f"app:{options.app_id}"
        )
        self._run = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WrittenTask:
        """Write a task's rows. Raises TailraceError."""
        version = None if self._options.app_id is None else self._options.version
        return write_task(self._options, self._identity, self._run, version, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Commit them. Raises TailraceError."""
        if tasks := written(messages):
            from spark_bridge.sink.commit import commit_tasks

            commit_tasks(self._options, tasks, self._options.version)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Abort what is not decided."""
        from spark_bridge.sink.commit import abort_run, abort_tasks

        if tasks := written(messages):
            abort_tasks(self._options, tasks)
        elif self._options.app_id is None:
            abort_run(self._options, self._identity, self._run)


def forget_query(query_id: str, bootstrap: str | None = None) -> None:
    """Delete what the appliance keeps of a streaming query (its id, as `query.id` says, or the
    option queryId): for one that is never started again. A query that is started again from its
    checkpoint afterwards may write its last batch twice. Raises TailraceError.
    """
    from spark_bridge.sink.forget import forget

    forget(f"query:{query_id}", bootstrap)
