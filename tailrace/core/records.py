"""Records and metadata as users see them: plain values, independent of Arrow and the protocol."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

TIMESTAMP_MAX_MS = (2**63 - 1) // 1000
CREATE_TIME = 0
LOG_APPEND_TIME = 1
Headers = Sequence[tuple[str, bytes]] | None
"""(name, value) of each header of a record, in order."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class TopicName(str):
    """A topic's name that knows which topic of that name it is: one that is deleted and made again
    is another. Equal to the plain text.
    """

    __slots__ = ("created_us", "topic_id")
    topic_id: bytes
    created_us: int
    """Creation time of the topic, microseconds since 1970; 0: not known."""

    def __new__(cls, name: str, topic_id: bytes, created_us: int = 0) -> Self:
        self = super().__new__(cls, name)
        self.topic_id = topic_id
        self.created_us = created_us
        return self

    def __reduce__(self) -> tuple[type[TopicName], tuple[str, bytes, int]]:
        return TopicName, (str(self), self.topic_id, self.created_us)


class Record(NamedTuple):
    """A consumed record.

    In a typed topic, `value` is the row (a dict of column -> value) and `key` is None. Its
    timestamp is that of the column `timestamp` (timestamp[us, UTC]), else the largest timestamp of
    the batch.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since 1970 UTC, as in Kafka's clients."""
    timestamp_type: int
    """0: the producer's time (CreateTime). 1: the appliance's time of the append (LogAppendTime).
    """
    key: Any
    """Bytes or None, or the result of `key_deserializer`. The same holds for `value`."""
    value: Any
    headers: list[tuple[str, bytes]]
    timestamp_us: int
    """The timestamp in microseconds."""

    @property
    def topic_id(self) -> bytes:
        """The 16 bytes of the topic's id; empty for a record that no consumer has read."""
        return getattr(self.topic, "topic_id", b"")

    @property
    def datetime(self) -> dt.datetime:
        """The timestamp as an aware UTC datetime."""
        return _EPOCH + dt.timedelta(microseconds=self.timestamp_us)


class RecordMetadata(NamedTuple):
    """The partition and offset of an acknowledged record.

    `offset` is None with acks=0 and for a delayed record. `timestamp` is in milliseconds.
    """

    topic: str
    partition: int
    offset: int | None
    timestamp: int
    delay_id: str | None = None
    """The id by which a delayed record is cancelled or rescheduled."""


class BatchMetadata(NamedTuple):
    """The partition and offsets of an acknowledged batch of `send_arrow`.

    The offsets are `base_offset` to `base_offset + record_count - 1`. `base_offset` is None with
    acks=0.
    """

    topic: str
    partition: int
    base_offset: int | None
    record_count: int
    delay_ids: Sequence[str] = ()
    """The ids by which delayed rows are cancelled or rescheduled."""


class OffsetAndMetadata(int):
    """A committed offset (an int) with its metadata and leader epoch.

    It equals any int of its value. Two of these are equal if all three parts are equal.
    """

    metadata: str
    """Any text. Empty means none."""
    leader_epoch: int
    """The leader epoch of the record before the offset; -1: unknown. With it, a consumer that
    starts here detects that a crash has cut the log below the offset.
    """

    def __new__(cls, offset: int, metadata: str | None = "", leader_epoch: int | None = -1) -> Self:
        self = super().__new__(cls, offset)
        self.metadata = metadata or ""
        self.leader_epoch = -1 if leader_epoch is None else leader_epoch
        return self

    @property
    def offset(self) -> int:
        """The offset of the next record to read."""
        return int(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OffsetAndMetadata):
            return (int(self), self.metadata, self.leader_epoch) == (
                int(other),
                other.metadata,
                other.leader_epoch,
            )
        return int.__eq__(self, other) if isinstance(other, int) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> tuple[type[OffsetAndMetadata], tuple[int, str, int]]:
        return OffsetAndMetadata, (int(self), self.metadata, self.leader_epoch)

    def __repr__(self) -> str:
        return (
            f"OffsetAndMetadata(offset={int(self)}, metadata={self.metadata!r}, "
            f"leader_epoch={self.leader_epoch})"
        )

    __str__ = __repr__


class ConsumerGroupMetadata(NamedTuple):
    """A consumer's identity in its group. `generation_id` is its member epoch, -1 if it is no
    member.
    """

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None
    is_subscribed: bool = False
    """True if its partitions come from the group, so that offsets are a member's only."""


class OffsetAndTimestamp(NamedTuple):
    """A result of `offsets_for_times`: the first record at or after the requested time.

    `timestamp` is in milliseconds.
    """

    offset: int
    timestamp: int


def to_timestamp_us(value: Any) -> int:
    """Convert a datetime (naive means UTC) or int milliseconds to microseconds since 1970.

    Raises TypeError for other types, ValueError for a number outside 64 bits of microseconds.
    """
    if isinstance(value, dt.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
        return int((aware - _EPOCH) // dt.timedelta(microseconds=1))
    if isinstance(value, int) and not isinstance(value, bool):
        if not -TIMESTAMP_MAX_MS <= value <= TIMESTAMP_MAX_MS:
            raise ValueError(
                f"a timestamp of {value} ms is out of range; give milliseconds, not microseconds "
                "or nanoseconds"
            )
        return int(value) * 1000
    raise TypeError(
        f"a timestamp is of type {type(value).__name__}; give a datetime or int milliseconds"
    )
