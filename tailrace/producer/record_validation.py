"""Validates and normalises the arguments of `send`, and counts the bytes of a record.

Owner: pure.
Invariants:
- An accepted record can be encoded. The exception is a row whose values do not fit their columns,
  which only the encoder finds.
- A refused record affects no other.
- An accepted record is the producer's own: no change that the program makes afterwards reaches it.
"""

from __future__ import annotations

from copy import deepcopy
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

from tailrace.client.topics.topic_metadata import TopicInfo
from tailrace.core.errors import InvalidRecordError, SchemaMismatchError
from tailrace.core.records import Headers, to_timestamp_us
from tailrace.core.schedule.delays import due_time_us
from tailrace.core.schedule.recurrence import Recurrence, RecurrenceError
from tailrace.core.validation import (
    before_1970_error,
    is_coroutine_function,
    not_awaited,
)

HEADER_OVERHEAD_BYTES = 16
_UNCHANGING = frozenset(
    {type(None), bool, int, float, str, bytes, datetime, date, time, timedelta, Decimal}
)
"""Types of cells that cannot be changed."""
_UNCHANGING_KINDS = tuple(_UNCHANGING)


class Delay(NamedTuple):
    """The delivery time of a record, as given to `send`."""

    at: datetime | None
    after: timedelta | None
    repeat: Recurrence | None

    def first_occurrence_us(self, now_us: int) -> int:
        """The first delivery of a recurring record, in microseconds since 1970: `at` or `after` if
        given, else the first occurrence after `now_us`. Raises InvalidRecordError.
        """
        repeat: Any = self.repeat
        if not isinstance(repeat, Recurrence):
            raise InvalidRecordError(
                f"repeat is of type {type(repeat).__name__}; it must be a tailrace.Recurrence"
            )
        try:
            first_us = repeat.checked().after(now_us)
        except RecurrenceError as error:
            raise InvalidRecordError(str(error)) from None
        if self.at is not None or self.after is not None:
            first_us = due_time_us(self.at, self.after, now_us)
        if first_us is None:
            raise InvalidRecordError("repeat has no occurrence in the future; give a later end")
        return due_time_us(
            datetime.fromtimestamp(0, UTC) + timedelta(microseconds=first_us), None, now_us
        )


def lacks_key(info: TopicInfo, key: object, value: object) -> bool:
    """True if the topic is compacted and the record has no key."""
    if not info.compaction_key:
        return False
    if info.typed:
        return isinstance(value, dict) and value.get(info.compaction_key) is None
    return key is None


def timed_row(info: TopicInfo, value: object, stamp_us: int) -> object:
    """A row of a typed topic with the time that its `send` was given, in a column `timestamp` that
    has no value. Any other value is returned as it is.
    """
    if not isinstance(value, dict) or value.get("timestamp") is not None:
        return value
    from tailrace.format.schema import TIMESTAMP_TYPE

    schema = info.schema
    index = schema.get_field_index("timestamp")
    if index < 0 or schema.field(index).type != TIMESTAMP_TYPE:
        return value
    return {**value, "timestamp": datetime.fromtimestamp(0, UTC) + timedelta(microseconds=stamp_us)}


def no_key_error(info: TopicInfo, count: int = 1) -> InvalidRecordError:
    """The error of records without a key."""
    records = "a record has" if count == 1 else f"{count} rows have"
    return InvalidRecordError(
        f"topic {info.name!r} is compacted and {records} no key: give each one a "
        + (f"value in column {info.compaction_key!r}" if info.typed else "key")
    )


def bytes_of(part: str, value: object) -> bytes:
    """A key or value as bytes, text as UTF-8. `part` names it in errors. Raises
    InvalidRecordError.
    """
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRecordError(
                f"{part} is text that is no UTF-8 ({error.reason} at character {error.start}); "
                "pass bytes"
            ) from None
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    raise InvalidRecordError(
        f"{part} is of type {type(value).__name__}; on this topic it must be bytes or text or "
        f"have a {part}_serializer"
    )


def checked_row(value: object, info: TopicInfo) -> tuple[dict[str, Any], int]:
    """A copy of a typed topic's row, with the columns of its newest schema, and its approximate
    bytes in a batch. A row of an earlier version is converted.

    Raises InvalidRecordError, and SchemaMismatchError for an unknown column.
    """
    if not isinstance(value, dict):
        raise InvalidRecordError(
            f"value is of type {type(value).__name__}; on a typed topic it must be a dict of "
            "column -> value"
        )
    for known in (info.topic, info):  # an altered delay log is known before its topic
        if not info.columns.issuperset(value) and len(known.schema_ids) > 1:
            older = known.history.row_of(value)
            value = value if older is None else older
    if not info.columns.issuperset(value):
        unknown = ", ".join(repr(name) for name in value if name not in info.columns)
        raise SchemaMismatchError(
            f"the row has {unknown[:200]}, which topic {info.delay_of or info.name!r} has not; "
            f"its columns are {', '.join(sorted(info.columns))[:300]}"
        )
    row, size = dict(value), 16 * len(value)
    for name, cell in row.items():
        kind = type(cell)
        if kind is str or kind is bytes:
            size += len(cell)
        elif kind in _UNCHANGING:
            size += 8
        else:
            row[name] = cell = own_cell(cell)
            size += len(cell) if isinstance(cell, (bytes, str, list, tuple)) else 8
    return row, size


def own_cell(cell: Any) -> Any:
    """A cell of a row that no change of the program's reaches: the same one, or a copy."""
    if isinstance(cell, _UNCHANGING_KINDS):  # of a class derived from one of them
        return cell
    if isinstance(cell, list):
        plain = _UNCHANGING.issuperset(map(type, cell))
        return list(cell) if plain else [own_cell(each) for each in cell]
    if isinstance(cell, tuple):
        plain = _UNCHANGING.issuperset(map(type, cell))
        return cell if plain else tuple(own_cell(each) for each in cell)
    if isinstance(cell, dict):
        return {name: own_cell(each) for name, each in cell.items()}
    if isinstance(cell, bytearray):
        return bytes(cell)
    if isinstance(cell, memoryview):
        return bytes(cell) if cell.format in ("B", "b", "c") else cell.tolist()
    try:
        return deepcopy(cell)
    except Exception:  # an object that cannot be copied; the encoder reads it, or refuses it
        return cell


def checked_headers(headers: object) -> tuple[Headers, int]:
    """The headers as (str, bytes) pairs, and their bytes in a batch. Raises InvalidRecordError."""
    checked = []
    size = 0
    try:
        for name, value in headers:  # type: ignore[attr-defined]
            if not isinstance(name, str) or not isinstance(
                value, (bytes, bytearray, memoryview, type(None))
            ):
                raise InvalidRecordError(
                    f"header {name!r} is a pair of {type(name).__name__} and "
                    f"{type(value).__name__}; it must be (str, bytes)"
                )
            if not name.isascii():
                bytes_of(f"the name of header {name!r}", name)
            checked.append((name, None if value is None else bytes(value)))
            size += len(name) + len(value or b"") + HEADER_OVERHEAD_BYTES
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRecordError):
            raise
        raise InvalidRecordError(
            f"headers is of type {type(headers).__name__}; it must be a list of (str, bytes) pairs"
        ) from None
    return checked, size  # type: ignore[return-value]


def check_callback(on_delivery: object) -> None:
    """Raise InvalidRecordError unless it is a function that can be called back."""
    if not callable(on_delivery):
        raise InvalidRecordError(
            f"on_delivery is {on_delivery!r:.100}; it must be a function of (metadata, error)"
        )
    if is_coroutine_function(on_delivery):
        raise InvalidRecordError(not_awaited("on_delivery", on_delivery))


def refuse_headers(info: TopicInfo, on_delivery: object) -> None:
    """Raise InvalidRecordError: rows of a typed topic have no headers, and would lose them. A trace
    context alone is left out.
    """
    if getattr(on_delivery, "has_headers", True):
        raise InvalidRecordError(
            f"topic {info.delay_of or info.name!r} has a schema, and its rows have no headers: put "
            "what they say into columns of the row"
        )


def timestamp_us_of(value: datetime | int) -> int:
    """A record's timestamp in microseconds since 1970, from a datetime or int milliseconds. Raises
    InvalidRecordError, also before 1970: Kafka's clients refuse it, and read -1 as none.
    """
    try:
        stamp_us = to_timestamp_us(value)
    except (TypeError, ValueError) as error:
        raise InvalidRecordError(str(error)) from None
    if stamp_us < 0:
        raise before_1970_error(value if isinstance(value, datetime) else f"{value} ms")
    return stamp_us
