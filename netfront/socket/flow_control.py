"""Byte credit of producers: who may send how much. Pure.

A connection holds an absolute, cumulative limit (as QUIC's MAX_DATA): it may have sent that many bytes of batches in all. The front raises it as batches
leave for the workers, so a full ring holds credit back and the producer blocks at home. Within its credit a request is never refused for load.

What a connection *holds* is its limit less what has left for a worker. All that is held comes out of one budget, however many connections there are. A
connection may hold as much as it leaves to the others (Choudhury and Hahne's dynamic threshold), up to a window: one alone gets the window, and with many
there is something left for the next that connects. While it leaves as much, a connection gets a batch with its handshake; else it begins with nothing and asks.
A connection that asked when there was nothing is served first, in order; while one waits, grants that are not used are taken back (`sweep`).

What was taken back may be on its way already: it is taken in as debt, up to as much again as the budget.

Owner: one front.
Invariants: released <= received <= limit <= granted (but for what is beyond every grant);   held_bytes = sum of (limit - released);
    held_bytes <= budget + debt;   debt <= budget;   when nothing is held, none waits.
"""

from __future__ import annotations

from collections import OrderedDict


class Credit:
    """One connection's account, in bytes since it was opened."""

    __slots__ = ("granted", "limit", "received", "released", "session_word", "swept", "wanted")

    def __init__(self) -> None:
        self.session_word = 0
        """Whose it is (see `sessions`)."""
        self.limit = 0
        """What the connection may have sent in all, as it is told."""
        self.granted = 0
        """The highest limit it was ever told: what was taken back may still be on its way."""
        self.received = 0
        self.released = 0
        """Of what was received, how much has left for a worker."""
        self.swept = -1
        """What it had received at the last sweep."""
        self.wanted = 0
        """What it waits to be allowed to send; 0: it does not wait."""


class CreditLedger:
    """All accounts of a front. Methods that change limits return the accounts that have to be told."""

    def __init__(self, budget_bytes: int, window_bytes: int, batch_bytes: int) -> None:
        """`window_bytes`: what one connection may hold at most; `batch_bytes`: one largest batch."""
        self._budget = max(budget_bytes, batch_bytes)
        self._window = window_bytes
        self._batch = batch_bytes
        self.held_bytes = 0
        self._accounts: dict[Credit, None] = {}
        self._waiting: OrderedDict[Credit, None] = OrderedDict()

    @property
    def is_contended(self) -> bool:
        """Whether a connection waits for credit: call `sweep` now and then."""
        return bool(self._waiting)

    def open(self) -> Credit:
        """An account for a new connection, with one batch of credit while half of what is free allows it, else with none."""
        credit = Credit()
        self._accounts[credit] = None
        if self._batch <= (self._budget - self.held_bytes) // 2:
            self._set_limit(credit, self._batch)
        return credit

    def close(self, credit: Credit) -> list[Credit]:
        """The connection has ended; what it held goes to those that wait."""
        if self._accounts.pop(credit, 0) == 0:
            return []
        self.held_bytes -= credit.limit - credit.released
        self._waiting.pop(credit, None)
        return self._serve_waiting()

    def receive(self, credit: Credit, byte_count: int) -> bool:
        """A batch came in. False: it is more than was ever granted, or more debt than there can be; the client does not keep to the protocol."""
        credit.received += byte_count
        if credit.received <= credit.limit:
            return True
        # Granted once, taken back since, and already on its way: taken in, as debt.
        self._set_limit(credit, credit.received, is_debt=True)
        return credit.received <= credit.granted and self.held_bytes <= 2 * self._budget

    def has_room(self) -> bool:
        """Whether what is held, debt and all, is within the budget."""
        return self.held_bytes <= self._budget

    def release(self, credit: Credit, byte_count: int) -> list[Credit]:
        """A batch has left for its worker; what it held goes to those that wait, else back to its connection."""
        before = credit.limit
        credit.released += byte_count
        if not self._waiting and credit in self._accounts:
            self.held_bytes -= byte_count
            self._grow(credit, 0)
            return [credit] if credit.limit > before else []
        if credit in self._accounts:
            self.held_bytes -= byte_count
        raised = self._serve_waiting()
        if not self._waiting and credit in self._accounts:
            self._grow(credit, 0)
        if credit.limit > before and credit not in raised:
            raised.append(credit)
        return raised

    def ask(self, credit: Credit, wanted_bytes: int = 0) -> list[Credit]:
        """The client wants to send so much (0: a largest batch) and cannot. Served now, or when there is something to give, in order."""
        wanted = min(wanted_bytes, self._batch) or self._batch
        if not self._waiting:
            self._grow(credit, wanted)
        if credit.limit - credit.received >= wanted:
            return [credit]
        credit.wanted = wanted
        self._waiting[credit] = None
        return self._serve_waiting()

    def lapse(self, credit: Credit) -> list[Credit]:
        """A silent connection gives back what it does not use."""
        self._set_limit(credit, credit.received)
        return [credit, *self._serve_waiting()]

    def sweep(self) -> list[Credit]:
        """Somebody waits: what has not been used since the last sweep is taken back. To be called when everything that has come was read."""
        lapsed = []
        for credit in self._accounts:
            if credit.limit > credit.received and credit.swept == credit.received:
                self._set_limit(credit, credit.received)
                lapsed.append(credit)
            credit.swept = credit.received
        return lapsed + self._serve_waiting()

    def _set_limit(self, credit: Credit, limit: int, *, is_debt: bool = False) -> None:
        self.held_bytes += limit - credit.limit
        credit.limit = limit
        if not is_debt:
            credit.granted = max(credit.granted, limit)

    def _grow(self, credit: Credit, needed: int) -> None:
        """Let the connection hold as much as it leaves to others, up to its window; `needed` bytes to send, where the budget has them."""
        held = credit.limit - credit.released
        free = self._budget - self.held_bytes + held
        under_way = credit.received - credit.released
        target = min(max(min(self._window, free // 2), under_way + needed), free)
        if target > held:
            self._set_limit(credit, credit.released + target)
            credit.swept = -1  # what is new is not unused yet

    def _serve_waiting(self) -> list[Credit]:
        raised: list[Credit] = []
        while self._waiting:
            credit = next(iter(self._waiting))
            if self._budget - self.held_bytes + credit.limit - credit.received >= credit.wanted:
                self._grow(credit, credit.wanted)
            if credit.limit - credit.received < credit.wanted:
                break
            del self._waiting[credit]
            credit.wanted = 0
            raised.append(credit)
        return raised
