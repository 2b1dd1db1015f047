"""`async with producer.transaction():`.

Owner: one event loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType

from tailrace.client.connections.steps import Steps
from tailrace.core.transaction_branches import FinishedBranch
from tailrace.producer.transactions.operations import Transactions


class AsyncTransactionBlock:
    """`tailrace.producer.transactions.block.TransactionBlock` for coroutines."""

    def __init__(
        self, transactions: Transactions, run_steps: Callable[[Steps[None]], Awaitable[None]]
    ) -> None:
        self._transactions = transactions
        self._run_steps = run_steps
        self.branches: Iterable[FinishedBranch] | None = None
        """The finished branches that the commit names."""

    async def __aenter__(self) -> AsyncTransactionBlock:
        await self._run_steps(self._transactions.begin_block())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if not self._transactions.is_left(kind):  # a closed producer runs no more steps
            await self._run_steps(self._transactions.leave_block(kind, self.branches))
