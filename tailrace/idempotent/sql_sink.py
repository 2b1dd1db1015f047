"""Exactly-once effects in a SQL database: the offsets are stored in the transaction of the results.

    sink = SqlSink(sqlite3.connect("totals.db"), "billing")
    with tailrace.Consumer("orders", bootstrap=...) as consumer:
        sink.seek(consumer)
        while records := consumer.poll(timeout_ms=1000):
            with sink.transaction(records) as tx:
                for record in tx.records:
                    tx.cursor.execute("INSERT INTO sales VALUES (?, ?)", (record.key, record.value))

The table has a row for each partition of a group: the offset of the first record that is not
applied. Method: Kafka's "storing offsets outside Kafka" (KafkaConsumer's documentation), with the
compare of an optimistic lock.

Owner: a SqlSink and its connection are one thread's. The rows are everyone's who has the group's
    name.
Invariants: a row moves only forward, only together with the effects of all records before it, and
only from the value that the transaction has read: of two transactions over the same records one
commits, the other is rolled back with OffsetsMovedError. No record is passed over: a batch that
begins behind the stored offset is refused unless this sink has led the consumer there, and a record
that an earlier transaction of this sink has left out is refused: all records of a partition come in
the order in which they were read. A topic that is deleted and made again is another: its rows are
told by its id.
Crash: before the commit neither effects nor offsets are there, after it both; the next `seek` finds
    which.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar

from tailrace.batch.topic_batch import TopicBatch
from tailrace.core.errors import (
    FencedMemberError,
    InvalidRequestError,
    InvalidSettingError,
    OffsetOutOfRangeError,
)
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.core.validation import by_partition, partition_list, whole
from tailrace.group.rebalance_listener import RebalanceListener
from tailrace.idempotent.dbapi import Database, Session, identifier, is_integrity_error

_COLUMNS = """
    group_name VARCHAR(249) NOT NULL, topic VARCHAR(249) NOT NULL, partition_number INTEGER NOT NULL,
    next_offset BIGINT NOT NULL, topic_id VARCHAR(32) NOT NULL, PRIMARY KEY (group_name, topic, partition_number)
"""  # noqa: E501
GAPS_MAX = 1_000
_AT_ONCE = 500
"""Partitions in one query: a bound of some databases' parameters."""

Batch = TypeVar("Batch", bound="Sequence[Record] | TopicBatch | Sequence[TopicBatch]")


class OffsetsMovedError(FencedMemberError):
    """Another consumer of the group has applied these records meanwhile; this transaction was
    rolled back.
    """

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail)
        self.advice = (
            "Nothing of this transaction is there: call seek(consumer) and go on with "
            "the next poll."
        )


class SqlTransaction(Generic[Batch]):
    """What the block of `SqlSink.transaction` works with."""

    def __init__(self, connection: Any, cursor: Any, records: Batch, skipped: int) -> None:
        self.connection = connection
        """The connection that the transaction is on: the caller's, or the engine's (of
        SQLAlchemy).
        """
        self.cursor = cursor
        """A cursor in it; with SQLAlchemy the connection."""
        self.records = records
        """What was given, of the same kind, less what was applied before."""
        self.skipped = skipped
        """How many records were applied before."""


class _Row(NamedTuple):
    next_offset: int
    topic_id: str


class _Span(NamedTuple):
    first: int
    last: int


class SqlSink:
    """Moves a group's offsets and the caller's results in one transaction. For one thread at a
    time.
    """

    def __init__(
        self,
        connection: Any,
        group: str,
        *,
        table: str = "tailrace_offsets",
        paramstyle: str | None = None,
    ) -> None:
        """`connection`: of DB-API 2.0 without an open transaction, or an engine or connection of
        SQLAlchemy. `group`: whose offsets; consumers that share the work share the name. `table`:
        made where it is missing. `paramstyle`: of a driver whose module does not tell.

        Raises InvalidSettingError, and what the driver raises.
        """
        if not isinstance(group, str) or not 1 <= len(group) <= 249:
            raise InvalidSettingError(f"group is {group!r:.100}; it takes 1 to 249 characters")
        self._database = Database(connection, paramstyle)
        self._group = group
        self._table = identifier("table", table, 2)
        self._topic_ids: dict[str, str] = {}
        self._led_to: dict[TopicPartition, int] = {}
        """Where the consumer that this sink reads from stands: it comes from there, so a hole
        behind it is the log's own.
        """
        self._failed_at: dict[TopicPartition, int] = {}
        """Where the first batch began that was rolled back and has not come again."""
        self._passed: dict[TopicPartition, deque[_Span]] = {}
        """Offsets between those of committed batches, the last GAPS_MAX spans of each partition:
        the log's own holes, or records that were left out.
        """
        self._database.make_table(self._table, _COLUMNS)

    # ---- positions -------------------------------------------------------------------------------

    def positions(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int | None]:
        """The offset of the first record of each partition that is not applied; None: the group has
        none. Raises InvalidRequestError.
        """
        keys = partition_list(partitions)
        with self._database.transaction() as session:
            rows = self._rows(session, keys)
        return {key: self._position(key, rows.get(key)) for key in keys}

    def seek(
        self, consumer: Any, partitions: Sequence[TopicPartition] | None = None
    ) -> dict[TopicPartition, int]:
        """Let a `tailrace.Consumer` go on behind what is applied: after `assign`, in
        `on_partitions_assigned`, and after OffsetsMovedError. `partitions`: all that are assigned,
        unless given. A partition without an offset begins where the consumer would, and that is
        stored.

        Raises OffsetOutOfRangeError when a log ends before what was applied of it;
        InvalidRequestError; what the consumer and the driver raise.
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
        """`seek` for a `tailrace.aio.AsyncConsumer`. The sink's own statements hold the event
        loop.
        """
        steps, answer = self._seeking(consumer, partitions), None
        while True:
            try:
                answer = await steps.send(answer)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    def _seeking(
        self, consumer: Any, partitions: Sequence[TopicPartition] | None
    ) -> Generator[Any, Any, dict[TopicPartition, int]]:
        """The steps of a seek: what the consumer's methods return is yielded, and what comes of it
        is sent back.
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
        """Set offsets by hand, backwards too: records from there on are applied (again). Raises
        InvalidRequestError.
        """
        requested = {
            key: whole("an offset", offset, 0)
            for key, offset in by_partition(
                "positions", positions, "{TopicPartition(topic, 0): 17}"
            ).items()
        }
        with self._database.transaction() as session:
            rows = self._rows(session, list(requested))
            for key, offset in sorted(requested.items()):
                if rows.get(key) is None or rows[key].next_offset != offset:
                    self._store(session, key, rows.get(key), offset)
        self._led_to = {key: offset for key, offset in self._led_to.items() if key not in requested}
        self._passed = {key: gaps for key, gaps in self._passed.items() if key not in requested}

    def listener(self, consumer: Any) -> RebalanceListener:
        """For `consumer.subscribe([...], listener=sink.listener(consumer))`, of an AsyncConsumer
        too: each partition that is assigned goes on behind what is applied.
        """
        is_async = inspect.iscoroutinefunction(getattr(consumer, "seek", None))
        return _SinkListener(self, partial(self.seek_async if is_async else self.seek, consumer))

    def forget(self, partitions: Sequence[TopicPartition]) -> None:
        """These are no longer this consumer's: the next time `seek` is to lead to them. The stored
        offsets stay.
        """
        for key in partition_list(partitions):
            self._led_to.pop(key, None)

    def _learn_ids(self, consumer: Any, topics: set[str]) -> None:
        """A topic that is deleted and made again has another id, and none of its records were
        applied.
        """
        plain = getattr(consumer, "_consumer", consumer)  # of an AsyncConsumer
        cursors = plain._fetch_loop.cursors
        self._topic_ids.update(
            {
                key.topic: cursor.info.topic_id.hex()
                for key, cursor in cursors.items()
                if key.topic in topics
            }
        )

    def _learn_ids_of(self, keys: Iterable[TopicPartition]) -> None:
        """The same, of records that a consumer has read."""
        for key in keys:
            topic_id = getattr(key.topic, "topic_id", b"").hex()
            if topic_id and self._topic_ids.get(key.topic) != topic_id:
                if key.topic in self._topic_ids:  # what is known of it is about the one before
                    for known in (self._led_to, self._failed_at, self._passed):
                        for other in [one for one in known if one.topic == key.topic]:
                            del known[other]
                self._topic_ids[str(key.topic)] = topic_id

    def _begin_at(self, key: TopicPartition, position: int) -> int:
        """Store where a partition begins. Without this, a consumer that is killed before its first
        commit could begin further on the next time.
        """
        try:
            with self._database.transaction() as session:
                row = self._rows(session, [key]).get(key)
                known = self._position(key, row)
                if known is None:
                    self._store(session, key, row, position)
        except OffsetsMovedError:  # another one has begun it in this moment
            known = self.positions([key])[key]
            if known is None:
                raise
        return position if known is None else known

    # ---- the transaction -------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, batch: Batch) -> Iterator[SqlTransaction[Batch]]:
        """One transaction over records of `poll`, or a TopicBatch, or several of `poll_arrow`, in
        the order in which they came. The block applies `tx.records`, with `tx.cursor` or
        `tx.connection`, and does not commit; at its end the offsets move and all is committed. A
        block that raises is rolled back: handle the same batch again, or `seek`.

        Raises OffsetsMovedError (another consumer has applied them meanwhile), InvalidRequestError
        (the batch begins behind what is applied), and what the driver raises. An error of the
        commit itself leaves the outcome unknown: `seek` finds out.
        """
        spans, gaps = _spans(batch)
        self._learn_ids_of(spans)
        try:
            with self._database.transaction() as session:
                rows = self._rows(session, list(spans))
                starts = {
                    key: position
                    for key in spans
                    if (position := self._position(key, rows.get(key))) is not None
                }
                self._refuse_holes(spans, starts)
                self._refuse_passed(batch, starts)
                new, skipped = _without_applied(batch, starts)
                session.watch()
                with session.cursor() as cursor:
                    yield SqlTransaction(session.connection, cursor, new, skipped)
                session.refuse_ended()
                for key in sorted(spans):
                    if spans[key].last >= starts.get(key, 0):
                        self._store(session, key, rows.get(key), spans[key].last + 1)
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
        self, spans: Mapping[TopicPartition, _Span], starts: Mapping[TopicPartition, int]
    ) -> None:
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
        """Raises InvalidRequestError for a record behind which the offset has moved, although no
        transaction of this sink had it.
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
        self, key: TopicPartition, span: _Span, start: int | None, gaps: Sequence[_Span]
    ) -> None:
        known = self._passed.setdefault(key, deque(maxlen=GAPS_MAX))
        if start is not None and start < span.first:
            known.append(_Span(start, span.first - 1))
        known.extend(gap for gap in gaps if gap.last >= (start or 0))

    # ---- rows ------------------------------------------------------------------------------------

    def _position(self, key: TopicPartition, row: _Row | None) -> int | None:
        known = self._topic_ids.get(key.topic, "")
        if row is None or (known and row.topic_id and row.topic_id != known):
            return None
        return row.next_offset

    def _rows(self, session: Session, keys: Sequence[TopicPartition]) -> dict[TopicPartition, _Row]:
        numbers: dict[str, list[int]] = {}
        for key in keys:
            numbers.setdefault(key.topic, []).append(key.partition)
        result: dict[TopicPartition, _Row] = {}
        for topic, requested in numbers.items():
            for at in range(0, len(requested), _AT_ONCE):
                some = requested[at : at + _AT_ONCE]
                found = session.rows(
                    f"SELECT topic, partition_number, next_offset, topic_id FROM {self._table} "
                    "WHERE group_name = ? AND topic = ? "
                    f"AND partition_number IN ({', '.join('?' * len(some))})",
                    self._group, topic, *some,
                )  # fmt: skip
                # A database that compares without case finds others, too.
                result.update(
                    {
                        TopicPartition(topic, int(r[1])): _Row(int(r[2]), str(r[3]))
                        for r in found
                        if r[0] == topic
                    }
                )
        return result

    def _store(self, session: Session, key: TopicPartition, row: _Row | None, offset: int) -> None:
        """Move the row from what was read to `offset`. Raises OffsetsMovedError when it is not what
        was read.
        """
        topic_id = self._topic_ids.get(key.topic, row.topic_id if row is not None else "")
        try:
            if row is None:
                moved = session.change(
                    f"INSERT INTO {self._table} (group_name, topic, partition_number, "
                    "next_offset, topic_id) VALUES (?, ?, ?, ?, ?)",
                    self._group, key.topic, key.partition, offset, topic_id,
                )  # fmt: skip
            else:
                moved = session.change(
                    f"UPDATE {self._table} SET next_offset = ?, topic_id = ? "
                    "WHERE group_name = ? AND topic = ? AND partition_number = ? AND next_offset "
                    "= ? AND topic_id = ?",
                    offset, topic_id, self._group, key.topic, key.partition, row.next_offset,
                    row.topic_id,
                )  # fmt: skip
        except Exception as error:
            if not is_integrity_error(error):
                raise
            moved = 0
        if moved != 1:
            raise OffsetsMovedError(
                f"another consumer of {self._group!r} has moved the offset of "
                f"{key.topic}-{key.partition} meanwhile"
            )


class _SinkListener(RebalanceListener):
    """Partitions that come go on behind what the database has, those that go are forgotten."""

    def __init__(self, sink: SqlSink, seek: Callable[[list[TopicPartition]], Any]) -> None:
        self._sink = sink
        self._seek = seek

    def on_partitions_assigned(self, assigned: list[TopicPartition]) -> Any:
        """Start them behind what is applied."""
        return self._seek(assigned)

    def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        """The database's offsets are right at any moment: there is nothing to commit. Of lost ones
        a transaction that still runs is rolled back when another member has gone on meanwhile.
        """
        self._sink.forget(revoked)


def _parts(batch: Any) -> list[TopicBatch] | None:
    """The batches of columns that were given; None: they are records."""
    if isinstance(batch, TopicBatch):
        return [batch]
    return list(batch) if batch and isinstance(batch[0], TopicBatch) else None


def _spans(batch: Any) -> tuple[dict[TopicPartition, _Span], dict[TopicPartition, list[_Span]]]:
    """The first and last offset of each partition, and the spans between that the batch does not
    have.
    """
    if not isinstance(batch, (TopicBatch, list, tuple)):
        raise InvalidRequestError(
            f"a batch is {batch!r:.100}; it takes what poll() or poll_arrow() returned, or one "
            "TopicBatch"
        )
    parts = _parts(batch)
    spans: dict[TopicPartition, _Span] = {}
    gaps: dict[TopicPartition, list[_Span]] = {}
    for item in batch if parts is None else parts:  # type: ignore[union-attr]
        if not isinstance(item, Record if parts is None else TopicBatch):
            raise InvalidRequestError(
                f"a batch holds {item!r:.100}; it takes Records, or TopicBatches, and not both"
            )
        if hasattr(item, "delivery_count"):
            raise InvalidRequestError(
                "records of a share group come in no order, so there is no offset below which all "
                "are applied; ask DedupTable.first_time(record) of each"
            )
        key = TopicPartition(item.topic, item.partition)
        if isinstance(item, Record):
            first = last = item.offset
        elif len(item):
            first, last = item.offsets[0].as_py(), item.offsets[-1].as_py()
            if last - first >= len(item):
                gaps.setdefault(key, []).extend(_gaps_between(item.offsets.to_pylist()))
        else:
            continue
        known = spans.get(key)
        if known is not None and first <= known.last:
            raise InvalidRequestError(
                f"offset {first} of {key.topic}-{key.partition} comes behind {known.last}; give "
                "records in the order in which they came"
            )
        if known is not None and first > known.last + 1:
            gaps.setdefault(key, []).append(_Span(known.last + 1, first - 1))
        spans[key] = _Span(first if known is None else known.first, last)
    return spans, gaps


def _gaps_between(offsets: Sequence[int]) -> list[_Span]:
    return [
        _Span(one + 1, following - 1) for one, following in pairwise(offsets) if following > one + 1
    ]


def _without_applied(batch: Any, starts: Mapping[TopicPartition, int]) -> tuple[Any, int]:
    """What is left of a batch, of the same kind, and how many records are not."""
    parts = _parts(batch)
    if parts is None:
        new = [
            record
            for record in batch
            if record.offset >= starts.get(TopicPartition(record.topic, record.partition), 0)
        ]
        return new, len(batch) - len(new)
    left = [
        _tail(part, starts.get(TopicPartition(part.topic, part.partition), 0)) for part in parts
    ]
    skipped = sum(map(len, parts)) - sum(map(len, left))
    return (
        left[0] if isinstance(batch, TopicBatch) else [part for part in left if len(part)]
    ), skipped


def _tail(part: TopicBatch, start: int) -> TopicBatch:
    """The rows from offset `start` on."""
    gone = int(part.offsets.to_numpy().searchsorted(start))
    if gone == 0:
        return part
    rows, offsets = part.batch.slice(gone), part.offsets.slice(gone)
    return TopicBatch(
        part.topic,
        part.partition,
        offsets[0].as_py() if len(offsets) else start,
        rows,
        offsets,
        part.timestamp_us,
        part.timestamp_type,
    )
