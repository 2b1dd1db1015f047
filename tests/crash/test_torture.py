"""Short runs of the tortures, ended by counted events; `make torture SECONDS=...` has long ones.

The checks inside are the test; what is asserted here shows that each kind of event took place.
"""

from __future__ import annotations

import pytest

from tests.crash import delay_torture, group_torture, transaction_torture
from tests.crash.group_torture import POISON_EVERY
from tests.crash.torture import torture
from tests.kit import seeds

SLOW = pytest.mark.slow_because(
    "real kills come one by one, and recovery, delays and sessions take their time"
)
LONG = pytest.mark.long
NEW = seeds.base()


@pytest.mark.parametrize(
    ("seed", "faults"), [pytest.param(20, 5, marks=SLOW), pytest.param(NEW, 300, marks=LONG)]
)
def test_random_kills_and_stops_under_load_break_no_promise(seed: int, faults: int) -> None:
    counts = torture(
        seed,
        lambda now: (
            now.harm.total >= faults
            and now.acknowledged > 0
            and now.read > 0
            and now.compacted.compactions > 0
        ),
    )
    assert counts.acknowledged
    assert counts.compacted.read
    assert counts.harm.total >= faults


@pytest.mark.parametrize(
    ("seed", "faults", "far_s", "programs"),
    [
        pytest.param(21, 5, 10.0, 1, marks=SLOW),
        pytest.param(
            NEW & ~1, 300, delay_torture.FAR_S, delay_torture.TRANSACTIONAL, marks=LONG, id="values"
        ),
        pytest.param(
            NEW | 1,
            300,
            delay_torture.FAR_S,
            delay_torture.TRANSACTIONAL,
            marks=LONG,
            id="versions",
        ),
    ],
)
def test_random_kills_deliver_each_delayed_record_once_and_none_early(
    seed: int, faults: int, far_s: float, programs: int
) -> None:
    counts = delay_torture.torture(
        seed,
        lambda now: (
            now.harm.total >= faults
            and now.scheduled > 0
            and now.cancelled > 0
            and now.rescheduled > 0
        ),
        far_s,
        programs,
    )
    assert counts.delivered
    assert counts.cancelled
    assert counts.rescheduled


@pytest.mark.parametrize(
    ("seed", "faults", "members"),
    [
        pytest.param(22, 5, 1, marks=SLOW),
        pytest.param(NEW, 200, group_torture.MEMBERS, marks=LONG),
    ],
)
def test_random_kills_of_members_and_processes_break_no_promise_of_groups_and_queues(
    seed: int, faults: int, members: int
) -> None:
    counts = group_torture.torture(
        seed,
        lambda now: (
            now.harm.total >= faults and now.members_killed > 0 and now.acknowledged > POISON_EVERY
        ),
        members,
    )
    assert counts.members_killed
    assert (counts.sql_rows, counts.sql_missed, counts.sql_twice) == (counts.acknowledged, 0, 0)
    assert counts.dead_letters
    assert counts.retry_dead_letters


@pytest.mark.parametrize(
    ("seed", "faults"), [pytest.param(23, 5, marks=SLOW), pytest.param(NEW, 300, marks=LONG)]
)
def test_random_kills_tear_lose_and_repeat_no_transaction(seed: int, faults: int) -> None:
    counts = transaction_torture.torture(
        seed,
        lambda now: (
            now.harm.total >= faults
            and now.committed > 0
            and now.aborted > 0
            and now.taken_over > 0
            and now.transformed > 0
            and min(now.jobs, now.writers_killed) > 0
        ),
    )
    assert counts.committed
    assert counts.aborted
    assert counts.taken_over
