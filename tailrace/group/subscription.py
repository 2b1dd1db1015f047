"""Subscription of a consumer: topic names, name patterns, or both.

Owner: one Consumer, one thread.

Invariants: a pattern is matched from the beginning of a name, as by Python's `re.match` and Kafka's
Python clients. It matches no topic that groups create for themselves (Kafka's clients leave out
internal topics likewise), unless it contains how such names end: `retry` or `dlq`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from tailrace.client.connections.steps import Call, Steps
from tailrace.core.error_codes import ErrorCode
from tailrace.core.errors import InvalidRequestError
from tailrace.core.topic_names import made_by_groups
from tailrace.core.validation import name_list
from tailrace.protocol.frame import Api

TOPICS_AT_ONCE = 16
"""Names in one METADATA request: its response contains the topics' schemas."""


class Subscription:
    """Names, and patterns with the names that they match now."""

    def __init__(self, names: Iterable[str], patterns: Iterable[re.Pattern[str]]) -> None:
        self.names = list(dict.fromkeys(names))
        self.patterns = list(patterns)
        self.matched: list[str] = []
        self.names_are_checked = False
        """True if the program was warned of names without a topic."""
        self.listed_version: int | None = None
        """The catalog's version at the last listing of the topics; None: they were not listed."""

    @property
    def topics(self) -> list[str]:
        """All subscribed names, ascending."""
        return sorted({*self.names, *self.matched})

    def match(self, existing: Iterable[str]) -> bool:
        """Match the patterns against all topic names. Returns True if the matches changed."""
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
    """The names without a topic. `call` makes a request."""
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
    """The names of the topics with the ids `requested`, among topics with these names: {id: name}.
    The names are looked up in parts, because one response cannot hold thousands of topics.
    """
    left, found, candidates = set(requested), dict[str, str](), list(names)
    for start in range(0, len(candidates), TOPICS_AT_ONCE):
        if not left:
            break
        answer = yield from call(
            Api.METADATA, {"topics": candidates[start : start + TOPICS_AT_ONCE]}
        )
        some = {
            topic["topic_id"]: topic["name"]
            for topic in answer["topics"]
            if topic.get("topic_id") in left
        }
        found.update(some)
        left -= some.keys()
    return found


def subscription_of(topics: Any, pattern: Any) -> Subscription:
    """The subscription from the arguments of `subscribe`: a name, names, a compiled pattern, names
    that begin with "^" (patterns), or `pattern=`. Raises InvalidRequestError.
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
            "subscribe() takes names of topics, or pattern=; to stop reading, write unsubscribe()"
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
