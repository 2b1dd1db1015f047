"""Branches of the current transaction that writers have: each branch has one writer.

A writer names its attempt, a random text, with which it may repeat its request.

Owner: the coordinator. Memory alone: a successor knows no writers, so it gives no branch that was
    registered before it began.
Invariants: no branch is given to two attempts.
"""

from __future__ import annotations


class BranchClaims:
    """The writers of the branches of one transaction."""

    __slots__ = ("_by_attempt", "_reserved_count", "unknown_count")

    def __init__(self, unknown_count: int = 0) -> None:
        """`unknown_count`: branches whose writers are not known."""
        self.unknown_count = unknown_count
        self._by_attempt: dict[str, int] = {}
        self._reserved_count = 0

    @property
    def needed_count(self) -> int:
        """Branches that the transaction needs: reserved by its owner, or claimed."""
        return self.unknown_count + max(self._reserved_count, len(self._by_attempt))

    @property
    def claimed_count(self) -> int:
        """Branches with a writer."""
        return self.unknown_count + len(self._by_attempt)

    def reserve(self, count: int) -> None:
        """The owner has made `count` branches in all."""
        self._reserved_count = max(self._reserved_count, count)

    def position_of(self, attempt: str) -> int:
        """The position of the branch of an attempt, a free one for a new attempt."""
        return self._by_attempt.get(attempt, self.claimed_count)

    def claim(self, attempt: str) -> None:
        """Give the attempt its branch."""
        self._by_attempt[attempt] = self.position_of(attempt)

    def release_from(self, count: int) -> None:
        """Only `count` branches exist: the others were undone."""
        self._by_attempt = {
            attempt: position for attempt, position in self._by_attempt.items() if position < count
        }
