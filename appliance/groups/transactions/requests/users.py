"""Users of transactional ids: who owns a transaction, and who may write with its producer ids.

The front names the user of a request in `user`, where the appliance has users.

Owner: none; pure functions.
Invariants:
- A producer id belongs to one user for ever. An init by another user of its transactional id gets
  new ones, so that a front may remember its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from appliance.groups.base.request_validation import shown
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.transactions.requests.fields import NUMBER_MAX
from tailrace.core.errors import InvalidRequestError, NotAuthorizedError
from tailrace.protocol.frame import Api

ASKED_AT_ONCE_MAX = 1_000
OF_OWNERS = frozenset(
    map(
        int,
        (
            Api.END_TRANSACTION, Api.CREATE_BRANCHES, Api.JOIN_TRANSACTION,
            Api.DESCRIBE_TRANSACTION,
        ),
    )
)  # fmt: skip
"""APIs whose requests carry an owner number, which lists show too."""


def user_in(request: Mapping[str, Any]) -> str:
    """The user of a request; "": the appliance has no users."""
    user = request.get("user")
    return user if isinstance(user, str) else ""


def check_owner(row: TransactionalIdRow, request: Mapping[str, Any]) -> None:
    """Refuse a request in the name of another user's owner. Raises NotAuthorizedError."""
    user = user_in(request)
    if user and user != row.user_name:
        raise NotAuthorizedError(
            f"the transaction of {shown(row.transactional_id)} belongs to another user: begin one "
            "of your own with INIT_TRANSACTIONS, or use a transactional_id of your own"
        )


def check_takeover(row: TransactionalIdRow, user: str, attempt: str) -> None:
    """Refuse what another user left behind where an init continues it: a prepared transaction, and
    a shared owner. Raises NotAuthorizedError.
    """
    if user == row.user_name:
        return
    if row.prepared:
        raise NotAuthorizedError(
            f"the prepared transaction of {shown(row.transactional_id)} belongs to another user: "
            "decide it by its id first (`tailrace transaction commit` or `abort`)"
        )
    if attempt and attempt == row.attempt:
        raise NotAuthorizedError(
            f"the owner {shown(attempt)} of {shown(row.transactional_id)} is another user's: take "
            "another name"
        )


def owners_of(
    request: Mapping[str, Any], row_of: Callable[[int], TransactionalIdRow | None]
) -> bytes:
    """The answer to a front: `[producer id, transactional id, user]` of those that are known.
    Raises InvalidRequestError.
    """
    asked = request.get("producer_ids")
    if (
        not isinstance(asked, list)
        or len(asked) > ASKED_AT_ONCE_MAX
        or not all(type(one) is int and 0 <= one <= NUMBER_MAX for one in asked)
    ):
        raise InvalidRequestError(f"producer_ids takes at most {ASKED_AT_ONCE_MAX} producer ids")
    found = [(one, row) for one in asked if (row := row_of(one)) is not None]
    owners = [[one, row.transactional_id, row.user_name] for one, row in found]
    return orjson.dumps({"owners": owners})
