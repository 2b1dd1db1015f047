"""Ends of transactions: commit, abort or prepare by the owner, and a decision by the id.

Owner: the coordinator.
Invariants:
- A request of an older owner never gets an epoch.
- The offsets and acknowledgements of a transaction are checked and written with its decision.
- A repeated request gets the outcome that was decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from appliance.groups.base.messages import Requester
from appliance.groups.base.request_validation import shown
from appliance.groups.consumer.offset_requests import PreparedCommit
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
from appliance.groups.transactions.requests.answers import ended, following
from appliance.groups.transactions.requests.fields import EndRequest
from appliance.groups.transactions.requests.prepared import (
    PREPARE,
    DecideRequest,
    PrepareRequest,
    check_end,
    prepared_of,
)
from appliance.groups.transactions.step import Step
from appliance.groups.transactions.timeouts import Timeouts
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
        end = find_end(row.ended, request.producer_id, request.epoch)
        if request.owner != row.owner:
            self._step.refuse_fenced(entry, end if end and end.owner == request.owner else None)
        if (request.producer_id, request.epoch) == (row.producer_id, row.epoch):
            check_end(row, request)
            check_named(pool_of(row), request.branches)
            commits = self._prepared(request)
            acknowledgements = self._prepared_acknowledgements(request)
            self._decider.decide(
                entry, request.outcome, BY_PRODUCER, self._step.now_ns,
                has_row=not request.is_empty, kept=request.branches, metadata=request.metadata,
            )  # fmt: skip
            for commit in commits:
                self._offsets.apply(commit)
            for one in acknowledgements:
                self._offsets.apply_acknowledgements(one)
            self._answer_end(entry, requester, request.outcome)
        elif end is None or end.owner != request.owner:
            raise InvalidTransactionError(
                f"(producer id {request.producer_id}, epoch {request.epoch}) is not the current "
                f"transaction of {shown(request.transactional_id)}, and its outcome is not known "
                "any more"
            )
        else:
            self._repeat_end(entry, requester, request, end)

    def prepare(self, requester: Requester, request: PrepareRequest) -> None:
        """The owner seals its transaction, which then waits for its decision."""
        entry = self._step.entry(request.transactional_id)
        row = entry.row
        end = find_end(row.ended, request.producer_id, request.epoch)
        if request.owner != row.owner:
            self._step.refuse_fenced(entry, end if end and end.owner == request.owner else None)
        if (request.producer_id, request.epoch) != (row.producer_id, row.epoch):
            self._refuse_prepare(entry, requester, end)
            return
        prepared = prepared_of(row)
        if prepared is None:
            check_named(pool_of(row), request.branches)
            self._decider.prepare(entry, request.tag, request.branches, self._step.now_ns)
            self._timeouts.set(entry)
        elif (prepared.tag, prepared.branches) != (request.tag, request.branches):
            raise InvalidTransactionError(
                "the transaction is prepared already, with another tag or other branches"
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
            sentence = "the transaction was committed before, it cannot be prepared"
        body = {"message": sentence, **following(entry.row), "outcome": end.name}
        self._step.answer(requester, orjson.dumps(body), code, depends=True)

    def decide_by_id(self, requester: Requester, request: DecideRequest) -> None:
        """Whoever knows the id decides its prepared transaction, and gets no next epoch."""
        entry = self._step.entry(request.transactional_id)
        row, name = entry.row, shown(request.transactional_id)
        end = find_end(row.ended, request.producer_id, request.epoch)
        if (request.producer_id, request.epoch) == (row.producer_id, row.epoch) and row.prepared:
            self._decider.decide(entry, request.outcome, BY_OPERATOR, self._step.now_ns)
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

    def _prepared(self, request: EndRequest) -> list[PreparedCommit]:
        """Check the offsets of all groups at this moment. All of them are valid, or nothing is
        decided.
        """
        if request.outcome is not Outcome.COMMIT:
            return []
        commits = [self._offsets.prepare(one) for one in request.offsets]
        for commit in commits:
            for topic, partition, code, sentence in commit.refused:
                raise error_for(
                    ErrorCode(code),
                    f"the offset of {topic}-{partition} in the group {commit.name} was refused: "
                    f"{sentence}; nothing of the transaction was decided",
                )
        return commits

    def _prepared_acknowledgements(self, request: EndRequest) -> list[Any]:
        """Check the acknowledgements of all share members at this moment, as `_prepared` does the
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
