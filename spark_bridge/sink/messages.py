"""Commit messages of tasks to the driver.

Owner: a task makes one, Spark carries it, the driver's commit reads it.
Invariants: a task that has written rows has a transaction and a branch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage

from spark_bridge.sink.transaction import Mark, SharedTransaction
from tailrace.core.transaction_branches import FinishedBranch


@dataclass(slots=True)
class WrittenTask(WriterCommitMessage):
    """The result of a task."""

    identity: str
    """Identity of the sink."""
    run: str
    row_count: int = 0
    transaction: SharedTransaction | None = None
    """None: the task has no rows, or its batch was committed before."""
    branch: FinishedBranch | None = None
    mark: Mark | None = None
    """The batch that was committed last when the task began."""
