"""The state of a producer that writes a branch of another producer's transaction.

    OPEN --finish_branch--> FINISHING --everything is acknowledged--> FINISHED
      '-- a record failed, or the transaction has ended --> FAILED

Owner: a Producer. Changed under its lock.
Invariants:
- Producer id and epoch come from the appliance, and belong to this writer alone.
- Outside of OPEN no batch takes records.
Crash: as `tailrace.producer.transactions.state`: each change ends with a straight line of
    assignments, and may be made twice.
"""

from __future__ import annotations

from enum import Enum
from uuid import uuid4

from tailrace.core.errors import InvalidTransactionError, TailraceError, TransactionAbortedError
from tailrace.core.transaction_branches import FinishedBranch, TransactionBranch
from tailrace.format.record_batch.batch_header import NO_PRODUCER
from tailrace.producer.batches.producer_batch import ProducerBatch


class BranchPhase(Enum):
    """The state; see the module's docstring. A failed branch is FAILED in any phase."""

    OPEN = "the branch takes records"
    FINISHING = "another thread or task is in finish_branch()"
    FINISHED = "the branch is finished"


class BranchState:
    """The state machine. Nothing here waits, or uses the connection."""

    def __init__(self, branch: TransactionBranch) -> None:
        self.branch = branch
        self.attempt = uuid4().hex
        """Names this writer in its requests."""
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.is_empty = True
        """True if the branch has no record."""
        self.failure: TailraceError | None = None
        self.failed_where = ""
        self.finished: FinishedBranch | None = None
        self.caller: object | None = None
        """The `finish_branch` that runs, None if there is none."""

    @property
    def phase(self) -> BranchPhase:
        """The present phase. A `finish_branch` that was interrupted leaves it OPEN."""
        if self.finished is not None:
            return BranchPhase.FINISHED
        return BranchPhase.OPEN if self.caller is None else BranchPhase.FINISHING

    def check_send(self) -> None:
        """Raise unless a record may be sent: TransactionAbortedError, InvalidTransactionError."""
        self.check_failure()
        phase = self.phase
        if phase is not BranchPhase.OPEN:
            raise InvalidTransactionError(
                f"send() does not fit: {phase.value}, and takes no more records; give another "
                "producer a branch of its own"
            )

    def check_failure(self) -> None:
        """Raise if the branch can never be finished."""
        if self.failure is not None:
            raise self.failed_error() from self.failure

    def failed_error(self) -> TailraceError:
        """The error of a branch that can never be finished."""
        failure = self.failure
        assert failure is not None
        if not self.failed_where:
            return type(failure)(failure.detail, failure.code)
        return TransactionAbortedError(
            f"the branch cannot be finished: a record of {self.failed_where} failed: "
            f"{failure.detail}; write everything again in another branch"
        )

    def enter(self, caller: object) -> None:
        """Begin to finish. Raises InvalidTransactionError while another one runs."""
        if self.caller is not None:
            raise InvalidTransactionError(BranchPhase.FINISHING.value)
        self.caller = caller

    def joined(self, producer_id: int, epoch: int) -> None:
        """The branch has this producer id and epoch."""
        self.epoch = epoch
        self.producer_id = producer_id

    def fail(self, error: TailraceError, where: str = "") -> None:
        """The branch can never be finished. The first failure counts."""
        if self.failure is None and self.finished is None:
            self.failed_where = where
            self.failure = error

    def on_failed_batch(self, batch: ProducerBatch) -> None:
        """A batch has failed."""
        if batch.error is not None:
            self.fail(batch.error, f"{batch.info.name}-{batch.partition}")
