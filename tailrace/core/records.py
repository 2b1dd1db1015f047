"""What users hold: records, metadata, batches, partitions. Plain values; nothing here knows Arrow or the wire."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tailrace.errors import InvalidRequestError

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

TIMESTAMP_MAX_MS = (2**63 - 1) // 1000
CREATE_TIME = 0
LOG_APPEND_TIME = 1
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


class TopicPartition(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


_new_tuple = tuple.__new__


def _without_offset(_cls: type[TopicPartition], topic: str, partition: int, *more: Any, offset: Any = None) -> TopicPartition:
    """A TopicPartition. Raises InvalidRequestError for confluent-kafka's, which holds an offset."""
    if more or offset is not None:
        shown = f"TopicPartition({topic!r:.100}, {partition!r:.100})"
        at = f"{more[0] if more else offset!r:.100}"
        raise InvalidRequestError(
            f"a TopicPartition holds no offset: write seek({shown}, {at}) to read from there, or commit({{{shown}: {at}}})"
        )
    return _new_tuple(_cls, (topic, partition))


_without_offset.__name__ = _without_offset.__qualname__ = "TopicPartition"
TopicPartition.__new__ = _without_offset  # type: ignore[method-assign,assignment]  # a NamedTuple's cannot be written in its class


class Record(NamedTuple):
    """One record as read. On a typed topic `value` is the row, a dict of column -> value, `key` is None, and the timestamp that of its
    column `timestamp` (a timestamp[us, UTC]), else the largest of the batch."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since 1970 UTC, as in Kafka's clients."""
    timestamp_type: int
    """0: the producer's clock (CreateTime), 1: the appliance's when it appended (LogAppendTime)."""
    key: Any
    """Bytes or None, or what `key_deserializer` made of them; `value` alike."""
    value: Any
    headers: list[tuple[str, bytes]]
    timestamp_us: int
    """The same time in full precision."""

    @property
    def datetime(self) -> dt.datetime:
        """The timestamp as an aware UTC datetime."""
        return _EPOCH + dt.timedelta(microseconds=self.timestamp_us)


class RecordMetadata(NamedTuple):
    """Where a record went. `offset` is None with acks=0, and of a delayed record; `timestamp` in milliseconds."""

    topic: str
    partition: int
    offset: int | None
    timestamp: int
    delay_id: str | None = None
    """Of a delayed record: what it is cancelled or rescheduled by."""


class BatchMetadata(NamedTuple):
    """Where a batch of `send_arrow` went: offsets `base_offset` to `base_offset + record_count - 1` (None with acks=0)."""

    topic: str
    partition: int
    base_offset: int | None
    record_count: int
    delay_ids: Sequence[str] = ()
    """Of delayed rows: what each is cancelled or rescheduled by."""


class OffsetAndMetadata(int):
    """A committed offset, an int, with what was committed beside it. It equals any int of its value; two of these are equal when all of it is."""

    metadata: str
    """Any text; empty: none."""
    leader_epoch: int
    """Of the record before the offset; -1: not known. A reader that begins here is told when a crash has cut the log below it."""

    def __new__(cls, offset: int, metadata: str | None = "", leader_epoch: int | None = -1) -> Self:
        self = super().__new__(cls, offset)
        self.metadata = metadata or ""
        self.leader_epoch = -1 if leader_epoch is None else leader_epoch
        return self

    @property
    def offset(self) -> int:
        """The offset of the next record to be read."""
        return int(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OffsetAndMetadata):
            return (int(self), self.metadata, self.leader_epoch) == (int(other), other.metadata, other.leader_epoch)
        return int.__eq__(self, other) if isinstance(other, int) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __reduce__(self) -> tuple[type[OffsetAndMetadata], tuple[int, str, int]]:
        return OffsetAndMetadata, (int(self), self.metadata, self.leader_epoch)

    def __repr__(self) -> str:
        return f"OffsetAndMetadata(offset={int(self)}, metadata={self.metadata!r}, leader_epoch={self.leader_epoch})"

    __str__ = __repr__


class ConsumerGroupMetadata(NamedTuple):
    """Who a consumer is in its group now. `generation_id`: its member epoch, -1 while it is no member."""

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None


class OffsetAndTimestamp(NamedTuple):
    """An answer of `offsets_for_times`: the first record at or after the time asked for; `timestamp` in milliseconds."""

    offset: int
    timestamp: int


class TopicBatch:
    """A batch as read, columns untouched: `.batch` is a pyarrow.RecordBatch with the topic's schema."""

    __slots__ = ("_offsets", "base_offset", "batch", "partition", "timestamp_type", "timestamp_us", "topic")

    def __init__(
        self,
        topic: str,
        partition: int,
        base_offset: int,
        batch: pa.RecordBatch,
        offsets: pa.Array | None,
        timestamp_us: int,
        timestamp_type: int,
    ) -> None:
        """`offsets`: of each row, int64; None: they follow each other."""
        self.topic = topic
        self.partition = partition
        self.base_offset = base_offset
        """The offset of the first row here."""
        self.batch = batch
        self._offsets = offsets
        self.timestamp_us = timestamp_us
        """The largest timestamp of the batch as it was stored, microseconds."""
        self.timestamp_type = timestamp_type

    @property
    def offsets(self) -> pa.Array:
        """The offset of each row, int64; trimmed or compacted rows leave gaps."""
        if self._offsets is None:  # made when it is asked for: it is as large as a column
            from tailrace.topic_batches import consecutive

            self._offsets = consecutive(self.base_offset, self.batch.num_rows)
        return self._offsets

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Arrow's PyCapsule interface: duckdb, polars, pandas and others take a TopicBatch as it is."""
        capsules: tuple[object, object] = self.batch.__arrow_c_array__(requested_schema)
        return capsules

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a pandas frame (pandas must be installed)."""
        return self.batch.to_pandas()

    def to_polars(self) -> pl.DataFrame:
        """The rows as a polars frame, without a copy where polars can (polars must be installed)."""
        import polars

        return polars.DataFrame(polars.from_arrow(self.batch))

    def __repr__(self) -> str:
        return f"TopicBatch(topic={self.topic!r}, partition={self.partition}, base_offset={self.base_offset}, rows={len(self)})"


def to_timestamp_us(value: Any) -> int:
    """A timestamp as users give it (aware or naive-UTC datetime, or int milliseconds) in microseconds. Raises TypeError, and ValueError for what 64 bits
    do not hold (some 292,000 years before and after 1970).
    """
    if isinstance(value, dt.datetime):
        aware = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
        return int((aware - _EPOCH) // dt.timedelta(microseconds=1))
    if isinstance(value, int) and not isinstance(value, bool):
        if not -TIMESTAMP_MAX_MS <= value <= TIMESTAMP_MAX_MS:
            raise ValueError(f"a timestamp of {value} ms is out of range; is it in microseconds or nanoseconds? It takes milliseconds")
        return int(value) * 1000
    raise TypeError(f"a timestamp is a datetime or int milliseconds, not {type(value).__name__}")
