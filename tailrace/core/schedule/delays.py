"""Delayed delivery: ticks, delay ids, delay levels and due times, shared by all processes.

A topic with `delay.enabled` has a second log, its delay log (`orders@delay`), with as many
partitions. A delayed record is appended there, in the topic's schema with three more columns (see
`tailrace.format.schema.delay_schema`). The scheduler moves it to the same partition of the topic
when it is due.

Time is counted in ticks of a millisecond since 1970. A due time is rounded up to a tick, so no
record is delivered early.

Invariants:
- All functions are pure.
- `parse_delay_id(delay_id(...))` returns the arguments.
- Any other text raises InvalidRequestError.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from tailrace.core.errors import InvalidRecordError, InvalidRequestError, InvalidSettingError
from tailrace.core.units import duration_ms

TICK_US = 1_000
HORIZON_DAYS = 20 * 366
HORIZON_US = HORIZON_DAYS * 86_400_000_000
"""The longest delay of a record."""
TICK_BITS = 44
"""An ordinal is (clock epoch << TICK_BITS) | tick: it goes on when the clock is set back."""
TICK_MASK = (1 << TICK_BITS) - 1
NONE_DELIVERED = (-1, -1)
"""(tick, offset) in the mark that begins a clock epoch, when the epoch before delivered nothing."""
DUE_TICK_MAX = TICK_MASK >> 1
DELAY_SUFFIX = "@delay"
"""Suffix of a delay log's name. '@' is not allowed in users' topic names."""
DUE_COLUMN, ORIGIN_COLUMN, REPEAT_COLUMN = "@due_us", "@origin", "@repeat"
DELAY_COLUMNS = (DUE_COLUMN, ORIGIN_COLUMN, REPEAT_COLUMN)
_ID = struct.Struct("<16siqq")
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class DelayKey(NamedTuple):
    """A row of a delay log, as encoded in a delay id."""

    topic_id: bytes
    """The topic id of the delay log."""
    partition: int
    offset: int
    due_us: int


def delay_log_name(topic: str) -> str:
    return topic + DELAY_SUFFIX


def tick_of(due_us: int) -> int:
    """The first tick at or after a due time, the earliest one that delivers its record."""
    return -(-due_us // TICK_US)


def delay_id(topic_id: bytes, partition: int, offset: int, due_us: int) -> str:
    """Return 48 characters by which any process can cancel or reschedule a delayed record."""
    return base64.urlsafe_b64encode(_ID.pack(topic_id, partition, offset, due_us)).decode("ascii")


def parse_delay_id(text: object) -> DelayKey:
    """Decode a delay id. Raises InvalidRequestError."""
    try:
        raw = base64.b64decode(text, altchars=b"-_", validate=True)  # type: ignore[arg-type]
        if len(raw) != _ID.size:
            raise ValueError
        return DelayKey(*_ID.unpack(raw))
    except (binascii.Error, TypeError, ValueError):
        shown = str(text)
        raise InvalidRequestError(
            f"{shown[:60]!r} is not a delay_id; pass the delay_id of the record's metadata that "
            "send() returned"
        ) from None


class DelayIds(Sequence[str]):
    """The delay ids of a frame's rows, computed on access."""

    def __init__(self, topic_id: bytes, partition: int, base_offset: int, dues_us: Any) -> None:
        self._topic_id, self._partition, self._base_offset, self._dues_us = (
            topic_id,
            partition,
            base_offset,
            dues_us,
        )

    def __len__(self) -> int:
        return len(self._dues_us)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if row < 0:
            row += len(self)
        return delay_id(
            self._topic_id, self._partition, self._base_offset + row, int(self._dues_us[row])
        )


def parse_levels(text: str) -> tuple[int, ...]:
    """Parse `delay.levels` ("5s 10s 1m 1h") into microseconds, ascending.

    Empty: any delay is allowed. Raises InvalidSettingError.
    """
    levels = []
    for word in text.replace(",", " ").split():
        level_ms = duration_ms(word)
        if not level_ms:
            raise InvalidSettingError(
                f"delay.levels has {word!r}; write levels as 500ms, 5s, 1h30m or 1d, separated by "
                "spaces"
            )
        levels.append(level_ms * TICK_US)
    if levels != sorted(set(levels)) or (levels and levels[-1] > HORIZON_US):
        raise InvalidSettingError(
            f"delay.levels is {text!r}; levels must ascend, and the last one be at most "
            f"{HORIZON_DAYS} days"
        )
    return tuple(levels)


def due_time_us(deliver_at: object, deliver_after: object, now_us: int, levels: str = "") -> int:
    """The due time of a record, in microseconds since 1970.

    With `levels`, the delay is rounded up to a level. Raises InvalidRecordError.
    """
    if deliver_at is not None and deliver_after is not None:
        raise InvalidRecordError(
            "deliver_at and deliver_after are both given; a record takes only one of them"
        )
    if deliver_at is not None:
        due_us = moment_us("deliver_at", deliver_at)
    else:
        if not isinstance(deliver_after, dt.timedelta):
            raise InvalidRecordError(
                f"deliver_after is of type {type(deliver_after).__name__}; it must be a timedelta"
            )
        after_us = (
            deliver_after.days * 86_400 + deliver_after.seconds
        ) * 1_000_000 + deliver_after.microseconds
        if after_us < 0:
            raise InvalidRecordError(
                f"deliver_after is {deliver_after}; a delay cannot be negative"
            )
        due_us = now_us + after_us
    if levels:
        due_us = now_us + rounded_to_level(due_us - now_us, parse_levels(levels))
    if due_us - now_us > HORIZON_US:
        raise InvalidRecordError(
            f"the record would be due in more than {HORIZON_DAYS} days, the longest delay; use an "
            "earlier deliver_at or a shorter deliver_after"
        )
    return max(0, due_us)


def moment_us(name: str, value: object) -> int:
    """A datetime with a time zone, in microseconds since 1970.

    `name` is the argument's name for the message. Raises InvalidRecordError.
    """
    if not isinstance(value, dt.datetime):
        raise InvalidRecordError(
            f"{name} is of type {type(value).__name__}; it must be a datetime with a time zone"
        )
    if value.tzinfo is None:
        raise InvalidRecordError(
            f"{name} has no time zone; write datetime(..., tzinfo=timezone.utc)"
        )
    since = value - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def rounded_to_level(after_us: int, levels: tuple[int, ...]) -> int:
    """The smallest level that is not below the delay; 0 for a delay of 0 or less.

    Raises InvalidRecordError for a delay beyond the last level.
    """
    if after_us <= 0:
        return 0
    for level in levels:
        if after_us <= level:
            return level
    raise InvalidRecordError(
        f"the delay of {after_us / 1e6:g} s is longer than the topic's last level of "
        f"{levels[-1] / 1e6:g} s; use a shorter delay, or raise the topic's delay.levels"
    )
