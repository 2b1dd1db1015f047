"""The model of the program fuzzer's transactions: docs/transactions.md as code.

Owner: one ProgramRun (`tests.fuzz.program.run`).
Invariants:
- A reader of committed records sees all records of a committed transaction, once, and none of
  another one; those of branches that the commit has not named never.
- A transaction's offsets are committed with it.
- An outcome that a fault leaves unknown is one of the two, for all of its records.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tests.fuzz.program.model import expect


class Outcome(enum.Enum):
    """Outcome of a transaction."""

    OPEN = "is open"
    PREPARED = "is prepared"
    COMMITTED = "was committed"
    ABORTED = "was aborted"
    UNKNOWN = "ended unseen"


@dataclass(slots=True, eq=False)
class Branch:
    """The records of one branch, and what finished it."""

    values: list[bytes]
    finished: object = None
    """None: it is not named by the commit."""


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction. `values`: record -> True if its `send` has returned."""

    values: dict[bytes, bool] = field(default_factory=dict)
    branches: list[Branch] | None = None
    """None: no branch was asked for."""
    offset: int | None = None
    tag: str = ""
    outcome: Outcome = Outcome.OPEN

    @property
    def named(self) -> list[object] | None:
        """The branches that its commit names."""
        if self.branches is None:
            return None
        return [branch.finished for branch in self.branches if branch.finished is not None]

    @property
    def surely_has_any(self) -> bool:
        """True if a commit asks the appliance: an empty transaction's does not."""
        return any(self.values.values()) or bool(self.branches) or self.offset is not None

    def surely(self) -> set[bytes]:
        """The records that a commit makes readable."""
        found = {value for value, is_sure in self.values.items() if is_sure}
        for branch in self.branches or ():
            if branch.finished is not None:
                found.update(branch.values)
        return found

    def possibly(self) -> set[bytes]:
        """`surely`, and records whose `send` was cut off."""
        return self.surely() | self.values.keys()


class Ledger:
    """All transactions of a run."""

    def __init__(self) -> None:
        self._transactions: list[Transaction] = []
        self._of: dict[bytes, Transaction] = {}
        self.prepared: dict[str, Transaction] = {}
        """Transactional id -> its prepared transaction."""
        self.owners: dict[str, object] = {}
        """Transactional id -> the client that took it over last."""
        self._offsets = {0}

    def begins(self) -> Transaction:
        """A transaction begins."""
        transaction = Transaction()
        self._transactions.append(transaction)
        return transaction

    def sends(self, transaction: Transaction, values: Iterable[bytes]) -> None:
        """These records are about to be sent in it, or in a branch of it."""
        self._of.update(dict.fromkeys(values, transaction))

    def ends(self, transaction: Transaction, outcome: Outcome) -> None:
        """The outcome of a transaction."""
        before = transaction.outcome
        is_first = before in (Outcome.OPEN, Outcome.PREPARED)
        expect(is_first or before is outcome, f"a transaction {before.value}, and {outcome.value}")
        transaction.outcome = outcome
        if transaction.offset is not None and is_first:
            if outcome is Outcome.COMMITTED:
                self._offsets = {transaction.offset}
            elif outcome is Outcome.UNKNOWN:
                self._offsets.add(transaction.offset)

    def sees(self, value: bytes) -> None:
        """A reader of committed records has read it."""
        expect(value in self._of, f"{value!r:.60} was never sent in a transaction")
        transaction = self._of[value]
        may_be_read = transaction.outcome in (Outcome.COMMITTED, Outcome.UNKNOWN)
        expect(may_be_read, f"{value!r:.60} is read, and its transaction {transaction.outcome}")
        expect(
            value in transaction.possibly(),
            f"{value!r:.60} is read, and its branch was not named by the commit",
        )

    def check(self, partitions: Mapping[int, list[bytes]], offset: int) -> None:
        """The end: what a reader of committed records reads, and the group's offset."""
        found = [value for values in partitions.values() for value in values]
        present = set(found)
        expect(len(present) == len(found), "a record of a transaction is there twice")
        for value in found:
            self.sees(value)
        for transaction in self._transactions:
            surely = transaction.surely()
            read = surely & present
            where = f"a transaction {transaction.outcome.value}"
            if transaction.outcome is Outcome.COMMITTED:
                expect(read == surely, f"{where}, and {sorted(surely - read)[:3]} are lost")
            elif transaction.outcome is Outcome.UNKNOWN:
                expect(not read or read == surely, f"{where}, and is half visible")
        for number, values in partitions.items():
            last: dict[bytes, int] = {}
            for value in values:
                producer, _, count = value.rpartition(b"-")
                expect(
                    last.get(producer, -1) < int(count),
                    f"{value!r} stands behind {last.get(producer)} in partition {number}",
                )
                last[producer] = int(count)
        expect(
            offset in self._offsets,
            f"the offset of the transactions is {offset}, not {sorted(self._offsets)}",
        )
