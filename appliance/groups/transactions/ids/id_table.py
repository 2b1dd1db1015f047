"""Transactional ids in memory: those that were used since the start and are registered with the
workers, or were used in this step.

An id that was used once costs a row of the database, which is read when the id is used again. So
does a registered id that rests since the start; what the workers are told of it is packed.

Owner: the coordinator.
Invariants:
- All registered ids are loaded or packed. Those with a prepared transaction or branches, and those
  with a decision that is not carried out, are loaded.
- Entries are in the order of their last use.
- A change of a row is undone by a rollback. What workers report is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from appliance.groups.consumer.prepared_offsets import PreparedOffsets
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions.branches.claims import BranchClaims
from appliance.groups.transactions.branches.pool import pool_of
from appliance.groups.transactions.ids.prepared_mark import prepared_of
from shm.messages.packed_registrations import PackedRegistrations
from tailrace.core.errors import StorageError


class Entry:
    """A transactional id. `row` is durable after the step, the rest is memory."""

    __slots__ = (
        "_claims", "grown_ordinal", "opened", "row", "staged_count", "unsettled_count", "used_ns",
    )  # fmt: skip

    def __init__(self, row: TransactionalIdRow, now_ns: int) -> None:
        self.row = row
        count = pool_of(row).registered_count
        self._claims = BranchClaims(count) if count else None
        self.grown_ordinal = row.ordinal
        """The newest decision that has registered a branch producer for the first time."""
        self.opened: tuple[int, int, int] | None = None
        """(producer id, epoch, time of the first report) of a transaction that has batches, also of
        its branches.
        """
        self.unsettled_count = 0
        """Durable decisions that are not carried out everywhere."""
        self.staged_count = 0
        """Decisions of this step."""
        self.used_ns = now_ns

    @property
    def claims(self) -> BranchClaims:
        """Writers of its branches. Those of an entry that was loaded are not known."""
        if self._claims is None:
            self._claims = BranchClaims()
        return self._claims

    @claims.setter
    def claims(self, claims: BranchClaims) -> None:
        self._claims = claims

    @property
    def needed_branch_count(self) -> int:
        """Branches that its transaction needs. Most ids have none, and then no memory for them."""
        return 0 if self._claims is None else self._claims.needed_count

    def forget_claims(self) -> None:
        """Let another transaction begin: no branch has a writer any more."""
        self._claims = None

    @property
    def opened_ns(self) -> int | None:
        """The time of the first report of the current transaction; None: nothing is known open."""
        opened = self.opened
        if opened is None or opened[:2] != (self.row.producer_id, self.row.epoch):
            return None
        return opened[2]


class Before(NamedTuple):
    """An id before the step that has changed it."""

    row: TransactionalIdRow
    claims: BranchClaims
    grown_ordinal: int


class IdTable:
    """The loaded ids."""

    def __init__(
        self, rows: TransactionRows, now_ns: int, prepared_offsets: PreparedOffsets
    ) -> None:
        """Load or pack the registered ids. Raises StorageError."""
        self._rows = rows
        self._prepared_offsets = prepared_offsets
        self._by_number: dict[int, Entry] = {}
        """In the order of their last use."""
        self._by_name: dict[str, Entry] = {}
        self._by_producer: dict[int, Entry] = {}
        """Producer id, also of a branch -> its transactional id."""
        self._changed: dict[int, Before | None] = {}
        """None: the id is new."""
        self._has_stored = False
        """True if this step has stored rows: a list of ids reads them."""
        self.branch_count = 0
        """Registered branches of all ids."""
        self._next_number = 1 + rows.last_id_number()
        self._count: int | None = None
        self.packed = PackedRegistrations()
        """Registered ids that were not used since the start."""
        self._start_ns = now_ns
        for id_number in rows.pack_registered(self.packed):
            self.of_number(id_number, now_ns)

    def __iter__(self) -> Iterator[Entry]:
        """All loaded ids, the longest unused first."""
        return iter(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def count(self) -> int:
        """Number of all ids, loaded or not. Raises StorageError."""
        if self._count is None:
            self._count = self._rows.id_count() + sum(
                1 for before in self._changed.values() if before is None
            )
        return self._count

    def get(self, name: str, now_ns: int) -> Entry | None:
        """An id by its name, loaded when it is in the database. Raises StorageError."""
        entry = self._by_name.get(name)
        if entry is None and (row := self._rows.id_of(name)) is not None:
            entry = Entry(row, now_ns)
            self._add(entry)
        return entry

    def loaded(self, name: str) -> Entry | None:
        return self._by_name.get(name)

    def of_number(self, id_number: int, now_ns: int) -> Entry | None:
        """An id by its number. Raises StorageError."""
        entry = self._by_number.get(id_number)
        if entry is None and (row := self._rows.id_of_number(id_number)) is not None:
            entry = Entry(row, now_ns)
            self._add(entry)
        return entry

    def loaded_number(self, id_number: int) -> Entry | None:
        return self._by_number.get(id_number)

    def of_producer(self, producer_id: int) -> Entry | None:
        """The registered id that has this producer id now, also for a branch; it may be another one
        that is loaded. Raises StorageError.
        """
        entry = self._by_producer.get(producer_id)
        if entry is None and (index := self.packed.find_producer(producer_id)) is not None:
            entry = self.of_number(self.packed.at(index).id_number, self._start_ns)
        return entry

    def idle_packed(self, unused_since_ns: int, limit: int) -> list[Entry]:
        """Load packed ids, if they are unused since then. Raises StorageError."""
        if self._start_ns > unused_since_ns:
            return []
        found = (
            self.of_number(number, self._start_ns) for number in self.packed.first_numbers(limit)
        )
        return [entry for entry in found if entry is not None]

    def _add(self, entry: Entry) -> None:
        row = entry.row
        if (index := self.packed.find(row.id_number)) is not None:
            self.packed.take(index)
        self._by_number[row.id_number] = entry
        self._by_name[row.transactional_id] = entry
        self._index(entry)

    def _index(self, entry: Entry) -> None:
        self._by_producer[entry.row.producer_id] = entry
        pool = pool_of(entry.row)
        self.branch_count += pool.registered_count
        for branch in pool.producers:
            self._by_producer[branch.producer_id] = entry
        if (prepared := prepared_of(entry.row)) is not None:
            self._prepared_offsets.add(entry.row.transactional_id, prepared.offsets)

    def _unindex(self, entry: Entry) -> None:
        self._by_producer.pop(entry.row.producer_id, None)
        pool = pool_of(entry.row)
        self.branch_count -= pool.registered_count
        for branch in pool.producers:
            self._by_producer.pop(branch.producer_id, None)
        if (prepared := prepared_of(entry.row)) is not None:
            self._prepared_offsets.remove(prepared.offsets)

    def _remove(self, entry: Entry) -> None:
        self._by_number.pop(entry.row.id_number, None)
        self._by_name.pop(entry.row.transactional_id, None)
        self._unindex(entry)

    def new_number(self) -> int:
        """A number that no id ever had."""
        self._next_number += 1
        return self._next_number - 1

    def change(
        self, entry: Entry, row: TransactionalIdRow, *, begins_transaction: bool = False
    ) -> None:
        """Replace an id's row. `begins_transaction`: no branch has a writer any more."""
        self._changed.setdefault(
            row.id_number, Before(entry.row, entry.claims, entry.grown_ordinal)
        )
        self._unindex(entry)
        entry.row = row
        if begins_transaction:
            entry.forget_claims()
        self._index(entry)

    def use(self, entry: Entry, now_ns: int) -> None:
        """Note that an id is used."""
        entry.used_ns = now_ns
        number = entry.row.id_number
        if number in self._by_number:
            self._by_number[number] = self._by_number.pop(number)

    def create(self, row: TransactionalIdRow, now_ns: int) -> Entry:
        """Add a new id."""
        count = self.count
        entry = Entry(row, now_ns)
        self._changed[row.id_number] = None
        self._add(entry)
        self._count = count + 1
        return entry

    def deleted(self, rows: list[TransactionalIdRow]) -> None:
        """Forget ids whose rows were deleted."""
        self._count = None
        for row in rows:
            entry = self._by_number.get(row.id_number)
            if entry is not None:
                self._remove(entry)

    def is_needed(self, id_number: int) -> bool:
        """True when an id's decisions are not carried out, or this step has changed it."""
        entry = self._by_number.get(id_number)
        return id_number in self._changed or (
            entry is not None and bool(entry.unsettled_count or entry.staged_count)
        )

    def unload(self, entry: Entry) -> None:
        """Keep an id in the database only, if nothing in memory needs it."""
        if not entry.row.is_registered and not self.is_needed(entry.row.id_number):
            self._remove(entry)

    # ---- the end of a step -----------------------------------------------------------------------

    @property
    def changed(self) -> list[Entry]:
        """The ids whose rows this step has changed."""
        return [self._by_number[number] for number in self._changed if number in self._by_number]

    def take_changes(self) -> list[tuple[TransactionalIdRow | None, TransactionalIdRow]]:
        """(stored row, row) of the ids that this step has changed, to store the second. None: the
        id is new, or this step has stored something of it before.
        """
        knows_stored = not self._has_stored
        self._has_stored = bool(self._changed)
        return [
            (before.row if knows_stored and before else None, self._by_number[number].row)
            for number, before in self._changed.items()
            if number in self._by_number
        ]

    def kept(self) -> None:
        """The step was committed."""
        self._changed = {}
        self._has_stored = False

    def rolled_back(self) -> list[Entry]:
        """Restore the rows of the ids that the step has changed. Returns those that remain."""
        changed, self._changed = self._changed, {}
        self._has_stored = False
        self._count = None
        remaining = []
        for number, before in changed.items():
            entry = self._by_number.get(number)
            if entry is None:
                continue
            if before is None:
                self._remove(entry)
                continue
            self._unindex(entry)
            entry.row, entry.claims, entry.grown_ordinal = before
            entry.claims.release_from(pool_of(entry.row).registered_count)
            self._index(entry)
            remaining.append(entry)
        return remaining


def damaged(path: str, error: Exception) -> StorageError:
    """The error for rows that cannot be decoded though SQLite finds the file intact."""
    return StorageError(
        f"{path} is damaged: rows of transactions cannot be read ({type(error).__name__}: "
        f"{error!s:.100}). Restore it from a backup or move it away (groups then begin without "
        "members and committed offsets, and open transactions are aborted)"
    )
