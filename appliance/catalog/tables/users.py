"""Users and ACLs in the catalog's database.

Owner: the controller; `tailrace user` and `tailrace acl` for a directory that no appliance serves.
Invariants:
- A change is on the disk when it returns; within a step, when the step is committed.
- A public key, and an account, belongs to one user. The number of an ACL is never given again.
- No secret key is stored, and no password but as a hash.
Bounds: USERS_MAX users, ACLS_MAX rules.
Crash: SQLite recovers the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import orjson

from appliance.catalog.database import refusals
from appliance.catalog.transaction import Database, Transaction
from shm.rights.acl import Acl
from shm.rights.scram import ScramCredential
from shm.rights.users import NOTHING_MORE, Key, User
from tailrace.core.errors import InvalidRequestError

USERS_MAX = 200_000
ACLS_MAX = 200_000
_COLUMNS = "principal, resource_type, pattern, name, operation, is_allowed, host"
_SELECT = "SELECT name, is_admin, is_disabled, user_groups, created_us, password_hash FROM users"
CHOSEN_BY = (
    "number", "principal", "resource_type", "pattern", "name", "operation", "is_allowed", "host"
)  # fmt: skip
"""Fields by which rules are chosen."""
_CONTENT = CHOSEN_BY[1:]
_KEY_ORDER = itemgetter(2, 0)
"""Time of creation, name: the order of a user's keys."""


def read_users(database: Database, after: str = "", limit: int = USERS_MAX) -> Iterator[User]:
    """Users by name, from behind `after` on. Raises StorageError."""
    with refusals():
        rows = database.execute(
            f"{_SELECT} WHERE name > ? ORDER BY name LIMIT ?", (after, limit)
        ).fetchall()
        for row in rows:
            yield _user_of(database, row)


def read_user(database: Database, name: str) -> User | None:
    """The user of this name. Raises StorageError."""
    with refusals():
        row = database.execute(f"{_SELECT} WHERE name = ?", (name,)).fetchone()
        return None if row is None else _user_of(database, row)


def read_administrators(database: Database) -> Iterator[User]:
    """Users with the role of an administrator. Raises StorageError."""
    with refusals():
        for row in database.execute(f"{_SELECT} WHERE is_admin ORDER BY name").fetchall():
            yield _user_of(database, row)


def _user_of(database: Database, row: tuple[Any, ...]) -> User:
    name, is_admin, is_disabled, groups, created_us, password_hash = row
    keys = database.execute(
        "SELECT name, public, created_us, expires_us FROM user_keys WHERE user = ?"
        " ORDER BY created_us, name",
        (name,),
    )
    accounts = database.execute(
        "SELECT account FROM user_accounts WHERE user = ? ORDER BY account", (name,)
    )
    scram = database.execute(
        "SELECT mechanism, salt, stored_key, server_key, iterations FROM user_scram"
        " WHERE user = ? ORDER BY mechanism",
        (name,),
    )
    return User(
        name, bool(is_admin), bool(is_disabled), tuple(orjson.loads(groups)),
        tuple(account for (account,) in accounts.fetchall()),
        tuple(Key(*key) for key in keys.fetchall()), created_us, password_hash,
        tuple(ScramCredential(*each) for each in scram.fetchall()),
    )  # fmt: skip


def read_user_rows(database: Database, *, with_credentials: bool) -> list[tuple[Any, ...]]:
    """All users as `shm.rights.users.user_of_row` takes them, in a query for each table: a start
    reads every user. Raises StorageError.
    """
    keys: dict[str, list[list[Any]]] = {}
    accounts: dict[str, list[int]] = {}
    scram: dict[str, list[dict[str, Any]]] = {}
    with refusals():
        for user, *key in database.execute(
            "SELECT user, name, public, created_us, expires_us FROM user_keys"
        ):
            keys.setdefault(user, []).append(key)
        for user, account in database.execute(
            "SELECT user, account FROM user_accounts ORDER BY account"
        ):
            accounts.setdefault(user, []).append(account)
        if with_credentials:
            for user, *credential in database.execute(
                "SELECT user, mechanism, salt, stored_key, server_key, iterations FROM user_scram"
                " ORDER BY user, mechanism"
            ):
                scram.setdefault(user, []).append(ScramCredential(*credential).fields())
        rows = []
        for name, is_admin, is_disabled, groups, created_us, password_hash in database.execute(
            _SELECT
        ):
            plain = name, sorted(keys.get(name, ()), key=_KEY_ORDER), created_us
            shown_hash = password_hash if with_credentials else ""
            more = (
                is_admin, is_disabled, groups, accounts.get(name, ()), shown_hash,
                scram.get(name, ()),
            )  # fmt: skip
            rows.append(plain if more == NOTHING_MORE else (*plain, *more))
    return rows


def count_users(database: Database) -> int:
    """Number of users. Raises StorageError."""
    with refusals():
        return int(database.execute("SELECT count(*) FROM users").fetchone()[0])


def put_user(database: Database, user: User) -> None:
    """Store a user, in place of the one of its name. Raises InvalidRequestError when a key or an
    account is another user's, StorageError.
    """
    with refusals(), Transaction(database):
        if read_user(database, user.name) is None and count_users(database) >= USERS_MAX:
            raise InvalidRequestError(f"there are {USERS_MAX} users, the most that there may be")
        database.execute("DELETE FROM users WHERE name = ?", (user.name,))
        database.execute(
            "INSERT INTO users VALUES (?, ?, ?, ?, ?, ?)",
            (
                user.name, user.is_admin, user.is_disabled, orjson.dumps(user.groups).decode(),
                user.password_hash, user.created_us,
            ),
        )  # fmt: skip
        try:
            database.executemany(
                "INSERT INTO user_keys VALUES (?, ?, ?, ?, ?)",
                [(user.name, *key) for key in user.keys],
            )
            database.executemany(
                "INSERT INTO user_scram VALUES (?, ?, ?, ?, ?, ?)",
                [(user.name, *each) for each in user.scram],
            )
            database.executemany(
                "INSERT INTO user_accounts VALUES (?, ?)",
                [(account, user.name) for account in user.accounts],
            )
        except sqlite3.IntegrityError:
            raise InvalidRequestError(
                f"a key or an account of {user.name} belongs to another user; give each its own"
            ) from None


def delete_user(database: Database, name: str) -> None:
    """Delete a user, if there is one of this name. Raises StorageError."""
    with refusals(), Transaction(database):
        database.execute("DELETE FROM users WHERE name = ?", (name,))


def read_acls(
    database: Database, filters: Mapping[str, Any] | None = None, after: int = 0,
    limit: int = ACLS_MAX,
) -> list[Acl]:  # fmt: skip
    """Rules with these fields, by number, from behind `after` on. Raises StorageError."""
    given = filters or {}
    where = "".join(f" AND {field} = ?" for field in CHOSEN_BY if field in given)
    values = [given[field] for field in CHOSEN_BY if field in given]
    with refusals():
        rows = database.execute(
            f"SELECT number, {_COLUMNS} FROM acls WHERE number > ?{where} ORDER BY number LIMIT ?",
            (after, *values, limit),
        ).fetchall()
    return [Acl(*row)._replace(is_allowed=bool(row[6])) for row in rows]


def read_acl_groups(database: Database, at_once: int) -> Iterator[list[list[Any]]]:
    """All rules, at most `at_once` at a time, as `shm.rights.acl.acls_of_groups` takes them. Raises
    StorageError.
    """
    after = 0
    while True:
        with refusals():
            rows = database.execute(
                "SELECT number, principal, name, resource_type, pattern, operation, is_allowed,"
                " host FROM acls WHERE number > ? ORDER BY number LIMIT ?",
                (after, at_once),
            ).fetchall()
        if not rows:
            return
        groups: dict[tuple[Any, ...], list[Any]] = {}
        for number, principal, name, *words in rows:
            group = groups.setdefault(tuple(words), [words, [], [], []])
            group[1].append(number)
            group[2].append(principal)
            group[3].append(name)
        yield list(groups.values())
        after = rows[-1][0]


def add_acls(database: Database, acls: Iterable[Acl]) -> list[Acl]:
    """Store rules; one that is there already stays. Returns them with their numbers. Raises
    InvalidRequestError when there are too many, StorageError.
    """
    stored = []
    with refusals(), Transaction(database):
        for acl in acls:
            database.execute(
                f"INSERT INTO acls ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
                f" ON CONFLICT ({_COLUMNS}) DO NOTHING",
                acl.content,
            )
            [found] = read_acls(database, dict(zip(_CONTENT, acl.content, strict=True)))
            stored.append(found)
        if database.execute("SELECT count(*) FROM acls").fetchone()[0] > ACLS_MAX:
            raise InvalidRequestError(
                f"there would be more than {ACLS_MAX} ACLs; use prefixes or groups of users"
            )
    return stored


def remove_acls(database: Database, numbers: Iterable[int]) -> None:
    """Remove rules. Raises StorageError."""
    with refusals(), Transaction(database):
        database.executemany("DELETE FROM acls WHERE number = ?", [(n,) for n in numbers])
