"""`with producer.transaction():`, for producers of threads.

Owner: one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from tailrace.client.connections.steps import Steps
from tailrace.core.transaction_branches import FinishedBranch
from tailrace.producer.transactions.operations import Transactions


class TransactionBlock:
    """A block that begins a transaction, and commits it at its end. A block that raises aborts it.

    If the commit raises TransactionAbortedError, the transaction was aborted, and the block may be
    repeated as a whole.

        with producer.transaction() as transaction:
            branches = producer.create_transaction_branches(8)
            transaction.branches = run_everywhere(branches)     # what each finish_branch() returned
    """

    def __init__(self, transactions: Transactions, run_steps: Callable[[Steps[None]], Any]) -> None:
        self._transactions = transactions
        self._run_steps = run_steps
        self.branches: Iterable[FinishedBranch] | None = None
        """The finished branches that the commit names."""

    def __enter__(self) -> TransactionBlock:
        self._run_steps(self._transactions.begin_block())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._run_steps(self._transactions.leave_block(kind, self.branches))
