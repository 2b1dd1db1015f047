"""Requests that another process has: which client waits for which answer, and until when.

Owner: one front. Invariants: a request is taken out once, by its answer, its timeout or the end of its session; of one session there are never more than
    `session_max`, of all never more than `all_max`; a session that ends leaves nothing behind.
"""

from __future__ import annotations

from tailrace.protocol.errors import ErrorCode
from tailrace.protocol.wire import WireError
from workers.timing_wheel import Timer, TimingWheel

TIMEOUT_MAX_MS = 600_000
"""A client may ask for longer; the front does not remember it for longer."""

Waiting = tuple[int, int, Timer[tuple[int, int]]]
"""(API, version that was asked and is answered, timeout) of a request."""


class Unanswered:
    """By session and correlation id."""

    def __init__(self, start_ns: int, session_max: int, all_max: int) -> None:
        self._session_max = session_max
        self._all_max = all_max
        self._sessions: dict[int, dict[int, Waiting]] = {}
        """By session word, then by correlation id."""
        self._count = 0
        self.timeouts: TimingWheel[tuple[int, int]] = TimingWheel(start_ns)

    def __len__(self) -> int:
        return self._count

    def refusal(self, word: int, correlation_id: int) -> WireError | None:
        """Why one more of this session may not wait now; None: it may."""
        waiting = self._sessions.get(word)
        if self._count >= self._all_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS, f"{self._count} requests of all connections wait for their answers; ask again shortly"
            )
        if waiting is None:
            return None
        if len(waiting) >= self._session_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS, f"{len(waiting)} requests of this connection wait for their answers; wait for some of them"
            )
        if correlation_id in waiting:
            return WireError(ErrorCode.INVALID_REQUEST, f"a request with correlation id {correlation_id} is under way; give each another")
        return None

    def add(self, word: int, correlation_id: int, api: int, version: int, now_ns: int, timeout_ms: int) -> None:
        """A request goes to another process; `refusal` has let it."""
        timer = self.timeouts.add(now_ns + min(timeout_ms, TIMEOUT_MAX_MS) * 1_000_000, (word, correlation_id))
        waiting = self._sessions.get(word)
        if waiting is None:
            waiting = self._sessions[word] = {}
        waiting[correlation_id] = api, version, timer
        self._count += 1

    def take(self, word: int, correlation_id: int) -> Waiting | None:
        """A request that is to be answered now; None: it has been, or its session is gone."""
        waiting = self._sessions.get(word)
        found = None if waiting is None else waiting.pop(correlation_id, None)
        if waiting is None or found is None:
            return None
        if not waiting:
            del self._sessions[word]
        self._count -= 1
        self.timeouts.cancel(found[2])
        return found

    def take_late(self, now_ns: int) -> list[tuple[int, int, int, int]]:
        """(session word, correlation id, API, version) of requests whose timeout has passed."""
        late = []
        for word, correlation_id in self.timeouts.advance(now_ns):
            asked = self.take(word, correlation_id)
            if asked is not None:
                late.append((word, correlation_id, asked[0], asked[1]))
        return late

    def forget_session(self, word: int) -> list[int]:
        """The client is gone; returns the correlation ids that were waiting."""
        waiting = self._sessions.pop(word, {})
        for _, _, timer in waiting.values():
            self.timeouts.cancel(timer)
        self._count -= len(waiting)
        return list(waiting)

    def is_waiting(self, word: int, correlation_id: int) -> bool:
        """Whether it has not been answered, and its session is there."""
        return correlation_id in self._sessions.get(word, ())

    def all(self) -> list[tuple[int, int]]:
        """(session word, correlation id) of everything that waits."""
        return [(word, correlation_id) for word, waiting in self._sessions.items() for correlation_id in waiting]
