"""Forwarder: passes a front's requests to the controller, scheduler or group coordinator and tracks
them.

A request waits here until it fits the lane, then in the lane, then with the other process. That
process takes a request out of the lane before handling it, so a killed one loses the requests that
it had taken. `step` sees the successor's generation and answers those, as the FATES table says. A
process started on demand has no lanes at first. Requests for it wait here.

Owner: one front.

Invariants:
- Waiting requests are bounded by number and bytes, for each connection and in all.
- A request is answered once: by the other process, by its timeout, or because the process that took
  it has died.
- Requests of a session keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from netfront.session.fair_queue import FairQueue
from netfront.session.pending_requests import PendingRequests, Waiting
from shm.messages.lane_messages import LaneKind
from shm.queues.doorbell import Doorbell
from shm.queues.lane import LaneReader, LaneWriter
from shm.queues.outbox import Outbox
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import Api, WireError

SESSION_REQUESTS_MAX = 64
SESSION_QUEUED_BYTES_MAX = 2 << 20
REQUESTS_MAX = 16_384
QUEUED_BYTES_MAX = 32 << 20
CLOSED_MAX = 8_192
"""Ends of sessions that wait for lane space.

A member whose end was lost here is removed by its session timeout.
"""
PATIENCE_NS = 50_000_000
"""Time to gather patient requests.

The process wakes once for all of them, and this one once for the responses.
"""
CHECK_INTERVAL_NS = 20_000_000
"""Interval of checks for a restart while requests are pending. A process takes longer to start."""


class LostOutcome(NamedTuple):
    """Response to a request that a killed process had taken."""

    code: ErrorCode
    sentence: str


RETRY_LATER = LostOutcome(
    ErrorCode.NOT_READY, "the process that decides this was restarted; ask again"
)
LOST_OUTCOMES: dict[int, LostOutcome] = {
    Api.CREATE_TOPICS: LostOutcome(
        ErrorCode.TIMED_OUT,
        "the controller was restarted: it is not known whether the topics are being made; look at "
        "the list of topics before making them again",
    ),
    Api.DELETE_TOPICS: LostOutcome(
        ErrorCode.TIMED_OUT,
        "the controller was restarted: it is not known whether the topics are being deleted; look "
        "at the list of topics, and delete what is still there",
    ),
    Api.ALTER_TOPICS: LostOutcome(
        ErrorCode.TIMED_OUT,
        "the controller was restarted: it is not known whether the topics are being changed; "
        "describe them, and make the change again if it is not there",
    ),
    Api.DELETE_RECORDS: LostOutcome(
        ErrorCode.TIMED_OUT,
        "the controller was restarted: it is not known whether the records are being deleted; "
        "look at the beginning offsets, and repeat it if they are lower",
    ),
    Api.CHANGE_DELAYS: LostOutcome(
        ErrorCode.TIMED_OUT, "the scheduler was restarted: it is not known whether the change was "
                             "made; list what is pending"
    ),
    Api.DELETE_GROUPS: LostOutcome(
        ErrorCode.TIMED_OUT, "the process of groups was restarted: it is not known whether the "
                             "groups are deleted; look at the list of groups"
    ),
    Api.SHARE_ACQUIRE: LostOutcome(
        ErrorCode.TIMED_OUT,
        "the process of groups was restarted: what it may have acquired for this member comes "
        "again when its locks have timed out; ask again",
    ),
    Api.SHARE_ACKNOWLEDGE: LostOutcome(
        ErrorCode.TIMED_OUT, "the process of groups was restarted: it is not known whether the "
                             "records are acknowledged; acknowledge them again"
    ),
    Api.INIT_TRANSACTIONS: LostOutcome(
        ErrorCode.NOT_READY, "the process of groups was restarted; take the transactional id over "
                             "again"
    ),
    Api.END_TRANSACTION: LostOutcome(
        ErrorCode.TIMED_OUT,
        "the process of groups was restarted: it is not known whether the transaction has ended; "
        "repeat the request, which is safe, until it is answered",
    ),
    Api.ABORT_TRANSACTION: LostOutcome(
        ErrorCode.TIMED_OUT, "the process of groups was restarted: it is not known whether the "
                             "transaction was aborted; look at the list of transactions"
    ),
}  # fmt: skip
"""All other APIs change nothing, or are idempotent."""


@dataclass(slots=True)
class ForwarderLink:
    """Lanes to and from one process."""

    to_it: LaneWriter
    from_it: LaneReader
    bell: Doorbell
    generation: Callable[[], int]
    """Generation of the process that serves it or is being started. A change means that the
    predecessor has died.
    """


class OnDemand(NamedTuple):
    """Lanes of a process that is started on demand."""

    connect: Callable[[], ForwarderLink | None]
    """Return the lanes, or None if the process was not started."""
    ask_for: Callable[[], None]
    """Request the process from the supervisor."""
    lacks_memory: Callable[[], bool]
    """Return True if shared memory is too small to start it."""
    payload_max: int
    """Largest message of its lane, in bytes."""
    is_expected: Callable[[], bool] = lambda: False
    """Return True if another process has requested it for state that it will serve."""


WITHOUT_MEMORY = (
    "the process of groups cannot be started: shared memory has no room for its "
    "lanes; enlarge /dev/shm, or lower ring_bytes (tailrace doctor)"
)


class _Queued(NamedTuple):
    kind: LaneKind
    api: int
    word: int
    correlation_id: int
    payload: bytes


class Forwarder:
    """Forwards requests to one process: the controller, the scheduler or the group coordinator."""

    def __init__(
        self,
        way: ForwarderLink | OnDemand,
        timeout_ms: int,
        answer: Callable[[int, int, int, int, ErrorCode, str], None],
        start_ns: int,
        at_once_max: int = SESSION_REQUESTS_MAX,
    ) -> None:
        """`answer` gets (session word, API, version, correlation id, code, sentence) of a request
        that the process will not answer. `at_once_max` bounds one session's requests in its lane.
        """
        self.link: ForwarderLink | None = None
        """None until an on-demand process is started."""
        self._on_demand = way if isinstance(way, OnDemand) else None
        self._timeout_ms = timeout_ms
        self._answer = answer
        self._generation = 0
        self._outbox: Outbox[_Queued] | None = None
        self._queue: deque[_Queued] = deque()
        """Items that are not in the lane yet. The outbox shares it."""
        self._backoff_until_ns = 0
        """Time to write the queue while all of it is patient."""
        self._fair_queue: FairQueue[_Queued] = FairQueue(at_once_max)
        self._queued_bytes = 0
        self._queued_bytes_of: dict[int, int] = {}
        """Queued request bytes by session word."""
        self._closed_count = 0
        """Number of ends of sessions in the queue."""
        self._written: dict[tuple[int, int], int] = {}
        """Lane end position by (session word, correlation id), of requests in the lane or with the
        process, in order.
        """
        self.pending_requests = PendingRequests(start_ns, SESSION_REQUESTS_MAX, REQUESTS_MAX)
        self._check_at_ns = start_ns
        self._now_ns = start_ns
        if isinstance(way, ForwarderLink):
            self._take_up(way)

    def _take_up(self, link: ForwarderLink) -> None:
        self.link = link
        self._generation = link.generation()
        self._outbox = Outbox(link.to_it, link.bell, self._write)
        self._outbox.waiting = self._queue

    @property
    def payload_max(self) -> int:
        """Size of the largest request that its lane takes, in bytes."""
        if self._on_demand is not None:
            return self._on_demand.payload_max
        assert self.link is not None
        return self.link.to_it.payload_max

    def is_absent(self) -> bool:
        """True if the process was never started. It has no state to ask for."""
        self._check_process()
        return (
            self.link is None
            and self._on_demand is not None
            and not self._on_demand.lacks_memory()
            and not self._on_demand.is_expected()
        )

    def next_deadline_ns(self) -> int:
        """Return the time of the next step that is due without a message."""
        deadline_ns = self.pending_requests.timeouts.quiet_until_ns
        if self._backoff_until_ns:
            deadline_ns = min(deadline_ns, self._backoff_until_ns)
        return min(deadline_ns, self._check_at_ns) if len(self.pending_requests) else deadline_ns

    def ask(
        self,
        word: int,
        api: int,
        version: int,
        correlation_id: int,
        payload: bytes,
        now_ns: int,
        *,
        is_patient: bool = False,
    ) -> None:
        """Forward a request. A patient one leaves with the next that is not, or after PATIENCE_NS.

        Raises WireError at a limit.
        """
        refusal = self.pending_requests.refusal(word, correlation_id)
        if refusal is not None:
            raise refusal
        queued_bytes = self._queued_bytes_of.get(word, 0)
        if queued_bytes and queued_bytes + len(payload) > SESSION_QUEUED_BYTES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{queued_bytes} bytes of this connection's requests are queued; the limit is "
                f"{SESSION_QUEUED_BYTES_MAX}. Wait for some responses",
            )
        if len(self._queue) >= REQUESTS_MAX or self._queued_bytes + len(payload) > QUEUED_BYTES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self._queued_bytes} bytes of all connections' requests are queued. "
                "Retry shortly",
            )
        if self.link is not None and not len(self.pending_requests):
            # an earlier predecessor has taken none of the requests
            self._generation = self.link.generation()
            self._check_at_ns = now_ns + CHECK_INTERVAL_NS
        self.pending_requests.add(word, correlation_id, api, version, now_ns, self._timeout_ms)
        if not is_patient:
            self._backoff_until_ns = 0
        elif not self._queue:
            self._backoff_until_ns = now_ns + PATIENCE_NS
        item = _Queued(LaneKind.REQUEST, api, word, correlation_id, payload)
        if self._fair_queue.begin(word, correlation_id, item):
            self._queue.append(item)
        self._queued_bytes += len(payload)
        self._queued_bytes_of[word] = queued_bytes + len(payload)
        if self.link is None and self._on_demand is not None:
            self._on_demand.ask_for()

    def queue_session_closed(self, word: int) -> None:
        """Queue the end of a session that has sent requests."""
        if self._closed_count < CLOSED_MAX:
            self._queue.append(_Queued(LaneKind.SESSION_CLOSED, 0, word, 0, b""))
            self._closed_count += 1
            self._backoff_until_ns = 0

    def pass_on(self, now_ns: int) -> int:
        """Write queued items to the lane, commit, and ring once."""
        if self._outbox is None or now_ns < self._backoff_until_ns:
            return 0
        self._backoff_until_ns = 0
        self._now_ns = now_ns
        return self._outbox.flush()

    def _write(self, item: _Queued) -> bool:
        """Write an item to the lane.

        Skip a request that was answered or whose session has ended.
        """
        assert self._outbox is not None
        lane = self._outbox.lane
        kind, api, word, correlation_id, payload = item
        if kind is LaneKind.SESSION_CLOSED:
            if not lane.try_write(kind, 0, 0, word, 0, self._now_ns, ()):
                return False
            self._closed_count -= 1
            return True
        if self.pending_requests.is_waiting(word, correlation_id):
            if not lane.try_write(kind, api, 0, word, correlation_id, self._now_ns, (payload,)):
                return False
            self._written[word, correlation_id] = lane.position
        self._count_off(word, len(payload))
        return True

    def _count_off(self, word: int, byte_count: int) -> None:
        self._queued_bytes -= byte_count
        left = self._queued_bytes_of[word] - byte_count
        if left:
            self._queued_bytes_of[word] = left
        else:
            del self._queued_bytes_of[word]

    def _release_slot(self, word: int, correlation_id: int) -> None:
        """End a request's turn in the fair queue and queue the next request of its session."""
        dropped = self._fair_queue.drop(word, correlation_id)
        if dropped is not None:
            self._count_off(word, len(dropped.payload))
        following = self._fair_queue.end(word, correlation_id)
        if following is not None:
            self._queue.append(following)
            self._backoff_until_ns = 0

    def take(self, word: int, correlation_id: int) -> Waiting | None:
        """Remove a request that the process has answered.

        Return None if its client no longer waits.
        """
        self._written.pop((word, correlation_id), None)
        asked = self.pending_requests.take(word, correlation_id)
        self._release_slot(word, correlation_id)
        return asked

    @property
    def has_queued(self) -> bool:
        """True if `pass_on` may have work."""
        return bool(self._queue) or self._backoff_until_ns > 0

    def is_quiet(self, now_ns: int) -> bool:
        """True if its lane is empty and `step` has no work."""
        waiting = self.pending_requests
        return (
            not len(waiting)
            and now_ns < waiting.timeouts.quiet_until_ns
            and (self.link is None or not self.link.from_it.has_more())
        )

    def step(self, now_ns: int) -> int:
        """Handle restarts and timeouts. Return the number of requests answered."""
        count = 0
        if now_ns >= self.pending_requests.timeouts.quiet_until_ns:
            for word, correlation_id, api, version in self.pending_requests.pop_expired(now_ns):
                count += 1
                self._written.pop((word, correlation_id), None)
                self._release_slot(word, correlation_id)
                self._answer(
                    word,
                    api,
                    version,
                    correlation_id,
                    ErrorCode.TIMED_OUT,
                    "no response within the request's timeout",
                )
        self._check_at_ns = now_ns + CHECK_INTERVAL_NS
        if self.link is None:
            return count + (self._wait_for_it() if len(self.pending_requests) else 0)
        generation = self.link.generation()
        if generation != self._generation:
            self._generation = generation
            count += self._answer_for_the_dead(self.link, generation)
        return count

    def _check_process(self) -> None:
        if (
            self.link is None
            and self._on_demand is not None
            and (link := self._on_demand.connect()) is not None
        ):
            self._take_up(link)

    def _wait_for_it(self) -> int:
        """Connect to an on-demand process. If it cannot be started, refuse the waiting requests."""
        self._check_process()
        if self.link is not None or self._on_demand is None or not self._on_demand.lacks_memory():
            return 0
        return self._abandon(
            self.pending_requests.all(), LostOutcome(ErrorCode.NOT_READY, WITHOUT_MEMORY)
        )

    def _answer_for_the_dead(self, link: ForwarderLink, generation: int) -> int:
        """Answer requests that the predecessors of this generation had taken.

        It takes those that were still in the lane, and may have begun to.
        """
        consumed = link.to_it.consumed_before(generation)
        return self._abandon(
            [key for key, position in self._written.items() if position <= consumed], None
        )

    def _abandon(self, keys: list[tuple[int, int]], outcome: LostOutcome | None) -> int:
        """Answer requests in the process's place. `outcome` None selects from FATES."""
        for word, correlation_id in keys:
            asked = self.take(word, correlation_id)
            if asked is not None:
                api, version, _ = asked
                code, sentence = outcome or LOST_OUTCOMES.get(api, RETRY_LATER)
                self._answer(word, api, version, correlation_id, code, sentence)
        return len(keys)

    def forget_session(self, word: int) -> None:
        """Forget a session.

        Its requests in the lane are still carried out, those queued here are not.
        """
        for item in self._fair_queue.forget(word):
            self._count_off(word, len(item.payload))
        for correlation_id in self.pending_requests.forget_session(word):
            self._written.pop((word, correlation_id), None)
