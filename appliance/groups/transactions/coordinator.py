"""The transaction coordinator: gives transactional ids their owners, and decides how transactions
end.

    INIT_TRANSACTIONS   a new owner; what was open is aborted
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
from typing import Any, NamedTuple

import orjson

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.base.messages import Answer, Requester
from appliance.groups.base.request_validation import flag_in, shown
from appliance.groups.base.timers import Timers
from appliance.groups.consumer.offset_requests import PreparedCommit
from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions.clocks import Times
from appliance.groups.transactions.counters import Counters
from appliance.groups.transactions.decider import Decider
from appliance.groups.transactions.decisions import DecisionLog
from appliance.groups.transactions.delivery import Delivery
from appliance.groups.transactions.describe import Describer
from appliance.groups.transactions.ends import (
    BY_IDLENESS,
    BY_INIT,
    BY_LIMIT,
    BY_OPERATOR,
    BY_PRODUCER,
    BY_TIMEOUT,
    OUTCOME_NAMES,
    End,
    find_end,
    was_idle,
)
from appliance.groups.transactions.expiry import IdExpiry
from appliance.groups.transactions.fencing import aborted_sentence, fenced_sentence
from appliance.groups.transactions.hanging import HangingTransactions
from appliance.groups.transactions.id_table import Entry, IdTable, damaged
from appliance.groups.transactions.numbers import Numbers
from appliance.groups.transactions.prepared import (
    PREPARE,
    DecideRequest,
    PrepareRequest,
    check_end,
    check_init,
    decide_in,
    described,
    due_ns,
    is_by_id,
    is_over,
    prepare_in,
    prepared_of,
)
from appliance.groups.transactions.requests import (
    EndRequest,
    attempt_in,
    client_id_in,
    end_in,
    owner_in,
    producer_in,
    timeout_in,
    transactional_id_in,
)
from appliance.groups.transactions.waiting import DeferredInit, Waiter, Waiting
from appliance.groups.transactions.workers import Workers
from shm.transaction_messages import Outcome, ProducerEpoch
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    InvalidRequestError,
    InvalidTransactionError,
    ProducerFencedError,
    TailraceError,
    UnknownTransactionalIdError,
    error_for,
)
from tailrace.protocol.frame import Api
from tailrace.protocol.messages import encode_error

logger = logging.getLogger(__name__)

WAIT_NS = 10_000_000_000
"""Time that a request waits for the workers, or for producer ids. A front waits longer."""
RETRY_NS = 1_000_000_000
"""Interval between attempts to decide a timeout."""


class OffsetCommits(NamedTuple):
    """The commits of groups, as `GroupService` has them."""

    prepare: Callable[[dict[str, Any]], PreparedCommit]
    """Checks the offsets of one group and changes nothing. Raises TailraceError."""
    apply: Callable[[PreparedCommit], None]
    prepare_acknowledgements: Callable[[dict[str, Any]], Any]
    """Checks the acknowledgements of one share member and changes nothing. Raises TailraceError."""
    apply_acknowledgements: Callable[[Any], None]


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
        self._offsets = offsets
        self._workers = workers
        self._numbers = numbers
        self._limits = limits
        self._wall_ms, self._elapsed_ms = times
        self._now_ns = now_ns
        self._rows = TransactionRows(store)
        self._answers: list[tuple[Answer, bool]] = []
        """Answers of this step, and whether they depend on a change of it."""
        self._waiting = Waiting()
        self._timers: Timers[int] = Timers()
        self.counters = Counters(monotonic_ns)
        self._table = IdTable(self._rows, now_ns)
        try:
            self._log = DecisionLog(self._rows)
        except (ValueError, TypeError, struct.error) as error:
            raise damaged(self._rows.path, error) from error
        numbers.continue_behind(self._rows.last_ordinal())
        for decided in self._log.unsettled.values():
            entry = self._table.of_number(decided.id_number, now_ns)
            if entry is not None:
                entry.unsettled_count += 1
        self._hanging = HangingTransactions()
        self._delivery = Delivery(self._table, self._log, workers, numbers, self._hanging)
        self._describer = Describer(
            self._table, self._log, self._rows, workers, self._hanging, self.counters, answer_max
        )
        self._decider = Decider(
            self._table, self._log, numbers, self._timers, self.counters, self._describer, times
        )
        self._expiry = IdExpiry(self._table, self._rows, limits, now_ns)
        self._idle_ms = self._expiry.idle_ns // 2_000_000
        """Time without an answer after which an owner asks DESCRIBE_TRANSACTION before its next
        batch: the workers may have forgotten the id.
        """
        try:
            for loaded in self._table:
                self._set_timer(loaded)
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
        self._now_ns = now_ns
        if api == Api.INIT_TRANSACTIONS:
            self._init(requester, request, now_ns + WAIT_NS)
        elif api == Api.END_TRANSACTION and request.get("outcome") == PREPARE:
            self._prepare(requester, prepare_in(request))
        elif api == Api.END_TRANSACTION and is_by_id(request):
            self._decide_by_id(requester, decide_in(request))
        elif api == Api.END_TRANSACTION:
            self._end(requester, end_in(request))
        elif api == Api.DESCRIBE_TRANSACTION:
            self._describe(requester, request)
        elif api == Api.LIST_TRANSACTIONS:
            page = self._describer.list_page(request, now_ns, self.settle)
            self._answer(requester, page, depends=True)
        elif api == Api.ABORT_TRANSACTION:
            self._abort(requester, request)
        else:
            raise InvalidRequestError(f"API {api} is not one of transactions")

    def _answer(
        self, requester: Requester, body: bytes, code: int = 0, *, depends: bool = False
    ) -> None:
        self._answers.append((Answer(requester, code, body), depends))

    def _refuse(self, requester: Requester, error: TailraceError) -> None:
        self._answer(requester, encode_error(error.detail), int(error.code))

    def _entry(self, name: str) -> Entry:
        entry = self._table.get(name, self._now_ns)
        if entry is None:
            raise UnknownTransactionalIdError(f"there is no transactional id {shown(name)}")
        return entry

    # ---- init ------------------------------------------------------------------------------------

    def _init(self, requester: Requester, request: dict[str, Any], until_ns: int) -> None:
        name = transactional_id_in(request)
        timeout_ms = timeout_in(request, self._limits.timeout_max_ms)
        client_id, attempt = client_id_in(request), attempt_in(request)
        self._workers.request()
        entry = self._table.get(name, self._now_ns)
        if entry is None and self._table.count >= self._limits.ids_max:
            raise TailraceError(
                f"there are {self._table.count} transactional ids, as many as "
                f"transactional.ids.max allows: {shown(name)} was not created",
                ErrorCode.INVALID_REQUEST,
            )
        if not self._numbers.has_block:
            self._waiting.defer(DeferredInit(requester, request, until_ns))
            return
        if entry is not None and attempt and attempt == entry.row.attempt:
            self._repeat_init(entry, requester, until_ns)
            return
        wall_ms = self._wall_ms()
        if entry is not None:
            check_init(entry.row, keeps_prepared=bool(flag_in(request, "keep_prepared")))
        if entry is None:
            entry = self._decider.create(name, self._now_ns)
            self._expiry.has_ids = True
        elif entry.row.prepared:
            self._decider.keep_prepared(entry)
            self._set_timer(entry)
        else:
            # Every init raises the epoch, also if nothing is known to be open: a batch of the
            # predecessor may be on its way.
            self._decider.decide(entry, Outcome.ABORT, BY_INIT, self._now_ns)
        row = entry.row
        self._table.change(
            entry,
            row._replace(
                owner=row.ordinal,
                owned_ms=wall_ms,
                timeout_ms=timeout_ms,
                client_id=client_id,
                attempt=attempt,
            ),
        )
        self._wait(entry, requester, Api.INIT_TRANSACTIONS, row.ordinal, until_ns)

    def _repeat_init(self, entry: Entry, requester: Requester, until_ns: int) -> None:
        """Answer the newest owner's own init again. It may come late, behind transactions of that
        owner, so it takes nothing over.
        """
        self._decider.register(entry)
        owner = entry.row.owner
        if self._is_unsettled(entry):
            self._wait(entry, requester, Api.INIT_TRANSACTIONS, owner, until_ns)
        else:
            self._answer(requester, self._initialized(entry.row), depends=True)

    def _initialized(self, row: TransactionalIdRow) -> bytes:
        """The answer to a new owner."""
        body = {**following(row), "owner": row.owner, "prepared": described(row),
                "idle_ms": self._idle_ms}  # fmt: skip
        return orjson.dumps(body)

    def _wait(
        self, entry: Entry, requester: Requester, api: int, owner: int, until_ns: int = 0,
        outcome: Outcome = Outcome.ABORT,
    ) -> None:  # fmt: skip
        """Answer when no decision of the id is left."""
        waiter = Waiter(requester, api, owner, until_ns or self._now_ns + WAIT_NS, outcome)
        self._waiting.add(entry.row.id_number, waiter)

    # ---- end -------------------------------------------------------------------------------------

    def _end(self, requester: Requester, request: EndRequest) -> None:
        entry = self._entry(request.transactional_id)
        row = entry.row
        end = find_end(row.ended, request.producer_id, request.epoch)
        if request.owner != row.owner:
            self._refuse_fenced(entry, end if end and end.owner == request.owner else None)
        if (request.producer_id, request.epoch) == (row.producer_id, row.epoch):
            check_end(row, request)
            commits = self._prepared(request)
            acknowledgements = self._prepared_acknowledgements(request)
            self._decider.decide(
                entry, request.outcome, BY_PRODUCER, self._now_ns, has_row=not request.is_empty
            )
            for commit in commits:
                self._offsets.apply(commit)
            for one in acknowledgements:
                self._offsets.apply_acknowledgements(one)
            self._answer_end(entry, requester, request.outcome)
        elif end is None or end.owner != request.owner:
            raise InvalidTransactionError(
                f"(producer id {request.producer_id}, epoch {request.epoch}) is not the current "
                f"transaction of {shown(request.transactional_id)}, and its outcome is not known "
                "any more"
            )
        else:
            self._repeat_end(entry, requester, request, end)

    def _prepare(self, requester: Requester, request: PrepareRequest) -> None:
        """The owner seals its transaction, which then waits for its decision."""
        entry = self._entry(request.transactional_id)
        row = entry.row
        end = find_end(row.ended, request.producer_id, request.epoch)
        if request.owner != row.owner:
            self._refuse_fenced(entry, end if end and end.owner == request.owner else None)
        if (request.producer_id, request.epoch) != (row.producer_id, row.epoch):
            self._refuse_prepare(entry, requester, end)
            return
        prepared = prepared_of(row)
        if prepared is None:
            self._decider.prepare(entry, request.tag, self._now_ns)
            self._set_timer(entry)
        elif prepared.tag != request.tag:
            raise InvalidTransactionError("the transaction is prepared already, with another tag")
        body = {"outcome": PREPARE, **following(entry.row)}
        self._answer(requester, orjson.dumps(body), depends=True)

    def _refuse_prepare(self, entry: Entry, requester: Requester, end: End | None) -> None:
        """Answer the request to prepare a transaction that is not the current one."""
        if end is None or end.owner != entry.row.owner:
            raise InvalidTransactionError("this is not the current transaction of the id")
        code, sentence = ErrorCode.TRANSACTION_ABORTED, aborted_sentence(entry.row, end)
        if end.outcome == Outcome.COMMIT:
            code = ErrorCode.INVALID_TRANSACTION
            sentence = "the transaction was committed before, it cannot be prepared"
        body = {"message": sentence, **following(entry.row), "outcome": end.name}
        self._answer(requester, orjson.dumps(body), code, depends=True)

    def _decide_by_id(self, requester: Requester, request: DecideRequest) -> None:
        """Whoever knows the id decides its prepared transaction, and gets no next epoch."""
        entry = self._entry(request.transactional_id)
        row, name = entry.row, shown(request.transactional_id)
        end = find_end(row.ended, request.producer_id, request.epoch)
        if (request.producer_id, request.epoch) == (row.producer_id, row.epoch) and row.prepared:
            self._decider.decide(entry, request.outcome, BY_OPERATOR, self._now_ns)
            logger.info(
                "prepared_transaction_decided id=%s outcome=%s by=operator",
                name,
                OUTCOME_NAMES[request.outcome],
            )
        elif end is None:
            raise InvalidTransactionError(
                f"(producer id {request.producer_id}, epoch {request.epoch}) is not a prepared "
                f"transaction of {name}: see `tailrace transaction describe`"
            )
        elif end.outcome != request.outcome:
            done = "committed" if end.outcome == Outcome.COMMIT else "aborted"
            raise InvalidTransactionError(f"the transaction of {name} was {done} before")
        body = {"outcome": OUTCOME_NAMES[request.outcome]}
        self._answer(requester, orjson.dumps(body), depends=True)

    def _prepared(self, request: EndRequest) -> list[PreparedCommit]:
        """Check the offsets of all groups at this moment. All of them are valid, or nothing is
        decided.
        """
        if request.outcome is not Outcome.COMMIT:
            return []
        commits = [self._offsets.prepare(one) for one in request.offsets]
        for commit in commits:
            for topic, partition, code, sentence in commit.refused:
                raise error_for(
                    ErrorCode(code),
                    f"the offset of {topic}-{partition} in the group {commit.name} was refused: "
                    f"{sentence}; nothing of the transaction was decided",
                )
        return commits

    def _prepared_acknowledgements(self, request: EndRequest) -> list[Any]:
        """Check the acknowledgements of all share members at this moment, as `_prepared` does the
        offsets.
        """
        if request.outcome is not Outcome.COMMIT:
            return []
        return list(map(self._offsets.prepare_acknowledgements, request.acknowledgements))

    def _repeat_end(
        self, entry: Entry, requester: Requester, request: EndRequest, end: End
    ) -> None:
        """Answer a request about a transaction that has ended: with its outcome, again."""
        self._decider.register(entry)
        if end.outcome == request.outcome:
            self._answer_end(entry, requester, request.outcome)
            return
        if end.outcome == Outcome.ABORT:
            code, sentence = ErrorCode.TRANSACTION_ABORTED, aborted_sentence(entry.row, end)
        else:
            code = ErrorCode.INVALID_TRANSACTION
            sentence = "the transaction was committed before, it cannot be aborted"
        body = {"message": sentence, **following(entry.row), "outcome": end.name}
        self._answer(requester, orjson.dumps(body), code, depends=True)

    def _answer_end(self, entry: Entry, requester: Requester, outcome: Outcome) -> None:
        """Answer after the commit. Workers that do not know a new producer id yet would refuse it
        for good, so its first use waits for them.
        """
        row = entry.row
        if row.epoch == 0 and self._is_unsettled(entry):
            self._wait(entry, requester, Api.END_TRANSACTION, row.owner, outcome=outcome)
        else:
            self._answer(requester, ended(row, outcome), depends=True)

    def _is_unsettled(self, entry: Entry) -> bool:
        """True if a decision of the id is not carried out everywhere."""
        return bool(entry.unsettled_count or entry.staged_count)

    def _refuse_fenced(self, entry: Entry, end: End | None) -> None:
        self.counters.fenced += 1
        raise ProducerFencedError(fenced_sentence(entry.row, end))

    # ---- describe, abort -------------------------------------------------------------------------

    def _describe(self, requester: Requester, request: dict[str, Any]) -> None:
        name, owner = transactional_id_in(request), owner_in(request)
        entry = self._entry(name)
        if owner is not None:
            if owner != entry.row.owner:
                self._refuse_fenced(entry, None)
            self._table.use(entry, self._now_ns)
            is_new = self._decider.register(entry)
            if is_new or (self._is_unsettled(entry) and was_idle(entry.row.ended)):
                self._wait(entry, requester, Api.DESCRIBE_TRANSACTION, owner)
                return
        self._answer(requester, self._describer.describe(entry, self._now_ns), depends=True)

    def _abort(self, requester: Requester, request: dict[str, Any]) -> None:
        """An operator ends a transaction."""
        if request.get("transactional_id") is None:
            self._abort_unknown(requester, ProducerEpoch(*producer_in(request)))
            return
        entry = self._entry(transactional_id_in(request))
        self._decider.decide(entry, Outcome.ABORT, BY_OPERATOR, self._now_ns)
        logger.info("transaction_aborted id=%s by=operator", shown(entry.row.transactional_id))
        self._answer(requester, b"{}", depends=True)

    def _abort_unknown(self, requester: Requester, asked: ProducerEpoch) -> None:
        """End a hanging transaction of no known id. No row means abort, so none is written."""
        entry = self._table.of_producer(asked.producer_id)
        if entry is not None and entry.row.epoch <= asked.epoch:
            raise InvalidRequestError(
                f"the producer id belongs to {shown(entry.row.transactional_id)}: abort that"
            )
        self._delivery.ask([asked])
        self._answer(requester, b"{}", depends=True)

    # ---- what the controller and the workers report ----------------------------------------------

    def has_block(self) -> None:
        """Producer ids have arrived: handle the inits that wait for them."""
        for init in self._waiting.take_inits():
            try:
                self._init(init.requester, init.request, init.until_ns)
            except TailraceError as error:
                self._refuse(init.requester, error)

    def opened(self, epochs: Sequence[ProducerEpoch], now_ns: int) -> None:
        """Transactions have a first batch. Their timeouts begin."""
        for producer_id, epoch in epochs:
            entry = self._table.of_producer(producer_id)
            if entry is not None and entry.row.epoch == epoch and entry.opened_ns is None:
                entry.opened = (producer_id, epoch, now_ns)
                self._table.use(entry, now_ns)
                self._set_timer(entry)

    def _set_timer(self, entry: Entry) -> None:
        """The timeout of an open transaction, or the operator's limit of a prepared one; none where
        nothing is open.
        """
        opened_ns, row = entry.opened_ns, entry.row
        if (prepared := prepared_of(row)) is not None:
            at_ns = due_ns(prepared, self._now_ns, self._elapsed_ms(), self._limits.prepared_max_ms)
            self._timers.set(row.id_number, at_ns)
            return
        self._timers.set(
            row.id_number, None if opened_ns is None else opened_ns + row.timeout_ms * 1_000_000
        )

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
        self._now_ns = now_ns
        if self._numbers.has_block:
            self.has_block()
        for number in list(self._timers.due(last_request_ns)):
            entry = self._table.loaded_number(number)
            if entry is not None and (prepared := prepared_of(entry.row)) is not None:
                self._set_timer(entry)
                if is_over(prepared, self._elapsed_ms(), self._limits.prepared_max_ms):
                    self._timers.set(number, now_ns + RETRY_NS)
                    self._try_decide(entry, BY_LIMIT)
            elif entry is not None and entry.opened_ns is not None:
                self._timers.set(number, now_ns + RETRY_NS)  # a decision removes it
                self._try_decide(entry, BY_TIMEOUT)
        if self._expiry.is_due(now_ns):
            for entry in self._expiry.step(now_ns, self._elapsed_ms()):
                self._try_decide(entry, BY_IDLENESS)
        self._refuse_late()

    def _try_decide(self, entry: Entry, by: str) -> None:
        name, timeout_ms = shown(entry.row.transactional_id), entry.row.timeout_ms
        try:
            self._decider.decide(entry, Outcome.ABORT, by, self._now_ns)
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

    def _refuse_late(self) -> None:
        """Refuse the requests that have waited too long."""
        waiters, inits = self._waiting.take_late(self._now_ns)
        for init in inits:
            self._refuse(init.requester, _not_ready("the controller has not sent producer ids yet"))
        for number, waiter in waiters:
            entry = self._table.loaded_number(number)
            pending = "" if entry is None else ", ".join(self._describer.workers_pending(entry))
            self._refuse(
                waiter.requester,
                _not_ready(
                    "the ends of earlier transactions of this id are still being carried out by "
                    f"{pending or 'a worker'}"
                ),
            )

    def next_deadline_ns(self) -> int | None:
        """Time of the next timer; None: there is none."""
        deadlines = (
            self._timers.next_ns(), self._expiry.next_deadline_ns(), self._log.next_deadline_ns(),
            self._waiting.next_deadline_ns(),
        )  # fmt: skip
        return min((one for one in deadlines if one is not None), default=None)

    # ---- the end of a step -----------------------------------------------------------------------

    def settle(self) -> None:
        """Write the rows of the step. Raises StorageError, DiskFullError."""
        self._delivery.settle()
        changed = self._table.changed
        if changed:
            self._rows.put_ids(entry.row for entry in changed)
        self._log.settle(self._now_ns)

    def kept(self) -> None:
        """The step was committed: send its decisions, and answer what has waited for earlier
        ones.
        """
        for entry in self._table.changed:
            entry.unsettled_count += entry.staged_count
            entry.staged_count = 0
        self._table.kept()
        self._waiting.kept()
        self.counters.kept()
        for number in self._delivery.kept(self._now_ns):
            free = self._table.loaded_number(number)
            if free is not None:
                for waiter in self._waiting.take(number):
                    self._answer_waiter(free, waiter)
                self._table.unload(free)

    def _answer_waiter(self, entry: Entry, waiter: Waiter) -> None:
        row = entry.row
        if waiter.owner != row.owner:
            self.counters.fenced += 1
            error = ProducerFencedError(fenced_sentence(row, None))
            self._refuse(waiter.requester, error)
        elif waiter.api == Api.INIT_TRANSACTIONS:
            self._answer(waiter.requester, self._initialized(row))
        elif waiter.api == Api.END_TRANSACTION:
            self._answer(waiter.requester, ended(row, waiter.outcome))
        else:
            self._answer(waiter.requester, self._describer.describe(entry, self._now_ns))

    def drain_answers(self) -> list[Answer]:
        """The answers of this step, after the commit or `rolled_back`."""
        answers, self._answers = [answer for answer, _ in self._answers], []
        return answers

    def rolled_back(self, now_ns: int, error: TailraceError) -> None:
        """Undo the step in memory, and refuse with `error` the requests that it has undone."""
        self._now_ns = now_ns
        body = encode_error(error.detail)
        for answer, depends in self._answers:
            if depends:
                answer.code, answer.body, answer.is_undone = int(error.code), body, True
        for waiter in self._waiting.rolled_back():
            self._answers.append((Answer(waiter.requester, int(error.code), body, True), False))
        self._delivery.rolled_back()
        self.counters.rolled_back()
        for entry in self._table.changed:
            entry.staged_count = 0
            self._timers.set(entry.row.id_number, None)
        for restored in self._table.rolled_back():
            self._set_timer(restored)


def following(row: TransactionalIdRow) -> dict[str, int]:
    """The identity that follows: what the owner uses from now on."""
    return {"producer_id": row.producer_id, "producer_epoch": row.epoch}


def ended(row: TransactionalIdRow, outcome: Outcome) -> bytes:
    """The answer to the owner of a transaction with this outcome."""
    return orjson.dumps({"outcome": OUTCOME_NAMES[outcome], **following(row)})


def _not_ready(sentence: str) -> TailraceError:
    return TailraceError(sentence, ErrorCode.NOT_READY)
