"""Decisions on their way: to the workers after the commit, and back as carried out.

Owner: the coordinator.
Invariants:
- Nothing is sent before its commit.
- A feed has every decision that is not carried out and every registered id that is loaded, by
  ordinal. The packed ids come last: they end nothing, and have no later decision.
- A worker that asks about an open transaction gets the decided outcome: that of a decision, or of
  one of the newest ends of its id, whose markers a damaged file may have lost. It is abort where
  none is known. A commit that is asked for gets a row again, since its marker is not durable there.
Crash: workers are fed anew, and ask again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.transactions.branches.pool import pool_of
from appliance.groups.transactions.decisions.decision_log import Decided, DecisionLog, encoded
from appliance.groups.transactions.decisions.hanging import HangingTransactions
from appliance.groups.transactions.decisions.workers import Workers
from appliance.groups.transactions.ids.ends import find_end
from appliance.groups.transactions.ids.id_table import IdTable
from appliance.groups.transactions.ids.numbers import Numbers
from shm.messages.transaction_messages import (
    NO_TRANSACTIONAL_ID,
    DecidedTransaction,
    Decision,
    Outcome,
    ProducerEpoch,
    RegisteredProducer,
    Registration,
    encode_decisions,
)

MESSAGE_BYTES = 1 << 13
"""Payload of one DECISIONS message of many. A worker decodes it as a whole."""


def registered(row: TransactionalIdRow) -> tuple[RegisteredProducer, ...]:
    """All that the workers take of an id."""
    if not row.is_registered:
        return ()
    state = Registration.SEALED if row.prepared else Registration.OPEN
    return (
        RegisteredProducer(row.producer_id, row.epoch, state),
        *(RegisteredProducer(*branch, state) for branch in pool_of(row).registered),
    )


def joined(contents: Iterable[bytes]) -> list[bytes]:
    """The payloads of DECISIONS messages."""
    payloads: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for content in contents:
        parts.append(content)
        size += len(content)
        if size >= MESSAGE_BYTES:
            payloads.append(b"".join(parts))
            parts, size = [], 0
    if parts:
        payloads.append(b"".join(parts))
    return payloads


class Delivery:
    """See the module's docstring."""

    def __init__(
        self,
        table: IdTable,
        log: DecisionLog,
        workers: Workers,
        numbers: Numbers,
        hanging: HangingTransactions,
    ) -> None:
        self._table = table
        self._log = log
        self._workers = workers
        self._numbers = numbers
        self._hanging = hanging
        self._asked: list[ProducerEpoch] = []
        self._answered: list[ProducerEpoch] = []
        """Transactions of `_asked` whose answer this step has staged."""
        self._has_progress = True
        self._decided = max(log.unsettled, default=0)
        """The newest durable decision of this process, or that a predecessor left."""

    def ask(self, epochs: Sequence[ProducerEpoch]) -> None:
        """Answer these with the next commit."""
        self._asked += epochs

    def workers_changed(self) -> None:
        """A worker has carried out decisions, or exists no more."""
        self._has_progress = True

    def settle(self) -> None:
        """Stage the answers to what workers asked."""
        if not self._asked:
            return
        asked, self._asked = self._asked, []
        self._answered += asked
        known = self._log.outcomes_of(asked)
        outcomes: dict[Outcome, list[DecidedTransaction]] = {Outcome.COMMIT: [], Outcome.ABORT: []}
        for key in dict.fromkeys(asked):
            entry = self._table.of_producer(key.producer_id)
            is_current = entry is not None and any(
                one[:2] == key for one in registered(entry.row)
            )  # sealed or not
            if key not in known and is_current:  # nobody has decided it
                self._hanging.drop([key])
                continue
            end = None if entry is None else find_end(entry.row.ended, *key)
            outcome = known.get(key, Outcome.ABORT if end is None else Outcome(end.outcome))
            outcomes[outcome].append(DecidedTransaction(*key, outcome))
        for outcome, ended in outcomes.items():
            if ended:
                ordinal = self._numbers.new_ordinal()
                answer = Decision(ordinal, NO_TRANSACTIONAL_ID, ended, ())
                self._log.stage(encoded(answer), has_row=outcome is Outcome.COMMIT)
                self._hanging.answered([ProducerEpoch(*one[:2]) for one in ended], ordinal)

    def kept(self, now_ns: int) -> list[int]:
        """The step was committed: send its decisions. Returns the numbers of the ids that have no
        decision left now.
        """
        self._answered = []
        decided = self._log.kept()
        if decided:
            self._workers.send(joined(one.content for one in decided))
            self._has_progress = True
            self._decided = max(one.ordinal for one in decided)
        if self._workers.is_feed_due():
            self._workers.feed([*joined(self._feed()), *self._table.packed.messages()])
        if not self._has_progress:
            return []
        self._has_progress = False
        through, unfinished = self._workers.settled_through(), self._workers.unfinished()
        self._workers.show_progress(self._decided, through)
        self._hanging.settled(through, unfinished)
        return self._finish(self._log.take_done(through, unfinished, now_ns))

    def _feed(self) -> Iterator[bytes]:
        """The contents of a feed, without the packed ids."""
        unsettled = self._log.unsettled
        rows = {one.row.ordinal: one.row for one in self._table if one.row.is_registered}
        for ordinal in sorted(rows.keys() | unsettled.keys()):
            if ordinal in unsettled:
                yield unsettled[ordinal].content
            else:
                row = rows[ordinal]
                yield encode_decisions([Decision(ordinal, row.id_number, (), registered(row))])

    def _finish(self, done: Sequence[Decided]) -> list[int]:
        free = []
        for one in done:
            entry = self._table.loaded_number(one.id_number)
            if entry is not None:
                entry.unsettled_count -= 1
                if not entry.unsettled_count:
                    free.append(one.id_number)
        return free

    def rolled_back(self) -> None:
        """The step is undone; its questions are answered by the next one."""
        self._log.rolled_back()
        self._asked = self._answered + self._asked
        self._answered = []
