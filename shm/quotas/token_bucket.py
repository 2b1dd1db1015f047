"""Token bucket of a rate: a balance that grows with elapsed time and falls with use. Pure.

An amount may be taken while the balance is positive, however large it is: a batch larger than a
second's share still passes, and what follows waits until the debt is paid. So the use over any time
t is at most `rate * (t + BURST_S)` plus one amount.

Invariants:
- balance <= rate * BURST_S.
- Time that goes back, or stands still, gives nothing.
"""

from __future__ import annotations

NS = 1_000_000_000
BURST_S = 1
WAIT_MIN_NS = 20_000_000
"""Shortest wait, so that what is given after it is worth a message."""


class TokenBucket:
    """One bucket. Times are monotonic nanoseconds."""

    __slots__ = ("_balance", "_now_ns", "rate")

    def __init__(self, rate: int, now_ns: int) -> None:
        self.rate = max(1, rate)
        self._now_ns = now_ns
        self._balance = float(self.rate * BURST_S)

    def set_rate(self, rate: int, now_ns: int) -> None:
        """Change the rate. The balance stays, within the new bound."""
        self.balance(now_ns)
        self.rate = max(1, rate)
        self._balance = min(self._balance, float(self.rate * BURST_S))

    def balance(self, now_ns: int) -> float:
        """The balance now."""
        if now_ns > self._now_ns:
            grown = self._balance + (now_ns - self._now_ns) * self.rate / NS
            self._balance = min(grown, float(self.rate * BURST_S))
            self._now_ns = now_ns
        return self._balance

    def take(self, amount: int, now_ns: int) -> None:
        """Take an amount; a negative one gives back."""
        self._balance = min(self.balance(now_ns) - amount, float(self.rate * BURST_S))

    def ready_ns(self, now_ns: int) -> int:
        """The time when the balance is positive, at least WAIT_MIN_NS from now; `now_ns` if it is
        positive already.
        """
        balance = self.balance(now_ns)
        if balance >= 1:
            return now_ns
        return now_ns + max(WAIT_MIN_NS, int((1 - balance) * NS / self.rate))

    def is_full(self, now_ns: int) -> bool:
        """True if nothing is lost by forgetting this bucket."""
        return self.balance(now_ns) >= self.rate * BURST_S
