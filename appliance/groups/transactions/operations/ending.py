"""Ends of transactions: commit, abort or prepare by the owner, and a decision by the id.

Owner: the coordinator.
Invariants:
- A request of an older owner never gets an epoch.
- The offsets and acknowledgements of a transaction are checked and written with its decision.
- A repeated request gets the outcome that was decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import orjson

from appliance.groups.base.messages import Requester
from appliance.groups.base.request_validation import shown
from appliance.groups.consumer.offset_requests import PreparedCommit
from appliance.groups.consumer.prepared_offsets import GroupOffsets, PreparedOffsets
from appliance.groups.transactions.branches.pool import check_named, pool_of
from appliance.groups.transactions.decider import Decider
from appliance.groups.transactions.ids.ends import (
    BY_OPERATOR,
    BY_PRODUCER,
    OUTCOME_NAMES,
    End,
    find_end,
)
from appliance.groups.transactions.ids.fencing import aborted_sentence
from appliance.groups.transactions.ids.id_table import Entry
from appliance.groups.transactions.ids.prepared_mark import prepared_of
from appliance.groups.transactions.operations.timeouts import Timeouts
from appliance.groups.transactions.requests.answers import ended, following
from appliance.groups.transactions.requests.fields import STAGE, EndRequest, StageRequest
from appliance.groups.transactions.requests.prepared import (
    PREPARE,
    DecideRequest,
    PrepareRequest,
    check_end,
    is_same,
)
from appliance.groups.transactions.step import Step
from shm.messages.transaction_messages import Outcome
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidTransactionError, error_for
from tailrace.protocol.frame import Api

logger = logging.getLogger(__name__)


class OffsetCommits(NamedTuple):
    """The commits of groups, as `GroupService` has them."""

    prepare: Callable[[dict[str, Any]], PreparedCommit]
    """Checks the offsets of one group and changes nothing. Raises TailraceError."""
    apply: Callable[[PreparedCommit], None]
    check_group: Callable[[str], None]
    """Raises TailraceError if the group takes no changes now."""
    reserve: Callable[[PreparedCommit], GroupOffsets]
    """The offsets of a transaction that is prepared, to store with it."""
    apply_reserved: Callable[[GroupOffsets], None]
    """Applies them with its commit, whatever the members of the group have done since."""
    prepared: PreparedOffsets
    prepare_acknowledgements: Callable[[dict[str, Any]], Any]
    """Checks the acknowledgements of one share member and changes nothing. Raises TailraceError."""
    apply_acknowledgements: Callable[[Any], None]


class Ending:
    """Requests END_TRANSACTION."""

    def __init__(
        self, step: Step, decider: Decider, timeouts: Timeouts, offsets: OffsetCommits
    ) -> None:
        self._step = step
        self._decider = decider
        self._timeouts = timeouts
        self._offsets = offsets

    def end(self, requester: Requester, request: EndRequest) -> None:
        """The owner commits or aborts, with the offsets and acknowledgements of groups."""
        entry = self._step.entry(request.transactional_id)
        row = entry.row
        if request.owner == row.owner and (request.producer_id, request.epoch) == (
            row.producer_id, row.epoch
        ):  # fmt: skip
            self._end_current(entry, requester, request)
            return
        end = self._step.check_owner(entry, request)
        if end is None or end.owner != request.owner:
            raise InvalidTransactionError(
                f"(producer id {request.producer_id}, epoch {request.epoch}) is not the current "
                f"transaction of {shown(request.transactional_id)}, and its outcome is not known "
                "any more"
            )
        self._repeat_end(entry, requester, request, end)

    def _end_current(self, entry: Entry, requester: Requester, request: EndRequest) -> None:
        row = entry.row
        check_end(row, request)
        check_named(pool_of(row), request.branches)
        reserved = self._reserved(entry, request.outcome)
        commits = [] if request.outcome is Outcome.ABORT else self._checked(request.offsets)
        acknowledgements = self._prepared_acknowledgements(request)
        self._decider.decide(
            entry, request.outcome, BY_PRODUCER, self._step.now_ns,
            has_row=not request.is_empty, kept=request.branches, metadata=request.metadata,
            staged=request.staged,
        )  # fmt: skip
        for commit in commits:
            self._offsets.apply(commit)
        for one in reserved:
            self._offsets.apply_reserved(one)
        for acknowledged in acknowledgements:
            self._offsets.apply_acknowledgements(acknowledged)
        self._answer_end(entry, requester, request.outcome)

    def stage(self, requester: Requester, request: StageRequest) -> None:
        """The owner leaves a text with its transaction, which goes with the transaction's end."""
        entry = self._step.entry(request.transactional_id)
        row = entry.row
        end = self._step.check_owner(entry, request)
        if (request.producer_id, request.epoch) != (row.producer_id, row.epoch):
            self._refuse_prepare(entry, requester, end)
            return
        if row.prepared:
            raise InvalidTransactionError("the transaction is prepared: it takes no more")
        self._step.table.use(entry, self._step.now_ns)
        self._step.table.change(entry, row._replace(staged=request.staged))
        body = {"outcome": STAGE, **following(entry.row)}
        self._step.answer(requester, orjson.dumps(body), depends=True)

    def prepare(self, requester: Requester, request: PrepareRequest) -> None:
        """The owner seals its transaction, which then waits for its decision."""
        entry = self._step.entry(request.transactional_id)
        row = entry.row
        end = self._step.check_owner(entry, request)
        if (request.producer_id, request.epoch) != (row.producer_id, row.epoch):
            self._refuse_prepare(entry, requester, end)
            return
        prepared = prepared_of(row)
        if prepared is None:
            check_named(pool_of(row), request.branches)
            commits = self._checked(request.offsets)
            self._decider.prepare(
                entry, request.tag, request.branches,
                tuple(self._offsets.reserve(commit) for commit in commits), self._step.now_ns,
            )  # fmt: skip
            self._timeouts.set(entry)
        elif not is_same(prepared, request):
            raise InvalidTransactionError(
                "the transaction is prepared already, with another tag, or other branches or "
                "offsets"
            )
        body = {"outcome": PREPARE, **following(entry.row)}
        self._step.answer(requester, orjson.dumps(body), depends=True)

    def _refuse_prepare(self, entry: Entry, requester: Requester, end: End | None) -> None:
        """Answer the request to prepare a transaction that is not the current one."""
        if end is None or end.owner != entry.row.owner:
            raise InvalidTransactionError("this is not the current transaction of the id")
        code, sentence = ErrorCode.TRANSACTION_ABORTED, aborted_sentence(entry.row, end)
        if end.outcome == Outcome.COMMIT:
            code = ErrorCode.INVALID_TRANSACTION
            sentence = "the transaction was committed before, it takes nothing more"
        body = {"message": sentence, **following(entry.row), "outcome": end.name}
        self._step.answer(requester, orjson.dumps(body), code, depends=True)

    def decide_by_id(self, requester: Requester, request: DecideRequest) -> None:
        """A caller that knows the id decides its prepared transaction, and gets no next epoch."""
        entry = self._step.entry(request.transactional_id)
        row, name = entry.row, shown(request.transactional_id)
        end = find_end(row.ended, request.producer_id, request.epoch)
        if (request.producer_id, request.epoch) == (row.producer_id, row.epoch) and row.prepared:
            reserved = self._reserved(entry, request.outcome)
            self._decider.decide(entry, request.outcome, BY_OPERATOR, self._step.now_ns)
            for one in reserved:
                self._offsets.apply_reserved(one)
            logger.info(
                "prepared_transaction_decided id=%s outcome=%s by=operator",
                name,
                OUTCOME_NAMES[request.outcome],
            )
        elif end is None:
            raise InvalidTransactionError(
                f"(producer id {request.producer_id}, epoch {request.epoch}) is not a prepared "
                f"transaction of {name}: see `tailrace transaction describe`"
            )
        elif end.outcome != request.outcome:
            done = "committed" if end.outcome == Outcome.COMMIT else "aborted"
            raise InvalidTransactionError(f"the transaction of {name} was {done} before")
        body = {"outcome": OUTCOME_NAMES[request.outcome]}
        self._step.answer(requester, orjson.dumps(body), depends=True)

    def _reserved(self, entry: Entry, outcome: Outcome) -> Sequence[GroupOffsets]:
        """The offsets that a prepared transaction commits. Raises TailraceError if a group takes no
        changes now.
        """
        prepared = prepared_of(entry.row)
        if prepared is None or outcome is not Outcome.COMMIT:
            return ()
        for group in prepared.offsets:
            self._offsets.check_group(group.group)
        return prepared.offsets

    def _checked(self, offsets: Sequence[dict[str, Any]]) -> list[PreparedCommit]:
        """Check the offsets of all groups at this moment. All of them are valid, or nothing is
        decided.
        """
        commits = [self._offsets.prepare(one) for one in offsets]
        for commit in commits:
            for topic, partition, code, sentence in commit.refused:
                raise error_for(
                    ErrorCode(code),
                    f"the offset of {topic}-{partition} in the group {commit.name} was refused: "
                    f"{sentence}; nothing of the transaction was decided",
                )
        return commits

    def _prepared_acknowledgements(self, request: EndRequest) -> list[Any]:
        """Check the acknowledgements of all share members at this moment, as `_checked` does the
        offsets.
        """
        if request.outcome is not Outcome.COMMIT:
            return []
        return list(map(self._offsets.prepare_acknowledgements, request.acknowledgements))

    def _repeat_end(
        self, entry: Entry, requester: Requester, request: EndRequest, end: End
    ) -> None:
        """Answer a request about a transaction that has ended: with its outcome, again."""
        self._decider.register(entry)
        if end.outcome == request.outcome:
            self._answer_end(entry, requester, request.outcome)
            return
        if end.outcome == Outcome.ABORT:
            code, sentence = ErrorCode.TRANSACTION_ABORTED, aborted_sentence(entry.row, end)
        else:
            code = ErrorCode.INVALID_TRANSACTION
            sentence = "the transaction was committed before, it cannot be aborted"
        body = {"message": sentence, **following(entry.row), "outcome": end.name}
        self._step.answer(requester, orjson.dumps(body), code, depends=True)

    def _answer_end(self, entry: Entry, requester: Requester, outcome: Outcome) -> None:
        """Answer after the commit. Workers that do not know a new producer id yet would refuse it
        for good, so its first use waits for them.
        """
        row = entry.row
        if row.epoch == 0 and self._step.is_unsettled(entry):
            self._step.wait(entry, requester, Api.END_TRANSACTION, row.owner, outcome=outcome)
        else:
            self._step.answer(requester, ended(row, outcome), depends=True)
