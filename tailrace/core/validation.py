"""What callers give, made plain or refused with a sentence before anything else happens.

Each function takes what the argument is called and what was given, and returns it in the form that the caller works with.

Invariants: nothing is taken apart that the caller meant whole: "abc" is a topic, not a, b and c. Nothing of a wrong type goes further than here: a bare
TypeError from deep inside says neither which argument nor what to write instead.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tailrace.errors import InvalidRecordError, InvalidRequestError, TailraceError
from tailrace.records import TopicPartition

INT64_MAX = 2**63 - 1
FOREVER_S = 1e9
"""Seconds (30 years) from which on a timeout is as good as none."""


def name_list(what: str, given: object) -> list[str]:
    """One name, or an iterable of them, as a list. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    names = list(given) if isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError(f"{what} is {given!r:.100}; it takes a name, or a list of names")
    return names


def name_of(what: str, given: object) -> str:
    """One name. Raises InvalidRequestError."""
    if not isinstance(given, str):
        raise InvalidRequestError(f"{what} is {given!r:.100}; it takes a name")
    return given


def partition_of(given: Any) -> TopicPartition:
    """A TopicPartition, or a pair that can be one. Raises InvalidRequestError."""
    if isinstance(given, (tuple, list)) and len(given) == 2:
        topic, partition = given
        if isinstance(topic, str) and isinstance(partition, int) and not isinstance(partition, bool):
            return TopicPartition(topic, partition)
    raise InvalidRequestError(f"{given!r:.100} is no partition; write TopicPartition(topic, number)")


def is_one_partition(given: Any) -> bool:
    """Whether this is a TopicPartition, or a pair that is meant for one, and no list of them."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str)


def partition_list(given: Any) -> list[TopicPartition]:
    """Partitions, or one, as a list. Raises InvalidRequestError."""
    if is_one_partition(given):
        return [partition_of(given)]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"partitions are {given!r:.100}; they take a list of TopicPartition(topic, number)")
    return [partition_of(item) for item in given]


def partitions_named(given: tuple[Any, ...]) -> list[TopicPartition]:
    """What a method that takes any number of partitions was given: each by itself, as in kafka-python, or one list of them, as in confluent-kafka.
    Raises InvalidRequestError.
    """
    if len(given) == 1 and isinstance(given[0], (list, set, frozenset)):
        return partition_list(given[0])
    return [partition_of(item) for item in given]


def mapping_of(what: str, given: Any, example: str) -> Mapping[Any, Any]:
    """A mapping. `example`: what one looks like, for the sentence. Raises InvalidRequestError."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{what} is {given!r:.100}; it takes a dict such as {example}")
    return given


def by_partition(what: str, given: Any, example: str) -> dict[TopicPartition, Any]:
    """A mapping from partitions (or pairs) to something. Raises InvalidRequestError."""
    return {partition_of(key): value for key, value in mapping_of(what, given, example).items()}


def whole(what: str, given: Any, minimum: int, maximum: int = INT64_MAX) -> int:
    """A whole number between bounds, both included; those of numpy are taken. Raises InvalidRequestError."""
    try:
        number = operator.index(given)
    except TypeError:
        number = None
    if number is None or isinstance(given, bool) or not minimum <= number <= maximum:
        upper = f"to {maximum}" if maximum < INT64_MAX or (number is not None and number > maximum) else "on"
        raise InvalidRequestError(f"{what} is {given!r:.100}; it takes a whole number from {minimum} {upper}")
    return number


def partition_number(given: Any, whose: str = "partition") -> int:
    """A partition's number, of a record that is being sent; those of numpy are taken. Raises InvalidRecordError."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)
    except TypeError:
        raise InvalidRecordError(f"{whose} is {given!r:.100}; it must be a whole number") from None


def timeout_ms_of(given: Any) -> float:
    """Milliseconds to wait, 0 or more. Raises InvalidRequestError."""
    if not _is_number(given) or not given >= 0:
        raise InvalidRequestError(f"timeout_ms is {given!r:.100}; it takes milliseconds, 0 or more")
    return float(min(given, FOREVER_S * 1e3))


def timeout_s_of(given: Any, error: type[TailraceError] = InvalidRequestError) -> float | None:
    """Seconds to wait; None, and infinity: without end. Less than nothing is nothing, as deadlines that have passed come out. Raises `error`."""
    if given is None:
        return None
    if not _is_number(given) or given != given:
        raise error(f"timeout is {given!r:.100}; it takes seconds, or None to wait without end")
    return None if given >= FOREVER_S else max(0.0, float(given))


_NUMBERS = (int, float)


def _is_number(given: object) -> bool:
    """Whether this compares and converts as a number does; those of numpy do."""
    return type(given) in _NUMBERS or (
        not isinstance(given, (bool, str, bytes)) and hasattr(given, "__float__") and hasattr(given, "__ge__")
    )


def callable_of(what: str, given: Any) -> Callable[..., Any]:
    """Something that can be called. Raises InvalidRequestError."""
    if not callable(given):
        raise InvalidRequestError(f"{what} is {given!r:.100}; it takes a function")
    return given  # type: ignore[no-any-return]


def optional_text_bytes(what: str, given: Any) -> bytes | None:
    """A key as it is stored: bytes, or text as UTF-8, or None. Raises InvalidRequestError."""
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, (bytearray, memoryview)):
        return bytes(given)
    try:
        if isinstance(given, str):
            return given.encode()
    except UnicodeEncodeError:
        pass
    raise InvalidRequestError(f"{what} is {given!r:.100}; it takes bytes, or text that can be UTF-8")
