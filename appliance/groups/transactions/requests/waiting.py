"""Requests that wait: until no decision of their transactional id is left, or for producer ids.

Owner: the coordinator.
Invariants: each is answered once: when it is ready, after its time, or when its step is undone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from appliance.groups.base.messages import Requester
from shm.messages.transaction_messages import Outcome, ProducerEpoch


class Waiter(NamedTuple):
    """A request that is answered when the decisions of its id are carried out. `owner`: the one
    that the answer is for. `outcome`: of the transaction that it has ended, if it has. `branch`:
    the branch that it has joined, if it has.
    """

    requester: Requester
    api: int
    owner: int
    until_ns: int
    outcome: Outcome
    branch: ProducerEpoch | None = None


class DeferredInit(NamedTuple):
    """An init that waits for producer ids."""

    requester: Requester
    request: dict[str, Any]
    until_ns: int


class Waiting:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[Waiter]] = {}
        self._new: list[tuple[int, Waiter]] = []
        self._inits: list[DeferredInit] = []

    def add(self, id_number: int, waiter: Waiter) -> None:
        self._by_id.setdefault(id_number, []).append(waiter)
        self._new.append((id_number, waiter))

    def defer(self, init: DeferredInit) -> None:
        self._inits.append(init)

    def take_inits(self) -> list[DeferredInit]:
        inits, self._inits = self._inits, []
        return inits

    def take(self, id_number: int) -> list[Waiter]:
        """Take the waiters of an id, which are ready."""
        return self._by_id.pop(id_number, [])

    def ids(self) -> list[int]:
        """Numbers of the ids with waiters."""
        return list(self._by_id)

    def has(self, id_number: int) -> bool:
        return id_number in self._by_id

    def take_late(self, now_ns: int) -> tuple[list[tuple[int, Waiter]], list[DeferredInit]]:
        """Take those whose time is over."""
        late = [
            (number, waiter)
            for number, waiters in self._by_id.items()
            for waiter in waiters
            if now_ns >= waiter.until_ns
        ]
        for number, waiter in late:
            self._remove(number, waiter)
        inits = [init for init in self._inits if now_ns >= init.until_ns]
        if inits:
            self._inits = [init for init in self._inits if now_ns < init.until_ns]
        return late, inits

    def _remove(self, number: int, waiter: Waiter) -> bool:
        """True if the waiter was there."""
        waiters = self._by_id.get(number, [])
        if waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._by_id[number]
        return True

    def next_deadline_ns(self) -> int | None:
        times = [waiter.until_ns for waiters in self._by_id.values() for waiter in waiters]
        return min([*times, *(init.until_ns for init in self._inits)], default=None)

    def kept(self) -> None:
        self._new = []

    def rolled_back(self) -> list[Waiter]:
        """Take the waiters that this step has added, and not answered."""
        new, self._new = self._new, []
        return [waiter for number, waiter in new if self._remove(number, waiter)]
