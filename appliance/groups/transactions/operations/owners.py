"""Owners of transactional ids: each init makes a new one.

Owner: the coordinator.
Invariants:
- Each init raises the epoch, and gives an owner number that every later request carries.
- Repeats of one init (`attempt`) make one owner. A shared one that was replaced stays refused.
- An owner of another user than the one before gets new producer ids.
- Init is answered when no decision of the id is left, so that its owner reads all that was
  committed before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.base.messages import Requester
from appliance.groups.base.request_validation import flag_in, shown
from appliance.groups.store.transaction_rows import sharing
from appliance.groups.transactions.decider import Decider
from appliance.groups.transactions.decisions.workers import Workers
from appliance.groups.transactions.ids.ends import BY_INIT
from appliance.groups.transactions.ids.expiry import IdExpiry
from appliance.groups.transactions.ids.id_table import Entry
from appliance.groups.transactions.ids.numbers import Numbers
from appliance.groups.transactions.ids.shared_owner import check_not_replaced, replaced_after
from appliance.groups.transactions.operations.timeouts import Timeouts
from appliance.groups.transactions.requests.answers import initialized
from appliance.groups.transactions.requests.fields import (
    attempt_in,
    client_id_in,
    shared_in,
    timeout_in,
    transactional_id_in,
)
from appliance.groups.transactions.requests.prepared import check_init
from appliance.groups.transactions.requests.users import check_takeover, user_in
from appliance.groups.transactions.requests.waiting import DeferredInit
from appliance.groups.transactions.step import Step
from shm.messages.transaction_messages import Outcome
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tailrace.protocol.frame import Api


class Owners:
    """Requests INIT_TRANSACTIONS."""

    def __init__(
        self,
        step: Step,
        decider: Decider,
        timeouts: Timeouts,
        expiry: IdExpiry,
        workers: Workers,
        numbers: Numbers,
        limits: TransactionLimits,
        wall_ms: Callable[[], int],
    ) -> None:
        self._step = step
        self._decider = decider
        self._timeouts = timeouts
        self._expiry = expiry
        self._workers = workers
        self._numbers = numbers
        self._limits = limits
        self._wall_ms = wall_ms
        self.idle_ms = expiry.idle_ns // 2_000_000
        """Time without an answer after which an owner asks DESCRIBE_TRANSACTION before its next
        batch: the workers may have forgotten the id.
        """

    def init(self, requester: Requester, request: dict[str, Any], until_ns: int) -> None:
        """Handle INIT_TRANSACTIONS, which may wait until `until_ns`."""
        name = transactional_id_in(request)
        timeout_ms = timeout_in(request, self._limits.timeout_max_ms)
        client_id, attempt = client_id_in(request), attempt_in(request)
        is_shared, user = shared_in(request), user_in(request)
        self._workers.request()
        entry = self._step.table.get(name, self._step.now_ns)
        if entry is None and self._step.table.count >= self._limits.ids_max:
            raise TailraceError(
                f"there are {self._step.table.count} transactional ids, as many as "
                f"transactional.ids.max allows: {shown(name)} was not created",
                ErrorCode.INVALID_REQUEST,
            )
        if not self._numbers.has_block:
            self._step.waiting.defer(DeferredInit(requester, request, until_ns))
            return
        if entry is not None:
            check_takeover(entry.row, user, attempt)
        if entry is not None and attempt and attempt == entry.row.attempt:
            self._repeat_init(entry, requester, until_ns)
            return
        replaced = "[]" if is_shared else ""
        if entry is not None:
            check_not_replaced(entry.row, attempt)
            replaced = replaced_after(entry.row, is_shared=is_shared)
            check_init(entry.row, keeps_prepared=bool(flag_in(request, "keep_prepared")))
        wall_ms = self._wall_ms()
        if entry is None:
            entry = self._decider.create(name, self._step.now_ns)
            self._expiry.has_ids = True
        elif entry.row.prepared:
            self._decider.keep_prepared(entry)
            self._timeouts.set(entry)
        else:
            # Every init raises the epoch, also if nothing is known to be open: a batch of the
            # predecessor may be on its way.
            self._decider.decide(
                entry, Outcome.ABORT, BY_INIT, self._step.now_ns,
                renews_producers=user != entry.row.user_name,
            )  # fmt: skip
        row = entry.row
        self._step.table.change(
            entry,
            sharing(
                row._replace(
                    owner=row.ordinal,
                    owned_ms=wall_ms,
                    timeout_ms=timeout_ms,
                    client_id=client_id,
                    attempt=attempt,
                    replaced=replaced,
                    user_name=user,
                )
            ),
        )
        self._step.wait(entry, requester, Api.INIT_TRANSACTIONS, row.ordinal, until_ns)

    def _repeat_init(self, entry: Entry, requester: Requester, until_ns: int) -> None:
        """Answer the newest owner's own init again. It may come late, behind transactions of that
        owner, so it takes nothing over.
        """
        self._decider.register(entry)
        owner = entry.row.owner
        if self._step.is_unsettled(entry):
            self._step.wait(entry, requester, Api.INIT_TRANSACTIONS, owner, until_ns)
        else:
            body = initialized(entry.row, self.idle_ms)
            self._step.answer(requester, body, depends=True)

    def has_block(self) -> None:
        """Producer ids have arrived: handle the inits that wait for them."""
        for init in self._step.waiting.take_inits():
            try:
                self.init(init.requester, init.request, init.until_ns)
            except TailraceError as error:
                self._step.refuse(init.requester, error)
