"""PRODUCE requests whose batches the workers have, and which answer belongs to which batch.

A batch's *ticket* stands in the correlation field of its lane message and of its descriptor: its request's number in the upper bits, its place among the
request's batches in the lower ones. So a batch costs no entry in any table; its answer goes straight into the body of the response, which has been made
when the request came.

Owner: one front.
Invariants: a request is closed once, by the last of its answers, its timeout or the end of its session; an answer behind that, or a second one to the same
    batch, finds nothing; batch_count is the sum over the requests, of one session never more than `session_max`, of all never more than `all_max`; a
    session that ends leaves nothing behind; ticket 0 is nobody's.
Crash: nothing of it survives: the generation in an answer's session word is another one then.
"""

from __future__ import annotations

from netfront.unanswered import TIMEOUT_MAX_MS
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import answer_batch
from tailrace.protocol.wire import WireError
from workers.timing_wheel import Timer, TimingWheel

TICKET_INDEX_BITS = 12
TICKET_INDEX_MASK = (1 << TICKET_INDEX_BITS) - 1
assert requests.PRODUCE_BATCHES_MAX <= 1 << TICKET_INDEX_BITS


class Asked:
    """A request that is not answered yet."""

    __slots__ = ("batch_count", "body", "correlation_id", "left", "ticket", "timer", "version", "word")

    def __init__(self, word: int, correlation_id: int, version: int, ticket: int, batch_count: int, timer: Timer[int]) -> None:
        self.word = word
        self.correlation_id = correlation_id
        self.version = version
        self.ticket = ticket
        """Of its first batch; the others count on from there."""
        self.batch_count = self.left = batch_count
        """How many batches it has, and to how many of them there is no answer."""
        self.body: bytearray | None = None if version == 1 else requests.unanswered_batches(batch_count)
        """Of the response; version 1 has one batch, whose answer makes the response."""
        self.timer = timer

    def settle(
        self, index: int, code: int, flags: int = 0, leader_epoch: int = -1, base_offset: int = -1, append_time_us: int = -1
    ) -> None:
        """What became of a batch; a second time for the same one changes nothing."""
        assert self.body is not None
        if index < self.batch_count and answer_batch(self.body, index, code, flags, leader_epoch, base_offset, append_time_us):
            self.left -= 1


class _Session:
    __slots__ = ("asked", "batch_count")

    def __init__(self) -> None:
        self.asked: dict[int, Asked] = {}
        """By correlation id."""
        self.batch_count = 0


class Tickets:
    """All requests of a front that are not answered yet."""

    def __init__(self, start_ns: int, session_max: int, all_max: int) -> None:
        self._session_max = session_max
        self._all_max = all_max
        self._sessions: dict[int, _Session] = {}
        """By session word."""
        self._by_number: dict[int, Asked] = {}
        self._next_number = 1
        self.batch_count = 0
        self.timeouts: TimingWheel[int] = TimingWheel(start_ns)

    def __len__(self) -> int:
        return len(self._by_number)

    def refusal(self, word: int, correlation_id: int, batch_count: int) -> WireError | None:
        """Why a request of so many batches may not be taken from this session now; None: it may."""
        if self.batch_count + batch_count > self._all_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS, f"{self.batch_count} batches of all connections wait for their answers; ask again shortly"
            )
        session = self._sessions.get(word)
        if session is None:
            return None
        if session.batch_count + batch_count > self._session_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{session.batch_count} batches of this connection wait for their answers; wait for some of them",
            )
        if correlation_id in session.asked:
            return WireError(ErrorCode.INVALID_REQUEST, f"a request with correlation id {correlation_id} is under way; give each another")
        return None

    def open(self, word: int, correlation_id: int, version: int, batch_count: int, now_ns: int, timeout_ms: int) -> Asked:
        """A request whose batches go to the workers; `refusal` has let it."""
        number = self._next_number
        self._next_number = number + 1
        timer = self.timeouts.add(now_ns + min(timeout_ms, TIMEOUT_MAX_MS) * 1_000_000, number)
        asked = Asked(word, correlation_id, version, number << TICKET_INDEX_BITS, batch_count, timer)
        session = self._sessions.get(word)
        if session is None:
            session = self._sessions[word] = _Session()
        session.asked[correlation_id] = self._by_number[number] = asked
        session.batch_count += batch_count
        self.batch_count += batch_count
        return asked

    def find(self, ticket: int) -> Asked | None:
        """The request that a batch of this ticket belongs to; None: it was answered, or its session has ended."""
        return self._by_number.get(ticket >> TICKET_INDEX_BITS)

    def close(self, asked: Asked) -> None:
        """It is answered now."""
        self._forget(asked)
        session = self._sessions[asked.word]
        del session.asked[asked.correlation_id]
        session.batch_count -= asked.batch_count
        if not session.asked:
            del self._sessions[asked.word]

    def _forget(self, asked: Asked) -> None:
        del self._by_number[asked.ticket >> TICKET_INDEX_BITS]
        self.batch_count -= asked.batch_count
        self.timeouts.cancel(asked.timer)

    def take_late(self, now_ns: int) -> list[Asked]:
        """Requests whose timeout has passed; they are closed."""
        late = [self._by_number[number] for number in self.timeouts.advance(now_ns)]
        for asked in late:
            self.close(asked)
        return late

    def take(self, word: int, correlation_id: int) -> Asked | None:
        """Close a request that is answered otherwise; None: there is no such one."""
        session = self._sessions.get(word)
        asked = None if session is None else session.asked.get(correlation_id)
        if asked is not None:
            self.close(asked)
        return asked

    def forget_session(self, word: int) -> None:
        """The client is gone."""
        session = self._sessions.pop(word, None)
        if session is not None:
            for asked in session.asked.values():
                self._forget(asked)
