"""Values that tasks and the driver exchange. They can be pickled.

Each process of Spark imports this module, so it imports no client.

Owner: a task makes a `WrittenTask`, Spark carries it, the driver's commit reads it.
Invariants: a task that has written rows has a transaction and a branch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from pyspark.sql.datasource import WriterCommitMessage

from tailrace.core.transaction_branches import FinishedBranch, TransactionBranch


class Mark(NamedTuple):
    """The last committed batch of a sink, as its transactional id keeps it."""

    batch_id: int
    row_count: int

    def to_text(self) -> str:
        """The text that goes with a commit."""
        return json.dumps({"batch": self.batch_id, "rows": self.row_count})


@dataclass(frozen=True, slots=True)
class SharedTransaction:
    """The current transaction of a sink, as a process of its run has joined it. Can be pickled."""

    transactional_id: str
    owner: int
    producer_id: int
    producer_epoch: int

    def branch(self) -> TransactionBranch:
        """A branch for one attempt of a task."""
        return TransactionBranch(
            self.transactional_id, self.owner, self.producer_id, self.producer_epoch, 0
        )


@dataclass(slots=True)
class WrittenTask(WriterCommitMessage):
    """The result of a task: its commit message to the driver."""

    identity: str
    """Identity of the sink."""
    run: str
    row_count: int = 0
    transaction: SharedTransaction | None = None
    """None: the task has no rows, or its batch was committed before."""
    branch: FinishedBranch | None = None
    mark: Mark | None = None
    """The batch that was committed last when the task began."""
