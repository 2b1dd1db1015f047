"""The writers that Spark calls for `df.write.format("tailrace")` and
`df.writeStream.format("tailrace")`.

    query = df.writeStream.format("tailrace").option("bootstrap", address).option(
        "topic", "totals"
    ).option("checkpointLocation", path).start()

Tasks stage their rows in the appliance (`spark_bridge.sink.staging`), where no reader sees them.
The driver's commit publishes them (`spark_bridge.sink.commit`). A stream's batch is published
exactly once, identified by query id and batch id, also after kills. A batch write is published by
one commit. Repeated after a failure it is written again, unless txnAppId and txnVersion identify
it.

Owner: Spark. `write` runs in a Python process for each task, `commit` and `abort` in one of the
driver, each with a writer of its own. They share only the commit messages.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from spark_bridge.sink.commit import Committer, crash_point
from spark_bridge.sink.decision_log import DecisionLog, MemoryLog, TopicLog
from spark_bridge.sink.options import SinkOptions
from spark_bridge.sink.staging import Staged, Stager, log_topic, stage_prefix
from tailrace.admin.admin import Admin
from tailrace.core.errors import InvalidSettingError, NotSupportedError, TailraceError

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("tailrace.spark")
QUERY_ID_KEY = "sql.streaming.queryId"
RUN_ID_KEY = "spark.jobGroup.id"
"""Spark's property with the job group of a micro-batch: the run of the query."""


@dataclass(slots=True)
class StagedTask(WriterCommitMessage):
    """A task's commit message to the driver."""

    identity: str
    """Identity of the sink."""
    run: str
    staged: Staged


def refuse_overwrite(overwrite: bool) -> None:
    """A log is appended to. Raises NotSupportedError."""
    if overwrite:
        raise NotSupportedError(
            'a topic is a log, which is appended to: use .mode("append") or .outputMode("append")'
        )


def stage_task(
    options: SinkOptions, identity: str, run: str, batches: Iterator[pa.RecordBatch]
) -> StagedTask:
    """The rows of one task. Raises TailraceError."""
    context = TaskContext.get()
    stager = Stager(options, identity, 0 if context is None else context.partitionId())
    try:
        for batch in batches:
            stager.add(batch)
        return StagedTask(identity, run, stager.finish())
    finally:
        stager.close()


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

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        """Stage a task's rows. Raises TailraceError."""
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(QUERY_ID_KEY)
        run = None if context is None else context.getLocalProperty(RUN_ID_KEY)
        return stage_task(
            self._options, query_identity(self._options, query_id), run or "", iterator
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Publish the batch, or find that it is published. Raises TailraceError."""
        tasks = [message for message in messages if isinstance(message, StagedTask)]
        if tasks:
            crash_point("after_staging", batchId)
            commit_staged(self._options, tasks, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing. The next batch deletes rows that were staged and not published. The batch may
        be published, although Spark aborts it.
        """
        logger.info("sink_batch_aborted batch=%d tasks=%d", batchId, len(messages))


class BatchSink(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._identity = (
            f"job:{uuid.uuid4().hex}" if options.app_id is None else f"app:{options.app_id}"
        )
        self._run = uuid.uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedTask:
        """Stage a task's rows. Raises TailraceError."""
        return stage_task(self._options, self._identity, self._run, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish them. Raises TailraceError."""
        tasks = [message for message in messages if isinstance(message, StagedTask)]
        try:
            if tasks:
                crash_point("after_staging", self._options.version)
                commit_staged(self._options, tasks, self._options.version)
        finally:
            self._drop()

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Drop what is staged."""
        self._drop()

    def _drop(self) -> None:
        """Drop the staged rows of a job without a name; a later run may have to finish those of a
        named job.

        An error is only logged: a job whose rows are published must not fail, for it would be run
        again.
        """
        if self._options.app_id is None:
            try:
                forget(self._identity, self._options.bootstrap)
            except TailraceError as error:
                logger.warning(
                    "sink_stage_left prefix=%s reason=%r",
                    stage_prefix(self._identity),
                    error.detail,
                )


def commit_staged(options: SinkOptions, tasks: Sequence[StagedTask], batch_id: int) -> bool:
    """The driver's commit; False: the batch was published before. Raises TailraceError."""
    identity = tasks[0].identity
    committer = Committer(options.bootstrap, options.publish_timeout_ms)
    try:
        log: DecisionLog
        if identity.startswith("job:"):
            log = MemoryLog()
        else:
            is_of_query = identity.startswith("query:")
            log = TopicLog(
                committer.admin,
                committer.log_sender,
                log_topic(identity),
                committer.sources.remote,
                is_of_query=is_of_query,
            )
        return committer.commit(log, tasks[0].run, batch_id, [task.staged for task in tasks])
    finally:
        committer.close()


def forget_query(query_id: str, bootstrap: str | None = None) -> None:
    """Delete what the appliance keeps of a streaming query (its id, as `query.id` says, or the
    option queryId): for one that is never started again. A query that is started again from its
    checkpoint afterwards may write its last batch twice. Raises TailraceError.
    """
    forget(f"query:{query_id}", bootstrap)


def forget(identity: str, bootstrap: str | None) -> None:
    """Delete the log and the staging topics of a sink. Raises TailraceError."""
    with Admin(bootstrap) as admin:
        names = [
            name
            for name in admin.partition_counts(internal=True)
            if name == log_topic(identity) or name.startswith(stage_prefix(identity))
        ]
        if names:
            admin.delete_topics(names)
