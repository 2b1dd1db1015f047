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

from heapq import heapify, heappop, heappush

from netfront.unanswered import TIMEOUT_MAX_MS
from tailrace.protocol import requests
from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.requests import answer_batch
from tailrace.protocol.wire import WireError
from workers.timing_wheel import NEVER_NS

TICKET_INDEX_BITS = 12
TICKET_INDEX_MASK = (1 << TICKET_INDEX_BITS) - 1
CLOSED_MAX = 64
"""So many deadlines of closed requests are kept, and as many again as there are open ones."""
LATE_AT_ONCE = 1024
assert requests.PRODUCE_BATCHES_MAX <= 1 << TICKET_INDEX_BITS


class Asked:
    """A request that is not answered yet."""

    __slots__ = ("batch_count", "body", "correlation_id", "late_at_ns", "left", "ticket", "version", "word")

    def __init__(self, word: int, correlation_id: int, version: int, ticket: int, batch_count: int, late_at_ns: int) -> None:
        self.word = word
        self.correlation_id = correlation_id
        self.version = version
        self.ticket = ticket
        """Of its first batch; the others count on from there."""
        self.batch_count = self.left = batch_count
        """How many batches it has, and to how many of them there is no answer."""
        self.body: bytearray | None = None if version == 1 else requests.unanswered_batches(batch_count)
        """Of the response; version 1 has one batch, whose answer makes the response."""
        self.late_at_ns = late_at_ns

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

    def __init__(self, session_max: int, all_max: int) -> None:
        self._session_max = session_max
        self._all_max = all_max
        self._sessions: dict[int, _Session] = {}
        """By session word."""
        self._by_number: dict[int, Asked] = {}
        self._next_number = 1
        self.batch_count = 0
        self._deadlines: list[tuple[int, int]] = []
        """(When its timeout has passed, number) of each request, and of some that are closed: a heap. Nearly every request is answered long before, and then
        costs an append here and nothing more.
        """

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
        late_at_ns = now_ns + (timeout_ms if timeout_ms < TIMEOUT_MAX_MS else TIMEOUT_MAX_MS) * 1_000_000
        deadlines = self._deadlines
        if len(deadlines) > CLOSED_MAX + 2 * len(self._by_number):
            deadlines[:] = [(other.late_at_ns, its_number) for its_number, other in self._by_number.items()]
            heapify(deadlines)
        heappush(deadlines, (late_at_ns, number))
        asked = Asked(word, correlation_id, version, number << TICKET_INDEX_BITS, batch_count, late_at_ns)
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

    @property
    def late_at_ns(self) -> int:
        """Before this `take_late` has nothing to do. Requests that are closed may hold it low."""
        return self._deadlines[0][0] if self._deadlines else NEVER_NS

    def take_late(self, now_ns: int) -> list[Asked]:
        """Requests whose timeout has passed, earliest first, LATE_AT_ONCE at most; they are closed."""
        late: list[Asked] = []
        deadlines, by_number = self._deadlines, self._by_number
        while deadlines and (deadlines[0][1] not in by_number or (deadlines[0][0] <= now_ns and len(late) < LATE_AT_ONCE)):
            asked = by_number.get(heappop(deadlines)[1])
            if asked is not None:
                self.close(asked)
                late.append(asked)
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
