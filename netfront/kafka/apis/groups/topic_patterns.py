"""Patterns of topic names that members of consumer groups subscribe to (KIP-848).

The process of groups knows names alone: the gateway matches the pattern with the topics that exist.
It leaves the pattern with the member there (`kept_text`), and gets it back after a restart.

Invariants:
- A pattern is matched in linear time (`name_pattern`). One that is kept is checked like a new one.
- The pattern of a member is its user's: requests of another user with the member's id change
  nothing of it.
- The pattern of a member is forgotten with the member: when it leaves, when the coordinator no
  longer knows it, or when it was silent for the longest session timeout and room is needed. Beyond
  PATTERNS_MAX the user with the most has no more.
"""

from __future__ import annotations

import logging
from typing import TypeAlias

import orjson

from netfront.access.user_entries import UserEntries
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


class MemberPattern:
    """The pattern of a member."""

    __slots__ = ("last_beat_ns", "matched", "text", "topics")

    def __init__(self, text: str, topics: list[str], last_beat_ns: int) -> None:
        self.text = text
        self.topics = topics
        """Names that the member subscribes to beside the pattern."""
        self.matched: object = None
        """The names and rights that it was last matched with."""
        self.last_beat_ns = last_beat_ns
        """Time of the member's last heartbeat."""


Patterns: TypeAlias = UserEntries[tuple[str, str], MemberPattern]
"""By user, and by group and member id. The member that was silent longest is the oldest."""


def _patterns_of(call: Call) -> Patterns:
    found: Patterns = call.services.state.setdefault("patterns", UserEntries())
    return found


def forget_pattern(call: Call, member_id: str) -> None:
    """Forget the pattern of a member of the client's user."""
    _patterns_of(call).pop(call.user, (call.request["group_id"], member_id))


def _forget_silent(call: Call) -> None:
    """Forget members that are silent for the longest session timeout."""
    patterns, services = _patterns_of(call), call.services
    silent_ms = max(SILENT_MS, services.settings["group.session.timeout.max.ms"])
    silent_ns = silent_ms * 1_000_000
    for user in patterns.users():
        for key in patterns.keys_of(user):
            kept = patterns.get(user, key)
            if kept is None or services.now_ns - kept.last_beat_ns <= silent_ns:
                break
            patterns.pop(user, key)


def _make_room(call: Call, key: tuple[str, str]) -> bool:
    """Make room for a pattern. False: there is none, and no user has more than this one."""
    patterns = _patterns_of(call)
    if patterns.size < PATTERNS_MAX or patterns.get(call.user, key) is not None:
        return True
    _forget_silent(call)
    if patterns.size < PATTERNS_MAX:
        return True
    if patterns.has_most(call.user):
        return False
    patterns.pop(*patterns.victim())  # that member's next response brings it back
    return True


def matched_topics(call: Call, member_id: str, topics: list[str] | None) -> list[str] | None:
    """The topics of a member's pattern, when the pattern, the catalog or the rights of the member's
    user have changed. Raises RefusedError.
    """
    patterns, key, now_ns = _patterns_of(call), _key(call, member_id), call.services.now_ns
    text = call.request.get("subscribed_topic_regex")
    if text is not None:
        if not text:
            patterns.pop(call.user, key)
            return [] if topics is None else None
        if not _make_room(call, key):
            raise RefusedError(
                KafkaError.GROUP_MAX_SIZE_REACHED,
                f"{PATTERNS_MAX} members have patterns already; subscribe to names",
            )
        checked_pattern(text)
        patterns.put(call.user, key, MemberPattern(text, topics or [], now_ns))
    kept = patterns.get(call.user, key)
    if kept is None:
        return None
    patterns.touch(call.user, key)
    kept.last_beat_ns = now_ns
    if topics is not None:
        kept.topics = topics
    names, principal = call.services.routes.names(), call.principal
    basis = names, principal, 0 if principal is None else principal.change_count
    if kept.matched == basis and text is None:
        return None
    kept.matched = basis
    matched = checked_pattern(kept.text).matching(names)
    return [*kept.topics, *(name for name in matched if call.may(READ, TOPIC, name))]


def _key(call: Call, member_id: str) -> tuple[str, str]:
    return call.request["group_id"], member_id


def kept_text(call: Call, member_id: str) -> str | None:
    """The text that the process of groups keeps for the member: the pattern, and the names beside
    it; empty: it has none any more; None: no change. Raises RefusedError.
    """
    request = call.request
    pattern, topics = request.get("subscribed_topic_regex"), request["subscribed_topic_names"]
    if pattern is None and topics is None:
        return None
    kept = _patterns_of(call).get(call.user, _key(call, member_id))
    if kept is None:
        return None if pattern is None else ""
    text = plain_json([kept.text, kept.topics])
    if len(text) > KEPT_MAX:
        raise RefusedError(
            KafkaError.INVALID_REQUEST,
            f"a pattern and the names beside it have {len(text)} characters; {KEPT_MAX} are "
            "allowed: subscribe to names alone",
        )
    return text


def restore(call: Call, member_id: str, text: str) -> None:
    """Take up a member's pattern that the process of groups has kept."""
    patterns, key = _patterns_of(call), _key(call, member_id)
    if patterns.get(call.user, key) is not None or not _make_room(call, key):
        return
    try:
        pattern, topics = orjson.loads(text)
        checked_pattern(pattern)
        patterns.put(call.user, key, MemberPattern(pattern, topics, call.services.now_ns))
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
