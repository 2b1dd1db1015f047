"""Validation of callers' arguments: each function converts one argument or raises an error.

Each function takes the argument's name and value, and returns the form that the caller works with.

Invariants:
- A str is one name and never split: "abc" is a topic, not a, b and c.
- A value of the wrong type is rejected here, with the argument's name and an example.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from tailrace.core.errors import InvalidRecordError, InvalidRequestError, TailraceError
from tailrace.core.topic_partition import TopicPartition

INT64_MAX = 2**63 - 1
FOREVER_S = 1e9
"""Seconds (30 years) from which on a timeout counts as infinite."""


def name_list(label: str, given: object) -> list[str]:
    """Return one name or an iterable of names as a list. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    names = (
        list(given)
        if isinstance(given, Iterable) and not isinstance(given, (bytes, bytearray))
        else None
    )
    if names is None or not all(isinstance(name, str) for name in names):
        raise InvalidRequestError(f"{label} is {given!r:.100}; give a name, or a list of names")
    return names


def name_of(label: str, given: object) -> str:
    """Return one name. Raises InvalidRequestError."""
    if not isinstance(given, str):
        raise InvalidRequestError(f"{label} is {given!r:.100}; give a name")
    return given


def partition_of(given: Any) -> TopicPartition:
    """Return a TopicPartition for a (topic, number) pair. Raises InvalidRequestError."""
    if isinstance(given, (tuple, list)) and len(given) == 2:
        topic, partition = given
        if (
            isinstance(topic, str)
            and isinstance(partition, int)
            and not isinstance(partition, bool)
        ):
            return TopicPartition(topic, partition)
    raise InvalidRequestError(
        f"{given!r:.100} is not a partition; write TopicPartition(topic, number)"
    )


def is_one_partition(given: Any) -> bool:
    """True if this is one TopicPartition or (topic, number) pair, not a list of them."""
    return isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], str)


def partition_list(given: Any) -> list[TopicPartition]:
    """Return one partition or several as a list. Raises InvalidRequestError."""
    if is_one_partition(given):
        return [partition_of(given)]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(
            f"partitions is {given!r:.100}; give a list of TopicPartition(topic, number)"
        )
    return [partition_of(item) for item in given]


def partitions_named(given: tuple[Any, ...]) -> list[TopicPartition]:
    """The partitions in a method's `*partitions`.

    They are given one by one, as in kafka-python, or as one list, as in confluent-kafka. Raises
    InvalidRequestError.
    """
    if len(given) == 1 and isinstance(given[0], (list, set, frozenset)):
        return partition_list(given[0])
    return [partition_of(item) for item in given]


def mapping_of(label: str, given: Any, example: str) -> Mapping[Any, Any]:
    """Return a mapping. `example` is shown in the error. Raises InvalidRequestError."""
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{label} is {given!r:.100}; give a dict such as {example}")
    return given


def by_partition(label: str, given: Any, example: str) -> dict[TopicPartition, Any]:
    """Return a mapping whose keys are partitions. Raises InvalidRequestError."""
    return {partition_of(key): value for key, value in mapping_of(label, given, example).items()}


def whole(label: str, given: Any, minimum: int, maximum: int = INT64_MAX) -> int:
    """Return a whole number within inclusive bounds (numpy's too). Raises InvalidRequestError."""
    try:
        number = operator.index(given)
    except TypeError:
        number = None
    if number is None or isinstance(given, bool) or not minimum <= number <= maximum:
        upper = (
            f"to {maximum}"
            if maximum < INT64_MAX or (number is not None and number > maximum)
            else "on"
        )
        raise InvalidRequestError(
            f"{label} is {given!r:.100}; give a whole number from {minimum} {upper}"
        )
    return number


def partition_number(given: Any, whose: str = "partition") -> int:
    """Return the partition number of a record (numpy's too). Raises InvalidRecordError."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)
    except TypeError:
        raise InvalidRecordError(f"{whose} is {given!r:.100}; it must be a whole number") from None


def timeout_ms_of(given: Any) -> float:
    """Return milliseconds to wait, 0 or more. Raises InvalidRequestError."""
    if not _is_number(given) or not given >= 0:
        raise InvalidRequestError(f"timeout_ms is {given!r:.100}; give milliseconds, 0 or more")
    return float(min(given, FOREVER_S * 1e3))


def timeout_s_of(given: Any, error: type[TailraceError] = InvalidRequestError) -> float | None:
    """Return seconds to wait; None for no limit, which infinity also means.

    A negative number, as of a deadline that has passed, becomes 0. Raises `error`.
    """
    if given is None:
        return None
    if not _is_number(given) or given != given:
        raise error(f"timeout is {given!r:.100}; give seconds, or None to wait without limit")
    return None if given >= FOREVER_S else max(0.0, float(given))


_NUMBERS = (int, float)


def _is_number(given: object) -> bool:
    """True for a value that compares and converts as a number, also from numpy."""
    return type(given) in _NUMBERS or (
        not isinstance(given, (bool, str, bytes))
        and hasattr(given, "__float__")
        and hasattr(given, "__ge__")
    )


def callable_of(label: str, given: Any, *, is_awaited: bool = False) -> Callable[..., Any]:
    """Return a callable. It is no coroutine function, unless what it returns `is_awaited`. Raises
    InvalidRequestError.
    """
    if not callable(given):
        raise InvalidRequestError(f"{label} is {given!r:.100}; give a function")
    if not is_awaited and is_coroutine_function(given):
        raise InvalidRequestError(not_awaited(label, given))
    return given  # type: ignore[no-any-return]


_FUNCTIONS = (FunctionType, MethodType)


def is_coroutine_function(given: Any) -> bool:
    """True for a coroutine function, an object with an async __call__, and a partial of either."""
    if inspect.iscoroutinefunction(given):
        return True
    if type(given) in _FUNCTIONS:
        return False
    if isinstance(given, partial):
        return is_coroutine_function(given.func)
    return inspect.iscoroutinefunction(type(given).__call__)


def not_awaited(label: str, given: object) -> str:
    """The sentence about a coroutine function in the place of a function."""
    return (
        f"{label} is the coroutine function {given!r:.100}, which would be called and not awaited; "
        "give a plain function, such as the put_nowait of an asyncio.Queue"
    )


def optional_text_bytes(label: str, given: Any) -> bytes | None:
    """Return a key as stored: bytes, UTF-8 of text, or None. Raises InvalidRequestError."""
    if given is None or isinstance(given, bytes):
        return given
    if isinstance(given, (bytearray, memoryview)):
        return bytes(given)
    try:
        if isinstance(given, str):
            return given.encode()
    except UnicodeEncodeError:
        pass
    raise InvalidRequestError(
        f"{label} is {given!r:.100}; give bytes, or text that can be encoded as UTF-8"
    )


def before_1970_error(value: object) -> InvalidRecordError:
    """The error of a record's timestamp below 0."""
    return InvalidRecordError(
        f"a timestamp is {value}, which is before 1970; give milliseconds since 1970, or None for "
        "now, and keep an earlier time in the value or in a header"
    )
