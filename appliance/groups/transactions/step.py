"""One step of the coordinator: its requests, their answers, and those that have to wait.

Owner: the coordinator.
Invariants: an answer that depends on a change of the step is a refusal where the step is undone.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

from appliance.groups.base.messages import Answer, Requester
from appliance.groups.base.request_validation import shown
from appliance.groups.transactions.counters import Counters
from appliance.groups.transactions.ids.ends import End, find_end
from appliance.groups.transactions.ids.fencing import fenced_sentence
from appliance.groups.transactions.ids.id_table import Entry, IdTable
from appliance.groups.transactions.requests.waiting import Waiter, Waiting
from shm.messages.transaction_messages import Outcome, ProducerEpoch
from tailrace.core.errors import (
    ProducerFencedError,
    TailraceError,
    UnknownTransactionalIdError,
)
from tailrace.protocol.json_messages import encode_error

WAIT_NS = 10_000_000_000
"""Time that a request waits for the workers, or for producer ids. A front waits longer."""


class OwnersRequest(Protocol):
    """A request of the owner of an id, about one of its transactions."""

    @property
    def producer_id(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def owner(self) -> int: ...


class Step:
    """The state that all requests of a step share."""

    def __init__(self, table: IdTable, counters: Counters, now_ns: int) -> None:
        self.table = table
        self.counters = counters
        self.waiting = Waiting()
        self.now_ns = now_ns
        """Time of the step."""
        self._answers: list[tuple[Answer, bool]] = []
        """Answers of this step, and whether they depend on a change of it."""

    def answer(
        self, requester: Requester, body: bytes, code: int = 0, *, depends: bool = False
    ) -> None:
        """Add an answer. `depends`: it would be wrong without the changes of the step."""
        self._answers.append((Answer(requester, code, body), depends))

    def refuse(self, requester: Requester, error: TailraceError) -> None:
        """Answer with an error."""
        self.answer(requester, encode_error(error.detail), int(error.code))

    def entry(self, name: str) -> Entry:
        """The id of this name. Raises UnknownTransactionalIdError."""
        entry = self.table.get(name, self.now_ns)
        if entry is None:
            raise UnknownTransactionalIdError(f"there is no transactional id {shown(name)}")
        return entry

    def wait(
        self, entry: Entry, requester: Requester, api: int, owner: int, until_ns: int = 0,
        outcome: Outcome = Outcome.ABORT, branch: ProducerEpoch | None = None,
    ) -> None:  # fmt: skip
        """Answer when no decision of the id is left."""
        waiter = Waiter(requester, api, owner, until_ns or self.now_ns + WAIT_NS, outcome, branch)
        self.waiting.add(entry.row.id_number, waiter)

    def is_unsettled(self, entry: Entry) -> bool:
        """True if a decision of the id is not carried out everywhere."""
        return bool(entry.unsettled_count or entry.staged_count)

    def check_owner(self, entry: Entry, request: OwnersRequest) -> End | None:
        """Refuse a request of an older owner. Returns the end of the transaction that the request
        names; None: it has none, or it is not known any more.
        """
        end = find_end(entry.row.ended, request.producer_id, request.epoch)
        if request.owner != entry.row.owner:
            self.refuse_fenced(entry, end if end and end.owner == request.owner else None)
        return end

    def refuse_fenced(self, entry: Entry, end: End | None) -> NoReturn:
        """Refuse a request of an older owner, whose transaction had this end."""
        self.counters.fenced += 1
        raise ProducerFencedError(fenced_sentence(entry.row, end))

    def drain_answers(self) -> list[Answer]:
        """The answers of this step, after the commit or `rolled_back`."""
        answers, self._answers = [answer for answer, _ in self._answers], []
        return answers

    def rolled_back(self, error: TailraceError) -> None:
        """Refuse with `error` the requests that were undone."""
        body = encode_error(error.detail)
        for answer, depends in self._answers:
            if depends:
                answer.code, answer.body, answer.is_undone = int(error.code), body, True
        for waiter in self.waiting.rolled_back():
            self._answers.append((Answer(waiter.requester, int(error.code), body, True), False))
