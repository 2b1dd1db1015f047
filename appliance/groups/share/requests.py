"""What share members send, checked before anything is done.

Owner: pure. Invariants: what these functions return can be carried out; everything else raises TailraceError with what to correct.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from appliance.groups.limits import CLIENT_TEXT_MAX, MEMBER_ID_MAX, OFFSET_MAX, TOPIC_NAME_MAX, TOPICS_MAX, GroupLimits
from appliance.groups.share.share_partition import OUTCOMES
from tailrace.errors import InvalidRequestError, InvalidSettingError
from tailrace.protocol.requests import SHARE_RUNS_MAX

RECORDS_MAX = 100_000
"""In one request to acquire."""


class Acknowledgement(NamedTuple):
    """Of records that were acquired: accept, release, reject or renew."""

    topic_id: str
    partition: int
    first: int
    last: int
    outcome: str


class Join(NamedTuple):
    """What a share member asks for when it joins."""

    topics: tuple[str, ...]
    client_id: str
    session_timeout_ms: int
    heartbeat_interval_ms: int
    resets_to_earliest: bool


def whole(request: dict[str, Any], name: str, minimum: int, maximum: int, default: int | None = None) -> int:
    """A whole number of a request. Raises InvalidRequestError."""
    value = request.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise InvalidRequestError(f"{name} is {value!r:.100}; it takes a whole number from {minimum} to {maximum}")
    return value


def member_id_of(request: dict[str, Any]) -> str:
    """The member's id. Raises InvalidRequestError."""
    value = request.get("member_id")
    if not isinstance(value, str) or not 1 <= len(value) <= MEMBER_ID_MAX or not value.isprintable():
        raise InvalidRequestError(f"member_id is {value!r:.100}; it takes text of 1 to {MEMBER_ID_MAX} characters, such as a uuid")
    return value


def topics_of(request: dict[str, Any]) -> tuple[str, ...] | None:
    """The names that are subscribed to; None: as before. Raises InvalidRequestError."""
    value = request.get("topics")
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) > TOPICS_MAX
        or not all(isinstance(name, str) and len(name) <= TOPIC_NAME_MAX for name in value)
    ):
        raise InvalidRequestError(f"topics takes a list of at most {TOPICS_MAX} names of topics")
    return tuple(dict.fromkeys(value))


def join_of(request: dict[str, Any], limits: GroupLimits) -> Join:
    """Raises InvalidRequestError, InvalidSettingError."""
    topics = topics_of(request)
    if not topics:
        raise InvalidRequestError("a share member joins with topics: name one at least")
    client_id = request.get("client_id", "")
    if not isinstance(client_id, str) or len(client_id) > CLIENT_TEXT_MAX:
        raise InvalidRequestError(f"client_id takes text of at most {CLIENT_TEXT_MAX} characters")
    timeout_ms = whole(request, "session_timeout_ms", 0, 1 << 31, 45_000)
    if not limits.session_timeout_min_ms <= timeout_ms <= limits.session_timeout_max_ms:
        raise InvalidSettingError(
            f"session_timeout_ms is {timeout_ms}; the appliance allows {limits.session_timeout_min_ms} to {limits.session_timeout_max_ms} "
            "(group.session.timeout.min.ms, group.session.timeout.max.ms)"
        )
    reset = request.get("offset_reset") or "latest"
    if reset not in ("latest", "earliest"):
        raise InvalidRequestError(f"offset_reset is {reset!r:.100}; allowed are earliest and latest")
    interval_ms = min(whole(request, "heartbeat_interval_ms", 0, 1 << 31, 3_000), timeout_ms)
    return Join(topics, client_id, timeout_ms, interval_ms, reset == "earliest")


def acknowledgements_of(request: dict[str, Any]) -> list[Acknowledgement]:
    """Raises InvalidRequestError."""
    given = request.get("acknowledge")
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > SHARE_RUNS_MAX:
        raise InvalidRequestError(f"acknowledge takes a list of at most {SHARE_RUNS_MAX} runs of offsets; send the rest in another request")
    found = [_acknowledgement(item) for item in given]
    behind = sorted((one.topic_id, one.partition, one.first, one.last) for one in found) if len(found) > 1 else []
    for before, after in pairwise(behind):
        if before[:2] == after[:2] and after[2] <= before[3]:
            raise InvalidRequestError(
                f"offset {after[2]} of partition {after[1]} is acknowledged twice in one request; name each record once, and send the rest in another"
            )
    return found


def _acknowledgement(item: Any) -> Acknowledgement:
    if isinstance(item, list) and len(item) == 5:
        topic_id, *numbers, outcome = item
        if isinstance(topic_id, str) and all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= OFFSET_MAX for n in numbers):
            partition, first, last = numbers
            if first <= last and isinstance(outcome, str) and outcome in OUTCOMES:
                return Acknowledgement(topic_id, partition, first, last, outcome)
    raise InvalidRequestError(
        f"{item!r:.100} is no acknowledgement; write [topic id, partition, first offset, last offset, one of {', '.join(sorted(OUTCOMES))}]"
    )
