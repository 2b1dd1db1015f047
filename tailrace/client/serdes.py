"""A user's own functions on keys and values: what they make of a record that is sent, and of those that are read; and what their failures cost.

Invariants: what a function raises is met as InvalidRecordError with the function named; it costs the record that it was called for, and no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tailrace.errors import InvalidRecordError
from tailrace.records import Record, TopicPartition

Function = Callable[[Any], Any]


def serialized(part: str, serializer: Function | None, given: Any) -> Any:
    """What `serializer` makes of a key or value (`part` says which); None stays None. Raises InvalidRecordError."""
    if serializer is None or given is None:
        return given
    try:
        return serializer(given)
    except Exception as error:
        raise InvalidRecordError(f"{part}_serializer failed: {type(error).__name__}: {error}") from error


def deserialized(
    records: Sequence[Record], key_deserializer: Function | None, value_deserializer: Function | None
) -> tuple[list[Record], Exception | None]:
    """What the deserializers make of records, up to the first that one of them fails on; and that failure. None stays None."""
    result: list[Record] = []
    try:
        for record in records:
            key, value = record.key, record.value
            if key is not None and key_deserializer is not None:
                key = key_deserializer(key)
            if value is not None and value_deserializer is not None:
                value = value_deserializer(value)
            result.append(record._replace(key=key, value=value))
    except Exception as error:
        return result, error
    return result, None


def failure_at(record: Record, error: Exception) -> InvalidRecordError:
    """What a consumer raises for the record that a deserializer failed on."""
    refusal = InvalidRecordError(
        f"a deserializer failed at offset {record.offset} of {record.topic}-{record.partition}: {type(error).__name__}: {error}; "
        "seek to the offset behind it to go on without it"
    )
    refusal.key = TopicPartition(record.topic, record.partition)
    refusal.first_offset, refusal.next_offset = record.offset, record.offset + 1
    return refusal
