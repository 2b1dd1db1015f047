"""Planted faults of transactions, each with a seed near one that finds it. The checks of the
simulation must find them; `tests.sim.transactions.planted_seeds` finds the seeds again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from appliance.groups.consumer.offset_requests import OffsetRequests
from appliance.groups.store.transaction_rows import TransactionRows
from appliance.groups.transactions import decider
from appliance.groups.transactions.branches.claims import BranchClaims
from appliance.groups.transactions.branches.pool import BranchPool, pool_of
from appliance.groups.transactions.coordinator import TransactionCoordinator
from appliance.groups.transactions.decider import Decider
from appliance.groups.transactions.decisions import decision_log, delivery
from appliance.groups.transactions.decisions.delivery import Delivery
from appliance.groups.transactions.ids.id_table import Entry
from appliance.groups.transactions.ids.numbers import Numbers
from appliance.groups.transactions.operations.ending import Ending
from appliance.groups.transactions.requests.answers import initialized
from appliance.groups.transactions.step import Step
from shm.messages.transaction_messages import DecidedTransaction, Outcome
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api
from workers.append.decision_progress import DecisionProgress
from workers.append.transactional_producers import Standing, TransactionalProducers
from workers.append.transactions import Transactions, _Marked
from workers.log.producers.open_transactions import OpenTransactions

Plant = Callable[[pytest.MonkeyPatch], None]


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


def _forget_ends(patch: pytest.MonkeyPatch) -> None:
    """Another defence of a decision without a row: the newest ends of its id."""
    patch.setattr(delivery, "find_end", lambda *_: None)


def _keep_no_rows(patch: pytest.MonkeyPatch) -> None:
    """D1, D2: the decisions that are not carried out are in memory only."""
    _forget_ends(patch)
    patch.setattr(TransactionRows, "put_decisions", lambda *_: None)


def _forget_before_the_disk(patch: pytest.MonkeyPatch) -> None:
    """D1: a decision counts as carried out when its marker is in the ring, and is forgotten."""
    _forget_ends(patch)
    patch.setattr(DecisionProgress, "wrote", lambda *_: None)
    patch.setattr(decision_log, "DONE_KEPT_NS", 0)


def _abort_in_memory_only(patch: pytest.MonkeyPatch) -> None:
    """D3: an abort is sent, and the raised epoch is not durable."""
    decide = Decider.decide

    def forgetful(
        self: Decider, entry: Any, outcome: Outcome, by: str, *given: Any, **named: Any
    ) -> None:
        decide(self, entry, outcome, by, *given, **named)
        if outcome is Outcome.ABORT:
            self._table._changed.pop(entry.row.id_number, None)

    patch.setattr(Decider, "decide", forgetful)


def _take_before_the_feed(patch: pytest.MonkeyPatch) -> None:
    """D5: a worker that starts takes batches before it knows what is registered."""
    standing = TransactionalProducers.standing

    def early(self: TransactionalProducers, producer_id: int, epoch: int) -> Standing:
        return standing(self, producer_id, epoch) if self.is_fed else Standing.CURRENT

    patch.setattr(TransactionalProducers, "standing", early)


def _feed_no_decisions(patch: pytest.MonkeyPatch) -> None:
    """D5: a worker that starts, or asks, hears what is registered, and not what was decided."""
    _forget_ends(patch)
    patch.setattr(decision_log.DecisionLog, "outcomes_of", lambda *_: {})
    feed = Delivery._feed

    def registrations(self: Delivery) -> Any:
        unsettled, self._log.unsettled = self._log.unsettled, {}
        try:
            yield from list(feed(self))
        finally:
            self._log.unsettled = unsettled

    patch.setattr(Delivery, "_feed", registrations)


def _answer_inits_early(patch: pytest.MonkeyPatch) -> None:
    """D8: an init is answered before the markers of the owner before are durable."""
    wait = Step.wait

    def early(self: Step, entry: Any, requester: Any, api: int, *given: Any) -> None:
        if api == Api.INIT_TRANSACTIONS:
            self.answer(requester, initialized(entry.row, 60_000), depends=True)
        else:
            wait(self, entry, requester, api, *given)

    patch.setattr(Step, "wait", early)


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
    patch.setattr(Ending, "_checked", lambda *_: [])


def _let_any_member_commit(patch: pytest.MonkeyPatch) -> None:
    """D9: offsets are taken whoever owns their partitions."""
    judge = OffsetRequests._judge
    patch.setattr(OffsetRequests, "_judge", lambda self, name, *_: judge(self, name, {}, None, -1))
    patch.setattr(OffsetRequests, "_member", lambda *_: (None, -1))


def _commit_all_branches(patch: pytest.MonkeyPatch) -> None:
    """One outcome for all branches: both attempts of a repeated task are visible."""

    def all_alike(pool: BranchPool, outcome: Outcome, _kept: object) -> list[DecidedTransaction]:
        return [DecidedTransaction(*one, outcome) for one in pool.registered]

    patch.setattr(decider, "ended_branches", all_alike)


def _register_branches_late(patch: pytest.MonkeyPatch) -> None:
    """A writer gets its branch, and the workers learn it with the next decision."""
    stage = Decider._stage

    def late(self: Decider, entry: Entry, ended: Sequence[DecidedTransaction], **more: Any) -> None:
        if ended or not pool_of(entry.row).registered_count:
            stage(self, entry, ended, **more)

    patch.setattr(Decider, "_stage", late)


def _leave_the_epochs_of_branches(patch: pytest.MonkeyPatch) -> None:
    """The next transaction's branches have the epochs of the last one's."""
    patch.setattr(decider, "raised", lambda pool, count, _: BranchPool(count, pool.producers))


def _give_branches_twice(patch: pytest.MonkeyPatch) -> None:
    """A successor does not reckon with writers that its predecessor has given branches."""
    begin = BranchClaims.__init__
    patch.setattr(BranchClaims, "__init__", lambda self, _unknown_count=0: begin(self))


def _leave_prepared_offsets_out(patch: pytest.MonkeyPatch) -> None:
    """The offsets of a prepared transaction do not go with its decision."""
    patch.setattr(Ending, "_reserved", lambda *_: ())


PLANTED: list[tuple[Plant, int]] = [
    (_skip_markers, 0),
    (_answer_early, 2),
    (_accept_late_batches, 0),
    (_leave_the_epoch, 0),
    (_publish_early, 0),
    (_keep_no_rows, 47),
    (_end_any_epoch, 3),
    (_forget_what_is_open, 1),
    (_let_old_owners_go_on, 0),
    (_leave_offsets_out, 4),
    (_let_any_member_commit, 4),
    (_commit_all_branches, 0),
    (_register_branches_late, 0),
    (_leave_the_epochs_of_branches, 0),
    (_give_branches_twice, 18),
    (_leave_prepared_offsets_out, 4),
]
"""A fault, and the first seed to try: near one that finds it, a saving and no condition."""
DIRECTED: list[tuple[Plant, int, tuple[str, ...]]] = [
    (_forget_before_the_disk, 5, ("power with a slow disk",)),
    (_abort_in_memory_only, 1, ("kill groups",)),
    (_take_before_the_feed, 8, ("kill all", "kill worker", "late")),
    (_feed_no_decisions, 22, ("kill all", "kill groups")),
    (_answer_inits_early, 1, ("slow disk", "kill worker")),
]
"""The same, with the faults under which it shows."""
