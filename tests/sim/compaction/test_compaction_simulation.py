"""Simulated schedules of compacted topics: cleanings beside writers, transactions and readers,
kills between any two stores and file operations, loss of power, full disks, clocks that jump. Some
merge small batches, some alter cleanup.policy and retention. And the faults that the checks must
find.

`make test` runs the fixed seeds; `make test-all` runs new ones, which its tests' ids name.
"""

from __future__ import annotations

import logging

import pytest

from tailrace.core.errors import TailraceError
from tests.kit import seeds
from tests.sim.compaction.planted_faults import PLANTED, Plant
from tests.sim.compaction.schedule import run

SEEDS_A_TEST = 5
SEARCHED = 60
"""Seeds that are tried to find a planted fault."""


@pytest.fixture(autouse=True)
def quiet() -> object:
    """Simulated failures have much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", [0, 1])
def test_schedules_of_compacted_topics_keep_every_promise(seed: int) -> None:
    schedule = run(seed)
    assert schedule.policies is None
    assert schedule.cleaned_bytes > 0


def test_a_schedule_whose_small_batches_are_merged_keeps_every_record() -> None:
    schedule = run(7)
    assert not schedule.is_compacted
    assert schedule.merged.segments > 0


def test_a_schedule_whose_policies_change_keeps_every_promise() -> None:
    schedule = run(19)
    assert schedule.policies is not None
    assert schedule.policies.alterations > 0
    assert schedule.merged.segments > 0
    assert schedule.cleaned_bytes > 0


@pytest.mark.long
@pytest.mark.parametrize("block", seeds.new_blocks(24, SEEDS_A_TEST), ids=seeds.block_name)
def test_new_schedules_of_compacted_topics_keep_every_promise(block: range) -> None:
    seeds.run_each(run, block)


@pytest.mark.long
def test_a_seed_of_compaction_replays_exactly() -> None:
    first, second = run(1), run(1)
    assert (first.world.digest, first.log) == (second.world.digest, second.log)
    assert first.table.offsets == second.table.offsets


@pytest.mark.long
@pytest.mark.slow_because("each planted fault is looked for in some schedules")
@pytest.mark.parametrize(
    ("plant", "first", "faults"), PLANTED, ids=[plant.__name__[1:] for plant, *_ in PLANTED]
)
def test_a_planted_fault_of_the_cleaner_is_found(
    plant: Plant, first: int, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TailraceError)):
        seeds.run_each(lambda seed: run(seed, faults or None), range(first, first + SEARCHED))
