"""Cancels and reschedules within transactions against a model, from seeds: a commit makes all of
them, an abort none, and no reserved row is delivered in between.

A schedule mixes them with plain changes, kills anywhere, power loss and a clock that is set. `make
test` runs fixed seeds; `make test-all` runs new ones, which its tests' ids name.
"""

from __future__ import annotations

import pytest

from tests.kit import seeds
from tests.kit.matrices import short
from tests.kit.stepped.delay_transactions import DelayTransactions
from tests.kit.stepped.delays import MS, SECOND, SPANS, DelayWorld, make_small

SEEDS_A_TEST = 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def run(seed: int, steps: int = 120) -> DelayTransactions:
    world = DelayWorld(seed)
    transactions = DelayTransactions(world)
    rng = world.rng
    sets_clock = rng.random() < 0.3
    for _ in range(steps):
        transactions.feed()
        what = rng.random()
        waiting = [row for row in world.rows.values() if row.fate == "waits"]
        due_us = None
        if rng.random() < 0.5:
            due_us = world.wall_us + rng.randint(0, rng.choice(SPANS))
        if what < 0.25:
            span = rng.choice(SPANS)
            world.schedule([rng.randint(0, span) for _ in range(rng.randint(1, 20))])
        elif what < 0.32 and waiting:
            world.change(rng.choice(waiting), due_us)
        elif what < 0.50:
            number = rng.randrange(2)
            mine = transactions.reserved(number)
            choice = mine if mine and rng.random() < 0.2 else waiting
            if choice:
                transactions.change(number, rng.choice(choice), due_us)
        elif what < 0.62:
            transactions.end(rng.randrange(2), is_committed=rng.random() < 0.5)
        elif what < 0.78:
            jump = rng.randint(-3_600, 3_600) * SECOND if sets_clock and rng.random() < 0.2 else 0
            world.pass_time(
                rng.randint(1, rng.choice((20 * MS, 3 * SECOND, 60 * SECOND, 3_600 * SECOND))), jump
            )
        elif what < 0.83:
            world.kill_scheduler_soon()
        elif what < 0.87:
            world.restart_scheduler()
        elif what < 0.89:
            world.restart_everything(power=rng.random() < 0.5)
        elif what < 0.91:
            world.bench.kill_worker()
        elif what < 0.93:
            world.bench.kill_flusher()
        for _ in range(rng.randint(0, 8)):
            world.step()
    transactions.feed()
    transactions.end_all()
    world.finish()
    return transactions


@pytest.mark.parametrize(
    "block",
    [
        *short(seeds.fixed_blocks(2, 1)),
        *(
            pytest.param(block, marks=pytest.mark.long)
            for block in seeds.new_blocks(24, SEEDS_A_TEST)
        ),
    ],
    ids=seeds.block_name,
)
def test_a_commit_makes_all_changes_and_an_abort_none(block: range) -> None:
    runs = [run(seed) for seed in block]
    assert sum(one.committed_count for one in runs) > 2
    assert sum(one.aborted_count for one in runs) > 2
