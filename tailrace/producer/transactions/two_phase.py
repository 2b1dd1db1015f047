"""Two-phase commit (KIP-939): a transaction is prepared, and decided by what another system has
recorded.

Owner: one Producer. The state is changed in sections of its lock.
Invariants:
- END_TRANSACTION with the outcome "prepare" is sent in PREPARING only, when every batch is
  acknowledged.
- A decision of a prepared transaction carries no content.
Crash: as `tailrace.producer.transactions.operations`.
"""

from __future__ import annotations

from typing import Any

from tailrace.client.connections.steps import Steps
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidTransactionError,
    NotReachableError,
    RequestTimeoutError,
    error_for,
)
from tailrace.core.transaction_branches import FinishedBranch, PreparedTransaction
from tailrace.producer.transactions.branches.arguments import finished_in, prepared_in, tag_of
from tailrace.producer.transactions.coordinator_requests import PREPARE, asked
from tailrace.producer.transactions.operations import Transactions
from tailrace.producer.transactions.refusals import refused
from tailrace.producer.transactions.state import Call, State
from tailrace.protocol.frame import Api


class TwoPhaseTransactions(Transactions):
    """Transactions that may be prepared."""

    def prepare(
        self, tag: Any, timeout_s: float | None, branches: Any = None
    ) -> Steps[PreparedTransaction]:
        """Seal the open transaction: it waits for its decision, whatever ends."""
        named = None if branches is None else finished_in(branches)
        return self._alone(Call.PREPARE, self._prepare(tag_of(tag), timeout_s, named))

    def _prepare(
        self, tag: str, timeout_s: float | None, branches: tuple[FinishedBranch, ...] | None
    ) -> Steps[PreparedTransaction]:
        sender_thread, state = self._sender_thread, self._state
        deadline_ns = None if timeout_s is None else self._deadline_ns(timeout_s)
        sender_thread.do(self._check_prepare)
        sender_thread.do(self._close_all, Call.PREPARE, branches)
        if state.state is State.COMMITTING:
            yield from self._acknowledged(Call.PREPARE, timeout_s, deadline_ns)
        if sender_thread.do(state.begin_prepare, tag):
            try:
                response = yield from self._end(PREPARE, deadline_ns)
            except (RequestTimeoutError, NotReachableError) as error:
                raise RequestTimeoutError(
                    "it is not known whether the transaction is prepared: call "
                    f"prepare_transaction() again, or abort_transaction() ({error.detail})"
                ) from error
            if response.code is not ErrorCode.OK:
                raise sender_thread.do(refused, state, response)
            sender_thread.do(state.is_prepared)
        prepared = state.prepared
        assert prepared is not None
        return prepared

    def _check_prepare(self) -> None:
        self._check(Call.PREPARE)
        if self._state.attached:
            raise InvalidTransactionError(
                "a transaction with acknowledgements of a share consumer cannot be prepared, since "
                "their locks expire: commit it, or abort it"
            )

    def complete(self, prepared: Any, timeout_s: float | None) -> Steps[bool]:
        """Commit the prepared transaction if it is this one, else abort it. True: this one is
        committed.
        """
        return self._alone(Call.COMPLETE, self._complete(prepared_in(prepared), timeout_s))

    def _complete(self, given: PreparedTransaction | None, timeout_s: float | None) -> Steps[bool]:
        state = self._state
        self._sender_thread.do(self._check, Call.COMPLETE)
        if given is not None and given.transactional_id != state.transactional_id:
            raise InvalidTransactionError(
                f"the prepared transaction is one of {given.transactional_id!r}, and this producer "
                f"has the transactional_id {state.transactional_id!r}"
            )
        known = state.prepared
        if known is None:
            return given is not None and (yield from self._find_committed(given, timeout_s))
        if known == given:
            yield from self._commit(timeout_s, None)
            return True
        yield from self._abort(timeout_s)
        return False

    def _find_committed(self, given: PreparedTransaction, timeout_s: float | None) -> Steps[bool]:
        """True: the transaction was committed before. Raises InvalidTransactionError if it was
        aborted, or is not known any more.
        """
        request = {
            "transactional_id": given.transactional_id,
            "producer_id": given.producer_id,
            "producer_epoch": given.producer_epoch,
            "outcome": "commit",
            "by_id": True,
        }
        response = yield from asked(
            self._sender_thread, Api.END_TRANSACTION, request, self._deadline_ns(timeout_s)
        )
        if response.code is not ErrorCode.OK:
            raise error_for(response.code, response.detail(), response.correlation_id)
        return True
