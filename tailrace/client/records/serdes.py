"""Serializers and deserializers: the user's functions on keys and values, and their failures.

Invariants:
- An exception of one of these functions is raised as InvalidRecordError that names the function.
- A failure affects only the record that the function was called for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import iscoroutine
from typing import Any

from tailrace.core.errors import InvalidRecordError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition

Function = Callable[[Any], Any]


def serialized(part: str, serializer: Function | None, given: Any) -> Any:
    """Serialize a key or value; `part` is "key" or "value". None stays None.

    Raises InvalidRecordError.
    """
    if serializer is None or given is None:
        return given
    try:
        return serializer(given)
    except Exception as error:
        raise InvalidRecordError(
            f"{part}_serializer failed: {type(error).__name__}: {error}"
        ) from error


def deserialized(
    records: Sequence[Record],
    key_deserializer: Function | None,
    value_deserializer: Function | None,
) -> tuple[list[Record], Exception | None]:
    """Deserialize records up to the first failure. Returns the records and that failure.

    None stays None.
    """
    result: list[Record] = []
    try:
        for record in records:
            key, value = record.key, record.value
            if key is not None and key_deserializer is not None:
                key = key_deserializer(key)
            if value is not None and value_deserializer is not None:
                value = value_deserializer(value)
            result.append(record._replace(key=key, value=value))
        if result and (iscoroutine(result[-1].value) or iscoroutine(result[-1].key)):
            _refuse_coroutines(result)
    except Exception as error:
        return result, error
    return result, None


def _refuse_coroutines(result: list[Record]) -> None:
    """Take back the records from the first coroutine on. Raises TypeError."""
    first = len(result)
    for place in reversed(range(len(result))):
        parts = [part for part in (result[place].key, result[place].value) if iscoroutine(part)]
        for part in parts:
            part.close()
        first = place if parts else first
    del result[first:]
    raise TypeError("it returned a coroutine, which is not awaited; give a plain function")


def failure_at(record: Record, error: Exception) -> InvalidRecordError:
    """The error that a consumer raises for the record that a deserializer failed on."""
    refusal = InvalidRecordError(
        f"a deserializer failed at offset {record.offset} of {record.topic}-{record.partition}: "
        f"{type(error).__name__}: {error}; "
        f"seek to offset {record.offset + 1} to skip the record"
    )
    refusal.key = TopicPartition(record.topic, record.partition)
    refusal.first_offset, refusal.next_offset = record.offset, record.offset + 1
    return refusal
