"""Arguments of a transaction's owner about branches and prepared transactions, and their requests.

Owner: pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tailrace.core.errors import InvalidRequestError
from tailrace.core.transaction_branches import FinishedBranch, PreparedTransaction

TAG_MAX = 1_024


def count_of(given: Any) -> int:
    """The number of branches to make. Raises InvalidRequestError."""
    if type(given) is not int or given < 1:
        raise InvalidRequestError(
            f"count is {given!r:.100}; it takes the number of branches to make, 1 or more"
        )
    return given


def finished_in(given: Any) -> tuple[FinishedBranch, ...]:
    """The branches that a commit names. Raises InvalidRequestError."""
    found = tuple(given) if isinstance(given, Iterable) else (given,)
    for one in found:
        if not isinstance(one, FinishedBranch):
            raise InvalidRequestError(
                f"branches has {one!r:.100}; it takes a list of what finish_branch() of each "
                "writer returned"
            )
    return found


def tag_of(given: Any) -> str:
    """The tag of a prepared transaction. Raises InvalidRequestError."""
    if type(given) is not str or len(given) > TAG_MAX:
        raise InvalidRequestError(
            f"tag is {given!r:.100}; it takes a text of at most {TAG_MAX} characters"
        )
    return given


def prepared_in(given: Any) -> PreparedTransaction | None:
    """The prepared transaction that a program passed. Raises InvalidRequestError."""
    if given is None or isinstance(given, PreparedTransaction):
        return given
    raise InvalidRequestError(
        f"prepared is {given!r:.100}; it takes what prepare_transaction() returned, or None"
    )


def named_json(branches: Iterable[FinishedBranch]) -> dict[str, Any]:
    """The branches in END_TRANSACTION: the producer id and epoch of each that has records."""
    named = [[one.producer_id, one.producer_epoch] for one in branches if one.producer_id >= 0]
    return {"branches": named} if named else {}
