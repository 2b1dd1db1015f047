"""The id and epoch of a transactional producer, as its sender uses them.

They come with the responses to INIT_TRANSACTIONS and END_TRANSACTION. A lost sequence never takes a
new epoch here: it fails the transaction, and the abort brings the next epoch.

A worker that refuses a batch with PRODUCER_FENCED does not know why. So nothing more is sent, and
DESCRIBE_TRANSACTION says it: another producer has the id, or the appliance has aborted the
transaction.

Owner: a Producer, under its lock.
Invariants:
- Nothing is sent after a record of the transaction has failed. What was not sent fails then.
- A batch that was refused as fenced has no outcome before the reason is known.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tailrace.client.connections.connection import Connection
from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.errors import (
    ProducerFencedError,
    TailraceError,
    TransactionAbortedError,
    error_for,
)
from tailrace.producer.batches.accumulator import NS_PER_MS, RecordAccumulator
from tailrace.producer.transactions.state import Call, TransactionState
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import Response

if TYPE_CHECKING:
    from tailrace.producer.batches.producer_batch import ProducerBatch

DESCRIBE_RETRY_NS = 20 * NS_PER_MS


class KnownState(Protocol):
    """Producer as its identity knows it."""

    producer_id: int
    epoch: int

    def on_failed_batch(self, batch: ProducerBatch) -> None: ...


S = TypeVar("S", bound=KnownState)


class CoordinatedIdentity(Generic[S]):
    """An id and epoch that the coordinator of transactions gives: those of a transaction's owner,
    or of a branch's writer.
    """

    is_used = True
    needs_epoch = False
    bumps_epoch = False
    bump_count = 0

    def __init__(
        self,
        state: S,
        now_ns: Callable[[], int],
        connection: Connection,
        accumulator: RecordAccumulator,
    ) -> None:
        self._state = state
        self._now_ns = now_ns
        self._connection = connection
        self._accumulator = accumulator
        self.is_asked = False
        """True while a request of `obtain` has no response."""
        self._refusal: str | None = None
        """The worker's sentence, while the reason of a PRODUCER_FENCED is not known."""
        self._ask_at_ns = 0
        accumulator.on_failed_batch = state.on_failed_batch

    @property
    def producer_id(self) -> int:
        return self._state.producer_id

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def is_missing(self) -> bool:
        """True while nothing may be sent."""
        raise NotImplementedError

    @property
    def is_known(self) -> bool:
        """True if batches may be sent."""
        return not self.is_missing

    def use_up(self) -> None:
        """A batch has failed, which the state knows by itself."""

    def restart(self) -> None:
        """Go on with the same epoch. Only the numbering of one batch can have been interrupted."""
        self.is_asked = False
        for queue in self._accumulator.queues.values():
            queue.count_numbered()

    def is_fenced(self, detail: str) -> bool:
        """True: the batch waits until the reason is known."""
        self._refusal = detail
        return True


class TransactionalIdentity(CoordinatedIdentity[TransactionState]):
    """The id and epoch of the present transaction."""

    @property
    def transaction(self) -> int:
        """The number of the transaction."""
        return self._state.number

    @property
    def is_missing(self) -> bool:
        """True while nothing may be sent."""
        return self._refusal is not None or self._state.has_failed

    def check_may_add(self) -> None:
        """Raise unless a transaction is open. It has a record from now on."""
        self._state.check(Call.SEND)
        self._state.is_empty = False

    def obtain(self) -> None:
        """Ask why a batch was refused, or fail what was not sent of a failed transaction."""
        if self._refusal is None:
            self._accumulator.end_unsent(self._state.aborted_error())
        elif not self.is_asked and self._now_ns() >= self._ask_at_ns:
            state = self._state
            request = {
                "transactional_id": state.transactional_id,
                "owner": state.owner,
                "producer_id": state.producer_id,
                "producer_epoch": state.epoch,
            }
            self.is_asked = self._connection.request(
                Api.DESCRIBE_TRANSACTION,
                [encode_json(request)],
                partial(self._on_described, state.number),
            )

    def begin_epoch(self) -> None:
        """The sequences of all partitions begin at 0, since the last transaction has ended."""
        for queue in self._accumulator.queues.values():
            queue.begin_epoch()
            queue.muted_until_ns = 0
        self._refusal = None

    def _on_described(self, number: int, response: Response | None) -> None:
        self.is_asked = False
        if response is None or self._refusal is None or number != self._state.number:
            return  # asked again, if it is needed still
        code = response.code
        if code is ErrorCode.PRODUCER_FENCED:
            self._state.fence(response.detail())
            self._accumulator.end_all(ProducerFencedError(response.detail()))
            self._refusal = None
        elif code is not ErrorCode.OK and ERROR_TABLE[code].retriable:
            self._ask_at_ns = self._now_ns() + DESCRIBE_RETRY_NS
        else:
            self._state.fail(self._reason(response))
            self._refusal = None

    def _reason(self, response: Response) -> TailraceError:
        """The error of the transaction, by what the appliance knows of it."""
        if response.code is not ErrorCode.OK:
            return error_for(response.code, response.detail(), response.correlation_id)
        try:
            answer = decode_json(response.body[0] if response.body else b"")
        except WireError:
            answer = {}
        last = answer.get("last")
        state = self._state
        if (answer.get("producer_id"), answer.get("producer_epoch")) == (
            state.producer_id,
            state.epoch,
        ) or not isinstance(last, dict):
            return TransactionAbortedError(
                f"the appliance refused a batch of the transaction: {self._refusal}"
            )
        return TransactionAbortedError(
            f"the appliance has aborted the transaction{_by(last)} before it was committed"
        )


def _by(last: dict[str, Any]) -> str:
    by = last.get("by")
    if by == "timeout":
        return " when transaction_timeout_ms was over,"
    return f" (by {by})" if isinstance(by, str) and by else ""
