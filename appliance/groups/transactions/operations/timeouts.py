"""Time of transactional ids: timeouts of open transactions, the limit of prepared ones, and unused
ids.

Owner: the coordinator.
Invariants:
- A timeout begins with the first batch that a worker reports.
- An abort that has to wait is tried again after RETRY_NS.
Crash: a successor starts timeouts anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.base.request_validation import shown
from appliance.groups.base.timers import Timers
from appliance.groups.transactions.decider import Decider
from appliance.groups.transactions.decisions.delivery import registered
from appliance.groups.transactions.ids.ends import BY_IDLENESS, BY_LIMIT, BY_TIMEOUT
from appliance.groups.transactions.ids.expiry import IdExpiry
from appliance.groups.transactions.ids.id_table import Entry
from appliance.groups.transactions.ids.prepared_mark import due_ns, is_over, prepared_of
from appliance.groups.transactions.step import Step
from shm.messages.transaction_messages import Outcome, ProducerEpoch
from tailrace.core.errors import StorageError, TailraceError

logger = logging.getLogger(__name__)

RETRY_NS = 1_000_000_000
"""Interval between attempts to decide a timeout."""


class Timeouts:
    """The timers of all ids."""

    def __init__(
        self,
        step: Step,
        decider: Decider,
        timers: Timers[int],
        expiry: IdExpiry,
        limits: TransactionLimits,
        elapsed_ms: Callable[[], int],
    ) -> None:
        self._step = step
        self._decider = decider
        self._timers = timers
        self._expiry = expiry
        self._limits = limits
        self._elapsed_ms = elapsed_ms
        self._unread: list[ProducerEpoch] = []
        """Reports whose id could not be read from the database."""
        self._read_at_ns = 0

    def opened(self, epochs: Sequence[ProducerEpoch], now_ns: int) -> None:
        """Transactions have a first batch, perhaps of a branch. Their timeouts begin."""
        reported, self._unread = [*self._unread, *epochs], []
        for producer_id, epoch in reported:
            try:
                entry = self._step.table.of_producer(producer_id)
            except StorageError:
                self._unread.append(ProducerEpoch(producer_id, epoch))
                self._read_at_ns = now_ns + RETRY_NS
                continue
            if (
                entry is not None
                and entry.opened_ns is None
                and any(one[:2] == (producer_id, epoch) for one in registered(entry.row))
            ):
                entry.opened = (entry.row.producer_id, entry.row.epoch, now_ns)
                self._step.table.use(entry, now_ns)
                self.set(entry)

    def set(self, entry: Entry) -> None:
        """The timeout of an open transaction, or the operator's limit of a prepared one; none where
        nothing is open.
        """
        opened_ns, row = entry.opened_ns, entry.row
        if (prepared := prepared_of(row)) is not None:
            at_ns = due_ns(
                prepared, self._step.now_ns, self._elapsed_ms(), self._limits.prepared_max_ms
            )
            self._timers.set(row.id_number, at_ns)
            return
        self._timers.set(
            row.id_number, None if opened_ns is None else opened_ns + row.timeout_ms * 1_000_000
        )

    def limits_changed(self) -> None:
        """Set the timers of prepared transactions by the operator's new limit."""
        for entry in self._step.table:
            if prepared_of(entry.row) is not None:
                self.set(entry)

    def run(self, now_ns: int, last_request_ns: int) -> None:
        """Abort what is due. Timeouts count to `last_request_ns`: a commit that has arrived in time
        may wait in a lane.
        """
        if self._unread and now_ns >= self._read_at_ns:
            self.opened((), now_ns)
        for number in list(self._timers.due(last_request_ns)):
            entry = self._step.table.loaded_number(number)
            if entry is not None and (prepared := prepared_of(entry.row)) is not None:
                self.set(entry)
                if is_over(prepared, self._elapsed_ms(), self._limits.prepared_max_ms):
                    self._timers.set(number, now_ns + RETRY_NS)
                    self._try_decide(entry, BY_LIMIT)
            elif entry is not None and entry.opened_ns is not None:
                self._timers.set(number, now_ns + RETRY_NS)  # a decision removes it
                self._try_decide(entry, BY_TIMEOUT)
        if self._expiry.is_due(now_ns):
            for entry in self._expiry.step(now_ns, self._elapsed_ms()):
                self._try_decide(entry, BY_IDLENESS)

    def _try_decide(self, entry: Entry, by: str) -> None:
        name, timeout_ms = shown(entry.row.transactional_id), entry.row.timeout_ms
        try:
            self._decider.decide(entry, Outcome.ABORT, by, self._step.now_ns)
        except TailraceError as error:
            logger.debug("abort_waits id=%s by=%s reason=%r", name, by, error.detail)
        else:
            if by == BY_TIMEOUT:
                logger.warning(
                    "transaction_aborted id=%s by=timeout timeout_ms=%d", name, timeout_ms
                )
            elif by == BY_LIMIT:
                limit_ms = self._limits.prepared_max_ms
                logger.warning(
                    "prepared_transaction_aborted id=%s by=limit prepared_max_ms=%d", name, limit_ms
                )

    def next_deadline_ns(self) -> int | None:
        """Time of the next timer; None: there is none."""
        deadlines = (
            self._timers.next_ns(), self._expiry.next_deadline_ns(),
            self._read_at_ns if self._unread else None,
        )  # fmt: skip
        return min((one for one in deadlines if one is not None), default=None)

    def rolled_back(self, changed: Sequence[Entry], restored: Sequence[Entry]) -> None:
        """Set the timers of the rows as they were before the step."""
        for entry in changed:
            self._timers.set(entry.row.id_number, None)
        for entry in restored:
            self.set(entry)
