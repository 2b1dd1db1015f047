"""Simulated schedules of transactions: kills between any two stores, loss of power, second owners,
timeouts, late and repeated requests. And the faults that the checks must find.

`make test` runs the fixed seeds; `make test-all` runs new ones, which its tests' ids name.
"""

from __future__ import annotations

import logging

import pytest

from tailrace.core.errors import TailraceError
from tests.kit import seeds
from tests.kit.matrices import short
from tests.sim.transactions.planted_faults import DIRECTED, PLANTED, Plant
from tests.sim.transactions.schedule import run

SEEDS_A_TEST = 3
SEARCHED = 40
"""Seeds that are tried to find a planted fault."""


@pytest.fixture(autouse=True)
def quiet() -> object:
    """Simulated failures have much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    "block", short(seeds.fixed_blocks(2, SEEDS_A_TEST), 1), ids=seeds.block_name
)
def test_schedules_of_transactions_keep_every_promise(block: range) -> None:
    outcomes = [
        written.outcome for seed in block for written in run(seed).history.transactions.values()
    ]
    assert min(outcomes.count("commit"), outcomes.count("abort")) > len(block)


@pytest.mark.long
@pytest.mark.parametrize("block", seeds.new_blocks(20, SEEDS_A_TEST), ids=seeds.block_name)
def test_new_schedules_of_transactions_keep_every_promise(block: range) -> None:
    seeds.run_each(run, block)


@pytest.mark.parametrize(
    ("seed", "fault"),
    [
        (2373319244, "a refused batch came back with its revived log, and stayed open"),
        (3094189496, "a refused marker was not written when its partition was back"),
    ],
)
def test_what_a_seed_of_transactions_has_found_stays_mended(seed: int, fault: str) -> None:
    assert run(seed).history.transactions, fault


def test_a_seed_of_transactions_replays_exactly() -> None:
    first, second = run(1), run(1)
    assert (first.world.digest, first.log) == (second.world.digest, second.log)
    assert first.history.transactions == second.history.transactions


@pytest.mark.parametrize(("plant", "first"), PLANTED, ids=[p.__name__[1:] for p, _ in PLANTED])
def test_a_planted_fault_is_found(
    plant: Plant, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TailraceError)):
        seeds.run_each(run, range(first, first + SEARCHED))


@pytest.mark.parametrize(
    ("plant", "first", "faults"), DIRECTED, ids=[plant.__name__[1:] for plant, *_ in DIRECTED]
)
def test_a_planted_fault_is_found_under_the_faults_that_it_does_not_stand(
    plant: Plant, first: int, faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TailraceError)):
        seeds.run_each(lambda seed: run(seed, faults), range(first, first + SEARCHED))


@pytest.mark.long
@pytest.mark.parametrize("faults", [faults for *_, faults in DIRECTED], ids=" and ".join)
def test_directed_schedules_keep_every_promise(faults: tuple[str, ...]) -> None:
    run(0, faults)
