"""The newest ends of a transactional id's transactions: what a repeated request is answered with.

Owner: none; plain values.
Invariants: each end has the number of the owner whose transaction it was. Only this owner is told
    the outcome with a next epoch.
"""

from __future__ import annotations

from typing import NamedTuple

import orjson

from shm.messages.transaction_messages import Outcome

KEPT = 2
"""Ends kept of each id. A client that repeats its request asks for its newest transaction. What
an init has ended since lies before it.
"""
KEPT_BY_OTHERS = 8
"""Ends kept while the newest ones were made by neither owner nor init. The owner learns nothing of
them, and still asks for its own.
"""
BY_PRODUCER, BY_INIT, BY_TIMEOUT, BY_OPERATOR, BY_IDLENESS, BY_LIMIT = (
    "producer", "init", "timeout", "operator", "idleness", "limit"
)  # fmt: skip
_BY_OTHERS = frozenset({BY_TIMEOUT, BY_OPERATOR, BY_IDLENESS, BY_LIMIT})
OUTCOME_NAMES = {Outcome.COMMIT: "commit", Outcome.ABORT: "abort"}
OUTCOMES = {name: outcome for outcome, name in OUTCOME_NAMES.items()}


class End(NamedTuple):
    """The end of one transaction. `by`: BY_PRODUCER and so on. `wall_ms`: for display."""

    owner: int
    producer_id: int
    epoch: int
    outcome: int
    by: str
    wall_ms: int

    @property
    def name(self) -> str:
        """The outcome as requests name it."""
        return OUTCOME_NAMES[Outcome(self.outcome)]


def decoded(text: str) -> list[End]:
    """The ends of a row, newest first. Raises ValueError, TypeError."""
    return [End(*values) for values in orjson.loads(text)]


def with_end(text: str, end: End) -> str:
    """Add the newest end."""
    count = KEPT_BY_OTHERS if end.by in _BY_OTHERS else KEPT
    kept = [list(end), *orjson.loads(text)[: count - 1]]
    return orjson.dumps(kept).decode()


def find_end(text: str, producer_id: int, epoch: int) -> End | None:
    """The end of this transaction; None: not known any more."""
    for end in decoded(text):
        if (end.producer_id, end.epoch) == (producer_id, epoch):
            return end
    return None


def was_idle(text: str) -> bool:
    """True if idleness has made the newest end."""
    ends = decoded(text)
    return bool(ends) and ends[0].by == BY_IDLENESS
