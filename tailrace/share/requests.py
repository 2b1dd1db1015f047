"""A share consumer's requests: acquire and acknowledge, one under way at a time, none carried out
twice.

Owner: one ShareConsumer, one thread.
Invariants: a request that got no answer is sent again with its number until it is answered: the
    appliance answers a number that it knows from memory. That a later copy could not be carried out
    says nothing of the first one. What was said of records is forgotten when it is answered, put
    back when the appliance says of every copy that it did nothing, and told as refused when the
    locks are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tailrace.client.call import PendingCall
from tailrace.client.connection import Connection
from tailrace.client.steps import decode_answer
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
from tailrace.protocol import messages as requests
from tailrace.protocol.frame import Api
from tailrace.protocol.messages import SHARE_RUNS_MAX
from tailrace.share.acknowledgements import UNREAD, Acknowledgement, Acknowledgements

GONE_CODES = frozenset({ErrorCode.UNKNOWN_MEMBER, ErrorCode.FENCED_MEMBER, ErrorCode.UNKNOWN_GROUP})
"""The appliance does not know this member: what it had acquired is free."""
NS_PER_MS = 1_000_000
RETRY_INTERVAL_NS = 100 * NS_PER_MS
FAILED_MAX = 10_000
"""Runs that are remembered until commit() asks."""


class FailedAcknowledgement(NamedTuple):
    """An acknowledgement that was not taken: of offsets `first` to `last`."""

    key: TopicPartition
    first: int
    last: int


class Acquired(NamedTuple):
    """Offsets that this consumer has now."""

    topic_id: str
    partition: int
    first: int
    last: int
    delivery_count: int
    is_dead: bool
    locked_until_ns: int


class Answer(NamedTuple):
    """To a request: what was acquired, and where there is nothing yet: [(topic id, partition,
    offset)].
    """

    acquired: list[Acquired]
    ends: list[tuple[str, int, int]]
    is_acquire: bool
    lock_ms: int = 0
    """How long the locks last; 0: nothing was acquired."""


class ShareRequests:
    """See the module's docstring."""

    def __init__(
        self,
        connection: Connection,
        thread: HeartbeatThread,
        acknowledgements: Acknowledgements,
        topic_id: Callable[[str], str | None],
        timeout_ms: int,
    ) -> None:
        """`topic_id`: of the topic that records were handed out under."""
        self._connection = connection
        self._thread = thread
        self._acknowledgements = acknowledgements
        self._topic_id = topic_id
        self._timeout_ms = timeout_ms
        self._sequence = 0
        self._answered_sequence = 0
        self._request: tuple[Api, dict[str, Any], list[Acknowledgement], int] | None = None
        """What is under way, or to be sent again: (API, body, what it says of records, since when
        it may have been carried out).
        """
        self._is_taken = True
        """Whether what the request says was taken from what was said."""
        self._call: PendingCall | None = None
        self._may_be_done = False
        """Whether a copy of the request was sent and not answered."""
        self._send_at_ns = 0
        """When it is to be sent again."""
        self.lock_ms = 0
        """How long the locks last that were given last."""
        self.refused: list[FailedAcknowledgement] = []
        """Since they were last taken."""
        self.refused_count = 0
        """Since construction."""
        self.lost_locks = False
        """The appliance does not know this member any more."""

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for its answer."""
        return self._request is not None

    @property
    def last(self) -> int:
        """The number of the request that was begun last."""
        return self._sequence

    def is_answered(self, number: int) -> bool:
        """Whether the request of this number has ended."""
        return self._answered_sequence >= number

    def begin(self, max_records: int | None) -> None:
        """Send what was said of records; with `max_records` acquire as many more."""
        assert self._request is None
        acknowledged = self._acknowledgements.acknowledged(SHARE_RUNS_MAX)
        with self._thread.beats.lock:
            membership = self._thread.beats.membership
            identity, epoch = membership.identity, membership.epoch
        self._sequence += 1
        body: dict[str, Any] = {
            "group": identity.group,
            "member_id": identity.member_id,
            "member_epoch": epoch,
            "sequence": self._sequence,
        }
        body["acknowledge"] = [
            [topic_id, run.key.partition, run.first, run.last, run.outcome]
            for run in acknowledged
            if (topic_id := self._topic_id(run.key.topic)) is not None
        ]
        if max_records is not None:
            body["max_records"] = max_records
        self._is_taken = False
        self._request = (
            (Api.SHARE_ACKNOWLEDGE if max_records is None else Api.SHARE_ACQUIRE),
            body,
            acknowledged,
            self._connection.now_ns(),
        )
        self._take_acknowledged()

    def _take_acknowledged(self) -> None:
        """What the request says is not to be said again."""
        if not self._is_taken and self._request is not None:
            self._acknowledgements.sent(self._request[2])
            self._is_taken = True

    def step(self) -> Answer | None:
        """The answer to what is under way, once it has come. Raises what the appliance refused it
        with, NotReachableError, RequestTimeoutError; what was said of records is kept then.
        """
        assert self._request is not None
        self._take_acknowledged()
        api, body, acknowledged, since_ns = self._request
        if self._call is None:
            now_ns = self._connection.now_ns()
            if now_ns < self._send_at_ns:
                return None
            if not self._may_be_done:
                since_ns = now_ns
                self._request = api, body, acknowledged, since_ns
            self._call = PendingCall(
                self._connection, api, [requests.encode_json(body)], self._timeout_ms, None, now_ns
            )
        try:
            response = self._call.step()
        except TailraceError as error:
            self._may_be_done = self._may_be_done or self._call.outcome_unknown
            if isinstance(error, (RequestTimeoutError, NotReachableError)):
                self._call = None
                raise
            if self._may_be_done and (
                error.retriable or error.code is ErrorCode.STORAGE_ERROR
            ):  # said of this copy, not of the one before
                self._call, self._send_at_ns = None, self._connection.now_ns() + RETRY_INTERVAL_NS
                raise
            self._end()
            if error.code not in GONE_CODES:
                self._acknowledgements.put_back(acknowledged)
                raise
            self._on_end_of_topic(acknowledged)
            return Answer([], [], False)
        if response is None:
            return None
        try:
            answer = decode_answer(api, response)
        except TailraceError:
            self._end()
            raise
        names = {self._topic_id(run.key.topic): run.key.topic for run in acknowledged}
        for topic_id, partition, first, last, *_ in answer.get("refused", ()):
            self._refuse(
                FailedAcknowledgement(
                    TopicPartition(names.get(topic_id) or topic_id, partition), first, last
                )
            )
        lock_ms = int(answer.get("lock_ms", 0))
        self.lock_ms = lock_ms or self.lock_ms
        locked_until_ns = since_ns + lock_ms * NS_PER_MS
        for run in acknowledged:
            if run.outcome == "renew" and self.lock_ms:
                self._acknowledgements.renewed(
                    run.key, run.first, run.last, since_ns + self.lock_ms * NS_PER_MS
                )
        self._end()
        if not self._is_of_now(
            body["member_epoch"]
        ):  # it was removed since, and joined again: what this answer gave it is free
            return Answer([], [], False)
        acquired = [
            Acquired(run[0], run[1], run[2], run[3], run[4], is_dead, locked_until_ns)
            for is_dead, runs in ((False, "acquired"), (True, "dead"))
            for run in answer.get(runs, ())
        ]
        return Answer(
            acquired,
            [(one[0], one[1], one[2]) for one in answer.get("ends", ())],
            api is Api.SHARE_ACQUIRE,
            lock_ms,
        )

    def _end(self) -> None:
        self._request = self._call = None
        self._may_be_done, self._send_at_ns = False, 0
        self._answered_sequence = self._sequence

    def _is_of_now(self, epoch: int) -> bool:
        with self._thread.beats.lock:
            membership = self._thread.beats.membership
            return membership.phase is not Phase.LOST and membership.epoch == epoch

    def _on_end_of_topic(self, acknowledged: list[Acknowledgement]) -> None:
        """The member was removed: others have its records. The heartbeats find out, and join
        again.
        """
        self.refuse(acknowledged)
        self.lost_locks = True
        with self._thread.beats.lock:
            self._thread.beats.membership.heartbeat_soon(self._connection.now_ns())
        self._thread.wakeup()

    def refuse(self, acknowledged: list[Acknowledgement]) -> None:
        """This was said in vain: the locks are gone."""
        for run in acknowledged:
            if run.outcome != UNREAD:
                self._refuse(FailedAcknowledgement(run.key, run.first, run.last))

    def _refuse(self, refused: FailedAcknowledgement) -> None:
        self.refused_count += 1
        self.refused.append(refused)
        del self.refused[:-FAILED_MAX]

    def on_timeout(self) -> RequestTimeoutError:
        """What a caller is told who does not wait any longer."""
        return RequestTimeoutError(
            "the appliance has not answered in time; what was acknowledged is sent again by the "
            "next poll or commit"
        )

    def next_step_ns(self) -> int | None:
        """When `step` is due though nothing comes; None: nothing is under way."""
        return (
            None
            if self._request is None
            else self._send_at_ns
            if self._call is None
            else self._call.wake_ns
        )

    def drain_failed(self) -> LockLostError | None:
        """What was refused since it was last asked, as an error."""
        if not self.refused:
            return None
        refused, self.refused = self.refused, []
        shown = ", ".join(
            f"{one.key.topic}-{one.key.partition} offsets {one.first} to {one.last}"
            for one in refused[:5]
        )
        more = f" and {len(refused) - 5} more" if len(refused) > 5 else ""
        error = LockLostError(
            f"not acknowledged: {shown}{more}: the locks have passed, or the records are done "
            "with. Everything else was acknowledged"
        )
        error.refused = [(*one.key, one.first, one.last) for one in refused]
        return error
