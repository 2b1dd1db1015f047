"""Fields of requests about transactions: validated and typed.

Owner: none; pure functions. Each raises InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from appliance.groups.base.limits import CLIENT_TEXT_MAX, COMMITS_MAX
from appliance.groups.base.request_validation import flag_in, number_in, shown, text_in
from appliance.groups.transactions.ids.ends import OUTCOMES
from appliance.groups.transactions.ids.numbers import EPOCH_MAX
from appliance.groups.transactions.requests.named_branches import named_in
from shm.messages.transaction_messages import Outcome, ProducerEpoch
from tailrace.core.errors import InvalidRequestError

TRANSACTIONAL_ID_MAX = 255
ATTEMPT_MAX = 64
METADATA_MAX = 1_024
STAGE = "stage"
"""The `outcome` of END_TRANSACTION that leaves a text with the transaction and ends nothing."""
STAGED_MAX = 65_536
GROUPS_AT_ONCE_MAX = 64
"""Groups whose offsets one transaction commits."""
NUMBER_MAX = (1 << 63) - 1
STATES = ("empty", "ongoing", "committing", "aborting", "prepared")


class EndRequest(NamedTuple):
    """END_TRANSACTION. `offsets`: requests like COMMIT_OFFSETS, each with its `group`.
    `acknowledgements`: requests like SHARE_ACKNOWLEDGE, each of one share member. `branches`: those
    that are committed with it.
    """

    transactional_id: str
    owner: int
    producer_id: int
    epoch: int
    outcome: Outcome
    offsets: list[dict[str, Any]]
    acknowledgements: list[dict[str, Any]]
    is_empty: bool
    metadata: str | None
    """Text that is kept with the id from this commit on; None: what was kept stays."""
    branches: frozenset[ProducerEpoch]
    staged: str
    """Text that is left with the next transaction."""


class StageRequest(NamedTuple):
    """END_TRANSACTION with the outcome `stage`."""

    transactional_id: str
    owner: int
    producer_id: int
    epoch: int
    staged: str


def stage_in(request: Mapping[str, Any]) -> StageRequest:
    """All fields of a request to stage."""
    name, owner = transactional_id_in(request), owner_in(request)
    if owner is None:
        raise InvalidRequestError("owner is missing; it takes the owner of INIT_TRANSACTIONS")
    return StageRequest(
        name, owner, *producer_in(request), text_in(request, "staged", STAGED_MAX) or ""
    )


def transactional_id_in(request: Mapping[str, Any]) -> str:
    """The transactional id."""
    name = text_in(request, "transactional_id", TRANSACTIONAL_ID_MAX)
    if not name:
        raise InvalidRequestError("transactional_id is missing or empty")
    return name


def client_id_in(request: Mapping[str, Any]) -> str:
    return text_in(request, "client_id", CLIENT_TEXT_MAX) or ""


def attempt_in(request: Mapping[str, Any]) -> str:
    """The random text that repeats of one INIT_TRANSACTIONS share, "" without one."""
    return text_in(request, "attempt", ATTEMPT_MAX) or ""


def shared_in(request: Mapping[str, Any]) -> bool:
    """True if the owner is any process that names its `attempt`."""
    is_shared = bool(flag_in(request, "shared"))
    if is_shared and not attempt_in(request):
        raise InvalidRequestError("attempt is missing; with shared it takes the owner's name")
    return is_shared


def timeout_in(request: Mapping[str, Any], most: int) -> int:
    """The transaction's timeout, ms."""
    if request.get("timeout_ms") is None:
        raise InvalidRequestError(f"timeout_ms is missing; it takes 1 to {most}")
    return number_in(request, "timeout_ms", 0, 1, most)


def owner_in(request: Mapping[str, Any]) -> int | None:
    """The owner number; None: missing."""
    if request.get("owner") is None:
        return None
    return number_in(request, "owner", 0, 0, NUMBER_MAX)


def producer_in(request: Mapping[str, Any]) -> tuple[int, int]:
    """The producer id and its epoch."""
    for name in ("producer_id", "producer_epoch"):
        if request.get(name) is None:
            raise InvalidRequestError(f"{name} is missing")
    return (
        number_in(request, "producer_id", 0, 0, NUMBER_MAX),
        number_in(request, "producer_epoch", 0, 0, EPOCH_MAX),
    )


def end_in(request: Mapping[str, Any]) -> EndRequest:
    """All fields of END_TRANSACTION."""
    name = transactional_id_in(request)
    owner = owner_in(request)
    if owner is None:
        raise InvalidRequestError("owner is missing; it takes the owner of INIT_TRANSACTIONS")
    outcome = request.get("outcome")
    if not isinstance(outcome, str) or outcome not in OUTCOMES:
        raise InvalidRequestError(f"outcome is {shown(outcome)}; it takes commit or abort")
    branches = named_in(request)
    if branches and OUTCOMES[outcome] is not Outcome.COMMIT:
        raise InvalidRequestError("an abort takes no branches: it aborts all of them")
    metadata = text_in(request, "metadata", METADATA_MAX)
    if metadata is not None and OUTCOMES[outcome] is not Outcome.COMMIT:
        raise InvalidRequestError("an abort takes no metadata: it goes with a commit")
    return EndRequest(
        name,
        owner,
        *producer_in(request),
        OUTCOMES[outcome],
        offsets_in(request),
        _acknowledgements_in(request),
        bool(flag_in(request, "is_empty")),
        metadata,
        branches,
        text_in(request, "staged", STAGED_MAX) or "",
    )


def offsets_in(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The offsets of groups: requests like COMMIT_OFFSETS."""
    offsets = request.get("offsets")
    if offsets is None:
        return []
    if (
        not isinstance(offsets, list)
        or len(offsets) > GROUPS_AT_ONCE_MAX
        or not all(isinstance(one, dict) for one in offsets)
    ):
        raise InvalidRequestError(
            f"offsets takes a list of at most {GROUPS_AT_ONCE_MAX} objects, one for each group"
        )
    groups = [one.get("group") for one in offsets]
    if len(groups) != len({shown(group) if type(group) is not str else group for group in groups}):
        raise InvalidRequestError("offsets names a group twice: join its entries")
    commits = []
    for one in offsets:
        entries = one.get("entries")
        if not isinstance(entries, list) or len(entries) > COMMITS_MAX:
            raise InvalidRequestError(
                f"offsets needs a list `entries` of at most {COMMITS_MAX} for each group"
            )
        commits.append({**one, "offsets": entries})
    return commits


def _acknowledgements_in(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = request.get("acknowledgements")
    if given is None:
        return []
    if (
        not isinstance(given, list)
        or len(given) > GROUPS_AT_ONCE_MAX
        or not all(isinstance(one, dict) and isinstance(one.get("group"), str) for one in given)
    ):
        raise InvalidRequestError(
            f"acknowledgements takes a list of at most {GROUPS_AT_ONCE_MAX} objects, one for each "
            "member of a share group"
        )
    if len(given) != len({(one["group"], shown(one.get("member_id"))) for one in given}):
        raise InvalidRequestError("acknowledgements names a member twice: join its entries")
    return given


def states_in(request: Mapping[str, Any]) -> frozenset[str] | None:
    """The states to list; None: all."""
    states = request.get("states")
    if states is None:
        return None
    if not isinstance(states, list) or not all(
        isinstance(one, str) and one in STATES for one in states
    ):
        raise InvalidRequestError(f"states takes a list of {', '.join(STATES)}")
    return frozenset(states)


def next_in(request: Mapping[str, Any]) -> str:
    """The page token: the last transactional id of the page before."""
    return text_in(request, "next", TRANSACTIONAL_ID_MAX) or ""
