"""Byte credit of producers: who may send how much. Pure.

A connection holds an absolute, cumulative limit (as QUIC's MAX_DATA): it may have sent that many bytes of batches in all. The front raises it as
batches leave for the workers, so a full ring holds credit back and the producer blocks at home. Within its credit a request is never refused
for load.

One largest batch is every connection's own and costs nothing: it always fits. What a connection holds beyond that, up to a window, is taken from the
front's budget while there is any; who asked when there was none is served first, in order; who is silent for long gives it back.

Owner: one front.
Invariants: limit >= released + one batch, for every connection at any time;   released <= received <= limit <= granted;
    the sum of what connections hold beyond their own batch is `shared_bytes` <= budget (but for what had lapsed and was already on its way).
"""

from __future__ import annotations

from collections import deque


class Credit:
    """One connection's account, in bytes since it was opened."""

    __slots__ = ("granted", "is_waiting", "limit", "received", "released")

    def __init__(self) -> None:
        self.limit = 0
        """What the connection may have sent in all, as it is told."""
        self.granted = 0
        """The highest limit it was ever told: what lapsed may still be on its way."""
        self.received = 0
        self.released = 0
        """Of what was received, how much has left for a worker."""
        self.is_waiting = False


class CreditLedger:
    """All accounts of a front. Methods that raise limits answer the accounts whose limit has changed and who have to be told."""

    def __init__(self, budget_bytes: int, window_bytes: int, batch_bytes: int) -> None:
        """`window_bytes`: what one connection may hold at most; `batch_bytes`: one largest batch."""
        self._budget = budget_bytes
        self._window = window_bytes
        self._batch = batch_bytes
        self.shared_bytes = 0
        """What is taken from the budget now."""
        self._waiting: deque[Credit] = deque()

    def open(self) -> Credit:
        credit = Credit()
        self._set_limit(credit, self._batch)
        return credit

    def close(self, credit: Credit) -> list[Credit]:
        """The connection is gone; what it held goes to who waits."""
        self.shared_bytes -= self._beyond(credit)
        if credit.is_waiting:
            self._waiting.remove(credit)
            credit.is_waiting = False
        return self._serve_waiting()

    def receive(self, credit: Credit, byte_count: int) -> bool:
        """A batch came in. False: beyond everything ever granted, the client does not keep to the protocol."""
        credit.received += byte_count
        if credit.received > credit.limit:
            # Granted once, lapsed since, and already on its way: taken, as debt.
            self._set_limit(credit, credit.received, is_debt=True)
        return credit.received <= credit.granted

    def release(self, credit: Credit, byte_count: int) -> list[Credit]:
        """A batch has left for its worker: the connection's own batch is restored, and more while nobody waits for it."""
        before = credit.limit
        self.shared_bytes -= self._beyond(credit)
        credit.released += byte_count
        self.shared_bytes += self._beyond(credit)
        self._set_limit(credit, max(credit.limit, credit.released + self._batch))
        raised = self._serve_waiting()
        if not self._waiting:
            self._grow(credit)
        if credit.limit > before and credit not in raised:
            raised.append(credit)
        return raised

    def ask(self, credit: Credit) -> list[Credit]:
        """The client wants to send and cannot. Answered now, or when there is something to give, in order."""
        if not self._waiting:
            self._grow(credit)
        if credit.limit - credit.received >= self._batch:
            return [credit]
        if not credit.is_waiting:
            credit.is_waiting = True
            self._waiting.append(credit)
        return self._serve_waiting()

    def lapse(self, credit: Credit) -> list[Credit]:
        """A silent connection keeps its own batch and gives the rest back."""
        self._set_limit(credit, min(credit.limit, max(credit.received, credit.released + self._batch)))
        return [credit, *self._serve_waiting()]

    def _beyond(self, credit: Credit) -> int:
        """What the connection holds of the budget."""
        return max(0, credit.limit - credit.released - self._batch)

    def _set_limit(self, credit: Credit, limit: int, *, is_debt: bool = False) -> None:
        self.shared_bytes -= self._beyond(credit)
        credit.limit = limit
        if not is_debt:
            credit.granted = max(credit.granted, limit)
        self.shared_bytes += self._beyond(credit)

    def _grow(self, credit: Credit) -> bool:
        """Give the connection as much of the budget as its window and the budget allow."""
        grant = min(credit.released + self._window - credit.limit, self._budget - self.shared_bytes)
        if grant <= 0:
            return False
        self._set_limit(credit, credit.limit + grant)
        return True

    def _serve_waiting(self) -> list[Credit]:
        raised = []
        while self._waiting:
            credit = self._waiting[0]
            if credit.limit - credit.received < self._batch and not self._grow(credit):
                break
            self._waiting.popleft()
            credit.is_waiting = False
            raised.append(credit)
        return raised
