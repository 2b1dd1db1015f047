"""Decisions about transactional ids: each ends what is open, raises the epoch and registers what
comes next.

Owner: the coordinator.
Invariants:
- Every decision is a change of the id's row and a row of its own in the same commit, also an abort
  by a timeout, an init or an operator.
- A decision names one (producer id, epoch), and all that is registered from now on.
- A decision that has to wait changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from appliance.groups.base.request_validation import shown
from appliance.groups.base.timers import Timers
from appliance.groups.consumer.prepared_offsets import GroupOffsets
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.transactions.branches.pool import (
    BRANCHES_IN_ALL_MAX,
    BRANCHES_MAX,
    NO_BRANCHES,
    encoded_pool,
    pool_of,
    raised,
    with_registered,
)
from appliance.groups.transactions.branches.pool import ended as ended_branches
from appliance.groups.transactions.clocks import Times
from appliance.groups.transactions.counters import Counters
from appliance.groups.transactions.decisions.decision_log import DecisionLog, encoded
from appliance.groups.transactions.decisions.delivery import registered
from appliance.groups.transactions.describe import Describer
from appliance.groups.transactions.ids.ends import BY_IDLENESS, End, with_end
from appliance.groups.transactions.ids.id_table import Entry, IdTable
from appliance.groups.transactions.ids.numbers import Numbers
from appliance.groups.transactions.ids.prepared_mark import Prepared, encoded_mark, prepared_of
from shm.messages.transaction_messages import DecidedTransaction, Decision, Outcome, ProducerEpoch
from tailrace.core.errors import ConcurrentTransactionsError, InvalidRequestError

UNSETTLED_MAX = 32
"""Decisions of one id that are not carried out everywhere."""


class Decider:
    """See the module's docstring."""

    def __init__(
        self,
        table: IdTable,
        log: DecisionLog,
        numbers: Numbers,
        timers: Timers[int],
        counters: Counters,
        describer: Describer,
        times: Times,
    ) -> None:
        self._table = table
        self._log = log
        self._numbers = numbers
        self._timers = timers
        self._counters = counters
        self._describer = describer
        self._wall_ms, self._elapsed_ms = times

    def create(self, name: str, now_ns: int) -> Entry:
        """A new id. Its first decision ends nothing, and registers its first producer id."""
        number, ordinal = self._table.new_number(), self._numbers.new_ordinal()
        producer_id = self._numbers.new_producer_id()
        row = TransactionalIdRow(
            number, name, producer_id, 0, ordinal, ordinal, 1, self._elapsed_ms(), 0, 1, "", "[]"
        )
        entry = self._table.create(row, now_ns)
        self._stage(entry, (), has_row=True)
        return entry

    def register(self, entry: Entry) -> bool:
        """Register an idle id with the workers again. True if it was not registered."""
        row = entry.row
        if row.is_registered:
            return False
        self._check_room(entry)
        ordinal = self._numbers.new_ordinal()
        self._table.change(
            entry,
            row._replace(is_registered=1, ordinal=ordinal, used_elapsed_ms=self._elapsed_ms()),
        )
        self._stage(entry, (), has_row=True)
        return True

    def _check_room(self, entry: Entry) -> None:
        count = entry.unsettled_count + entry.staged_count
        if count >= UNSETTLED_MAX:
            pending = ", ".join(self._describer.workers_pending(entry)) or "a worker"
            raise ConcurrentTransactionsError(
                f"{count} ended transactions of {shown(entry.row.transactional_id)} are not "
                f"carried out yet, waiting for {pending}"
            )

    def decide(
        self, entry: Entry, outcome: Outcome, by: str, now_ns: int, *, has_row: bool = True,
        kept: Collection[ProducerEpoch] = (), metadata: str | None = None, staged: str = "",
        renews_producers: bool = False,
    ) -> None:  # fmt: skip
        """Decide the current transaction of an id, and register the next one. `kept`: the branches
        that have its outcome; those of a prepared one are known. The others are aborted.
        `metadata`: text that the id keeps from now on. `staged`: text that is left with the next
        transaction. `renews_producers`: what comes next has new producer ids. Raises TailraceError,
        having changed nothing, when the decision has to wait.
        """
        self._check_room(entry)
        row, pool = entry.row, pool_of(entry.row)
        if (prepared := prepared_of(row)) is not None:
            kept = prepared.branches
        count = 0 if by == BY_IDLENESS else min(entry.needed_branch_count, pool.registered_count)
        if renews_producers:
            producer_id, epoch, next_pool = self._numbers.new_producer_id(), 0, NO_BRANCHES
        else:
            producer_id, epoch = self._numbers.following(row.producer_id, row.epoch)
            next_pool = raised(pool, count, self._numbers.following)
        # The first use of a producer id waits for every worker. Who decides a prepared transaction
        # may not know what it has, and a client that calls an open one empty is mistaken.
        is_open = entry.opened_ns is not None or bool(row.prepared or pool.registered_count)
        has_row = has_row or not epoch or is_open
        end = End(row.owner, row.producer_id, row.epoch, outcome, by, self._wall_ms())
        self._table.use(entry, now_ns)
        self._table.change(
            entry,
            row._replace(
                producer_id=producer_id, epoch=epoch, ordinal=self._numbers.new_ordinal(),
                used_elapsed_ms=self._elapsed_ms(), is_registered=int(by != BY_IDLENESS),
                ended=with_end(row.ended, end), prepared="", staged=staged,
                branches=encoded_pool(next_pool),
                metadata=row.metadata if metadata is None else metadata,
            ),
            begins_transaction=True,
        )  # fmt: skip
        if any(not branch.epoch for branch in next_pool.registered):
            entry.grown_ordinal = entry.row.ordinal
        own = DecidedTransaction(row.producer_id, row.epoch, outcome)
        self._stage(entry, (own, *ended_branches(pool, outcome, kept)), has_row=has_row)
        self._counters.decided(outcome)

    def register_branches(self, entry: Entry, count: int, now_ns: int) -> None:
        """Have at least `count` branch producers registered for the current transaction. Raises
        TailraceError, having changed nothing, when that has to wait, or is too many.
        """
        pool = pool_of(entry.row)
        if count > BRANCHES_MAX:
            raise InvalidRequestError(
                f"a transaction has at most {BRANCHES_MAX} branches, those of repeated tasks "
                f"included, and {count} are asked for: write with fewer tasks"
            )
        self._table.use(entry, now_ns)
        if count <= pool.registered_count and entry.row.is_registered:
            return
        in_all = self._table.branch_count + count - pool.registered_count
        if in_all > BRANCHES_IN_ALL_MAX:
            raise InvalidRequestError(
                f"all transactions together would have {in_all} branches, and at most "
                f"{BRANCHES_IN_ALL_MAX} are possible: commit some, or write with fewer tasks"
            )
        self._check_room(entry)
        grown = with_registered(
            pool,
            max(count, pool.registered_count),
            lambda: ProducerEpoch(self._numbers.new_producer_id(), 0),
        )
        self._table.change(
            entry,
            entry.row._replace(
                ordinal=self._numbers.new_ordinal(), used_elapsed_ms=self._elapsed_ms(),
                is_registered=1, branches=encoded_pool(grown),
            ),
        )  # fmt: skip
        entry.grown_ordinal = entry.row.ordinal
        self._stage(entry, (), has_row=True)

    def is_growing(self, entry: Entry) -> bool:
        """True while a worker may not know a branch producer of the id."""
        return bool(entry.staged_count) or entry.grown_ordinal in self._log.unsettled

    def prepare(
        self, entry: Entry, tag: str, branches: frozenset[ProducerEpoch],
        offsets: tuple[GroupOffsets, ...], now_ns: int,
    ) -> None:  # fmt: skip
        """Seal the current transaction of an id: it waits for its decision. Raises TailraceError,
        having changed nothing, when that has to wait.
        """
        self._check_room(entry)
        mark = Prepared(tag, self._elapsed_ms(), self._wall_ms(), branches, offsets)
        self._table.use(entry, now_ns)
        self._seal(entry, encoded_mark(mark))

    def keep_prepared(self, entry: Entry) -> None:
        """A decision that ends nothing: its ordinal is the number of a new owner of the prepared
        transaction. Raises TailraceError, having changed nothing, when it has to wait.
        """
        self._check_room(entry)
        self._seal(entry, entry.row.prepared)

    def _seal(self, entry: Entry, mark: str) -> None:
        self._table.change(
            entry,
            entry.row._replace(
                ordinal=self._numbers.new_ordinal(), used_elapsed_ms=self._elapsed_ms(),
                is_registered=1, prepared=mark,
            ),
        )  # fmt: skip
        self._stage(entry, (), has_row=True)

    def _stage(
        self, entry: Entry, outcomes: Sequence[DecidedTransaction], *, has_row: bool
    ) -> None:
        """Add the row of a changed id's decision to the step."""
        row = entry.row
        self._log.stage(
            encoded(Decision(row.ordinal, row.id_number, outcomes, registered(row))),
            has_row=has_row,
        )
        entry.staged_count += has_row
        self._timers.set(row.id_number, None)
