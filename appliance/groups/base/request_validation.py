"""Validation of clients' requests about groups: each field is checked once, before any change.

Owner: pure.
Invariants:
- A returned value has its annotated type, and numbers fit 62 bits.
- Any other value is refused with an error that names the field.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping
from typing import Any

from appliance.groups.base.assignor_plugins import NAME_MAX
from appliance.groups.base.limits import (
    CLIENT_TEXT_MAX,
    COMMITS_MAX,
    GROUP_NAME_MAX,
    MEMBER_ID_MAX,
    OFFSET_MAX,
    PATTERN_MAX,
    REBALANCE_TIMEOUT_MAX_MS,
    TOPIC_NAME_MAX,
    TOPICS_MAX,
    GroupLimits,
)
from appliance.groups.base.members import AWAY_EPOCH, MemberSettings
from appliance.groups.base.messages import Partition
from tailrace.core.errors import InvalidGroupError, InvalidRequestError

CONSUMER, SHARE = "consumer", "share"


def group_in(request: Mapping[str, Any]) -> str:
    """The group's name. Raises InvalidGroupError."""
    name = request.get("group")
    if type(name) is not str or not 1 <= len(name) <= GROUP_NAME_MAX or not _is_printable(name):
        raise InvalidGroupError(f"the group name {shown(name)} is not allowed")
    return name


def _is_printable(name: str) -> bool:
    return (name.isascii() and name.isprintable()) or not any(
        unicodedata.category(one) in ("Cc", "Cs") for one in name
    )


def kind_in(request: Mapping[str, Any]) -> str:
    """The group's kind, CONSUMER unless the request has one. Raises InvalidRequestError."""
    kind = request.get("kind")
    if kind is None:
        return CONSUMER
    if kind not in (CONSUMER, SHARE):
        raise InvalidRequestError(f"kind is {shown(kind)}; it takes consumer or share")
    return str(kind)


def member_in(request: Mapping[str, Any]) -> str:
    """The member's id. Raises InvalidRequestError."""
    member_id = text_in(request, "member_id", MEMBER_ID_MAX)
    if not member_id:
        raise InvalidRequestError(
            "member_id is missing; it takes the id that the client generated for itself, a uuid"
        )
    return member_id


def epoch_in(request: Mapping[str, Any]) -> int:
    """The member's epoch. Raises InvalidRequestError."""
    epoch = request.get("member_epoch")
    if type(epoch) is not int or not AWAY_EPOCH <= epoch <= OFFSET_MAX:
        raise InvalidRequestError(
            f"member_epoch is {shown(epoch)}; it takes 0 (join), -1 (leave), -2 (a static member "
            "leaves temporarily) or the epoch of the last answer"
        )
    return epoch


def topics_in(request: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The subscribed topic names, sorted; None: unchanged. Raises InvalidRequestError."""
    topics = request.get("topics")
    if topics is None:
        return None
    if not isinstance(topics, list) or len(topics) > TOPICS_MAX:
        raise InvalidRequestError(f"topics takes a list of at most {TOPICS_MAX} names")
    for name in topics:
        if type(name) is not str or not 1 <= len(name) <= TOPIC_NAME_MAX:
            raise InvalidRequestError(f"topics has {shown(name)}; it takes names of topics")
    return tuple(sorted({sys.intern(name) for name in topics}))


def owned_in(request: Mapping[str, Any]) -> frozenset[Partition] | None:
    """The member's owned partitions; None: unchanged. Raises InvalidRequestError."""
    owned = request.get("owned")
    if owned is None:
        return None
    found: set[Partition] = set()
    if not isinstance(owned, dict):
        raise InvalidRequestError("owned takes an object: topic id -> list of partitions")
    for topic_id, partitions in owned.items():
        if (
            not isinstance(partitions, list)
            or len(topic_id) > 64
            or not all(type(one) is int for one in partitions)
        ):
            raise InvalidRequestError("owned takes an object: topic id -> list of partitions")
        found.update((topic_id, one) for one in partitions)
    return frozenset(found)


def settings_in(request: Mapping[str, Any], limits: GroupLimits) -> MemberSettings:
    """The settings of a joining member. Raises InvalidRequestError."""
    topics = topics_in(request)
    if topics is None:
        raise InvalidRequestError(
            "topics is missing; a member that joins lists the topics that it subscribes to"
        )
    session_ms = number_in(
        request,
        "session_timeout_ms",
        45_000,
        limits.session_timeout_min_ms,
        limits.session_timeout_max_ms,
    )
    return MemberSettings(
        topics,
        text_in(request, "instance_id", CLIENT_TEXT_MAX) or None,
        text_in(request, "client_id", CLIENT_TEXT_MAX) or "",
        text_in(request, "assignor", NAME_MAX) or None,
        session_ms,
        number_in(request, "rebalance_timeout_ms", 300_000, 1, REBALANCE_TIMEOUT_MAX_MS),
        number_in(request, "heartbeat_interval_ms", 3_000, 1, limits.session_timeout_max_ms),
        flag_in(request, "follows_catalog") or False,
        text_in(request, "pattern", PATTERN_MAX) or "",
        user_in(request),
    )


def user_in(request: Mapping[str, Any]) -> str:
    """The user of a request, which its front names; empty: the appliance has no users."""
    user = request.get("user")
    return user if isinstance(user, str) else ""


def flag_in(request: Mapping[str, Any], name: str) -> bool | None:
    """A boolean field; None: missing. Raises InvalidRequestError."""
    value = request.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)}; it takes true or false")
    return value


def number_in(request: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    """A whole number from `least` to `most`. Raises InvalidRequestError."""
    value = request.get(name)
    if value is None:
        return default
    if type(value) is not int or not least <= value <= most:
        raise InvalidRequestError(f"{name} is {shown(value)}; it takes {least} to {most}")
    return value


def text_in(request: Mapping[str, Any], name: str, most: int) -> str | None:
    """A text without control characters; None: missing. Raises InvalidRequestError."""
    value = request.get(name)
    if value is None:
        return None
    if type(value) is not str or len(value) > most or not _is_printable(value):
        raise InvalidRequestError(
            f"{name} is {shown(value)}; it takes at most {most} characters, none of them a "
            "control character"
        )
    return value


def entries_in(request: Mapping[str, Any], most: int = COMMITS_MAX) -> list[Any]:
    """The list `offsets`. Raises InvalidRequestError."""
    entries = request.get("offsets")
    if not isinstance(entries, list) or len(entries) > most:
        raise InvalidRequestError(f"the request needs a list `offsets` of at most {most} entries")
    return entries


def place_in(request: Mapping[str, Any]) -> tuple[str, int] | None:
    """The page token `after`, a topic and a partition. Raises InvalidRequestError."""
    after = request.get("after")
    if after is None:
        return None
    if (
        not isinstance(after, list)
        or len(after) != 2
        or type(after[0]) is not str
        or type(after[1]) is not int
        or not -1 <= after[1] < 1 << 31
    ):
        raise InvalidRequestError(
            f"after is {shown(after)}; it takes `next` of the page before: a topic and a partition"
        )
    return after[0], after[1]


def shown(value: object) -> str:
    """A value for an error message, cut to 80 characters."""
    text = (
        repr(value)
        if isinstance(value, (str, int, float, bool, type(None)))
        else f"a {type(value).__name__}"
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
