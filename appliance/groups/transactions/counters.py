"""Counters of decisions, for metrics. They begin at 0 with the process.

Owner: the coordinator.
Invariants: a decision is counted after its commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shm.messages.transaction_messages import Outcome


class Counters:
    """See the module's docstring."""

    def __init__(self, monotonic_ns: Callable[[], int]) -> None:
        self._monotonic_ns = monotonic_ns
        self._pending: list[tuple[Outcome, int]] = []
        self.commits = 0
        self.aborts = 0
        self.fenced = 0
        """Requests of former owners that were refused."""
        self.decision_ns = 0
        """Time from a decision to the end of its commit, summed."""

    def decided(self, outcome: Outcome) -> None:
        """A decision was made; it is not durable yet."""
        self._pending.append((outcome, self._monotonic_ns()))

    def kept(self) -> None:
        """The step was committed."""
        if self._pending:
            now_ns = self._monotonic_ns()
            for outcome, began_ns in self._pending:
                self.commits += outcome is Outcome.COMMIT
                self.aborts += outcome is Outcome.ABORT
                self.decision_ns += now_ns - began_ns
            self._pending = []

    def rolled_back(self) -> None:
        self._pending = []

    def totals(self) -> dict[str, Any]:
        return {
            "commits": self.commits,
            "aborts": self.aborts,
            "fenced": self.fenced,
            "decision_seconds": self.decision_ns / 1e9,
        }
