"""Delayed records against a model, from seeds: each comes once, none early.

A schedule mixes random delays, cancels and reschedulings with kills anywhere, power loss and a
clock that is set. `make test` runs fixed seeds; `make test-all` runs new ones, which its tests' ids
name.
"""

from __future__ import annotations

import pytest

from tailrace.core.schedule import recurrence
from tests.kit import seeds
from tests.kit.matrices import short
from tests.kit.stepped.delay_schedules import change_one, harm_and_step, schedule_some
from tests.kit.stepped.delays import MS, SECOND, DelayWorld, make_small
from workers.delays.delivery import delivered_batches

SEEDS_A_TEST = 2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


def run(seed: int, steps: int = 150, *, recurring: bool = False) -> DelayWorld:
    world = DelayWorld(seed)
    rng = world.rng
    sets_clock = rng.random() < 0.3
    if recurring:
        for _ in range(rng.randint(1, 3)):
            world.schedule_recurring(
                rng.randint(20 * MS, 3_600 * SECOND),
                rng.choice((7 * SECOND, 300 * SECOND, 86_400 * SECOND)),
            )
    for _ in range(steps):
        what = rng.random()
        if what < 0.35:
            schedule_some(world)
        elif what < 0.5 and world.rows:
            change_one(world)
        elif what < 0.7:
            jump = rng.randint(-3_600, 3_600) * SECOND if sets_clock and rng.random() < 0.2 else 0
            world.pass_time(
                rng.randint(1, rng.choice((20 * MS, 3 * SECOND, 60 * SECOND, 3_600 * SECOND))), jump
            )
        harm_and_step(world, what)
    world.finish()
    return world


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
def test_each_delayed_record_comes_once_and_none_early(block: range) -> None:
    seeds.run_each(run, block)


@pytest.mark.parametrize(
    "block",
    [
        range(49, 50),
        *(
            pytest.param(block, marks=pytest.mark.long)
            for block in seeds.new_blocks(12, SEEDS_A_TEST)
        ),
    ],
    ids=seeds.block_name,
)
def test_each_occurrence_of_a_recurring_record_comes_once(
    block: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrence, "MISSED_AT_ONCE", 50)
    monkeypatch.setattr(delivered_batches, "DELIVERY_ROWS", 50)
    seeds.run_each(lambda seed: run(seed, 60, recurring=True), block)
