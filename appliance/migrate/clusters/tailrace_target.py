"""Writes records into topics of the appliance, each once and at a known offset.

Every batch requires the end of its log (`tailrace.producer.positioned`). Records with consecutive
offsets are written plainly; the log's end then says where the copy goes on. Others are written in
transactions, together with the entries of the journal that map their offsets.

Owner: one session of one migration. The transactional id of the migration fences the one before.
Crash: plain records that are in the log count as copied, open transactions are aborted by the next
session. Batches of a dead session that come late require an end that the log does not have.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from appliance.migrate.errors import InterruptedSessionError, MigrationError, TakenOverError
from appliance.migrate.journal import SETTINGS, Entry, encoded, journal_topic
from appliance.migrate.rows import LastRow, Rows
from shm.crash_points import crash_point
from tailrace.admin.admin import Admin
from tailrace.client.topics.list_offsets import check_offsets_answer
from tailrace.client.topics.new_topic import NewTopic
from tailrace.consumer.consumer import Consumer
from tailrace.core.errors import (
    InvalidRecordError,
    NotAuthorizedError,
    NotReachableError,
    ProducerFencedError,
    RecordTooLargeError,
    TailraceError,
    TopicExistsError,
)
from tailrace.core.topic_partition import TopicPartition
from tailrace.format.schema import DEFAULT_SCHEMA, HEADER_TYPE, TIMESTAMP_TYPE
from tailrace.producer.batches.producer_batch import BATCH_OVERHEAD_BYTES
from tailrace.producer.positioned import PositionedProducer

T = TypeVar("T")
BUFFER_BYTES = 64 << 20
TRANSACTION_TIMEOUT_MS = 120_000
CLOSE_TIMEOUT_S = 0.0
RECORD_EXTRA_BYTES = 256
ROWS_AT_S = 20.0
POLL_MS = 50
"""The marker of a transaction behind the last record is no record that a poll returns."""
WAITING_MAX = 256
"""Most frames without an outcome."""


class TailraceTarget:
    """The appliance, as the target of a session."""

    writes_plainly = True

    def __init__(self, bootstrap: str, name: str, connect_timeout_ms: int) -> None:
        """Raises NotReachableError."""
        self.admin = Admin(bootstrap, connect_timeout_ms=connect_timeout_ms)
        self._bootstrap = bootstrap
        self._name = name
        self._journal = TopicPartition(journal_topic(name), 0)
        self._plain: PositionedProducer | None = None
        self._writer: PositionedProducer | None = None
        self._waiting: deque[tuple[Rows, Any]] = deque()
        self._in_transaction: dict[TopicPartition, int] = {}
        """Partition -> the target's offset of its first record in the open transaction."""
        self._sent: dict[TopicPartition, int] = {}
        self._is_begun = False
        self._limits: dict[str, int] = {}

    # ---- a session -------------------------------------------------------------------------------

    def open(self) -> list[bytes | None]:
        """Fence the session before, end what it had open, and return the journal's values. Raises
        InterruptedSessionError.
        """
        return self._guarded(self._open)

    def _open(self) -> list[bytes | None]:
        try:
            self.admin.create_topics([NewTopic(self._journal.topic, 1, configs=dict(SETTINGS))])
        except TopicExistsError:
            pass
        self._writer = PositionedProducer(
            self._bootstrap,
            transactional_id=f"tailrace-migrate-{self._name}",
            transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
            client_id="tailrace-migrate",
            **_producer_options(),
        )
        self._writer.init_transactions()
        self._writer.set_position(self._journal, None)
        self._plain = PositionedProducer(
            self._bootstrap, client_id="tailrace-migrate", **_producer_options()
        )
        return self.read_journal()

    def read_journal(self) -> list[bytes | None]:
        """The values of the journal. Raises TailraceError."""
        return [record[1] for record in self._visible(self._journal, 0)]

    def peek(self) -> list[bytes | None]:
        """The values of the journal, empty without one; no run is fenced. Raises
        InterruptedSessionError.
        """
        if self._journal.topic not in self.topics():
            return []
        return list(self._guarded(self.read_journal))

    def _visible(
        self, partition: TopicPartition, start: int, count_max: int = 1 << 62
    ) -> list[tuple[int, bytes | None]]:
        """(offset, value) of committed records from `start` on."""
        found: list[tuple[int, bytes | None]] = []
        with Consumer(bootstrap=self._bootstrap, enable_auto_commit=False) as consumer:
            consumer.assign([partition])
            consumer.seek(partition, start)
            end = consumer.end_offsets([partition])[partition]
            while consumer.position(partition) < end and len(found) < count_max:
                found += [(record.offset, record.value) for record in consumer.poll(POLL_MS)]
        return found

    def last_rows(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, LastRow]:
        """The records at these offsets, of the partitions that have one there. Raises
        InterruptedSessionError.
        """
        return self._guarded(partial(self._rows_at, offsets))

    def _rows_at(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, LastRow]:
        found: dict[TopicPartition, LastRow] = {}
        if not offsets:
            return found
        with Consumer(bootstrap=self._bootstrap, enable_auto_commit=False) as consumer:
            consumer.assign(list(offsets))
            for partition, offset in offsets.items():
                consumer.seek(partition, offset)
            until_s = time.monotonic() + ROWS_AT_S
            while len(found) < len(offsets) and time.monotonic() < until_s:
                for record in consumer.poll(POLL_MS):
                    partition = TopicPartition(record.topic, record.partition)
                    if record.offset == offsets[partition]:
                        found[partition] = LastRow(record.timestamp, record.key, record.value)
                    consumer.pause(partition)
        return found

    def plain_count(self, partition: TopicPartition, start: int) -> int:
        """The number of records from `start` on that were written plainly. Raises
        InterruptedSessionError, MigrationError.
        """
        offsets = [offset for offset, _ in self._guarded(lambda: self._visible(partition, start))]
        if offsets != list(range(start, start + len(offsets))):
            raise MigrationError(
                f"{partition.topic}-{partition.partition} has records from offset {start} on that "
                "this migration did not write: let no other program write to it before the switch."
            )
        return len(offsets)

    def close(self) -> None:
        """Give the session up: what has no outcome is not waited for."""
        for producer in (self._plain, self._writer):
            if producer is not None:
                producer.close(timeout=CLOSE_TIMEOUT_S)
        self._plain = self._writer = None
        self._waiting.clear()
        self._in_transaction.clear()
        self._sent.clear()
        self._is_begun = False

    def end(self) -> None:
        """Close everything."""
        self.close()
        self.admin.close()

    # ---- topics ----------------------------------------------------------------------------------

    def topics(self) -> dict[str, int]:
        """Name -> number of partitions."""
        return self._guarded(self.admin.partition_counts)

    def refusal_of(self, name: str, partitions: int, configs: Mapping[str, str]) -> str:
        """The sentence that says why a topic cannot be created; "" if it can."""
        try:
            self.admin.create_topics(
                [NewTopic(name, partitions, configs=dict(configs))], validate_only=True
            )
        except (TopicExistsError, NotReachableError):
            return ""
        except TailraceError as error:
            return str(error)
        return ""

    def create(self, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        """Create a topic. Raises MigrationError."""
        try:
            self.admin.create_topics([NewTopic(name, partitions, configs=dict(configs))])
        except TopicExistsError:
            pass
        except TailraceError as error:
            raise MigrationError(f"topic {name} cannot be created: {error}") from None

    def add_partitions(self, name: str, partitions: int) -> None:
        """Let a topic have as many partitions. Raises MigrationError."""
        try:
            self.admin.create_partitions({name: partitions})
        except TailraceError as error:
            raise MigrationError(f"topic {name} does not get more partitions: {error}") from None

    def alter(self, name: str, configs: Mapping[str, str]) -> None:
        """Change settings of a topic. Raises TailraceError."""
        self.admin.alter_topics({name: dict(configs)})

    def ends(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The ends of logs. Raises InterruptedSessionError."""
        found = self._guarded(lambda: self.admin.offsets(dict.fromkeys(partitions, "latest")))
        for answer in found.values():
            self._guarded(partial(check_offsets_answer, answer))
        return {
            partition: max(answer["end"], answer.get("high_watermark", 0))
            for partition, answer in found.items()
        }

    # ---- records ---------------------------------------------------------------------------------

    def position_plain(self, positions: Mapping[TopicPartition, int]) -> None:
        """Write partitions plainly from these offsets on."""
        assert self._plain is not None
        for partition, offset in positions.items():
            self._guarded(partial(self._producer.set_position, partition, offset))

    @property
    def _producer(self) -> PositionedProducer:
        assert self._plain is not None
        return self._plain

    @property
    def _transactional(self) -> PositionedProducer:
        assert self._writer is not None
        return self._writer

    def write_plain(self, rows: Rows) -> None:
        """Write rows behind those before. Raises InterruptedSessionError."""
        future = self._guarded(
            lambda: self._producer.send_arrow(
                rows.partition.topic, frame_of(rows), partition=rows.partition.partition
            )
        )
        self._waiting.append((rows, future))
        self.settle(WAITING_MAX)

    def settle(self, waiting_max: int = 0) -> None:
        """Wait until at most so many frames have no outcome. Raises InterruptedSessionError."""
        if not waiting_max and self._waiting:
            self._guarded(self._producer.flush)
        while self._waiting and (len(self._waiting) > waiting_max or self._waiting[0][1].done()):
            _, future = self._waiting.popleft()
            error = future.exception()
            if error is not None:
                raise self._interrupted(error)

    def write(self, rows: Rows, target_end: int) -> None:
        """Write rows in the open transaction, which is begun. `target_end`: where the first record
        of the partition in this transaction belongs. Raises InterruptedSessionError.
        """
        writer, partition = self._transactional, rows.partition
        self._begin()
        if partition not in self._in_transaction:
            self._guarded(lambda: writer.set_position(partition, target_end))
            self._in_transaction[partition] = target_end
            self._sent[partition] = 0
        self._guarded(
            lambda: writer.send_arrow(
                partition.topic, frame_of(rows), partition=partition.partition
            )
        )
        self._sent[partition] += len(rows)

    def _begin(self) -> None:
        if not self._is_begun:
            self._guarded(self._transactional.begin_transaction)
            self._is_begun = True

    def commit(
        self,
        entries_of: Callable[[Mapping[TopicPartition, Sequence[Sequence[int]]]], Sequence[Entry]],
    ) -> dict[TopicPartition, int]:
        """Commit the open transaction with its entries. `entries_of` gets the offsets of its
        records, as [first, count] of each partition. Returns the ends of the partitions' logs.
        Raises InterruptedSessionError, TakenOverError.
        """
        writer = self._transactional
        self._begin()
        written = {
            partition: [[first, self._sent[partition]]]
            for partition, first in self._in_transaction.items()
        }
        crash_point("migrate.before_entries")
        for entry in entries_of(written):
            self._guarded(partial(writer.send, self._journal.topic, encoded(entry), partition=0))
        self._guarded(writer.flush)
        crash_point("migrate.before_commit")
        self._guarded(writer.commit_transaction)
        crash_point("migrate.after_commit")
        self._is_begun = False
        self._in_transaction.clear()
        # behind the records lies the marker of the transaction
        return {partition: first + count + 1 for partition, ((first, count),) in written.items()}

    def too_large(self, rows: Rows) -> tuple[int, int, int] | None:
        """(row, bytes, limit) of the first record that the topic does not take, or None."""
        limit = self._limits.get(rows.partition.topic)
        if limit is None:
            described = self._guarded(lambda: self.admin.topic_info(rows.partition.topic))
            limit = int(described[rows.partition.topic].settings["max.message.bytes"])
            limit = self._limits[rows.partition.topic] = (
                limit - BATCH_OVERHEAD_BYTES - RECORD_EXTRA_BYTES
            )
        if rows.byte_count <= limit and rows.headers is None:
            return None
        return rows.first_over(limit)

    def missing_key(self, rows: Rows) -> int | None:
        """The first row without a key in a compacted topic, or None."""
        if None not in rows.keys:
            return None
        described = self._guarded(lambda: self.admin.topic_info(rows.partition.topic))
        policy = described[rows.partition.topic].settings["cleanup.policy"]
        return list(rows.keys).index(None) if "compact" in policy else None

    # ---- groups ----------------------------------------------------------------------------------

    def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """Committed offsets."""
        found = self._guarded(lambda: self.admin.list_group_offsets(group))
        return {partition: int(offset) for partition, offset in found.items() if offset is not None}

    def set_group_offsets(
        self, group: str, offsets: Mapping[TopicPartition, tuple[int, str]]
    ) -> None:
        """Set committed offsets. Raises MigrationError with the reason."""
        from tailrace.core.records import OffsetAndMetadata

        try:
            self.admin.alter_group_offsets(
                group, {each: OffsetAndMetadata(*found) for each, found in offsets.items()}
            )
        except NotReachableError as error:
            raise InterruptedSessionError(str(error)) from None
        except TailraceError as error:
            raise MigrationError(str(error)) from None

    # ---- errors ----------------------------------------------------------------------------------

    def _guarded(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except TailraceError as error:
            raise self._interrupted(error) from error

    def _interrupted(self, error: TailraceError) -> Exception:
        if isinstance(error, ProducerFencedError):
            return TakenOverError(
                f"another `tailrace migrate` of the name {self._name} has begun; this one ends."
            )
        if isinstance(error, (RecordTooLargeError, InvalidRecordError, NotAuthorizedError)):
            return MigrationError(str(error))
        return InterruptedSessionError(str(error))


def _producer_options() -> dict[str, Any]:
    return {
        "acks": "all",
        "linger_ms": 5,
        "buffer_memory": BUFFER_BYTES,
        "max_request_size": 64 << 20,
        "max_block_ms": 120_000,
        "delivery_timeout_ms": 60_000,
    }


def frame_of(rows: Rows) -> pa.RecordBatch:
    """Rows as a frame of the default schema."""
    now_ms = time.time_ns() // 1_000_000
    stamps = rows.stamps_ms
    if min(stamps) < 0:
        stamps = [now_ms if stamp < 0 else stamp for stamp in stamps]
    milliseconds = pa.array(stamps, pa.int64())
    columns = [
        pc.multiply(milliseconds, 1_000).cast(TIMESTAMP_TYPE),
        pa.array(rows.keys, pa.binary()),
        pa.array(rows.values, pa.binary()),
    ]
    names = DEFAULT_SCHEMA.names[:3]
    if rows.headers is not None:
        columns.append(_header_column(rows.headers))
        names = DEFAULT_SCHEMA.names
    return pa.RecordBatch.from_arrays(columns, names)


def _header_column(headers: Sequence[Sequence[tuple[str, bytes | None]] | None]) -> pa.Array:
    """The lists of headers as a column; an empty list is a null. Built of flat columns: an object
    for each header would take most of the copy's time.
    """
    flat = [pair for some in headers if some for pair in some]
    pairs = pa.StructArray.from_arrays(
        [
            pa.array([name for name, _ in flat], pa.utf8()),
            pa.array([content for _, content in flat], pa.binary()),
        ],
        fields=list(HEADER_TYPE.value_type),
    )
    ends: list[int | None] = [None if not some else 0 for some in headers]
    at = 0
    for row, some in enumerate(headers):
        if some:
            ends[row] = at
            at += len(some)
    return pa.ListArray.from_arrays(pa.array([*ends, at], pa.int32()), pairs, type=HEADER_TYPE)
