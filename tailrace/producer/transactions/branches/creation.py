"""Creation of branches of an open transaction, by its owner.

Owner: one Producer. The state is changed in sections of its lock.
Invariants: a branch's number is counted before it is asked for, and so is never given twice.
"""

from __future__ import annotations

from tailrace.client.connections.steps import Steps
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import error_for
from tailrace.core.transaction_branches import TransactionBranch
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.producer.transactions.coordinator_requests import asked
from tailrace.producer.transactions.refusals import refused
from tailrace.producer.transactions.state import Call, TransactionState
from tailrace.protocol.frame import Api

_ENDS_IT = frozenset(
    {
        ErrorCode.PRODUCER_FENCED, ErrorCode.UNKNOWN_TRANSACTIONAL_ID,
        ErrorCode.INVALID_TRANSACTION, ErrorCode.TRANSACTION_ABORTED,
    }
)  # fmt: skip
"""Codes after which this producer cannot commit the transaction."""


def create_branches(
    sender_thread: SenderThread, state: TransactionState, count: int, deadline_ns: int
) -> Steps[list[TransactionBranch]]:
    """Make branches of the open transaction."""

    def add() -> int:
        sender_thread.check_usable()
        state.check(Call.BRANCHES)
        return state.add_branches(count)

    first = sender_thread.do(add)
    request = {
        "transactional_id": state.transactional_id,
        "owner": state.owner,
        "producer_id": state.producer_id,
        "producer_epoch": state.epoch,
        "count": state.branch_count,
    }
    response = yield from asked(sender_thread, Api.CREATE_BRANCHES, request, deadline_ns)
    code = response.code
    if code in _ENDS_IT:
        raise sender_thread.do(refused, state, response)
    if code is not ErrorCode.OK:
        raise error_for(code, response.detail(), response.correlation_id)
    made = (state.transactional_id, state.owner, state.producer_id, state.epoch)
    return [TransactionBranch(*made, number) for number in range(first, first + count)]
