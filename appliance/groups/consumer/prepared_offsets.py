"""Offsets of prepared transactions: checked, and committed if their transaction is.

    prepare: checked -> stored in the row of the transactional id -> commit: applied, or abort

While they wait, the committed offsets of their partitions are neither told nor changed: a new
member would read from before them what the transaction has processed.

Owner: the transaction coordinator. Derived from the rows of transactional ids.
Invariants:
- An offset that was prepared is applied with the decision, whatever its group's members do.
- A group with prepared offsets is neither deleted nor expires.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from appliance.groups.base.messages import Partition
from appliance.groups.base.request_validation import shown
from appliance.groups.store.schema import OffsetRow
from tailrace.core.errors import ConcurrentTransactionsError, InvalidTransactionError


class PreparedOffset(NamedTuple):
    """One offset, the offset of the next record to read."""

    topic_id: str
    partition: int
    committed: int
    leader_epoch: int
    metadata: str


class GroupOffsets(NamedTuple):
    """The prepared offsets of a group."""

    group: str
    offsets: tuple[PreparedOffset, ...]


def prepared_rows(group: str, rows: Iterable[OffsetRow]) -> GroupOffsets:
    """The offsets of checked rows."""
    return GroupOffsets(group, tuple(PreparedOffset._make(row[1:6]) for row in rows))


class PreparedOffsets:
    """All offsets that are prepared: which transactional id has which."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, Partition], str] = {}
        self._counts: dict[str, int] = {}
        """Group -> number of its prepared offsets."""

    def add(self, transactional_id: str, commits: Iterable[GroupOffsets]) -> None:
        """A transaction with these offsets is prepared."""
        for group, offsets in commits:
            for one in offsets:
                self._ids[group, (one.topic_id, one.partition)] = transactional_id
            self._counts[group] = self._counts.get(group, 0) + len(offsets)

    def remove(self, commits: Iterable[GroupOffsets]) -> None:
        """A transaction is decided."""
        for group, offsets in commits:
            for one in offsets:
                self._ids.pop((group, (one.topic_id, one.partition)), None)
            self._counts[group] -= len(offsets)
            if not self._counts[group]:
                del self._counts[group]

    def sentence(self, group: str, partition: Partition) -> str | None:
        """The reason why a committed offset is not known now; None: it is."""
        if not self._ids:
            return None
        transactional_id = self._ids.get((group, partition))
        if transactional_id is None:
            return None
        return (
            f"an offset of partition {partition[1]} in the group {shown(group)} is part of the "
            f"prepared transaction of {shown(transactional_id)}, which waits for its decision"
        )

    def check(self, group: str, partition: Partition) -> None:
        """Raise ConcurrentTransactionsError if the committed offset is not known now."""
        sentence = self.sentence(group, partition)
        if sentence is not None:
            raise ConcurrentTransactionsError(sentence)

    def has(self, group: str) -> bool:
        """True if the group has prepared offsets."""
        return group in self._counts

    def check_group(self, group: str) -> None:
        """Refuse to delete a group with prepared offsets. Raises InvalidTransactionError."""
        if group in self._counts:
            raise InvalidTransactionError(
                f"the group {shown(group)} has offsets in a prepared transaction: decide it first, "
                "with `tailrace transaction commit` or `abort`"
            )
