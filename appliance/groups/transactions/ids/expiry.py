"""Unused transactional ids: first the workers forget them, then the database does.

Owner: the coordinator.
Invariants:
- An id with an open or prepared transaction is in use.
- An id that is idle for IDLE_NS is unregistered, by a decision: its late batches are refused. The
  request of its owner registers it again.
- An unregistered id expires `transactional.id.expiration.ms` after its last use, in elapsed time.
- An id with metadata never expires: its owner relies on that text.
- Work is done in slices. Without a transactional id there is no timer.
"""

from __future__ import annotations

from appliance.groups.base.limits import TransactionLimits
from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions.ids.id_table import Entry, IdTable

IDLE_NS = 3_600_000_000_000
"""Time without use after which the workers forget an id."""
SWEEP_NS = 60_000_000_000
SLICE_NS = 5_000_000
SLICE = 500


class IdExpiry:
    """See the module's docstring."""

    def __init__(
        self, table: IdTable, rows: TransactionRows, limits: TransactionLimits, now_ns: int
    ) -> None:
        """Raises StorageError."""
        self._table = table
        self._rows = rows
        self._limits = limits
        self._due_ns = now_ns + min(SWEEP_NS, self.idle_ns)
        self.has_ids = rows.has_ids()

    @property
    def idle_ns(self) -> int:
        """An id that is unused for this long is unregistered."""
        return min(IDLE_NS, self._limits.id_expiration_ms * 1_000_000)

    def is_due(self, now_ns: int) -> bool:
        return self.has_ids and now_ns >= self._due_ns

    def next_deadline_ns(self) -> int | None:
        return self._due_ns if self.has_ids else None

    def step(self, now_ns: int, elapsed_ms: int) -> list[Entry]:
        """Delete expired ids, and return idle ones to unregister. Raises StorageError,
        DiskFullError.
        """
        expired = [
            row
            for row in self._rows.expired_ids(elapsed_ms - self._limits.id_expiration_ms, SLICE)
            if not self._table.is_needed(row.id_number)
        ]
        if expired:
            self._rows.delete_ids([row.id_number for row in expired])
            self._table.deleted(expired)
        idle: list[Entry] = []
        for entry in self._table:
            if now_ns - entry.used_ns < self.idle_ns or len(idle) == SLICE:
                break
            if entry.row.is_registered and entry.opened_ns is None and not entry.row.prepared:
                idle.append(entry)
        idle += self._table.idle_packed(now_ns - self.idle_ns, SLICE - len(idle))
        is_whole = len(idle) < SLICE and len(expired) < SLICE
        self._due_ns = now_ns + (min(SWEEP_NS, self.idle_ns) if is_whole else SLICE_NS)
        return idle
