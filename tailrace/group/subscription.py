"""What a consumer wants to read: names of topics, patterns of names, or both.

Owner: one Consumer, one thread.
Invariants: a pattern is matched from the beginning of a name on, as Python's `re.match` and Kafka's
    Python clients do. It matches no topic that groups have made for themselves (Kafka's clients
    leave out internal topics likewise), unless it spells how such names end: `retry`, or `dlq`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from tailrace.client.steps import Call, Steps
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_names import made_by_groups
from tailrace.core.validation import name_list
from tailrace.protocol.frame import Api

TOPICS_AT_ONCE = 16
"""Names in one request for metadata: its answer has the topics' schemas."""


class Subscription:
    """Names, and patterns with the names that they match now."""

    def __init__(self, names: Iterable[str], patterns: Iterable[re.Pattern[str]]) -> None:
        self.names = list(dict.fromkeys(names))
        self.patterns = list(patterns)
        self.matched: list[str] = []
        self.names_are_checked = False
        """Whether the program was told of names that no topic has."""
        self.listed_version: int | None = None
        """The catalog's version when the topics were last listed; None: they were not."""

    @property
    def topics(self) -> list[str]:
        """All names that are wanted now, ascending."""
        return sorted({*self.names, *self.matched})

    def match(self, existing: Iterable[str]) -> bool:
        """Match the patterns with the names of all topics; returns whether that changes what is
        wanted.
        """
        before, names = self.matched, frozenset(existing)
        self.matched = sorted(
            name
            for name in names
            if any(
                pattern.match(name) and _may_match(pattern, name, names)
                for pattern in self.patterns
            )
        )
        return self.matched != before


def _may_match(pattern: re.Pattern[str], name: str, existing: frozenset[str]) -> bool:
    return made_by_groups(name, existing).removeprefix(".") in pattern.pattern


def missing_topics(call: Call, names: list[str]) -> Steps[list[str]]:
    """Those names that no topic has. `call`: a request and its answer."""
    found = []
    for start in range(0, len(names), TOPICS_AT_ONCE):
        answer = yield from call(Api.METADATA, {"topics": names[start : start + TOPICS_AT_ONCE]})
        found += [
            topic["name"]
            for topic in answer["topics"]
            if topic.get("code") == ErrorCode.UNKNOWN_TOPIC
        ]
    return found


def named_topics(
    call: Call, names: Iterable[str], requested: Collection[str]
) -> Steps[dict[str, str]]:
    """The names of the topics with the ids `requested`, of those that have one of these names: {id:
    name}. An answer has no room for the names of thousands.
    """
    left, found, asked = set(requested), dict[str, str](), list(names)
    for start in range(0, len(asked), TOPICS_AT_ONCE):
        if not left:
            break
        answer = yield from call(Api.METADATA, {"topics": asked[start : start + TOPICS_AT_ONCE]})
        some = {
            topic["topic_id"]: topic["name"]
            for topic in answer["topics"]
            if topic.get("topic_id") in left
        }
        found.update(some)
        left -= some.keys()
    return found


def subscription_of(topics: Any, pattern: Any) -> Subscription:
    """What `subscribe` was given: names, a name, a compiled pattern, names that begin with "^"
    (they are patterns), or `pattern=`. Raises InvalidRequestError.
    """
    if isinstance(topics, re.Pattern):
        topics, pattern = None, topics if pattern is None else pattern
    if topics is not None and pattern is not None:
        raise InvalidRequestError(
            "subscribe() takes names or a pattern, not both; a name that begins with ^ is a "
            "pattern, too"
        )
    given = (
        topics
        if isinstance(topics, (list, tuple, set, frozenset))
        else []
        if topics is None
        else name_list("topics", topics)
    )
    patterns = [one for one in given if isinstance(one, re.Pattern)]
    names = name_list("topics", [one for one in given if not isinstance(one, re.Pattern)])
    patterns += [_compiled(name) for name in names if name.startswith("^")]
    if pattern is not None:
        patterns.append(_compiled(pattern))
    names = [name for name in names if not name.startswith("^")]
    if not names and not patterns:
        raise InvalidRequestError(
            "subscribe() takes names of topics, or pattern=; to read nothing any more write "
            "unsubscribe()"
        )
    return Subscription(names, patterns)


def _compiled(pattern: Any) -> re.Pattern[str]:
    if isinstance(pattern, re.Pattern) and isinstance(pattern.pattern, str):
        return pattern
    if not isinstance(pattern, str) or not pattern:
        raise InvalidRequestError(
            f"pattern is {pattern!r:.100}; it takes a regular expression, as text or compiled"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise InvalidRequestError(
            f"pattern {pattern!r:.100} is no regular expression: {error}"
        ) from None
