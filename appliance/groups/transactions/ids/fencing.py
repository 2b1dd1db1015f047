"""Sentences for producers that lost their transactional id or their transaction: by whom, since
when, and how it ended.

Owner: none; pure functions.
"""

from __future__ import annotations

import datetime as dt

from appliance.groups.base.request_validation import shown
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.transactions.ids.ends import (
    BY_IDLENESS,
    BY_INIT,
    BY_LIMIT,
    BY_OPERATOR,
    BY_TIMEOUT,
    End,
)
from tailrace.core.errors import TailraceError, TransactionAbortedError

_CAUSES = {
    BY_INIT: "by a producer that took over the transactional id",
    BY_OPERATOR: "by an operator",
    BY_IDLENESS: "because the transactional id was not used for long",
    BY_LIMIT: "since it was prepared for longer than transaction.prepared.max.ms",
}


def moment(wall_ms: int) -> str:
    """A wall clock's time for people."""
    return (
        dt.datetime.fromtimestamp(wall_ms / 1000, dt.UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def fenced_sentence(row: TransactionalIdRow, end: End | None) -> str:
    """The reason for refusing a former owner. `end`: of the transaction that it asks about."""
    by_whom = f"the producer {shown(row.client_id)}" if row.client_id else "another producer"
    sentence = (
        f"{by_whom} has taken over the transactional id {shown(row.transactional_id)} at "
        f"{moment(row.owned_ms)}"
    )
    if end is None:
        return f"{sentence}; the outcome of the transaction asked about is not known here"
    done = "committed" if end.name == "commit" else "aborted"
    return f"{sentence}; the transaction was {done} at {moment(end.wall_ms)}"


def aborted_sentence(row: TransactionalIdRow, end: End) -> str:
    """The reason why the current owner's transaction is aborted."""
    cause = _CAUSES.get(end.by, "by its producer")
    if end.by == BY_TIMEOUT:
        cause = f"since it was open for longer than its timeout, {row.timeout_ms} ms"
    return f"the transaction was aborted at {moment(end.wall_ms)} {cause}"


def ended_error(row: TransactionalIdRow, end: End | None) -> TailraceError:
    """The error for requests about branches of a transaction that is over."""
    if end is None:
        return TransactionAbortedError("the transaction of the branch has ended")
    if end.name == "commit":
        return TransactionAbortedError(
            f"the transaction of the branch was committed at {moment(end.wall_ms)}, with the "
            "branches that its owner had named by then"
        )
    return TransactionAbortedError(aborted_sentence(row, end))
