"""Acquire and acknowledge requests of a share consumer. One is in flight at a time, and each is
applied once.

Owner: one ShareConsumer, one thread.

Invariants:
- A request without a response is sent again with its sequence number until it has one. The group
  coordinator answers a number that it knows from memory.
- An error of a second copy says nothing about the first copy.
- Acknowledgements are removed when the request has a response. They are put back when every copy
  was refused without effect. They fail when the locks are lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tailrace.client.connections.call import PendingCall
from tailrace.client.connections.connection import Connection
from tailrace.client.connections.steps import decode_answer
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import (
    LockLostError,
    NotReachableError,
    RequestTimeoutError,
    TailraceError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.group.heartbeat import HeartbeatThread
from tailrace.group.membership import Phase
from tailrace.protocol.frame import Api
from tailrace.protocol.json_messages import SHARE_RUNS_MAX, encode_json
from tailrace.protocol.session import Response
from tailrace.share.acknowledgements import RENEWALS, UNREAD, Acknowledgement, Acknowledgements

GONE_CODES = frozenset({ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER, ErrorCode.UNKNOWN_GROUP})
"""Codes that say that the appliance does not know this member. Its locks are lost."""
NS_PER_MS = 1_000_000
RETRY_INTERVAL_NS = 100 * NS_PER_MS
FAILED_MAX = 10_000
"""Most failed ranges that are kept until commit() raises them."""


class FailedAcknowledgement(NamedTuple):
    """A refused acknowledgement of the offsets `first` to `last`."""

    key: TopicPartition
    first: int
    last: int


class Acquired(NamedTuple):
    """A range of offsets that this consumer has acquired."""

    topic_id: str
    partition: int
    first: int
    last: int
    delivery_count: int
    is_dead: bool
    locked_until_ns: int


class ShareResponse(NamedTuple):
    """The response to a request. `ends` are the partitions without records: (topic id, partition,
    offset).
    """

    number: int
    """The sequence number of the request."""
    acquired: list[Acquired]
    ends: list[tuple[str, int, int]]
    is_acquire: bool
    lock_ms: int = 0
    """The duration of the locks; 0: nothing was acquired."""


class _Request(NamedTuple):
    """A request with the acknowledgements that it carries."""

    api: Api
    body: dict[str, Any]
    acknowledged: list[Acknowledgement]
    since_ns: int
    """The earliest time at which it may have been applied."""


class ShareRequests:
    """The requests of one share consumer."""

    def __init__(
        self,
        connection: Connection,
        thread: HeartbeatThread,
        acknowledgements: Acknowledgements,
        topic_id: Callable[[str], str | None],
        timeout_ms: int,
    ) -> None:
        """`topic_id` is the id of the topic that records were delivered from, by its name."""
        self._connection = connection
        self._thread = thread
        self._acknowledgements = acknowledgements
        self._topic_id = topic_id
        self._timeout_ms = timeout_ms
        self._completed_sequence = 0
        self._request: _Request | None = None
        """The request in flight or to be sent again."""
        self._is_sent_marked = True
        """True if the request's acknowledgements were removed from `_acknowledgements`."""
        self._call: PendingCall | None = None
        self._outcome_unknown = False
        """True if a copy of the request was sent and has no response."""
        self._send_at_ns = 0
        """The time to send it again."""
        self.lock_ms = 0
        """The duration of the locks acquired last."""
        self.refused: list[FailedAcknowledgement] = []
        """Failed acknowledgements since the last `drain_failed`."""
        self.refused_count = 0
        """Failed acknowledgements since construction."""
        self._refused_number = 0
        """The request whose refused acknowledgements were noted last."""
        self.lost_locks = False
        """True if the appliance does not know this member any more."""

    @property
    def is_busy(self) -> bool:
        """True while a request has no response."""
        return self._request is not None

    @property
    def last(self) -> int:
        """The sequence number of the last request."""
        if self._request is None:
            return self._completed_sequence
        sequence: int = self._request.body["sequence"]
        return sequence

    def is_complete(self, number: int) -> bool:
        """True if the request with this number is complete."""
        return self._completed_sequence >= number

    def begin(self, max_records: int | None) -> None:
        """Begin a request with the acknowledgements. With `max_records` it acquires records too."""
        assert self._request is None
        acknowledged = self._acknowledgements.acknowledged(SHARE_RUNS_MAX)
        with self._thread.beats.lock:
            membership = self._thread.beats.membership
            identity, epoch = membership.identity, membership.epoch
        body: dict[str, Any] = {
            "group": identity.group,
            "member_id": identity.member_id,
            "member_epoch": epoch,
            "sequence": self._completed_sequence + 1,
        }
        body["acknowledge"] = [
            [
                topic_id,
                run.key.partition,
                run.first,
                run.last,
                "renew" if run.outcome in RENEWALS else run.outcome,
            ]
            for run in acknowledged
            if (topic_id := self._topic_id(run.key.topic)) is not None
        ]
        if max_records is not None:
            body["max_records"] = max_records
        self._is_sent_marked = False
        self._call, self._outcome_unknown, self._send_at_ns = None, False, 0
        # One store: a signal leaves the whole request, or nothing of it.
        self._request = _Request(
            Api.SHARE_ACKNOWLEDGE if max_records is None else Api.SHARE_ACQUIRE,
            body,
            acknowledged,
            self._connection.now_ns(),
        )
        self._mark_sent()

    def _mark_sent(self) -> None:
        """Remove the request's acknowledgements from those to send."""
        if not self._is_sent_marked and self._request is not None:
            self._acknowledgements.sent(self._request.acknowledged)
            self._is_sent_marked = True

    def step(self) -> ShareResponse | None:
        """Send the request if it is due. Returns the response once it has come; `complete` ends the
        request then. Raises the error of the response, NotReachableError, RequestTimeoutError; the
        acknowledgements are kept then.
        """
        assert self._request is not None
        self._mark_sent()
        api, body, acknowledged, _ = self._request
        if self._call is None:
            now_ns = self._connection.now_ns()
            if now_ns < self._send_at_ns:
                return None
            if not self._outcome_unknown:
                self._request = self._request._replace(since_ns=now_ns)
            self._call = PendingCall(
                self._connection, api, [encode_json(body)], self._timeout_ms, None, now_ns
            )
        try:
            response = self._call.step()
        except TailraceError as error:
            self._outcome_unknown = self._outcome_unknown or self._call.outcome_unknown
            if isinstance(error, (RequestTimeoutError, NotReachableError)):
                self._call = None
                raise
            if self._outcome_unknown and (
                error.retriable or error.code is ErrorCode.STORAGE_ERROR
            ):  # the error is of this copy, not of the one before
                self._call, self._send_at_ns = None, self._connection.now_ns() + RETRY_INTERVAL_NS
                raise
            if error.code not in GONE_CODES:
                self._is_sent_marked = False
                self._acknowledgements.put_back(acknowledged)
                self.complete()
                raise
            self._on_member_removed(acknowledged)
            return ShareResponse(self.last, [], [], False)
        return None if response is None else self._apply(self._request, response)

    def _apply(self, request: _Request, response: Response) -> ShareResponse:
        """Apply a response to the acknowledgements."""
        api, body, acknowledged, since_ns = request
        try:
            answer = decode_answer(api, response)
        except TailraceError:
            self.complete()
            raise
        names = {self._topic_id(run.key.topic): run.key.topic for run in acknowledged}
        refused = [
            FailedAcknowledgement(
                TopicPartition(names.get(topic_id) or topic_id, partition), first, last
            )
            for topic_id, partition, first, last, *_ in answer.get("refused", ())
        ]
        number = self.last
        if self._refused_number != number:
            # Stores without a call in between: a repeated response counts once.
            self.refused, self.refused_count, self._refused_number = (
                [*self.refused, *refused][-FAILED_MAX:],
                self.refused_count + len(refused),
                number,
            )
        lock_ms = int(answer.get("lock_ms", 0))
        self.lock_ms = lock_ms or self.lock_ms
        locked_until_ns = since_ns + lock_ms * NS_PER_MS
        for run in acknowledged:
            if run.outcome in RENEWALS and self.lock_ms:
                self._acknowledgements.renewed(
                    run.key, run.first, run.last, since_ns + self.lock_ms * NS_PER_MS
                )
        if not self._is_current_epoch(body["member_epoch"]):
            # The member was removed and has joined again: the locks of this response are lost.
            return ShareResponse(self.last, [], [], False)
        acquired = [
            Acquired(run[0], run[1], run[2], run[3], run[4], is_dead, locked_until_ns)
            for is_dead, runs in ((False, "acquired"), (True, "dead"))
            for run in answer.get(runs, ())
        ]
        return ShareResponse(
            number,
            acquired,
            [(one[0], one[1], one[2]) for one in answer.get("ends", ())],
            api is Api.SHARE_ACQUIRE,
            lock_ms,
        )

    def complete(self) -> None:
        """End the request, once its response is applied: until then `step` repeats it after a
        signal, and the appliance gives the same response to the same number.
        """
        self._completed_sequence = self.last
        self._call = None
        self._request = None

    def _is_current_epoch(self, epoch: int) -> bool:
        with self._thread.beats.lock:
            membership = self._thread.beats.membership
            return membership.phase is not Phase.LOST and membership.epoch == epoch

    def _on_member_removed(self, acknowledged: list[Acknowledgement]) -> None:
        """The member was removed, and other members acquire its records. The next heartbeat joins
        again.
        """
        self.refuse(acknowledged)
        self.lost_locks = True
        with self._thread.beats.lock:
            self._thread.beats.membership.heartbeat_soon(self._connection.now_ns())
        self._thread.wakeup()

    def refuse(self, acknowledged: list[Acknowledgement]) -> None:
        """Note acknowledgements that failed because the locks are lost."""
        for run in acknowledged:
            if run.outcome != UNREAD:
                self._refuse(FailedAcknowledgement(run.key, run.first, run.last))

    def _refuse(self, refused: FailedAcknowledgement) -> None:
        self.refused_count += 1
        self.refused.append(refused)
        del self.refused[:-FAILED_MAX]

    def on_timeout(self) -> RequestTimeoutError:
        """The error for a caller whose timeout has passed."""
        return RequestTimeoutError(
            "the appliance did not answer in time; the acknowledgements are sent again by the "
            "next poll or commit"
        )

    def next_step_ns(self) -> int | None:
        """The time of the next `step` without input; None: no request."""
        return (
            None
            if self._request is None
            else self._send_at_ns
            if self._call is None
            else self._call.wake_ns
        )

    def drain_failed(self) -> LockLostError | None:
        """Remove the failed acknowledgements and return them as an error; None: there are none."""
        if not self.refused:
            return None
        refused, self.refused = self.refused, []
        shown = ", ".join(
            f"{one.key.topic}-{one.key.partition} offsets {one.first} to {one.last}"
            for one in refused[:5]
        )
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        error = LockLostError(
            f"not acknowledged: {shown}{more}: the locks have expired, or the records were "
            "acknowledged before. Everything else was acknowledged"
        )
        error.refused = [(*one.key, one.first, one.last) for one in refused]
        return error
