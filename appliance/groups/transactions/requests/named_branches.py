"""The branches that a decision names.

Owner: none; pure functions. Each raises InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.groups.base.request_validation import shown
from appliance.groups.transactions.branches.pool import BRANCHES_MAX
from appliance.groups.transactions.ids.numbers import EPOCH_MAX
from shm.messages.transaction_messages import ProducerEpoch
from tailrace.core.errors import InvalidRequestError


def named_in(request: Mapping[str, Any]) -> frozenset[ProducerEpoch]:
    """The branches that a commit names."""
    given = request.get("branches")
    if given is None:
        return frozenset()
    if not isinstance(given, list) or len(given) > BRANCHES_MAX:
        raise InvalidRequestError(
            f"branches takes a list of at most {BRANCHES_MAX} pairs [producer_id, producer_epoch]"
        )
    named = frozenset(_pair(one) for one in given)
    if len(named) != len(given):
        raise InvalidRequestError("branches names a branch twice")
    return named


def _pair(given: Any) -> ProducerEpoch:
    if (
        not isinstance(given, list)
        or len(given) != 2
        or not all(type(number) is int for number in given)
        or not (0 <= given[0] < 1 << 63 and 0 <= given[1] <= EPOCH_MAX)
    ):
        raise InvalidRequestError(
            f"branches has {shown(given)}; it takes pairs [producer_id, producer_epoch]"
        )
    return ProducerEpoch(*given)
