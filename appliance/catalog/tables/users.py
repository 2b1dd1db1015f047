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
from typing import Any

import orjson

from appliance.catalog.database import refusals
from appliance.catalog.transaction import Database, Transaction
from shm.rights.acl import Acl
from shm.rights.stored_rights import ACL_COLUMNS, SELECT_USERS, stored_user
from shm.rights.users import User
from tailrace.core.errors import InvalidRequestError

USERS_MAX = 200_000
ACLS_MAX = 200_000
CHOSEN_BY = (
    "number", "principal", "resource_type", "pattern", "name", "operation", "is_allowed", "host"
)  # fmt: skip
"""Fields by which rules are chosen."""
_CONTENT = CHOSEN_BY[1:]


def read_users(database: Database, after: str = "", limit: int = USERS_MAX) -> Iterator[User]:
    """Users by name, from behind `after` on. Raises StorageError."""
    with refusals():
        rows = database.execute(
            f"{SELECT_USERS} WHERE name > ? ORDER BY name LIMIT ?", (after, limit)
        ).fetchall()
        for row in rows:
            yield _user_of(database, row)


def read_user(database: Database, name: str) -> User | None:
    """The user of this name. Raises StorageError."""
    with refusals():
        row = database.execute(f"{SELECT_USERS} WHERE name = ?", (name,)).fetchone()
        return None if row is None else _user_of(database, row)


def read_administrators(database: Database) -> Iterator[User]:
    """Users with the role of an administrator. Raises StorageError."""
    with refusals():
        for row in database.execute(f"{SELECT_USERS} WHERE is_admin ORDER BY name").fetchall():
            yield _user_of(database, row)


def _user_of(database: Database, row: tuple[Any, ...]) -> User:
    return stored_user(lambda query, values: database.execute(query, values).fetchall(), row)


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
            f"SELECT number, {ACL_COLUMNS} FROM acls WHERE number > ?{where}"
            " ORDER BY number LIMIT ?",
            (after, *values, limit),
        ).fetchall()
    return [Acl(*row)._replace(is_allowed=bool(row[6])) for row in rows]


def add_acls(database: Database, acls: Iterable[Acl]) -> list[Acl]:
    """Store rules; one that is there already stays. Returns them with their numbers. Raises
    InvalidRequestError when there are too many, StorageError.
    """
    stored = []
    with refusals(), Transaction(database):
        for acl in acls:
            database.execute(
                f"INSERT INTO acls ({ACL_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)"
                f" ON CONFLICT ({ACL_COLUMNS}) DO NOTHING",
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
