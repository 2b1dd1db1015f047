"""Open transactions of a partition: each has batches in the log, and no marker yet.

The worker refuses a batch of another epoch while one is open. The flusher derives from it the last
stable offset and what was aborted.

Owner: the worker and the flusher keep one each, with the producer state (`ProducerTable`).

Invariants:
- A producer id has at most one open transaction.
- Transactions are in the order of their first offsets, so that the oldest is found at once.

Crash: rebuilt with the producer state from snapshot, batch headers, and the ring's descriptors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class OpenTransaction(NamedTuple):
    """A transaction with batches from `first_offset` on."""

    epoch: int
    first_offset: int


class OpenTransactions:
    """Open transactions by producer id."""

    def __init__(self) -> None:
        self._open: dict[int, OpenTransaction] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[tuple[int, OpenTransaction]]:
        return iter(self._open.items())

    def of(self, producer_id: int) -> OpenTransaction | None:
        """The producer's open transaction."""
        return self._open.get(producer_id)

    @property
    def first_offset(self) -> int | None:
        """The first offset of the oldest open transaction."""
        for transaction in self._open.values():
            return transaction.first_offset
        return None

    def append(self, producer_id: int, epoch: int, base_offset: int) -> bool:
        """Record a batch in the log. True if it opens the transaction. A batch that was recorded
        before changes nothing.

        A batch of a later epoch lies behind the marker of the earlier one, also if the log has lost
        that marker with a damaged range.
        """
        known = self._open.get(producer_id)
        if known is not None:
            if known.epoch >= epoch:
                return False
            del self._open[producer_id]  # the new one is the last in the order
        self._open[producer_id] = OpenTransaction(epoch, base_offset)
        return True

    def end(self, producer_id: int, epoch: int) -> OpenTransaction | None:
        """Record a marker in the log. Returns the transaction that it ends."""
        known = self._open.get(producer_id)
        if known is None or known.epoch != epoch:
            return None
        return self._open.pop(producer_id)

    def as_of(self, offset: int, ended: Iterable[tuple[int, OpenTransaction]]) -> OpenTransactions:
        """The transactions that were open at an earlier `offset`; `ended`: those that have ended
        since, by producer id.
        """
        was_open = OpenTransactions()
        was_open._open = dict(
            sorted(
                (item for item in (*self, *ended) if 0 <= item[1].first_offset < offset),
                key=lambda item: item[1].first_offset,
            )
        )
        return was_open

    def to_snapshot(self) -> list[list[int]]:
        """Return plain lists for `from_snapshot`."""
        return [[producer_id, *transaction] for producer_id, transaction in self._open.items()]

    @classmethod
    def from_snapshot(cls, rows: list[list[int]]) -> OpenTransactions:
        """Return the transactions of a `to_snapshot` result. Raises TypeError, ValueError."""
        transactions = cls()
        for producer_id, epoch, first_offset in rows:
            transactions._open[producer_id] = OpenTransaction(epoch, first_offset)
        return transactions
