"""Names of the topics that groups make for themselves: retry topics, where records wait for another attempt (see `tailrace.retry_later`), and dead-letter
topics (see `tailrace.dead_letters`).

Pure. Invariants: `is_retry_topic(retry_topic(topic, group), group)`; what `retry_topic` makes of a topic that exists is `made_by_groups`.
"""

from __future__ import annotations

import re
from collections.abc import Set

from tailrace.errors import InvalidTopicNameError

SUFFIX = ".retry"
DEAD_LETTER_SUFFIX = ".dlq"
NAME_MAX = 244
"""A delayed topic's name may have so many characters."""
SUBSCRIPTIONS_MAX = 4_096
"""Topics that a member of a group may subscribe to."""
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


def made_by_groups(topic: str, existing: Set[str]) -> str:
    """How the topic's name ends, if it is that of a retry topic of any group, or of the dead-letter topic, of one of these topics; else nothing."""
    if topic.endswith(DEAD_LETTER_SUFFIX):
        return DEAD_LETTER_SUFFIX if topic.removesuffix(DEAD_LETTER_SUFFIX) in existing else ""
    if topic.endswith(SUFFIX):
        of_group = topic.removesuffix(SUFFIX)
        if any(of_group[:at] in existing for at in range(1, len(of_group) - 1) if of_group[at] == "."):
            return SUFFIX
    return ""


def with_retry_topics(topics: list[str], group: str) -> list[str]:
    """Topics, with the retry topic of each that can have one; without any where that would be more than a member may subscribe to."""
    found = list(topics)
    if 2 * len(topics) > SUBSCRIPTIONS_MAX:
        return found
    for topic in topics:
        if not is_retry_topic(topic, group):
            try:
                found.append(retry_topic(topic, group))
            except InvalidTopicNameError:
                continue  # retry_later says so
    return sorted(set(found))
