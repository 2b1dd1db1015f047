"""Percentiles between two moments, and the order of problems."""

from __future__ import annotations

import pytest

from appliance.observe.console.samples import GroupTotals
from appliance.observe.doctor_checks import Level
from appliance.observe.overview.latencies import durations_between, percentiles, quantile_ns
from appliance.observe.overview.problems import problems_of
from appliance.observe.overview.shared_state import role_of
from appliance.observe.process_states import ProcessState
from shm.memory.layout import BUCKET_COUNT, Measure, Role
from shm.tables.measurements import BOUNDS_NS, HistogramValues


def counts(**by_bucket: int) -> tuple[int, ...]:
    found = [0] * BUCKET_COUNT
    for name, count in by_bucket.items():
        found[int(name[1:])] = count
    return tuple(found)


def front(index: int, by_bucket: tuple[int, ...]) -> ProcessState:
    durations = {Measure.PRODUCE: HistogramValues(by_bucket, 0)}
    return ProcessState(Role.FRONT, index, True, True, 1, 0, 0, durations=durations)


def test_a_percentile_is_interpolated_in_its_bucket() -> None:
    assert quantile_ns(counts(), 0.5) is None
    assert quantile_ns(counts(b0=10), 0.5) == BOUNDS_NS[0] / 2
    assert quantile_ns(counts(b0=50, b3=50), 0.5) == BOUNDS_NS[0]
    assert quantile_ns(counts(b0=50, b3=50), 1.0) == BOUNDS_NS[3]
    assert quantile_ns(counts(b0=50, b3=50), 0.75) == (BOUNDS_NS[2] + BOUNDS_NS[3]) / 2


def test_above_the_last_bound_a_percentile_is_that_bound() -> None:
    last = tuple([0] * (BUCKET_COUNT - 1) + [5])
    assert quantile_ns(last, 0.99) == BOUNDS_NS[-1]


def test_only_durations_since_the_first_moment_count_over_all_fronts() -> None:
    before = [front(0, counts(b0=100))]
    after = [front(0, counts(b0=100, b4=2)), front(1, counts(b4=1))]
    found = durations_between(before, after)
    assert found == {Measure.PRODUCE: list(counts(b4=3))}
    row = percentiles(found)["produce"]
    assert row["count"] == 3
    assert row["p99_ms"] == pytest.approx(BOUNDS_NS[4] / 1e6, rel=0.1)


def test_names_of_processes_are_roles() -> None:
    assert role_of("worker-12") == (Role.WORKER, 12)
    assert role_of("supervisor") == (Role.SUPERVISOR, 0)


def test_problems_come_before_warnings_with_what_to_do() -> None:
    cluster = {
        "processes": [{"name": "front-0", "live": True, "restarts": 2}],
        "data_dirs": [{"path": "/d", "state": "FULL", "free_bytes": 5 << 20}],
        "offline": [],
        "paused": ["orders"],
        "paused_count": 3,
    }
    delays = [{"topic": "later", "lateness_us": 20_000_000, "pending": 1}]
    groups = {"work": GroupTotals("share", "Stable", 1, 4, dead_letters=2)}
    found = problems_of(cluster, delays, groups)
    levels = [check.level for check in found]
    assert levels == [Level.PROBLEM] * 2 + [Level.WARNING] * 3
    texts = "\n".join(check.detail for check in found)
    assert "/d takes no writes because its disk is full: free some space" in texts
    assert "queue work cannot write 2 records" in texts
    assert "delivery to groups is paused: orders and 2 more" in texts
    assert "late by 20 s in later" in texts
    healthy = {**cluster, "data_dirs": [], "paused": [], "paused_count": 0}
    healthy["processes"] = [{"name": "front-0", "live": True, "restarts": 0}]
    assert problems_of(healthy) == []
