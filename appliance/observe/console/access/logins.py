"""Logins of the console of an appliance that requires users: the console's token, or a user's name
and password, become a session's cookie.

A browser sends them once, in a header. Streams of events have no headers of their own, so the
cookie lets the page read. A change needs a token in its header as well: the console's, or that of
the session, which its user gets at the login. A page of another site can send neither.

Owner: the console's process. Safe in any thread.

Invariants:
- A session is known by the hash of its random id, lasts SESSION_S, and there are at most
  SESSIONS_MAX, and SESSIONS_OF_USER_MAX of a user: the oldest ends, so that nobody ends those of
  others by logging in.
- A user's session ends within RECHECK_S of the loss of its user's right, or of its password; one
  of the console's token with another token.
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
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any

from appliance.observe.console.access.actors import Actor
from appliance.observe.console.access.guard import Refusal, bearer_of
from appliance.observe.console.access.user_logins import UserLogins, given_name, has_password

COOKIE = "tailrace_session"
SESSION_S = 12 * 3600
SESSIONS_MAX = 1_000
SESSIONS_OF_USER_MAX = 50
RECHECK_S = 1.0
FAILURES_MAX = 10
FAILURES_S = 60


@dataclass(slots=True)
class Session:
    """A session. Without a user it is the console's token's."""

    end_s: float
    user: str = ""
    password_hash: str = ""
    opened_by: str = ""
    """Hash of the console's token that has opened it; empty for a user's."""
    token_hash: str = ""
    """Hash of the token with which this session changes something."""
    may_change: bool = False
    checked_s: float = 0.0


class Logins:
    """Sessions of browsers, and the refusal of everybody else."""

    def __init__(
        self, token: Callable[[], str], now_s: Callable[[], float], users: UserLogins | None = None
    ) -> None:
        """`token`: the console's; raises OSError. `now_s`: a monotonic clock. `users`: None: there
        are no logins by password.
        """
        self._token = token
        self._now_s = now_s
        self._users = users
        self._lock = threading.Lock()
        self._sessions: dict[str, Session] = {}
        """By the hash of its id, the oldest first."""
        self._failures: deque[float] = deque()

    def refuse(self, environ: Mapping[str, Any]) -> Refusal | None:
        """Refuse a request without the token and without a session. None: it is served."""
        session = self._session(environ)
        given = bearer_of(environ)
        if session is not None and (not given or self._is_token_of(session, given)):
            return None
        if given:
            return self._refuse_token(given)
        return Refusal(
            "401 Unauthorized",
            "this appliance requires users: log in with a name and a password, or by the address "
            "that `tailrace console` prints on its host; a scraper of /metrics sends a token of "
            "`tailrace token add NAME --data-dir DIR` (Authorization: Bearer TOKEN)",
        )

    def may_change(self, environ: Mapping[str, Any]) -> bool:
        """True for a request of a user's session that has the session's token, if the user may
        change something.
        """
        session = self._session(environ)
        return (
            session is not None
            and session.may_change
            and self._is_token_of(session, bearer_of(environ))
        )

    def actor(self, environ: Mapping[str, Any]) -> Actor:
        """The sender of a request that is let in."""
        session = self._session(environ)
        host = str(environ.get("REMOTE_ADDR", ""))
        return Actor("" if session is None else session.user, host)

    def _session(self, environ: Mapping[str, Any]) -> Session | None:
        key, now_s = _hash(_cookie(environ)), self._now_s()
        with self._lock:
            session = self._sessions.get(key)
        if session is None or now_s >= session.end_s:
            return None
        if now_s - session.checked_s >= RECHECK_S:
            if not self._goes_on(session, str(environ.get("REMOTE_ADDR", ""))):
                with self._lock:
                    self._sessions.pop(key, None)
                return None
            session.checked_s = now_s
        return session

    def _goes_on(self, session: Session, host: str) -> bool:
        """True if who has opened a session would be let in now."""
        if session.user:
            assert self._users is not None
            user = self._users.current(session.user, host, session.password_hash)
            session.may_change = user is not None and user.may_change
            return user is not None
        try:
            return hmac.compare_digest(_hash(self._token()), session.opened_by)
        except OSError:
            return False

    @staticmethod
    def _is_token_of(session: Session, given: str) -> bool:
        return bool(session.token_hash) and hmac.compare_digest(_hash(given), session.token_hash)

    def asker(self, environ: Mapping[str, Any]) -> Actor:
        """The sender of a request to be let in: a name that was given is anybody's until the login
        succeeds.
        """
        has_name = self._users is not None and has_password(environ)
        name = given_name(environ) if has_name else ""
        return Actor(name, str(environ.get("REMOTE_ADDR", "")))

    def login(self, environ: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | Refusal:
        """The header Set-Cookie of a new session and the body of its answer, or why there is
        none.
        """
        session = Session(self._now_s() + SESSION_S)
        body: dict[str, Any] = {}
        if self._users is not None and has_password(environ):
            found = self._users.login(environ)
            if isinstance(found, Refusal):
                return found
            name, user = found
            token = secrets.token_urlsafe(32)
            session = Session(
                session.end_s, name, user.password_hash, "", _hash(token), user.may_change,
                self._now_s(),
            )  # fmt: skip
            body = {"user": name, "token": token if user.may_change else ""}
        else:
            given = bearer_of(environ)
            refusal = self._refuse_token(given)
            if refusal is not None:
                return refusal
            session.opened_by = _hash(given)
        number = secrets.token_urlsafe(32)
        with self._lock:
            of_user = [key for key, one in self._sessions.items() if one.user == session.user]
            if len(of_user) >= SESSIONS_OF_USER_MAX:
                del self._sessions[of_user[0]]
            elif len(self._sessions) >= SESSIONS_MAX:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[_hash(number)] = session
        cookie = f"{COOKIE}={number}; HttpOnly; SameSite=Strict; Path=/; Max-Age={SESSION_S}"
        return cookie, body

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
