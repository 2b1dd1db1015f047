"""Latencies of a measurement, and the schedule of one at a rate.

Owner: one run of `tailrace perf`.
Invariants:
- At a rate, a record's latency counts from its scheduled time, so that a stall shows in every
  record that it delays (Gil Tene's "coordinated omission").
- Without a rate, latency counts from the call of `send`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from tailrace.kernel.reference_arrow import default_rows

REPORT_S = 5.0
EVERY_RECORD_BELOW = 50_000
"""Records/s up to which each record's latency is taken; above, and without a rate, that of one in
SAMPLE: a callback costs as much as the record.
"""
SAMPLE = 16
LATENCY_PERCENTILES = (50.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds."""

    average: float
    most: float
    percentiles: dict[float, float]
    count: int


class Latencies:
    """Collected latencies, in milliseconds."""

    def __init__(self) -> None:
        self._values = array("d")
        self._reported = 0

    def add(self, milliseconds: float) -> None:
        self._values.append(milliseconds)

    def since_last(self) -> tuple[float, float]:
        """(average, maximum) since the last call."""
        window = self._values[self._reported :]
        self._reported += len(window)
        return (sum(window) / len(window), max(window)) if window else (0.0, 0.0)

    def summary(self) -> Latency:
        """Percentiles of the collected latencies, in milliseconds."""
        values = sorted(self._values)
        if not values:
            return Latency(0.0, 0.0, dict.fromkeys(LATENCY_PERCENTILES, 0.0), 0)
        found = {
            share: values[min(len(values) - 1, int(len(values) * share / 100))]
            for share in LATENCY_PERCENTILES
        }
        return Latency(sum(values) / len(values), values[-1], found, len(values))


class Schedule:
    """Scheduled time of record number n at a rate; without a rate, now."""

    def __init__(
        self,
        records_per_s: float,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._interval_ns = 1e9 / records_per_s if records_per_s > 0 else 0.0
        self._now_ns = now_ns
        self._sleep = sleep
        self._started_ns = now_ns()

    def wait_for(self, number: int) -> int:
        """Sleep until the scheduled time; return that time, or the present without a rate."""
        now_ns = self._now_ns()
        if not self._interval_ns:
            return now_ns
        due_ns = self._started_ns + int(number * self._interval_ns)
        if due_ns > now_ns:
            self._sleep((due_ns - now_ns) / 1e9)
        return due_ns


def load_arrow() -> None:
    """Make an Arrow array before the measurement: the first one loads pandas, where installed (0.3
    s).
    """
    default_rows([0], [None], [b""], None)
