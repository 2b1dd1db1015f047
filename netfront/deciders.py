"""The ways to the coordinator and to the scheduler, and back: requests that the front passes on and remembers until they are answered.

A request waits here while it does not fit its lane, then in the lane, then with the decider. A decider takes a request out of its lane before it handles it, so
one that is killed loses what it had taken: `follow_restarts` sees the successor's generation, and answers what the predecessor took, as each API's row says.

Owner: one front. Invariants: what waits is bounded for each connection and in all, by number and by bytes; a request is answered once, by the decider, by its
    timeout, or because the decider that took it is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from netfront.unanswered import Unanswered
from shm.catalog_messages import LaneKind
from shm.doorbell import Doorbell
from shm.lane import LaneReader, LaneWriter
from shm.outbox import Outbox
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import Api, WireError

SESSION_REQUESTS_MAX = 64
SESSION_QUEUED_BYTES_MAX = 2 << 20
REQUESTS_MAX = 16_384
QUEUED_BYTES_MAX = 32 << 20
LOOK_INTERVAL_NS = 20_000_000
"""How often to look, while requests are with a decider, whether it was restarted: more often than one can start."""


class Fate(NamedTuple):
    """What becomes of a request that a killed decider had taken."""

    code: ErrorCode
    sentence: str


ASK_AGAIN = Fate(ErrorCode.NOT_READY, "the process that decides this was restarted; ask again")
FATES: dict[int, Fate] = {
    Api.CREATE_TOPICS: Fate(
        ErrorCode.TIMED_OUT,
        "the coordinator was restarted: it is not known whether the topics are being made; look at the list of topics before making them again",
    ),
    Api.DELETE_TOPICS: Fate(
        ErrorCode.TIMED_OUT,
        "the coordinator was restarted: it is not known whether the topics are being deleted; look at the list of topics, and delete what is still there",
    ),
    Api.ALTER_TOPICS: Fate(
        ErrorCode.TIMED_OUT,
        "the coordinator was restarted: it is not known whether the topics are being changed; describe them, and make the change again if it is not there",
    ),
    Api.DELETE_RECORDS: Fate(
        ErrorCode.TIMED_OUT,
        "the coordinator was restarted: it is not known whether the records are being deleted; look at the beginning offsets, and repeat it if they are lower",
    ),
    Api.CHANGE_DELAYS: Fate(
        ErrorCode.TIMED_OUT, "the scheduler was restarted: it is not known whether the change was made; list what is pending"
    ),
}  # fmt: skip
"""Everything else changes nothing, or the same when it is done twice."""


@dataclass(slots=True)
class DeciderLink:
    """The way to one of them, and back."""

    to_it: LaneWriter
    from_it: LaneReader
    bell: Doorbell
    generation: Callable[[], int]
    """Of the process that serves it, or is being started to: another one than before means that its predecessor is gone."""


class _Queued(NamedTuple):
    api: int
    word: int
    correlation_id: int
    payload: bytes


class Decider:
    """The coordinator, or the scheduler, as a front sees it."""

    def __init__(self, link: DeciderLink, timeout_ms: int, answer: Callable[[int, int, int, ErrorCode, str], None], start_ns: int) -> None:
        """`answer`: (session word, API, correlation id, code, sentence) of a request that the decider itself will not answer."""
        self.link = link
        self._timeout_ms = timeout_ms
        self._answer = answer
        self._generation = link.generation()
        self._outbox: Outbox[_Queued] = Outbox(link.to_it, link.bell, self._write)
        self._queued_bytes = 0
        self._queued_bytes_of: dict[int, int] = {}
        """Session word -> bytes of its requests in the queue."""
        self._written: dict[tuple[int, int], int] = {}
        """(session word, correlation id) -> lane position behind it, of requests in the lane or with the decider, in order."""
        self.unanswered = Unanswered(start_ns, SESSION_REQUESTS_MAX, REQUESTS_MAX)
        self._look_at_ns = start_ns
        self._now_ns = start_ns

    @property
    def payload_max(self) -> int:
        """Bytes of the largest request that its lane takes."""
        return self.link.to_it.payload_max

    def next_deadline_ns(self) -> int:
        """When `step` next has something to do, without a message."""
        deadline_ns = self.unanswered.timeouts.quiet_until_ns
        return min(deadline_ns, self._look_at_ns) if len(self.unanswered) else deadline_ns

    def ask(self, word: int, api: int, correlation_id: int, payload: bytes, now_ns: int) -> None:
        """Pass a request on. Raises WireError when too many wait."""
        refusal = self.unanswered.refusal(word, correlation_id)
        if refusal is not None:
            raise refusal
        held = self._queued_bytes_of.get(word, 0)
        if held and held + len(payload) > SESSION_QUEUED_BYTES_MAX:
            raise WireError(ErrorCode.TOO_MANY_REQUESTS, f"{held} bytes of requests of this connection wait; wait for some answers")
        if len(self._outbox.waiting) >= REQUESTS_MAX or self._queued_bytes + len(payload) > QUEUED_BYTES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS, f"{self._queued_bytes} bytes of requests of all connections wait; ask again shortly"
            )
        self.unanswered.add(word, correlation_id, api, now_ns, self._timeout_ms)
        self._outbox.waiting.append(_Queued(api, word, correlation_id, payload))
        self._queued_bytes += len(payload)
        self._queued_bytes_of[word] = held + len(payload)

    def pass_on(self, now_ns: int) -> int:
        """Move what waits into the lane, publish, ring: once per group."""
        self._now_ns = now_ns
        return self._outbox.flush()

    def _write(self, item: _Queued) -> bool:
        """Into the lane, unless it need not be done any more: it was answered late, or its client is gone."""
        api, word, correlation_id, payload = item
        if self.unanswered.api_of(word, correlation_id):
            lane = self._outbox.lane
            if not lane.try_write(LaneKind.REQUEST, api, 0, word, correlation_id, self._now_ns, (payload,)):
                return False
            self._written[word, correlation_id] = lane.position
        self._queued_bytes -= len(payload)
        left = self._queued_bytes_of[word] - len(payload)
        if left:
            self._queued_bytes_of[word] = left
        else:
            del self._queued_bytes_of[word]
        return True

    def take(self, word: int, correlation_id: int) -> int:
        """The API of a request that the decider has answered; 0: its client does not wait for it any more."""
        self._written.pop((word, correlation_id), None)
        return self.unanswered.take(word, correlation_id)

    def step(self, now_ns: int) -> int:
        """Restarts and timeouts."""
        count = 0
        if now_ns >= self.unanswered.timeouts.quiet_until_ns:
            for word, correlation_id, api in self.unanswered.take_late(now_ns):
                count += 1
                self._written.pop((word, correlation_id), None)
                if api:
                    self._answer(word, api, correlation_id, ErrorCode.TIMED_OUT, "no answer within the time that this may take")
        self._look_at_ns = now_ns + LOOK_INTERVAL_NS
        generation = self.link.generation()
        if generation != self._generation:
            self._generation = generation
            count += self._answer_for_the_dead()
        return count

    def _answer_for_the_dead(self) -> int:
        """What the predecessor had taken out of the lane will not be answered; what is still there, the successor takes."""
        consumed = self.link.to_it.consumed()
        lost = [key for key, position in self._written.items() if position <= consumed]
        for word, correlation_id in lost:
            api = self.take(word, correlation_id)
            fate = FATES.get(api, ASK_AGAIN)
            self._answer(word, api, correlation_id, fate.code, fate.sentence)
        return len(lost)

    def forget_session(self, word: int) -> None:
        """The client is gone. Of its requests, what is in the lane is carried out, what still waits here is not."""
        for correlation_id in self.unanswered.forget_session(word):
            self._written.pop((word, correlation_id), None)
