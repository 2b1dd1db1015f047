"""Validation of share members' requests, before any change.

Owner: pure.
Invariants: returned values are valid. Anything else raises TailraceError, which tells what to
    correct.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from appliance.groups.base.limits import OFFSET_MAX, GroupLimits
from appliance.groups.base.request_validation import settings_in
from appliance.groups.share.partition.share_partition import OUTCOMES
from tailrace.core.errors import InvalidRequestError
from tailrace.protocol.json_messages import SHARE_RUNS_MAX

RECORDS_MAX = 100_000
"""Limit of max_records in one SHARE_ACQUIRE."""


class Acknowledgement(NamedTuple):
    """An acknowledgement of acquired records: accept, release, reject, renew or unread."""

    topic_id: str
    partition: int
    first: int
    last: int
    outcome: str


class Join(NamedTuple):
    """The settings of a joining share member."""

    topics: tuple[str, ...]
    client_id: str
    session_timeout_ms: int
    heartbeat_interval_ms: int
    resets_to_earliest: bool


def whole(
    request: dict[str, Any], name: str, minimum: int, maximum: int, default: int | None = None
) -> int:
    """A whole number field of a request. Raises InvalidRequestError."""
    value = request.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise InvalidRequestError(
            f"{name} is {value!r:.100}; it takes a whole number from {minimum} to {maximum}"
        )
    return value


def join_of(request: dict[str, Any], limits: GroupLimits) -> Join:
    """The settings of a joining share member, validated as a consumer group's. Raises
    InvalidRequestError.
    """
    asked = settings_in(request, limits)
    if not asked.topics:
        raise InvalidRequestError("topics is empty; a share member subscribes to at least one")
    reset = request.get("offset_reset") or "latest"
    if reset not in ("latest", "earliest"):
        raise InvalidRequestError(
            f"offset_reset is {reset!r:.100}; allowed are earliest and latest"
        )
    interval_ms = min(asked.heartbeat_interval_ms, asked.session_timeout_ms)
    return Join(
        asked.topics, asked.client_id, asked.session_timeout_ms, interval_ms, reset == "earliest"
    )


def acknowledgements_of(request: dict[str, Any]) -> list[Acknowledgement]:
    """The acknowledgements of a request, which do not overlap. Raises InvalidRequestError."""
    given = request.get("acknowledge")
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > SHARE_RUNS_MAX:
        raise InvalidRequestError(
            f"acknowledge takes a list of at most {SHARE_RUNS_MAX} runs of offsets; send the rest "
            "in another request"
        )
    found = [_acknowledgement(item) for item in given]
    behind = (
        sorted((one.topic_id, one.partition, one.first, one.last) for one in found)
        if len(found) > 1
        else []
    )
    for before, after in pairwise(behind):
        if before[:2] == after[:2] and after[2] <= before[3]:
            raise InvalidRequestError(
                f"offset {after[2]} of partition {after[1]} is acknowledged twice in one request; "
                "list each record once"
            )
    return found


def _acknowledgement(item: Any) -> Acknowledgement:
    if isinstance(item, list) and len(item) == 5:
        topic_id, *numbers, outcome = item
        if isinstance(topic_id, str) and all(
            isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= OFFSET_MAX for n in numbers
        ):
            partition, first, last = numbers
            if first <= last and isinstance(outcome, str) and outcome in OUTCOMES:
                return Acknowledgement(topic_id, partition, first, last, outcome)
    raise InvalidRequestError(
        f"{item!r:.100} is not an acknowledgement; write [topic id, partition, first offset, last "
        f"offset, one of {', '.join(sorted(OUTCOMES))}]"
    )
