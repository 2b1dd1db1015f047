"""Pending requests: those forwarded to another process, with their client and timeout.

Owner: one front.

Invariants:
- A request is removed once: by its response, its timeout or the end of its session.
- Each session has at most `session_max` requests, all together `all_max`.
- The end of a session removes all of its requests.
"""

from __future__ import annotations

from shm.runtime.timing_wheel import Timer, TimingWheel
from tailrace.core.error_codes import ErrorCode
from tailrace.protocol.frame import WireError

TIMEOUT_MAX_MS = 600_000
"""Longest timeout of a request. Longer ones are cut to it."""

Waiting = tuple[int, int, Timer[tuple[int, int]]]
"""(API, version of request and response, timeout) of a request."""


class PendingRequests:
    """Pending requests by session and correlation id."""

    def __init__(self, start_ns: int, session_max: int, all_max: int) -> None:
        self._session_max = session_max
        self._all_max = all_max
        self._sessions: dict[int, dict[int, Waiting]] = {}
        """Requests by session word and correlation id."""
        self._count = 0
        self.timeouts: TimingWheel[tuple[int, int]] = TimingWheel(start_ns)

    def __len__(self) -> int:
        return self._count

    def refusal(self, word: int, correlation_id: int) -> WireError | None:
        """Return the error for a request that exceeds a limit or reuses a
        correlation id, else None.
        """
        waiting = self._sessions.get(word)
        if self._count >= self._all_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{self._count} requests of all connections are pending; the limit is "
                f"{self._all_max}. Retry shortly",
            )
        if waiting is None:
            return None
        if len(waiting) >= self._session_max:
            return WireError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{len(waiting)} requests of this connection are pending; the limit is "
                f"{self._session_max}. Wait for some of them",
            )
        if correlation_id in waiting:
            return WireError(
                ErrorCode.INVALID_REQUEST,
                f"correlation id {correlation_id} is in use by another request: use a new one",
            )
        return None

    def add(
        self, word: int, correlation_id: int, api: int, version: int, now_ns: int, timeout_ms: int
    ) -> None:
        """Register a forwarded request. `refusal` must have returned None."""
        timer = self.timeouts.add(
            now_ns + min(timeout_ms, TIMEOUT_MAX_MS) * 1_000_000, (word, correlation_id)
        )
        waiting = self._sessions.get(word)
        if waiting is None:
            waiting = self._sessions[word] = {}
        waiting[correlation_id] = api, version, timer
        self._count += 1

    def take(self, word: int, correlation_id: int) -> Waiting | None:
        """Remove and return a request that is answered now, or None if it was answered or its
        session has ended.
        """
        waiting = self._sessions.get(word)
        found = None if waiting is None else waiting.pop(correlation_id, None)
        if waiting is None or found is None:
            return None
        if not waiting:
            del self._sessions[word]
        self._count -= 1
        self.timeouts.cancel(found[2])
        return found

    def pop_expired(self, now_ns: int) -> list[tuple[int, int, int, int]]:
        """Remove requests whose timeout has passed. Return (session word, correlation id, API,
        version) of each.
        """
        late = []
        for word, correlation_id in self.timeouts.advance(now_ns):
            asked = self.take(word, correlation_id)
            if asked is not None:
                late.append((word, correlation_id, asked[0], asked[1]))
        return late

    def forget_session(self, word: int) -> list[int]:
        """Remove a session's requests. Return their correlation ids."""
        waiting = self._sessions.pop(word, {})
        for _, _, timer in waiting.values():
            self.timeouts.cancel(timer)
        self._count -= len(waiting)
        return list(waiting)

    def is_waiting(self, word: int, correlation_id: int) -> bool:
        """True if the request is pending."""
        return correlation_id in self._sessions.get(word, ())

    def all(self) -> list[tuple[int, int]]:
        """Return (session word, correlation id) of every pending request."""
        return [
            (word, correlation_id)
            for word, waiting in self._sessions.items()
            for correlation_id in waiting
        ]
