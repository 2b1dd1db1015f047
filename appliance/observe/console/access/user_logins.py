"""Logins of users by name and password: the catalog says who may use the console.

Read of `console` lets a user see what the page shows, alter of `console` change it. Administrators
may do both.

Owner: the console's process. Safe in any thread.

Invariants:
- One password is checked at a time: argon2id takes memory and time.
- At most FAILURES_MAX attempts of a client's address within FAILURES_S fail (of its network, with
  IPv6). Those beyond are not looked at.
- An unknown user and a wrong password are told alike, after the same time.

Crash: nothing is kept.
"""

from __future__ import annotations

import base64
import logging
import sqlite3
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from appliance.catalog.database import refusals
from appliance.catalog.tables.users import read_acls, read_user
from appliance.catalog.transaction import Database
from appliance.observe.console.access.guard import Refusal
from shm.rights.acl import ALTER, ANY, CONSOLE, READ, THE_CLUSTER, USER
from shm.rights.authorizer import AclTable, Principal
from shm.rights.client_hosts import network_of
from shm.rights.passwords import PasswordsMissingError, is_password
from shm.rights.stored_rights import read_only
from shm.rights.users import User
from tailrace.core.errors import StorageError

logger = logging.getLogger("appliance.observe.http_server")

FAILURES_MAX = 10
FAILURES_S = 60
ADDRESSES_MAX = 10_000
_SCHEME = "Basic "
WRONG = Refusal("401 Unauthorized", "the user is unknown or the password is wrong")


class ConsoleUser(NamedTuple):
    """A user as the catalog has it now."""

    password_hash: str
    may_read: bool
    may_change: bool


Find = Callable[[str, str], ConsoleUser | None]
"""(Name, address of the client) -> user; None: there is none, or it is disabled."""


def find_in_catalog(path: str) -> Find:
    """Reads users of a catalog's file, which its controller goes on to write. Raises
    StorageError.
    """

    def find(name: str, host: str) -> ConsoleUser | None:
        with refusals():
            database: Database = sqlite3.connect(
                read_only(path), uri=True, timeout=0.5, factory=Database
            )
            try:
                user = read_user(database, name)
                return None if user is None or user.is_disabled else _rights(database, user, host)
            finally:
                database.close()

    return find


def _rights(database: Database, user: User, host: str) -> ConsoleUser:
    table = AclTable()
    principal = Principal(user.name, user.groups, host, table, is_admin=user.is_admin)
    for name in (*principal.names, f"{USER}:{ANY}"):
        for acl in read_acls(database, {"principal": name, "resource_type": CONSOLE}):
            table.add(acl)
    may_change = principal.may(ALTER, CONSOLE, THE_CLUSTER)
    return ConsoleUser(
        user.password_hash, may_change or principal.may(READ, CONSOLE, THE_CLUSTER), may_change
    )


class UserLogins:
    """Checks names and passwords."""

    def __init__(
        self,
        find: Find,
        now_s: Callable[[], float],
        check: Callable[[str, str], bool] = is_password,
    ) -> None:
        """`now_s`: a monotonic clock."""
        self._find = find
        self._now_s = now_s
        self._check = check
        self._checking = threading.Lock()
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        """Times of attempts that failed, or are under way, by address."""

    def login(self, environ: Mapping[str, Any]) -> tuple[str, ConsoleUser] | Refusal:
        """The user of a request with a name and a password, or why it is none."""
        name, password = _given(environ)
        host = str(environ.get("REMOTE_ADDR", ""))
        at_s = self._begin(host)
        if at_s is None:
            return Refusal("429 Too Many Requests", "too many failed logins: try again in a minute")
        try:
            user = self._find(name, host)
            with self._checking:
                is_right = self._check(password, "" if user is None else user.password_hash)
        except (StorageError, PasswordsMissingError) as error:
            logger.error("console_login_failed error=%r", str(error))
            return Refusal("503 Service Unavailable", "passwords cannot be checked now")
        if not is_right or user is None:
            logger.warning("console_login_failed user=%r host=%s", name[:100], host)
            return WRONG
        self._succeeded(host, at_s)
        if not user.may_read:
            return Refusal(
                "403 Forbidden",
                f"{name} may not use the console: `tailrace acl add --principal User:{name} "
                "--operation read --console` allows it",
            )
        return name, user

    def current(self, name: str, host: str, password_hash: str) -> ConsoleUser | None:
        """A user who has logged in, as it is now. None: it is let in no more."""
        try:
            user = self._find(name, host)
        except StorageError:
            return None
        if user is None or not user.may_read or user.password_hash != password_hash:
            return None
        return user

    def _begin(self, host: str) -> float | None:
        """Note an attempt. None: too many of this address have failed."""
        now_s, host = self._now_s(), network_of(host)
        with self._lock:
            times = self._failures.setdefault(host, deque())
            self._failures.move_to_end(host)
            if len(self._failures) > ADDRESSES_MAX:
                self._failures.popitem(last=False)
            while times and now_s - times[0] >= FAILURES_S:
                times.popleft()
            if len(times) >= FAILURES_MAX:
                return None
            times.append(now_s)
        return now_s

    def _succeeded(self, host: str, at_s: float) -> None:
        with self._lock:
            times = self._failures.get(network_of(host), deque())
            if at_s in times:
                times.remove(at_s)


def has_password(environ: Mapping[str, Any]) -> bool:
    """True for a request with a name and a password."""
    return str(environ.get("HTTP_AUTHORIZATION", "")).startswith(_SCHEME)


def given_name(environ: Mapping[str, Any]) -> str:
    """The name of such a request."""
    return _given(environ)[0]


def _given(environ: Mapping[str, Any]) -> tuple[str, str]:
    given = str(environ.get("HTTP_AUTHORIZATION", "")).removeprefix(_SCHEME)
    try:
        text = base64.b64decode(given[:4096], validate=True).decode("utf-8")
    except ValueError:
        return "", ""
    name, _, password = text.partition(":")
    return name, password
