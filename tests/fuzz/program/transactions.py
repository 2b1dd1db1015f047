"""The transactional producers of a fuzzed program, held against the model of their transactions:
blocks and single calls, branches, prepared transactions, offsets, and rivals for one id.

Owner: one ProgramRun (`tests.fuzz.program.run`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from tailrace import TopicPartition
from tailrace.core.errors import (
    InvalidTransactionError,
    ProducerFencedError,
    RequestTimeoutError,
    TailraceError,
    TransactionAbortedError,
)
from tests.fuzz.program.clients import KINDS, NOTHING, BodyError, Client
from tests.fuzz.program.model import Finding, expect
from tests.fuzz.program.operations import Operation
from tests.fuzz.program.transaction_model import Branch, Outcome, Transaction
from tests.fuzz.program.world import World

LEDGER, INPUTS = "t", "s"
"""The topics of the transactions' records and of the offsets that go with them."""
LEDGER_PARTITIONS = 2
INPUT_COUNT = 20
GROUP = "transforms"
TIMEOUT_MS = 60_000
TRIES = 6
"""Number of times that a call is repeated until it has an outcome."""
_lives = itertools.count()


class TransactionClient(Client):
    """A transactional producer."""

    def __init__(
        self, run: World, slot: str, kind: str, name: str, settings: dict[str, Any]
    ) -> None:
        super().__init__(run, slot, kind)
        run.make_ledger()
        self._kind = kind
        self._id = run.name(f"id-{name}")
        self._ledger = run.ledger
        self._numbers = itertools.count()
        self._life = f"{slot}.{next(_lives)}"
        self._now: Transaction | None = None
        self._is_fenced = False
        self._expected: tuple[type[TailraceError], ...] = ()
        self.client = KINDS[kind](
            run.address,
            transactional_id=self._id,
            max_block_ms=TIMEOUT_MS,
            delivery_timeout_ms=TIMEOUT_MS,
            **settings,
        )
        self._take_over(Operation(slot, "open"))

    def _take_over(self, operation: Operation) -> None:
        """Fence another producer of the id, and decide what it has prepared."""
        former = self._ledger.owners.get(self._id)
        if isinstance(former, TransactionClient):
            former._is_fenced = True
            if former._now is not None and former._now.outcome is Outcome.OPEN:
                self._ledger.ends(former._now, Outcome.ABORTED)
        self._ledger.owners[self._id] = self
        prepared = self._insist("init", partial(self.client.init_transactions, keep_prepared=True))
        kept = self._ledger.prepared.pop(self._id, None)
        expect(
            (prepared and prepared.tag) == (kept and kept.tag),
            f"{operation}: {prepared} is prepared, and {kept} was",
        )
        if kept is not None:
            commits = len(kept.tag) % 2 == 0
            decided = partial(self.client.complete_transaction, prepared if commits else None)
            expect(self._insist("complete", decided) is commits, "the decision is another one")
            self._ledger.ends(kept, Outcome.COMMITTED if commits else Outcome.ABORTED)

    # ---- calls -----------------------------------------------------------------------------------

    def step(self, operation: Operation) -> None:
        if not self._is_fenced or operation.name == "close":
            super().step(operation)
            return
        if operation.name == "commit" and self._now is not None:
            self._expected = (ProducerFencedError, TransactionAbortedError)
            found = self.make(operation, self._commit)
            expect(
                found is NOTHING or not self._now.surely_has_any,
                f"{operation}: a fenced producer has committed",
            )

    def allows(self, error: TailraceError) -> bool:
        if isinstance(error, (RequestTimeoutError, TransactionAbortedError)):
            return bool(self.run.kill_count) or isinstance(error, self._expected)
        return super().allows(error) or isinstance(error, self._expected)

    def _insist(self, name: str, call: Callable[[], Any], *expected: type[TailraceError]) -> Any:
        """A call without faults, repeated until it has a result, or one of these errors."""
        self._expected = expected
        for _ in range(TRIES):
            result = self.make(Operation(self.slot, name), call)
            if result is not NOTHING:
                return result
            if isinstance(self.error, expected):
                return self.error
        raise Finding(f"{self.slot}.{name} has no outcome: {self.error}")

    def make(
        self, operation: Operation, call: Callable[[], Any], *, patience_s: float | None = None
    ) -> Any:
        try:
            return super().make(operation, call, patience_s=patience_s)
        finally:
            self._expected = ()

    @property
    def _may_write(self) -> bool:
        return self._now is not None and self._now.outcome is Outcome.OPEN

    def _values(self, count: int, life: str | None = None) -> list[bytes]:
        return [f"{life or self._life}-{next(self._numbers)}".encode() for _ in range(count)]

    def _send(self, client: Any, value: bytes) -> Any:
        partition = int(value.rpartition(b"-")[2]) // 2 % LEDGER_PARTITIONS
        return client.send(self.run.name(LEDGER), value, partition=partition)

    # ---- operations ------------------------------------------------------------------------------

    def begin(self, operation: Operation) -> None:
        """`begin_transaction`."""
        if self._now is None:
            if self.make(operation, self.client.begin_transaction) is NOTHING:
                self._reset()
            else:
                self._now = self._ledger.begins()

    def send(self, operation: Operation, count: int) -> None:
        """`send`, in the open transaction."""
        if not self._may_write:
            return
        assert self._now is not None
        for value in self._values(count):
            self._ledger.sends(self._now, [value])
            found = self.make(operation, partial(self._send, self.client, value))
            if found is not NOTHING:
                self._now.values[value] = True
            elif self.was_cut_off and not self.is_async:
                self._now.values[value] = False
            elif self.error is not None:
                self._abort_it()
                return

    def flush(self, operation: Operation) -> None:
        """`flush`."""
        self.make(operation, self.client.flush)

    def branch(self, operation: Operation, count: int, is_finished: bool, is_named: bool) -> None:
        """A branch with a producer of its own, which is finished or closed before."""
        if not self._may_write:
            return
        transaction = self._now
        assert transaction is not None
        transaction.branches = transaction.branches or []
        made = self.make(operation, lambda: self.client.create_transaction_branches(1))
        if made is NOTHING:
            return
        branch = Branch(self._values(count, f"{self.slot}.b{next(_lives)}"))
        transaction.branches.append(branch)
        self._ledger.sends(transaction, branch.values)
        writer = KINDS[self._kind](
            self.run.address, transaction_branch=made[0], max_block_ms=TIMEOUT_MS
        )
        plain = Operation(self.slot, "branch")
        is_whole = all(
            self.make(plain, partial(self._send, writer, value)) is not NOTHING
            for value in branch.values
        )
        if is_whole and is_finished:
            finished = self.make(plain, writer.finish_branch)
            branch.finished = finished if finished is not NOTHING and is_named else None
        self.make(plain, writer.close)

    def offsets(self, operation: Operation, offset: int) -> None:
        """`send_offsets_to_transaction`."""
        if self._may_write:
            assert self._now is not None
            key = TopicPartition(self.run.name(INPUTS), 0)
            call = partial(
                self.client.send_offsets_to_transaction, {key: offset}, self.run.name(GROUP)
            )
            if self.make(operation, call) is NOTHING:
                self._abort_it()
            else:
                self._now.offset = offset

    def _commit(self) -> Any:
        assert self._now is not None
        if self._now.outcome is Outcome.PREPARED:
            return self.client.commit_transaction()
        return self.client.commit_transaction(branches=self._now.named)

    def commit(self, operation: Operation) -> None:
        """`commit_transaction`, until its outcome is known."""
        transaction = self._now
        if transaction is None:
            return
        found = self.make(operation, self._commit)
        if found is NOTHING and not isinstance(self.error, TransactionAbortedError):
            found = self._insist("commit", self._commit, TransactionAbortedError)
        if found is None:
            self._ends(Outcome.COMMITTED)
        else:
            expect(self.run.kill_count, f"{operation}: {self.error}")
            self._abort_it()

    def abort(self, operation: Operation) -> None:
        """`abort_transaction`."""
        if self._now is not None:
            self.make(operation, self.client.abort_transaction)
            self._abort_it()

    def _abort_it(self) -> None:
        self._insist("abort", self.client.abort_transaction)
        self._ends(Outcome.ABORTED)

    def _ends(self, outcome: Outcome) -> None:
        assert self._now is not None
        self._ledger.prepared.pop(self._id, None)
        self._ledger.ends(self._now, outcome)
        self._now = None

    def prepare(self, operation: Operation, tag: str) -> None:
        """`prepare_transaction`; `commit`, `abort`, a successor or an administrator decides."""
        if not self._may_write:
            return
        transaction = self._now
        assert transaction is not None
        call = partial(self.client.prepare_transaction, tag, branches=transaction.named)
        found = self.make(operation, call)
        if found is NOTHING and not isinstance(self.error, TransactionAbortedError):
            found = self._insist("prepare", call, TransactionAbortedError)
        if isinstance(self.error, TransactionAbortedError):
            self._abort_it()
            return
        expect(found.tag == tag, f"{operation}: {found}")
        transaction.outcome, transaction.tag = Outcome.PREPARED, tag
        self._ledger.prepared[self._id] = transaction

    def block(self, operation: Operation, count: int, raises: bool) -> None:
        """`with producer.transaction()`, ended by its end or by an exception of its body."""
        if self._now is not None:
            return
        transaction = self._ledger.begins()
        values = self._values(count)
        self._ledger.sends(transaction, values)
        transaction.values.update(dict.fromkeys(values, True))
        call = self._block_async if self.is_async else self._block
        found = self.make(operation, lambda: call(values, raises))
        if found is not NOTHING:
            self._ledger.ends(transaction, Outcome.COMMITTED)
        elif isinstance(self.error, BodyError):
            self._ledger.ends(transaction, Outcome.ABORTED)
        else:
            self._ledger.ends(transaction, Outcome.UNKNOWN)
            self._reset()

    def _block(self, values: list[bytes], raises: bool) -> Any:
        with self.client.transaction():
            for value in values:
                self._send(self.client, value)
            if raises:
                raise BodyError

    async def _block_async(self, values: list[bytes], raises: bool) -> Any:
        async with self.client.transaction():
            for value in values:
                await self._send(self.client, value)
            if raises:
                raise BodyError

    def _reset(self) -> None:
        """A call was cut off, and what is open is not known: nothing is afterwards."""
        found = self._insist("abort", self.client.abort_transaction, InvalidTransactionError)
        if isinstance(found, InvalidTransactionError):
            expected = InvalidTransactionError, TransactionAbortedError
            found = self._insist("commit", self.client.commit_transaction, *expected)
            if isinstance(found, TransactionAbortedError):
                self._insist("abort", self.client.abort_transaction)

    def close(self, operation: Operation, _how: str = "") -> None:
        """`close`: aborts what is open, and leaves what is prepared."""
        self.make(operation, self.client.close)
        if self.was_cut_off:
            self.make(Operation(self.slot, "close"), self.client.close)
        self.is_open = False
        if self._may_write and not self._is_fenced:
            self._ends(Outcome.ABORTED)
        if self._ledger.owners.get(self._id) is self:
            del self._ledger.owners[self._id]
