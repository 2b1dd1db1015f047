"""Logins of the console of an appliance that requires users: the token becomes a session's cookie.

A browser sends the token once, in a header. Streams of events have no headers of their own, so the
cookie lets the page read. A change needs the token in its header as well: a page of another site
can send neither.

Owner: the console's process. Safe in any thread.

Invariants:
- A session is known by the hash of its random id, lasts SESSION_S, and there are at most
  SESSIONS_MAX.
- At most FAILURES_MAX wrong tokens within FAILURES_S are looked at; the right one always is.

Crash: nothing is kept; the page logs in again.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any

from appliance.observe.console.guard import Refusal, bearer_of

COOKIE = "tailrace_session"
SESSION_S = 12 * 3600
SESSIONS_MAX = 1_000
FAILURES_MAX = 10
FAILURES_S = 60


class Logins:
    """Sessions of browsers, and the refusal of everybody else."""

    def __init__(self, token: Callable[[], str], now_s: Callable[[], float]) -> None:
        """`token`: the console's; raises OSError. `now_s`: a monotonic clock."""
        self._token = token
        self._now_s = now_s
        self._lock = threading.Lock()
        self._sessions: dict[str, float] = {}
        """End of each session, by the hash of its id, the oldest first."""
        self._failures: deque[float] = deque()

    def refuse(self, environ: Mapping[str, Any]) -> Refusal | None:
        """Refuse a request without the token and without a session. None: it is served."""
        given = bearer_of(environ)
        if given:
            return self._refuse_token(given)
        with self._lock:
            end_s = self._sessions.get(_hash(_cookie(environ)))
        if end_s is not None and self._now_s() < end_s:
            return None
        return Refusal(
            "401 Unauthorized",
            "this appliance requires users: `tailrace console` on its host prints an address that "
            "logs in; a scraper sends the token of console.token (Authorization: Bearer TOKEN)",
        )

    def login(self, environ: Mapping[str, Any]) -> str | Refusal:
        """The header Set-Cookie of a new session, or why there is none."""
        refusal = self._refuse_token(bearer_of(environ))
        if refusal is not None:
            return refusal
        session = secrets.token_urlsafe(32)
        with self._lock:
            while len(self._sessions) >= SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_hash(session)] = self._now_s() + SESSION_S
        return f"{COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/; Max-Age={SESSION_S}"

    def _refuse_token(self, given: str) -> Refusal | None:
        try:
            token = self._token()
        except OSError:
            token = ""
        if token and hmac.compare_digest(given.encode(), token.encode()):
            return None
        now_s = self._now_s()
        with self._lock:
            while self._failures and now_s - self._failures[0] >= FAILURES_S:
                self._failures.popleft()
            if len(self._failures) >= FAILURES_MAX:
                return Refusal(
                    "429 Too Many Requests", "too many wrong tokens: try again in a minute"
                )
            self._failures.append(now_s)
        return Refusal(
            "401 Unauthorized", "the token is not this console's; run `tailrace console` for it"
        )


def _hash(session: str) -> str:
    return hashlib.sha256(session.encode()).hexdigest()


def _cookie(environ: Mapping[str, Any]) -> str:
    try:
        found = SimpleCookie(str(environ.get("HTTP_COOKIE", ""))[:4096]).get(COOKIE)
    except CookieError:
        return ""
    return "" if found is None else found.value
