"""Requests about prepared transactions: validated and typed.

Owner: none; pure functions.
Invariants:
- Only a decision ends a prepared transaction: neither its timeout, nor idleness, nor an init.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from appliance.groups.base.request_validation import flag_in, shown, text_in
from appliance.groups.store.schema import TransactionalIdRow
from appliance.groups.transactions.ids.ends import OUTCOMES
from appliance.groups.transactions.ids.prepared_mark import Prepared, prepared_of
from appliance.groups.transactions.requests.fields import (
    EndRequest,
    offsets_in,
    owner_in,
    producer_in,
    transactional_id_in,
)
from appliance.groups.transactions.requests.named_branches import named_in
from shm.messages.transaction_messages import Outcome, ProducerEpoch
from tailrace.core.errors import InvalidRequestError, InvalidTransactionError

PREPARE = "prepare"
"""The `outcome` of END_TRANSACTION that prepares."""
TAG_MAX = 1_024


class PrepareRequest(NamedTuple):
    """END_TRANSACTION with the outcome `prepare`."""

    transactional_id: str
    owner: int
    producer_id: int
    epoch: int
    tag: str
    branches: frozenset[ProducerEpoch]
    offsets: list[dict[str, Any]]


class DecideRequest(NamedTuple):
    """END_TRANSACTION with `by_id`: the decision of a caller that knows the id."""

    transactional_id: str
    producer_id: int
    epoch: int
    outcome: Outcome


def is_same(prepared: Prepared, request: PrepareRequest) -> bool:
    """True if a repeated request asks for what is prepared."""
    asked = {
        one["group"]: sorted((entry[1], entry[2]) for entry in one["offsets"])
        for one in request.offsets
    }
    known = {
        group: sorted((one.partition, one.committed) for one in rows)
        for group, rows in prepared.offsets
    }
    return (prepared.tag, prepared.branches, known) == (request.tag, request.branches, asked)


def described(row: TransactionalIdRow) -> dict[str, Any] | None:
    """The prepared transaction of an id as answers have it."""
    prepared = prepared_of(row)
    if prepared is None:
        return None
    return {
        "producer_id": row.producer_id, "producer_epoch": row.epoch, "tag": prepared.tag,
        "wall_ms": prepared.wall_ms, "groups": [one.group for one in prepared.offsets],
    }  # fmt: skip


def prepare_in(request: Mapping[str, Any]) -> PrepareRequest:
    """All fields of a request to prepare. Raises InvalidRequestError."""
    name, owner = transactional_id_in(request), owner_in(request)
    if owner is None:
        raise InvalidRequestError("owner is missing; it takes the owner of INIT_TRANSACTIONS")
    if request.get("acknowledgements"):
        raise InvalidRequestError(
            "a prepared transaction takes no acknowledgements of share groups in this version, "
            "since their locks expire: commit them with a transaction that is not prepared"
        )
    return PrepareRequest(
        name,
        owner,
        *producer_in(request),
        text_in(request, "tag", TAG_MAX) or "",
        named_in(request),
        offsets_in(request),
    )


def decide_in(request: Mapping[str, Any]) -> DecideRequest:
    """All fields of a decision by id. Raises InvalidRequestError."""
    name, outcome = transactional_id_in(request), request.get("outcome")
    if not isinstance(outcome, str) or outcome not in OUTCOMES:
        raise InvalidRequestError(f"outcome is {shown(outcome)}; with by_id it takes commit, abort")
    for field in ("owner", "offsets", "acknowledgements", "branches"):
        if request.get(field) not in (None, []):
            raise InvalidRequestError(f"by_id takes no {field}")
    return DecideRequest(name, *producer_in(request), OUTCOMES[outcome])


def is_by_id(request: Mapping[str, Any]) -> bool:
    """True if END_TRANSACTION decides a prepared transaction by its id. Raises
    InvalidRequestError.
    """
    return bool(flag_in(request, "by_id"))


def check_init(row: TransactionalIdRow, *, keeps_prepared: bool) -> None:
    """Refuse an owner that does not know of prepared transactions. Raises
    InvalidTransactionError.
    """
    if row.prepared and not keeps_prepared:
        raise InvalidTransactionError(
            f"{shown(row.transactional_id)} has a prepared transaction, which no init ends: decide "
            "it with `tailrace transaction commit` or `abort`, or ask with keep_prepared"
        )


def check_end(row: TransactionalIdRow, request: EndRequest) -> None:
    """Refuse offsets, acknowledgements and branches in the decision of a prepared transaction.
    Raises InvalidRequestError.
    """
    if row.prepared and (request.offsets or request.acknowledgements or request.branches):
        raise InvalidRequestError(
            "the transaction is prepared: its content is fixed, so its commit takes neither "
            "offsets nor acknowledgements nor branches"
        )
