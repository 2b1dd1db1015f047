"""The id and epoch of a branch's writer, as its sender uses them.

They come with the response to JOIN_TRANSACTION, which the sender asks before the first batch. The
response names a branch that no other writer has. So a repeated task that uses the same
TransactionBranch gets another one, and nothing that an earlier task wrote is taken for its batches.

A worker that refuses a batch with PRODUCER_FENCED does not know why. So the request is repeated,
and its response says it.

Owner: a Producer, under its lock.
Invariants:
- Nothing is sent after a record of the branch has failed. What was not sent fails then.
- A batch that was refused as fenced has no outcome before the reason is known.
"""

from __future__ import annotations

from tailrace.core.error_codes import ERROR_TABLE, ErrorCode
from tailrace.core.errors import TransactionAbortedError, error_for
from tailrace.producer.batches.accumulator import NS_PER_MS
from tailrace.producer.transactions.branches.state import BranchState
from tailrace.producer.transactions.identity import CoordinatedIdentity
from tailrace.protocol.frame import Api, WireError
from tailrace.protocol.json_messages import decode_json, encode_json
from tailrace.protocol.session import Response

RETRY_NS = 20 * NS_PER_MS


class BranchIdentity(CoordinatedIdentity[BranchState]):
    """See the module's docstring."""

    transaction = 0

    @property
    def is_missing(self) -> bool:
        """True while nothing may be sent."""
        state = self._state
        return state.producer_id < 0 or self._refusal is not None or state.failure is not None

    def check_may_add(self) -> None:
        """Raise unless the branch takes records. It has a record from now on."""
        self._state.check_send()
        self._state.is_empty = False

    def begin_epoch(self) -> None:
        """The sequences of all partitions begin at 0."""
        for queue in self._accumulator.queues.values():
            queue.begin_epoch()
            if queue.has_work:
                self._accumulator.mark_ready(queue)

    def obtain(self) -> None:
        """Ask for a branch, or why a batch was refused. Fail what was not sent of a failed one."""
        state = self._state
        if state.failure is not None:
            self._accumulator.end_unsent(state.failed_error())
        elif (
            not self.is_asked
            and self._now_ns() >= self._ask_at_ns
            and self._accumulator.incomplete_count
        ):
            branch = state.branch
            request = {
                "transactional_id": branch.transactional_id,
                "owner": branch.owner,
                "producer_id": branch.producer_id,
                "producer_epoch": branch.producer_epoch,
                "attempt": state.attempt,
            }
            self.is_asked = self._connection.request(
                Api.JOIN_TRANSACTION, [encode_json(request)], self._on_response
            )

    def _on_response(self, response: Response | None) -> None:
        self.is_asked = False
        if response is None:
            return  # asked again, if it is needed still
        code, state = response.code, self._state
        if code is ErrorCode.OK:
            self._joined(response)
        elif ERROR_TABLE[code].retriable:
            self._ask_at_ns = self._now_ns() + RETRY_NS
        else:
            state.fail(error_for(code, response.detail(), response.correlation_id))
            self._refusal = None

    def _joined(self, response: Response) -> None:
        state, refusal = self._state, self._refusal
        try:
            answer = decode_json(response.body[0] if response.body else b"")
        except WireError:
            answer = {}
        producer_id, epoch = answer.get("producer_id"), answer.get("producer_epoch")
        if type(producer_id) is not int or type(epoch) is not int:
            state.fail(error_for(ErrorCode.MALFORMED_REQUEST, "the response has no producer id"))
        elif state.producer_id < 0:
            state.joined(producer_id, epoch)
            self.begin_epoch()
        elif refusal is not None:
            state.fail(
                TransactionAbortedError(f"the appliance refused a batch of the branch: {refusal}")
            )
        self._refusal = None
