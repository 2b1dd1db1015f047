"""Simulated schedules of transactions: kills between any two stores, loss of power, second owners,
timeouts, late and repeated requests. And the faults that the checks must find.

`make test` runs the fixed seeds; `make test-all` runs new ones, which its tests' ids name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions.coordinator import TransactionCoordinator
from appliance.groups.transactions.ending import Ending
from appliance.groups.transactions.ids.numbers import Numbers
from appliance.groups.transactions.step import Step
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import TailraceError
from tests.kit import seeds
from tests.sim.transaction_schedule import run
from workers.append.transactions import Transactions, _Marked
from workers.log.producers.open_transactions import OpenTransactions

SEEDS_A_TEST = 3
SEARCHED = 40
"""Seeds that are tried to find a planted fault."""
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(autouse=True)
def quiet() -> object:
    """Simulated failures have much to say."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", seeds.fixed_blocks(2, SEEDS_A_TEST), ids=seeds.block_name)
def test_schedules_of_transactions_keep_every_promise(block: range) -> None:
    outcomes = [
        written.outcome for seed in block for written in run(seed).history.transactions.values()
    ]
    assert min(outcomes.count("commit"), outcomes.count("abort")) > len(block)


@pytest.mark.long
@pytest.mark.parametrize("block", seeds.new_blocks(20, SEEDS_A_TEST), ids=seeds.block_name)
def test_new_schedules_of_transactions_keep_every_promise(block: range) -> None:
    seeds.run_each(run, block)


def test_a_seed_of_transactions_replays_exactly() -> None:
    first, second = run(3), run(3)
    assert (first.world.digest, first.log) == (second.world.digest, second.log)
    assert first.history.transactions == second.history.transactions


# ---- planted faults ------------------------------------------------------------------------------


def _skip_markers(patch: pytest.MonkeyPatch) -> None:
    """A worker leaves a marker out."""
    append = Transactions._append

    def skipping(self: Transactions, partition: Any, key: Any, outcome: Any, durable: int) -> Any:
        if key[1] % 3 == 2:
            self._open.end(partition.assignment.slot, key)
            return _Marked.DONE
        return append(self, partition, key, outcome, durable)

    patch.setattr(Transactions, "_append", skipping)


def _answer_early(patch: pytest.MonkeyPatch) -> None:
    """The coordinator answers without a durable decision."""
    patch.setattr(TransactionCoordinator, "settle", lambda self: self._delivery.settle())


def _accept_late_batches(patch: pytest.MonkeyPatch) -> None:
    """A worker takes batches of any epoch."""
    patch.setattr(Transactions, "refusal", lambda *_: ErrorCode.OK)


def _leave_the_epoch(patch: pytest.MonkeyPatch) -> None:
    """The next transaction has the epoch of the last one."""
    patch.setattr(Numbers, "following", lambda _self, producer_id, epoch: (producer_id, epoch))


def _publish_early(patch: pytest.MonkeyPatch) -> None:
    """The last stable offset passes open transactions."""
    patch.setattr(OpenTransactions, "first_offset", None)


def _keep_no_rows(patch: pytest.MonkeyPatch) -> None:
    """D1, D2: the decisions that are not carried out are in memory only."""
    patch.setattr(TransactionRows, "put_decisions", lambda *_: None)


def _end_any_epoch(patch: pytest.MonkeyPatch) -> None:
    """D4: a decision ends whatever its producer has open."""
    end = Transactions._end

    def any_epoch(self: Transactions, key: Any, outcome: Any) -> bool:
        found = [one for one in {key, *self._open} if one[0] == key[0]]
        return all(end(self, one, outcome) for one in sorted(found))

    patch.setattr(Transactions, "_end", any_epoch)


def _forget_what_is_open(patch: pytest.MonkeyPatch) -> None:
    """D6: what is open is not in snapshots."""
    patch.setattr(OpenTransactions, "to_snapshot", lambda _: [])


def _let_old_owners_go_on(patch: pytest.MonkeyPatch) -> None:
    """D7: requests of an older owner are handled as the owner's."""
    patch.setattr(Step, "refuse_fenced", lambda *_: None)


def _leave_offsets_out(patch: pytest.MonkeyPatch) -> None:
    """D9: the offsets do not go with the decision."""
    patch.setattr(Ending, "_prepared", lambda *_: [])


PLANTED: list[tuple[Plant, int]] = [
    (_skip_markers, 1),
    (_answer_early, 1),
    (_accept_late_batches, 1),
    (_leave_the_epoch, 0),
    (_publish_early, 0),
    (_keep_no_rows, 2),
    (_end_any_epoch, 3),
    (_forget_what_is_open, 1),
    (_let_old_owners_go_on, 0),
    (_leave_offsets_out, 0),
]
"""A fault, and the first seed to try: near one that finds it, a saving and no condition."""


@pytest.mark.parametrize(("plant", "first"), PLANTED, ids=[p.__name__[1:] for p, _ in PLANTED])
def test_a_planted_fault_is_found(
    plant: Plant, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TailraceError)):
        seeds.run_each(run, range(first, first + SEARCHED))
