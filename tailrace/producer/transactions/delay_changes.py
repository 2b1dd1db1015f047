"""Cancels and reschedules of delayed records within a transaction.

The appliance writes them to the delay logs at once, as part of the transaction, and they take
effect with its commit.

Owner: one Producer.
Invariants:
- A request has the number of its change, so the appliance knows a repeated one.
- When it is not known which changes are part of the transaction, it can only be aborted.
Crash: a call that is interrupted at a wait fails the transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.steps import Steps, call_json
from tailrace.client.records.delay_changes import requests_of, results_of
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    TailraceError,
    TransactionAbortedError,
    error_for,
)
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.producer.transactions.state import Call, TransactionState
from tailrace.protocol.frame import Api


def change_delays(
    settings: ProducerSettings,
    sender_thread: SenderThread,
    state: TransactionState,
    changes: Mapping[str, int | None],
    topic: str | None,
) -> Steps[dict[str, Any]]:
    """Have the changes go with the commit. Returns for each delay_id the new one, None if it is
    cancelled, or its error.
    """

    def begin() -> dict[str, int]:
        sender_thread.check_usable()
        state.check(Call.DELAYS)
        if sender_thread.connection.version(Api.CHANGE_DELAYS) == 1:
            raise error_for(
                ErrorCode.UNSUPPORTED_VERSION,
                "the appliance cannot cancel or reschedule delayed records within a transaction: "
                "upgrade it, or use Admin.cancel_delays(), which acts at once",
            )
        state.is_empty = False  # from now on the appliance may have something of it
        state.delay_change_count += 1
        return {
            "producer_id": state.producer_id,
            "producer_epoch": state.epoch,
            "number": state.delay_change_count,
        }

    results: dict[str, Any] = {}
    for request in requests_of(changes, topic):
        request["transaction"] = sender_thread.do(begin)
        try:
            answer = yield from call_json(
                sender_thread.connection,
                Api.CHANGE_DELAYS,
                request,
                settings.max_block_ms,
                guard=sender_thread.use_connection,
            )
            results |= results_of(request, answer)
        except TailraceError as error:
            if results or not isinstance(error, InvalidRequestError):  # else nothing was changed
                sender_thread.do(state.fail, error)
            raise
        except BaseException:
            sender_thread.do(state.fail, TransactionAbortedError(_INTERRUPTED))
            raise
    return results


_INTERRUPTED = (
    "a change of delayed records was interrupted, so it is not known if it is part of the "
    "transaction: abort it"
)
