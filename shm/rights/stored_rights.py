"""Stored rights: users and rules in the catalog's database, read when they are asked for.

Owner: a front or a gateway, each with a connection of its own that only reads; the controller,
which writes the database, for `acl test`.

Invariants:
- Nothing is read before it is asked for: a start costs the same with one user and with 100,000.
- A change is on the disk before it is published, and forgets what was read of its user or
  principal. So what is remembered is as new as what was published, or newer.
- A database that cannot be read closes: no user is found, no request is allowed, and neither is
  remembered. After an error it is left alone for RETRY_NS.
- The shapes of all credentials are counted again at most a tenth of the time. So they may be older
  than a change.
- At most USERS_KEPT users and PRINCIPALS_KEPT principals are remembered.
- A read transaction ends with its query, so the controller's checkpoints wait for none.

Crash: nothing is kept. The controller names its database again in each feed.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from shm.rights.acl import Acl, stored_acl
from shm.rights.authorizer import AclTable, PrincipalRules, RightsUnreadError
from shm.rights.scram import HASHES, ScramCredential, ScramShape, checked_credential
from shm.rights.users import Key, User, UserDirectory
from tailrace.core.errors import InvalidRequestError

logger = logging.getLogger(__name__)

USERS_KEPT = 10_000
PRINCIPALS_KEPT = 20_000
RETRY_NS = 250_000_000
LOCKED_TIMEOUT_S = 0.1
"""Longest wait for a connection that recovers the database."""
SELECT_USERS = (
    "SELECT name, is_admin, is_disabled, user_groups, created_us, password_hash FROM users"
)
ACL_COLUMNS = "principal, resource_type, pattern, name, operation, is_allowed, host"
_CACHE = "PRAGMA cache_size = -512"
"""Kibibytes of pages that a connection keeps."""
Rows = Callable[[str, tuple[Any, ...]], list[tuple[Any, ...]]]
"""Runs a query."""


def read_only(path: str) -> str:
    """The URI of a database that is read alone."""
    for character, escaped in (("%", "%25"), ("?", "%3f"), ("#", "%23")):
        path = path.replace(character, escaped)
    return f"file:{path}?mode=ro"


def stored_user(rows: Rows, row: tuple[Any, ...], *, with_credentials: bool = True) -> User:
    """The user of a row of SELECT_USERS. Raises ValueError, TypeError, or InvalidRequestError for a
    damaged one.
    """
    name, is_admin, is_disabled, groups, created_us, password_hash = row
    of_user = (name,)
    keys = rows(
        "SELECT name, public, created_us, expires_us FROM user_keys WHERE user = ?"
        " ORDER BY created_us, name",
        of_user,
    )
    accounts = rows("SELECT account FROM user_accounts WHERE user = ? ORDER BY account", of_user)
    scram = with_credentials and rows(
        "SELECT mechanism, salt, stored_key, server_key, iterations FROM user_scram"
        " WHERE user = ? ORDER BY mechanism",
        of_user,
    )
    return User(
        name, bool(is_admin), bool(is_disabled), tuple(orjson.loads(groups)),
        tuple(account for (account,) in accounts), tuple(Key(*key) for key in keys), created_us,
        password_hash if with_credentials else "",
        tuple(checked_credential(ScramCredential(*each).fields()) for each in scram or ()),
    )  # fmt: skip


class RightsDatabase:
    """A connection that reads users and rules."""

    def __init__(self, path: str, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """`path`: of the catalog. It is opened with the first query."""
        self._path = path
        self.monotonic_ns = monotonic_ns
        self._connection: sqlite3.Connection | None = None
        self._retry_at_ns = 0
        self.is_unread = False
        """True after a query that failed, until one succeeds."""

    def rows(self, query: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """All rows of a query. Raises RightsUnreadError."""
        if self.is_unread and self.monotonic_ns() < self._retry_at_ns:
            raise RightsUnreadError(self._path)
        try:
            if self._connection is None:
                self._connection = sqlite3.connect(
                    read_only(self._path), uri=True, isolation_level=None, timeout=LOCKED_TIMEOUT_S
                )
                self._connection.execute(_CACHE).close()
            found = self._connection.execute(query, values).fetchall()
        except (sqlite3.Error, UnicodeError, OverflowError) as error:
            if not self.is_unread:
                logger.error("rights_unread path=%s reason=%r", self._path, str(error))
            self.close()
            self.is_unread = True
            self._retry_at_ns = self.monotonic_ns() + RETRY_NS
            raise RightsUnreadError(self._path) from error
        self.is_unread = False
        return found

    def close(self) -> None:
        """Close the connection. A later query opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def __del__(self) -> None:
        self.close()


class StoredUsers(UserDirectory):
    """The users of a database."""

    def __init__(self, database: RightsDatabase, *, with_credentials: bool) -> None:
        """`with_credentials`: for a process that verifies passwords."""
        super().__init__()
        self._database = database
        self._with_credentials = with_credentials
        self._shapes: dict[str, Counter[ScramShape]] = {}
        self._count_at_ns: int | None = 0
        """Time of the next count of shapes. None: nothing has changed."""
        self._counted_ns = 0
        """The time from which they may be counted again."""

    @property
    def is_unread(self) -> bool:
        """True if users cannot be read."""
        return self._database.is_unread

    def put(self, user: User) -> None:
        """Forget what was read of a user that has changed."""
        self.remove(user.name)

    def remove(self, name: str) -> None:
        """Forget what was read of a user."""
        super().remove(name)
        self._count_at_ns = self._counted_ns

    def get(self, name: str) -> User | None:
        return super().get(name) or self._read(name)

    def by_key(self, public: str) -> tuple[User, Key] | None:
        return super().by_key(public) or self._found(
            "SELECT user FROM user_keys WHERE public = ?", public, super().by_key
        )

    def by_account(self, account: int) -> User | None:
        return super().by_account(account) or self._found(
            "SELECT user FROM user_accounts WHERE account = ?", account, super().by_account
        )

    def scram_shapes(self, mechanism: str) -> Mapping[ScramShape, int]:
        begun_ns = self._database.monotonic_ns()
        if self._count_at_ns is not None and begun_ns >= self._count_at_ns:
            shapes: dict[str, Counter[ScramShape]] = {name: Counter() for name in HASHES}
            try:
                rows = self._database.rows("SELECT mechanism, salt, iterations FROM user_scram", ())
            except RightsUnreadError:
                return self._shapes.get(mechanism, {})
            for name, salt, iterations in rows:
                shapes[name][ScramCredential(name, salt, b"", b"", iterations).shape] += 1
            ended_ns = self._database.monotonic_ns()
            self._shapes, self._count_at_ns = shapes, None
            self._counted_ns = ended_ns + 9 * (ended_ns - begun_ns)
        return self._shapes.get(mechanism, {})

    def _found(self, query: str, value: Any, find: Callable[[Any], Any]) -> Any:
        """The answer of `find` after the user that a query names is read."""
        try:
            rows = self._database.rows(query, (value,))
        except RightsUnreadError:
            return None
        for (name,) in rows:
            super().remove(name)
            self._read(name)
        return find(value)

    def _read(self, name: str) -> User | None:
        rows = self._database.rows
        try:
            found = rows(f"{SELECT_USERS} WHERE name = ?", (name,))
            if not found:
                return None
            user = stored_user(rows, found[0], with_credentials=self._with_credentials)
        except RightsUnreadError:
            return None
        except (ValueError, TypeError, InvalidRequestError) as error:
            logger.error("user_damaged user=%r reason=%r", name, str(error))
            user = User(name, is_disabled=True)
        if len(self) >= USERS_KEPT:
            self.clear()
        super().put(user)
        return user


class StoredAcls(AclTable):
    """The rules of a database."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._read = rows

    def add_all(self, acls: Iterable[Acl]) -> None:
        """Forget what was read of principals whose rules have changed."""
        for acl in acls:
            self._forget(acl.principal)

    def remove(self, number: int) -> None:
        """Forget what was read of the principal of a rule."""
        acl = self._by_number.get(number)
        if acl is not None:
            self._forget(acl.principal)

    def _forget(self, principal: str) -> None:
        for acl in self._by_principal.pop(principal, ()):
            self._by_number.pop(acl.number, None)

    def _rules(self, principal: str) -> PrincipalRules:
        found = self._by_principal.get(principal)
        if found is None:
            rows = self._read(
                f"SELECT number, {ACL_COLUMNS} FROM acls WHERE principal = ?", (principal,)
            )
            if len(self._by_principal) >= PRINCIPALS_KEPT:
                self._by_principal.clear()
                self._by_number.clear()
            acls = [stored_acl(*row) for row in rows]
            self._by_number.update((acl.number, acl) for acl in acls)
            found = self._by_principal[principal] = PrincipalRules(acls)
        return found
