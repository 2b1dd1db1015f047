"""Fields of requests about branches: validated and typed.

Owner: none; pure functions. Each raises InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from appliance.groups.base.request_validation import number_in
from appliance.groups.transactions.requests.fields import (
    attempt_in,
    owner_in,
    producer_in,
    transactional_id_in,
)
from tailrace.core.errors import InvalidRequestError

COUNT_MAX = 1 << 31


class CreateRequest(NamedTuple):
    """CREATE_BRANCHES. `branch_count`: all that the owner has made in this transaction."""

    transactional_id: str
    owner: int
    producer_id: int
    epoch: int
    branch_count: int


class JoinRequest(NamedTuple):
    """JOIN_TRANSACTION of one writer."""

    transactional_id: str
    owner: int
    producer_id: int
    epoch: int
    attempt: str


def create_in(request: Mapping[str, Any]) -> CreateRequest:
    """All fields of CREATE_BRANCHES."""
    if request.get("count") is None:
        raise InvalidRequestError("count is missing; it takes the branches of the transaction")
    return CreateRequest(*_transaction_in(request), number_in(request, "count", 0, 1, COUNT_MAX))


def join_in(request: Mapping[str, Any]) -> JoinRequest:
    """All fields of JOIN_TRANSACTION."""
    attempt = attempt_in(request)
    if not attempt:
        raise InvalidRequestError("attempt is missing; it takes a random text of the writer")
    return JoinRequest(*_transaction_in(request), attempt)


def _transaction_in(request: Mapping[str, Any]) -> tuple[str, int, int, int]:
    """The transaction of the request, by its owner, producer id and epoch."""
    name, owner = transactional_id_in(request), owner_in(request)
    if owner is None:
        raise InvalidRequestError("owner is missing; it takes the owner of INIT_TRANSACTIONS")
    return (name, owner, *producer_in(request))
