"""What a consumer has taken out of its fetched batches and its program does not have yet: one
buffer for every way of reading.

    fetched batches --take_batch--> rows (columns) --gather--> records --deliver, or a loop's
                     step--> the program '-take_arrow-> batches --deliver_batches--> the program

A record is *delivered* when the call that carries it returns, or when a loop's body begins with it.
The one cursor of a consumer is the border between what is delivered and what lies here: `positions`
of commits, `position()`, lag and the end of a `with` block are derived from it, and nothing else
moves it. Whatever ends a call before it returns (an exception of a deserializer, a listener or a
signal's handler, a task's cancellation) leaves the border where it was: the next call delivers what
lies here.

Rows stay columns until they are wanted: a Record takes many times what a short row does, and is
made where it is used, in a warm cache.

Owner: one Consumer, one thread.
Invariants: of each partition, what lies here begins at the program's position and ends where its
    cursor goes on, without a gap. Delivery is one bytecode: a deletion from `records` or `batches`,
    or a step of `iterator`. No partition is kept in `_rows` without a row.
Crash: an exception between taking and keeping leaves `_open` or `_moving`: `recover` has the
    partition read again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import length_hint
from typing import NamedTuple

from tailrace.batch import arrow_codec as arrow_batch
from tailrace.batch.topic_batch import TopicBatch, topic_batch
from tailrace.client.serdes import failure_at
from tailrace.client.settings import ConsumerSettings
from tailrace.core.errors import TailraceError
from tailrace.core.records import Record
from tailrace.core.topic_partition import TopicPartition
from tailrace.fetch.fetcher import PartitionPosition, corrupt_error

RECORDS_AT_ONCE = 64
"""Records are made so many at a time where a program asks for fewer."""
Deserialize = Callable[[Sequence[Record]], tuple[list[Record], Exception | None]]
"""What the user's deserializers make of records, up to the first that one fails on; and that
failure.
"""


class _Decoded(NamedTuple):
    end: int
    """The offset behind its batch."""
    rows: arrow_batch.Rows


class _Batch(NamedTuple):
    batch: TopicBatch
    cursor: PartitionPosition


class _Move(NamedTuple):
    cursor: PartitionPosition
    offset: int | None
    is_users: bool
    """By the program's own word; else what was taken is read again."""


class RecordBuffer:
    """See the module's docstring."""

    def __init__(self, deserialize: Deserialize | None = None) -> None:
        """`deserialize`: None where records are handed out as they are stored."""
        self._deserialize = deserialize
        self._rows: dict[TopicPartition, _Decoded] = {}
        records: list[Record] = []
        self._made: tuple[list[Record], Iterator[Record]] = records, iter(records)
        """Records, of which those that the iterator has passed are delivered. A loop steps the
        iterator; every other call deletes what it delivers.
        """
        self._batches: list[_Batch] = []
        """Arrow batches that are not delivered."""
        self._cursors: Mapping[TopicPartition, PartitionPosition] = {}
        """Those of the assignment that what lies here is of."""
        self._owners: dict[TopicPartition, PartitionPosition] = {}
        """The cursors that something was taken from."""
        self._open: tuple[PartitionPosition, int | None] | None = None
        """The partition that is being taken from, and the position of its first row that may be
        between two places.
        """
        self._moving: tuple[_Move, ...] = ()
        """Partitions that are being moved; the steps may have been made in part."""
        self._last: tuple[Sequence[Record] | Sequence[TopicBatch], list[Record], int] = (
            (),
            records,
            0,
        )
        """By the last call but a loop's; and where the loops' iterator stood then."""
        self.batch_count = 0
        """Batches taken, since construction; `byte_count`: their bytes, `record_count`: their
        records that were made.
        """
        self.byte_count = 0
        self._was_paused = False
        """A partition was paused whose records were made ahead: from now on none are."""
        self.has_failure = False
        """A record behind those here could not be deserialized; waiting brings no more."""
        self.record_count = 0

    # ---- delivery ------------------------------------------------------------------------------

    @property
    def iterator(self) -> Iterator[Record]:
        """The records that lie here: each step delivers one."""
        return self._made[1]

    def __len__(self) -> int:
        """How many records could be delivered now."""
        return length_hint(self._made[1])

    def deliver(self, limit: int) -> list[Record]:
        """Up to `limit` records are the program's when this returns. To be called in the `return`
        of the call that carries them.
        """
        records, iterator = self._made
        count = length_hint(iterator)
        start = len(records) - count
        end = start + min(count, limit)
        found = records[start:end]
        self._last = found, records, start
        try:
            return found
        finally:
            del records[start:end]

    @property
    def has_batches(self) -> bool:
        """Whether Arrow batches could be delivered now."""
        return bool(self._batches)

    def deliver_batches(self) -> list[TopicBatch]:
        """As `deliver`, all Arrow batches that were taken."""
        batches, found = self._batches, [item.batch for item in self._batches]
        records, iterator = self._made
        self._last = found, records, len(records) - length_hint(iterator)
        try:
            return found
        finally:
            batches.clear()

    def all_processed(self) -> None:
        """The program asks for more: what was delivered is processed."""
        records, iterator = self._made
        self._last = (), records, len(records) - length_hint(iterator)

    def last_delivered(self) -> Sequence[Record] | Sequence[TopicBatch]:
        """What the program was given last, and has not asked for more since: by one call, or by one
        step of a loop.
        """
        found, records_then, at_then = self._last
        records, iterator = self._made
        at = len(records) - length_hint(iterator)
        return (
            found
            if at == 0 or (records is records_then and at == at_then)
            else records[at - 1 : at]
        )

    # ---- where the program stands --------------------------------------------------------------

    def first_offsets(self) -> dict[TopicPartition, int]:
        """Of each partition with something here: the offset of what is delivered next."""
        self.recover()
        found = {key: decoded.rows.next_offset for key, decoded in self._rows.items()}
        for batch, cursor in reversed(self._batches):
            found[cursor.key] = batch.base_offset
        records, iterator = self._made
        for record in reversed(records[len(records) - length_hint(iterator) :]):
            found[TopicPartition(record.topic, record.partition)] = record.offset
        return found

    def first_offset(self, key: TopicPartition) -> int | None:
        """The offset of the partition's next record here; None: there is none."""
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
        """Take the cursor's next batch, as rows; the partition has none here. What cannot be read
        is the cursor's error then.
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
        except TailraceError as error:
            cursor.drop_buffered(error)
            taken = None
        if taken is not None:
            header, batch, first_offset = taken
            try:
                rows = arrow_batch.to_rows(
                    key.topic, key.partition, first_offset, batch, header, cursor.info.typed
                )
            except ValueError as error:
                _stop_at(cursor, first_offset, header.next_offset, error)
            else:
                self._rows[key] = _Decoded(header.next_offset, rows)
                self.batch_count += 1
                self.byte_count += header.batch_length
        self._open = None

    def take_arrow(self, cursor: PartitionPosition, settings: ConsumerSettings) -> None:
        """Take the cursor's next batch, as it is. What cannot be read is the cursor's error
        then.
        """
        self._open = cursor, cursor.position
        self._owners[cursor.key] = cursor
        try:
            taken = cursor.take(settings)
        except TailraceError as error:
            cursor.drop_buffered(error)
            taken = None
        if taken is not None:
            self._batches.append(_Batch(topic_batch(cursor.key, *taken), cursor))
            self.batch_count += 1
            self.byte_count += taken[0].batch_length
            self.record_count += taken[1].num_rows
        self._open = None

    def gather(self, limit: int, cursors: Mapping[TopicPartition, PartitionPosition]) -> int:
        """Have `limit` records to offer if there are as many, none of a partition whose cursor is
        paused; returns how many there are. Where no deserializer sees it, some more are made at
        once: a record alone costs ten times as much.

        A batch that was trusted may turn out to contradict itself: that is the cursor's error then,
        and its position is before what cannot be read. Raises InvalidRecordError when a
        deserializer fails on what would be delivered next; what lies behind it is read again.
        """
        if self._open is not None or self._moving:
            self.recover()
        if cursors is not self._cursors:
            self.keep_assigned(cursors)
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
        else:  # the iterator may have come to its end
            records = []
            self._made = records, iter(records)
            self._last = (), records, 0  # before others are made: they take its place in memory
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
        """Make up to `count` of the partition's rows records. Returns how many."""
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

    # ---- taking back ---------------------------------------------------------------------------

    def recover(self) -> None:
        """A call has ended while it took from a partition, or moved some: what was taken and not
        kept is read again.
        """
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
                    start = batch.base_offset + len(batch)
            self._rows.pop(key, None)
            _reread(cursor, start)
            self._open = None
        if self._moving:
            self._move_all()

    def move(self, cursor: PartitionPosition, offset: int | None) -> None:
        """The program goes on elsewhere in this partition: forget what is here of it."""
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
        """What is here of these partitions, None: of all, is read again. `rows_too`: also where
        nothing but rows are here.
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
        """Each of these steps may be made twice."""
        for cursor, offset, is_users in self._moving:
            key = cursor.key
            self.drop(key)
            if is_users:
                cursor.seek(offset)
            else:
                _reread(cursor, offset)
        self._moving = ()

    def keep_assigned(self, cursors: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Forget what was taken from cursors that are not among these any more."""
        self.recover()
        self._cursors = cursors
        owners = self._owners
        gone = [key for key, cursor in owners.items() if cursors.get(key) is not cursor]
        for key in gone:
            self.drop(key)
        for key in gone:
            owners.pop(key, None)

    def drop(self, key: TopicPartition) -> None:
        """Forget what is here of a partition."""
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
    """Read on at `offset`; what was delivered last is of the same epoch as before."""
    epoch = cursor.taken_epoch
    cursor.seek(offset)
    cursor.taken_epoch = epoch


def _stop_at(cursor: PartitionPosition, offset: int, end: int, error: ValueError) -> None:
    cursor.seek(offset)
    cursor.error = corrupt_error(cursor.key, offset, end, f"it is inconsistent: {error}")
