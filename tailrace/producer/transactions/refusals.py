"""Errors of a commit that was not made, and the state that each leaves.

Owner: one Producer. Called in sections of its lock.
Invariants: after a refusal the transaction can only be aborted, or its owner is fenced.
"""

from __future__ import annotations

from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ProducerFencedError,
    TailraceError,
    TransactionAbortedError,
    UnknownTransactionalIdError,
    error_for,
)
from tailrace.producer.transactions.coordinator_requests import following_in
from tailrace.producer.transactions.state import TransactionState
from tailrace.protocol.frame import JSON_MAX_BYTES
from tailrace.protocol.session import Response


def refused(state: TransactionState, response: Response) -> TailraceError:
    """The error of a commit that the appliance has refused."""
    code, detail = response.code, response.detail()
    if code is ErrorCode.PRODUCER_FENCED:
        state.fence(detail)
        return ProducerFencedError(detail)
    error = error_for(code, detail)
    if code in (ErrorCode.OK, ErrorCode.TRANSACTION_ABORTED):
        error = TransactionAbortedError(detail or "the transaction was aborted")
        state.fail(error, following=following_in(response))
        return error
    state.fail(error)
    if code is ErrorCode.UNKNOWN_TRANSACTIONAL_ID:
        return UnknownTransactionalIdError(
            "the outcome of the commit cannot be found out: the appliance does not know "
            f"transactional_id {state.transactional_id!r} any more; call abort_transaction() "
            "before the next transaction"
        )
    if code is ErrorCode.INVALID_TRANSACTION:
        return error
    refusal = TransactionAbortedError(f"the transaction cannot be committed: {error.detail}")
    refusal.__cause__ = error
    return refusal


def too_large(state: TransactionState, size: int) -> TailraceError:
    """The error of a commit that no request can carry."""
    cause = error_for(
        ErrorCode.REQUEST_TOO_LARGE,
        f"its offsets, acknowledgements and branches take {size} bytes; the limit is "
        f"{JSON_MAX_BYTES}. Commit more often, or with less metadata",
    )
    state.fail(cause)
    error = TransactionAbortedError(f"the transaction cannot be committed: {cause.detail}")
    error.__cause__ = cause
    return error
