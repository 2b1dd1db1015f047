"""Open transactions without an owner: workers found them, and asked for their outcome.

The answer ends them, so each is here for a moment only. One that stays needs an operator.

Owner: the coordinator. Memory alone: a worker asks again when it is fed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from shm.messages.transaction_messages import ProducerEpoch

HANGING_NS = 10_000_000_000
"""Age from which a transaction without an owner counts as hanging."""
ASKED_MAX = 10_000


@dataclass(slots=True)
class Asked:
    """An open transaction that workers asked about. `ordinal`: of the last answer; 0: none yet."""

    since_ns: int
    workers: set[int] = field(default_factory=set)
    ordinal: int = 0


class HangingTransactions:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._asked: dict[ProducerEpoch, Asked] = {}

    def asked(self, worker: int, epochs: Iterable[ProducerEpoch], now_ns: int) -> None:
        for key in epochs:
            if len(self._asked) < ASKED_MAX or key in self._asked:
                found = self._asked.setdefault(key, Asked(now_ns))
                found.workers.add(worker)
                found.ordinal = 0

    def answered(self, epochs: Iterable[ProducerEpoch], ordinal: int) -> None:
        for key in epochs:
            if (found := self._asked.get(key)) is not None:
                found.ordinal = ordinal

    def settled(self, through: int, unfinished: Collection[int]) -> None:
        """Forget those whose answer is carried out."""
        over = [
            key
            for key, found in self._asked.items()
            if 0 < found.ordinal <= through and found.ordinal not in unfinished
        ]
        for key in over:
            del self._asked[key]

    def drop(self, epochs: Iterable[ProducerEpoch]) -> None:
        """Forget transactions that turned out to be current ones."""
        for key in epochs:
            self._asked.pop(key, None)

    def listed(self, now_ns: int) -> list[tuple[ProducerEpoch, Asked]]:
        """Those that hang."""
        return [
            (key, found)
            for key, found in self._asked.items()
            if now_ns - found.since_ns >= HANGING_NS
        ]
