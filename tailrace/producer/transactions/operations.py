"""The calls of a transactional producer, as operations (see `tailrace.client.connections.steps`).

A commit waits until every batch is acknowledged, and then asks END_TRANSACTION, which carries the
offsets. The appliance decides it durably, and answers with the next producer id and epoch. END is
repeated until it has an answer: the appliance answers a repeated one alike.

Owner: one Producer. The state is changed in sections of its lock.
Invariants:
- One operation runs at a time. Another thread's is refused.
- END_TRANSACTION is sent in DECIDING or ABORTING only, and only when no batch is to be sent.
- Outside of them nothing of the transaction is decided.
Crash: an operation may end at each of its waits, and a signal handler may interrupt it anywhere.
    The state then allows the same call again, which goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from tailrace.client.config.settings import ProducerSettings
from tailrace.client.connections.steps import Steps, decode_answer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    ClientClosedError,
    InvalidTransactionError,
    NotReachableError,
    ProducerFencedError,
    RequestTimeoutError,
    TailraceError,
    TransactionAbortedError,
    error_for,
)
from tailrace.core.log import logger
from tailrace.core.transaction_branches import (
    FinishedBranch,
    PreparedTransaction,
    TransactionBranch,
)
from tailrace.producer.batches.accumulator import NS_PER_MS
from tailrace.producer.sending.sender_thread import SenderThread
from tailrace.producer.transactions.branches.arguments import count_of, finished_in
from tailrace.producer.transactions.branches.creation import create_branches
from tailrace.producer.transactions.content import add_acknowledgements, add_offsets, end_body
from tailrace.producer.transactions.coordinator_requests import (
    IDENTITY,
    NotCarriedOutError,
    asked,
    following_in,
    is_committed_in,
    numbers_in,
    repeated,
    tag_in,
)
from tailrace.producer.transactions.delay_changes import change_delays
from tailrace.producer.transactions.refusals import refused, too_large
from tailrace.producer.transactions.state import ALLOWED, Call, State, TransactionState
from tailrace.protocol.frame import JSON_MAX_BYTES, Api
from tailrace.protocol.session import Response

if TYPE_CHECKING:
    from tailrace.core.records import ConsumerGroupMetadata, OffsetAndMetadata
    from tailrace.core.topic_partition import TopicPartition

T = TypeVar("T")
SHORT_ABORT_S = 5.0
"""Timeout of the abort that a close, or an interrupted block, makes. The appliance's
transaction_timeout_ms makes it otherwise.
"""
_NOT_CURRENT = frozenset({ErrorCode.UNKNOWN_TRANSACTIONAL_ID, ErrorCode.INVALID_TRANSACTION})


def _not_known(error: TailraceError) -> str:
    return (
        "the outcome of the commit is not known: call commit_transaction() again, which finds it "
        f"out ({error.detail})"
    )


class Transactions:
    """The transactions of one producer."""

    def __init__(
        self,
        settings: ProducerSettings,
        sender_thread: SenderThread,
        state: TransactionState,
    ) -> None:
        self._settings = settings
        self._sender_thread = sender_thread
        self._state = state
        self._is_abandoned = False
        """True if the producer's close has aborted a transaction."""

    # ---- records ---------------------------------------------------------------------------------

    def check_send(self) -> None:
        """Raise unless a record may be sent now: InvalidTransactionError, TransactionAbortedError,
        ProducerFencedError.
        """
        self._sender_thread.check_usable()
        self._state.check(Call.SEND)

    def begin_send(self, begin: Callable[..., T]) -> Callable[..., T]:
        """`RecordAppender.begin`, which refuses records outside of a transaction."""

        def begin_send(
            topic: str,
            value: Any,
            key: Any,
            headers: Any,
            partition: int | None,
            timestamp: datetime | int | None,
            on_delivery: Any,
            deliver_at: datetime | None,
            deliver_after: timedelta | None,
            repeat: Any,
        ) -> T:
            self.check_send()
            return begin(
                topic, value, key, headers, partition, timestamp, on_delivery,
                deliver_at, deliver_after, repeat,
            )  # fmt: skip

        return begin_send

    def send_offsets(
        self,
        offsets: Mapping[TopicPartition, int | OffsetAndMetadata],
        group_metadata: ConsumerGroupMetadata | str,
    ) -> Steps[None]:
        """Have the offsets go with the commit."""
        return add_offsets(self._sender_thread, self._state, offsets, group_metadata)

    def send_acknowledgements(self, share_consumer: Any, records: Any, outcome: Any) -> Steps[None]:
        """Have the acknowledgements go with the commit."""
        return add_acknowledgements(
            self._sender_thread, self._state, share_consumer, records, outcome
        )

    def create_branches(self, count: int) -> Steps[list[TransactionBranch]]:
        """Make branches of the open transaction."""
        return self._alone(
            Call.BRANCHES,
            create_branches(
                self._sender_thread, self._state, count_of(count), self._deadline_ns(None)
            ),
        )

    def change_delays(
        self, changes: Mapping[str, int | None], topic: str | None
    ) -> Steps[dict[str, Any]]:
        """Have delayed records cancelled or rescheduled with the commit."""
        return self._alone(
            Call.DELAYS,
            change_delays(self._settings, self._sender_thread, self._state, changes, topic),
        )

    # ---- begin -----------------------------------------------------------------------------------

    def initialize(
        self, timeout_s: float | None, *, keeps_prepared: bool = False
    ) -> Steps[PreparedTransaction | None]:
        """Become the owner of the transactional id, and of its prepared transaction. A second call
        does nothing.
        """
        return self._alone(
            Call.INIT, self._initialize(Call.INIT, timeout_s, keeps_prepared=keeps_prepared)
        )

    def begin(self) -> Steps[None]:
        """Open a transaction. The first call initializes."""
        return self._alone(Call.BEGIN, self._begin())

    def begin_block(self) -> Steps[None]:
        """Open a transaction for a `with` block. Interrupted, it is not open."""
        state, number = self._state, self._state.number + 1
        try:
            yield from self.begin()
        except InvalidTransactionError:
            raise
        except BaseException:
            state.unbegin(number)
            raise

    def _begin(self) -> Steps[None]:
        yield from self._initialize(Call.BEGIN, None)
        yield from self._resume()
        self._sender_thread.do(self._state.begin)

    def _resume(self) -> Steps[None]:
        """After an idle time, learn which epoch the next transaction has.

        The appliance registers an idle id again when its owner asks. An id that has expired is
        taken again.
        """
        sender_thread, state = self._sender_thread, self._state
        if not state.is_idle(sender_thread.now_ns()):
            return
        request = {"transactional_id": state.transactional_id, "owner": state.owner}
        response = yield from asked(
            self._sender_thread, Api.DESCRIBE_TRANSACTION, request, self._deadline_ns(None)
        )
        code = response.code
        if code is ErrorCode.OK:
            answer = decode_answer(Api.DESCRIBE_TRANSACTION, response)
            sender_thread.do(self._resumed, *numbers_in(answer, *IDENTITY))
        elif code is ErrorCode.UNKNOWN_TRANSACTIONAL_ID:
            sender_thread.do(state.forgotten)
            yield from self._initialize(Call.BEGIN, None)
        elif code is ErrorCode.PRODUCER_FENCED:
            sender_thread.do(state.fence, response.detail())
            raise ProducerFencedError(response.detail())
        else:
            raise error_for(code, response.detail(), response.correlation_id)

    def _resumed(self, producer_id: int, epoch: int) -> None:
        self._sender_thread.sender.begin_epoch()
        self._state.resumed(producer_id, epoch, self._sender_thread.now_ns())

    def _initialize(
        self, call: Call, timeout_s: float | None, *, keeps_prepared: bool = False
    ) -> Steps[PreparedTransaction | None]:
        self._sender_thread.do(self._check, call)
        state, settings = self._state, self._settings
        if state.state is not State.UNINITIALIZED:
            return state.prepared
        request = {
            "transactional_id": state.transactional_id,
            "timeout_ms": settings.transaction_timeout_ms,
            "client_id": settings.client_id,
            "attempt": self._sender_thread.do(state.begin_init),
            **({"keep_prepared": True} if keeps_prepared else {}),
        }
        response = yield from asked(
            self._sender_thread, Api.INIT_TRANSACTIONS, request, self._deadline_ns(timeout_s)
        )
        if response.code is not ErrorCode.OK:
            raise error_for(response.code, response.detail(), response.correlation_id)
        answer = decode_answer(Api.INIT_TRANSACTIONS, response)
        numbers = numbers_in(answer, "owner", *IDENTITY, "idle_ms")
        self._sender_thread.do(self._initialized, tag_in(answer), *numbers)
        return state.prepared

    def _initialized(
        self, tag: str | None, owner: int, producer_id: int, epoch: int, idle_ms: int
    ) -> None:
        self._sender_thread.sender.begin_epoch()
        self._state.initialized(
            owner, producer_id, epoch, idle_ms * NS_PER_MS, self._sender_thread.now_ns(), tag
        )

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self, timeout_s: float | None, branches: Any = None) -> Steps[None]:
        """Commit the open transaction, or find out what became of a commit. `branches`: the
        finished branches that count.
        """
        named = None if branches is None else finished_in(branches)
        return self._alone(Call.COMMIT, self._commit(timeout_s, named))

    def _commit(
        self, timeout_s: float | None, branches: tuple[FinishedBranch, ...] | None
    ) -> Steps[None]:
        sender_thread, state = self._sender_thread, self._state
        deadline_ns = None if timeout_s is None else self._deadline_ns(timeout_s)
        if sender_thread.do(self._close_all, Call.COMMIT, branches):
            return
        if state.state is State.COMMITTING:
            yield from self._acknowledged(Call.COMMIT, timeout_s, deadline_ns)
        if not sender_thread.do(self._decide):
            return
        try:
            response = yield from self._end("commit", deadline_ns)
        except NotCarriedOutError as error:
            is_in_the_way = (
                error.answered_code is ErrorCode.CONCURRENT_TRANSACTIONS
                and sender_thread.do(state.wait_for_another)
            )
            raise RequestTimeoutError(
                "another transaction is in the way of the commit, and nothing is decided: call "
                f"commit_transaction() again, or abort_transaction() ({error.detail})"
                if is_in_the_way
                else _not_known(error)
            ) from error
        except (RequestTimeoutError, NotReachableError) as error:
            raise RequestTimeoutError(_not_known(error)) from error
        if response.code is ErrorCode.OK:
            answer = decode_answer(Api.END_TRANSACTION, response)
            if answer.get("outcome") != "abort":
                sender_thread.do(self._answered, "commit", *numbers_in(answer, *IDENTITY))
                return
        raise sender_thread.do(refused, state, response)

    def _acknowledged(
        self, call: Call, timeout_s: float | None, deadline_ns: int | None
    ) -> Steps[None]:
        """Wait until every batch is acknowledged. Raises RequestTimeoutError, and the error of a
        transaction of which one never will be.
        """
        is_settled = yield from self._sender_thread.settled(self._is_acknowledged, deadline_ns)
        if not is_settled:
            raise RequestTimeoutError(
                f"not every record of the transaction was acknowledged within {timeout_s} s, "
                f"so nothing is decided: call {call.value} again, or abort_transaction()"
            )

    def _close_all(self, call: Call, branches: tuple[FinishedBranch, ...] | None) -> bool:
        """Begin to commit or to prepare. True: it is done already."""
        state = self._state
        self._sender_thread.check_usable()
        if state.is_repeated(call):
            return True
        state.check(call)
        state.name_branches(branches)
        if state.state is State.OPEN:
            state.begin_commit()
            self._sender_thread.close_all()
        return False

    def _is_acknowledged(self) -> bool:
        """True if every batch of the transaction is. Raises if one never will be."""
        self._sender_thread.check_usable()
        self._state.check_failure()
        return not self._sender_thread.accumulator.incomplete_count

    def _decide(self) -> bool:
        """True if the appliance has something to decide."""
        state = self._state
        if state.has_nothing:
            state.ended("commit", state.producer_id, state.epoch)
            return False
        state.decide()
        return True

    # ---- abort -----------------------------------------------------------------------------------

    def abort(self, timeout_s: float | None) -> Steps[None]:
        """Abort the open transaction."""
        return self._alone(Call.ABORT, self._abort(timeout_s))

    def _abort(self, timeout_s: float | None) -> Steps[None]:
        sender_thread = self._sender_thread
        if sender_thread.do(self._begin_abort):
            return
        try:
            response = yield from self._end("abort", self._deadline_ns(timeout_s))
        except (RequestTimeoutError, NotReachableError) as error:
            raise RequestTimeoutError(
                f"the abort has no answer yet: call abort_transaction() again ({error.detail})"
            ) from error
        code = response.code
        if code is ErrorCode.PRODUCER_FENCED:
            sender_thread.do(self._state.fence, response.detail())
            raise ProducerFencedError(response.detail())
        if code in (ErrorCode.OK, ErrorCode.TRANSACTION_ABORTED):
            following = following_in(response)
            if following is not None:
                sender_thread.do(self._answered, "abort", *following)
                return
        elif is_committed_in(response):
            following = following_in(response)
            if following is not None:
                sender_thread.do(self._answered, "commit", *following)
            raise InvalidTransactionError(response.detail())
        elif code not in _NOT_CURRENT:
            raise error_for(code, response.detail(), response.correlation_id)
        was_prepared = sender_thread.do(self._forget)
        if was_prepared:
            raise InvalidTransactionError(
                "it is not known how the prepared transaction has ended, since others have decided "
                f"about the id meanwhile: {response.detail()}"
            )

    def _forget(self) -> bool:
        """The appliance does not know the transaction. True if others could have committed it."""
        was_prepared = self._state.prepared is not None
        self._state.forgotten()
        return was_prepared

    def _begin_abort(self) -> bool:
        """Give up what is not acknowledged. True: the appliance need not be asked."""
        state = self._state
        self._sender_thread.check_usable()
        if state.is_repeated(Call.ABORT):
            return True
        state.check(Call.ABORT)
        following = state.following
        state.begin_abort()
        accumulator = self._sender_thread.accumulator
        accumulator.end_all(
            TransactionAbortedError(
                "the transaction was aborted before the record was acknowledged"
            )
        )
        accumulator.expire_linger(self._sender_thread.now_ns())
        if following is None and state.is_empty and not (state.branch_count or state.prepared):
            following = state.producer_id, state.epoch
        if following is not None:
            self._ended("abort", *following)
        return following is not None

    # ---- blocks and the end ----------------------------------------------------------------------

    def is_left(self, raised: type[BaseException] | None) -> bool:
        """True if nothing is to be done at the end of a `with` block: it has ended the transaction
        itself, another system decides it, or it has `raised` and the producer is closed. Raises
        ClientClosedError if the producer was closed in the block, and would have committed.
        """
        if raised is not None:
            return self._sender_thread.closed
        if self._is_abandoned:
            raise ClientClosedError(
                "the producer was closed before the end of the block, which has aborted its "
                "transaction: close it behind the block"
            )
        return self._state.state in (State.READY, State.PREPARED)

    def leave_block(self, raised: type[BaseException] | None, branches: Any = None) -> Steps[None]:
        """End a `with` block: commit it, or abort it if it has `raised`."""
        if self.is_left(raised):
            return
        if raised is not None:
            yield from self._abort_quietly(None if issubclass(raised, Exception) else SHORT_ABORT_S)
            return
        try:
            yield from self.commit(None, branches)
        except GeneratorExit:
            raise
        except Exception:
            yield from self._abort_quietly(None)
            raise
        except BaseException:
            yield from self._abort_quietly(SHORT_ABORT_S)
            raise

    def abandon(self, timeout_s: float | None) -> Steps[None]:
        """Abort what is open, as well as it can be done within `timeout_s`: the producer ends. A
        block that it belongs to raises at its end.
        """
        if self._state.state in (State.OPEN, State.ABORTABLE, State.WAITING):
            self._is_abandoned = True
        return self._abort_quietly(
            SHORT_ABORT_S if timeout_s is None else min(timeout_s, SHORT_ABORT_S)
        )

    def _abort_quietly(self, timeout_s: float | None) -> Steps[None]:
        """Abort what may be aborted. An error is logged, since another one is on its way."""
        state = self._state
        if state.state in (State.PREPARING, State.PREPARED):
            return  # another system decides
        if state.state not in ALLOWED[Call.ABORT] or state.caller is not None:
            return
        try:
            yield from self.abort(timeout_s)
        except TailraceError as error:
            logger.warning(
                "the transaction of transactional_id %r could not be aborted: %s",
                state.transactional_id,
                error,
            )

    # ---- parts -----------------------------------------------------------------------------------

    def _alone(self, call: Call, steps: Steps[T]) -> Steps[T]:
        """Run an operation while no other one runs."""
        caller, state = object(), self._state
        self._sender_thread.check_may_wait()
        try:
            self._sender_thread.do(state.enter, caller, call)
            return (yield from steps)
        finally:
            if state.caller is caller:  # no call, so that no signal handler runs in between
                state.caller = None

    def _check(self, call: Call) -> None:
        self._sender_thread.check_usable()
        self._state.check(call)

    def _deadline_ns(self, timeout_s: float | None) -> int:
        """The end of a request's timeout, None: max_block_ms."""
        timeout_ns = (
            self._settings.max_block_ms * NS_PER_MS if timeout_s is None else int(timeout_s * 1e9)
        )
        return self._sender_thread.now_ns() + timeout_ns

    def _end(self, outcome: str, deadline_ns: int | None) -> Steps[Response]:
        """Ask END_TRANSACTION until it has an answer. Raises RequestTimeoutError,
        NotReachableError; TransactionAbortedError if one request cannot carry the content, which
        is not sent then.
        """
        body = end_body(self._state, outcome)
        if len(body) > JSON_MAX_BYTES:
            raise self._sender_thread.do(too_large, self._state, len(body))
        return repeated(
            self._sender_thread,
            Api.END_TRANSACTION,
            body,
            self._deadline_ns(None) if deadline_ns is None else deadline_ns,
        )

    def _answered(self, outcome: str, producer_id: int, epoch: int) -> None:
        self._state.answered_ns = self._sender_thread.now_ns()
        self._ended(outcome, producer_id, epoch)

    def _ended(self, outcome: str, producer_id: int, epoch: int) -> None:
        self._sender_thread.sender.begin_epoch()
        self._state.ended(outcome, producer_id, epoch)
