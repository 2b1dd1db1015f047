"""Names of derived topics: a group's retry topics, and dead-letter topics.

A group's records wait in a retry topic for another attempt (`tailrace.consumer.retry_topic`). A
dead-letter topic stores records that a group gave up (`tailrace.group.dead_letter_queue`).
docs/adr/0028-names-of-derived-topics.md has the reasons.

    shop, group mails     shop.mails.retry          a group without a dot
    shop, group eu.mails  shop.eu.mails.retry.<20 hex><20 hex>
                                                    any other group, or a name that would be too
                                                    long: SHA-256 of topic and group
    shop                  shop.dlq
    a too long name       <as much of it as fits>.dlq.<20 hex>

Invariants, of pure functions:
- Two pairs of topic and group have two retry topics, and two topics two dead-letter topics.
- Every name here is allowed for a topic.
- `is_retry_topic(retry_topic(topic, group), group)` is true.
- `made_by_groups` recognizes every `retry_topic` of an existing topic.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from hashlib import sha256
from typing import Any

SUFFIX = ".retry"
DEAD_LETTER_SUFFIX = ".dlq"
RETRY_NAME_MAX = 244
"""The most characters in the name of a topic with delays."""
NAME_MAX = 249
SUBSCRIPTIONS_MAX = 4_096
"""The most topics that a group member may subscribe to."""
_DIGITS = 20
"""Hexadecimal digits that stand for a topic or a group."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_PLAIN_GROUP = re.compile(r"[A-Za-z0-9_-]+")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_DIGESTED = re.compile(
    rf"(?P<stem>.+)(?:\.retry\.[0-9a-f]{{{2 * _DIGITS}}}|\.dlq\.[0-9a-f]{{{_DIGITS}}})"
)

HEADER_PREFIX = "retry."
_COUNTED = ("topic", "partition", "offset", "attempt", "first_timestamp")
HEADERS = tuple(HEADER_PREFIX + name for name in ("topic_id", *_COUNTED))
"""The headers of a record in a retry topic, in their order, behind those of its sender. Version 0.1
wrote none of the first name.
"""

Headers = Sequence[tuple[str, Any]]
"""Names and values, bytes or None."""


def retry_topic(topic: str, group: str) -> str:
    """The name of a group's retry topic for `topic`."""
    name = f"{topic}.{group}{SUFFIX}"
    if _PLAIN_GROUP.fullmatch(group) and len(name) <= RETRY_NAME_MAX:
        return name
    end = f"{SUFFIX}.{_digest(topic)}{_digest(group)}"
    return _NOT_IN_NAMES.sub("-", f"{topic}.{group}")[: RETRY_NAME_MAX - len(end)] + end


def retry_topics(topic: str, group: str) -> tuple[str, ...]:
    """The retry topics that a group reads beside `topic`.

    These are its own, and the one under version 0.1's name, where records may still wait.
    """
    name, earlier = retry_topic(topic, group), f"{topic}.{group}{SUFFIX}"
    return (
        (name, earlier)
        if earlier != name and len(earlier) <= RETRY_NAME_MAX and _NAME.fullmatch(earlier)
        else (name,)
    )


def is_retry_topic(topic: str, group: str) -> bool:
    """True if the topic is this group's retry topic."""
    if topic.endswith(f".{group}{SUFFIX}"):
        return True
    return (
        f"{SUFFIX}." in topic
        and topic.endswith(_digest(group))
        and _DIGESTED.fullmatch(topic) is not None
    )


def is_shared(topic: str) -> bool:
    """True if a retry topic may have records of several groups.

    Version 0.1 had the same name for `shop.eu`, `mails` and for `shop`, `eu.mails`.
    """
    return topic.endswith(SUFFIX) and topic.removesuffix(SUFFIX).count(".") > 1


def is_of_group(headers: Headers, topic: str, group: str) -> bool:
    """True if a record of the retry topic `topic` waits for this group.

    A record without `retry_later`'s headers is for every group that reads the topic.
    """
    origin = added_headers(headers).get("retry.topic")
    if origin is None:
        return True
    return topic in retry_topics(origin.decode(errors="replace"), group)


def added_headers(headers: Headers) -> dict[str, bytes]:
    """The headers that `retry_later` has added, at the end of a record's; empty if there are none.

    The sender's own headers may have the same names.
    """
    count = _added_count(headers)
    return {name: value for name, value in headers[len(headers) - count :] if value is not None}


def sent_headers(headers: Headers) -> Headers:
    """The sender's headers, before those that `retry_later` has added."""
    return headers[: len(headers) - _added_count(headers)]


def _added_count(headers: Headers) -> int:
    for names in (HEADERS, HEADERS[1:]):
        last = headers[-len(names) :]
        if tuple(name for name, _ in last) == names and all(value is not None for _, value in last):
            return len(names)
    return 0


def dead_letter_name(topic: str) -> str:
    """The default dead-letter topic of a topic."""
    name = topic + DEAD_LETTER_SUFFIX
    if len(name) <= NAME_MAX:
        return name
    end = f"{DEAD_LETTER_SUFFIX}.{_digest(topic)}"
    return topic[: NAME_MAX - len(end)] + end


def made_by_groups(topic: str, existing: Set[str]) -> str:
    """`.retry` or `.dlq` if the name is a retry topic or dead-letter topic of an existing topic.

    Else "".
    """
    digested = _DIGESTED.fullmatch(topic)
    if digested is not None:
        stem = digested["stem"]
        suffix = SUFFIX if SUFFIX in topic[len(stem) :] else DEAD_LETTER_SUFFIX
        is_cut = len(topic) >= RETRY_NAME_MAX and any(name.startswith(stem) for name in existing)
        return suffix if is_cut or _begins_with_one_of(stem, existing) else ""
    if topic.endswith(DEAD_LETTER_SUFFIX):
        return DEAD_LETTER_SUFFIX if topic.removesuffix(DEAD_LETTER_SUFFIX) in existing else ""
    if topic.endswith(SUFFIX) and _begins_with_one_of(topic.removesuffix(SUFFIX), existing):
        return SUFFIX
    return ""


def _begins_with_one_of(name: str, existing: Set[str]) -> bool:
    """True if `name` is one of these names, a dot, and more."""
    return any(name[:at] in existing for at in range(1, len(name) - 1) if name[at] == ".")


def with_retry_topics(topics: list[str], group: str) -> list[str]:
    """The topics and their retry topics, or only the topics if there would be more than
    SUBSCRIPTIONS_MAX.
    """
    found = set(topics)
    found.update(
        name
        for topic in topics
        if not is_retry_topic(topic, group)
        for name in retry_topics(topic, group)
    )
    return sorted(found) if len(found) <= SUBSCRIPTIONS_MAX else list(topics)


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGITS]
