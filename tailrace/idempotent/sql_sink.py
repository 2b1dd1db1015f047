"""Exactly-once effects in a SQL database: offsets are stored in the transaction of the effects.

    sink = SqlSink(sqlite3.connect("totals.db"), "billing")
    with tailrace.Consumer("orders", bootstrap=...) as consumer:
        sink.seek(consumer)
        while records := consumer.poll(timeout_ms=1000):
            with sink.transaction(records) as tx:
                for record in tx.records:
                    tx.cursor.execute("INSERT INTO sales VALUES (?, ?)", (record.key, record.value))

Method: Kafka's "storing offsets outside Kafka" (KafkaConsumer's documentation), with an optimistic
lock (`tailrace.idempotent.offset_table`).

Owner: a SqlSink and its connection belong to one thread. All sinks of the group share the rows.
Invariants:
- A row moves only forward, together with the effects of all records before it. `move` is the
  exception.
- No record is missed. A batch that begins after the stored offset is refused, unless this sink has
  led the consumer there. A record that an earlier transaction of this sink left out is refused.
- Records of a partition are applied in the order of the log.
- A recreated topic has another id, and thus other rows.
Crash: before the commit neither effects nor offsets are stored, after it both. The next `seek`
    finds out.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from tailrace.batch.topic_batch import TopicBatch
from tailrace.core.errors import InvalidRequestError, InvalidSettingError, OffsetOutOfRangeError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import by_partition, partition_list, whole
from tailrace.group.rebalance_listener import RebalanceListener
from tailrace.idempotent.batch_spans import Span, spans_of, without_applied
from tailrace.idempotent.dbapi import Database, identifier
from tailrace.idempotent.offset_table import OffsetsMovedError, OffsetTable

GAPS_MAX = 1_000

Batch = TypeVar("Batch", bound="Sequence[Record] | TopicBatch | Sequence[TopicBatch]")


class SqlTransaction(Generic[Batch]):
    """The value of a `with SqlSink.transaction(...)` block."""

    def __init__(self, connection: Any, cursor: Any, records: Batch, skipped: int) -> None:
        self.connection = connection
        """The connection of the transaction: the caller's, or the engine's (of SQLAlchemy)."""
        self.cursor = cursor
        """A cursor in it. With SQLAlchemy it is the connection."""
        self.records = records
        """The given batch, of the same kind, without the records applied before."""
        self.skipped = skipped
        """Number of records applied before."""


class SqlSink:
    """Moves a group's offsets and the caller's effects in one transaction. For one thread."""

    def __init__(
        self,
        connection: Any,
        group: str,
        *,
        table: str = "tailrace_offsets",
        paramstyle: str | None = None,
    ) -> None:
        """`connection`: of DB-API 2.0 without an open transaction, or an engine or connection of
        SQLAlchemy. `group`: name shared by the consumers that share the work. `table`: created if
        it is missing. `paramstyle`: for a driver whose module does not have it.

        Raises InvalidSettingError, and what the driver raises.
        """
        if not isinstance(group, str) or not 1 <= len(group) <= 249:
            raise InvalidSettingError(f"group is {group!r:.100}; it takes 1 to 249 characters")
        self._database = Database(connection, paramstyle)
        self._led_to: dict[TopicPartition, int] = {}
        """Position of the consumer that this sink led there. A gap after it is the log's own."""
        self._failed_at: dict[TopicPartition, int] = {}
        """First offset of the earliest batch that was rolled back and not applied since."""
        self._passed: dict[TopicPartition, deque[Span]] = {}
        """Gaps within and between committed batches, the last GAPS_MAX of each partition. A gap is
        the log's own, or records that were left out.
        """
        self._offsets = OffsetTable(self._database, identifier("table", table, 2), group)

    # ---- positions -------------------------------------------------------------------------------

    def positions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The offset of each partition's first record that is not applied. None: none is stored.
        Raises InvalidRequestError.
        """
        keys = partition_list(partitions)
        with self._database.transaction() as session:
            rows = self._offsets.rows(session, keys)
        return {key: self._offsets.position(key, rows.get(key)) for key in keys}

    def seek(
        self, consumer: Any, partitions: Sequence[TopicPartition] | None = None
    ) -> dict[TopicPartition, int]:
        """Seek a `tailrace.Consumer` to the first records that are not applied. Call it after
        `assign`, in `on_partitions_assigned`, and after OffsetsMovedError. `partitions`: None for
        all assigned ones. For a partition without a stored offset, the consumer's position is
        stored.

        Raises OffsetOutOfRangeError when a log ends before the stored offset, InvalidRequestError,
        and what the consumer and the driver raise.
        """
        if inspect.iscoroutinefunction(getattr(consumer, "seek", None)):
            raise InvalidRequestError(
                "this is an AsyncConsumer; write `await sink.seek_async(consumer)`"
            )
        steps, answer = self._seeking(consumer, partitions), None
        while True:
            try:
                answer = steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    async def seek_async(
        self, consumer: Any, partitions: Sequence[TopicPartition] | None = None
    ) -> dict[TopicPartition, int]:
        """`seek` for a `tailrace.aio.AsyncConsumer`. The SQL statements block the event loop."""
        steps, answer = self._seeking(consumer, partitions), None
        while True:
            try:
                answer = await steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _seeking(
        self, consumer: Any, partitions: Sequence[TopicPartition] | None
    ) -> Generator[Any, Any, dict[TopicPartition, int]]:
        """The steps of a seek. It yields what the consumer's methods return, and is sent the
        results.
        """
        keys: list[TopicPartition] = (
            (yield consumer.assignment()) if partitions is None else partition_list(partitions)
        )
        self._learn_ids(consumer, {key.topic for key in keys})
        found = {
            key: position for key, position in self.positions(keys).items() if position is not None
        }
        if found:
            ends = yield consumer.end_offsets(list(found))
            for key, position in found.items():
                if position > ends[key]:
                    raise OffsetOutOfRangeError(
                        f"records of {key.topic}-{key.partition} are applied up to offset "
                        f"{position}, and its log ends at {ends[key]}: it has lost "
                        "records in a crash. Look at both, then say where to go on with "
                        "move({TopicPartition(...): offset})"
                    )
        for key in keys:
            if key not in found:
                found[key] = self._begin_at(key, (yield consumer.position(key)))
            yield consumer.seek(key, found[key])
            self._led_to[key] = found[key]
            self._failed_at.pop(key, None)
        return {key: found[key] for key in keys}

    def move(self, positions: Mapping[TopicPartition, int]) -> None:
        """Set stored offsets, backwards too. Records from there on are applied (again). Raises
        InvalidRequestError.
        """
        requested = {
            key: whole("an offset", offset, 0)
            for key, offset in by_partition(
                "positions", positions, "{TopicPartition(topic, 0): 17}"
            ).items()
        }
        with self._database.transaction() as session:
            rows = self._offsets.rows(session, list(requested))
            for key, offset in sorted(requested.items()):
                if rows.get(key) is None or rows[key].next_offset != offset:
                    self._offsets.store(session, key, rows.get(key), offset)
        self._led_to = {key: offset for key, offset in self._led_to.items() if key not in requested}
        self._passed = {key: gaps for key, gaps in self._passed.items() if key not in requested}

    def listener(self, consumer: Any) -> RebalanceListener:
        """A listener that calls `seek` for each assigned partition, for
        `consumer.subscribe([...], listener=sink.listener(consumer))`. AsyncConsumer takes it too.
        """
        is_async = inspect.iscoroutinefunction(getattr(consumer, "seek", None))
        return _SinkListener(self, partial(self.seek_async if is_async else self.seek, consumer))

    def forget(self, partitions: Sequence[TopicPartition]) -> None:
        """Note that the consumer lost these partitions. The stored offsets stay."""
        for key in partition_list(partitions):
            self._led_to.pop(key, None)

    def _learn_ids(self, consumer: Any, topics: set[str]) -> None:
        """Note the ids of topics that a consumer is assigned. No record of a recreated topic was
        applied.
        """
        plain = getattr(consumer, "_consumer", consumer)  # of an AsyncConsumer
        for key, cursor in plain._fetch_loop.cursors.items():
            if key.topic in topics:
                self._learn_id(key.topic, cursor.info.topic_id.hex())

    def _learn_ids_of(self, keys: Iterable[TopicPartition]) -> None:
        """Note the ids of topics that a consumer has read."""
        for key in keys:
            topic_id = getattr(key.topic, "topic_id", b"").hex()
            if topic_id:
                self._learn_id(key.topic, topic_id)

    def _learn_id(self, topic: str, topic_id: str) -> None:
        topic_ids = self._offsets.topic_ids
        if topic_ids.get(topic) == topic_id:
            return
        if topic in topic_ids:  # all state is about the deleted topic
            for known in (self._led_to, self._failed_at, self._passed):
                for other in [one for one in known if one.topic == topic]:
                    del known[other]
        topic_ids[str(topic)] = topic_id

    def _begin_at(self, key: TopicPartition, position: int) -> int:
        """Store the first position of a partition. A consumer that is killed before its first
        commit could otherwise begin later the next time.
        """
        try:
            with self._database.transaction() as session:
                row = self._offsets.rows(session, [key]).get(key)
                known = self._offsets.position(key, row)
                if known is None:
                    self._offsets.store(session, key, row, position)
        except OffsetsMovedError:  # another consumer has stored it at the same time
            known = self.positions([key])[key]
            if known is None:
                raise
        return position if known is None else known

    # ---- the transaction -------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, batch: Batch) -> Iterator[SqlTransaction[Batch]]:
        """Run one transaction over records of `poll`, a TopicBatch, or several of `poll_arrow`, in
        the order in which they came. The block applies `tx.records` with `tx.cursor` or
        `tx.connection`, and does not commit. At its end the offsets move, and all is committed. A
        block that raises is rolled back. Then handle the same batch again, or call `seek`.

        Raises OffsetsMovedError (another consumer has applied them meanwhile), InvalidRequestError
        (the batch begins after the stored offset), and what the driver raises. After an error of
        the commit itself the outcome is unknown, and `seek` finds out.
        """
        spans, gaps = spans_of(batch)
        self._learn_ids_of(spans)
        try:
            with self._database.transaction() as session:
                rows = self._offsets.rows(session, list(spans))
                starts = {
                    key: position
                    for key in spans
                    if (position := self._offsets.position(key, rows.get(key))) is not None
                }
                self._refuse_holes(spans, starts)
                self._refuse_passed(batch, starts)
                new, skipped = without_applied(batch, starts)
                session.watch()
                with session.cursor() as cursor:
                    yield SqlTransaction(session.connection, cursor, new, skipped)
                session.refuse_ended()
                for key in sorted(spans):
                    if spans[key].last >= starts.get(key, 0):
                        self._offsets.store(session, key, rows.get(key), spans[key].last + 1)
                session.end_watch()
        except BaseException:
            for key, span in spans.items():
                self._failed_at[key] = min(span.first, self._failed_at.get(key, span.first))
            raise
        for key, span in spans.items():
            self._note_gaps(key, span, starts.get(key), gaps.get(key, ()))
            self._led_to[key] = max(span.last + 1, starts.get(key, 0))
            self._failed_at.pop(key, None)

    def _refuse_holes(
        self, spans: Mapping[TopicPartition, Span], starts: Mapping[TopicPartition, int]
    ) -> None:
        """Raise InvalidRequestError for a span that begins after the stored offset, unless this
        sink led the consumer there.
        """
        for key, start in starts.items():
            first = spans[key].first
            if first > start and (
                self._led_to.get(key) != start or first > self._failed_at.get(key, first)
            ):
                raise InvalidRequestError(
                    f"records of {key.topic}-{key.partition} are applied up to offset {start}, "
                    f"and this batch begins at {first}: those between would be "
                    "missed. Call seek(consumer): before the first poll, in "
                    "on_partitions_assigned, and when a transaction has failed"
                )

    def _refuse_passed(self, batch: Any, starts: Mapping[TopicPartition, int]) -> None:
        """Raise InvalidRequestError for a record below the stored offset that no transaction of
        this sink had.
        """
        if not any(self._passed.values()):
            return
        for item in batch if isinstance(batch, (list, tuple)) else [batch]:
            passed = self._passed.get(TopicPartition(item.topic, item.partition))
            start = starts.get(TopicPartition(item.topic, item.partition), 0)
            if not passed:
                continue
            for offset in [item.offset] if isinstance(item, Record) else item.offsets.to_pylist():
                if offset < start and any(gap.first <= offset <= gap.last for gap in passed):
                    raise InvalidRequestError(
                        f"offset {offset} of {item.topic}-{item.partition} was left out of an "
                        f"earlier transaction, which has moved the offset to {start}: "
                        "give all records of a partition in the order in which poll() returned "
                        "them, and leave out in the block what you do not "
                        f"want. To apply it now, write move({{TopicPartition({str(item.topic)!r}, "
                        f"{item.partition}): {offset}}}): what follows is applied again"
                    )

    def _note_gaps(
        self, key: TopicPartition, span: Span, start: int | None, gaps: Sequence[Span]
    ) -> None:
        """Note the gaps of a committed span, and the one before it."""
        known = self._passed.setdefault(key, deque(maxlen=GAPS_MAX))
        if start is not None and start < span.first:
            known.append(Span(start, span.first - 1))
        known.extend(gap for gap in gaps if gap.last >= (start or 0))


class _SinkListener(RebalanceListener):
    """Seeks assigned partitions to their stored offsets, and forgets revoked ones."""

    def __init__(self, sink: SqlSink, seek: Callable[[list[TopicPartition]], Any]) -> None:
        self._sink = sink
        self._seek = seek

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> Any:
        """Seek to the first records that are not applied."""
        return self._seek(assigned)

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        """Forget the partitions. There is nothing to commit, since stored offsets are always right.

        A transaction that still runs is rolled back if another member has gone on meanwhile.
        """
        self._sink.forget(revoked)
