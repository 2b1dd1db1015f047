"""Names of retry topics: where a group's records of a topic wait for another attempt (see `tailrace.retry_later`).

Pure. Invariants: `is_retry_topic(retry_topic(topic, group), group)`.
"""

from __future__ import annotations

import re

from tailrace.errors import InvalidTopicNameError

SUFFIX = ".retry"
NAME_MAX = 244
"""A delayed topic's name may have so many characters."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def retry_topic(topic: str, group: str) -> str:
    """Where a group's records of a topic wait for another attempt. Raises InvalidTopicNameError for a name that no topic can have."""
    name = f"{topic}.{group}{SUFFIX}"
    if len(name) > NAME_MAX:
        raise InvalidTopicNameError(
            f"the retry topic of {topic!r} and this group would have a name of {len(name)} characters, and {NAME_MAX} are allowed; use a shorter group_id"
        )
    if not _NAME.fullmatch(name):
        raise InvalidTopicNameError(
            f"the retry topic of {topic!r} would be called {name!r}, which no topic can be; use a group_id of letters, digits, '.', '_' and '-'"
        )
    return name


def is_retry_topic(topic: str, group: str) -> bool:
    """Whether it holds records that this group tries again."""
    return topic.endswith(f".{group}{SUFFIX}")


def with_retry_topics(topics: list[str], group: str) -> list[str]:
    """Topics, with the retry topic of each that can have one."""
    found = list(topics)
    for topic in topics:
        if not is_retry_topic(topic, group):
            try:
                found.append(retry_topic(topic, group))
            except InvalidTopicNameError:
                continue  # retry_later says so
    return sorted(set(found))
