"""Record buffer of a consumer: the records taken from fetched batches and not delivered yet.

    fetched    --take_batch--> rows (columns) --gather--> records --deliver, or a loop--> program
    batches    --take_arrow--> Arrow batches ----------------------deliver_batches------> program

A record is *delivered* when the call that carries it returns, or when the body of a loop begins
with it. The consumer's position is the border between delivered records and this buffer. Commits,
`position()`, lag and the end of a `with` block derive from it, and nothing else moves it. A call
that ends by an exception (of a deserializer, a listener, a signal handler, or by a task's
cancellation) leaves it where it was, and the next call delivers the records.

Rows stay columns until they are needed: a Record takes many times the memory of a short row, and is
made where it is used.

Owner: one Consumer, one thread.

Invariants:
- The buffered records of a partition begin at the program's position, and end where its cursor
  goes on, but for offsets without a record.
- A delivery is one bytecode: a deletion from `records` or `batches`, an assignment that puts an
  empty list in the place of `records`, or a step of `iterator`.
- Each partition in `_rows` has at least one row.

Crash: an exception while records are being moved leaves `_open` or `_moving` set. `recover` then
has the partition fetched again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import length_hint
from typing import NamedTuple

from tailrace.batch import arrow_codec
from tailrace.batch.topic_batch import TopicBatch, topic_batch
from tailrace.client.config.settings import ConsumerSettings
from tailrace.client.records.serdes import failure_at
from tailrace.core.errors import TailraceError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.partition_position import PartitionPosition
from tailrace.fetch.read_errors import UnknownSchemaError, corrupt_error

RECORDS_AT_ONCE = 64
"""The number of records that are made at a time when a program asks for fewer."""
Deserialize = Callable[[Sequence[Record]], tuple[list[Record], Exception | None]]
"""Deserializes records up to the first failure: (records, that failure or None)."""


class _Decoded(NamedTuple):
    end: int
    """The offset after its batch."""
    rows: arrow_codec.Rows


class _Batch(NamedTuple):
    batch: TopicBatch
    cursor: PartitionPosition


class _Move(NamedTuple):
    cursor: PartitionPosition
    offset: int | None
    is_users: bool
    """True for a seek of the program; otherwise the records are fetched again."""


class RecordBuffer:
    """The buffer of one consumer, for every way of reading."""

    def __init__(self, deserialize: Deserialize | None = None, *, notes_last: bool = True) -> None:
        """`deserialize` is None if records are delivered as stored. With `notes_last` the buffer
        keeps the records delivered last, for `last_delivered`.
        """
        self._deserialize = deserialize
        self._notes_last = notes_last
        self._rows: dict[TopicPartition, _Decoded] = {}
        records: list[Record] = []
        self._made: tuple[list[Record], Iterator[Record]] = records, iter(records)
        """Records, and an iterator over them: those that it has passed are delivered. A loop steps
        the iterator; every other call deletes what it delivers.
        """
        self._batches: list[_Batch] = []
        """Arrow batches that are not delivered."""
        self._cursors: Mapping[TopicPartition, PartitionPosition] = {}
        """The cursors of the current assignment."""
        self._owners: dict[TopicPartition, PartitionPosition] = {}
        """The cursors that records or batches were taken from."""
        self._open: tuple[PartitionPosition, int | None] | None = None
        """The partition that records are being taken from, and the position of its first row that
        may be in transit.
        """
        self._moving: tuple[_Move, ...] = ()
        """The partitions that are being moved. Some of the moves may be done."""
        self._last: tuple[Sequence[Record] | Sequence[TopicBatch], list[Record], int] = (
            (),
            records,
            0,
        )
        """The records delivered by the last call (not of a loop), and where the loops' iterator was
        then.
        """
        self.batch_count = 0
        """Batches taken since construction. `byte_count` is their size, `record_count` the number
        of records made of them.
        """
        self.byte_count = 0
        self._was_paused = False
        """True once a partition was paused whose records were made ahead. Then no more are
        made ahead.
        """
        self.has_failure = False
        """True if a record after the buffered ones could not be deserialized. Waiting brings
        no more.
        """
        self.record_count = 0

    # ---- delivery ------------------------------------------------------------------------------

    @property
    def iterator(self) -> Iterator[Record]:
        """The buffered records: each step delivers one."""
        return self._made[1]

    def __len__(self) -> int:
        """The number of records that can be delivered now."""
        return length_hint(self._made[1])

    def deliver(self, limit: int) -> list[Record]:
        """Deliver up to `limit` records. Call it in the `return` of the call that carries them."""
        records, iterator = self._made
        count = length_hint(iterator)
        start = len(records) - count
        if not start and count <= limit:  # all: the list itself, without a copy
            following: list[Record] = []
            made = following, iter(following)
            self._last = records if self._notes_last else (), following, 0
            try:
                return records
            finally:
                self._made = made
        end = start + min(count, limit)
        found = records[start:end]
        if self._notes_last:
            self._last = found, records, start
        try:
            return found
        finally:
            del records[start:end]

    def first(self, limit: int) -> list[Record]:
        """Up to `limit` records that are delivered next. They stay buffered."""
        records, iterator = self._made
        start = len(records) - length_hint(iterator)
        return records[start : start + limit]

    def first_batches(self) -> list[TopicBatch]:
        """The Arrow batches that are delivered next. They stay buffered."""
        return [item.batch for item in self._batches]

    @property
    def has_batches(self) -> bool:
        """True if Arrow batches can be delivered now."""
        return bool(self._batches)

    def deliver_batches(self) -> list[TopicBatch]:
        """Deliver all buffered Arrow batches, as `deliver`."""
        batches, found = self._batches, [item.batch for item in self._batches]
        if self._notes_last:
            records, iterator = self._made
            self._last = found, records, len(records) - length_hint(iterator)
        try:
            return found
        finally:
            del batches[:]  # `clear` is a call, behind which a signal's handler may run

    def all_processed(self) -> None:
        """The program asks for more: all delivered records are processed."""
        records, iterator = self._made
        self._last = (), records, len(records) - length_hint(iterator)

    def last_delivered(self) -> Sequence[Record] | Sequence[TopicBatch]:
        """The records or batches delivered last and not processed: by one call, or by one step of a
        loop.
        """
        found, records_then, at_then = self._last
        records, iterator = self._made
        at = len(records) - length_hint(iterator)
        return (
            found
            if at == 0 or (records is records_then and at == at_then)
            else records[at - 1 : at]
        )

    # ---- positions -----------------------------------------------------------------------------

    def first_offsets(self) -> dict[TopicPartition, int]:
        """The offset of the next record to deliver, for each buffered partition."""
        self.recover()
        found = {key: decoded.rows.next_offset for key, decoded in self._rows.items()}
        for batch, cursor in reversed(self._batches):
            found[cursor.key] = batch.base_offset
        records, iterator = self._made
        for record in reversed(records[len(records) - length_hint(iterator) :]):
            found[TopicPartition(record.topic, record.partition)] = record.offset
        return found

    def first_offset(self, key: TopicPartition) -> int | None:
        """The offset of the partition's next buffered record; None: none is buffered."""
        self.recover()
        records, iterator = self._made
        count = length_hint(iterator)
        for record in records[len(records) - count :] if count else ():
            if record.partition == key.partition and record.topic == key.topic:
                return record.offset
        for batch, cursor in self._batches:
            if cursor.key == key:
                return batch.base_offset
        decoded = self._rows.get(key)
        return None if decoded is None else decoded.rows.next_offset

    # ---- taking --------------------------------------------------------------------------------

    def take_batch(self, cursor: PartitionPosition, settings: ConsumerSettings) -> None:
        """Take the cursor's next batch, as rows. The partition has no rows here. A batch that
        cannot be read sets the cursor's error.
        """
        self._open = cursor, cursor.position
        key = cursor.key
        self._owners[key] = cursor
        plain = cursor.receive_plain()
        if plain is not None:
            rows, end, byte_count = plain
            self._rows[key] = _Decoded(end, rows)
            self._open = None
            self.batch_count += 1
            self.byte_count += byte_count
            return
        try:
            taken = cursor.take(settings)
        except UnknownSchemaError:
            taken = None
        except TailraceError as error:
            cursor.drop_buffered(error)
            taken = None
        if taken is not None:
            header, batch, first_offset, offsets = taken
            typed = cursor.info.typed
            try:
                rows = arrow_codec.to_rows(
                    key.topic, key.partition, first_offset, batch, header, typed, offsets
                )
            except ValueError as error:
                _stop_at(cursor, first_offset, header.next_offset, error)
            else:
                self._rows[key] = _Decoded(header.next_offset, rows)
                self.batch_count += 1
                self.byte_count += header.batch_length
        self._open = None

    def take_arrow(self, cursor: PartitionPosition, settings: ConsumerSettings) -> None:
        """Take the cursor's next batch as an Arrow batch. A batch that cannot be read sets the
        cursor's error.
        """
        self._open = cursor, cursor.position
        self._owners[cursor.key] = cursor
        try:
            taken = cursor.take(settings)
        except UnknownSchemaError:
            taken = None
        except TailraceError as error:
            cursor.drop_buffered(error)
            taken = None
        if taken is not None:
            batch = topic_batch(
                cursor.key, *taken, is_typed=cursor.info.typed,
                schema_id=cursor.schema_id_of(taken, settings),
            )  # fmt: skip
            self._batches.append(_Batch(batch, cursor))
            self.batch_count += 1
            self.byte_count += taken.header.batch_length
            self.record_count += len(batch)
        self._open = None

    def gather(self, limit: int, cursors: Mapping[TopicPartition, PartitionPosition]) -> int:
        """Make `limit` records deliverable if there are as many, without paused partitions. Returns
        how many there are. Without a deserializer a few more are made at once, because a single
        record costs ten times as much.

        A trusted batch may turn out to be inconsistent. That sets the cursor's error, and its
        position stays before the unreadable records. Raises InvalidRecordError when a deserializer
        fails on the next record to deliver. The rows after it are fetched again.
        """
        if self._open is not None or self._moving:
            self.recover()
        self.follow(cursors)
        if self._batches:
            self.withdraw(cursors, [item.cursor.key for item in self._batches])
        records, iterator = self._made
        count = length_hint(iterator)
        if count:
            paused = [key for key, cursor in cursors.items() if cursor.is_paused]
            if paused:
                self._was_paused = True
                self.withdraw(cursors, paused, rows_too=False)
                count = length_hint(iterator)
        else:  # the iterator may be exhausted
            records = []
            self._made = records, iter(records)
            self._last = (), records, 0  # freed before others are made, which reuse its memory
        if count < limit and self._rows:
            if self._deserialize is None and not self._was_paused:
                limit = max(limit, RECORDS_AT_ONCE)
            for key in list(self._rows):
                cursor = cursors[key]
                if not cursor.is_paused:
                    count += self._make(cursor, records, limit - count, is_first=not count)
                    if count >= limit:
                        break
        return count

    def _make(
        self, cursor: PartitionPosition, records: list[Record], count: int, *, is_first: bool
    ) -> int:
        """Make up to `count` records from the partition's rows. Returns how many."""
        key = cursor.key
        end, rows = self._rows[key]
        self._open = cursor, rows.next_offset
        before = len(records)
        raw = records if self._deserialize is None else []
        try:
            rows.take(raw, count)
        except ValueError as error:
            del self._rows[key]
            _stop_at(cursor, rows.next_offset, end, error)
        if cursor.is_requested is not None:
            taken = raw[before:] if raw is records else raw
            taken = [record for record in taken if cursor.is_requested(record)]
            if raw is records:
                records[before:] = taken
            else:
                raw = taken
        if self._deserialize is not None:
            made, failure = self._deserialize(raw)
            records += made
            if failure is not None:
                self.recover()
                self.has_failure = True
                if is_first and not made:
                    raise failure_at(raw[0], failure) from failure
        if self._open is not None and not len(rows):
            self._rows.pop(key, None)
        self._open = None
        made_count = len(records) - before
        self.record_count += made_count
        return made_count

    # ---- discarding ----------------------------------------------------------------------------

    def recover(self) -> None:
        """Undo an interrupted call: records that were in transit are fetched again."""
        if self._open is not None:
            cursor, start = self._open
            records, iterator = self._made
            key = cursor.key
            for record in reversed(records[len(records) - length_hint(iterator) :]):
                if (
                    record.partition == key.partition
                    and record.topic == key.topic
                    and (start is None or record.offset >= start)
                ):
                    start = record.offset + 1
                    break
            for batch, its_cursor in self._batches:
                if its_cursor is cursor and (start is None or batch.base_offset >= start):
                    start = batch.next_offset
            self._rows.pop(key, None)
            _reread(cursor, start)
            self._open = None
        if self._moving:
            self._move_all()

    def move(self, cursor: PartitionPosition, offset: int | None) -> None:
        """Move the partition's position for the program, and discard its records here."""
        self.recover()
        self._moving = (_Move(cursor, offset, is_users=True),)
        self._move_all()

    def withdraw(
        self,
        cursors: Mapping[TopicPartition, PartitionPosition],
        keys: Collection[TopicPartition] | None = None,
        *,
        rows_too: bool = True,
    ) -> None:
        """Discard the records of these partitions (None: of all), and have them fetched again.
        Without `rows_too`, partitions with rows only are kept.
        """
        first = self.first_offsets()
        if not rows_too:
            first = {
                key: offset
                for key, offset in first.items()
                if key not in self._rows or self._rows[key].rows.next_offset != offset
            }
        self._moving = tuple(
            _Move(cursors[key], offset, is_users=False)
            for key, offset in first.items()
            if key in cursors and (keys is None or key in keys)
        )
        self._move_all()

    def _move_all(self) -> None:
        """Make the moves in `_moving`. Each may be repeated."""
        for cursor, offset, is_users in self._moving:
            key = cursor.key
            self.drop(key)
            if is_users:
                cursor.seek(offset)
            else:
                _reread(cursor, offset)
        self._moving = ()

    def follow(self, cursors: Mapping[TopicPartition, PartitionPosition]) -> None:
        """`keep_assigned`, if the assignment is another one: the call that made it may have been
        interrupted.
        """
        if cursors is not self._cursors:
            self.keep_assigned(cursors)

    def keep_assigned(self, cursors: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Discard the records of cursors that are no longer assigned."""
        self.recover()
        self._cursors = cursors
        owners = self._owners
        gone = [key for key, cursor in owners.items() if cursors.get(key) is not cursor]
        for key in gone:
            self.drop(key)
        for key in gone:
            owners.pop(key, None)

    def drop(self, key: TopicPartition) -> None:
        """Discard the records of a partition."""
        self._rows.pop(key, None)
        if self._batches:
            self._batches[:] = [item for item in self._batches if item.cursor.key != key]
        records, iterator = self._made
        count = length_hint(iterator)
        if count:
            topic, partition = key
            start = len(records) - count
            records[start:] = [
                one for one in records[start:] if one.partition != partition or one.topic != topic
            ]


def _reread(cursor: PartitionPosition, offset: int | None) -> None:
    """Move the cursor to `offset`, and keep the epoch of the batch taken last."""
    epoch = cursor.taken_epoch
    cursor.seek(offset)
    cursor.taken_epoch = epoch


def _stop_at(cursor: PartitionPosition, offset: int, end: int, error: ValueError) -> None:
    cursor.seek(offset)
    cursor.error = corrupt_error(cursor.key, offset, end, f"it is inconsistent: {error}")
