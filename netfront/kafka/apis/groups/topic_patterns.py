"""Patterns of topic names that members of consumer groups subscribe to (KIP-848).

The process of groups knows names alone: the gateway matches the pattern with the topics that exist.
It leaves the pattern with the member there (`kept_text`), and gets it back after a restart.

Invariants:
- A pattern is matched in linear time (`name_pattern`). One that is kept is checked like a new one.
- The pattern of a member is forgotten with the member: when it leaves, when the coordinator no
  longer knows it, or when it was silent for the longest session timeout.
"""

from __future__ import annotations

import logging
from typing import Any

import orjson

from netfront.kafka.apis.call import Call, RefusedError
from netfront.kafka.apis.groups.name_pattern import NamePattern, PatternError, name_pattern
from netfront.kafka.wire.errors import KafkaError
from netfront.kafka.wire.plain_json import plain_json
from shm.rights.acl import READ, TOPIC

logger = logging.getLogger(__name__)

KEPT_MAX = 4_096
"""Characters that the process of groups keeps of a member's `pattern`."""
PATTERNS_MAX = 10_000
SILENT_MS = 45_000


def patterns_of(call: Call) -> dict[tuple[str, str], list[Any]]:
    """By (group, member): the pattern, the member's own topics, the list of names that it was last
    matched with, the time of the last heartbeat. The member that was silent longest comes first.
    """
    found: dict[tuple[str, str], list[Any]] = call.services.state.setdefault("patterns", {})
    return found


def forget_silent(call: Call) -> None:
    """Forget members that are silent for the longest session timeout."""
    patterns, services = patterns_of(call), call.services
    silent_ms = max(SILENT_MS, services.settings["group.session.timeout.max.ms"])
    while patterns:
        key = next(iter(patterns))
        if services.now_ns - patterns[key][3] <= silent_ms * 1_000_000:
            return
        del patterns[key]


def matched_topics(call: Call, member_id: str, topics: list[str] | None) -> list[str] | None:
    """The topics of a member's pattern, when the pattern or the catalog has changed. Raises
    RefusedError.
    """
    patterns, key = patterns_of(call), (call.request["group_id"], member_id)
    text = call.request.get("subscribed_topic_regex")
    if text is not None:
        if not text:
            patterns.pop(key, None)
            return [] if topics is None else None
        forget_silent(call)
        if len(patterns) >= PATTERNS_MAX and key not in patterns:
            raise RefusedError(
                KafkaError.GROUP_MAX_SIZE_REACHED,
                f"{PATTERNS_MAX} members have patterns already; subscribe to names",
            )
        checked_pattern(text)
        patterns[key] = [text, topics or [], None, 0]
    kept = patterns.pop(key, None)
    if kept is None:
        return None
    patterns[key] = kept  # behind all others: it was heard of last
    kept[3] = call.services.now_ns
    if topics is not None:
        kept[1] = topics
    names = call.services.routes.names()
    if kept[2] is names and text is None:
        return None
    kept[2] = names
    matched = checked_pattern(kept[0]).matching(names)
    return [*kept[1], *(name for name in matched if call.may(READ, TOPIC, name))]


def kept_text(call: Call, member_id: str) -> str | None:
    """The text that the process of groups keeps for the member: the pattern, and the names beside
    it; empty: it has none any more; None: no change. Raises RefusedError.
    """
    request = call.request
    pattern, topics = request.get("subscribed_topic_regex"), request["subscribed_topic_names"]
    if pattern is None and topics is None:
        return None
    kept = patterns_of(call).get((request["group_id"], member_id))
    if kept is None:
        return None if pattern is None else ""
    text = plain_json([kept[0], kept[1]])
    if len(text) > KEPT_MAX:
        raise RefusedError(
            KafkaError.INVALID_REQUEST,
            f"a pattern and the names beside it have {len(text)} characters; {KEPT_MAX} are "
            "allowed: subscribe to names alone",
        )
    return text


def restore(call: Call, member_id: str, text: str) -> None:
    """Take up a member's pattern that the process of groups has kept."""
    patterns, key = patterns_of(call), (call.request["group_id"], member_id)
    if key in patterns or len(patterns) >= PATTERNS_MAX:
        return
    try:
        pattern, topics = orjson.loads(text)
        checked_pattern(pattern)
        patterns[key] = [pattern, topics, None, call.services.now_ns]
    except (ValueError, TypeError, RefusedError):
        logger.error("kafka_pattern_not_restored group=%s member=%s", *key)


def checked_pattern(text: str) -> NamePattern:
    """The pattern of a text. Raises RefusedError."""
    try:
        return name_pattern(text)
    except PatternError as error:
        raise RefusedError(
            KafkaError.INVALID_REGULAR_EXPRESSION,
            f"the pattern is not taken: {error}. A pattern has characters, '.', classes such as "
            "[a-z] and \\d, groups, '|', '^', '$', and * + ? {n,m}; or subscribe to names",
        ) from None
