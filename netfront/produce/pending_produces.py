"""Pending PRODUCE requests: each waits for the acks of batches that workers have.

A batch's token is the correlation field of its lane message and of its descriptor. The upper bits
are the request's number, the lower bits the batch's index in the request. A batch therefore needs
no table entry: its ack is written straight into the response body, which is made when the request
arrives.

Owner: one front.

Invariants:
- A request is closed once: by its last ack, its timeout or the end of its session.
- A later ack, or a second one for the same batch, has no effect.
- `batch_count` is the sum over all requests. It stays within `session_max` for each session and
  `all_max` for all.
- The end of a session removes all of its requests.
- Token 0 belongs to no request.

Crash: none of it survives. Acks of an earlier front carry another generation in their session word.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from netfront.session.pending_requests import TIMEOUT_MAX_MS
from shm.runtime.timing_wheel import NEVER_NS
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol import produce_messages
from tailrace.protocol.frame import WireError
from tailrace.protocol.produce_messages import answer_batch

TOKEN_INDEX_BITS = 12
TOKEN_INDEX_MASK = (1 << TOKEN_INDEX_BITS) - 1
CLOSED_MAX = 64
"""Deadlines kept for closed requests, plus one for each open request, before the heap is rebuilt.
"""
LATE_AT_ONCE = 1024
assert produce_messages.PRODUCE_BATCHES_MAX <= 1 << TOKEN_INDEX_BITS


class PendingProduce:
    """A PRODUCE request that is not answered yet."""

    __slots__ = (
        "batch_count",
        "batch_token",
        "body",
        "correlation_id",
        "expires_at_ns",
        "left",
        "opened_ns",
        "refused",
        "trace_id",
        "version",
        "word",
    )

    def __init__(
        self,
        word: int,
        correlation_id: int,
        version: int,
        batch_token: int,
        batch_count: int,
        opened_ns: int,
        expires_at_ns: int,
    ) -> None:
        self.word = word
        self.correlation_id = correlation_id
        self.version = version
        self.batch_token = batch_token
        """Token of the first batch. The others follow it in order."""
        self.batch_count = self.left = batch_count
        """Number of batches in all, and of those without an ack."""
        self.body: bytearray | None = (
            None if version == 1 else produce_messages.unanswered_batches(batch_count)
        )
        """Response body. None in version 1: its single ack makes the response."""
        self.opened_ns = opened_ns
        self.expires_at_ns = expires_at_ns
        self.refused: list[ErrorCode] = []
        """Codes of the batches that a worker or flusher refused."""
        self.trace_id = b""
        """A trace that a record belongs to; empty if none is known."""

    def settle(
        self,
        index: int,
        code: int,
        flags: int = 0,
        leader_epoch: int = -1,
        base_offset: int = -1,
        append_time_us: int = -1,
    ) -> None:
        """Write a batch's ack into the response. Repeated acks of a batch have no effect."""
        assert self.body is not None
        if index < self.batch_count and answer_batch(
            self.body, index, code, flags, leader_epoch, base_offset, append_time_us
        ):
            self.left -= 1


class _Session:
    __slots__ = ("asked", "batch_count")

    def __init__(self) -> None:
        self.asked: dict[int, PendingProduce] = {}
        """Requests by correlation id."""
        self.batch_count = 0


class PendingProduces:
    """All PRODUCE requests of a front that are not answered yet."""

    def __init__(self, session_max: int, all_max: int) -> None:
        self._session_max = session_max
        self._all_max = all_max
        self._sessions: dict[int, _Session] = {}
        """Sessions by session word."""
        self._by_number: dict[int, PendingProduce] = {}
        self._next_number = 1
        self.batch_count = 0
        self._deadlines: list[tuple[int, int]] = []
        """Heap of (deadline, request number), with entries of some closed requests.

        Nearly every request is answered long before its deadline and costs only one append here.
        """

    def __len__(self) -> int:
        return len(self._by_number)

    def refusal(self, word: int, correlation_id: int, batch_count: int) -> WireError | None:
        """Return the error for a request that exceeds a limit or reuses a
        correlation id, else None.
        """
        if self.batch_count + batch_count > self._all_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self.batch_count} batches of all connections wait for acks; the limit is "
                f"{self._all_max}. Retry shortly",
            )
        session = self._sessions.get(word)
        if session is None:
            return None
        if session.batch_count + batch_count > self._session_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{session.batch_count} batches of this connection wait for acks; the limit is "
                f"{self._session_max}. Wait for some of them",
            )
        if correlation_id in session.asked:
            return WireError(
                ErrorCode.INVALID_REQUEST,
                f"correlation id {correlation_id} is in use by another request: use a new one",
            )
        return None

    def open(
        self,
        word: int,
        correlation_id: int,
        version: int,
        batch_count: int,
        now_ns: int,
        timeout_ms: int,
    ) -> PendingProduce:
        """Register a request whose batches go to the workers. `refusal` must have returned None."""
        number = self._next_number
        self._next_number = number + 1
        expires_at_ns = (
            now_ns + (timeout_ms if timeout_ms < TIMEOUT_MAX_MS else TIMEOUT_MAX_MS) * 1_000_000
        )
        deadlines = self._deadlines
        if len(deadlines) > CLOSED_MAX + 2 * len(self._by_number):
            deadlines[:] = [
                (other.expires_at_ns, its_number) for its_number, other in self._by_number.items()
            ]
            heapify(deadlines)
        heappush(deadlines, (expires_at_ns, number))
        asked = PendingProduce(
            word, correlation_id, version, number << TOKEN_INDEX_BITS, batch_count, now_ns,
            expires_at_ns,
        )  # fmt: skip
        session = self._sessions.get(word)
        if session is None:
            session = self._sessions[word] = _Session()
        session.asked[correlation_id] = self._by_number[number] = asked
        session.batch_count += batch_count
        self.batch_count += batch_count
        return asked

    def find(self, batch_token: int) -> PendingProduce | None:
        """Close and return a request that was answered by other means.

        Return None if it is not open.
        """
        return self._by_number.get(batch_token >> TOKEN_INDEX_BITS)

    def close(self, asked: PendingProduce) -> None:
        """Remove a request that is answered now."""
        self._forget(asked)
        session = self._sessions[asked.word]
        del session.asked[asked.correlation_id]
        session.batch_count -= asked.batch_count
        if not session.asked:
            del self._sessions[asked.word]

    def _forget(self, asked: PendingProduce) -> None:
        del self._by_number[asked.batch_token >> TOKEN_INDEX_BITS]
        self.batch_count -= asked.batch_count

    @property
    def expires_at_ns(self) -> int:
        """Earliest deadline, perhaps of a closed request. `pop_expired` has no work before it."""
        return self._deadlines[0][0] if self._deadlines else NEVER_NS

    def pop_expired(self, now_ns: int) -> list[PendingProduce]:
        """Close and return requests whose deadline has passed, earliest first, at
        most LATE_AT_ONCE.
        """
        late: list[PendingProduce] = []
        deadlines, by_number = self._deadlines, self._by_number
        while deadlines and (
            deadlines[0][1] not in by_number
            or (deadlines[0][0] <= now_ns and len(late) < LATE_AT_ONCE)
        ):
            asked = by_number.get(heappop(deadlines)[1])
            if asked is not None:
                self.close(asked)
                late.append(asked)
        return late

    def take(self, word: int, correlation_id: int) -> PendingProduce | None:
        """Close and return a request that is answered by other means, or return
        None if it is not open.
        """
        session = self._sessions.get(word)
        asked = None if session is None else session.asked.get(correlation_id)
        if asked is not None:
            self.close(asked)
        return asked

    def forget_session(self, word: int) -> None:
        """Remove all requests of a session that has ended."""
        session = self._sessions.pop(word, None)
        if session is not None:
            for asked in session.asked.values():
                self._forget(asked)
