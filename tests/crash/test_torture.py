"""A short run of the random schedules; `make torture SECONDS=...` has long ones."""

from __future__ import annotations

from tests.crash import delay_torture
from tests.crash.torture import torture


def test_random_kills_and_stops_under_load_break_no_promise() -> None:
    counts = torture(seed=20, seconds=12)
    assert counts.acknowledged > 1000
    assert counts.harm.total > 5


def test_random_kills_deliver_each_delayed_record_once_and_none_early() -> None:
    counts = delay_torture.torture(seed=21, seconds=120)
    assert counts.delivered > 5_000
    assert counts.cancelled
    assert counts.harm.total > 5
