"""Percentiles of durations over the last seconds, from the histograms in shared memory.

A histogram only grows, so the durations of a window are the differences of its buckets. Within a
bucket they count as spread evenly, as in Prometheus' `histogram_quantile`.

Owner: the sampler, in its thread.
Invariants:
- The window has at most WINDOW_NS and two samples at least.
- A process that begins again (fewer durations than before) begins the window again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from appliance.observe.process_states import ProcessState
from shm.memory.layout import Measure
from shm.tables.measurements import BOUNDS_NS

WINDOW_NS = 10_000_000_000
SHOWN = {
    Measure.PRODUCE: "produce",
    Measure.DELIVERY: "delivery",
    Measure.FETCH: "fetch",
    Measure.SYNC: "sync",
}
QUANTILES = (0.5, 0.99)
Counts = dict[str, tuple[int, ...]]
"""Name -> durations in each bucket, of all processes."""
Percentiles = dict[str, tuple[float, ...] | None]
"""Name -> a duration in seconds for each of QUANTILES; None: there was nothing to measure."""


def counts_of(processes: Iterable[ProcessState]) -> Counts:
    """Sum the histograms of the processes."""
    found: Counts = {}
    for process in processes:
        for measure, values in process.durations.items():
            name = SHOWN.get(measure)
            if name is not None:
                before = found.get(name, (0,) * len(values.counts))
                found[name] = tuple(map(sum, zip(before, values.counts, strict=True)))
    return found


class Latencies:
    """Percentiles of the last WINDOW_NS."""

    def __init__(self) -> None:
        self._window: deque[tuple[int, Counts]] = deque()

    def add(self, now_ns: int, counts: Counts) -> Percentiles:
        """The percentiles with this sample."""
        if self._window and any(
            sum(counts.get(name, ())) < sum(last) for name, last in self._window[-1][1].items()
        ):
            self._window.clear()
        self._window.append((now_ns, counts))
        while len(self._window) > 2 and now_ns - self._window[0][0] > WINDOW_NS:
            self._window.popleft()
        return {name: _percentiles(self._window[0][1], counts, name) for name in SHOWN.values()}


def _percentiles(
    before: Mapping[str, Sequence[int]], after: Mapping[str, Sequence[int]], name: str
) -> tuple[float, ...] | None:
    now = after.get(name, ())
    then = before.get(name, (0,) * len(now))
    counts = [count - former for count, former in zip(now, then, strict=True)]
    if not any(counts):
        return None
    return tuple(quantile(counts, part) for part in QUANTILES)


def quantile(counts: Sequence[int], part: float) -> float:
    """The duration in seconds below which this part of the durations lies. In the last bucket it is
    the bucket's lower bound.
    """
    rank, below, low_ns = part * sum(counts), 0, 0
    for count, high_ns in zip(counts, BOUNDS_NS, strict=False):
        if count and below + count >= rank:
            return (low_ns + (high_ns - low_ns) * max(0.0, rank - below) / count) / 1e9
        below += count
        low_ns = high_ns
    return low_ns / 1e9
