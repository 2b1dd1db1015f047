"""Percentiles of the durations that were measured between two moments.

Pure. A percentile is interpolated inside its bucket, as Prometheus's `histogram_quantile` does; the
buckets are powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.observe.process_states import ProcessState
from shm.memory.layout import Measure
from shm.tables.measurements import BOUNDS_NS, HistogramValues

QUANTILES = {"p50_ms": 0.5, "p99_ms": 0.99, "p999_ms": 0.999}
NS_PER_MS = 1e6


def durations_between(
    before: Sequence[ProcessState], after: Sequence[ProcessState]
) -> dict[Measure, list[int]]:
    """Counts by bucket, summed over the processes. Words only grow while a region lives."""
    former = {process.name: process.durations for process in before}
    found: dict[Measure, list[int]] = {}
    for process in after:
        known: Mapping[Measure, HistogramValues] = former.get(process.name, {})
        for measure, values in process.durations.items():
            old = known[measure].counts if measure in known else (0,) * len(values.counts)
            total = found.setdefault(measure, [0] * len(values.counts))
            for bucket, (count, old_count) in enumerate(zip(values.counts, old, strict=True)):
                total[bucket] += max(0, count - old_count)
    return found


def quantile_ns(counts: Sequence[int], quantile: float) -> float | None:
    """The duration that a share `quantile` of all is not above; None without durations."""
    total = sum(counts)
    if not total:
        return None
    rank, passed = quantile * total, 0
    for bucket, count in enumerate(counts):
        if count and passed + count >= rank:
            if bucket == len(BOUNDS_NS):
                break
            low = BOUNDS_NS[bucket - 1] if bucket else 0
            return low + (BOUNDS_NS[bucket] - low) * (rank - passed) / count
        passed += count
    return float(BOUNDS_NS[-1])


def percentiles(durations: Mapping[Measure, Sequence[int]]) -> dict[str, dict[str, float | None]]:
    """Operation -> its count and percentiles in ms."""
    return {
        measure.name.lower(): {
            "count": sum(counts),
            **{name: _ms(quantile_ns(counts, share)) for name, share in QUANTILES.items()},
        }
        for measure, counts in sorted(durations.items())
    }


def _ms(duration_ns: float | None) -> float | None:
    return None if duration_ns is None else round(duration_ns / NS_PER_MS, 3)
