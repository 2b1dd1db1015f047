"""Percentiles of the last seconds, from histograms that only grow."""

from __future__ import annotations

from appliance.observe.console.sampling.latencies import SHOWN, WINDOW_NS, Latencies, quantile
from shm.memory.layout import BUCKET_COUNT
from shm.tables.measurements import BOUNDS_NS

NS = 1_000_000_000


def buckets(**counts: int) -> tuple[int, ...]:
    """`b3=5`: five durations in bucket 3."""
    found = [0] * BUCKET_COUNT
    for name, count in counts.items():
        found[int(name[1:])] = count
    return tuple(found)


def all_of(counts: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(SHOWN.values(), counts)


def test_a_quantile_lies_within_its_bucket() -> None:
    counts = buckets(b1=50, b4=49, b9=1)
    assert quantile(counts, 0.5) == BOUNDS_NS[1] / 1e9
    assert BOUNDS_NS[3] / 1e9 < quantile(counts, 0.75) < BOUNDS_NS[4] / 1e9
    assert quantile(counts, 0.99) == BOUNDS_NS[4] / 1e9
    assert quantile(counts, 1.0) == BOUNDS_NS[9] / 1e9
    assert quantile(buckets(b23=1), 0.5) == BOUNDS_NS[-1] / 1e9  # the last one has no upper bound
    assert quantile(buckets(b0=2), 0.5) == BOUNDS_NS[0] / 2e9


def test_only_durations_of_the_window_count() -> None:
    latencies = Latencies()
    assert latencies.add(0, all_of(buckets(b9=100)))["produce"] is None
    found = latencies.add(NS, all_of(buckets(b9=100, b1=10)))["produce"]
    assert found is not None
    assert max(found) <= BOUNDS_NS[1] / 1e9
    assert latencies.add(WINDOW_NS + 2 * NS, all_of(buckets(b9=100, b1=10)))["produce"] is None


def test_a_process_that_begins_again_begins_the_window_again() -> None:
    latencies = Latencies()
    latencies.add(0, all_of(buckets(b9=100)))
    assert latencies.add(NS, all_of(buckets(b1=10)))["sync"] is None
    found = latencies.add(2 * NS, all_of(buckets(b1=20)))["sync"]
    assert found is not None
    assert all(BOUNDS_NS[0] < seconds * 1e9 <= BOUNDS_NS[1] for seconds in found)
