"""Transactions of a length in time, with the latency of their commits.

Owner: one run of `tailrace perf`.
"""

from __future__ import annotations

import time

from appliance.cli.perf.latencies import Latencies
from tailrace.producer.producer import Producer


class TimedTransactions:
    """Transactions of a length in time, one after the other."""

    def __init__(self, producer: Producer, length_ms: float) -> None:
        self._producer = producer
        self._length_s = length_ms / 1e3
        self._ends_at = 0.0
        self.latencies = Latencies()
        """Latencies of the commits."""

    def step(self) -> bool:
        """Begin the first transaction, and the next one when it is time. True: one is new."""
        now = time.perf_counter()
        if now < self._ends_at:
            return False
        if self._ends_at:
            self.end()
        self._producer.begin_transaction()
        self._ends_at = time.perf_counter() + self._length_s
        return True

    @property
    def is_due(self) -> bool:
        """True if the open transaction has its length."""
        return self._ends_at > 0 and time.perf_counter() >= self._ends_at

    def end(self) -> None:
        """Commit the open transaction, if there is one."""
        if self._ends_at:
            started = time.perf_counter()
            self._producer.commit_transaction()
            self.latencies.add((time.perf_counter() - started) * 1e3)
            self._ends_at = 0.0
