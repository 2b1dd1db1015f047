"""The states of a transactional producer, and which call each allows.

    UNINITIALIZED --init--> READY --begin--> OPEN --commit--> COMMITTING --all acked--> DECIDING
                              ^                |  ^               |                        |
                              |                |  '--interrupted--'                        |
                              |                '-- a record failed --> ABORTABLE           |
                              |                                            | abort         |
                              '<---------------- ABORTING <----------------'               |
                              '<-------------------- the response --------------------------'

    OPEN --prepare--> PREPARING --the response--> PREPARED --commit--> DECIDING
                                                     '-------abort--> ABORTING

    any --another producer has the id--> FENCED

DECIDING: END_TRANSACTION may have been sent, and its response is not known. A commit may be
repeated there until it is known, and nothing else is allowed: an abort could meet a commit that is
durable already. WAITING: the response was that another transaction is in its way, and nothing is
decided. It may be repeated, or aborted. PREPARING: the transaction may be prepared, and the
response is not known. It may be repeated, or aborted. PREPARED: only the decision is left. A
producer that becomes the owner of an id with a prepared transaction begins there.

Owner: a Producer. Changed under its lock.
Invariants:
- Producer id and epoch come from the appliance. They are never computed.
- Outside of OPEN no batch takes records, so no record gets into the next transaction.
- The offsets of a transaction go with its commit, and with nothing else.
Crash: a signal handler may interrupt a change between two calls, never within a straight line of
    assignments (see `tailrace.producer.batches.accumulator`). Each change ends with such a line,
    and may be made twice.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from tailrace.client.topics.offsets import Offsets
from tailrace.core.errors import (
    InvalidTransactionError,
    ProducerFencedError,
    TailraceError,
    TransactionAbortedError,
)
from tailrace.core.records import ConsumerGroupMetadata
from tailrace.core.transaction_branches import FinishedBranch, PreparedTransaction
from tailrace.format.record_batch.batch_header import NO_PRODUCER
from tailrace.producer.batches.producer_batch import ProducerBatch

if TYPE_CHECKING:
    from tailrace.client.records.attached_records import AttachedRecords

BLOCK = "`with producer.transaction():`"


class State(Enum):
    """The state of a transactional producer; see the module's docstring."""

    UNINITIALIZED = "the producer has no producer id yet"
    READY = "no transaction is open"
    OPEN = "a transaction is open"
    ABORTABLE = "the transaction has to be aborted"
    COMMITTING = "the transaction is being committed"
    DECIDING = "the outcome of the commit is not known"
    WAITING = "the commit waits for another transaction"
    ABORTING = "the transaction is being aborted"
    PREPARING = "it is not known whether the transaction is prepared"
    PREPARED = "the transaction is prepared"
    FENCED = "another producer has the transactional id"


class Call(Enum):
    """A call of the program, under its name."""

    INIT = "init_transactions()"
    BEGIN = "begin_transaction()"
    SEND = "send()"
    OFFSETS = "send_offsets_to_transaction()"
    ACKNOWLEDGEMENTS = "send_acknowledgements_to_transaction()"
    BRANCHES = "create_transaction_branches()"
    DELAYS = "cancel_delays() or reschedule_delays()"
    COMMIT = "commit_transaction()"
    ABORT = "abort_transaction()"
    PREPARE = "prepare_transaction()"
    COMPLETE = "complete_transaction()"


_S = State
ALLOWED: dict[Call, frozenset[State]] = {
    Call.INIT: frozenset({_S.UNINITIALIZED, _S.READY, _S.PREPARED}),
    Call.BEGIN: frozenset({_S.UNINITIALIZED, _S.READY}),
    Call.SEND: frozenset({_S.OPEN}),
    Call.OFFSETS: frozenset({_S.OPEN}),
    Call.ACKNOWLEDGEMENTS: frozenset({_S.OPEN}),
    Call.BRANCHES: frozenset({_S.OPEN}),
    Call.DELAYS: frozenset({_S.OPEN}),
    Call.COMMIT: frozenset({_S.OPEN, _S.DECIDING, _S.WAITING, _S.PREPARED}),
    Call.ABORT: frozenset(
        {_S.OPEN, _S.ABORTABLE, _S.WAITING, _S.ABORTING, _S.PREPARING, _S.PREPARED}
    ),
    Call.PREPARE: frozenset({_S.OPEN, _S.PREPARING, _S.PREPARED}),
    Call.COMPLETE: frozenset({_S.READY, _S.PREPARED}),
}
"""Call -> the states that allow it. In READY a commit that follows a commit, and an abort that
follows an abort, do nothing: the caller of an interrupted one repeats it.
"""
_ADVICE: dict[State, str] = {
    _S.UNINITIALIZED: f"call begin_transaction() first, or write {BLOCK}",
    _S.READY: f"call begin_transaction() first, or write {BLOCK}",
    _S.OPEN: "call commit_transaction() or abort_transaction() first",
    _S.ABORTABLE: "call abort_transaction()",
    _S.COMMITTING: "another thread or task is in commit_transaction(); wait for it",
    _S.DECIDING: "call commit_transaction() again, which finds it out",
    _S.WAITING: "call commit_transaction() again, or abort_transaction()",
    _S.ABORTING: "call abort_transaction() again, which finishes it",
    _S.PREPARING: "call prepare_transaction() again, or abort_transaction()",
    _S.PREPARED: "call commit_transaction(), abort_transaction() or complete_transaction() first",
}
_NOT_AFTER_FAILURE = (
    Call.SEND, Call.OFFSETS, Call.ACKNOWLEDGEMENTS, Call.BRANCHES, Call.DELAYS, Call.COMMIT,
    Call.PREPARE,
)  # fmt: skip
_ENDED_BY = {"commit": Call.COMMIT, "abort": Call.ABORT}


class GroupOffsets(NamedTuple):
    """Offsets of a consumer group that go with the commit."""

    metadata: ConsumerGroupMetadata
    offsets: Offsets


class TransactionState:
    """The state machine. Nothing here waits, or uses the connection."""

    def __init__(self, transactional_id: str) -> None:
        self.transactional_id = transactional_id
        self._phase = State.UNINITIALIZED
        """The state, but for ABORTABLE and an interrupted COMMITTING: see `state`."""
        self.attempt = ""
        """Tells repeats of this producer's INIT_TRANSACTIONS from another's; "" when answered."""
        self.owner = -1
        """The number of this producer among the owners of the id."""
        self.producer_id = NO_PRODUCER
        self.epoch = -1
        self.idle_ns = 0
        """Time without an answer of the coordinator after which the id may be unregistered."""
        self.answered_ns = 0
        """The time of the coordinator's newest answer."""
        self.number = 0
        """Number of transactions that have begun."""
        self.is_empty = True
        """True if the transaction has no record."""
        self.failure: TailraceError | None = None
        """The first failure of an open transaction."""
        self.failed_where = ""
        self.fenced_detail = ""
        self.offsets: dict[str, GroupOffsets] = {}
        """By group."""
        self.attached: list[AttachedRecords] = []
        """Records of share consumers that the commit acknowledges."""
        self.branch_count = 0
        """Branches of the transaction."""
        self.branches: tuple[FinishedBranch, ...] = ()
        """The branches that the commit names."""
        self.delay_change_count = 0
        """Requests to cancel or reschedule delayed records, of all transactions."""
        self.prepared: PreparedTransaction | None = None
        """The transaction, from `prepare` on."""
        self.ended_by: str | None = None
        """The outcome of the transaction before, "commit" or "abort"."""
        self.following: tuple[int, int] | None = None
        """The next producer id and epoch, of a transaction that the appliance has aborted."""
        self.caller: object | None = None
        """The operation that runs, None if there is none."""
        self.caller_name = ""

    @property
    def state(self) -> State:
        """The present state. A commit that was interrupted before it asked leaves it OPEN."""
        phase = self._phase
        if phase is State.COMMITTING and self.caller is None:
            phase = State.OPEN
        return State.ABORTABLE if phase is State.OPEN and self.failure is not None else phase

    @property
    def has_nothing(self) -> bool:
        """True if the appliance has nothing of the transaction to decide."""
        return self.is_empty and not (
            self.branch_count or self.offsets or self.attached or self.prepared
        )

    @property
    def has_failed(self) -> bool:
        """True if an open transaction cannot be committed any more."""
        return self.failure is not None

    # ---- checks ----------------------------------------------------------------------------------

    def check(self, call: Call) -> None:
        """Raise unless the state allows the call: ProducerFencedError, TransactionAbortedError,
        InvalidTransactionError.
        """
        state = self.state
        if state in ALLOWED[call]:
            return
        if state is State.FENCED:
            raise ProducerFencedError(self.fenced_detail)
        if state is State.ABORTABLE and call in _NOT_AFTER_FAILURE:
            raise self.aborted_error() from self.failure
        raise InvalidTransactionError(
            f"{call.value} does not fit: {state.value} (transactional_id "
            f"{self.transactional_id!r}); {_ADVICE[state]}"
        )

    def check_failure(self) -> None:
        """Raise if the transaction cannot be committed any more: ProducerFencedError,
        TransactionAbortedError.
        """
        if self._phase is State.FENCED:
            raise ProducerFencedError(self.fenced_detail)
        if self.failure is not None:
            raise self.aborted_error() from self.failure

    def is_repeated(self, call: Call) -> bool:
        """True if the call has nothing left to do, since it was done."""
        return (
            self._phase in (State.READY, State.UNINITIALIZED)
            and _ENDED_BY.get(self.ended_by or "") is call
        )

    def aborted_error(self) -> TransactionAbortedError:
        """The error of a transaction that cannot be committed."""
        failure = self.failure
        if isinstance(failure, TransactionAbortedError) or failure is None:
            return TransactionAbortedError("" if failure is None else failure.detail)
        failed = f"a record of {self.failed_where} failed: " if self.failed_where else ""
        return TransactionAbortedError(
            f"the transaction cannot be committed: {failed}{failure.detail}"
        )

    # ---- operations ------------------------------------------------------------------------------

    def enter(self, caller: object, call: Call) -> None:
        """Begin an operation. Raises InvalidTransactionError while another one runs."""
        if self.caller is not None:
            raise InvalidTransactionError(
                f"{call.value} was called while another thread or task is in {self.caller_name}; "
                "a producer ends one transaction at a time"
            )
        self.caller_name = call.value
        if self._phase is State.COMMITTING:
            self._phase = State.OPEN  # that commit was interrupted
        self.caller = caller

    def begin_init(self) -> str:
        """The `attempt` of INIT_TRANSACTIONS, the same until it is answered."""
        self.attempt = self.attempt or uuid4().hex
        return self.attempt

    def initialized(
        self, owner: int, producer_id: int, epoch: int, idle_ns: int, now_ns: int,
        tag: str | None = None,
    ) -> None:  # fmt: skip
        """The producer is the owner of the id. `tag`: of its prepared transaction, if it has
        one.
        """
        self.owner = owner
        self.attempt = ""
        self.idle_ns = idle_ns
        self.answered_ns = now_ns
        self.producer_id = producer_id
        self.epoch = epoch
        self.following = self.failure = None
        self.ended_by = None
        self.prepared = None if tag is None else self._as_prepared(tag)
        self._phase = State.READY if tag is None else State.PREPARED

    def _as_prepared(self, tag: str) -> PreparedTransaction:
        return PreparedTransaction(self.transactional_id, self.producer_id, self.epoch, tag)

    def begin_prepare(self, tag: str) -> bool:
        """END_TRANSACTION with the outcome "prepare" may be sent from now on. False: it is prepared
        already. Raises InvalidTransactionError if it was sent with another tag.
        """
        if self.prepared is not None and self.prepared.tag != tag:
            raise InvalidTransactionError(
                f"the transaction is prepared with the tag {self.prepared.tag!r:.100}, or may be: "
                "repeat the call with this one"
            )
        if self._phase is State.PREPARED:
            return False
        self.prepared = self._as_prepared(tag)
        self._phase = State.PREPARING
        return True

    def is_prepared(self) -> None:
        """The transaction waits for its decision."""
        self._phase = State.PREPARED

    def is_idle(self, now_ns: int) -> bool:
        """True if no transaction is open, and the workers may have forgotten the id."""
        return self._phase is State.READY and now_ns - self.answered_ns >= self.idle_ns

    def resumed(self, producer_id: int, epoch: int, now_ns: int) -> None:
        """The id is registered again, and the next transaction has this id and epoch."""
        self.producer_id = producer_id
        self.epoch = epoch
        self.answered_ns = now_ns

    def forgotten(self) -> None:
        """The appliance does not know the id, or this epoch of it: the next begin initializes."""
        self.failure = self.following = self.prepared = None
        self._detach("abort")
        if self._phase is not State.READY:
            self.ended_by = "abort"
        self._phase = State.UNINITIALIZED

    def begin(self) -> None:
        """Open a transaction. Raises as `check` does."""
        self.check(Call.BEGIN)
        self.number += 1
        self.is_empty = True
        self.failure = self.following = self.ended_by = None
        self.failed_where = ""
        self.offsets = {}
        self.attached = []
        self.branch_count = 0
        self.branches = ()
        self.prepared = None
        self._phase = State.OPEN

    def unbegin(self, number: int) -> None:
        """Take an empty transaction back whose begin was interrupted."""
        if self._phase is State.OPEN and self.number == number and self.is_empty:
            self._phase = State.READY

    def add_offsets(self, metadata: ConsumerGroupMetadata, offsets: Offsets) -> None:
        """Have the offsets go with the commit. Later ones of a partition replace earlier ones."""
        known = self.offsets.get(metadata.group_id)
        merged = {**(known.offsets if known is not None else {}), **offsets}
        self.offsets[metadata.group_id] = GroupOffsets(metadata, merged)

    def add_branches(self, count: int) -> int:
        """Note branches that are about to be made. Returns the number of the first one."""
        first = self.branch_count
        self.branch_count = first + count
        return first

    def name_branches(self, named: tuple[FinishedBranch, ...] | None) -> None:
        """Have the commit name these branches. A repeated commit names the same. Raises
        InvalidTransactionError.
        """
        if self._phase in (State.DECIDING, State.WAITING, State.PREPARING, State.PREPARED):
            if named is not None and set(named) != set(self.branches):
                raise InvalidTransactionError(
                    "the transaction named other branches before: repeat the call with the same, "
                    "or without branches"
                )
            return
        if named is None and self.branch_count:
            raise InvalidTransactionError(
                f"the transaction has {self.branch_count} branches: name those that count, as "
                "commit_transaction(branches=[...]) with what finish_branch() returned, or "
                "branches=[] if none does"
            )
        for one in named or ():
            made = one.branch
            if (
                made.transactional_id, made.owner, made.producer_id, made.producer_epoch
            ) != (self.transactional_id, self.owner, self.producer_id, self.epoch):  # fmt: skip
                raise InvalidTransactionError(
                    f"branch {made.number} is not one of this transaction: it was made by another "
                    "one, or by another producer"
                )
        self.branches = tuple(dict.fromkeys(named or ()))

    def begin_commit(self) -> None:
        """Take no more records."""
        self._phase = State.COMMITTING

    def decide(self) -> None:
        """END_TRANSACTION may be sent from now on."""
        self._phase = State.DECIDING

    def wait_for_another(self) -> bool:
        """Another transaction is in the way of the commit, and nothing is decided. False for a
        prepared one, which stays so until its decision is known.
        """
        if self.prepared is None:
            self._phase = State.WAITING
        return self.prepared is None

    def begin_abort(self) -> None:
        """Nothing of the transaction is sent any more."""
        self._phase = State.ABORTING

    def ended(self, outcome: str, producer_id: int, epoch: int) -> None:
        """The transaction has this outcome, and the next one this id and epoch."""
        self._detach(outcome)
        self.producer_id = producer_id
        self.epoch = epoch
        self.failure = self.following = None
        self.offsets = {}
        self.prepared = None
        self.ended_by = outcome
        self._phase = State.READY

    def _detach(self, outcome: str) -> None:
        for one in self.attached:
            one.ended_by = outcome

    def fail(
        self, error: TailraceError, where: str = "", following: tuple[int, int] | None = None
    ) -> None:
        """The transaction cannot be committed any more. The first failure counts."""
        if self._phase in (State.OPEN, State.COMMITTING, State.DECIDING, State.PREPARING):
            if self.failure is None:
                self.failed_where = where
                self.failure = error
            self.following = following
            if self._phase in (State.DECIDING, State.PREPARING):
                self._phase = State.OPEN

    def on_failed_batch(self, batch: ProducerBatch) -> None:
        """A batch has failed."""
        if self._phase in (State.OPEN, State.COMMITTING) and batch.error is not None:
            self.fail(batch.error, f"{batch.info.name}-{batch.partition}")

    def fence(self, detail: str) -> None:
        """Another producer has the id. Nothing can be done any more."""
        self._detach("abort")  # where it was committed, the release is refused
        self.fenced_detail = detail
        self._phase = State.FENCED
