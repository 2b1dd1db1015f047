"""The transaction of one micro-batch, which Spark's tasks and the driver's commit share.

    task    join(run)             first task of a run: takes the id over; others: find it owned
            Producer(branch)      writes the task's rows once, into the target topics
    driver  commit(branches)      one decision: these branches, and the number of the batch

No process lives as long as a query's batches: tasks run anywhere, and each commit has a process of
its own. So the owner of the transactional id is a name, the run of the query, and each process of
that run is the owner. A run that another one has replaced is refused for good.

The last committed batch is kept with the id, as a mark that is written with the decision. Delta's
and Iceberg's streaming sinks keep the number in their table's last commit alike.

Owner: one process of Spark.
Invariants:
- The mark of a batch is durable with the decision that commits its rows, or neither is.
- Nobody is fenced by a run that has nothing to write: it reads the mark before it takes over.
Crash: a transaction without a decision is aborted by the next run, or by its timeout.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from spark_bridge.sink.connections import borrowed
from spark_bridge.sink.messages import Mark, SharedTransaction
from spark_bridge.sink.options import CLIENT_ID
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import call_json_now
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidSettingError,
    ProducerFencedError,
    RequestTimeoutError,
    TailraceError,
    TransactionAbortedError,
    UnknownTransactionalIdError,
)
from tailrace.core.transaction_branches import FinishedBranch
from tailrace.protocol.frame import Api

TRANSACTIONAL_ID_MAX = 255
PAUSE_S = 0.01
PAUSE_MAX_S = 0.5
"""The pause before a request is repeated, doubled each time."""
_NOT_DECIDED = frozenset({ErrorCode.STORAGE_ERROR, ErrorCode.INTERNAL_ERROR}) | frozenset(
    code for code in ErrorCode if ERROR_TABLE[code].retriable
)
"""Codes after which the outcome is not known, or the appliance did nothing."""


class FencedRunError(InvalidRequestError):
    """Another run of the same query has taken over."""


def mark_in(text: str, transactional_id: str) -> Mark | None:
    """The mark of a text; None: no batch was committed. Raises InvalidRequestError."""
    if not text:
        return None
    try:
        found = json.loads(text)
        return Mark(int(found["batch"]), int(found["rows"]))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidRequestError(
            f"transactional id {transactional_id!r} belongs to another program: its metadata is "
            f"{text!r:.100}, not the mark of a Spark sink; give the query another queryId"
        ) from error


class Joined(NamedTuple):
    """The transaction, and the batch that was committed last."""

    transaction: SharedTransaction
    mark: Mark | None


def transactional_id_of(identity: str) -> str:
    """The transactional id of a sink, readable where that is short enough."""
    name = f"spark-{identity}"
    if len(name) <= TRANSACTIONAL_ID_MAX and name.isprintable():
        return name
    kind = identity.partition(":")[0]
    return f"spark-{kind}:{hashlib.sha256(identity.encode()).hexdigest()}"


@contextmanager
def transaction_client(
    bootstrap: str, identity: str, timeout_ms: int
) -> Iterator[TransactionClient]:
    """Make a client with a connection of the process for the block."""
    with borrowed(bootstrap) as connection:
        yield TransactionClient(connection, identity, timeout_ms)


class TransactionClient:
    """The requests about one sink's transactions, over a connection of the caller's."""

    def __init__(self, connection: Connection, identity: str, timeout_ms: int) -> None:
        """`timeout_ms`: longest wait for an answer."""
        self.transactional_id = transactional_id_of(identity)
        self._connection = connection
        self._timeout_ms = timeout_ms

    def is_known(self) -> bool:
        """True if the appliance has the transactional id. Raises TailraceError."""
        return self._described() is not None

    def mark(self) -> Mark | None:
        """The batch that was committed last. Raises TailraceError."""
        answer = self._described() or {}
        return mark_in(str(answer.get("metadata") or ""), self.transactional_id)

    def _described(self) -> dict[str, Any] | None:
        try:
            return self._asked(Api.DESCRIBE_TRANSACTION, {})
        except UnknownTransactionalIdError:
            return None

    def join(self, run: str, transaction_timeout_ms: int) -> Joined:
        """Become the owner with all processes of this run. The run before is fenced, and what it
        had open is aborted. Returns when readers see all that was committed before.

        Raises FencedRunError if another run has replaced this one, InvalidSettingError, and
        TailraceError.
        """
        request = {
            "timeout_ms": transaction_timeout_ms, "client_id": CLIENT_ID, "attempt": run,
            "shared": True,
        }  # fmt: skip
        try:
            answer = self._asked(Api.INIT_TRANSACTIONS, request)
        except ProducerFencedError as error:
            raise fenced(error) from error
        except InvalidRequestError as error:
            if "timeout_ms" not in error.detail:
                raise
            raise InvalidSettingError(
                f"the option transactionTimeoutMs is {transaction_timeout_ms}, and the appliance "
                f"refuses it ({error.detail}): give the option a value up to its "
                "transaction.max.timeout.ms that exceeds the time of a micro-batch, or have "
                "transaction.max.timeout.ms raised"
            ) from error
        transaction = SharedTransaction(
            self.transactional_id, *(int(answer[name]) for name in _IDENTITY)
        )
        return Joined(
            transaction, mark_in(str(answer.get("metadata") or ""), self.transactional_id)
        )

    def commit(
        self, transaction: SharedTransaction, branches: Iterable[FinishedBranch], mark: str
    ) -> None:
        """Commit these branches, with the mark, and abort all others. `mark`: "" for none.

        Raises FencedRunError, TransactionAbortedError, RequestTimeoutError while the outcome is not
        known, and TailraceError. In the first two cases nothing was committed.
        """
        request = {
            "outcome": "commit", "metadata": mark,
            "branches": [[one.producer_id, one.producer_epoch] for one in branches],
        }  # fmt: skip
        try:
            answer = self._asked(Api.END_TRANSACTION, {**_named(transaction), **request})
        except ProducerFencedError as error:
            raise fenced(error) from error
        except TransactionAbortedError as error:
            raise aborted(error) from error
        if answer.get("outcome") == "abort":
            raise aborted(TransactionAbortedError("it was aborted"))

    def abort(self, transaction: SharedTransaction) -> None:
        """Abort the transaction, if it is not decided. Raises TailraceError."""
        try:
            self._asked(Api.END_TRANSACTION, {**_named(transaction), "outcome": "abort"})
        except TailraceError as error:
            if error.code not in _OVER:
                raise

    def _asked(self, api: Api, request: dict[str, Any]) -> dict[str, Any]:
        """Ask until the appliance has decided. Raises TailraceError."""
        deadline = time.monotonic() + self._timeout_ms / 1e3
        pause_s, body = PAUSE_S, {"transactional_id": self.transactional_id, **request}
        while True:
            left_ms = max(1, int((deadline - time.monotonic()) * 1e3))
            try:
                return call_json_now(self._connection, api, body, left_ms)
            except RequestTimeoutError:
                raise
            except TailraceError as error:
                if error.code not in _NOT_DECIDED or time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(PAUSE_MAX_S, 2 * pause_s)


_IDENTITY = ("owner", "producer_id", "producer_epoch")
_OVER = frozenset(
    {
        ErrorCode.PRODUCER_FENCED, ErrorCode.TRANSACTION_ABORTED, ErrorCode.INVALID_TRANSACTION,
        ErrorCode.UNKNOWN_TRANSACTIONAL_ID,
    }
)  # fmt: skip
"""Codes for an abort of a transaction that has ended."""


def _named(transaction: SharedTransaction) -> dict[str, Any]:
    return {name: getattr(transaction, name) for name in _IDENTITY}


def fenced(error: TailraceError) -> FencedRunError:
    """The error of a run that another one has replaced."""
    return FencedRunError(
        "another run of this query has taken over, and this one may not write any more "
        f"({error.detail}): stop it, and give each query a checkpoint of its own"
    )


def aborted(error: TailraceError) -> TransactionAbortedError:
    """The error of a batch whose transaction was aborted."""
    return TransactionAbortedError(
        f"the transaction of the batch was aborted before its commit ({error.detail}), and nothing "
        "of the batch is written. If a batch takes longer than the option transactionTimeoutMs, "
        "raise that, or have smaller batches; then start the query again"
    )
