"""The ways to the coordinator, the scheduler and the process of groups, and back: requests that the front passes on and remembers until they are answered.

A request waits here while it does not fit its lane, then in the lane, then with the decider. A decider takes a request out of its lane before it handles it, so
one that is killed loses what it had taken: `step` sees the successor's generation, and answers what the predecessor took, as each API's row says. A decider
that is started when it is first needed has no lanes before: what is asked of it waits here until it is there.

Owner: one front. Invariants: what waits is bounded for each connection and in all, by number and by bytes; a request is answered once, by the decider, by its
    timeout, or because the decider that took it is gone; requests of a session keep their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from netfront.turns import Turns
from netfront.unanswered import Unanswered, Waiting
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
CLOSED_MAX = 8_192
"""So many ends of sessions wait for room in the lane; a member whose end was not told is found by its session's timeout."""
PATIENCE_NS = 50_000_000
"""How long requests are gathered whose answers are not waited for: their decider wakes once for all of them, and this process once for the answers."""
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
    Api.DELETE_GROUPS: Fate(
        ErrorCode.TIMED_OUT, "the process of groups was restarted: it is not known whether the groups are deleted; look at the list of groups"
    ),
    Api.SHARE_ACQUIRE: Fate(
        ErrorCode.TIMED_OUT,
        "the process of groups was restarted: what it may have acquired for this member comes again when its locks have timed out; ask again",
    ),
    Api.SHARE_ACKNOWLEDGE: Fate(
        ErrorCode.TIMED_OUT, "the process of groups was restarted: it is not known whether the records are acknowledged; acknowledge them again"
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


@dataclass(frozen=True, slots=True)
class OnDemand:
    """The way to a process that is started when it is first needed."""

    connect: Callable[[], DeciderLink | None]
    """None: it has not been started."""
    ask_for: Callable[[], None]
    """Have the supervisor start it."""
    lacks_memory: Callable[[], bool]
    """Whether it cannot be started for want of shared memory."""
    payload_max: int
    """What its lane will take."""


WITHOUT_MEMORY = "the process of groups cannot be started: shared memory has no room for its lanes; enlarge /dev/shm, or lower ring_bytes (tailrace doctor)"


class _Queued(NamedTuple):
    kind: LaneKind
    api: int
    word: int
    correlation_id: int
    payload: bytes


class Decider:
    """The coordinator, the scheduler or the process of groups, as a front sees it."""

    def __init__(
        self,
        way: DeciderLink | OnDemand,
        timeout_ms: int,
        answer: Callable[[int, int, int, int, ErrorCode, str], None],
        start_ns: int,
        at_once_max: int = SESSION_REQUESTS_MAX,
    ) -> None:
        """`answer`: (session word, API, version, correlation id, code, sentence) of a request that the decider itself will not answer. `at_once_max`: so many
        requests of one session are in its lane at a time; others wait for their turn.
        """
        self.link: DeciderLink | None = None
        """None: it is started on demand, and has not been yet."""
        self._on_demand = way if isinstance(way, OnDemand) else None
        self._timeout_ms = timeout_ms
        self._answer = answer
        self._generation = 0
        self._outbox: Outbox[_Queued] | None = None
        self._queue: deque[_Queued] = deque()
        """What is not in the lane yet; the outbox's own, once there is one."""
        self._held_until_ns = 0
        """While all of the queue is patient: when it goes into the lane."""
        self._turns: Turns[_Queued] = Turns(at_once_max)
        self._queued_bytes = 0
        self._queued_bytes_of: dict[int, int] = {}
        """Session word -> bytes of its requests in the queue."""
        self._closed_count = 0
        """Ends of sessions in the queue."""
        self._written: dict[tuple[int, int], int] = {}
        """(session word, correlation id) -> lane position behind it, of requests in the lane or with the decider, in order."""
        self.unanswered = Unanswered(start_ns, SESSION_REQUESTS_MAX, REQUESTS_MAX)
        self._look_at_ns = start_ns
        self._now_ns = start_ns
        if isinstance(way, DeciderLink):
            self._take_up(way)

    def _take_up(self, link: DeciderLink) -> None:
        self.link = link
        self._generation = link.generation()
        self._outbox = Outbox(link.to_it, link.bell, self._write)
        self._outbox.waiting = self._queue

    @property
    def payload_max(self) -> int:
        """Bytes of the largest request that its lane takes."""
        if self._on_demand is not None:
            return self._on_demand.payload_max
        assert self.link is not None
        return self.link.to_it.payload_max

    def is_absent(self) -> bool:
        """Whether its process was never needed: what it decides about, there is none of."""
        self._look_for_it()
        return self.link is None and self._on_demand is not None and not self._on_demand.lacks_memory()

    def next_deadline_ns(self) -> int:
        """When `step` next has something to do, without a message."""
        deadline_ns = self.unanswered.timeouts.quiet_until_ns
        if self._held_until_ns:
            deadline_ns = min(deadline_ns, self._held_until_ns)
        return min(deadline_ns, self._look_at_ns) if len(self.unanswered) else deadline_ns

    def ask(self, word: int, api: int, version: int, correlation_id: int, payload: bytes, now_ns: int, *, is_patient: bool = False) -> None:
        """Pass a request on; what is patient goes with the next that is not, or after PATIENCE_NS. Raises WireError when too many wait."""
        refusal = self.unanswered.refusal(word, correlation_id)
        if refusal is not None:
            raise refusal
        held = self._queued_bytes_of.get(word, 0)
        if held and held + len(payload) > SESSION_QUEUED_BYTES_MAX:
            raise WireError(ErrorCode.TOO_MANY_REQUESTS, f"{held} bytes of requests of this connection wait; wait for some answers")
        if len(self._queue) >= REQUESTS_MAX or self._queued_bytes + len(payload) > QUEUED_BYTES_MAX:
            raise WireError(
                ErrorCode.TOO_MANY_REQUESTS, f"{self._queued_bytes} bytes of requests of all connections wait; ask again shortly"
            )
        if self.link is not None and not len(self.unanswered):
            self._generation = self.link.generation()  # a predecessor that went before has taken nothing
            self._look_at_ns = now_ns + LOOK_INTERVAL_NS
        self.unanswered.add(word, correlation_id, api, version, now_ns, self._timeout_ms)
        if not is_patient:
            self._held_until_ns = 0
        elif not self._queue:
            self._held_until_ns = now_ns + PATIENCE_NS
        item = _Queued(LaneKind.REQUEST, api, word, correlation_id, payload)
        if self._turns.begin(word, correlation_id, item):
            self._queue.append(item)
        self._queued_bytes += len(payload)
        self._queued_bytes_of[word] = held + len(payload)
        if self.link is None and self._on_demand is not None:
            self._on_demand.ask_for()

    def tell_closed(self, word: int) -> None:
        """A session that has asked it something has ended."""
        if self._closed_count < CLOSED_MAX:
            self._queue.append(_Queued(LaneKind.SESSION_CLOSED, 0, word, 0, b""))
            self._closed_count += 1
            self._held_until_ns = 0

    def pass_on(self, now_ns: int) -> int:
        """Move what waits into the lane, publish, ring: once per group."""
        if self._outbox is None or now_ns < self._held_until_ns:
            return 0
        self._held_until_ns = 0
        self._now_ns = now_ns
        return self._outbox.flush()

    def _write(self, item: _Queued) -> bool:
        """Into the lane, unless it need not be done any more: it was answered late, or its client is gone."""
        assert self._outbox is not None
        lane = self._outbox.lane
        kind, api, word, correlation_id, payload = item
        if kind is LaneKind.SESSION_CLOSED:
            if not lane.try_write(kind, 0, 0, word, 0, self._now_ns, ()):
                return False
            self._closed_count -= 1
            return True
        if self.unanswered.is_waiting(word, correlation_id):
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

    def _end_turn(self, word: int, correlation_id: int) -> None:
        """A request is answered: it waits for no turn, and the next of its session has its own."""
        dropped = self._turns.drop(word, correlation_id)
        if dropped is not None:
            self._count_off(word, len(dropped.payload))
        following = self._turns.end(word, correlation_id)
        if following is not None:
            self._queue.append(following)
            self._held_until_ns = 0

    def take(self, word: int, correlation_id: int) -> Waiting | None:
        """A request that the decider has answered; None: its client does not wait for it any more."""
        self._written.pop((word, correlation_id), None)
        asked = self.unanswered.take(word, correlation_id)
        self._end_turn(word, correlation_id)
        return asked

    @property
    def has_queued(self) -> bool:
        """Whether `pass_on` may have something to do."""
        return bool(self._queue) or self._held_until_ns > 0

    def is_quiet(self, now_ns: int) -> bool:
        """Whether there is nothing to read from it, nor anything for `step` to do."""
        waiting = self.unanswered
        return not len(waiting) and now_ns < waiting.timeouts.quiet_until_ns and (self.link is None or not self.link.from_it.has_more())

    def step(self, now_ns: int) -> int:
        """Restarts and timeouts."""
        count = 0
        if now_ns >= self.unanswered.timeouts.quiet_until_ns:
            for word, correlation_id, api, version in self.unanswered.take_late(now_ns):
                count += 1
                self._written.pop((word, correlation_id), None)
                self._end_turn(word, correlation_id)
                self._answer(word, api, version, correlation_id, ErrorCode.TIMED_OUT, "no answer within the time that this may take")
        self._look_at_ns = now_ns + LOOK_INTERVAL_NS
        if self.link is None:
            return count + (self._wait_for_it() if len(self.unanswered) else 0)
        generation = self.link.generation()
        if generation != self._generation:
            self._generation = generation
            count += self._answer_for_the_dead(self.link)
        return count

    def _look_for_it(self) -> None:
        if self.link is None and self._on_demand is not None and (link := self._on_demand.connect()) is not None:
            self._take_up(link)

    def _wait_for_it(self) -> int:
        """It is being started, unless it cannot be: then what waits is refused."""
        self._look_for_it()
        if self.link is not None or self._on_demand is None or not self._on_demand.lacks_memory():
            return 0
        return self._give_up(self.unanswered.all(), Fate(ErrorCode.NOT_READY, WITHOUT_MEMORY))

    def _answer_for_the_dead(self, link: DeciderLink) -> int:
        """What the predecessor had taken out of the lane will not be answered; what is still there, the successor takes."""
        consumed = link.to_it.consumed()
        return self._give_up([key for key, position in self._written.items() if position <= consumed], None)

    def _give_up(self, keys: list[tuple[int, int]], fate: Fate | None) -> int:
        """Answer requests in the decider's place; `fate` None: by the table."""
        for word, correlation_id in keys:
            asked = self.take(word, correlation_id)
            if asked is not None:
                api, version, _ = asked
                code, sentence = fate or FATES.get(api, ASK_AGAIN)
                self._answer(word, api, version, correlation_id, code, sentence)
        return len(keys)

    def forget_session(self, word: int) -> None:
        """The client is gone. Of its requests, what is in the lane is carried out, what still waits here is not."""
        for item in self._turns.forget(word):
            self._count_off(word, len(item.payload))
        for correlation_id in self.unanswered.forget_session(word):
            self._written.pop((word, correlation_id), None)
