"""The calls of a producer that writes a branch, as operations (see
`tailrace.client.connections.steps`).

Owner: one Producer. The state is changed in sections of its lock.
Invariants: a branch is finished once every record of it is acknowledged, and takes none afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tailrace.client.connections.steps import Steps
from tailrace.core.errors import RequestTimeoutError
from tailrace.core.transaction_branches import FinishedBranch, WrittenPartition
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.producer.transactions.branches.state import BranchState

P = ParamSpec("P")
T = TypeVar("T")


class BranchWriter:
    """The branch of one producer."""

    def __init__(self, sender_thread: SenderThread, state: BranchState) -> None:
        self._sender_thread = sender_thread
        self._state = state

    def check_send(self) -> None:
        """Raise unless a record may be sent now: InvalidTransactionError,
        TransactionAbortedError.
        """
        self._sender_thread.check_usable()
        self._state.check_send()

    def begin_send(self, begin: Callable[P, T]) -> Callable[P, T]:
        """`RecordAppender.begin`, which refuses records of a finished or failed branch."""

        def begin_send(*args: P.args, **kwargs: P.kwargs) -> T:
            self.check_send()
            return begin(*args, **kwargs)

        return begin_send

    def finish(self, timeout_s: float | None) -> Steps[FinishedBranch]:
        """Wait until every record is acknowledged, and take none any more."""
        sender_thread, state = self._sender_thread, self._state
        caller = object()
        sender_thread.check_may_wait()
        deadline_ns = None if timeout_s is None else sender_thread.now_ns() + int(timeout_s * 1e9)
        try:
            sender_thread.do(self._close_all, caller)
            if state.finished is None:
                is_settled = yield from sender_thread.settled(self._is_acknowledged, deadline_ns)
                if not is_settled:
                    raise RequestTimeoutError(
                        f"not every record of the branch was acknowledged within {timeout_s} s: "
                        "call finish_branch() again"
                    )
            return sender_thread.do(self._finished)
        finally:
            if state.caller is caller:
                state.caller = None

    def _close_all(self, caller: object) -> None:
        self._sender_thread.check_usable()
        self._state.enter(caller)
        if self._state.finished is None:
            self._state.check_failure()
            self._sender_thread.close_all()

    def _is_acknowledged(self) -> bool:
        self._sender_thread.check_usable()
        self._state.check_failure()
        return not self._sender_thread.accumulator.incomplete_count

    def _finished(self) -> FinishedBranch:
        state = self._state
        if state.finished is None:
            written: dict[tuple[str, int], list[int]] = {}
            for queue in self._sender_thread.accumulator.queues.values():
                if queue.next_ordinal:
                    key = queue.info.delay_of or queue.info.name, queue.partition
                    counts = written.setdefault(key, [0, 0])
                    counts[0] += queue.next_ordinal
                    counts[1] += queue.next_sequence
            partitions = (
                WrittenPartition(topic, partition, *counts)
                for (topic, partition), counts in sorted(written.items())
            )
            state.finished = FinishedBranch(
                state.branch, state.producer_id, state.epoch, tuple(partitions)
            )
        return state.finished
