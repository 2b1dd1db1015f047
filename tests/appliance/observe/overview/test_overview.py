"""Percentiles between two moments, and the order of problems."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.observe.checks.doctor_checks import Level
from appliance.observe.console.sampling.samples import GroupTotals
from appliance.observe.overview.overview import latencies
from appliance.observe.overview.problems import BACKUP_AGE_US, problems_of
from appliance.observe.overview.shared_state import role_of
from shm.memory.layout import BUCKET_COUNT, Role
from shm.tables.measurements import BOUNDS_NS


def counts(**by_bucket: int) -> tuple[int, ...]:
    found = [0] * BUCKET_COUNT
    for name, count in by_bucket.items():
        found[int(name[1:])] = count
    return tuple(found)


def test_only_durations_between_the_moments_count() -> None:
    before = {"produce": counts(b0=100)}
    after = {"produce": counts(b0=100, b4=3), "sync": counts()}
    found = latencies(before, after)
    assert found["produce"]["count"] == 3
    assert found["produce"]["p99_ms"] == pytest.approx(BOUNDS_NS[4] / 1e6, rel=0.1)
    assert found["sync"] == {"count": 0, "p50_ms": None, "p99_ms": None, "p999_ms": None}
    assert latencies(after, before)["produce"]["count"] == 0, "a process began again"


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
        "uncleanable": ["table-0"],
        "uncleanable_count": 4,
    }
    delays = [{"topic": "later", "lateness_us": 20_000_000, "pending": 1}]
    groups = {"work": GroupTotals("share", "Stable", 1, 4, dead_letters=2)}
    found = problems_of(cluster, delays, groups)
    levels = [check.level for check in found]
    assert levels == [Level.PROBLEM] * 3 + [Level.WARNING] * 3
    texts = "\n".join(check.detail for check in found)
    assert "/d takes no writes because its disk is full: free some space" in texts
    assert "table-0 and 3 more: something cannot be read" in texts
    assert "queue work cannot write 2 records" in texts
    assert "delivery to groups is paused: orders and 2 more" in texts
    assert "late by 20 s in later" in texts
    healthy = {**cluster, "data_dirs": [], "paused": [], "paused_count": 0, "uncleanable": []}
    healthy["processes"] = [{"name": "front-0", "live": True, "restarts": 0}]
    assert problems_of(healthy) == []


def test_settings_that_are_not_in_force_are_named_with_the_reason() -> None:
    cluster: dict[str, Any] = {"processes": [], "data_dirs": [], "offline": []}
    row = {"name": "groups.max", "reason": "it does not go with the other settings"}
    settings = {"errors": ["a.toml:2: a is wrong.", "a.toml:3: b is wrong."], "left_out": [row]}
    assert problems_of({**cluster, "settings": {"errors": [], "left_out": []}}) == []
    reload, left_out = problems_of({**cluster, "settings": settings})
    assert "not reloaded: a.toml:2: a is wrong; a.toml:3: b is wrong. Correct" in reload.detail
    assert left_out.detail.startswith(
        "groups.max, which tailrace config set has stored, is not in force: it does not go with"
    )
    assert "tailrace config unset groups.max" in left_out.detail


def test_a_partition_that_did_not_move_is_named_with_its_place_and_the_next_try() -> None:
    cluster: dict[str, Any] = {"processes": [], "data_dirs": [], "offline": []}
    row = {"topic": "orders", "partition": 1, "state": "failed", "from": "/a", "to": "/b",
           "reason": "its copy could not be completed; the log says why"}  # fmt: skip
    assert problems_of({**cluster, "moves": [{**row, "state": "left"}]}) == []
    [found] = problems_of({**cluster, "moves": [row]})
    assert found.level is Level.WARNING
    assert found.detail == (
        "orders:1 was not moved to /b: its copy could not be completed; the log says why. It is in "
        "/a and takes records; to try again: tailrace partition move orders:1 --to /b"
    )


def test_a_failed_backup_and_an_old_one_are_problems() -> None:
    cluster = {"processes": [], "data_dirs": [], "offline": [], "paused": [], "paused_count": 0}
    day = BACKUP_AGE_US
    made = {"target": "/b", "point_us": day, "ended_us": day, "backup_id": "0001", "error": ""}
    assert problems_of({**cluster, "backups": [made]}, now_us=2 * day) == []
    [old] = problems_of({**cluster, "backups": [made]}, now_us=4 * day)
    assert old.level is Level.WARNING
    assert "the newest backup at /b is 3 days old" in old.detail
    [failed] = problems_of({**cluster, "backups": [{**made, "error": "The disk is full."}]})
    assert failed.level is Level.PROBLEM
    assert "/b failed: The disk is full. (the newest backup there is 0001)" in failed.detail
    [never] = problems_of({**cluster, "backups": [{**made, "point_us": 0, "error": "No."}]})
    assert "none is there" in never.detail


def test_an_audit_log_that_cannot_be_written_is_a_problem() -> None:
    state = {"directory": "/audit", "is_failing": True, "lines": {}, "dropped": 0, "failures": 1}
    cluster = {"processes": [], "data_dirs": [], "offline": [], "paused": [], "paused_count": 0}
    assert problems_of({**cluster, "audit": {**state, "is_failing": False}}) == []
    [found] = problems_of({**cluster, "audit": state})
    assert found.level is Level.PROBLEM
    assert "/audit cannot be written" in found.detail
