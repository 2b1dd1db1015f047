"""Byte credit of producers: who may send how much. Pure.

A connection holds an absolute, cumulative limit (as QUIC's MAX_DATA): it may have sent that many bytes of batches in all. The front
raises it as
batches leave for the workers, so a full ring holds credit back and the producer blocks at home. Within its credit a request is never
refused for load.

Owner: one front.
Invariants: outstanding credit (limit - released, summed) <= budget, but for one batch per connection that always fits;
    asking is free; who waits is served in order; a connection that is silent for long gives its unused credit back.
"""

from __future__ import annotations

from collections import deque


class Credit:
    """One connection's account, in bytes since it was opened."""

    __slots__ = ("granted", "is_waiting", "limit", "received", "released")

    def __init__(self) -> None:
        self.limit = 0
        """What the connection may have sent in all, as it was last told."""
        self.granted = 0
        """The highest limit it was ever told: what lapsed may still be on its way."""
        self.received = 0
        self.released = 0
        """Of what was received, how much has left for a worker."""
        self.is_waiting = False


class CreditLedger:
    """All accounts of a front. Methods that raise limits answer the accounts whose limit has changed and who have to be told."""

    def __init__(self, budget_bytes: int, window_bytes: int, batch_bytes: int) -> None:
        """Every account gets `window_bytes` while the budget lasts, and never less than `batch_bytes`, one largest batch."""
        self._budget = budget_bytes
        self._window = window_bytes
        self._batch = batch_bytes
        self._outstanding = 0
        self._waiting: deque[Credit] = deque()

    @property
    def outstanding(self) -> int:
        return self._outstanding

    def open(self) -> Credit:
        credit = Credit()
        self._raise(credit, min(self._window, max(self._batch, self._budget - self._outstanding)))
        return credit

    def close(self, credit: Credit) -> list[Credit]:
        """The connection is gone; what it held goes to who waits."""
        self._outstanding -= credit.limit - credit.released
        credit.limit = credit.released = credit.received
        if credit.is_waiting:
            self._waiting.remove(credit)
            credit.is_waiting = False
        return self._serve_waiting()

    def receive(self, credit: Credit, byte_count: int) -> bool:
        """A batch came in. False: beyond everything ever granted, the client does not keep to the protocol."""
        credit.received += byte_count
        if credit.received > credit.limit:
            # Granted once, lapsed since, and already on its way: taken, as debt.
            self._outstanding += credit.received - credit.limit
            credit.limit = credit.received
        return credit.received <= credit.granted

    def release(self, credit: Credit, byte_count: int) -> list[Credit]:
        """A batch has left for its worker. Raises the limit again by itself while nobody waits."""
        credit.released += byte_count
        self._outstanding -= byte_count
        raised = self._serve_waiting()
        if not self._waiting:
            wanted = credit.released + self._window - credit.limit
            grant = min(wanted, self._budget - self._outstanding)
            if grant > 0:
                self._raise(credit, grant)
        if credit.limit - credit.received < self._batch and credit not in raised:
            self._want(credit)
            raised += self._serve_waiting()
        return raised

    def ask(self, credit: Credit) -> list[Credit]:
        """The client wants to send and cannot. In order; one batch always fits in the end."""
        if credit.limit - credit.received >= self._batch:
            return [credit]
        self._want(credit)
        return self._serve_waiting()

    def lapse(self, credit: Credit) -> list[Credit]:
        """A silent connection keeps one batch of credit and gives the rest back."""
        spare = credit.limit - max(credit.received + self._batch, credit.released)
        if spare > 0:
            credit.limit -= spare
            self._outstanding -= spare
        return self._serve_waiting()

    def _want(self, credit: Credit) -> None:
        if not credit.is_waiting:
            credit.is_waiting = True
            self._waiting.append(credit)

    def _serve_waiting(self) -> list[Credit]:
        raised = []
        while self._waiting:
            credit = self._waiting[0]
            grant = self._batch - (credit.limit - credit.received)
            held = credit.limit - credit.released
            # Who holds nothing gets a batch even beyond the budget: it always fits.
            if grant > 0 and held > 0 and self._outstanding + grant > self._budget:
                break
            self._waiting.popleft()
            credit.is_waiting = False
            if grant > 0:
                self._raise(credit, grant)
            raised.append(credit)
        return raised

    def _raise(self, credit: Credit, byte_count: int) -> None:
        credit.limit += byte_count
        credit.granted = max(credit.granted, credit.limit)
        self._outstanding += byte_count
