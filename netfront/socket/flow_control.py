"""Flow control of producers: byte credit for each connection. Pure.

A connection has an absolute, cumulative limit (as QUIC's MAX_DATA) on the bytes of batches it has
sent in all. The front raises it as batches leave for the workers. A full ring therefore withholds
credit, and the producer blocks in its own process. Requests within their credit are never refused
for load.

The bytes that a connection holds are its limit minus the bytes released to workers. All held bytes
come out of one budget. A connection may hold as much as it leaves free for others (the dynamic
threshold of Choudhury and Hahne), up to a window. A single connection gets the whole window, and
many leave something for the next. A new connection gets credit for one batch if as much stays free,
else none until it asks. Connections that wait for credit are served first, in order. While one
waits, unused grants are taken back (`sweep`).

Bytes under a grant that was taken back may already be in flight. They are accepted as debt, up to
the size of the budget.

A connection with a quota is granted no more than its gate has. It pays for a grant, and gets back
what it did not use. While the gate is closed it waits there, not in the ledger's queue, so that it
keeps no other connection from its turn. A producer whose grant the gate has cut short waits in its
own process before it asks: its wait began with its last batch, ASKING_NS before the question at the
earliest.

Owner: one front.

Invariants:
- released <= received <= limit <= granted, except for bytes beyond every grant.
- outstanding_bytes = sum of (limit - released).
- outstanding_bytes <= budget + debt, and debt <= budget.
- No connection waits while nothing is held.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

ASKING_NS: Final = 50_000_000
"""Interval at which a producer asks for credit (`tailrace.producer.sending.sender`)."""


class Gate(Protocol):
    """Amount that connections with the same quota share, and that grows with time."""

    def room(self, asked: int) -> int:
        """The amount that may be given now, at least `asked` if the gate is open, 0 if it is
        closed or others wait. `asked` 0: nothing in particular.
        """

    def take(self, amount: int) -> None:
        """Count what was given; a negative amount is given back."""

    @property
    def now_ns(self) -> int:
        """The time of this step."""

    def wait(self, item: object, since_ns: int = 0) -> None:
        """Let a connection or request wait, in order, until the gate opens. `since_ns`: the time
        since when it has waited already.
        """

    def note_wait(self, item: object, since_ns: int) -> None:
        """Count a wait that is over."""

    def forget(self, item: object) -> bool:
        """Remove one that waits. Return False if it did not wait."""


class Credit:
    """Account of one connection, in bytes since it was opened."""

    __slots__ = (
        "gate",
        "granted",
        "is_cut",
        "limit",
        "received",
        "released",
        "requested",
        "session_word",
        "swept",
        "used_ns",
    )

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate
        """Gate of its quota of bytes; None: it has none."""
        self.session_word = 0
        """Session word of its owner (see `sessions`)."""
        self.limit = 0
        """Bytes the connection may have sent in all, as last announced."""
        self.granted = 0
        """Highest limit ever announced. Bytes under a revoked limit may still be in flight."""
        self.received = 0
        self.released = 0
        """Received bytes that have left for a worker."""
        self.swept = -1
        """Received bytes at the last sweep."""
        self.requested = 0
        """Bytes it waits to be allowed to send, 0 if it does not wait."""
        self.is_cut = False
        """True if its gate has cut the last grant short."""
        self.used_ns = 0
        """Time of its last batch, while it has a gate."""


class CreditLedger:
    """All accounts of a front. Methods that change limits return the accounts to notify."""

    def __init__(self, budget_bytes: int, window_bytes: int, batch_bytes: int) -> None:
        """`window_bytes` is the most that one connection may hold, `batch_bytes`
        the largest batch.
        """
        self._budget = max(budget_bytes, batch_bytes)
        self._window = window_bytes
        self._batch = batch_bytes
        self.outstanding_bytes = 0
        self._accounts: dict[Credit, None] = {}
        self._waiting: OrderedDict[Credit, None] = OrderedDict()

    def resize(self, budget_bytes: int) -> list[Credit]:
        """Change the budget. With a smaller one, grants shrink as their bytes are released."""
        self._budget = max(budget_bytes, self._batch)
        return self._serve_waiting()

    @property
    def budget_bytes(self) -> int:
        """The bytes that all connections together may hold."""
        return self._budget

    @property
    def waiting_count(self) -> int:
        """The number of connections that wait for credit."""
        return len(self._waiting)

    @property
    def is_contended(self) -> bool:
        """True while a connection waits for credit. `sweep` must then be called at intervals."""
        return bool(self._waiting)

    def open(self, gate: Gate | None = None) -> Credit:
        """Open an account, with credit for one batch if that is at most half of the free budget,
        and as far as `gate` has room.
        """
        credit = Credit(gate)
        self._accounts[credit] = None
        if self._batch <= (self._budget - self.outstanding_bytes) // 2:
            first = self._batch if gate is None else min(self._batch, gate.room(0))
            self._set_limit(credit, first)
        return credit

    def use_gate(self, credit: Credit, gate: Gate | None) -> list[Credit]:
        """Change the gate of an account."""
        old = credit.gate
        if old is gate:
            return []
        waited = old is not None and old.forget(credit)
        credit.gate = gate
        return self.ask(credit, credit.requested) if waited else []

    def close(self, credit: Credit) -> list[Credit]:
        """Close an account and give what it held to waiting connections."""
        if self._accounts.pop(credit, 0) == 0:
            return []
        self.outstanding_bytes -= credit.limit - credit.released
        self._waiting.pop(credit, None)
        if credit.gate is not None:
            credit.gate.forget(credit)
            credit.gate.take(credit.received - credit.limit)
        return self._serve_waiting()

    def receive(self, credit: Credit, byte_count: int) -> bool:
        """Count received bytes. Return False if they exceed every grant or the allowed debt, which
        is a client's protocol error.
        """
        credit.received += byte_count
        if credit.gate is not None:
            credit.used_ns = credit.gate.now_ns
        if credit.received <= credit.limit:
            return True
        # Granted once, revoked since, and already in flight: accept it as debt.
        self._set_limit(credit, credit.received, is_debt=True)
        return credit.received <= credit.granted and self.outstanding_bytes <= 2 * self._budget

    def has_room(self) -> bool:
        """True if the held bytes, with debt, are within the budget."""
        return self.outstanding_bytes <= self._budget

    def release(self, credit: Credit, byte_count: int) -> list[Credit]:
        """Count bytes that left for a worker. Their credit goes to waiting connections first, else
        back to this one.
        """
        before = credit.limit
        credit.released += byte_count
        if not self._waiting and credit in self._accounts:
            self.outstanding_bytes -= byte_count
            self._grow(credit, 0)
            return [credit] if credit.limit > before else []
        if credit in self._accounts:
            self.outstanding_bytes -= byte_count
        raised = self._serve_waiting()
        if not self._waiting and credit in self._accounts:
            self._grow(credit, 0)
        if credit.limit > before and credit not in raised:
            raised.append(credit)
        return raised

    def ask(self, credit: Credit, requested_bytes: int = 0) -> list[Credit]:
        """Request credit for so many bytes (0: a largest batch), served at once or in order."""
        requested = min(requested_bytes, self._batch) or self._batch
        if credit.gate is not None and self._must_wait(credit, requested):
            return []
        if not self._waiting:
            self._grow(credit, requested)
        if credit.limit - credit.received >= requested:
            return [credit]
        credit.requested = requested
        self._waiting[credit] = None
        return self._serve_waiting()

    def lapse(self, credit: Credit) -> list[Credit]:
        """Take back the unused credit of a silent connection."""
        self._set_limit(credit, credit.received)
        return [credit, *self._serve_waiting()]

    def sweep(self) -> list[Credit]:
        """Take back credit that was not used since the last sweep. Call it only after everything
        received was read.
        """
        lapsed = []
        for credit in self._accounts:
            if credit.limit > credit.received and credit.swept == credit.received:
                self._set_limit(credit, credit.received)
                lapsed.append(credit)
            credit.swept = credit.received
        return lapsed + self._serve_waiting()

    def _must_wait(self, credit: Credit, requested: int) -> bool:
        """Let a connection wait at its gate if that is closed."""
        gate = credit.gate
        missing = requested - (credit.limit - credit.received)
        if gate is None or missing <= 0:
            return False
        was_cut, credit.is_cut = credit.is_cut, False
        since_ns = max(credit.used_ns, gate.now_ns - ASKING_NS) if was_cut else gate.now_ns
        if gate.room(missing):
            if was_cut:
                gate.note_wait(credit, since_ns)
            return False
        self._waiting.pop(credit, None)
        credit.requested = requested
        gate.wait(credit, since_ns)
        return True

    def _set_limit(self, credit: Credit, limit: int, *, is_debt: bool = False) -> None:
        if credit.gate is not None:
            credit.gate.take(limit - credit.limit)
        self.outstanding_bytes += limit - credit.limit
        credit.limit = limit
        if not is_debt:
            credit.granted = max(credit.granted, limit)

    def _grow(self, credit: Credit, needed: int) -> None:
        """Let the connection hold as much as it leaves to others, up to its window. `needed` bytes
        to send are granted if the budget has them.
        """
        outstanding = credit.limit - credit.released
        free = self._budget - self.outstanding_bytes + outstanding
        under_way = credit.received - credit.released
        target = min(max(min(self._window, free // 2), under_way + needed), free)
        if credit.gate is not None and target > outstanding:
            missing = max(0, under_way + needed - outstanding) if needed else 0
            allowed = outstanding + credit.gate.room(missing)
            credit.is_cut = allowed < target
            target = min(target, allowed)
        if target > outstanding:
            self._set_limit(credit, credit.released + target)
            credit.swept = -1  # a new grant is not swept yet

    def _serve_waiting(self) -> list[Credit]:
        raised: list[Credit] = []
        while self._waiting:
            credit = next(iter(self._waiting))
            if credit.gate is not None and self._must_wait(credit, credit.requested):
                continue
            if (
                self._budget - self.outstanding_bytes + credit.limit - credit.received
                >= credit.requested
            ):
                self._grow(credit, credit.requested)
            if credit.limit - credit.received < credit.requested:
                break
            del self._waiting[credit]
            credit.requested = 0
            raised.append(credit)
        return raised
