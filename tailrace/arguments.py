"""What callers give for topics and partitions, made plain: a name where several are taken is one name, and anything else is refused with a sentence.

Invariants: nothing is taken apart that the caller meant whole: "abc" is a topic, not a, b and c.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tailrace.errors import InvalidRequestError
from tailrace.records import TopicPartition


def name_list(what: str, given: object) -> list[str]:
    """One name, or an iterable of them, as a list. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError(f"{what} is {given!r:.100}; it takes a name, or a list of names")
    return names


def partition_of(given: Any) -> TopicPartition:
    """A TopicPartition, or a pair that can be one. Raises InvalidRequestError."""
    if isinstance(given, (tuple, list)) and len(given) == 2:
        topic, partition = given
        if isinstance(topic, str) and isinstance(partition, int) and not isinstance(partition, bool):
            return TopicPartition(topic, partition)
    raise InvalidRequestError(f"{given!r:.100} is no partition; write TopicPartition(topic, number)")


def partition_list(given: Any) -> list[TopicPartition]:
    """Partitions, or one, as a list. Raises InvalidRequestError."""
    if isinstance(given, TopicPartition):
        return [given]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"partitions are {given!r:.100}; they take a list of TopicPartition(topic, number)")
    return [partition_of(item) for item in given]
