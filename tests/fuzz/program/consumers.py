"""The consumers of a fuzzed program: each operation is a public call, made and held against the
model.

Owner: one ProgramRun (`tests.fuzz.program.run`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from functools import partial
from typing import Any

from tailrace import Consumer, RebalanceListener, Record, TopicPartition
from tailrace.aio import AsyncConsumer
from tailrace.core.errors import InvalidRecordError, InvalidRequestError, TailraceError
from tests.fuzz.program.calls import PATIENCE_S, Fuse, Planted
from tests.fuzz.program.clients import LOOPED, NOTHING, BodyError, Client
from tests.fuzz.program.loops import run_loop, run_loop_async
from tests.fuzz.program.model import Key, Reader, expect
from tests.fuzz.program.operations import Operation
from tests.fuzz.program.world import World

KINDS: dict[str, Any] = {"Consumer": Consumer, "AsyncConsumer": AsyncConsumer}


class Listener(RebalanceListener):
    """Tells the model what is assigned."""

    def __init__(self, owner: ConsumerClient) -> None:
        self._owner = owner
        self.fuse = Fuse()

    def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        self._owner.model.assigned(self._owner.keys(assigned))
        self.fuse.burn()

    def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        self._owner.is_revoked(self._owner.keys(revoked))
        self.fuse.burn()

    def on_partitions_lost(self, lost: Iterable[TopicPartition]) -> None:
        self._owner.model.dropped(self._owner.keys(lost))
        self.fuse.burn()


class ConsumerClient(Client):
    """A consumer."""

    def __init__(
        self,
        run: World,
        slot: str,
        kind: str,
        group: str | None,
        names: tuple[str, ...],
        settings: dict[str, Any],
        deserializes: bool,
    ) -> None:
        super().__init__(run, slot, kind)
        self._deserializer = Fuse()
        self._listener = Listener(self)
        self._records: list[Record] = []
        """Records that were read last."""
        self._is_handled = True
        self._warnings = 0
        self._group = group
        self._joins = group == "g"
        if deserializes:
            settings = {**settings, "value_deserializer": self._deserialize}
        self.model = Reader(
            slot,
            run.topics,
            run.offsets,
            group,
            group is not None and settings["enable_auto_commit"],
            settings["auto_commit_interval_ms"] == 0,
        )
        self.client = KINDS[kind](
            bootstrap=run.address,
            group_id=None if group is None else run.name(group),
            auto_offset_reset="earliest",
            **settings,
        )
        self.subscribe(Operation(slot, "subscribe"), names)

    def _deserialize(self, value: bytes) -> bytes:
        self._deserializer.burn()
        return value

    def keys(self, partitions: Iterable[TopicPartition]) -> list[Key]:
        """By the names of the program, without retry topics."""
        return [
            (self.run.short[key.topic], key.partition)
            for key in partitions
            if key.topic in self.run.short
        ]

    def _partition(self, key: Key) -> TopicPartition:
        return TopicPartition(self.run.name(key[0]), key[1])

    def allows(self, error: TailraceError) -> bool:
        return (
            super().allows(error)
            or (isinstance(error, InvalidRequestError) and not self.model.cursors)
            or (isinstance(error, InvalidRecordError) and self._deserializer.has_failed)
        )

    def is_revoked(self, keys: list[Key]) -> None:
        """The listener says so, behind the commit of what was delivered."""
        self.model.revoked(keys, is_certain=self._is_certain(), is_handled=self._is_handled)

    def _is_certain(self) -> bool:
        """True if an unreported commit took place: no warning was logged."""
        return self.run.warnings == self._warnings and not self.was_cut_off

    def make(
        self, operation: Operation, call: Callable[[], Any], *, patience_s: float | None = None
    ) -> Any:
        self._warnings = self.run.warnings
        result = super().make(operation, call, patience_s=patience_s)
        if self._joins and self.is_open and (self.was_cut_off or self.error is not None):
            self._look_at_assignment()
        return result

    def _look_at_assignment(self) -> None:
        """A call was cut off: the listener may not have been told of what it has given up."""
        assignment = Operation(self.slot, "assignment")
        self.run.calls.is_async = self.is_async
        found = set(self.keys(self.run.calls.make(assignment, self.client.assignment)))
        gone = [key for key in self.model.cursors if key not in found]
        self.model.revoked(gone, is_certain=False)
        self.model.assigned(found - self.model.cursors.keys())

    # ---- reading -------------------------------------------------------------------------------

    def _read(
        self,
        operation: Operation,
        call: Callable[[], Any],
        *,
        patience_s: float | None = None,
    ) -> None:
        model, last = self.model, self.model.last
        self._deserializer.has_failed = False
        model.asks()
        found = self.make(operation, call, patience_s=patience_s)
        if found is not NOTHING:
            if found is not LOOPED:
                self._take(found)
            return
        model.may_commit()
        if self.was_cut_off and not model.last:
            model.last = {key: offset for key, offset in last.items() if key in model.cursors}
        model.may_be_processed = not isinstance(self.error, BodyError)
        if isinstance(self.error, InvalidRecordError):
            self._check_failure(self.error)

    def _check_failure(self, error: InvalidRecordError) -> None:
        """A deserializer has failed: on the record that is next."""
        assert error.key is not None
        [key] = self.keys([error.key])
        expect(
            key in self.model.cursors and error.first_offset in self.model.offsets_of(key),
            f"{self.slot}: the failure is not at the next record: {error}",
        )

    def _take(self, records: list[Any]) -> None:
        """Records, or batches of them, were delivered by one call."""
        rows: list[tuple[Key, bytes, int]] = []
        for item in records:
            key = self.run.short[str(item.topic)], item.partition
            topic_id = item.topic.topic_id
            if isinstance(item, Record):
                offsets, values = [item.offset], [item.value]
                self._records = [*self._records, item][-8:]
            else:
                offsets = item.offsets.to_pylist()
                values = item.batch.column("value").to_pylist()
            for offset, value in zip(offsets, values, strict=True):
                self.run.see(key, topic_id, offset, value, self.slot)
                rows.append((key, topic_id, offset))
        self.model.delivered(rows)

    def poll(self, operation: Operation, timeout_ms: int, count: int | None) -> None:
        """`poll`."""
        self._read(operation, lambda: self.client.poll(timeout_ms, count))

    def consume(self, operation: Operation, count: int, timeout_s: float) -> None:
        """`consume`."""
        self._read(operation, lambda: self.client.consume(count, timeout_s))

    def poll_arrow(self, operation: Operation, timeout_ms: int) -> None:
        """`poll_arrow`."""
        self._read(operation, lambda: self.client.poll_arrow(timeout_ms))

    def getone(self, operation: Operation) -> None:
        """`getone`."""

        async def one() -> list[Record]:
            return [await self.client.getone()]

        self._read(operation, one, patience_s=PATIENCE_S)

    def loop(self, operation: Operation, count: int, body: str, end: str) -> None:
        """`for record in consumer`, left by `break` or by an exception of its body."""
        call, turn = run_loop_async if self.is_async else run_loop, partial(self._turn, body)
        self._read(operation, lambda: call(self.client, count, end, turn), patience_s=PATIENCE_S)

    def _in_loop(self, record: Record) -> None:
        """The body begins. The loop has asked for this record, and perhaps for the next ones."""
        self.model.asks()
        self._take([record])

    def _turn(self, body: str, record: Record) -> Generator[Any, Any, None]:
        self._in_loop(record)
        if body == "poll":
            self.model.asks()
            self._take((yield self.client.poll(0, 2)))
        elif body == "commit" and self._group is not None:
            self.model.commits(None, is_certain=False)
            yield self.client.commit()
            self.model.commits(None, is_certain=True)
        elif body == "positions":
            self._check_positions((yield self.client.positions()))

    # ---- positions -----------------------------------------------------------------------------

    def _check_positions(self, positions: dict[TopicPartition, int]) -> None:
        self.model.is_at(
            {
                (self.run.short[key.topic], key.partition): offset
                for key, offset in positions.items()
                if key.topic in self.run.short
            }
        )

    def _key(self, number: int) -> Key | None:
        keys = sorted(self.model.cursors)
        return keys[number % len(keys)] if keys else None

    def positions(self, operation: Operation) -> None:
        """`positions`."""
        found = self.make(operation, self.client.positions)
        if found is not NOTHING:
            self._check_positions(found)

    def position(self, operation: Operation, number: int) -> None:
        """`position`."""
        key = self._key(number)
        if key is not None:
            found = self.make(operation, lambda: self.client.position(self._partition(key)))
            if found is not NOTHING:
                self.model.is_at({key: found})

    def lag(self, operation: Operation, number: int) -> None:
        """`lag`: from the position to the end."""
        key = self._key(number)
        if key is None or not self.run.is_current(self.model.cursors[key].topic_id):
            return
        least, most = self.run.ends(key)
        found = self.make(operation, lambda: self.client.lag(self._partition(key)))
        if found is NOTHING or key not in self.model.cursors:
            return
        positions = self.model.offsets_of(key)
        expect(
            least - max(positions) <= found <= most - min(positions),
            f"{operation}: {found} from {sorted(positions)} to an end of {least} to {most}",
        )

    def seek(self, operation: Operation, number: int, part: float) -> None:
        """`seek`, somewhere in the log."""
        key = self._key(number)
        if key is None or not self.run.is_current(self.model.cursors[key].topic_id):
            return
        offset = int(part * (self.run.ends(key)[0] + 1))
        if self.make(operation, lambda: self.client.seek(self._partition(key), offset)) is None:
            self.model.sought(key, offset)

    def seek_to_beginning(self, operation: Operation) -> None:
        """`seek_to_beginning`."""
        if self.model.cursors and self.make(operation, self.client.seek_to_beginning) is None:
            for key in self.model.cursors:
                self.model.sought(key, 0)

    def seek_to_end(self, operation: Operation) -> None:
        """`seek_to_end`; the end is where the position is then."""
        if not self.model.cursors or self.make(operation, self.client.seek_to_end) is not None:
            return
        for key, cursor in self.model.cursors.items():
            least, most = self.run.ends(key)
            call = partial(self.client.position, self._partition(key))
            found = self.make(Operation(self.slot, "position"), call)
            if found is not NOTHING and self.run.is_current(cursor.topic_id):
                expect(least <= found <= most, f"{operation}: the end is {found}, {least}")
            self.model.sought(key, found if found is not NOTHING else least)
            if found is NOTHING:
                cursor.offsets = set(range(least, most + 1))

    def pause(self, operation: Operation, number: int) -> None:
        """`pause`."""
        key = self._key(number)
        if key is not None:
            call = partial(self.client.pause, self._partition(key))
            if self.make(operation, call) is None:
                self.model.paused.add(key)

    def resume(self, operation: Operation, number: int) -> None:
        """`resume`."""
        key = self._key(number)
        if key is not None:
            call = partial(self.client.resume, self._partition(key))
            if self.make(operation, call) is None:
                self.model.paused.discard(key)

    # ---- committing ----------------------------------------------------------------------------

    def commit(self, operation: Operation) -> None:
        """`commit`."""
        if self._group is None:
            return
        found = self.make(operation, self.client.commit)
        self.model.commits(None, is_certain=found is not NOTHING)

    def commit_offsets(self, operation: Operation, number: int, part: float) -> None:
        """`commit`, of an offset that the program says."""
        key = self._key(number)
        if self._group is None or key is None:
            return
        if not self.run.is_current(self.model.cursors[key].topic_id):
            return
        offset = int(part * (self.run.ends(key)[0] + 1))
        found = self.make(operation, lambda: self.client.commit({self._partition(key): offset}))
        self.model.commits({key: offset}, is_certain=found is not NOTHING)

    def commit_record(self, operation: Operation, number: int) -> None:
        """`commit`, of a record that was read; perhaps of a topic that is deleted."""
        if self._group is None or not self._records:
            return
        record = self._records[number % len(self._records)]
        key = self.run.short[str(record.topic)], record.partition
        if key not in self.model.cursors:
            return
        found = self.make(operation, lambda: self.client.commit(record))
        if self.model.cursors[key].topic_id == record.topic_id:
            self.model.commits({key: record.offset + 1}, is_certain=found is not NOTHING)

    def commit_async(self, operation: Operation, calls_back: bool) -> None:
        """`commit_async`."""
        if self._group is None:
            return
        numbers: dict[Any, int] = {}

        def called(_offsets: Any, error: Exception | None) -> None:
            if error is None:
                for committed, number in numbers.items():
                    committed.confirmed(number)

        numbers.update(self.model.commits(None, is_certain=False))
        self.make(operation, lambda: self.client.commit_async(None, called if calls_back else None))

    def committed(self, operation: Operation) -> None:
        """`committed`."""
        if self._group is None:
            return
        for key, cursor in self.model.cursors.items():
            found = self.make(operation, partial(self.client.committed, self._partition(key)))
            if found is not NOTHING and self.run.is_current(cursor.topic_id):
                assert cursor.topic_id is not None
                allowed = self.model.committed(key, cursor.topic_id).now()
                expect((found or 0) in allowed, f"{operation} of {key}: {found}, not {allowed}")

    # ---- the group -----------------------------------------------------------------------------

    def subscribe(self, operation: Operation, names: tuple[str, ...]) -> None:
        """`subscribe`; `assign` for readers that are no members."""
        topics = [self.run.name(name) for name in names]
        if self._joins:
            self.make(operation, lambda: self.client.subscribe(topics, listener=self._listener))
            return
        keys = [(name, n) for name in names for n in range(self.run.partitions[name])]
        partitions = list(map(self._partition, keys))
        if self.make(operation, lambda: self.client.assign(partitions)) is None:
            kept = {
                key: cursor
                for key, cursor in self.model.cursors.items()
                if key in keys and self.run.is_current(cursor.topic_id)
            }
            formers = dict(self.model.cursors)
            self.model.revoked(
                [key for key in self.model.cursors if key not in kept],
                is_certain=self._is_certain(),
            )
            self.model.assigned([key for key in keys if key not in kept], formers)
        else:
            self.model.may_be_processed = True

    def unsubscribe(self, operation: Operation) -> None:
        """`unsubscribe`: commits as `close` does."""
        self.make(operation, self.client.unsubscribe)
        if not self.was_cut_off:
            self.model.revoked(list(self.model.cursors), is_certain=self._is_certain())
        elif not self._joins:
            self._look_at_assignment()

    def fail_deserializer(self, _operation: Operation, count: int, is_error: bool) -> None:
        """Have the deserializer raise."""
        self._deserializer.arm(count, is_end=not is_error)

    def fail_listener(self, _operation: Operation, count: int, is_error: bool) -> None:
        """Have the listener raise."""
        self._listener.fuse.arm(count, is_end=not is_error)

    def close(self, operation: Operation, how: str) -> None:
        """The end of the block."""
        self._is_handled = how != "exception"
        if how == "without commit":
            self.model.commits_itself = False
        self.is_open = False
        self.make(operation, lambda: self._close(how))
        is_certain = self._is_certain() and self.error is None
        if self.was_cut_off:
            # The first may have ended before it began.
            once_more = how if how == "without commit" else "close"
            self.make(Operation(self.slot, "close"), lambda: self._close(once_more))
            self.was_cut_off = True
        self.model.closed(is_certain=is_certain, is_handled=self._is_handled)

    def _close(self, how: str) -> Any:
        error: tuple[Any, ...] = (None, None, None)
        if how == "exception":
            error = (Planted, Planted(), None)
        if how in ("block", "exception"):
            return self.client.__aexit__(*error) if self.is_async else self.client.__exit__(*error)
        return self.client.close(autocommit=how != "without commit")
