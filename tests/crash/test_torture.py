"""A short run of the random schedules; `make torture SECONDS=...` has long ones."""

from __future__ import annotations

from tests.crash import delay_torture, group_torture
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


def test_random_kills_of_members_and_processes_break_no_promise_of_groups_and_queues() -> None:
    counts = group_torture.torture(seed=22, seconds=15, members=2)
    assert counts.acknowledged > 50
    assert counts.members_killed
    assert counts.harm.total
    assert (counts.sql_rows, counts.sql_missed, counts.sql_twice) == (counts.acknowledged, 0, 0)
    assert counts.dead_letters
    assert counts.retry_dead_letters
