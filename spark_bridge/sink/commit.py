"""The driver's commit of one batch: one decision, which names the branches of the tasks whose
results Spark has taken, and holds the number of the batch.

Branches of failed, repeated and speculative attempts are not named, so the same decision aborts
them. A batch that comes again after a failure is found in the mark of the last decision, and its
new rows are aborted, if its tasks have written any.

This module runs in a process of the driver's own, which Spark may use for many batches. It imports
neither pyarrow nor numpy.

Owner: one commit, in a process of the Spark driver.
Invariants:
- A batch is committed once, however often it comes.
- A stream's batch below the last committed one is refused.
Crash: before the decision nothing of the batch is ever read; after it the mark says that it is
done.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from spark_bridge.sink.crash_points import AFTER_DECISION, BEFORE_DECISION, crash_point
from spark_bridge.sink.messages import Mark, SharedTransaction, WrittenTask
from spark_bridge.sink.options import SinkOptions
from spark_bridge.sink.transaction import (
    FencedRunError,
    TransactionClient,
    transaction_client,
)
from tailrace.core.errors import InvalidRequestError, TailraceError, TransactionAbortedError

logger = logging.getLogger("tailrace.spark")
UNKNOWN_ROWS = -1
DIFFERS = (
    "nothing of it is written. Rows may be missing if the query's source does not give the "
    "same rows again, or if its checkpoint is a copy"
)


def commit_tasks(options: SinkOptions, tasks: Sequence[WrittenTask], batch_id: int) -> bool:
    """Commit a batch; False: it was committed before. Raises FencedRunError, TailraceError."""
    if not any(task.row_count for task in tasks):
        return True  # a repetition has no rows either
    with _client(options, tasks[0].identity) as client:
        return _Commit(options, tasks, batch_id, client).run()


def abort_tasks(options: SinkOptions, tasks: Sequence[WrittenTask]) -> None:
    """Abort what these tasks have written, if it is not decided: readers need not wait for the
    transaction's timeout. A failure is only logged.
    """
    found = dict.fromkeys(t.transaction for t in tasks if t.transaction is not None)
    if found:
        with _client(options, tasks[0].identity) as client:
            for transaction in found:
                try:
                    client.abort(transaction)
                except TailraceError as error:
                    _note_failure(client, error)


def abort_run(options: SinkOptions, identity: str, run: str) -> None:
    """The same for a job of which no task has ended, by its name, which no other job has."""
    with _client(options, identity) as client:
        try:
            if client.is_known():
                client.abort(client.join(run, options.transaction_timeout_ms).transaction)
        except TailraceError as error:
            _note_failure(client, error)


def _client(options: SinkOptions, identity: str) -> AbstractContextManager[TransactionClient]:
    return transaction_client(options.bootstrap, identity, options.publish_timeout_ms)


def _note_failure(client: TransactionClient, error: TailraceError) -> None:
    logger.warning("sink_abort_failed id=%s reason=%r", client.transactional_id, error.detail)


class _Commit:
    """One commit."""

    def __init__(
        self,
        options: SinkOptions,
        tasks: Sequence[WrittenTask],
        batch_id: int,
        client: TransactionClient,
    ) -> None:
        self._options = options
        self._tasks = tasks
        self._batch_id = batch_id
        self._client = client
        self._identity = tasks[0].identity
        self._row_count = sum(task.row_count for task in tasks)

    def run(self) -> bool:
        """See `commit_tasks`."""
        mark = self._last_mark()
        if mark is not None and self._batch_id <= mark.batch_id:
            abort_tasks(self._options, self._tasks)
            self._note_repetition(mark)
            return False
        transaction = self._transaction()
        crash_point(BEFORE_DECISION, self._batch_id)
        is_named = not self._identity.startswith("job:")
        new_mark = Mark(self._batch_id, self._row_count).to_text() if is_named else ""
        branches = [task.branch for task in self._tasks if task.branch is not None]
        self._client.commit(transaction, branches, new_mark)
        crash_point(AFTER_DECISION, self._batch_id)
        self._await_visibility()
        return True

    def _last_mark(self) -> Mark | None:
        """The batch that was committed last. Raises TailraceError."""
        mark = max((task.mark for task in self._tasks if task.mark is not None), default=None)
        if mark is not None or self._identity.startswith("job:"):
            return mark
        from spark_bridge.sink.former_log import read_mark

        try:
            mark = read_mark(self._identity, self._options)
        except TailraceError:
            abort_tasks(self._options, self._tasks)
            raise
        if mark is None and self._batch_id > 0 and self._identity.startswith("query:"):
            logger.warning(
                "sink_batch_unknown batch=%d id=%s: the appliance knows no earlier batch of this "
                "query",
                self._batch_id,
                self._client.transactional_id,
            )
        return mark

    def _note_repetition(self, mark: Mark) -> None:
        """Raises InvalidRequestError for a stream's batch before the last."""
        if self._identity.startswith("query:") and self._batch_id < mark.batch_id:
            raise InvalidRequestError(older(self._batch_id, mark.batch_id))
        logger.info("sink_batch_repeated batch=%d committed=%d", self._batch_id, mark.batch_id)
        if self._batch_id == mark.batch_id and mark.row_count not in (
            self._row_count,
            UNKNOWN_ROWS,
        ):
            logger.warning(
                "sink_batch_differs batch=%d rows=%d committed_rows=%d: %s",
                self._batch_id,
                self._row_count,
                mark.row_count,
                DIFFERS,
            )

    def _transaction(self) -> SharedTransaction:
        """The transaction of all tasks. Raises TransactionAbortedError if they had several."""
        found = {task.transaction for task in self._tasks if task.row_count}
        transaction = next(iter(found))
        if len(found) > 1 or transaction is None:
            abort_tasks(self._options, self._tasks)
            raise TransactionAbortedError(
                f"batch {self._batch_id} has tasks of {len(found)} transactions: one was aborted "
                "while its tasks were running, by its timeout (option transactionTimeoutMs) or by "
                "another run of the query; nothing of the batch is written. Start the query again"
            )
        return transaction

    def _await_visibility(self) -> None:
        """Wait until readers see the batch, which is committed whatever happens here."""
        try:
            self._client.join(self._tasks[0].run, self._options.transaction_timeout_ms)
        except FencedRunError:
            pass  # another run has waited for it, before it got the id
        except TailraceError as error:
            logger.warning(
                "sink_batch_not_visible_yet batch=%d reason=%r", self._batch_id, error.detail
            )


def older(batch_id: int, committed: int) -> str:
    """The sentence for a stream's batch that comes after a later one was committed."""
    return (
        f"batch {batch_id} was to be written, and batch {committed} of this query is committed "
        "already. Its checkpoint is an older copy, or another query uses the checkpoint or the "
        "queryId, so the rows of this query differ from those written under its batch numbers. "
        "Start it with a checkpoint of its own, and with a queryId of its own where it has "
        "that option"
    )
