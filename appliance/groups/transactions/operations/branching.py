"""Branches of open transactions: the owner makes them, and each writer gets one of its own.

Owner: the coordinator.
Invariants:
- A writer gets a branch that no other attempt has, and of the current transaction alone.
- A join is answered once every worker knows its producer id: one that does not know it would refuse
  its batches for good.
"""

from __future__ import annotations

import orjson

from appliance.groups.base.messages import Requester
from appliance.groups.transactions.branches.pool import pool_of
from appliance.groups.transactions.decider import Decider
from appliance.groups.transactions.ids.fencing import ended_error
from appliance.groups.transactions.ids.id_table import Entry
from appliance.groups.transactions.requests.answers import joined
from appliance.groups.transactions.requests.branches import CreateRequest, JoinRequest
from appliance.groups.transactions.requests.waiting import Waiter
from appliance.groups.transactions.step import Step
from tailrace.core.errors import InvalidTransactionError
from tailrace.protocol.frame import Api


class Branching:
    """Requests CREATE_BRANCHES and JOIN_TRANSACTION."""

    def __init__(self, step: Step, decider: Decider) -> None:
        self._step = step
        self._decider = decider

    def create(self, requester: Requester, request: CreateRequest) -> None:
        """The owner has `request.branch_count` branches in all."""
        entry = self._open_transaction(request)
        claims = entry.claims
        needed_count = max(claims.needed_count, claims.unknown_count + request.branch_count)
        self._decider.register_branches(entry, needed_count, self._step.now_ns)
        claims.reserve(request.branch_count)
        self._step.answer(requester, orjson.dumps({"count": request.branch_count}), depends=True)

    def join(self, requester: Requester, request: JoinRequest) -> None:
        """A writer gets its branch."""
        entry = self._open_transaction(request)
        position = entry.claims.position_of(request.attempt)
        self._decider.register_branches(entry, position + 1, self._step.now_ns)
        entry.claims.claim(request.attempt)
        branch = pool_of(entry.row).producers[position]
        if self._decider.is_growing(entry):
            owner = entry.row.owner
            self._step.wait(entry, requester, Api.JOIN_TRANSACTION, owner, branch=branch)
        else:
            self._step.answer(requester, joined(branch), depends=True)

    def answer_waiter(self, entry: Entry, waiter: Waiter) -> None:
        """Answer a join that has waited, if its transaction is still open."""
        row = entry.row
        if waiter.branch in pool_of(row).registered and not row.prepared:
            assert waiter.branch is not None
            self._step.answer(waiter.requester, joined(waiter.branch))
        else:
            self._step.refuse(waiter.requester, ended_error(row, None))

    def _open_transaction(self, request: CreateRequest | JoinRequest) -> Entry:
        """The id whose current transaction this is, and takes batches. Raises TailraceError."""
        entry = self._step.entry(request.transactional_id)
        row = entry.row
        end = self._step.check_owner(entry, request)
        if (request.producer_id, request.epoch) != (row.producer_id, row.epoch):
            raise ended_error(row, end)
        if row.prepared:
            raise InvalidTransactionError("the transaction is prepared: it takes no more records")
        return entry
