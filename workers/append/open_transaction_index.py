"""Index of the open transactions in a worker's partitions: in which partitions is one open?

A decision reaches every worker. The index names the partitions that need its marker without a look
at all of them.

Owner: one worker. `Partitions` replaces the entries of a partition that was opened, the append step
adds one, a marker removes one.

Invariants:
- A slot's entries are the open transactions of its partition's `ProducerTable`.

Crash: derived from the partitions.
"""

from __future__ import annotations

from collections.abc import Iterator

from workers.log.producers.open_transactions import OpenTransactions

Key = tuple[int, int]
"""(producer id, epoch)"""


class OpenTransactionIndex:
    """Open transactions of all partitions, by (producer id, epoch) and by slot."""

    def __init__(self) -> None:
        self._slots: dict[Key, set[int]] = {}
        self._of_slot: dict[int, set[Key]] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._slots))

    def __contains__(self, key: Key) -> bool:
        return key in self._slots

    def slots_of(self, key: Key) -> list[int]:
        """Return the slots of the partitions where the transaction is open."""
        return sorted(self._slots.get(key, ()))

    def of_slot(self, slot: int) -> list[Key]:
        """Return the transactions that are open in a partition."""
        return sorted(self._of_slot.get(slot, ()))

    def has(self, slot: int, key: Key) -> bool:
        """True if the transaction is open in the partition."""
        return key in self._of_slot.get(slot, ())

    def open(self, slot: int, key: Key) -> bool:
        """Add a transaction. True if it was open in no other partition."""
        known = self._slots.get(key)
        is_first = known is None
        if known is None:
            known = self._slots[key] = set()
        known.add(slot)
        self._of_slot.setdefault(slot, set()).add(key)
        return is_first

    def end(self, slot: int, key: Key) -> None:
        """Remove a transaction of a partition."""
        self._discard(slot, key)
        remaining = self._of_slot.get(slot)
        if remaining is not None:
            remaining.discard(key)
            if not remaining:
                del self._of_slot[slot]

    def replace(self, slot: int, transactions: OpenTransactions) -> None:
        """Set the transactions of a partition."""
        if len(transactions) or slot in self._of_slot:
            self.forget(slot)
            for producer_id, transaction in transactions:
                self.open(slot, (producer_id, transaction.epoch))

    def forget(self, slot: int) -> None:
        """Remove a partition."""
        for key in self._of_slot.pop(slot, ()):
            self._discard(slot, key)

    def _discard(self, slot: int, key: Key) -> None:
        known = self._slots.get(key)
        if known is not None:
            known.discard(slot)
            if not known:
                del self._slots[key]
