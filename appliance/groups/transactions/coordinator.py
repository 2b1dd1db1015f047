"""The transaction coordinator: gives transactional ids their owners, and decides how transactions
end.

    INIT_TRANSACTIONS   a new owner; what was open is aborted
    CREATE_BRANCHES     producers of other processes that write in the owner's transaction
    JOIN_TRANSACTION    one of these gets its branch
    END_TRANSACTION     commit or abort, with the offsets and acknowledgements of groups; or
                        prepare, which waits for either, by the owner or by the id
    timers              abort what is older than its timeout; forget unused ids

A decision raises the epoch. It is durable, with everything that belongs to it, in one SQLite commit
of the step. Only then it is sent to every worker, and answered. Workers know by themselves where
the transaction is open, and write its markers.

Owner: the process of groups, in the database of groups.
Invariants:
- Aborts are decisions too: no worker ends anything before its raised epoch is durable.
- A decision is exact and absolute: it ends one (producer id, epoch), and names what is registered
  from now on.
- Each init raises the epoch, and gives an owner number that every later request carries. A request
  of an older owner never gets an epoch. Repeats of one init (`attempt`) make one owner.
- Init is answered when no decision of the id is left, so that its owner reads all that was
  committed before.
- The offsets and acknowledgements of a transaction are checked and written with its decision.
- An id has at most UNSETTLED_MAX decisions that are not carried out. The next one waits.
Crash: a successor reads ids and decisions, sends all of them again, and starts timeouts anew.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from typing import Any

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.base.messages import Answer, Requester
from appliance.groups.base.request_validation import shown
from appliance.groups.base.timers import Timers
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions.clocks import Times
from appliance.groups.transactions.counters import Counters
from appliance.groups.transactions.decider import Decider
from appliance.groups.transactions.decisions.decision_log import DecisionLog
from appliance.groups.transactions.decisions.delivery import Delivery, registered
from appliance.groups.transactions.decisions.hanging import HangingTransactions
from appliance.groups.transactions.decisions.workers import Workers
from appliance.groups.transactions.describe import Describer
from appliance.groups.transactions.ids.ends import (
    BY_OPERATOR,
    find_end,
    was_idle,
)
from appliance.groups.transactions.ids.expiry import IdExpiry
from appliance.groups.transactions.ids.fencing import fenced_sentence
from appliance.groups.transactions.ids.id_table import Entry, IdTable, damaged
from appliance.groups.transactions.ids.numbers import Numbers
from appliance.groups.transactions.operations.branching import Branching
from appliance.groups.transactions.operations.ending import Ending, OffsetCommits
from appliance.groups.transactions.operations.owners import Owners
from appliance.groups.transactions.operations.timeouts import Timeouts
from appliance.groups.transactions.requests.answers import ended, initialized
from appliance.groups.transactions.requests.branches import create_in, join_in
from appliance.groups.transactions.requests.fields import (
    STAGE,
    end_in,
    owner_in,
    producer_in,
    stage_in,
    transactional_id_in,
)
from appliance.groups.transactions.requests.prepared import (
    PREPARE,
    decide_in,
    is_by_id,
    prepare_in,
)
from appliance.groups.transactions.requests.users import OF_OWNERS, check_owner, owners_of
from appliance.groups.transactions.requests.waiting import Waiter
from appliance.groups.transactions.step import WAIT_NS, Step
from shm.messages.lane_messages import PRODUCER_OWNERS
from shm.messages.transaction_messages import Outcome, ProducerEpoch
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    ProducerFencedError,
    TailraceError,
)
from tailrace.protocol.frame import Api

logger = logging.getLogger(__name__)


class TransactionCoordinator:
    """See the module's docstring. A step of the service calls its methods by the same names."""

    def __init__(
        self,
        store: GroupStore,
        offsets: OffsetCommits,
        workers: Workers,
        numbers: Numbers,
        limits: TransactionLimits,
        answer_max: int,
        now_ns: int,
        times: Times,
        monotonic_ns: Callable[[], int],
    ) -> None:
        """Load the ids and the decisions. Raises StorageError."""
        self._numbers = numbers
        self._rows = TransactionRows(store)
        self._table = IdTable(self._rows, now_ns, offsets.prepared)
        try:
            self._log = DecisionLog(self._rows)
        except (ValueError, TypeError, struct.error) as error:
            raise damaged(self._rows.path, error) from error
        numbers.continue_behind(self._rows.last_ordinal())
        for decided in self._log.unsettled.values():
            entry = self._table.of_number(decided.id_number, now_ns)
            if entry is not None:
                entry.unsettled_count += 1
        self.counters = Counters(monotonic_ns)
        self._hanging = HangingTransactions()
        self._delivery = Delivery(self._table, self._log, workers, numbers, self._hanging)
        self._describer = Describer(
            self._table, self._log, self._rows, workers, self._hanging, self.counters, answer_max
        )
        timers: Timers[int] = Timers()
        self._decider = Decider(
            self._table, self._log, numbers, timers, self.counters, self._describer, times
        )
        self._expiry = IdExpiry(self._table, self._rows, limits, now_ns)
        self._step = Step(self._table, self.counters, now_ns)
        self._timeouts = Timeouts(
            self._step, self._decider, timers, self._expiry, limits, times.elapsed_ms
        )
        self._owners = Owners(
            self._step, self._decider, self._timeouts, self._expiry, workers, numbers, limits,
            times.wall_ms,
        )  # fmt: skip
        self._ending = Ending(self._step, self._decider, self._timeouts, offsets)
        self._branching = Branching(self._step, self._decider)
        try:
            for loaded in self._table:
                self._timeouts.set(loaded)
        except (ValueError, TypeError) as error:
            raise damaged(self._rows.path, error) from error
        if self.is_used:
            workers.request()

    @property
    def is_used(self) -> bool:
        """True if there is a transactional id. Without one nothing of it costs anything."""
        return self._expiry.has_ids

    # ---- requests --------------------------------------------------------------------------------

    def handle(self, requester: Requester, api: int, request: dict[str, Any], now_ns: int) -> None:
        """Handle one request. Raises TailraceError for a refusal, having changed nothing."""
        self._step.now_ns = now_ns
        if api in OF_OWNERS and "user" in request:
            self._check_owner(request)
        if api == Api.INIT_TRANSACTIONS:
            self._owners.init(requester, request, now_ns + WAIT_NS)
        elif api == Api.END_TRANSACTION and request.get("outcome") == PREPARE:
            self._ending.prepare(requester, prepare_in(request))
        elif api == Api.END_TRANSACTION and request.get("outcome") == STAGE:
            self._ending.stage(requester, stage_in(request))
        elif api == Api.END_TRANSACTION and is_by_id(request):
            self._ending.decide_by_id(requester, decide_in(request))
        elif api == Api.END_TRANSACTION:
            self._ending.end(requester, end_in(request))
        elif api == Api.CREATE_BRANCHES:
            self._branching.create(requester, create_in(request))
        elif api == Api.JOIN_TRANSACTION:
            self._branching.join(requester, join_in(request))
        elif api == Api.DESCRIBE_TRANSACTION:
            self._describe(requester, request)
        elif api == Api.LIST_TRANSACTIONS:
            page = self._describer.list_page(request, now_ns, self.settle)
            self._step.answer(requester, page, depends=True)
        elif api == Api.ABORT_TRANSACTION:
            self._abort(requester, request)
        elif api == PRODUCER_OWNERS:
            self._step.answer(requester, owners_of(request, self._row_of), depends=True)
        else:
            raise InvalidRequestError(f"API {api} is not one of transactions")

    def _check_owner(self, request: dict[str, Any]) -> None:
        if request.get("owner") is not None:
            check_owner(self._step.entry(transactional_id_in(request)).row, request)

    def _row_of(self, producer_id: int) -> TransactionalIdRow | None:
        entry = self._table.of_producer(producer_id)
        return None if entry is None else entry.row

    # ---- describe, abort -------------------------------------------------------------------------

    def _describe(self, requester: Requester, request: dict[str, Any]) -> None:
        name, owner = transactional_id_in(request), owner_in(request)
        entry = self._step.entry(name)
        if owner is not None:
            if owner != entry.row.owner:
                end = None
                if request.get("producer_id") is not None:
                    end = find_end(entry.row.ended, *producer_in(request))
                self._step.refuse_fenced(entry, end if end and end.owner == owner else None)
            self._table.use(entry, self._step.now_ns)
            is_new = self._decider.register(entry)
            if is_new or (self._step.is_unsettled(entry) and was_idle(entry.row.ended)):
                self._step.wait(entry, requester, Api.DESCRIBE_TRANSACTION, owner)
                return
        self._step.answer(
            requester, self._describer.describe(entry, self._step.now_ns), depends=True
        )

    def _abort(self, requester: Requester, request: dict[str, Any]) -> None:
        """An operator ends a transaction."""
        if request.get("transactional_id") is None:
            self._abort_unknown(requester, ProducerEpoch(*producer_in(request)))
            return
        entry = self._step.entry(transactional_id_in(request))
        self._decider.decide(entry, Outcome.ABORT, BY_OPERATOR, self._step.now_ns)
        logger.info("transaction_aborted id=%s by=operator", shown(entry.row.transactional_id))
        self._step.answer(requester, b"{}", depends=True)

    def _abort_unknown(self, requester: Requester, asked: ProducerEpoch) -> None:
        """End a hanging transaction of no known id. No row means abort, so none is written."""
        entry = self._table.of_producer(asked.producer_id)
        if entry is not None and any(
            one.producer_id == asked.producer_id and one.epoch <= asked.epoch
            for one in registered(entry.row)
        ):
            raise InvalidRequestError(
                f"the producer id belongs to {shown(entry.row.transactional_id)}: abort that"
            )
        self._delivery.ask([asked])
        self._step.answer(requester, b"{}", depends=True)

    # ---- what the controller and the workers report ----------------------------------------------

    def has_block(self) -> None:
        """Producer ids have arrived: handle the inits that wait for them."""
        self._owners.has_block()

    def limits_changed(self) -> None:
        """The appliance's settings of transactions have changed."""
        self._timeouts.limits_changed()

    def opened(self, epochs: Sequence[ProducerEpoch], now_ns: int) -> None:
        """Transactions have a first batch. Their timeouts begin."""
        self._timeouts.opened(epochs, now_ns)

    def asked(self, worker: int, epochs: Sequence[ProducerEpoch], now_ns: int) -> None:
        """A worker has found open transactions that are not registered."""
        self._hanging.asked(worker, epochs, now_ns)
        self._delivery.ask(epochs)

    def workers_changed(self) -> None:
        """A worker has carried out decisions, or exists no more."""
        self._delivery.workers_changed()

    # ---- time ------------------------------------------------------------------------------------

    def step(self, now_ns: int, last_request_ns: int) -> None:
        """Run timers. Timeouts count to `last_request_ns`: a commit that has arrived in time may
        wait in a lane. Raises StorageError, DiskFullError.
        """
        self._step.now_ns = now_ns
        if self._numbers.has_block:
            self._owners.has_block()
        self._timeouts.run(now_ns, last_request_ns)
        self._refuse_late()

    def _refuse_late(self) -> None:
        """Refuse the requests that have waited too long."""
        waiters, inits = self._step.waiting.take_late(self._step.now_ns)
        for init in inits:
            self._step.refuse(
                init.requester, _not_ready("the controller has not sent producer ids yet")
            )
        for number, waiter in waiters:
            entry = self._table.loaded_number(number)
            pending = "" if entry is None else ", ".join(self._describer.workers_pending(entry))
            self._step.refuse(
                waiter.requester,
                _not_ready(
                    "the ends of earlier transactions of this id are still being carried out by "
                    f"{pending or 'a worker'}"
                ),
            )

    def next_deadline_ns(self) -> int | None:
        """Time of the next timer; None: there is none."""
        deadlines = (
            self._timeouts.next_deadline_ns(), self._log.next_deadline_ns(),
            self._step.waiting.next_deadline_ns(),
        )  # fmt: skip
        return min((one for one in deadlines if one is not None), default=None)

    # ---- the end of a step -----------------------------------------------------------------------

    def settle(self) -> None:
        """Write the rows of the step. Raises StorageError, DiskFullError."""
        self._delivery.settle()
        if changes := self._table.take_changes():
            self._rows.change_ids(changes)
        self._log.settle(self._step.now_ns)

    def kept(self) -> None:
        """The step was committed: send its decisions, and answer what has waited for earlier
        ones.
        """
        for entry in self._table.changed:
            entry.unsettled_count += entry.staged_count
            entry.staged_count = 0
        self._table.kept()
        self._step.waiting.kept()
        self.counters.kept()
        for number in self._delivery.kept(self._step.now_ns):
            free = self._table.loaded_number(number)
            if free is not None:
                for waiter in self._step.waiting.take(number):
                    self._answer_waiter(free, waiter)
                self._table.unload(free)

    def _answer_waiter(self, entry: Entry, waiter: Waiter) -> None:
        row = entry.row
        if waiter.owner != row.owner:
            self.counters.fenced += 1
            error = ProducerFencedError(fenced_sentence(row, None))
            self._step.refuse(waiter.requester, error)
        elif waiter.api == Api.INIT_TRANSACTIONS:
            self._step.answer(waiter.requester, initialized(row, self._owners.idle_ms))
        elif waiter.api == Api.END_TRANSACTION:
            self._step.answer(waiter.requester, ended(row, waiter.outcome))
        elif waiter.api == Api.JOIN_TRANSACTION:
            self._branching.answer_waiter(entry, waiter)
        else:
            self._step.answer(waiter.requester, self._describer.describe(entry, self._step.now_ns))

    def drain_answers(self) -> list[Answer]:
        """The answers of this step, after the commit or `rolled_back`."""
        return self._step.drain_answers()

    def rolled_back(self, now_ns: int, error: TailraceError) -> None:
        """Undo the step in memory, and refuse with `error` the requests that it has undone."""
        self._step.now_ns = now_ns
        self._step.rolled_back(error)
        self._delivery.rolled_back()
        self.counters.rolled_back()
        changed = self._table.changed
        for entry in changed:
            entry.staged_count = 0
        self._timeouts.rolled_back(changed, self._table.rolled_back())


def _not_ready(sentence: str) -> TailraceError:
    return TailraceError(sentence, ErrorCode.NOT_READY)
