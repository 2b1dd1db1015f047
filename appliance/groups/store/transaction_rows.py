"""The rows of transactions in groups.db: transactional ids, and decisions that are not known to be
carried out.

Owner: the transaction coordinator.
Invariants:
- Numbers of ids and ordinals of decisions are never used twice, also after their rows are deleted.
- A decision's row holds the bytes that its workers get.
Crash: a successor reads what the registered ids have registered, and the decisions. It reads an id
when it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

from appliance.groups.store.group_store import GroupStore
from appliance.groups.store.schema import TransactionalIdRow
from shm.messages.packed_registrations import PackedRegistrations
from tailrace.core.errors import StorageError

PACKED_AT_ONCE = 500
_MARKS = ", ".join("?" * len(TransactionalIdRow._fields))
_ADVANCED = ("producer_id", "epoch", "ordinal", "used_elapsed_ms", "ended", "prepared", "staged")
"""The fields that a decision changes."""
_advanced = attrgetter(*_ADVANCED, "id_number")
_others = attrgetter(*(name for name in TransactionalIdRow._fields if name not in _ADVANCED))
_CHANGED = ", ".join(f"{name} = excluded.{name}" for name in TransactionalIdRow._fields[2:])
_ADVANCE = ", ".join(f"{name} = ?" for name in _ADVANCED)
_LAST_ORDINAL, _LAST_ID_NUMBER = "last_ordinal", "last_id_number"


@lru_cache(maxsize=1024)
def _shared(timeout_ms: int) -> int:
    return timeout_ms


_TIMEOUT, _CLIENT = map(TransactionalIdRow._fields.index, ("timeout_ms", "client_id"))


def sharing(row: Sequence[Any]) -> TransactionalIdRow:
    """A row that has one object for values which many rows have: thousands of ids are of few
    clients.
    """
    return TransactionalIdRow._make(
        (
            *row[:_TIMEOUT], _shared(row[_TIMEOUT]), *row[_TIMEOUT + 1 : _CLIENT],
            sys.intern(row[_CLIENT]), *row[_CLIENT + 1 :],
        )
    )  # fmt: skip


class TransactionRows:
    """Queries and writes. Each raises StorageError, a write also DiskFullError."""

    def __init__(self, store: GroupStore) -> None:
        self._store = store
        self.path = store.path

    # ---- transactional ids -----------------------------------------------------------------------

    def pack_registered(self, packed: PackedRegistrations) -> list[int]:
        """Pack the ids that are registered with the workers, and return the numbers of those that
        are not packed: they have a prepared transaction or branches.
        """
        others: list[int] = []
        behind = -1
        while page := self._store.read(
            "SELECT ordinal, id_number, producer_id, epoch, prepared = '' AND branches = '' "
            "AND epoch BETWEEN 0 AND 32767 FROM transactional_ids "
            "WHERE is_registered = 1 AND id_number > ? ORDER BY id_number LIMIT ?",
            (behind, PACKED_AT_ONCE),
        ):
            behind = page[-1][1]
            others += [row[1] for row in page if not row[4]]
            if plain := [row for row in page if row[4]]:
                ordinals, numbers, producers, epochs, _ = zip(*plain, strict=True)
                packed.try_extend(ordinals, numbers, producers, epochs)
        return others

    def id_of(self, transactional_id: str) -> TransactionalIdRow | None:
        found = self._ids("WHERE transactional_id = ?", transactional_id)
        return found[0] if found else None

    def id_of_number(self, id_number: int) -> TransactionalIdRow | None:
        found = self._ids("WHERE id_number = ?", id_number)
        return found[0] if found else None

    def ids_behind(self, transactional_id: str, limit: int) -> list[TransactionalIdRow]:
        """A page of ids, sorted."""
        return self._ids(
            "WHERE transactional_id > ? ORDER BY transactional_id LIMIT ?", transactional_id, limit
        )

    def staged_behind(self, transactional_id: str, limit: int) -> list[TransactionalIdRow]:
        """A page of the ids whose owner has left a text with the transaction, sorted."""
        return self._ids(
            "WHERE transactional_id > ? AND staged <> '' ORDER BY transactional_id LIMIT ?",
            transactional_id,
            limit,
        )

    def expired_ids(self, cutoff_ms: int, limit: int) -> list[TransactionalIdRow]:
        """Unregistered ids without metadata that were last used before `cutoff_ms`, in elapsed
        time.
        """
        return self._ids(
            "WHERE is_registered = 0 AND metadata = '' AND used_elapsed_ms <= ? "
            "ORDER BY used_elapsed_ms LIMIT ?",
            cutoff_ms,
            limit,
        )

    def _ids(self, condition: str, *values: object) -> list[TransactionalIdRow]:
        found = self._store.read_each(f"SELECT * FROM transactional_ids {condition}", values)
        return list(map(sharing, found))

    def id_count(self) -> int:
        return int(self._store.read("SELECT count(*) FROM transactional_ids")[0][0])

    def has_ids(self) -> bool:
        return bool(self._store.read("SELECT 1 FROM transactional_ids LIMIT 1"))

    def put_ids(self, rows: Iterable[TransactionalIdRow]) -> None:
        """Insert or update ids."""
        self._store.write_many(
            f"INSERT INTO transactional_ids VALUES ({_MARKS}) ON CONFLICT (id_number) DO UPDATE "
            f"SET {_CHANGED}",
            rows,
        )

    def change_ids(
        self, changes: Iterable[tuple[TransactionalIdRow | None, TransactionalIdRow]]
    ) -> None:
        """Write (stored row, row) of changed ids; None: the stored one is not known, or there is
        none. A decision leaves the indexes as they are, which saves the write of a page.
        """
        advanced: list[tuple[Any, ...]] = []
        others: list[TransactionalIdRow] = []
        for before, row in changes:
            if before is not None and _others(before) == _others(row):
                advanced.append(_advanced(row))
            else:
                others.append(row)
        if advanced:
            changed_count = self._store.write_many(
                f"UPDATE transactional_ids SET {_ADVANCE} WHERE id_number = ?", advanced
            )
            if changed_count != len(advanced):
                raise StorageError(
                    f"{self.path} has {changed_count} of {len(advanced)} transactional ids that "
                    "are in use: their rows were removed by another program. Restart the appliance"
                )
        if others:
            self.put_ids(others)

    def delete_ids(self, id_numbers: Sequence[int]) -> None:
        self._keep_highest(_LAST_ID_NUMBER, max(id_numbers))
        self._store.write_many(
            "DELETE FROM transactional_ids WHERE id_number = ?", [(one,) for one in id_numbers]
        )

    def last_id_number(self) -> int:
        """The highest number that an id ever had."""
        return max(
            self._highest("SELECT max(id_number) FROM transactional_ids"),
            self._meta(_LAST_ID_NUMBER),
        )

    # ---- decisions -------------------------------------------------------------------------------

    def decisions(self) -> list[tuple[int, bytes]]:
        """(ordinal, content) of all decisions, by ordinal."""
        return list(self._store.read("SELECT ordinal, content FROM decisions ORDER BY ordinal"))

    def put_decisions(self, rows: Iterable[tuple[int, bytes]]) -> None:
        self._store.write_many("INSERT INTO decisions VALUES (?, ?)", rows)

    def delete_decisions(self, ordinals: Sequence[int]) -> None:
        self._keep_highest(_LAST_ORDINAL, max(ordinals))
        self._store.write_many(
            "DELETE FROM decisions WHERE ordinal = ?", [(one,) for one in ordinals]
        )

    def last_ordinal(self) -> int:
        """The highest ordinal that a decision ever had."""
        return max(
            self._highest("SELECT max(ordinal) FROM decisions"),
            self._highest("SELECT max(ordinal) FROM transactional_ids WHERE is_registered = 1"),
            self._meta(_LAST_ORDINAL),
        )

    def _highest(self, sql: str) -> int:
        return int(self._store.read(sql)[0][0] or 0)

    def _meta(self, name: str) -> int:
        rows = self._store.read("SELECT value FROM meta WHERE name = ?", (name,))
        return int(rows[0][0]) if rows else 0

    def _keep_highest(self, name: str, value: int) -> None:
        self._store.write_many(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = max(value, "
            "excluded.value)",
            [(name, value)],
        )
