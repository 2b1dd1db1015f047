"""Administration of transactions: list, describe, abort. `tailrace.Admin` has these methods.

Each call makes a request or a few, and joins their pages. A change is durable when the method
returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import Steps, operation
from tailrace.core.errors import InvalidRequestError, InvalidTransactionError
from tailrace.core.validation import name_list, whole
from tailrace.protocol.frame import Api

T = TypeVar("T")


class TransactionAdmin:
    """The methods of `Admin` for transactions."""

    _connection: Connection

    def _run_steps(self, steps: Steps[T], /) -> T:
        raise NotImplementedError

    def _call(self, api: Api, request: dict[str, Any]) -> Steps[dict[str, Any]]:
        raise NotImplementedError

    @operation
    def list_transactions(
        self, states: str | Iterable[str] | None = None
    ) -> Steps[dict[str, dict[str, Any]]]:
        """Transactional ids, ascending, all or those in these states: id -> a dict with

        - `transactional_id`, `client_id` (of its producer), `producer_id`, `producer_epoch`
        - `state`: "empty", "ongoing", "committing", "aborting" or "prepared"
        - `open_ms`: the age of the open transaction, or None
        - `timeout_ms`: the age at which it is aborted
        """
        chosen = None if states is None else name_list("states", states)
        found: dict[str, dict[str, Any]] = {}
        after: str | None = ""
        while after is not None:
            answer = yield from self._call(
                Api.LIST_TRANSACTIONS, {"states": chosen, "next": after or None}
            )
            found.update((row["transactional_id"], row) for row in answer["transactions"])
            after = answer.get("next")
        return found

    @operation
    def transaction_totals(self) -> Steps[dict[str, Any]]:
        """Figures of all transactions: `ids`, `open`, `oldest_ms` (the age of the oldest open one),
        `unsettled` (decisions that are being carried out), and since the process of groups has
        started `commits`, `aborts`, `fenced` (refused requests of former owners) and
        `decision_seconds`. Empty if there was never a group or a transactional id.
        """
        answer = yield from self._call(Api.LIST_TRANSACTIONS, {"states": ["prepared"]})
        return dict(answer.get("totals", {}))

    @operation
    def describe_transactions(
        self, transactional_ids: str | Iterable[str]
    ) -> Steps[dict[str, dict[str, Any]]]:
        """All properties of transactional ids (one, or several): id -> what `list_transactions`
        returns for it, and

        - `owned_ms`: when its producer took it over, by the wall clock, ms
        - `last`: the end of its newest transaction, or None: `outcome` ("commit" or "abort"), `by`
          ("producer", "init", "timeout", "operator" or "idleness"), `wall_ms`, `producer_id`,
          `producer_epoch`
        - `metadata`: the text that its last commit with one has left, or ""
        - `workers_pending`: names of the workers that have not carried out its ends yet

        Raises UnknownTransactionalIdError.
        """
        described = {}
        for name in name_list("transactional_ids", transactional_ids):
            described[name] = yield from self._call(
                Api.DESCRIBE_TRANSACTION, {"transactional_id": name}
            )
        return described

    @operation
    def abort_transaction(
        self,
        transactional_id: str | None = None,
        *,
        producer_id: int | None = None,
        producer_epoch: int | None = None,
    ) -> Steps[None]:
        """Abort the open transaction of an id. Its producer gets TransactionAbortedError, and may
        begin the next one. A hanging transaction without an id is named by its `producer_id` and
        `producer_epoch`. Raises UnknownTransactionalIdError, InvalidRequestError.
        """
        if (transactional_id is None) == (producer_id is None) or (
            transactional_id is not None and producer_epoch is not None
        ):
            raise InvalidRequestError("give a transactional_id, or a producer_id with its epoch")
        if transactional_id is not None:
            (name,) = name_list("transactional_id", transactional_id)
            request: dict[str, Any] = {"transactional_id": name}
        else:
            request = {
                "producer_id": whole("producer_id", producer_id, 0, (1 << 63) - 1),
                "producer_epoch": whole("producer_epoch", producer_epoch, 0, (1 << 15) - 1),
            }
        yield from self._call(Api.ABORT_TRANSACTION, request)

    @operation
    def commit_transaction(self, transactional_id: str) -> Steps[None]:
        """Commit the prepared transaction of an id, whichever program has prepared it, and whatever
        became of its producer since. `abort_transaction` aborts it. Raises
        UnknownTransactionalIdError, InvalidTransactionError when the id has no prepared
        transaction.
        """
        (name,) = name_list("transactional_id", transactional_id)
        request = {"transactional_id": name}
        prepared = (yield from self._call(Api.DESCRIBE_TRANSACTION, request))["prepared"]
        if prepared is None:
            raise InvalidTransactionError(
                f"{name!r} has no prepared transaction: describe_transactions() or `tailrace "
                "transaction describe` says how its last one ended"
            )
        yield from self._call(
            Api.END_TRANSACTION,
            {
                **request,
                "producer_id": prepared["producer_id"],
                "producer_epoch": prepared["producer_epoch"],
                "outcome": "commit",
                "by_id": True,
            },
        )

    @operation
    def find_hanging_transactions(self) -> Steps[list[dict[str, Any]]]:
        """Open transactions that nothing will end: of no known transactional id, or open for
        longer than their timeout. Dicts with `transactional_id` (or None), `producer_id`,
        `producer_epoch`, `open_ms`, `reason` and `workers`.
        """
        answer = yield from self._call(Api.LIST_TRANSACTIONS, {"hanging": True})
        return list(answer["transactions"])
