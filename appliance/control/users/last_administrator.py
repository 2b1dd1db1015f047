"""The last administrator stays, unless a request says otherwise.

Owner: the controller.
Invariants: a change that takes the last administrator away has `force`. An administrator is an
enabled user with the role and a credential: a key that has not expired, an account or a password.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.catalog.tables.users import read_administrators
from appliance.catalog.transaction import Database
from shm.rights.users import User
from tailrace.core.errors import InvalidRequestError


def keep_an_administrator(
    database: Database, before: User | None, after: User | None, request: Mapping[str, Any],
    now_us: int,
) -> None:  # fmt: skip
    """Refuse a change from `before` to `after` (None: the user is deleted) that leaves no
    administrator. Raises InvalidRequestError, StorageError.
    """
    force = request.get("force", False)
    if not isinstance(force, bool):
        raise InvalidRequestError("force must be true or false")
    if force or before is None or not _administers(before, now_us):
        return
    if after is not None and _administers(after, now_us):
        return
    others = read_administrators(database)
    if not any(_administers(user, now_us) for user in others if user.name != before.name):
        raise InvalidRequestError(
            f"{before.name} is the last administrator who can log in: add another one first "
            "(`tailrace user add NAME --role admin --out FILE`), or say --force"
        )


def _administers(user: User, now_us: int) -> bool:
    return (
        user.is_admin
        and not user.is_disabled
        and bool(
            user.accounts
            or user.password_hash
            or user.scram
            or any(not key.expires_us or key.expires_us > now_us for key in user.keys)
        )
    )
