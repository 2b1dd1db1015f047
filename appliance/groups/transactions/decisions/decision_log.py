"""Decisions that are durable, and not known to be carried out by every worker.

    stage -> settle (rows of the step's commit) -> kept: they are sent
    a worker reports SETTLED -> done: nothing waits for them -> their rows are deleted, lazily

Owner: the coordinator.
Invariants:
- A decision is sent after its commit, in the order of the ordinals.
- The row lives until the markers are durable with every worker, so that after a loss of power they
  are written again. So an open transaction without a row was not committed.
- No partition with an open log comes to a worker that has settled decisions without it. A partition
  keeps its worker in a run (`appliance.control.placement.partition_placement`). A worker that
  starts reads decisions only when the controller has named all of its partitions.
- A row per decision, not per id: a second transaction may be decided before the markers of the
  first are durable on another disk.
Crash: a successor sends all rows again. A worker finds nothing open for those it had carried out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from appliance.groups.store.transaction_rows import TransactionRows
from shm.messages.transaction_messages import (
    DecidedTransaction,
    Decision,
    Outcome,
    ProducerEpoch,
    decode_decisions,
    encode_decisions,
)

DONE_KEPT_NS = 2_000_000_000
"""Age of a decision that is carried out, before its row is deleted with the next commit: many go in
one. Nothing depends on this time.
"""
DONE_ALONE_NS = 2 * DONE_KEPT_NS
"""Age of the oldest one at which rows are deleted by a commit of their own."""
DONE_KEPT_MAX = 32_768
DELETED_AT_ONCE = 4_096


class Decided(NamedTuple):
    """A decision as it is stored and sent."""

    ordinal: int
    id_number: int
    outcomes: tuple[DecidedTransaction, ...]
    content: bytes


def encoded(decision: Decision) -> Decided:
    """Encode a decision."""
    return Decided(
        decision.ordinal,
        decision.id_number,
        tuple(decision.outcomes),
        encode_decisions([decision]),
    )


class DecisionLog:
    """See the module's docstring."""

    def __init__(self, rows: TransactionRows) -> None:
        """Read the stored decisions. Raises StorageError, ValueError, struct.error."""
        self._rows = rows
        self.unsettled: dict[int, Decided] = {}
        """Durable decisions by ordinal, ascending."""
        self._staged: list[Decided] = []
        self._passing: list[Decided] = []
        """Decisions of this step without a row."""
        self._done: deque[tuple[int, Decided]] = deque()
        """(time, decision) of those that are carried out, and still have a row."""
        self._deleted_count = 0
        """Decisions of `_done` whose rows this step has deleted."""
        for _, content in rows.decisions():
            for decision in decode_decisions(content):
                self.unsettled[decision.ordinal] = encoded(decision)

    def stage(self, decided: Decided, *, has_row: bool = True) -> None:
        """Add a decision of this step. Without a row it is sent once: nothing needs its marker."""
        (self._staged if has_row else self._passing).append(decided)

    def settle(self, now_ns: int) -> None:
        """Write the rows of the step. Raises StorageError, DiskFullError."""
        if self._staged:
            self._rows.put_decisions((one.ordinal, one.content) for one in self._staged)
        count = self._due_count(now_ns) if self._may_delete(now_ns) else 0
        if count > self._deleted_count:
            due = [self._done[index][1].ordinal for index in range(self._deleted_count, count)]
            self._rows.delete_decisions(due)
            self._deleted_count = count

    def _may_delete(self, now_ns: int) -> bool:
        """True if the step is committed anyway, or rows have waited for such a step for long."""
        return bool(self._done) and (
            bool(self._staged)
            or len(self._done) > DONE_KEPT_MAX
            or now_ns - self._done[0][0] >= DONE_ALONE_NS
        )

    def _due_count(self, now_ns: int) -> int:
        due = 0
        for done_ns, _ in self._done:
            if due >= DELETED_AT_ONCE or (
                now_ns - done_ns < DONE_KEPT_NS and len(self._done) - due <= DONE_KEPT_MAX
            ):
                break
            due += 1
        return due

    def next_deadline_ns(self) -> int | None:
        """Time of the next deletion; None: there is nothing to delete."""
        return self._done[0][0] + DONE_ALONE_NS if self._done else None

    def kept(self) -> list[Decided]:
        """The step was committed. Returns its decisions, to send now."""
        staged, self._staged = self._staged, []
        passing, self._passing = self._passing, []
        for one in staged:
            self.unsettled[one.ordinal] = one
        for _ in range(self._deleted_count):
            self._done.popleft()
        self._deleted_count = 0
        return sorted([*staged, *passing]) if passing else staged

    def rolled_back(self) -> None:
        """Forget the decisions of the step, and keep the rows that it has deleted."""
        self._staged, self._passing = [], []
        self._deleted_count = 0

    def take_done(self, through: int, unfinished: Iterable[int], now_ns: int) -> list[Decided]:
        """Take the decisions that every worker has carried out: up to `through`, without the
        `unfinished` ones.
        """
        excepted = frozenset(unfinished)
        done = []
        for ordinal, decided in self.unsettled.items():
            if ordinal > through:
                break
            if ordinal not in excepted:
                done.append(decided)
        for decided in done:
            del self.unsettled[decided.ordinal]
            self._done.append((now_ns, decided))
        return done

    def outcomes_of(self, asked: Iterable[ProducerEpoch]) -> dict[ProducerEpoch, Outcome]:
        """The decided outcomes of these transactions, of those that are known, with this step's."""
        keys = frozenset(asked)
        found = {}
        known = [*self.unsettled.values(), *(one for _, one in self._done), *self._staged]
        for decided in [*known, *self._passing]:
            for producer_id, epoch, outcome in decided.outcomes:
                key = ProducerEpoch(producer_id, epoch)
                if key in keys:
                    found[key] = outcome
        return found
